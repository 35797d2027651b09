"""Tests of SupSup without task identities: choice of masks, carried state, and answers."""

from __future__ import annotations

from typing import Any

import method_steps
import pytest
import torch
from torch import Tensor
from two_domains import COLOURS, SIZE, STRIPES, Stream, batch, begun, learned, samples, vit

from workers.dist import Group
from workers.job import BackboneSettings, TrainSettings
from workers.methods.base import Progress
from workers.methods.supsup import OUTPUTS
from workers.methods.supsup_nn import SupSupNN, SupSupNNSettings
from workers.model.superposition import shares
from workers.model.vit import build
from workers.storage.checkpoint import trained_state
from workers.storage.taskstate import Carried, TaskState

STEPS = 30


def made(**settings: Any) -> SupSupNN:
    return SupSupNN(
        vit(), SupSupNNSettings(**{"outputs": 10, "every": 10, "most": 8, **settings}), seed=1
    )


def serving(states: list[TaskState], carried: Carried, **settings: Any) -> SupSupNN:
    method: SupSupNN = method_steps.serving(made(**settings), states, carried)
    return method


Chain = list[tuple[TaskState, Carried]]


@pytest.fixture(scope="module")
def chain() -> Chain:
    """Return the results for stripes, colours and stripes again, without task identities."""
    task_results: Chain = []
    for task in (STRIPES, COLOURS, STRIPES):
        task_results.append(
            learned(made(), task, STEPS, task_results[-1][1] if task_results else None)
        )
    return task_results


def judging(method: SupSupNN, scores: list[float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the scores of the masks (the slopes of H) by `scores`.

    Returns:
        A list that gets the number of superposed masks at each decision.
    """
    counts: list[int] = []

    def judge(masks: Any, alive: Any, groups: Tensor) -> Tensor:
        counts.append(len(masks))
        assert len(alive) == len(masks)
        return torch.tensor(scores[: len(masks)])[None].repeat(len(groups), 1)

    monkeypatch.setattr(method, "judge", judge)
    return counts


# ---- choice of the mask to train -----------------------------------------------------------------
def test_returning_domain_reuses_its_mask(
    chain: Chain,
) -> None:
    assert [state.meta["mask"] for state, _ in chain] == [0, 1, 0]
    assert [state.meta["masks"] for state, _ in chain] == [1, 2, 2]
    assert [state.meta["steps"] for state, _ in chain] == [{"0": STEPS}, {"1": STEPS}, {"0": STEPS}]
    assert [len(carried.tensors["masks"]) for _, carried in chain] == [1, 2, 2]


def test_masks_that_are_not_in_training_stay_bit_for_bit(chain: Chain) -> None:
    first, second, third = (carried.tensors["masks"] for _, carried in chain)
    assert torch.equal(second[0], first[0])
    assert torch.equal(third[1], second[1])
    assert not torch.equal(third[0], second[0]), "the mask of the returning domain must be trained"


@pytest.mark.parametrize(
    ("slope", "mask"),
    [
        ([-1.0, 0, 0, 0, 0], 0),
        ([-0.14, 0, 0, 0, 0], 1),
        ([-0.16, 0, 0, 0, 0], 0),
        ([0, -1.0, 0, 0, 0], 1),
        ([0.0] * 5, 1),
    ],
)
def test_new_mask_is_taken_if_best_share_is_below_threshold(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, slope: list[float], mask: int
) -> None:
    """There are one known mask and four untrained ones. With k = 5, the threshold of nu is
    1.125 / 5, which corresponds to a slope of -0.1508."""
    nu = shares(torch.tensor([slope]))[0]
    assert (5 * nu[0] >= 1.125) == (mask == 0)
    method = made()
    counts = judging(method, slope, monkeypatch)
    begun(method, COLOURS, STEPS, chain[0][1])
    assert counts == [5]
    assert method.counter.tolist() == [mask + 1, mask]


def test_settings_least_and_eps_change_the_mask_decision(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, mask in (({"least": 2, "eps": 0.125}, 0), ({"least": 2, "eps": 0.3}, 1)):
        method = made(**settings)
        assert judging(method, [-0.5, 0.0], monkeypatch) == []  # nu = 0.6225
        begun(method, COLOURS, STEPS, chain[0][1])
        assert method.counter.tolist() == [mask + 1, mask]


def test_best_known_mask_is_trained_if_none_is_left(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = made(most=2)
    judging(method, [0.3, 0.2, -5.0, 0.0, 0.0], monkeypatch)  # an untrained mask would fit best
    begun(method, COLOURS, STEPS, chain[1][1])
    assert method.counter.tolist() == [2, 1]
    assert method.warnings() == [
        "all 2 masks are taken, so that images which fit none train an old mask; raise `most`"
    ]
    assert made(most=3).warnings() == []


def test_supsup_nn_decides_periodically_by_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    decide = SupSupNN.decide

    def recorded(self: SupSupNN, epoch: int, step: int) -> None:
        asked.append((epoch, step))
        decide(self, epoch, step)

    monkeypatch.setattr(SupSupNN, "decide", recorded)
    method = made(every=4)
    monkeypatch.setattr(method, "choice", lambda images: 0)
    begun(method, STRIPES, 6)
    for epoch in range(2):
        for step in range(6):
            method.after_step(Progress(epoch, step, 2, 6))
    assert asked == [(0, 0), (0, 4), (1, 2)]
    assert method.trained.tolist()[:2] == [12, 0]


def test_mask_change_within_a_task_keeps_learned_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = made(every=4)
    begun(method, STRIPES, 8)
    with torch.no_grad():
        method.masks[OUTPUTS].get_parameter("scores").neg_()
    learned_bits = {site: mask.clone() for site, mask in method.hard().items()}
    monkeypatch.setattr(method, "choice", lambda images: 1)
    method.after_step(Progress(0, 3, 1, 8))
    assert method.counter.tolist() == [2, 1]
    assert method.metrics() | {"density": 0} == {"density": 0, "masks": 2, "mask": 1}
    assert all(torch.equal(mask, learned_bits[site]) for site, mask in method.bits(0).items())
    assert not torch.equal(method.hard()[OUTPUTS], learned_bits[OUTPUTS])


def test_continued_mask_starts_from_its_stored_bits(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = made()
    monkeypatch.setattr(method, "choice", lambda images: 0)
    begun(method, STRIPES, STEPS, chain[1][1])
    stored = serving([chain[0][0]], chain[1][1]).bits(0)
    first = method.draw_first_scores(0)
    for site, mask in method.hard().items():
        assert torch.equal(mask, stored[site])
        sizes = method.masks[site].get_parameter("scores").abs()
        assert torch.equal(sizes, first[site].abs().clamp(min=1e-8)), (
            "the magnitudes must be those of the first scores"
        )
    assert any((scores == 0).any() for scores in first.values()), (
        "some scores must be zero, so that the minimum magnitude is tested"
    )


def test_new_mask_starts_from_the_untrained_mask(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = made(start="kaiming")
    method.load_carried(chain[0][1])
    untrained = method.bits(1)
    monkeypatch.setattr(method, "choice", lambda images: 1)
    begun(method, COLOURS, STEPS, chain[0][1])
    assert all(torch.equal(mask, untrained[site]) for site, mask in method.hard().items())
    assert not torch.equal(method.bits(2)[OUTPUTS], untrained[OUTPUTS])


def test_supsup_nn_decision_uses_global_batch(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(Group):
        def broadcast(self, value: Any) -> Any:
            return 1

    seen: list[Tensor] = []

    def first_mask(images: Tensor) -> int:
        seen.append(images)
        return 0

    feed = Stream(STRIPES, STEPS, Second(1, 2))
    method = made()
    monkeypatch.setattr(method, "choice", first_mask)
    begun(method, STRIPES, STEPS, chain[1][1], feed)
    assert (feed.group.world, feed.accumulate) == (1, 1)
    assert torch.equal(seen[0], batch(STRIPES, 0).images)
    assert method.counter.tolist() == [2, 1]
    short = made(look=5)
    monkeypatch.setattr(short, "choice", first_mask)
    begun(short, STRIPES, STEPS, chain[1][1])
    assert (len(seen[0]), len(seen[1])) == (SIZE, 5)


def test_checkpoint_contains_the_state_of_mask_decisions() -> None:
    method = made()
    begun(method, STRIPES)
    assert {"bank", "counter", "trained"} <= set(trained_state(method))


# ---- carried state -------------------------------------------------------------------------------
def test_supsup_nn_carries_one_bit_per_weight(
    chain: Chain,
) -> None:
    entries = sum(weight.numel() for weight in made().sites.values())
    assert [t.numel() for t in chain[2][1].tensors.values()] == [2 * -(-entries // 8)]
    assert sum(chain[2][0].sizes().values()) == 0


def test_carried_size_matches_the_formula_exactly() -> None:
    torch.manual_seed(0)
    method = SupSupNN(build(BackboneSettings()), SupSupNNSettings(most=2), 0)
    feed = Stream(STRIPES, 1)
    begun(method, STRIPES, feed=feed)
    data = method.finish()[1].to_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == (5_455_872 + 100 * 192) // 8


def test_saved_and_loaded_state_gives_the_same_answers(chain: Chain) -> None:
    images = samples(COLOURS, 6)[0]
    states, carried = [state for state, _ in chain[:2]], chain[1][1]
    again = [TaskState.from_bytes(state.to_bytes()) for state in states]
    a, b = serving(states, carried), serving(again, Carried.from_bytes(carried.to_bytes()))
    with torch.no_grad():
        assert torch.equal(a.logits(images, "colours"), b.logits(images, "colours"))


def test_display_masks_are_the_final_masks_of_a_task(chain: Chain) -> None:
    state, carried = chain[1]
    display_masks = SupSupNN.display_masks(state, carried)
    stored = serving([state], carried).bits(1)
    assert display_masks.keys() == stored.keys()
    assert all(torch.equal(mask, stored[site]) for site, mask in display_masks.items())


# ---- answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("infer_images", [1, 5])
def test_each_domain_uses_its_own_mask_and_classes(chain: Chain, infer_images: int) -> None:
    method = serving([chain[2][0], chain[1][0]], chain[2][1], infer_images=infer_images)
    assert method.candidates() == {"mask 0": ("stripes",), "mask 1": ("colours",)}
    for task_index, task in enumerate((STRIPES, COLOURS)):
        images, labels = samples(task, 18)
        with torch.no_grad():
            picked_tasks, sure = method.infer(images)
            logits = method.logits(images, task.name)
        assert (picked_tasks == task_index).float().mean() > 0.8
        assert ((sure > 0.2) & (sure <= 1)).all()
        assert logits.shape == (18, task.num_classes)
        assert (logits.argmax(1) == labels).float().mean() > 0.8
        assert torch.equal(method.logits(images, None)[:, : task.num_classes], logits)


def test_untrained_masks_are_superposed_but_never_selected(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = serving([chain[0][0], chain[1][0]], chain[1][1])
    counts = judging(method, [0.5, 0.4, -3.0, 0.0, 0.0], monkeypatch)
    picked_tasks, sure = method.infer(samples(STRIPES, 3)[0])
    assert counts == [5]
    assert picked_tasks.tolist() == [1, 1, 1]
    assert sure.tolist() == pytest.approx(
        [shares(torch.tensor([[0.5, 0.4, -3.0, 0.0, 0.0]]))[0, 1].item()] * 3
    )


def test_requested_task_does_not_choose_the_mask(chain: Chain) -> None:
    method, images = serving([chain[0][0], chain[1][0]], chain[1][1]), samples(STRIPES, 6)[0]
    with torch.no_grad():
        assert torch.equal(
            method.logits(images, "colours")[:, :2], method.logits(images, "stripes")
        )


def test_mask_may_belong_to_several_tasks_or_none(chain: Chain) -> None:
    method = serving([chain[0][0], chain[2][0]], chain[2][1])
    method.used["other"] = 0
    assert method.candidates() == {"mask 0": ("stripes", "other"), "mask 1": ()}


def test_mask_in_training_is_evaluated_in_its_current_state(chain: Chain) -> None:
    method = made()
    begun(method, COLOURS, STEPS, chain[0][1])
    assert method.candidates() == {"mask 0": (), "mask 1": ("colours",)}
    with torch.no_grad():
        method.masks[OUTPUTS].get_parameter("scores").neg_()
        assert torch.equal(method.together()[1][OUTPUTS], method.hard()[OUTPUTS])
        before = method.bank.clone()
        method.eval().logits(samples(COLOURS, 3)[0], "colours")
    assert torch.equal(method.bank, before), "measuring must not write to the bank"


def test_invalid_scores_outputs_and_infer_settings_are_refused() -> None:
    from pydantic import ValidationError

    for wrong in ({"scores": "topk"}, {"outputs": 0}, {"infer": "binary"}):
        with pytest.raises(ValidationError):
            SupSupNNSettings(**wrong)
    SupSupNN.validate(SupSupNNSettings(), TrainSettings(), None, "task")  # type: ignore[arg-type]
