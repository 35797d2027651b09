"""Tests on the strict device, which refuses what a GPU would refuse: every stage of every method,
and the number of operations, copies and reads in a training step."""

from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pipeline.launch import local
from tests import golden_keys, on_strict_device, small_run
from tests.on_strict_device import (
    BACKBONES,
    Case,
    Step,
    higher,
    read_bounds,
    write_bounds,
)
from tests.strict_device import NAME, Counts, DeviceError, strict_device
from workers.data import accelerator
from workers.data.batch import Batch
from workers.errors import UserError
from workers.methods import METHODS
from workers.methods.base import Progress
from workers.methods.finetune import FineTune

EVERY = [
    (method, scenario)
    for method, cls in METHODS.items()
    for scenario in sorted(cls.scenarios - {"domain"})  # it has its own test
]
# A method with masks and statistics, a method with pruning, and a method with exemplars.
A_FEW = ("hat-task", "packnet-task", "icarl-class")
RECORD = (
    "record it by `PYTHONPATH=tests .venv/bin/python -m tests.on_strict_device NAME --record`, "
    "and commit the file with the method"
)
SOME = [
    ("finetune", "t2t"), ("meat", "t2t"), ("lora", "t2t"),
    ("finetune", "convnext"), ("piggyback", "convnext"), ("toast", "convnext"),
    ("finetune", "resnet"), ("meat", "resnet"), ("packnet", "resnet"),
    ("hat", "context"), ("meat", "context"),
]  # fmt: skip
ALL = {
    "crop": "resized",
    "flip": 0.5,
    "randaugment": 2,
    "erase": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smoothing": 0.1,
    "repeats": 2,
}
DATA: dict[str, dict[str, Any]] = {
    "all": ALL,
    "pad": {"crop": "pad", "flip": 0.5},
    "resized": {"crop": "resized", "flip": 0.5},
    "randaugment": {"randaugment": 2},
    "erase": {"erase": 0.5},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.8, "cutmix": 1.0},
    "smoothing": {"smoothing": 0.1},
    "repeats": {"repeats": 3, "flip": 0.5},
    # `resident_mb` is not part of keys, so `val_fraction` gives this case its own key
    "streamed": {"resident_mb": 0, "val_fraction": 0.2},
}
TRAIN: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "accumulate": {"accumulate": 2},
    "sgd": {"optimizer": "sgd", "clip": 1.0},
    "best": {"keep": "best", "epochs": 2},
}


# ---- every method --------------------------------------------------------------------------------
@pytest.mark.few(*A_FEW[:2])
@pytest.mark.parametrize(("method", "scenario"), EVERY)
def test_every_method_stage_gives_the_results_of_the_cpu(
    device: Any, method: str, scenario: str
) -> None:
    """The stages are all steps (train, herd, finetune, prune, ...), `finish`, evaluation, the
    canary, resuming from a checkpoint, and serving."""
    counts = device.submit(on_strict_device.check, Case(method, scenario)).result()
    assert bool(counts) == METHODS[method].has_training(), "no step was counted"
    risen = sentences(counts)
    assert not risen, "\n".join(risen)


def sentences(counts: dict[Step, Counts]) -> list[str]:
    """Describe each count that exceeds its bound; a step without a bound fails."""
    bounds = read_bounds()
    unknown = sorted(counts.keys() - bounds.keys())
    assert not unknown, f"no bound for {unknown}; {RECORD}"
    return [
        sentence
        for step, step_counts in counts.items()
        for sentence in higher(step, step_counts, bounds[step])
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["s_prompts", "finetune", "icarl", "ranpac", "mir", "supsup"])
def test_scenario_domain_gives_the_results_of_the_cpu(device: Any, method: str) -> None:
    """The methods use one head for all tasks, the largest output of several heads, or an inferred
    task."""
    device.submit(on_strict_device.check, Case(method, "domain")).result()


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "backbone"), SOME)
def test_other_backbones_give_the_results_of_the_cpu(
    device: Any, method: str, backbone: str
) -> None:
    device.submit(on_strict_device.check, Case(method, "task", backbone), resume=False).result()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["toast", "toast_lite", "icarl", "tfm"])
def test_stream_with_base_task_gives_the_results_of_the_cpu(device: Any, method: str) -> None:
    """Covers the training of the backbone, and the additional steps of methods for a base task."""
    counts = device.submit(
        on_strict_device.check, Case(method, min(METHODS[method].scenarios - {"domain"}), base=True)
    ).result()
    if METHODS[method].starts_from:
        assert not sentences(counts)


@pytest.mark.few("all")
@pytest.mark.parametrize("name", DATA)
def test_every_augmentation_gives_the_images_of_the_cpu(device: Any, name: str) -> None:
    """A training step makes at most two copies, of pixels and of small numbers, both from pinned
    memory, and reads nothing from the device."""
    counts = device.submit(
        on_strict_device.check, Case("finetune", "task", data=DATA[name]), resume=False
    ).result()
    for step_counts in counts.values():
        assert (step_counts.copies, step_counts.reads) == (0, 0)
        assert step_counts.uploads <= 2


@pytest.mark.few("class-all")
@pytest.mark.parametrize("data", ["resized", "all"])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_joint_training_of_tasks_makes_no_additional_copies(
    device: Any, scenario: str, data: str
) -> None:
    case = Case("joint", scenario, data=DATA[data])
    counts = device.submit(on_strict_device.check, case, resume=False).result()
    for step_counts in counts.values():
        assert (step_counts.copies, step_counts.reads) == (0, 0)
        assert step_counts.uploads <= 2


def test_batches_from_prefetch_threads_equal_those_of_the_cpu(device: Any) -> None:
    """Interrupted stages are not counted, so they use prefetch threads."""
    device.submit(on_strict_device.check, Case("finetune", "task", data=DATA["all"])).result()


@pytest.mark.few("bf16")
@pytest.mark.parametrize("name", TRAIN)
def test_every_way_of_training_gives_the_results_of_the_cpu(device: Any, name: str) -> None:
    device.submit(
        on_strict_device.check, Case("finetune", "class", train=TRAIN[name]), compare=name != "bf16"
    ).result()


# ---- memory formats of CNNs ----------------------------------------------------------------------
class Convolutions(NamedTuple):
    """Results of a case's stages, and the memory formats of the convolutions.

    formats: pairs of (whether the layer is in training mode, memory format of the input).
    tensors: "stage/name" -> tensor of a task's state.
    """

    formats: set[tuple[bool, str]]
    tensors: dict[str, Tensor]


def convolve(case: Case, device: str) -> Convolutions:
    """Run the stages of a case on a device; call in the device's process."""
    formats = set()

    def note(layer: nn.Module, inputs: Any) -> None:
        if isinstance(layer, nn.Conv2d):
            is_first = inputs[0].is_contiguous()
            is_last = inputs[0].is_contiguous(memory_format=torch.channels_last)
            if is_first != is_last:  # equal for one channel or one pixel
                formats.add((layer.training, "channels last" if is_last else "contiguous"))

    with register_module_forward_pre_hook(note):
        results = on_strict_device.results(case, device)
    tensors = {}
    for stage, data in results.items():
        if stage.endswith("state"):
            for name, tensor in safetensors.torch.load(data).items():
                tensors[f"{stage}/{name}"] = tensor
    return Convolutions(formats, tensors)


def convolve_on_device(case: Case) -> tuple[Convolutions, Convolutions]:
    """Run a case on the strict device and on the CPU; call in the device's process."""
    with strict_device():
        on_device = convolve(case, NAME)
    return on_device, convolve(case, "cpu")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("backbone", "precision", "trained_in"),
    [
        ("resnet", "tf32", {"channels last"}),
        ("resnet", "fp32", {"contiguous"}),
        ("convnext", "tf32", {"channels last"}),
        # ConvNeXt blocks permute axes, which changes the format.
        ("convnext", "fp32", {"contiguous", "channels last"}),
    ],
)
def test_cnn_trains_channels_last_on_tensor_cores(
    device: Any, backbone: str, precision: str, trained_in: set[str]
) -> None:
    train = {"precision": precision, "lr": 1e-3}
    case = Case("finetune", "task", backbone, train=train)
    ours, expected = device.submit(convolve_on_device, case).result()
    assert {name for is_trained, name in ours.formats if is_trained} == trained_in
    assert (False, "contiguous") in ours.formats, "images are evaluated in fp32"
    assert (True, "contiguous") in expected.formats, "on a CPU nothing changes"
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(tensor, expected.tensors[name], rtol=1e-3, atol=1e-4)


KINDS_OF_DATA = {"plain": {}, "augmented": ALL, "streamed": DATA["streamed"]}
# Every method with every backbone and every kind of data, and every backbone with every kind.
PAIRS = [
    (method, scenario, backbone, [*KINDS_OF_DATA][(row + column) % len(KINDS_OF_DATA)])
    for row, (method, scenario) in enumerate(EVERY)
    for column, backbone in enumerate(BACKBONES)
    if backbone != "context"  # a variant of "vit": SOME has it
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "scenario", "backbone", "kind"), PAIRS)
def test_every_method_works_with_every_backbone_and_kind_of_data(
    device: Any, method: str, scenario: str, backbone: str, kind: str
) -> None:
    data = KINDS_OF_DATA[kind]
    try:
        device.submit(on_strict_device.check, Case(method, scenario, backbone, data)).result()
    except UserError as error:  # the method or the backbone does not support this case
        pytest.skip(str(error))


# ---- the main job --------------------------------------------------------------------------------
@pytest.fixture
def job(tmp_path: Path) -> str:
    """Write the config of a small stream; return its path."""
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, ("meat", "finetune"), train={"epochs": 1})
    return small_run.write_config(tmp_path / "run.yaml", body)


def test_the_command_line_gives_the_results_of_the_cpu(
    device: Any, job: str, tmp_path: Path
) -> None:
    storages = (str(tmp_path / "strict"), str(tmp_path / "cpu"))
    ours, expected = device.submit(on_strict_device.run_main_job, job, storages).result()
    assert ours == expected


@pytest.mark.slow
def test_a_model_is_measured_as_on_the_cpu(device: Any, job: str) -> None:
    ours, expected = device.submit(on_strict_device.measure_model, job).result()
    assert ours[0] == expected[0]
    assert ours[1].keys() == expected[1].keys() == {"base", "a"}
    for name, levels in ours[1].items():
        torch.testing.assert_close(levels, expected[1][name])


def test_the_use_of_the_gpu_is_sampled(device: Any, job: str) -> None:
    sample = device.submit(on_strict_device.first_sample, job).result()
    assert sample["gpus"] == {"0": {"memory_bytes": 0, "total_bytes": 1 << 40, "utilization": 0.5}}


def without_index(path: str, storages: tuple[str, str]) -> Any:
    """Run the main job with a device without an index, like `torch.device("cuda")`; call in the
    device's process."""
    with mock.patch.object(accelerator, "make_device", return_value=torch.device(NAME)):
        return on_strict_device.run_main_job(path, storages)


def test_job_whose_device_has_no_index_is_detected(device: Any, job: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a specified index"):
        device.submit(without_index, job, (str(tmp_path / "a"), str(tmp_path / "b"))).result()


def without_sampler(path: str) -> Any:
    """Wait for a sample of an executor without a sampler; call in the device's process."""
    with mock.patch.object(local, "sampling", return_value=nullcontext()):
        return on_strict_device.first_sample(path, timeout_s=1)


def test_job_without_gpu_sampler_is_detected(device: Any, job: str) -> None:
    with pytest.raises(queue.Empty):
        device.submit(without_sampler, job).result()


def test_only_the_accelerator_module_refers_to_cuda() -> None:
    root = Path(__file__).parents[1]
    knows = set()
    for path in (*root.glob("pipeline/**/*.py"), *root.glob("workers/**/*.py")):
        if re.search(r"torch\.cuda|type [=!]= .cuda", path.read_text()):
            knows.add(str(path.relative_to(root)))
    assert knows == {"workers/data/accelerator.py"}


# ---- the device itself ---------------------------------------------------------------------------
def host(*shape: int) -> Tensor:
    return torch.ones(shape)


def device_tensor(*shape: int) -> Tensor:
    return torch.ones(shape).to(NAME)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sum of both": (lambda: device_tensor(2) + host(2), "at least two devices"),
    "joined": (lambda: torch.cat([device_tensor(2), host(2)]), "at least two devices"),
    "a layer": (lambda: nn.Linear(2, 2)(device_tensor(1, 2)), "at least two devices"),
    "a loss": (
        lambda: nn.functional.cross_entropy(device_tensor(2, 3), host(2).long()),
        "at least two devices",
    ),
    "rows by index_select": (
        lambda: device_tensor(2).index_select(0, host(1).long()),
        "at least two devices",
    ),
    "an index on the device": (lambda: host(2)[device_tensor(1).long()], "at least two devices"),
    "a write from the host": (
        lambda: device_tensor(2).__setitem__(slice(0, 1), device_tensor(2)[:1] + host(1)),
        "at least two devices",
    ),
    "values from the host": (
        lambda: device_tensor(2).index_put_((host(1).long(),), host(1)),
        "at least two devices",
    ),
    "a sum into the host": (lambda: host(2).add_(device_tensor(2)), "output is on the CPU"),
    "a result into the host": (
        lambda: torch.gt(device_tensor(2), 0, out=host(2).bool()),
        "output is on the CPU",
    ),
    "a scalar of the host that is written": (
        lambda: host().add_(device_tensor()),
        "output is on the CPU",
    ),
    "a generator of the host": (
        lambda: torch.rand(2, generator=torch.Generator(), device=NAME),
        "'strict' device type for generator but found 'cpu'",
    ),
    "one in place": (
        lambda: device_tensor(2).uniform_(generator=torch.Generator()),
        "'strict' device type for generator but found 'cpu'",
    ),
    "a generator of the device": (
        lambda: torch.randperm(2, generator=torch.Generator(NAME)),
        "'cpu' device type for generator but found 'strict'",
    ),
    "numpy": (
        lambda: device_tensor(2).numpy(),
        "can't convert strict:0 device type tensor to numpy",
    ),
    "numpy of its own": (
        lambda: __import__("numpy").asarray(device_tensor(2)),
        "can't convert strict:0 device type tensor to numpy",
    ),
    "other data": (lambda: setattr(device_tensor(2), "data", host(2)), "attempted to set the data"),
    "pinned": (lambda: device_tensor(2).pin_memory(), "cannot pin"),
    "a device without an index": (
        lambda: accelerator.limit_memory(torch.device(NAME), 1.0),
        "Expected a torch.device with a specified index",
    ),
    "what another stream still writes": (
        lambda: other_stream()[0] + 1,
        "another stream may still be writing",
    ),
    "freed while another stream uses it": (lambda: free_early(), "memory was freed"),
}


def other_stream() -> tuple[Tensor, Any]:
    """Return a tensor that another stream writes, and that stream."""
    stream = accelerator.functions().Stream(torch.device(NAME, 0))
    with accelerator.functions().stream(stream):
        return torch.ones(2, device=NAME), stream


def free_early(record: bool = False) -> None:
    """Free a tensor of another stream after the current stream has used it.

    record: whether to call `record_stream` first, which makes this safe.
    """
    tensor, stream = other_stream()
    this_stream = accelerator.functions().current_stream(torch.device(NAME, 0))
    this_stream.wait_stream(stream)
    tensor + 1
    if record:
        tensor.record_stream(this_stream)


COUNTED: dict[str, tuple[Callable[[Tensor], Any], Counts]] = {  # x: a (4, 4) tensor of ones
    "a view": (lambda x: x.t()[:2].detach(), Counts()),
    "a product": (lambda x: x @ x, Counts(ops=1)),
    "in place": (lambda x: x.mul_(2), Counts(ops=1)),
    "a scalar of the host": (lambda x: x * host(), Counts(ops=1)),
    "a copy on the device": (lambda x: x.double(), Counts(ops=1)),
    "a copy to it": (lambda x: host(3).to(NAME), Counts(copies=1, uploads=1)),
    "a copy into it": (lambda x: x.copy_(host(4, 4)), Counts(copies=1, uploads=1)),
    "a copy from pinned memory": (
        lambda x: host(3).pin_memory().to(NAME, non_blocking=True),
        Counts(uploads=1),
    ),
    "a tensor of numbers": (
        lambda x: torch.tensor([1.0, 2.0], device=NAME),
        Counts(copies=1, uploads=1),
    ),
    "an index of the host": (lambda x: x[torch.tensor([0, 1])], Counts(ops=1, copies=1, uploads=1)),
    "a copy from it": (lambda x: x.cpu(), Counts(reads=1)),
    "a list": (lambda x: x.tolist(), Counts(reads=1)),
    "an item": (lambda x: x[0, 0].item(), Counts(ops=1, reads=1)),
    "a truth value": (lambda x: bool(x[0, 0]), Counts(ops=1, reads=1)),
    "which are there": (lambda x: x.nonzero(), Counts(ops=1, reads=1)),
    "rows under a mask": (lambda x: x[x > 0], Counts(ops=2, reads=1)),
    "a value under a mask": (lambda x: x.masked_fill(x > 0, 1.0), Counts(ops=2)),
    "different ones": (lambda x: x.unique(), Counts(ops=1, reads=1)),
    "equal": (lambda x: torch.equal(x, x + 1), Counts(ops=2, reads=1)),
}


def refused(name: str) -> str:
    """Return the device's error for REFUSED[name]; call in the device's process."""
    try:
        with strict_device():
            REFUSED[name][0]()
    except (DeviceError, TypeError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_operations_refused_by_cuda_are_refused(device: Any, name: str) -> None:
    assert REFUSED[name][1] in device.submit(refused, name).result()


def allowed() -> None:
    """Check operations that CUDA allows; call in the device's process."""
    with strict_device():
        x = device_tensor(3, 2).requires_grad_()
        ((x * host() + torch.tensor(2.0)).sum() / 2).backward()
        assert x.grad is not None
        assert x.grad.device.type == NAME
        assert x[torch.tensor([2, 0])].device.type == NAME
        assert torch.where(x > 0, x, torch.tensor(0.0)).device.type == NAME
        same = torch.rand(3, generator=torch.Generator(NAME).manual_seed(1), device=NAME)
        assert same.tolist() == torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()
        free_early(record=True)
        tensor, stream = other_stream()
        accelerator.functions().current_stream(x.device).wait_event(stream.record_event())
        assert (tensor + 1).tolist() == [2, 2]
        stream.wait_stream(accelerator.functions().current_stream(x.device))


def test_operations_accepted_by_cuda_are_accepted(device: Any) -> None:
    device.submit(allowed).result()


def counts_of(name: str) -> Counts:
    with strict_device() as strict:
        x = device_tensor(4, 4)
        before = strict.counts
        COUNTED[name][0](x)
        return strict.counts - before


@pytest.mark.parametrize("name", COUNTED)
def test_operations_copies_and_reads_are_counted(device: Any, name: str) -> None:
    assert device.submit(counts_of, name).result() == COUNTED[name][1]


def moved() -> None:
    """Move a network to the device and back; call in the device's process."""
    import copy
    import weakref

    with strict_device():
        network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        weight, reference = network[0].weight, weakref.ref(network[0].weight)
        network.to(NAME)
        assert network[0].weight is weight is reference()
        assert {t.device.type for t in network.state_dict().values()} == {NAME}
        assert {t.device.type for t in copy.deepcopy(network).state_dict().values()} == {NAME}
        assert isinstance(weight, nn.Parameter)
        network.to("cpu")
        assert network[0].weight is weight
        assert type(weight) is nn.Parameter
        weight.data.numpy()


def test_moved_parameter_stays_the_same_object(device: Any) -> None:
    device.submit(moved).result()


# ---- methods that would stop on a GPU ------------------------------------------------------------
class DrawsOnTheHost(FineTune):
    """A method that draws noise with a generator on the host."""

    def loss(self, batch: Batch, progress: Progress) -> Any:
        noise = torch.rand(
            batch.images.shape,
            generator=torch.Generator().manual_seed(1),
            device=batch.images.device,
        )
        return super().loss(
            Batch(batch.images + noise, batch.labels, batch.tasks, batch.draw), progress
        )


class KeepsATensor(FineTune):
    """A method with a tensor that is not a buffer, so it stays on the host."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = torch.ones(self.heads.width)

    def features(self, images: Tensor) -> Tensor:
        return super().features(images) * self.scale


class JoinsWhatItStores(FineTune):
    """A method with a `finish` that concatenates a tensor on the host with its weights."""

    def finish(self) -> Any:
        state, carried = super().finish()
        bias = self.heads[state.task].bias.detach()
        state.tokens["joined"] = torch.cat([torch.zeros(1), bias])
        return state, carried


class LooksByNumpy(FineTune):
    """A method that converts the labels to a NumPy array."""

    def loss(self, batch: Batch, progress: Progress) -> Any:
        assert len(batch.labels.numpy())
        return super().loss(batch, progress)


class WaitsInEveryStep(FineTune):
    """A method that reads its loss in every step."""

    def loss(self, batch: Batch, progress: Progress) -> Any:
        loss, terms = super().loss(batch, progress)
        assert loss.item() > 0
        return loss, terms


BROKEN = {
    cls.__name__: cls for cls in (DrawsOnTheHost, KeepsATensor, JoinsWhatItStores, LooksByNumpy)
}


def broken(name: str) -> Any:
    """Check a broken method under the name `finetune`; call in the device's process."""
    with mock.patch.dict(
        METHODS, {"finetune": {**BROKEN, "WaitsInEveryStep": WaitsInEveryStep}[name]}
    ):
        return on_strict_device.check(
            Case("finetune", "task", train={"batch_size": 31 - len(name)}), resume=False
        )


@pytest.mark.parametrize("name", BROKEN)
def test_method_that_would_fail_on_a_gpu_is_detected(device: Any, name: str) -> None:
    with pytest.raises((DeviceError, TypeError), match=r"devices|generator|numpy") as error:
        device.submit(broken, name).result()
    sentence = str(error.value)
    assert sentence.startswith("method 'finetune' would stop on a GPU: ")
    assert re.search(r"At \S*test_strict_device\.py:\d+ in (loss|features|finish): ", sentence)
    assert "register them as a parameter, a buffer or a module" in sentence


def test_method_that_makes_the_host_wait_is_detected(device: Any) -> None:
    step = ("finetune", "task", "train")
    counts = device.submit(broken, "WaitsInEveryStep").result()[step]
    bound = read_bounds()[step]
    assert counts.reads == bound.reads + 1
    message = next(sentence for sentence in higher(step, counts, bound) if "reads" in sentence)
    assert message == (
        f"finetune/task/train: a training step costs {bound.reads + 1} reads that the host "
        f"waits for, and finetune.json records {bound.reads}; "
        "the counts must not rise: remove the added ones"
    )


# ---- the recorded counts -------------------------------------------------------------------------
def test_each_training_step_of_every_method_has_a_bound() -> None:
    trained = {
        (method, scenario, step.name)
        for method, scenario in EVERY
        for step in METHODS[method].steps
        if step.trains and METHODS[method].has_training()
    }
    bounds = read_bounds().keys()
    assert not trained - bounds, f"no bound for {sorted(trained - bounds)}; {RECORD}"
    assert not bounds - trained, f"remove the bounds of {sorted(bounds - trained)}"


def test_bounds_are_recorded_beside_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds, settings = read_bounds(), golden_keys.read()
    shutil.copytree(golden_keys.METHOD_FILES, tmp_path / "methods")
    monkeypatch.setattr(golden_keys, "METHOD_FILES", tmp_path / "methods")
    lowered = bounds | {next(iter(bounds)): Counts(1, 2, 3)}
    write_bounds(lowered)
    assert read_bounds() == lowered
    assert golden_keys.read() == settings
