"""Tests of the GPU benchmark on the CPU, also with methods that must fail.

They hide the packages that a bare GPU machine lacks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import gpu, gpu_cases, gpu_conditions, gpu_pool, gpu_speed, methods, stream
from pipeline.testing.lab import Lab, again
from workers import preemption
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.methods.linear import Linear
from workers.model import vit

CHECKOUT = Path(__file__).resolve().parent.parent
ABSENT = ("ray", "mlflow", "webdataset", "sklearn")
LINEAR = functional.linear


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in the checkout, without the packages of `ABSENT`."""
    absent = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", absent + code],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=CHECKOUT,
        env=environment,
    )


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--device", "cpu", "--jobs", "1", *arguments]
    return python(f"from benchmarks import gpu\nsys.exit(gpu.main({options}))")


def table(output: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return (method, scenario, precision) -> cells of the row by heading."""
    lines = [re.split(r"  +", line) for line in output.splitlines()]
    heading = next(line for line in lines if line[0] == "method")
    rows = [
        dict(zip(heading, line, strict=True))
        for line in lines
        if len(line) == len(heading) and line != heading
    ]
    return {(row["method"], row["scenario"], row["precision"]): row for row in rows}


# ---- rehearsal on the CPU ------------------------------------------------------------------------
def test_steps_are_recorded_and_interrupted_in_the_train_loop(tmp_path: Path) -> None:
    run = Lab(tmp_path).run_of("finetune", {"optimizer": "sgd", "lr": 0.1, "epochs": 2})
    job = run.stages(0)[0]
    with gpu_conditions.recorded_steps() as steps:
        run.artifact(job)
    with gpu_conditions.interrupted_steps() as interruptions, pytest.raises(preemption.Preempted):
        run.lab.stage(again(job, "interrupted", checkpoint_s=0.0))
    preemption.requested.clear()
    assert len(steps[job.id]) == interruptions.total[job.id]
    assert interruptions.taken[job.id] == len(steps[job.id]) // 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    # masks in a star, pruning; gates, exemplars, a growing network
    [("meat", "packnet"), ("hat", "icarl", "dytox")],
    ids="-".join,
)
def test_benchmark_passes_on_cpu_without_ray_mlflow_and_webdataset(names: tuple[str, ...]) -> None:
    done = benchmark("--methods", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    expected = {
        (name, scenario, "fp32")
        for name in names
        for scenario in METHODS[name].scenarios - {"domain"}
    }
    assert {case for case in rows if case[2] == "fp32"} == expected
    assert {case[0] for case in rows if case[2] == "bf16"} == {*names} - {"dytox"}
    assert all(row["result"] == "ok" and row["resumed"] == "bits" for row in rows.values())
    assert all(
        float(row["decisions"]) == 0 and float(row["served"]) < 1e-5
        for row in rows.values()
        if row["precision"] == "fp32"
    )
    assert all(
        re.fullmatch("= [0-9a-f]{8}", rows[name, "task", "fp32"]["masks"])
        for name in {"hat", "packnet"} & {*names}
    )
    if "meat" in names:  # rounding decides the mask bits with a gradient near 0
        masks = rows["meat", "task", "fp32"]["masks"]
        assert masks.startswith("= ") or float(masks) < 1e-3


def test_the_config_of_every_case_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stream, "build_graph", lambda *_: (None, [])
    )  # the config is checked before the graph is built
    setup = gpu_cases.prepare(tmp_path, "cpu")
    for case in gpu.list_cases([*METHODS]):
        gpu_cases.plan(setup, case, "storage", torch.device("cpu"))


def test_missing_gpu_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_pool, "ask", lambda question: "")
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("benchmarks.gpu: there is no GPU that torch can use; ")
    assert err.count("\n") == 1


def test_an_unknown_method_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--methods", "meatt"]) == 2
    assert (
        capsys.readouterr().err
        == "benchmarks.gpu: --methods names 'meatt', which does not exist; did you mean 'meat'?\n"
    )


# ---- methods that must not pass ------------------------------------------------------------------
class Raises(Linear):
    """A method with a loss that raises an error."""

    name = "raises"

    def loss(self, batch: Any, progress: Any) -> Any:
        raise RuntimeError("no kernel for this. And\nmuch more")


class TakesTooMuchMemory(Linear):
    name = "takes_too_much_memory"

    def loss(self, batch: Any, progress: Any) -> Any:
        return torch.empty(1 << 50), {}


class RemembersBeside(Linear):
    """A method that stores a number which is not in its checkpoints."""

    name = "remembers_beside"
    steps_taken = 0

    def after_step(self, progress: Any) -> None:
        self.steps_taken += 1

    def finish(self) -> Any:
        return self.state(
            tokens={"steps": torch.tensor([float(self.steps_taken)])}
        ), super().finish()[1]


class AnswersByDevice(Linear):
    """A method with another order of classes on one side of the comparison."""

    name = "answers_by_device"

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        logits = super().logits(images, task)
        return logits if self.training or functional.linear is LINEAR else logits.flip(1)


class FailsOnTheDevice(Linear):
    """A method that trains on only one side of the comparison."""

    name = "fails_on_the_device"

    def loss(self, batch: Any, progress: Any) -> Any:
        if functional.linear is not LINEAR:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().loss(batch, progress)


BROKEN = (Raises, TakesTooMuchMemory, RemembersBeside, AnswersByDevice, FailsOnTheDevice)


@pytest.mark.slow
def test_failing_method_sets_exit_code_and_others_continue() -> None:
    names = [*(broken.name for broken in BROKEN), "linear"]
    done = python(
        "import test_gpu_benchmark as tests\nfrom benchmarks import gpu\n"
        "gpu.METHODS.update({broken.name: broken for broken in tests.BROKEN})\n"
        f"sys.exit(gpu.main({['--device', 'cpu', '--jobs', '2', '--methods', *names]}))"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = {
        name: [line for line in done.stdout.splitlines() if line.startswith(f"FAIL  {name} ")]
        for name in names
    }
    frame = r"\[tests/test_gpu_benchmark.py:\d+\]"
    raised = r"FAIL  raises task fp32, raises/one/train: RuntimeError: no kernel for this "
    assert re.fullmatch(raised + frame, lines["raises"][0])
    assert re.search(
        r"/one/train: RuntimeError: .*memory.* " + frame, lines["takes_too_much_memory"][0]
    )
    assert [len(lines[name]) for name in ("raises", "takes_too_much_memory", "linear")] == [
        2,
        2,
        0,
    ]  # one line for each of the two tasks, because the methods are stars
    assert len(lines["remembers_beside"]) == 1
    assert (
        "remembers_beside/two/train: interrupted and resumed, it ends with another result"
        in lines["remembers_beside"][0]
    )
    assert any("/evaluate: decisions differ" in line for line in lines["answers_by_device"])
    assert any(", serve: answers differ" in line for line in lines["answers_by_device"])
    assert [line.split(", ", 1)[1].split(":")[0] for line in lines["fails_on_the_device"]] == [
        "fails_on_the_device/one/train",
        "fails_on_the_device/two/train",
    ]
    rows = table(done.stdout)
    assert rows["linear", "task", "fp32"]["result"] == "ok"
    assert rows["raises", "task", "fp32"]["result"] == "2 failed"
    assert "5 of 6 cases failed" in done.stdout


# ---- processes -----------------------------------------------------------------------------------
MISBEHAVE = """
import os, signal, time
from benchmarks import gpu_pool

def check(case, send):
    send("pid", os.getpid())
    if case == "hangs":
        time.sleep(600)
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return case != "spoils its process"

for message in gpu_pool.run(CASES, check, jobs=1, limit_s=1.0):
    print(message.case, message.kind, message.value, sep="|")
"""


def test_hanging_or_dying_case_is_stopped_and_others_continue() -> None:
    cases = ["good", "hangs", "dies", "spoils its process", "good too", "good as well"]
    done = python(MISBEHAVE.replace("CASES", repr(cases)))
    assert done.returncode == 0, done.stderr
    messages = [line.split("|") for line in done.stdout.splitlines()]
    assert [case for case, kind, _ in messages if kind == "done"] == cases
    assert {case: value for case, kind, value in messages if kind == "ended"} == {
        "hangs": "it did not end within 1 s and was stopped",
        "dies": "its process died (signal 9)",
    }
    pids = {case: value for case, kind, value in messages if kind == "pid"}
    assert pids["good"] == pids["hangs"]
    assert len({pids["hangs"], pids["dies"], pids["spoils its process"], pids["good too"]}) == 4
    assert pids["good too"] == pids["good as well"]
    for pid in set(pids.values()):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_speed_measurement_resumes_at_the_first_missing_row(tmp_path: Path) -> None:
    out = tmp_path / "speed.jsonl"
    options = ("--speed", "--out", str(out), "--methods", "dytox")
    bench = gpu_speed.Bench(torch.device("cpu"), gpu_speed.REHEARSAL, out, limit_s=0.0)
    gpu_speed.measure_all(bench, ["dytox"])
    assert not out.exists(), "without time left, nothing is measured"
    named = len(bench.left_out)
    first = benchmark(*options)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == named
    steps = {row["name"]: row for row in rows if row["kind"] == "training step"}
    assert steps.keys() == {"dytox, task 1", "dytox, task 3"}
    assert all(row["images_s"] > 0 and row["ms"] > 0 for row in steps.values())
    assert "kernels" in steps["dytox, task 1"]
    assert next(row["images_s"] for row in rows if row["kind"] == "serving") > 0
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    second = benchmark(*options)
    assert second.returncode == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[:-1] == rows[:-1], "existing rows are not measured again"
    assert again[-1]["name"] == rows[-1]["name"]
    assert rows[-1]["name"] in second.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three tries of at most five minutes
def test_stopped_job_resumes_with_equal_results(tmp_path: Path) -> None:
    out = tmp_path / "job.jsonl"
    for _ in range(3):  # at most 5 minutes each; a busy machine needs several
        ended = benchmark("--job", "--out", str(out))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if "the same on the CPU" in out.read_text():
            break
    rows = {row["name"]: row for row in map(json.loads, out.read_text().splitlines())}
    chains = rows["four chains, stopped once"]
    assert chains["stopped_with"] != 0
    assert 0 < chains["reused"] < chains["stages"]
    assert chains["first_step_s"] > 0
    assert chains["finetune"] == pytest.approx(rows["the same on the CPU"]["finetune"])
    assert rows["two ranks on one GPU"]["finetune"] > 0


def test_failing_row_is_recorded_and_others_continue(tmp_path: Path) -> None:
    out = tmp_path / "speed.jsonl"
    bench = gpu_speed.Bench(torch.device("cpu"), gpu_speed.REHEARSAL, out)
    bench.measure("a kind", "fails", lambda: {"value": 1 / 0})
    bench.measure("a kind", "works", lambda: {"value": 1.5})
    assert [row.get("error", row.get("value")) for row in bench.rows] == [
        "ZeroDivisionError: division by zero",
        1.5,
    ]
    assert "works" in gpu_speed.tables(bench.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(n for n, cls in METHODS.items() if cls.has_training()))
def test_a_step_of_the_third_task_can_be_timed(name: str) -> None:
    sizes = gpu_speed.REHEARSAL
    backbone = vit.build(BackboneSettings(name=sizes.backbone, img_size=sizes.side))
    conditions = methods.Conditions(sizes.side, sizes.batch, 2)
    training = methods.Training(
        name, backbone, max(METHODS[name].scenarios - {"domain"}), conditions
    )
    assert torch.isfinite(training.step())
