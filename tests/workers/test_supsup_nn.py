"""SupSup without task identities: when it takes a new mask, what it carries, how it answers."""

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
    """Stripes, then colours, then stripes again; nobody says which is which."""
    task_results: Chain = []
    for task in (STRIPES, COLOURS, STRIPES):
        task_results.append(
            learned(made(), task, STEPS, task_results[-1][1] if task_results else None)
        )
    return task_results


def judging(method: SupSupNN, scores: list[float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every mask gets its score from here, the slope of H; returns how many masks were superposed,
    decision by decision."""
    counts: list[int] = []

    def judge(masks: Any, alive: Any, groups: Tensor) -> Tensor:
        counts.append(len(masks))
        assert len(alive) == len(masks)
        return torch.tensor(scores[: len(masks)])[None].repeat(len(groups), 1)

    monkeypatch.setattr(method, "judge", judge)
    return counts


# ---- which mask is trained -----------------------------------------------------------------------
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
    assert not torch.equal(third[0], second[0]), "the mask of the domain that returned went on"


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
def test_a_new_mask_is_taken_where_the_best_share_is_below_the_threshold(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, slope: list[float], mask: int
) -> None:
    """One mask is known, four untrained ones fill up: with k = 5 the threshold of nu is 1.125 / 5,
    at a slope of -0.1508."""
    nu = shares(torch.tensor([slope]))[0]
    assert (5 * nu[0] >= 1.125) == (mask == 0)
    method = made()
    counts = judging(method, slope, monkeypatch)
    begun(method, COLOURS, STEPS, chain[0][1])
    assert counts == [5]
    assert method.counter.tolist() == [mask + 1, mask]


def test_the_least_number_of_masks_and_eps_are_settings(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, mask in (({"least": 2, "eps": 0.125}, 0), ({"least": 2, "eps": 0.3}, 1)):
        method = made(**settings)
        assert judging(method, [-0.5, 0.0], monkeypatch) == []  # nu = 0.6225
        begun(method, COLOURS, STEPS, chain[0][1])
        assert method.counter.tolist() == [mask + 1, mask]


def test_without_a_mask_left_the_best_known_one_goes_on(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = made(most=2)
    judging(method, [0.3, 0.2, -5.0, 0.0, 0.0], monkeypatch)  # an untrained one would fit best
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


def test_a_change_in_the_middle_of_a_task_keeps_what_was_learned(
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


def test_a_mask_that_goes_on_starts_from_its_bits(
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
        assert torch.equal(sizes, first[site].abs().clamp(min=1e-8)), "as large as at first"
    assert any((scores == 0).any() for scores in first.values()), (
        "else the smallest size would not matter"
    )


def test_an_untrained_mask_is_what_a_new_one_starts_from(
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


def test_what_decides_later_is_in_a_checkpoint() -> None:
    method = made()
    begun(method, STRIPES)
    assert {"bank", "counter", "trained"} <= set(trained_state(method))


# ---- what is carried -----------------------------------------------------------------------------
def test_supsup_nn_carries_one_bit_per_weight(
    chain: Chain,
) -> None:
    entries = sum(weight.numel() for weight in made().sites.values())
    assert [t.numel() for t in chain[2][1].tensors.values()] == [2 * -(-entries // 8)]
    assert sum(chain[2][0].sizes().values()) == 0


def test_the_carried_size_is_the_formulas_to_the_byte() -> None:
    torch.manual_seed(0)
    method = SupSupNN(build(BackboneSettings()), SupSupNNSettings(most=2), 0)
    feed = Stream(STRIPES, 1)
    begun(method, STRIPES, feed=feed)
    data = method.finish()[1].to_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == (5_455_872 + 100 * 192) // 8


def test_packed_and_attached_again_it_gives_the_same_answers(chain: Chain) -> None:
    images = samples(COLOURS, 6)[0]
    states, carried = [state for state, _ in chain[:2]], chain[1][1]
    again = [TaskState.from_bytes(state.to_bytes()) for state in states]
    a, b = serving(states, carried), serving(again, Carried.from_bytes(carried.to_bytes()))
    with torch.no_grad():
        assert torch.equal(a.logits(images, "colours"), b.logits(images, "colours"))


def test_pictures_show_the_mask_that_a_task_ended_with(chain: Chain) -> None:
    state, carried = chain[1]
    display_masks = SupSupNN.display_masks(state, carried)
    stored = serving([state], carried).bits(1)
    assert display_masks.keys() == stored.keys()
    assert all(torch.equal(mask, stored[site]) for site, mask in display_masks.items())


# ---- how it answers ------------------------------------------------------------------------------
@pytest.mark.parametrize("infer_images", [1, 5])
def test_each_domain_is_answered_with_its_own_mask_cut_to_its_classes(
    chain: Chain, infer_images: int
) -> None:
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


def test_an_untrained_mask_is_superposed_and_never_picked(
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


def test_the_task_that_is_asked_for_does_not_choose_the_mask(chain: Chain) -> None:
    method, images = serving([chain[0][0], chain[1][0]], chain[1][1]), samples(STRIPES, 6)[0]
    with torch.no_grad():
        assert torch.equal(
            method.logits(images, "colours")[:, :2], method.logits(images, "stripes")
        )


def test_a_mask_may_be_right_for_several_tasks_and_for_none(chain: Chain) -> None:
    method = serving([chain[0][0], chain[2][0]], chain[2][1])
    method.used["other"] = 0
    assert method.candidates() == {"mask 0": ("stripes", "other"), "mask 1": ()}


def test_while_it_trains_the_mask_in_training_is_asked_as_it_stands(chain: Chain) -> None:
    method = made()
    begun(method, COLOURS, STEPS, chain[0][1])
    assert method.candidates() == {"mask 0": (), "mask 1": ("colours",)}
    with torch.no_grad():
        method.masks[OUTPUTS].get_parameter("scores").neg_()
        assert torch.equal(method.together()[1][OUTPUTS], method.hard()[OUTPUTS])
        before = method.bank.clone()
        method.eval().logits(samples(COLOURS, 3)[0], "colours")
    assert torch.equal(method.bank, before), "measuring writes nothing"


def test_thresholds_alone_can_be_carried_as_bits() -> None:
    from pydantic import ValidationError

    for wrong in ({"scores": "topk"}, {"outputs": 0}, {"infer": "binary"}):
        with pytest.raises(ValidationError):
            SupSupNNSettings(**wrong)
    SupSupNN.validate(SupSupNNSettings(), TrainSettings(), None, "task")  # type: ignore[arg-type]
