"""Tests of RPS-Net on a ViT: the union of paths, trained and frozen parameters, independent
candidate paths, and the choice of one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path as Folder
from types import SimpleNamespace
from typing import Any

import method_steps
import pytest
import torch
from class_incremental_steps import RATES, SMALL, START, A, B, C, batch, moved, stream, wide
from rank_runs import on_ranks
from step_contexts import step_context
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import SETTINGS, Lab, Run, again
from pipeline.testing.promises import PROMISES
from workers import loop, optim
from workers.dist import Group
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.loop import freeze_others
from workers.methods.base import StepData
from workers.methods.rpsnet import Rpsnet, RpsnetSettings
from workers.model.adapters import AdapterSites, houlsby
from workers.model.distill import kd_ce
from workers.model.paths import Path, PathNetwork, draw_random_path
from workers.model.vit import build
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState

IMAGES = method_steps.images(3)
D = Task("d", "card", "", ("d1", "d2"))
Left = tuple[TaskState, Carried]


# ---- paths ---------------------------------------------------------------------------------------
def path(*module_positions: tuple[int, int], seed: int = 0) -> Path:
    """Return a path with random parameters."""
    new_path = Path([*module_positions], 32, 5)
    for i, p in enumerate(new_path.parameters()):
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(10 * seed + i))
    return new_path


def by_hand(vit: Any, *paths: Path) -> Tensor:
    """Compute the features block by block; after each block, add the outputs of all its modules."""
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(IMAGES)))
    for index, block in enumerate(vit.blocks):
        y = block(x)
        x = y.clone()
        for each in paths:
            for row, (at, _) in enumerate(each.indices):
                if at == index:
                    x = (
                        x
                        + F.gelu(y @ each.down[row].T + each.down_bias[row]) @ each.up[row].T
                        + each.up_bias[row]
                    )
    features: Tensor = vit.forward_head(vit.norm(x))
    return features


def test_the_union_of_paths_is_the_sum_of_their_modules() -> None:
    vit = method_steps.vit()
    sites, paths = (
        AdapterSites(vit, houlsby, ("",)),
        [path((0, 3), (1, 0), seed=1), path((1, 2), seed=2), path(seed=3)],
    )
    for some in ([], paths[:1], paths, paths[::-1]):
        assert torch.allclose(PathNetwork(vit, sites, some)(IMAGES), by_hand(vit, *some), atol=1e-4)
    assert not torch.allclose(by_hand(vit, *paths), by_hand(vit, paths[0]), atol=1e-2)


def test_new_path_keeps_backbone_features_and_can_learn() -> None:
    vit = method_steps.vit()
    expected, new = vit(IMAGES), Path([(0, 1), (1, 1)], 32, 5)
    network = PathNetwork(vit, AdapterSites(vit, houlsby, ("",)), [new])(IMAGES)
    assert torch.equal(network, expected)
    network.sum().backward()
    gradient = new.up.grad
    assert gradient is not None
    assert all(gradient[row].abs().max() > 0 for row in range(2))


def test_copied_network_has_independent_paths() -> None:
    vit, new = method_steps.vit(), path((0, 1), (1, 1))
    network = PathNetwork(vit, AdapterSites(vit, houlsby, ("",)), [new])
    before, other = network(IMAGES), copy.deepcopy(network)
    with torch.no_grad():
        for p in new.parameters():
            p.zero_()
    assert torch.equal(other(IMAGES), before)
    assert torch.equal(network(IMAGES), by_hand(vit)), (
        "the change must be visible in the original only"
    )


def test_path_draws_one_module_per_bank() -> None:
    drawn = [draw_random_path(6, 4, seed) for seed in range(40)]
    assert all([block for block, _ in each] == [*range(6)] for each in drawn)
    assert {module for each in drawn for _, module in each} == {*range(4)}
    assert draw_random_path(6, 4, 7) == drawn[7] != drawn[8]


def test_parameter_count_of_a_path_matches_formula() -> None:
    d, m, blocks = 32, 5, 2
    assert sum(p.numel() for p in path((0, 0), (1, 0)).parameters()) == blocks * (2 * d * m + d + m)
    assert sum(p.numel() for p in path((1, 0)).parameters()) == 2 * d * m + d + m


# ---- a stream, step by step ----------------------------------------------------------------------
def begun(*tasks: Task, seed: int = 0, base: str = "", **settings: Any) -> Any:
    """Return the method at the start of `train` of the last task.

    Earlier tasks are not trained: `moved` changes their parameters, and then they are finished.
    """
    settings = {"every": 1, "width": 5, **settings}
    left: list[Left] = []
    for task_index, task in enumerate(tasks):
        torch.manual_seed(3)
        method = Rpsnet(build(SMALL), RpsnetSettings(**settings), seed)
        method.scenario, method.stream = "class", tasks[: task_index + 1]
        for state, _ in left:
            method.load_task(TaskState.from_bytes(state.to_bytes()))
        carried = Carried.from_bytes(left[-1][1].to_bytes()) if left else None
        groups = method.begin(step_context(task, "train", carried, RATES, tasks[: task_index + 1]))
        method.groups = groups  # type: ignore[assignment]
        if task != tasks[-1]:
            del method.rivals[1:]
            moved(method)
            method.step = "herd"
            left.append(method.finish())
    freeze_others(method, groups)
    method.left = left  # type: ignore[assignment]
    return method.train()


def trained(method: Any, *tasks: Task, steps: int = 3) -> Any:
    train = TrainSettings(lr=1e-2, weight_decay=0.05)
    optimizer = optim.build_optimizer(method.groups, train)
    job: Any = SimpleNamespace(train=train)
    for step in range(steps):
        loop.train_step(method, optimizer, [batch(*tasks, step=step)], START, job, Group())
    return method


def tensors(module: Any) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_trunk_trains_only_with_first_path() -> None:
    first = begun(A, B, every=2)
    before = tensors(first.backbone)
    trained(first, A, B)
    assert all(
        not torch.equal(t, before[name])
        for name, t in tensors(first.backbone).items()
        if name.endswith("weight")
    )
    later = begun(A, B, C, every=1, candidates=3)
    assert not later.backbone.training
    trunk, frozen, heads, drawn = (
        tensors(later.backbone),
        tensors(later.frozen),
        tensors(later.heads),
        [tensors(r.path) for r in later.rivals],
    )
    trained(later, A, B, C)
    assert same(tensors(later.backbone), trunk)
    assert same(tensors(later.frozen), frozen)
    assert len(later.frozen) == 2
    assert all(not torch.equal(t, heads[name]) for name, t in tensors(later.heads).items())
    assert all(
        not torch.equal(t, old[name])
        for rival, old in zip(later.rivals, drawn, strict=True)
        for name, t in tensors(rival.path).items()
    )


def test_path_trains_until_next_draw() -> None:
    left = begun(A, B, C, D, every=2).left
    assert [state.meta.get("path") for state, _ in left] == [None, left[0][1].meta["path"], None]
    assert ["path" in carried.meta for _, carried in left] == [True, False, True]
    assert left[2][1].meta["path"] != left[0][1].meta["path"]
    assert {name for name in left[1][0].copies if "/" not in name} == {
        "down",
        "down_bias",
        "up",
        "up_bias",
    }
    assert not torch.equal(left[0][1].tensors["path/up"], left[1][0].copies["up"]), (
        "the second task must continue to train the path"
    )
    one, two = (begun(A, B, C, every=2, seed=seed).path.indices for seed in (0, 1))
    assert begun(A, B, C, every=2).path.indices == one != two


def test_path_lr_is_the_rate_beside_a_frozen_trunk_alone() -> None:
    for earlier, rates in (((A, B), {None}), ((A, B, C), {0.25})):
        method = begun(*earlier, every=2, path_lr=0.25)
        assert {group.get("lr") for group in method.groups} == rates


def test_trunk_and_finished_paths_are_stored_once() -> None:
    left = begun(A, B, C, D, every=2).left
    trunk = {name for name in left[1][0].copies if name.startswith("trunk/")}
    assert trunk == {f"trunk/{name}" for name in build(SMALL).state_dict()}
    assert [any("trunk/" in name for name in carried.tensors) for _, carried in left] == [
        True,
        False,
        False,
    ]
    assert [bool(state.copies) for state, _ in left] == [False, True, False]
    assert not any(name.startswith("backbone/") for _, carried in left for name in carried.tensors)


def test_modules_of_earlier_paths_are_reused_without_training() -> None:
    method = begun(A, B, modules=1)
    assert method.path.indices == []
    assert "the path adds no module" in method.warnings()[0]
    assert torch.equal(method.features(IMAGES), method.build_network(None)(IMAGES))
    trained(method, A, B)
    wide_bank = begun(A, B, C, modules=2)
    held = {position for each in wide_bank.frozen.values() for position in each.indices}
    assert not held & {*wide_bank.path.indices}
    assert not begun(A, B, modules=50).warnings()


# ---- the loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("every", "expected"), [(1, [1.0, 1.0, 2.5, 5.0]), (2, [1.0, 1.0, 1.0, 2.5]), (3, [1.0] * 4)]
)
def test_distillation_weight_starts_at_one_and_grows_with_paths(
    every: int, expected: list[float]
) -> None:
    assert [
        begun(*(A, B, C, D)[:count], every=every).kd_weight for count in (1, 2, 3, 4)
    ] == expected
    assert begun(A, B, C, every=1, phi=0.5).kd_weight == 0.5


@pytest.mark.parametrize("every", [1, 3])
def test_loss_combines_cross_entropy_and_distillation_from_previous_network(
    every: int,
) -> None:
    """That network had all paths so far, including the one that continues to learn."""
    method, b = begun(A, B, C, every=every, candidates=1, tau=3.0), batch(A, B, C)
    with torch.no_grad():
        taught = torch.cat([method.heads[name](method.features(b.images)) for name in "ab"], 1)
    assert torch.allclose(method.loss(b, START)[1]["kd"], kd_ce(taught, taught, 3.0), atol=1e-6)
    moved(method)
    loss, terms = method.loss(b, START)
    logits = method.logits(b.images, None)
    ce, kd = F.cross_entropy(logits, wide(b, A, B, C)), kd_ce(logits[:, :5], taught, 3.0)
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "kd": kd.item()}, abs=1e-5
    )
    assert torch.allclose(loss, ce + (2.5 if every == 1 else 1.0) * kd, atol=1e-4)
    soft = torch.rand(6, 7, generator=torch.Generator().manual_seed(2)).softmax(1)
    assert torch.allclose(
        method.loss(batch(A, B, C, targets=soft), START)[1]["ce"],
        F.cross_entropy(logits, soft),
        atol=1e-5,
    )


def test_first_task_uses_plain_cross_entropy_on_one_path() -> None:
    method = begun(A, candidates=3)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert len(method.rivals) == 1
    assert torch.equal(loss, F.cross_entropy(method.logits(batch(A).images, None), batch(A).labels))


# ---- candidates ----------------------------------------------------------------------------------
@pytest.mark.parametrize("candidate", [0, 1, 2])
def test_candidate_trains_identically_alone_or_with_others(candidate: int) -> None:
    beside, alone = begun(A, B, candidates=3), begun(A, B, candidates=3)
    trained_ids = {id(p) for p in alone.rivals[candidate].parameters()}
    alone.rivals = torch.nn.ModuleList([alone.rivals[candidate]])
    alone.groups = [
        {**group, "params": [p for p in group["params"] if id(p) in trained_ids]}
        for group in alone.groups
    ]
    start = tensors(beside.rivals[candidate])
    assert same(start, tensors(alone.rivals[0]))
    for method in (beside, alone):
        trained(method, A, B)
    assert same(tensors(beside.rivals[candidate]), tensors(alone.rivals[0]))
    assert not same(start, tensors(alone.rivals[0]))


def test_candidates_are_distinct_and_independent_of_their_number() -> None:
    three, two = begun(A, B, candidates=3).rivals, begun(A, B, candidates=2).rivals
    assert [r.path.indices for r in three][:2] == [r.path.indices for r in two]
    assert all(same(tensors(one), tensors(other)) for one, other in zip(three, two, strict=False))
    assert len({str(r.path.indices) for r in three}) > 1
    assert len({id(r.heads) for r in three}) == 3


def test_candidate_losses_are_summed_and_reported_as_means() -> None:
    method, b = begun(A, B, candidates=2), batch(A, B)
    moved(method)
    taught = method.teacher.joined(b.images)
    each = [method.compute_terms(rival, b.images, wide(b, A, B), taught) for rival in method.rivals]
    loss, terms = method.loss(b, START)
    assert torch.allclose(loss, sum(ce + kd for ce, kd in each), atol=1e-5)
    assert torch.allclose(terms["ce"], (each[0][0] + each[1][0]) / 2, atol=1e-6)
    assert not torch.allclose(each[0][0], each[1][0], atol=1e-4)


class Looked:
    """A fake feed of two batches, the second one smaller. `asked` records the requested splits."""

    group = Group()

    def __init__(self, *tasks: Task) -> None:
        self.tasks, self.num_samples = tasks, 10
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, split: str, training: bool) -> Any:
        self.asked.append((split, training))
        return self

    def evaluate(self) -> Any:
        yield batch(*self.tasks)
        yield batch(*self.tasks, step=1, rows=slice(4))


@pytest.mark.parametrize(
    ("holds_out", "split", "tasks"), [(True, "val", (C,)), (False, "train", (A, B, C))]
)
def test_path_candidate_is_chosen_without_test_images(
    holds_out: bool, split: str, tasks: tuple[Task, ...]
) -> None:
    """Held-out images belong to the last task only, and their labels start at its first class."""
    chosen_candidates = set()
    for seed in range(6):
        method, feed = begun(A, B, C, candidates=3, seed=seed), Looked(*tasks)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in method.rivals.parameters():
                p.add_(torch.randn(p.shape), alpha=0.1)
        data = StepData(feed, has_validation=holds_out)
        method.context = replace(method.context, data=data)
        expected = []
        for rival in method.rivals:
            total = 0.0
            for b in feed.evaluate():
                labels = wide(b, *tasks) + (5 if holds_out else 0)
                ce, kd = method.compute_terms(
                    rival, b.images, labels, method.teacher.joined(b.images)
                ).detach()
                total += float(ce + 2.5 * kd) * len(b)
            expected.append(total / 10)
        rivals = [*method.rivals]
        state, carried = method.finish()
        assert feed.asked == [(split, False)]
        assert method.losses == state.meta["losses"] == pytest.approx(expected, rel=1e-5)
        best = rivals[expected.index(min(expected))]
        assert method.path is best.path
        assert method.heads is best.heads
        assert torch.equal(carried.tensors["path/down"], best.path.down)
        assert torch.equal(carried.tensors["heads/a/weight"], best.heads["a"].weight)
        chosen_candidates.add(rivals.index(best))
    assert len(chosen_candidates) > 1, "the choice must depend on the seed"


def test_keep_best_is_refused_with_several_candidates() -> None:
    best, data = TrainSettings(keep="best"), DataSettings()
    with pytest.raises(
        UserError,
        match=r"keep is 'best' and candidates is 2, .* accuracy of the first candidate only; set "
        r"train\.keep=last",
    ):
        Rpsnet.validate(RpsnetSettings(), best, data, "class")
    Rpsnet.validate(RpsnetSettings(candidates=1), best, data, "class")
    Rpsnet.validate(RpsnetSettings(), TrainSettings(), data, "class")


# ---- through the stages --------------------------------------------------------------------------
def four(lab: Lab, **settings: Any) -> Run:
    """Return a run of four tasks with one epoch each."""
    tasks = {"p": "01", "q": "2", "r": "3", "s": "4"}
    entries = [
        {"card": str(lab.card), "name": name, "classes": [*classes]}
        for name, classes in tasks.items()
    ]
    run = lab.run_of(
        "rpsnet",
        {"optimizer": "adamw", "lr": 3e-3, "epochs": 1},
        stream={"scenario": "class", "tasks": entries},
        methods={"rpsnet": {"memory": 40, **settings}},
    )
    return replace(run, order=tuple(tasks))


def test_old_paths_and_trunk_stay_unchanged(lab: Lab) -> None:
    run = four(lab, every=2)
    last = run.served(3)
    assert [bool(run.state(task).copies) for task in range(4)] == [False, True, False, True]
    for live in (last, run.live(3), run.served(2), run.live(2)):
        first: Any = live.frozen["1"]
        trunk = {name: t for name, t in run.state(1).copies.items() if "/" not in name}
        assert same(tensors(first), trunk)
        assert same(
            tensors(live.backbone),
            {
                name.removeprefix("trunk/"): t
                for name, t in run.state(1).copies.items()
                if "/" in name
            },
        )
    assert last.path is None
    assert len(last.frozen) == 2
    assert last.flops_share(run.state(3)) > run.served(1).flops_share(run.state(1)) > 1
    assert (
        len(
            TaskState.from_bytes(run.artifact(run.stages(2)[0]).read("task.safetensors")).meta[
                "losses"
            ]
        )
        == 2
    )
    sizes = [run.trained(task).manifest["carried_bytes"] for task in range(4)]
    assert max(sizes[1:]) < sizes[0] / 5, "a frozen trunk must not be carried on"


@pytest.mark.few(1)
@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_two_ranks_choose_the_candidate_of_one_rank(
    lab: Lab, tmp_path: Folder, val_fraction: float
) -> None:
    run = lab.run_of(
        "rpsnet",
        {"optimizer": "sgd", "lr": 0.05, "epochs": 1},
        data={"val_fraction": val_fraction},
        methods={"rpsnet": {"memory": 20, "every": 1, "candidates": 3}},
    )
    job = run.stages(1)[0]
    one = TaskState.from_bytes(run.artifact(job).read("task.safetensors"))
    assert lab.live[job.key].context.data.has_validation == bool(val_fraction), (
        "this decides on which images candidates are compared"
    )
    on_ranks([again(job, "ranks")], 2, tmp_path / "ranks")
    artifact = Artifact.need(job.root, again(job, "ranks").key)
    two = TaskState.from_bytes(artifact.read("task.safetensors"))
    assert len(one.meta["losses"]) == 3
    assert two.meta["losses"] == pytest.approx(one.meta["losses"], abs=1e-3)
    chosen, expected = (
        Carried.from_bytes(a.read("carried.safetensors")) for a in (artifact, run.artifact(job))
    )
    assert chosen.meta["path"] == expected.meta["path"]
    assert torch.allclose(chosen.tensors["path/up"], expected.tensors["path/up"], atol=1e-4)


@pytest.mark.parametrize("every", [1, 2])
def test_trunk_is_frozen_from_start_after_base_task(lab: Lab, every: int) -> None:
    """The first path belongs to the task after the base task."""
    run = stream(lab, "rpsnet", base="two", memory=20, every=every)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "herd"],
    ]
    assert not run.carried(0).tensors
    trunk_before = (
        {*run.state(1).copies}
        if every == 1
        else {
            name.removeprefix("path/")
            for name in run.carried(1).tensors
            if name.startswith("path/")
        }
    )
    assert trunk_before == {"down", "down_bias", "up", "up_bias"}
    served = run.served(1)
    assert same(tensors(served.backbone), tensors(run.fresh().backbone))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "promise",
    [
        "the_stored_bytes_are_the_method",
        "an_interrupted_stage_ends_as_if_it_had_not_been",
        "a_stage_tried_again_gives_the_same_bytes_and_leaves_its_parents_alone",
        "tasks_share_no_memory",
    ],
)
def test_promises_hold_while_a_path_keeps_training(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    monkeypatch.setitem(SETTINGS, ("rpsnet", "adamw"), {"train": {"epochs": 2, "lr": 3e-3}})
    PROMISES[promise].check(lab, "rpsnet", "adamw")
