"""Check every method on a GPU: train two tasks, resume, evaluate and serve.

Command: `python -m benchmarks.gpu [--methods NAME ...]`. With `--speed` it runs
`benchmarks/gpu_speed.py`, with `--job` it runs `benchmarks/gpu_job.py`. It takes at most 5 minutes
on one GPU with 16 CPU cores. It does not need ray, mlflow or webdataset, generates its images, and
uses only its temporary folder.

Results are compared with those of the CPU; `benchmarks/gpu_checks.py` describes the comparisons and
their tolerances. `--device cpu` runs the same checks without a GPU, as a rehearsal.

The output is one line per failure (method, scenario, precision, stage, message, and the line of
this project that raised the error) and then a table. The exit code is 1 if anything failed, and 2
if the checks could not start.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks import gpu_pool
from benchmarks.gpu_cases import Case, Failure, prepare
from benchmarks.gpu_checks import check_case
from workers.data import accelerator
from workers.errors import UserError
from workers.methods import METHODS

BF16 = ("finetune", "hat", "icarl", "meat", "packnet", "toast")  # also tested in bf16
LIMIT_S = 120.0
MAX_JOBS = 12  # each job has its own CUDA context
COLUMNS = {
    "masks": "masks",
    "tensors": "tensors",
    "first loss": "first loss",
    "last loss": "last loss",
    "decisions": "decisions",
    "probabilities": "served",
    "resumed": "resumed",
}
LEGEND = """\
masks: = and a digest of their packed bits where device and CPU agree, else the share that differs
tensors, losses: largest relative difference; decisions: share; served: difference of a probability
resumed: `bits` where an interrupted run ends with the same bytes, else the relative difference"""


@dataclass
class Row:
    """Results of one case."""

    failures: list[Failure] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    stage: str = "start"  # the stage that started last


def list_cases(names: list[str]) -> list[Case]:
    """Return a case for each scenario of each method, and bf16 cases for a few methods.

    Raises:
        UserError: If a method does not exist.
    """
    for name in names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, 1)
            hint = f"there are: {', '.join(METHODS)}"
            if close:
                hint = f"did you mean {close[0]!r}?"
            raise UserError(f"--methods names {name!r}, which does not exist; {hint}")
    cases = []
    for name in names:
        cases += [Case(name, scenario) for scenario in sorted(METHODS[name].scenarios - {"domain"})]
    for name in names:
        if name in BF16:
            cases.append(Case(name, max(METHODS[name].scenarios - {"domain"}), "bf16"))
    return cases


def gpu_name() -> str:
    """Return the name of the GPU, or "" if torch cannot use one.

    Do not call this in the process that forks: its forked processes could not use CUDA any more.
    """
    if not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name()


def find_device(requested: str | None) -> tuple[str, str]:
    """Return the device and its description.

    Raises:
        UserError: If there is no GPU and the CPU was not requested.
    """
    processor = f"{platform.machine()}, {os.cpu_count()} cores"
    if requested == "cpu":
        return "cpu", f"the CPU ({processor}), a rehearsal"
    name = gpu_pool.ask(gpu_name)
    if not name:
        raise UserError(
            "there is no GPU that torch can use; run it on a machine with one, or rehearse it with "
            "--device cpu"
        )
    return "cuda", f"{name} beside {processor}, CUDA {torch.version.cuda}"


def run(cases: list[Case], device: str, jobs: int, limit_s: float) -> dict[Case, Row]:
    """Check all cases in `jobs` processes. Print a line per failure and per passed case."""
    rows = {case: Row() for case in cases}
    with tempfile.TemporaryDirectory(prefix="accrete-gpu-") as folder:
        setup = prepare(Path(folder), device)
        for message in gpu_pool.run(cases, partial(check_case, setup), jobs, limit_s):
            row = rows[message.case]
            match message.kind:
                case "stage":
                    row.stage = message.value
                case "measured":
                    row.measured = message.value
                case "failure":
                    add_failure(message.case, row, message.value)
                case "ended":
                    add_failure(message.case, row, Failure(row.stage, message.value))
                case "done":
                    row.seconds = message.value
                    if not row.failures:
                        print(f"ok    {message.case}, {row.seconds:.1f} s", flush=True)
    return rows


def add_failure(case: Case, row: Row, failure: Failure) -> None:
    """Print a failure and add it to the case's row."""
    row.failures.append(failure)
    line = f"FAIL  {case}, {failure.stage}: {failure.sentence}"
    if failure.frame:
        line += f" [{failure.frame}]"
    print(line, flush=True)


def format_table(rows: dict[Case, Row]) -> str:
    """Return the table of results, with a line per case."""
    heading = ["method", "scenario", "precision", "result", *COLUMNS.values(), "seconds"]
    lines = [heading]
    for case, row in rows.items():
        result = f"{len(row.failures)} failed" if row.failures else "ok"
        measured = [row.measured.get(name) or "-" for name in COLUMNS]
        lines.append(
            [case.method, case.scenario, case.precision, result, *measured, f"{row.seconds:.1f}"]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="correctness of every method on a GPU, against the CPU",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda; cpu rehearses it without a GPU"
    )
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), metavar="NAME", help="default: all"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, MAX_JOBS),
        metavar="N",
        help=f"processes side by side (default: one per core, at most {MAX_JOBS})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"of one case, then it is stopped (default: {LIMIT_S:g})",
    )
    parser.add_argument(
        "--speed", action="store_true", help="measure speed instead, for at most 5 minutes"
    )
    parser.add_argument(
        "--job",
        action="store_true",
        help="run a whole job instead, through Ray Train and MLflow, for at most 5 minutes",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="of --speed and --job: rows that it has are not measured again "
        "(default: gpu-speed.jsonl, gpu-job.jsonl)",
    )
    return parser


def measure(arguments: argparse.Namespace, device: str, name: str) -> int:
    """Measure speed or a whole job, and print the tables. Return 1 if a row failed, else 0."""
    from benchmarks import (
        gpu_job,
        gpu_speed,
    )  # imported late: they import everything that they measure

    chosen = torch.device(device, 0) if device == accelerator.TYPE else accelerator.CPU
    sizes = gpu_speed.REHEARSAL if chosen == accelerator.CPU else gpu_speed.Sizes()
    out = arguments.out or f"gpu-{'job' if arguments.job else 'speed'}.jsonl"
    bench = gpu_speed.Bench(chosen, sizes, Path(out))
    print(f"on {name}; torch {torch.__version__}; rows in {bench.out}", flush=True)
    if arguments.job:
        with tempfile.TemporaryDirectory(prefix="accrete-job-") as folder:
            gpu_job.measure_all(bench, Path(folder))
    else:
        gpu_speed.measure_all(bench, arguments.methods)
    print(f"\n{gpu_speed.tables(bench.rows)}")
    if bench.left_out:
        print(f"no time was left for {', '.join(bench.left_out)}; the same command measures them")
    return int(any("error" in row for row in bench.rows))


def main(argv: list[str] | None = None) -> int:
    """Run the checks or measurements of a command line.

    Returns:
        The exit code: 1 if a case failed, 2 if the checks could not start, else 0.
    """
    arguments = command_line().parse_args(argv)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # needed for deterministic cuBLAS
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        cases = list_cases(arguments.methods)
        device, name = find_device(arguments.device)
    except UserError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    if arguments.speed or arguments.job:
        return measure(arguments, device, name)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"on {name}; {versions}; {len(cases)} cases, {arguments.jobs} side by side", flush=True)
    rows = run(cases, device, max(1, arguments.jobs), arguments.limit)
    failed = len([row for row in rows.values() if row.failures])
    seconds = time.monotonic() - began
    print(f"\n{format_table(rows)}\n{LEGEND}\n")
    print(f"{failed} of {len(rows)} cases failed; {seconds:.0f} s in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
