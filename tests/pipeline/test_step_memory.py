"""Tests of `plan --memory`: the dry run of a step has the memory of the step that trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.cli.main import main
from pipeline.config import settings as config
from pipeline.graph.build import build_graph
from pipeline.graph.store import Store
from pipeline.launch import step_memory
from pipeline.launch.step_memory import LiveBytes, StepMemory
from pipeline.testing.lab import Lab, Run
from tests import small_run
from workers import loop
from workers.job import StageJob
from workers.methods import METHODS
from workers.storage.artifact import Artifact

TRAINED = sorted(name for name, cls in METHODS.items() if cls.has_training())
# Methods that read images in `begin`, by scenario.
NEED_IMAGES = {"task": {"inflora", "supsup_nn"}, "class": {"inflora", "s_prompts"}}
# Labels of the fast tests.
VARIANTS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "in_parts": {"method": "finetune", "train": {"accumulate": 4}},
    "bf16": {"method": "finetune", "train": {"precision": "bf16"}},
    "linear": {},
    "meat": {},
    "inflora": {},
}


def plan(folder: Path, methods: Any, scenario: str = "task") -> Any:
    """Return the graph of a run with these methods; nothing is ingested."""
    body = small_run.make_body(folder, small_run.make_cards(folder, ("a", "b")), methods, scenario)
    checked = config.check(body, "a config")
    return build_graph(checked, Store(checked.storage))[0]


def forecast(graph: Any, ranks: int = 1, sizes: Mapping[str, int] | None = None) -> Any:
    """Return the forecast of the first training step of each label: label -> `StepMemory`."""
    steps: dict[str, StepMemory] = {}
    for one in step_memory.forecast_memory(graph, ranks, sizes or {}):
        steps.setdefault(one.label, one)
    return steps


def measure_training(run: Run, job: StageJob) -> float:
    """Run a stage; return the peak of live tensors in its optimizer steps after the first one."""
    run.prepare(job)
    memory = LiveBytes()
    peaks: list[int] = []
    step = loop.train_step

    def measured_step(*arguments: Any, **options: Any) -> Any:
        memory.peak = memory.live
        result = step(*arguments, **options)
        peaks.append(memory.peak)
        return result

    with pytest.MonkeyPatch.context() as patch, memory:
        patch.setattr(loop, "train_step", measured_step)
        run.lab.stage(job)
    return max(peaks[1:])


def check_equal(graph: Any, predicted: dict[str, StepMemory], scenario: str) -> None:
    """Check that dry runs agree with the same steps with values."""
    jobs: dict[Any, StageJob] = {}
    for stage in graph:
        if isinstance(stage.job, StageJob) and step_memory.trains(stage.job):
            jobs.setdefault(stage.method, stage.job)
    measured = {
        label: step_memory.measure_step(job, predicted[label].batch_size, has_values=True)
        for label, job in jobs.items()
    }
    assert predicted.keys() == measured.keys()
    reasons = {label: one.reason for label, one in predicted.items() if one.reason}
    assert reasons == {
        label: step_memory.NEEDS_IMAGES for label in predicted if label in NEED_IMAGES[scenario]
    }
    # NumPy's arrays on the CPU are not counted, while a dry run has tensors in their place.
    ratios = {
        label: one.peak_bytes / measured[label].peak_bytes
        for label, one in predicted.items()
        if not one.reason
    }
    assert {label: ratio for label, ratio in ratios.items() if not 0.95 < ratio < 1.2} == {}
    for label in ratios:
        assert predicted[label].trained_parameters == measured[label].trained_parameters


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plan(tmp_path_factory.mktemp("memory"), VARIANTS)


@pytest.fixture(scope="module")
def steps(graph: Any) -> dict[str, StepMemory]:
    return forecast(graph)  # type: ignore[no-any-return]


def test_live_bytes_count_each_storage_once_until_it_is_freed() -> None:
    memory = LiveBytes()
    with memory:
        a = torch.zeros(1000)  # 4000 bytes
        view = a[:10].view(2, 5)
        b = a * 2
        assert memory.live == memory.peak == 8000
        del a, b
        assert memory.live == 4000, "the view keeps the first tensor"
        del view
        c = torch.ones(10, dtype=torch.int64)
    assert (memory.live, memory.peak) == (80, 8000)
    del c
    assert memory.live == 0


def test_dry_run_has_the_memory_of_the_step(graph: Any, steps: dict[str, StepMemory]) -> None:
    check_equal(graph, steps, "task")
    job = next(s.job for s in graph if s.method == "finetune" and step_memory.trains(s.job))
    assert steps["finetune"].peak_bytes == step_memory.measure_step(job, 16, True).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_dry_run_of_every_method_has_the_memory_of_its_step(scenario: str, tmp_path: Path) -> None:
    names = [name for name in TRAINED if scenario in METHODS[name].scenarios]
    graph = plan(tmp_path, names, scenario)
    check_equal(graph, forecast(graph), scenario)


@pytest.mark.parametrize(
    ("method", "train", "data"),
    [
        ("finetune", {"batch_size": 8}, {}),
        ("finetune", {"batch_size": 16, "accumulate": 4}, {}),
        ("linear", {"batch_size": 8, "precision": "bf16"}, {"flip": 0.5}),
        ("lora", {"batch_size": 8, "precision": "bf16"}, {"flip": 0.5}),
    ],
)
def test_dry_run_has_the_memory_of_the_training(
    method: str, train: dict[str, Any], data: dict[str, Any], lab: Lab
) -> None:
    options = {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 2}
    backbone = {"img_size": 16, "crop_pct": 1.0, "options": options}
    run = lab.run_of(method, {"epochs": 1, **train}, data=data, backbone=backbone)
    (job,) = run.stages(0)
    images = train["batch_size"] // train.get("accumulate", 1)
    predicted = step_memory.measure_step(job, images)
    assert not predicted.reason
    measured = measure_training(run, job)
    assert job.backbone is not None
    # `restore.load_backbone` keeps a copy of the backbone on the CPU.
    cached_bytes = Artifact.need(job.root, job.backbone).manifest["bytes"]
    assert 0.95 < predicted.peak_bytes / (measured - cached_bytes) < 1.2


def test_micro_batches_keep_gradients_and_count_as_one_step(graph: Any) -> None:
    job = next(s.job for s in graph if s.method == "finetune" and step_memory.trains(s.job))
    one = step_memory.measure_step(job, 4)
    train = job.train.model_copy(update={"accumulate": 4})
    four = step_memory.measure_step(replace(job, train=train), 4)
    assert four.flops == 4 * one.flops
    assert four.peak_bytes > one.peak_bytes


def test_task_with_the_largest_batch_is_forecast(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(job: StageJob, batch_size: int) -> StepMemory:
        assert job.task is not None
        return StepMemory(job.method, job.step, job.task.name, batch_size)

    monkeypatch.setattr(step_memory, "measure_step", measure)
    sizes = {"finetune/a/train": 2, "finetune/b/train": 8}
    chosen = forecast(graph, 1, sizes)["finetune"]
    assert (chosen.task, chosen.batch_size) == ("b", 8)
    assert forecast(graph)["finetune"].task == "a"


def test_steps_of_later_tasks_are_not_forecast(tmp_path: Path) -> None:
    steps = step_memory.forecast_memory(plan(tmp_path, ["foster"], "class"), 1, {})
    assert [(one.step, one.reason) for one in steps] == [
        ("train", ""),
        ("compress", step_memory.NEEDS_TASKS),
    ]
    assert f"not known: foster/compress: {step_memory.NEEDS_TASKS}" in (
        step_memory.format_memory(steps)
    )


def test_training_of_the_backbone_is_forecast(tmp_path: Path) -> None:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, ("a", "b")), ["ncm"])
    body["stream"]["tasks"][0]["role"] = "base"
    checked = config.check(body, "a config")
    steps = forecast(build_graph(checked, Store(checked.storage))[0])
    assert steps.keys() == {"backbone"}
    assert steps["backbone"].trained_parameters > 10_000


def test_endless_reads_of_a_method_end_the_dry_run(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(method: Any, progress: Any) -> None:
        while not bool(torch.ones(1).all()):
            pass

    monkeypatch.setattr(METHODS["finetune"], "after_step", wait)
    monkeypatch.setattr(step_memory, "MAX_READS", 10)
    job = next(s.job for s in graph if s.method == "finetune" and step_memory.trains(s.job))
    assert "more than 10 values" in step_memory.measure_step(job, 4).reason


def test_memory_contains_weights_gradients_and_moments(steps: dict[str, StepMemory]) -> None:
    full, head = steps["finetune"], steps["linear"]
    assert full.weight_bytes >= 4 * full.trained_parameters
    assert full.peak_bytes > 16 * full.trained_parameters, "weight, gradient and two moments"
    assert head.peak_bytes < full.peak_bytes - 8 * full.trained_parameters
    assert 2.5 < full.flops / head.flops < 3.5, "the backward pass costs two forward passes"


def test_batch_size_and_precision_change_the_memory(
    graph: Any, steps: dict[str, StepMemory]
) -> None:
    assert (steps["finetune"].batch_size, steps["in_parts"].batch_size) == (16, 4)
    shared = forecast(graph, 3, {"finetune/a/train": 10, "finetune/b/train": 10})
    assert (shared["finetune"].batch_size, shared["in_parts"].batch_size) == (4, 2)
    assert shared["finetune"].peak_bytes < steps["finetune"].peak_bytes
    assert steps["in_parts"].peak_bytes < steps["finetune"].peak_bytes
    assert steps["bf16"].peak_bytes < steps["finetune"].peak_bytes


def test_recomputed_activations_are_not_in_the_memory(graph: Any) -> None:
    job = next(s.job for s in graph if s.method == "finetune" and step_memory.trains(s.job))
    plain = step_memory.measure_step(job, 16, has_values=True)
    train = job.train.model_copy(update={"recompute": True})
    recomputed = step_memory.measure_step(replace(job, train=train), 16, has_values=True)
    assert recomputed.peak_bytes < plain.peak_bytes
    assert recomputed.flops > 1.2 * plain.flops


def test_command_line_prints_the_memory(
    steps: dict[str, StepMemory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = [steps["finetune"], steps["inflora"]]
    monkeypatch.setattr(step_memory, "forecast_memory", lambda *args: known)
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, ("a",)), ("finetune",))
    path = small_run.write_config(tmp_path / "c.yaml", body)
    assert main(["plan", path, "--memory"]) == 0
    table = capsys.readouterr().out.split("memory of a step")[1]
    rows = [line.split() for line in table.splitlines()]
    assert rows[1][:3] == ["finetune", "16", f"{steps['finetune'].trained_parameters:,}"]
    assert rows[2] == ["inflora", "16", "-", "-", "not", "known", "-"]
    assert f"not known: inflora: {step_memory.NEEDS_IMAGES}" in table


def test_config_without_training_is_said_to_have_none(tmp_path: Path) -> None:
    assert forecast(plan(tmp_path, ["ncm"], "class")) == {}
    assert step_memory.format_memory([]) == "memory: no method trains"


def test_random_numbers_are_not_changed_by_a_dry_run(graph: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    forecast(graph)
    assert torch.equal(torch.rand(3), expected)
