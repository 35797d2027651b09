"""Tests of the promises of all registered methods, and of methods that break a promise."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.testing.lab import Lab, compute_task_logits
from pipeline.testing.promises import PROMISES, BrokenPromise, list_cases
from workers.methods import METHODS
from workers.methods.base import Method, MethodSettings, ParamGroup, Step, StepContext
from workers.methods.finetune import FineTune, weight_groups
from workers.methods.linear import Linear
from workers.storage.taskstate import Carried

EVERY = [
    pytest.param(method, optimizer, promise, id=f"{method}-{optimizer}-{promise}")
    for method in METHODS
    for promise, optimizer in list_cases(method)
]


def sample_cases() -> list[str]:
    """Return the id of one case per method: the one with the promise used least so far."""
    counts: Counter[Any] = Counter()
    ids = []
    for _, cases in groupby(EVERY, lambda case: case.values[0]):
        case = min(cases, key=lambda case: counts[case.values[2]])
        counts[case.values[2]] += 1
        ids.append(str(case.id))
    assert counts.keys() == PROMISES.keys(), "every promise must be used"
    return ids


@pytest.mark.few(*sample_cases())
@pytest.mark.parametrize(("method", "optimizer", "promise"), EVERY)
def test_every_method_keeps_its_promises(
    lab: Lab, method: str, optimizer: str, promise: str
) -> None:
    PROMISES[promise].check(lab, method, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fine_tuning_forgets(lab: Lab, optimizer: str) -> None:
    """If fine-tuning did not forget, the promise that old answers stay would show nothing.

    The change is compared with the spread over images, because few steps of SGD make small logits.
    """
    run = lab.run("finetune", optimizer, epochs=3)
    images, task = run.images(0), run.order[0]
    before, after = (
        compute_task_logits(run.served(0), images, task),
        compute_task_logits(run.served(1), images, task),
    )
    spread = (before - before.mean(0)).abs().max()
    change = (before - after).abs().max()
    assert change > 0.2 * spread, "measured with ten seeds and both optimizers: 0.5 to 4.4"


# ---- methods that break a promise ----------------------------------------------------------------
class Thaws(Linear):
    """Declares a frozen backbone, but trains it."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        return super().begin(context) + weight_groups(self.backbone, context.optim)


class HoldsGradientsOnly(FineTune):
    """Sets all gradients to zero after the first task, but weight decay still moves the weights."""

    may_forget = False

    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.locked = context.carried is not None
        return super().begin(context)

    def after_backward(self) -> None:
        if self.locked:
            for p in self.backbone.parameters():
                p.grad = torch.zeros_like(p)


class SoftMask(Linear):
    """Trains with a soft mask, but stores only a hard one."""

    starts_as_backbone = False

    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.mask = torch.full((self.heads.width,), 0.7)
        return super().begin(context)

    def features(self, images: Tensor) -> Tensor:
        return super().features(images) * self.mask.to(torch.float32)

    def finish(self) -> Any:
        state, carried = super().finish()
        state.masks["features"] = self.mask
        return state, carried

    def load_task(self, state: Any) -> None:
        super().load_task(state)
        self.mask = state.masks["features"]


class StartsElsewhere(Linear):
    """Scales the features from the start, but does not declare it."""

    def features(self, images: Tensor) -> Tensor:
        return super().features(images) * 1.01


class DrawsFromAnywhere(Linear):
    """Draws from an unseeded generator, so that a retried stage has another result."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        with torch.no_grad():
            groups[0]["params"][0].copy_(
                torch.from_numpy(
                    np.random.default_rng().normal(0, 0.02, groups[0]["params"][0].shape)
                )
            )
        return groups


class NoiseOfTheProcess(Linear):
    """Adds noise from the process's generator during training.

    A retry gives the same noise, but two ranks give another one.
    """

    def loss(self, batch: Any, progress: Any) -> Any:
        batch.images = batch.images + 0.01 * torch.randn(batch.images.shape)
        return super().loss(batch, progress)


class NoiseOfNumpy(Linear):
    """Adds noise from numpy's generator during training."""

    def loss(self, batch: Any, progress: Any) -> Any:
        batch.images = batch.images + 0.01 * np.random.rand()
        return super().loss(batch, progress)


class StartsAsPyTorchDoes(Linear):
    """Has a layer initialized from the process's generator, which is allowed."""

    name = "starts-as-pytorch-does"
    starts_as_backbone = False

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.adapter = torch.nn.Linear(self.heads.width, self.heads.width)
        return [*groups, {"name": "adapter", "params": [*self.adapter.parameters()]}]

    def features(self, images: Tensor) -> Tensor:
        adapted: Tensor = self.adapter(super().features(images))
        return adapted

    def finish(self) -> Any:
        return self.state(
            copies={n: t.detach().clone() for n, t in self.adapter.state_dict().items()}
        ), super().finish()[1]


def test_method_can_initialise_from_the_global_random_generator(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, StartsAsPyTorchDoes.name, StartsAsPyTorchDoes)
    PROMISES["a_stage_tried_again_gives_the_same_bytes_and_leaves_its_parents_alone"].check(
        lab, StartsAsPyTorchDoes.name, "adamw"
    )
    PROMISES["the_order_of_tasks_changes_nothing"].check(lab, StartsAsPyTorchDoes.name, "adamw")


class CountsTasks(Linear):
    """Uses the number of tasks that the process has seen as its seed."""

    seen = 0

    def begin(self, context: StepContext) -> list[ParamGroup]:
        type(self).seen += 1
        self.seed = self.seen
        return super().begin(context)


class TrainsOldHeads(Linear):
    """Gives the heads of all loaded tasks to the optimizer."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        groups[0]["params"] = [layer.weight for layer in self.heads.layers]
        return groups


class Peeks(Linear):
    """Reads the test split before training."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        context.data.feed("test")
        return super().begin(context)


class CountsEarlierSamples(FineTune):
    """Looks up the sample keys of earlier tasks, but does not declare it."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.num_samples = [len(context.data.keys(task)) for task in context.stream]
        return super().begin(context)


class SumsInsteadOfMeans(Linear):
    """Has a loss that grows with the size of a micro-batch."""

    def loss(self, batch: Any, progress: Any) -> Any:
        loss, terms = super().loss(batch, progress)
        return loss * len(batch) / 24, terms


class DividesAPenalty(FineTune):
    """Divides a penalty on weight changes in later tasks by the number of micro-batches."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.start = [p.detach().clone() for p in self.backbone.parameters()]
        return groups

    def loss(self, batch: Any, progress: Any) -> Any:
        loss, terms = super().loss(batch, progress)
        if self.context.carried is not None:
            for p, start in zip(self.backbone.parameters(), self.start, strict=True):
                loss = loss + (p - start).square().sum() * len(batch) / batch.draw.size
        return loss, terms


class AnyBackbone(Linear):
    """Loads the states of any backbone without a check."""

    def load_task(self, state: Any) -> None:
        self.heads.restore(state.task, state.head)


class NoiseWhileServing(Linear):
    """Adds random noise to its logits."""

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        return super().logits(images, task) + torch.randn(())


class LearnsFromValidation(Linear):
    """Changes its head when it computes logits, for example in validation."""

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        found = super().logits(images, task)
        with torch.no_grad():
            self.heads[str(task)].bias.add_(1e-3)
        return found


class OneTokenForAll(Linear):
    """Stores the same tensor as the token of every task."""

    token = torch.ones(3)

    def finish(self) -> Any:
        return self.state(tokens={"token": self.token}), super().finish()[1]


class RemembersBeside(Linear):
    """Keeps a running mean outside of checkpoints, and stores it in the state."""

    mean: Any = 0.0

    def loss(self, batch: Any, progress: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch.images.mean()
        return super().loss(batch, progress)

    def finish(self) -> Any:
        return self.state(tokens={"mean": torch.as_tensor(self.mean)}), super().finish()[1]


class StateOfBegin(FineTune):
    """Stores the untrained head in the second task's state."""

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.untrained = self.heads.export(context.task.name)
        return groups

    def finish(self) -> Any:
        state, carried = super().finish()
        if self.context.carried is not None:
            state.head = self.untrained
        return state, carried


class StateOfTheFirst(FineTune):
    """Stores the first task's head in the second task's state."""

    needs_states = True

    def finish(self) -> Any:
        state, carried = super().finish()
        state.head = self.heads.export(self.heads.names[0])
        return state, carried


class StoresWhatItDoesNotUse(Linear):
    """Stores a mask that no answer depends on."""

    def finish(self) -> Any:
        return self.state(masks={"idle": torch.ones(9, dtype=torch.bool)}), super().finish()[1]


class CarriesTheLatestAlone(FineTune):
    """Carries only the latest task's part of a sum over tasks."""

    def load_carried(self, carried: Carried) -> None:
        network = {n: t for n, t in carried.tensors.items() if not n.startswith("sums/")}
        super().load_carried(Carried(network))

    def finish(self) -> Any:
        state, carried = super().finish()
        carried.tensors["sums/bias"] = state.head["bias"].sum()
        return state, carried


class DropsBetweenSteps(CarriesTheLatestAlone):
    """Drops a sum in its first step that its second step needs."""

    steps = (Step("train"), Step("add", trains=False))

    def begin(self, context: StepContext) -> list[ParamGroup]:
        tensors = {} if context.carried is None else context.carried.tensors
        self.total = tensors.get("sums/bias", torch.zeros(()))
        return super().begin(context)

    def finish(self) -> Any:
        state, carried = super().finish()
        carried.tensors["sums/bias"] += self.total
        if self.context.step == "train":
            del carried.tensors["sums/bias"]
        return state, carried


class LearnsNothing(Linear):
    """Drops all gradients."""

    def after_backward(self) -> None:
        for p in self.parameters():
            p.grad = None


class ScaleSettings(MethodSettings):
    scale: float = 1.0


class ServesByACommonScale(Linear):
    """Declares that a task may have its own scale, but serves all tasks with the common one."""

    Settings = ScaleSettings
    per_task = frozenset({"scale"})
    settings: ScaleSettings

    def features(self, images: Tensor) -> Tensor:
        return super().features(images) * self.settings.scale


class MiscountsItsSize(Linear):
    """Reports that it stores nothing."""

    def finish(self) -> Any:
        state, carried = super().finish()
        state.sizes = dict  # type: ignore[method-assign]
        return state, carried


class BundlesNoNetwork(FineTune):
    """Declares that only training needs the carried network."""

    training_only = ("*",)


class ResetsAHook(FineTune):
    """Has a hook that reads a factor, which has another value in the backward pass."""

    factor = 1.0

    def __init__(self, backbone: Any, settings: Any, seed: int):
        super().__init__(backbone, settings, seed)
        backbone.blocks[0].attn.register_forward_hook(
            lambda module, _, output: output * self.factor
        )

    def features(self, images: Tensor) -> Tensor:
        self.factor = 0.5
        try:
            return super().features(images)
        finally:
            self.factor = 1.0


BROKEN = [
    (Thaws, "the_backbone_stays_frozen"),
    (HoldsGradientsOnly, "old_answers_stay"),
    (HoldsGradientsOnly, "old_answers_stay_under_accumulation_and_bf16"),
    (SoftMask, "the_stored_bytes_are_the_method"),
    (StartsElsewhere, "it_starts_as_the_backbone"),
    (CountsTasks, "the_order_of_tasks_changes_nothing"),
    (DrawsFromAnywhere, "a_stage_tried_again_gives_the_same_bytes_and_leaves_its_parents_alone"),
    (NoiseOfTheProcess, "training_draws_from_the_batch_alone"),
    (NoiseOfNumpy, "training_draws_from_the_batch_alone"),
    (TrainsOldHeads, "another_tasks_training_leaves_a_loaded_task_alone"),
    (Peeks, "training_never_looks_at_test_data"),
    (CountsEarlierSamples, "a_step_looks_up_the_data_that_it_declares"),
    (SumsInsteadOfMeans, "accumulation_changes_nothing_but_rounding"),
    (DividesAPenalty, "accumulation_changes_nothing_but_rounding"),
    (AnyBackbone, "a_state_of_another_backbone_is_refused"),
    (NoiseWhileServing, "answers_are_the_same_twice_and_in_any_turn"),
    (NoiseWhileServing, "measuring_leaves_the_model_as_it_was"),
    (LearnsFromValidation, "measuring_has_no_part_in_training"),
    (OneTokenForAll, "tasks_share_no_memory"),
    (StateOfBegin, "a_state_is_of_its_own_task"),
    (StateOfTheFirst, "a_state_is_of_its_own_task"),
    (StoresWhatItDoesNotUse, "whatever_is_stored_has_a_part_in_the_answers"),
    (RemembersBeside, "an_interrupted_stage_ends_as_if_it_had_not_been"),
    (CarriesTheLatestAlone, "a_chain_forgets_nothing_that_it_carries"),
    (DropsBetweenSteps, "a_chain_forgets_nothing_that_it_carries"),
    (LearnsNothing, "it_learns"),
    (ResetsAHook, "recomputed_activations_give_the_same_bytes"),
    (ServesByACommonScale, "what_a_task_may_have_of_its_own_has_no_part_in_serving"),
    (MiscountsItsSize, "the_recorded_size_is_the_size_of_the_file"),
    (BundlesNoNetwork, "a_bundle_leaves_out_what_only_training_needs"),
]


@pytest.mark.few(15)
@pytest.mark.parametrize(
    ("broken", "promise"), [pytest.param(*b, id=f"{b[0].__name__}-{b[1]}") for b in BROKEN]
)
def test_method_that_breaks_a_promise_is_detected(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, broken: type[Method], promise: str
) -> None:
    class Named(broken):  # type: ignore[misc,valid-type]
        name = broken.__name__

    monkeypatch.setitem(METHODS, Named.name, Named)
    assert PROMISES[promise].applies(Named)
    with pytest.raises(BrokenPromise) as error:
        PROMISES[promise].check(lab, Named.name, PROMISES[promise].optimizers[0])
    sentence = str(error.value)
    assert sentence.startswith(f"method {Named.name!r} breaks the promise {promise!r}")
    assert PROMISES[promise].remedy in sentence
    assert "pipeline/testing/promises.py" in sentence, "no file of the check"


class RemembersUndeclared(FineTune):
    """Asks for samples of earlier tasks, but does not declare that it reads them."""

    name = "remembers-undeclared"

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        keys = context.data.keys(context.stream[0])
        return {context.stream[0].name: [class_keys[0] for class_keys in keys.values()]}


class CarriesATensorAsJson(FineTune):
    """Puts a tensor where plain JSON is stored."""

    name = "carries-a-tensor-as-json"

    def finish(self) -> Any:
        state, carried = super().finish()
        carried.meta["share"] = torch.ones(())
        return state, carried


@pytest.mark.parametrize(
    ("broken", "reason", "line"),
    [
        (RemembersUndeclared, "set reads = 'seen'", "workers/loop.py"),
        (CarriesATensorAsJson, "Tensor is not JSON serializable", "workers/storage/taskstate.py"),
    ],
)
def test_failing_method_is_not_reported_as_broken_promise(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, broken: type[Method], reason: str, line: str
) -> None:
    monkeypatch.setitem(METHODS, broken.name, broken)
    promise = PROMISES["it_learns"]
    with pytest.raises(BrokenPromise) as error:
        promise.check(lab, broken.name, "adamw")
    sentence = str(error.value)
    assert sentence.startswith(f"method {broken.name!r} stopped under adamw before the promise")
    assert reason in sentence
    assert f"raised at {line}:" in sentence
    assert promise.remedy not in sentence


def test_tensor_that_differs_after_an_interruption_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(RemembersBeside):
        name = "remembers-beside"

    monkeypatch.setitem(METHODS, Named.name, Named)
    promise = PROMISES["an_interrupted_stage_ends_as_if_it_had_not_been"]
    with pytest.raises(BrokenPromise, match=r"task\.safetensors differs in tokens/mean"):
        promise.check(lab, Named.name, "adamw")


def test_every_promise_has_a_method_that_breaks_it() -> None:
    assert {promise for _, promise in BROKEN} == PROMISES.keys()
