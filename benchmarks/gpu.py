"""Correctness on a GPU: every method trains two tasks, resumes, is evaluated and served.

`python -m benchmarks.gpu [--methods NAME ...]`; meant for at most 5 minutes on one GPU with 16 CPU
cores. It needs neither ray nor mlflow nor webdataset, makes its own images and reaches for nothing
outside its temporary folder. What is compared with the CPU, and how closely, is told in
`benchmarks/gpu_checks.py`. `--device cpu` rehearses all of it without a GPU.

One line per failure: method, scenario, precision, stage, a sentence, the line of this project under
which it was raised. Then a table. Exit code 1 where anything failed, 2 where it could not begin.
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
from workers.errors import UserError
from workers.methods import METHODS

BF16 = ("finetune", "hat", "icarl", "meat", "packnet", "toast")  # these train in bf16 too
LIMIT_S = 120.0
MOST_JOBS = 12  # each has a context of its own on the GPU
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
    """What came out of one case."""

    failures: list[Failure] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    stage: str = "start"  # what it was last seen to begin


def cases_of(names: list[str]) -> list[Case]:
    """Every method in every scenario that it serves, and a few in bf16. Raises UserError where
    there is no such method."""
    for name in names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(METHODS)}"
            raise UserError(f"--methods names {name!r}, which does not exist; {hint}")
    cases = [Case(name, scenario) for name in names for scenario in sorted(METHODS[name].scenarios)]
    return cases + [
        Case(name, max(METHODS[name].scenarios), "bf16") for name in names if name in BF16
    ]


def gpu_name() -> str:
    """Empty where there is none that torch can use. Not to be called in the process that forks."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def device_of(wanted: str | None) -> tuple[str, str]:
    """The device and what it is called. Raises UserError where there is no GPU, unless the CPU was
    asked for."""
    processor = f"{platform.machine()}, {os.cpu_count()} cores"
    if wanted == "cpu":
        return "cpu", f"the CPU ({processor}), a rehearsal"
    name = gpu_pool.ask(gpu_name)
    if not name:
        raise UserError(
            "there is no GPU that torch can use; run it on a machine with one, or rehearse it with "
            "--device cpu"
        )
    return "cuda", f"{name} beside {processor}, CUDA {torch.version.cuda}"


def run(cases: list[Case], device: str, jobs: int, limit_s: float) -> dict[Case, Row]:
    """Checks all cases, `jobs` side by side, and prints a line for each failure and each case as
    they come."""
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
    row.failures.append(failure)
    frame = f" [{failure.frame}]" if failure.frame else ""
    print(f"FAIL  {case}, {failure.stage}: {failure.sentence}{frame}", flush=True)


def table_of(rows: dict[Case, Row]) -> str:
    """A line per case."""
    heading = ["method", "scenario", "precision", "result", *COLUMNS.values(), "seconds"]
    lines = [heading]
    for case, row in rows.items():
        result = f"{len(row.failures)} failed" if row.failures else "ok"
        measured = [row.measured.get(name) or "-" for name in COLUMNS]
        lines.append(
            [case.method, case.scenario, case.precision, result, *measured, f"{row.seconds:.1f}"]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(padded)


def main(argv: list[str] | None = None) -> int:
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
        default=min(os.cpu_count() or 1, MOST_JOBS),
        metavar="N",
        help=f"processes side by side (default: one per core, at most {MOST_JOBS})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"of one case, then it is stopped (default: {LIMIT_S:g})",
    )
    arguments = parser.parse_args(argv)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS has no deterministic form
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        cases = cases_of(arguments.methods)
        device, name = device_of(arguments.device)
    except UserError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"on {name}; {versions}; {len(cases)} cases, {arguments.jobs} side by side", flush=True)
    rows = run(cases, device, max(1, arguments.jobs), arguments.limit)
    failed = sum(bool(row.failures) for row in rows.values())
    seconds = time.monotonic() - began
    print(f"\n{table_of(rows)}\n{LEGEND}\n")
    print(f"{failed} of {len(rows)} cases failed; {seconds:.0f} s in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
