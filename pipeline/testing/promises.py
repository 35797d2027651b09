"""Promises: properties of methods, each with a check that takes a lab, a method and an optimizer.

The decorator `promise` registers each check in PROMISES. The attributes of a method class
(`carries`, `may_forget`, `freezes_backbone`, ...) determine whether a promise applies to the
method. The name of the method does not matter. A promise is checked with all optimizers if the
choice of the optimizer can break it, and otherwise with one optimizer.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pipeline.testing.lab import (
    BESIDE,
    OPTIMIZERS,
    TASKS,
    Lab,
    Run,
    again,
    compute_task_logits,
    contents,
    history,
    other_values,
)
from workers import evaluate, loop, restore
from workers.data.feed import Feed
from workers.data.rows import list_keys
from workers.dist import Group
from workers.errors import UserError
from workers.evaluate import accuracy
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, StepContext, StepData
from workers.methods.registration import describe_unknown
from workers.model.vit import compute_digest
from workers.serving.bundle import Bundle, carried_file
from workers.storage.artifact import Artifact
from workers.storage.taskstate import KINDS, Carried, load_tensors

Check = Callable[[Lab, str, str], None]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # holds the packages pipeline and workers
FIRST, SECOND = 0, 1  # positions of the two tasks in the stream
STATE, CARRIED = "task.safetensors", "carried.safetensors"
QUICK = {"epochs": 1, "batch_size": 32}


class BrokenPromise(AssertionError):
    """Error that names the method, the broken promise, the failed check and a remedy."""


@dataclass(frozen=True)
class Promise:
    """A check of a property of methods.

    Attributes:
        check: Function that raises `BrokenPromise` if a method breaks the promise.
        remedy: Advice to the author of a method that breaks the promise.
        applies: Returns whether the promise applies to a method class.
        optimizers: Names (in OPTIMIZERS) of the optimizers to check the promise with.
    """

    check: Check
    remedy: str
    applies: Callable[[type[Method]], bool]
    optimizers: tuple[str, ...]


PROMISES: dict[str, Promise] = {}


def list_cases(method: str) -> list[tuple[str, str]]:
    """Return (promise, optimizer) for each promise that applies to a method.

    Raises:
        UserError: If the method does not exist.
    """
    if method not in METHODS:
        raise UserError(f"there is no method {method!r}; {describe_unknown(method)}")
    cls = METHODS[method]
    applying = [(name, promise) for name, promise in PROMISES.items() if promise.applies(cls)]
    return [(name, optimizer) for name, promise in applying for optimizer in promise.optimizers]


def promise(
    remedy: str,
    applies: Callable[[type[Method]], bool] = lambda cls: True,
    optimizers: tuple[str, ...] = ("adamw",),
) -> Callable[[Check], Check]:
    """Decorator that registers a check as a promise. Its errors become `BrokenPromise` errors.

    Args:
        remedy: Advice to the author of a method that breaks the promise.
        applies: Returns whether the promise applies to a method class.
        optimizers: Optimizers to check the promise with.
    """

    def register(check: Check) -> Check:
        name = check.__name__.removeprefix("check_")

        @functools.wraps(check)
        def explained(lab: Lab, method: str, optimizer: str) -> None:
            try:
                check(lab, method, optimizer)
            except AssertionError as error:
                if is_seen_by_tests(error):
                    raise BrokenPromise(
                        describe_broken_promise(name, method, optimizer, error)
                    ) from error
                raise BrokenPromise(describe_early_error(name, method, optimizer, error)) from error
            except Exception as error:
                raise BrokenPromise(describe_early_error(name, method, optimizer, error)) from error

        PROMISES[name] = Promise(explained, remedy, applies, optimizers)
        return explained

    return register


@contextmanager
def refusing(words: str) -> Iterator[None]:
    """Context manager that expects a `UserError` with `words`, and catches it.

    Raises:
        AssertionError: If no `UserError` is raised, or if its text does not contain `words`.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
    else:
        raise AssertionError(f"no UserError with the words {words!r}")
    assert words in text, text


def trains_later(cls: type[Method]) -> bool:
    """Return whether, with default settings, the second task has a step that trains."""
    return any(step.trains for step in cls.steps_for(cls.Settings(), SECOND))


def find_stage_with_epochs(run: Run) -> StageJob:
    """Return the first stage with epochs of the second task, else of the first task."""
    jobs = [*run.stages(SECOND), *run.stages(FIRST)]
    trained: StageJob = next(job for job in jobs if history(run.artifact(job)))
    return trained


def is_seen_by_tests(error: BaseException) -> bool:
    """Return whether an error was raised by the code of a check, and not by the tested code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).parent == HERE


def describe_early_error(name: str, method: str, optimizer: str, error: BaseException) -> str:
    """Describe an error of the method, or of the pipeline, before the promise could be checked.

    The text does not contain the remedy of the promise, because it would not help.
    """
    frames = traceback.extract_tb(error.__traceback__)
    source = inspect.getfile(METHODS[method])
    rooms = (ROOT / "workers", ROOT / "pipeline", Path(source).parent)
    last = [f for f in frames if any(map(Path(f.filename).is_relative_to, rooms))][-1]
    file = Path(last.filename)
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    return (
        f"method {method!r} stopped under {optimizer} before the promise {name!r} could be "
        f"checked: {type(error).__name__}: {error}. Method: {source}; raised at "
        f"{place}:{last.lineno} in {last.name}"
    )


def describe_broken_promise(name: str, method: str, optimizer: str, error: BaseException) -> str:
    """Describe a broken promise: the method, the remedy and the failed line of the check."""
    frames = traceback.extract_tb(error.__traceback__)
    in_check = [frame for frame in frames if frame.name == f"check_{name}"]
    line = in_check[-1].lineno if in_check else 0
    source = inspect.getfile(METHODS[method])
    return (
        f"method {method!r} breaks the promise {name!r} under {optimizer}: "
        f"{PROMISES[name].remedy}. Method: {source}; check: pipeline/testing/promises.py:{line}. "
        f"Seen: {str(error) or 'an assertion without a message'}"
    )


# ---- nothing changes earlier tasks or the backbone -----------------------------------------------
@promise(
    "train no parameter of the backbone, or declare freezes_backbone = False",
    lambda cls: cls.freezes_backbone,
    tuple(OPTIMIZERS),
)
def check_the_backbone_stays_frozen(lab: Lab, method: str, optimizer: str) -> None:
    """Training changes no tensor of a frozen backbone."""
    run = lab.run(method, optimizer)
    for task in (FIRST, SECOND):
        live = run.live(task)
        assert (
            compute_digest(live.backbone) == live.backbone_digest == run.state(task).backbone_digest
        )


@promise(
    (
        "put locked entries back in after_step (gradients alone do not stop decay and "
        "momentum), or declare may_forget = True"
    ),
    lambda cls: not cls.may_forget,
    tuple(OPTIMIZERS),
)
def check_old_answers_stay(lab: Lab, method: str, optimizer: str) -> None:
    """The logits of a finished task stay equal, bit for bit, after a later task is trained.

    Both optimizers are checked, because weight decay and momentum move weights without gradients.
    """
    old_answers_stay(lab.run(method, optimizer))


def old_answers_stay(run: Run) -> None:
    """Check that the logits of the first task are equal before and after the second task."""
    images = run.images(FIRST)
    alone, beside = run.served(FIRST), run.served(SECOND)
    assert torch.equal(
        compute_task_logits(alone, images, run.order[FIRST]),
        compute_task_logits(beside, images, run.order[FIRST]),
    )


@promise(
    "gate after the whole backward pass and lock in fp32, or declare may_forget = True",
    lambda cls: not cls.may_forget,
)
def check_old_answers_stay_under_accumulation_and_bf16(
    lab: Lab, method: str, optimizer: str
) -> None:
    """The logits of a finished task also stay equal with micro-batches and bf16."""
    old_answers_stay(lab.run(method, optimizer, accumulate=2, precision="bf16", epochs=1))


@promise(
    "give the optimizer this task's parameters alone, and never write into a loaded state",
    lambda cls: not cls.may_forget and trains_later(cls),
)
def check_another_tasks_training_leaves_a_loaded_task_alone(
    lab: Lab, method: str, optimizer: str
) -> None:
    """The training of a later task changes neither the head nor the state of an earlier task.

    If the method carries nothing, the logits of the earlier task do not change either.
    """
    run = lab.run(method, optimizer)
    task, state, images = run.order[FIRST], run.state(FIRST), run.images(FIRST)
    live, job = run.fresh(SECOND), again(run.stages(SECOND)[0], "beside")
    live.load_task(state)
    loop.fit(job, live, restore.load_carried(job), Group(), lambda event: None)
    if not live.carries:
        assert torch.equal(
            compute_task_logits(live, images, task),
            compute_task_logits(run.served(FIRST), images, task),
        )
    assert any(p.grad is not None for p in live.parameters())
    assert all(p.grad is None and not p.requires_grad for p in live.heads[task].parameters())
    assert have_equal_tensors(live.heads.export(task), run.state(FIRST).head)
    assert all(
        have_equal_tensors(getattr(state, kind), getattr(run.state(FIRST), kind)) for kind in KINDS
    )


@promise(
    "detach and clone what finish() puts into the state and into what is carried",
)
def check_tasks_share_no_memory(lab: Lab, method: str, optimizer: str) -> None:
    """State and carried tensors share no memory with the model or with each other."""
    run = lab.run(method, optimizer)
    taken: dict[int, str] = {}
    for task in (FIRST, SECOND):
        live, (state, carried) = run.live(task), run.finished(task)
        model_tensors = {
            t.untyped_storage().data_ptr(): f"a tensor of the model {n}"
            for n, t in [*live.named_parameters(), *live.named_buffers()]
        }
        handed = {
            f"{kind}/{n}": t for kind in KINDS for n, t in getattr(state, kind).items()
        } | carried.tensors
        for name, tensor in handed.items():
            where = tensor.untyped_storage().data_ptr()
            assert where not in model_tensors, f"{name} is {model_tensors.get(where)}"
            assert taken.setdefault(where, f"{task}:{name}") == f"{task}:{name}"


# ---- stored states -------------------------------------------------------------------------------
@promise(
    (
        "store what is served: make masks hard before finish(), and read everything back in "
        "load_task and load_carried"
    ),
)
def check_the_stored_bytes_are_the_method(lab: Lab, method: str, optimizer: str) -> None:
    """A stored and loaded task gives the same logits as what `finish` returned, bit for bit.

    The method object at the end of training gives the same logits up to rounding.
    """
    run = lab.run(method, optimizer)
    name, images, direct = run.order[FIRST], run.images(FIRST), run.fresh()
    state, carried = run.finished(FIRST)
    direct.load_task(state)
    if run.evaluate_job(FIRST).previous:
        direct.load_carried(carried)
    served = compute_task_logits(run.served(FIRST), images, name)
    assert torch.equal(compute_task_logits(direct, images, name), served)
    assert torch.allclose(compute_task_logits(run.live(FIRST), images, name), served, atol=1e-4)
    stored = run.trained(FIRST)
    assert run.state(FIRST).to_bytes() == stored.read(STATE)
    assert Carried.from_bytes(stored.read(CARRIED)).to_bytes() == stored.read(CARRIED)


@promise(
    (
        "return from finish() what this task's training left: its own name and classes, and copies "
        "made in finish(), not in begin() and not of an earlier task"
    ),
)
def check_a_state_is_of_its_own_task(lab: Lab, method: str, optimizer: str) -> None:
    """The stored state of each task has its name, its classes, and its logits after training.

    The logits are compared up to rounding.
    """
    run = lab.run(method, optimizer)
    for task in (FIRST, SECOND):
        name = run.order[task]
        state = run.state(task)
        assert (state.task, state.classes) == (name, TASKS[name]), f"the state of {name!r}"
        rows = state.head["weight"].shape[0] if "weight" in state.head else len(TASKS[name])
        assert rows == len(TASKS[name]), f"the head of {name!r} has {rows} rows"
        images = run.images(task)
        trained = compute_task_logits(run.live(task), images, name)
        distance = float(
            (trained - compute_task_logits(run.served(task), images, name)).abs().max()
        )
        assert distance <= 1e-4, f"task {name!r} is served with logits {distance:.2g} apart"


@promise(
    (
        "store nothing that no answer needs, and use in serving_weights or features what "
        "load_task got"
    ),
    lambda cls: cls.trains_on == "task" and not getattr(cls, "uses_class_means", False),
)
def check_whatever_is_stored_has_a_part_in_the_answers(
    lab: Lab, method: str, optimizer: str
) -> None:
    """Each kind of stored tensor has an effect: inverted masks or other values change the logits.

    The check does not apply to methods that train on all tasks so far, or that classify by class
    means. The latter store their head only as a teacher of the next task.
    """
    run = lab.run(method, optimizer)
    name, images = run.order[FIRST], run.images(FIRST)
    expected = compute_task_logits(run.served(FIRST), images, name)
    for kind in KINDS:
        state, changed = run.state(FIRST), run.fresh()
        stored: dict[str, Tensor] = getattr(state, kind)
        for key, tensor in stored.items():
            stored[key] = (
                ~tensor
                if kind == "masks"
                else tensor
                + torch.linspace(0, 1, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)
            )
        try:
            changed.load_task(state)
        except UserError:
            continue  # the changed state is rejected as inconsistent, so this kind has an effect
        if run.evaluate_job(FIRST).previous:
            changed.load_carried(run.carried(FIRST))
        assert not stored or not torch.equal(
            compute_task_logits(changed, images, name), expected
        ), kind


@promise(
    (
        "name in `training_only` the carried entries that only training needs, such as the keys of "
        "exemplars, and let load_carried do without them"
    ),
    lambda cls: bool(cls.carries or cls.starts_from),
)
def check_a_bundle_leaves_out_what_only_training_needs(
    lab: Lab, method: str, optimizer: str
) -> None:
    """A bundle gives the same logits without the carried entries of `training_only`.

    The bundle contains no name of a training image, and each pattern of `training_only` matches an
    entry.
    """
    run = lab.run(method, optimizer)
    served, job = run.served(SECOND), run.evaluate_job(SECOND)
    folder = str(lab.folder / f"bundle-{job.key}")
    Bundle.of_job(job).write(folder)
    bundle = Bundle.open(folder)
    loaded = bundle.method()
    for name in job.states:
        images = run.images(run.order.index(name))
        assert torch.equal(
            compute_task_logits(loaded, images, name), compute_task_logits(served, images, name)
        ), name
    patterns = METHODS[method].training_only
    left_out: set[str] = set()
    for step, key in job.previous.items():
        stored = Carried.from_bytes(Artifact.need(job.root, key).read(CARRIED))
        data = bundle.read(carried_file(step))
        shipped = Carried.from_bytes(data)
        entries = stored.tensors | stored.meta
        missing = entries.keys() - shipped.tensors.keys() - shipped.meta.keys()
        assert missing == {e for e in entries if any(fnmatchcase(e, p) for p in patterns)}
        assert have_equal_tensors(
            shipped.tensors, {n: t for n, t in stored.tensors.items() if n not in missing}
        )
        assert not missing or len(data) < len(stored.to_bytes())
        left_out |= missing
    idle = [p for p in patterns if not any(fnmatchcase(entry, p) for entry in left_out)]
    assert not idle, f"no carried entry matches {idle}"
    image_keys: list[str] = []
    for task in job.tasks:
        image_keys += chain(*list_keys(job.root, task, job.data.val_fraction).values())
    for file in bundle.body["files"]:
        _, header = load_tensors(bundle.read(file), file)
        text = json.dumps(header)
        named = [key for key in image_keys if json.dumps(key) in text]
        assert not named, f"{file} names {len(named)} training images, such as {named[0]}"


@promise(
    "leave TaskState.sizes as it is, and store tensors in masks, tokens, head or copies",
)
def check_the_recorded_size_is_the_size_of_the_file(lab: Lab, method: str, optimizer: str) -> None:
    """The recorded sizes of a task and of the carried state are the sizes of the stored tensors."""
    run = lab.run(method, optimizer)
    for task in (FIRST, SECOND):
        stored = run.trained(task)
        for name, recorded in (
            (STATE, sum(stored.manifest["sizes"].values())),
            (CARRIED, stored.manifest["carried_bytes"]),
        ):
            data = stored.read(name)
            header = 8 + int.from_bytes(data[:8], "little")
            assert recorded == len(data) - header, name


@promise(
    "call super().load_task(state) first",
)
def check_a_state_of_another_backbone_is_refused(lab: Lab, method: str, optimizer: str) -> None:
    """A state of another backbone, or of another method, raises a `UserError`."""
    run = lab.run(method, optimizer)
    state, other = run.state(FIRST), run.fresh()
    with refusing("belongs to backbone"):
        other.load_task(replace(state, backbone_digest="0" * 64))
    with refusing("written by method"):
        other.load_task(replace(state, method="another"))


# ---- how it trains -------------------------------------------------------------------------------
@promise(
    ("start masks and modules so that they change nothing, or declare starts_as_backbone = False"),
    lambda cls: cls.starts_as_backbone,
)
def check_it_starts_as_the_backbone(lab: Lab, method: str, optimizer: str) -> None:
    """Before the first optimizer step, the features are those of the backbone."""
    run = lab.run(method, optimizer)
    job, images, plain = run.stages(FIRST)[0], run.images(FIRST), run.fresh().backbone.eval()
    live = begun(run)
    assert job.task is not None
    expected = live.heads[job.task.name](plain(images))
    assert torch.allclose(compute_task_logits(live, images, job.task.name), expected, atol=1e-6)


def begun(run: Run) -> Method:
    """Return the method after `begin` of the first task, before any training."""
    live: Method = run.fresh()
    job = run.stages(FIRST)[0]
    assert job.task is not None
    tasks = (job.task,)
    plan = OptimPlan(job.train.lr, job.train.weight_decay, job.train.batch_size, 10.0)
    data = StepData(lambda split, training: Feed(job, tasks, split, Group(), training))
    live.begin(StepContext(job.task, plan, job.step, training_tasks=tasks, data=data))
    return live


@promise(
    (
        "derive random numbers from derive_seed(self.seed, ..., task.name), not from "
        "positions or from what the process did before; or declare what is carried in "
        "`carries`"
    ),
    lambda cls: cls.trains_on == "task" and not cls.carries,
)
def check_the_order_of_tasks_changes_nothing(lab: Lab, method: str, optimizer: str) -> None:
    """Without carried state, a task has the same key and bytes at each position of the stream."""
    run = lab.run(method, optimizer)
    turned = lab.run(method, optimizer, order=(*reversed(run.order),))
    assert run.trained(SECOND).key == turned.stages(FIRST)[-1].key
    turned_key: dict[str, str] = {}
    for job in turned.stages(FIRST):
        job = again(
            job, "turned", previous={step: turned_key[key] for step, key in job.previous.items()}
        )
        assert job.tasks != run.stages(SECOND)[0].tasks
        stored, turned_key[job.key.removesuffix("-turned")] = lab.stage(job), job.key
    assert stored.read(STATE) == run.trained(SECOND).read(STATE)


@promise(
    (
        "draw in training from Batch.draw, else from derive_seed(self.seed, ...) or the "
        "process's torch generator, and change no file of another stage"
    ),
)
def check_a_stage_tried_again_gives_the_same_bytes_and_leaves_its_parents_alone(
    lab: Lab, method: str, optimizer: str
) -> None:
    """A second run of a stage gives the same bytes, and no stage changes its inputs."""
    run = lab.run(method, optimizer)
    for job in run.stages(SECOND):
        stored = run.artifact(job)
        parents = [
            Artifact.need(job.root, key) for key in (job.backbone, *job.previous.values()) if key
        ]
        before = [contents(p) for p in parents]
        torch.manual_seed(len(before))  # results must not depend on the state of the process
        repeated = lab.stage(again(job, "retried"))
        assert_same_results(job.id, repeated, stored)
        assert history(repeated) == history(stored)
        assert [contents(p) for p in parents] == before


@promise(
    (
        "draw in loss, after_backward and after_step from Batch.draw (per_sample, shared), never "
        "from a generator of the process: what that gives differs with the ranks and micro-batches"
    ),
    lambda cls: cls.has_training(),
)
def check_training_draws_from_the_batch_alone(lab: Lab, method: str, optimizer: str) -> None:
    """A training step does not use the generators of torch, NumPy and Python."""
    run = lab.run(method, optimizer)
    job = find_stage_with_epochs(run)
    train_step = loop.train_step
    drawn: set[str] = set()

    def watched(*arguments: Any) -> Any:
        before = generators()
        terms = train_step(*arguments)
        drawn.update(name for name, state in generators().items() if state != before[name])
        return terms

    with mock.patch.object(loop, "train_step", watched):
        lab.stage(again(job, "watched"))
    assert not drawn, f"the steps of {job.id} drew from {', '.join(sorted(drawn))}"


@promise(
    (
        "keep what blocks of the backbone use in a forward pass in their modules, or in objects "
        "that are hooks of these; or set can_recompute to False"
    ),
    lambda cls: cls.has_training() and cls.can_recompute,
)
def check_recomputed_activations_give_the_same_bytes(lab: Lab, method: str, optimizer: str) -> None:
    """A stage gives the same bytes with `train.recompute`."""
    job = find_stage_with_epochs(lab.run(method, optimizer))
    train = job.train.model_copy(update={"recompute": True})
    recomputed = lab.stage(again(job, "recomputed", train=train))
    assert_same_results(job.id, recomputed, Artifact.need(job.root, job.key))


def generators() -> dict[str, Any]:
    """Return the states of the random generators of this process: name of a function -> state."""
    return {
        "torch.rand": torch.get_rng_state().tolist(),
        "numpy.random": repr(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }


@promise(
    (
        "register what training keeps as a parameter, a buffer or a module (nn.ModuleDict, "
        "not a dict), so that it is in the checkpoint"
    ),
    lambda cls: cls.has_training(),
)
def check_an_interrupted_stage_ends_as_if_it_had_not_been(
    lab: Lab, method: str, optimizer: str
) -> None:
    """An interrupted and resumed stage gives the same bytes.

    All state of the training must be in the checkpoint. A plain tensor attribute is not in it.
    """
    run = lab.run(method, optimizer)
    job = find_stage_with_epochs(run)
    per_epoch = -(-history(run.artifact(job))[0]["images"] // job.train.batch_size)
    # checkpoint_s=1e-9: a checkpoint after every step
    stored, resumed = run.artifact(job), again(job, "resumed", checkpoint_s=1e-9)
    with suppress(Interrupted), interrupted_after(per_epoch + 2):
        lab.stage(resumed)
        raise AssertionError("the stage ended before the interruption")
    with interrupted_after(1000) as steps:
        repeated = lab.stage(resumed)
    # the stage was resumed and did not start again
    assert len(steps) == len(history(stored)) * per_epoch - per_epoch - 2
    assert_same_results(job.id, repeated, stored)
    assert history(repeated) == history(stored)


def assert_same_results(stage: str, repeated: Artifact, stored: Artifact) -> None:
    """Raise `AssertionError` with the names of differing tensors unless all bytes are equal."""
    for name in (STATE, CARRIED):
        repeated_bytes, expected = repeated.read(name), stored.read(name)
        if repeated_bytes == expected:
            continue
        tensors, header = load_tensors(repeated_bytes, name)
        expected_tensors, other_header = load_tensors(expected, name)
        differing = sorted(tensors.keys() ^ expected_tensors.keys())
        for key in sorted(tensors.keys() & expected_tensors.keys()):
            if not torch.equal(tensors[key], expected_tensors[key]):
                differing.append(key)
        if header != other_header:
            differing.append("the header")
        raise AssertionError(f"{stage}: {name} differs in {', '.join(differing[:5])}")


class Interrupted(RuntimeError):
    """Error with which `interrupted_after` ends a stage in the middle of training."""


class interrupted_after:
    """Context manager that allows `steps` steps of the train loop, then raises `Interrupted`.

    It returns a list with an entry for each started step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done: list[Any] = []
        self.original = loop.train_step

    def __enter__(self) -> list[Any]:
        self.patch = mock.patch.object(loop, "train_step", self.step)
        self.patch.start()
        return self.done

    def step(self, *arguments: Any) -> Any:
        if len(self.done) == self.steps:
            raise Interrupted
        self.done.append(arguments[3])
        return self.original(*arguments)

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()


@promise(
    (
        "hand on in every step what earlier tasks carried, merged with what the task adds: take it "
        "in begin from context.carried, and return all of it from finish()"
    ),
    lambda cls: bool(cls.carries) and not getattr(cls, "uses_class_means", False),
)
def check_a_chain_forgets_nothing_that_it_carries(lab: Lab, method: str, optimizer: str) -> None:
    """Each kind of carried tensor of the first task reaches the second, and has an effect there.

    The check does not apply to methods that classify by class means, because class means are
    computed again from exemplars.
    """
    run = lab.run(method, optimizer, epochs=1)
    stored = run.trained(SECOND)
    job = run.stages(SECOND)[-1]
    handed = restore.load_carried(job)
    assert handed is not None
    for kind in sorted(
        list_carried_kinds(run.carried(FIRST)) & list_carried_kinds(run.carried(SECOND))
    ):
        assert kind in list_carried_kinds(handed), (
            f"{job.id} is not handed {kind!r}: a step before drops it"
        )
        changed = change_kind(handed, kind)
        if changed is None:
            continue
        try:
            with mock.patch.object(loop, "load_carried", return_value=changed):
                repeated = lab.stage(again(job, f"other-{kind}"))
        except UserError:
            continue  # the changed state is rejected as inconsistent, so this kind has an effect
        has_part = any(repeated.read(name) != stored.read(name) for name in (STATE, CARRIED))
        assert has_part, f"{job.id} leaves the same whatever it is handed as {kind!r}"


def list_carried_kinds(carried: Carried) -> set[str]:
    """Return the kinds of the carried tensors.

    The kind of a tensor is the part of its name before the first slash; "" for a name without
    slash.
    """
    return {name.rpartition("/")[0].split("/")[0] for name in carried.tensors}


def change_kind(carried: Carried, kind: str) -> Carried | None:
    """Return the carried state with other values in the tensors of a kind.

    The result is None if no value changes, for example because the kind has only integers.
    """
    tensors = dict(carried.tensors)
    for name, tensor in carried.tensors.items():
        if name.rpartition("/")[0].split("/")[0] != kind:
            continue
        if tensor.dtype == torch.bool:
            tensors[name] = ~tensor
        elif tensor.is_floating_point():
            tensors[name] = 1.1 * tensor + 0.01
    if have_equal_tensors(tensors, carried.tensors):
        return None
    return Carried(tensors, carried.meta)


@promise(
    "read context.data.feed('train') or 'val' alone while training",
)
def check_training_never_looks_at_test_data(lab: Lab, method: str, optimizer: str) -> None:
    """No training step selects images of the test split."""
    run = lab.run(method, optimizer)
    for task in (FIRST, SECOND):
        run.trained(task)
        for job in run.stages(task):
            assert lab.opened.get(job.key, set()) <= {"train"}, (
                "validation is held out of train, nothing else is read"
            )
        run.evaluated(task)
        assert "test" in lab.opened[run.evaluate_job(task).key]


@promise(
    (
        "ask context.data for images and keys of the task in training alone, or declare "
        'reads = "seen", so that the stage waits for the data of all tasks so far'
    ),
    lambda cls: "seen" not in (cls.reads, cls.trains_on),
)
def check_a_step_looks_up_the_data_that_it_declares(lab: Lab, method: str, optimizer: str) -> None:
    """A step selects only images of its own task, unless the method declares `seen`."""
    run = lab.run(method, optimizer)
    run.trained(SECOND)
    for job in run.stages(SECOND):
        undeclared = lab.looked_up.get(job.key, set()) - set(TASKS[run.order[SECOND]])
        assert not undeclared, f"{job.id} looked up classes {sorted(undeclared)} of an earlier task"


@promise(
    (
        "return a mean over the batch from loss, and count with Batch.counts what is a mean "
        "over some samples"
    ),
    optimizers=("sgd",),
)
def check_accumulation_changes_nothing_but_rounding(lab: Lab, method: str, optimizer: str) -> None:
    """Two micro-batches give the results of one batch, up to rounding.

    The check uses SGD, because Adam turns a rounding error of a zero gradient into a full step.
    """
    whole = lab.run(method, optimizer, epochs=1, batch_size=24)
    parts = lab.run(method, optimizer, epochs=1, batch_size=24, accumulate=2)
    for task in (FIRST, SECOND):
        images, name = whole.images(task), whole.order[task]
        expected = compute_task_logits(whole.served(task), images, name)
        distance = float(
            (expected - compute_task_logits(parts.served(task), images, name)).abs().max()
        )
        assert distance <= 1e-3 + 1e-5 * float(expected.abs().max()), (
            f"with two micro-batches the logits of task {name!r} are {distance:.2g} apart"
        )
    for a, b in zip(history(whole.trained(FIRST)), history(parts.trained(FIRST)), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"val_correct"}:
            assert math.isclose(a[name], b[name], rel_tol=1e-6, abs_tol=1e-3), name


@promise(
    (
        "check that begin returns the trained parameters, and that after_backward leaves "
        "their gradients"
    ),
)
def check_it_learns(lab: Lab, method: str, optimizer: str) -> None:
    """Directly after training, the accuracy over both tasks together is clearly above chance.

    The images of both tasks are counted together. They are few, so if the results of one seed are
    not sufficient, the results of up to three more seeds are added.
    """
    correct, chance = 0, 0.0
    for seed in range(4):
        run = lab.run_of(method, OPTIMIZERS[optimizer], seed=seed)
        rows = [
            next(r for r in run.evaluated(task)["rows"] if r["task"] == run.order[task])
            for task in (FIRST, SECOND)
        ]
        correct += sum(row["correct"] for row in rows)
        chance += sum(row["total"] / len(TASKS[row["task"]]) for row in rows)
        if correct > 1.2 * chance:
            return
    assert correct > 1.2 * chance


# ---- how it computes logits ----------------------------------------------------------------------
@promise(
    (
        "draw nothing and keep nothing in logits; make load_task and activate_task reset what "
        "belongs to another task"
    ),
)
def check_answers_are_the_same_twice_and_in_any_turn(lab: Lab, method: str, optimizer: str) -> None:
    """The logits of a task do not depend on the task of the previous call."""
    run = lab.run(method, optimizer)
    served, images = run.served(SECOND), [run.images(task) for task in (FIRST, SECOND)]
    alone = [
        compute_task_logits(run.served(SECOND), images[task], run.order[task])
        for task in (FIRST, SECOND)
    ]
    for task in (FIRST, SECOND, FIRST, SECOND):
        logits = compute_task_logits(served, images[task], run.order[task])
        assert logits.shape == (len(images[task]), len(TASKS[run.order[task]]))
        assert torch.equal(logits, alone[task])


@promise(
    ("store the value in the task's state and serve by it, or take the setting out of per_task"),
    lambda cls: bool(cls.per_task),
)
def check_what_a_task_may_have_of_its_own_has_no_part_in_serving(
    lab: Lab, method: str, optimizer: str
) -> None:
    """Settings of `per_task` have no effect on serving or on other tasks.

    A task is trained with its own values. A method with the common values and a method with the
    values of the task must give equal logits for this task, and for the next task. This is checked
    in every scenario of the method except `domain`.
    """
    own = other_values(method)
    beside = BESIDE.get(method, {})
    quick = {"train": QUICK} if METHODS[method].has_training() else {}
    no_change: dict[str, Any] = {}
    run = lab.run_of(
        method,
        OPTIMIZERS[optimizer],
        methods={method: {**beside, "tasks": {"two": {**own, **quick}, "three": {**quick}}}},
    )
    for after in (FIRST, SECOND):
        job = run.evaluate_job(after)
        run.prepare(job)
        common, itself = (
            restore.restore_finished_method(replace(job, settings=job.settings | changed), Group())
            for changed in (no_change, own)
        )
        for task, scenario in product(
            range(after + 1), sorted(METHODS[method].scenarios - {"domain"})
        ):
            common.scenario = itself.scenario = scenario
            (logits, picks), (other, others) = (
                evaluate.compute_logits_and_picks(one, run.images(task), run.order[task])
                for one in (common, itself)
            )
            assert torch.equal(logits, other), sorted(own)
            assert have_equal_tensors(picks, others), sorted(own)


@promise(
    "change no tensor, no mode and no random state in logits and features",
)
def check_measuring_leaves_the_model_as_it_was(lab: Lab, method: str, optimizer: str) -> None:
    """`accuracy` changes no tensor, no mode of a module, and no random state."""
    run = lab.run(method, optimizer)
    live, job = run.live(SECOND), run.stages(SECOND)[-1]
    assert job.task is not None
    feed = Feed(job, (job.task,), "val", Group(), training=False)
    live.train()
    modes, tensors, random = read_modes(live), tensors_of(live), torch.get_rng_state()
    accuracy(live, feed, Group())
    assert read_modes(live) == modes
    assert have_equal_tensors(tensors_of(live), tensors)
    assert torch.equal(torch.get_rng_state(), random)


@promise(
    "change nothing in logits that training reads",
    lambda cls: cls.has_training(),
)
def check_measuring_has_no_part_in_training(lab: Lab, method: str, optimizer: str) -> None:
    """A stage gives the same bytes if the validation after each epoch is skipped."""
    run = lab.run(method, optimizer)
    job = next(j for j in run.stages(FIRST) if history(run.artifact(j)))
    with mock.patch.object(loop, "accuracy", return_value=(0, 1)):
        blind = lab.stage(again(job, "blind"))
    assert blind.read(STATE) == run.artifact(job).read(STATE)
    assert blind.read(CARRIED) == run.artifact(job).read(CARRIED)


def read_modes(model: torch.nn.Module) -> dict[str, bool]:
    """Return name of a module -> whether it is in training mode."""
    return {name: module.training for name, module in model.named_modules()}


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return name -> copy of a tensor, for all parameters and buffers."""
    return {
        name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]
    }


def have_equal_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether two mappings have the same names and equal tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
