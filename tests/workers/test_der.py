"""Tests of DER: the loss, trained parameters, the balanced subset, and pruned extractors."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from class_incremental_steps import RATES, SMALL, START, TRAIN, A, B, C, batch, stream, wide
from rank_runs import on_ranks
from step_contexts import keys_data, step_context
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import OPTIMIZERS, TASKS, TINY, Lab, again, history
from workers import loop, optim
from workers.dist import Group
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.loop import freeze_others
from workers.methods import METHODS
from workers.methods.base import Method, ParamGroup, Progress
from workers.methods.der import DerSettings
from workers.methods.der_p import DerPSettings
from workers.methods.simple_der import SimpleDerSettings
from workers.model.distill import kd_ce
from workers.model.heads import sum_old_targets
from workers.model.masks import compute_annealed_scale
from workers.model.units import cut_units, magnitudes, masked_weights, pack, unit_sites, unpack
from workers.model.vit import build, compute_digest
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried, TaskState

EVERY = ("der", "der_p", "simple_der")
D = 32


def backbone(settings: BackboneSettings = SMALL, seed: int = 0) -> Any:
    """Return a backbone with noise on all parameters, because zeros could hide errors."""
    torch.manual_seed(seed)
    model = build(settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def task_state(
    name: str, task: Task, position: int, parts: dict[str, dict[str, Tensor]] | None = None
) -> TaskState:
    """Return the state of a finished task: an extractor with other weights, and rows of W.

    The rows cover `position + 1` extractors.
    """
    parts = parts or {"copies": dict(backbone(seed=10 + position).named_parameters())}
    head = {
        "weight": torch.randn(
            task.num_classes, D * (position + 1), generator=torch.Generator().manual_seed(position)
        )
    }
    stored = {
        kind: {n: t.detach().clone() for n, t in tensors.items()} for kind, tensors in parts.items()
    }
    return TaskState(task.name, task.classes, name, compute_digest(backbone()), head=head, **stored)


def begun(
    name: str,
    *tasks: Task,
    step: str = "train",
    memory: Any = None,
    extractor: dict[str, dict[str, Tensor]] | None = None,
    kept_units: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Any:
    """Return a method at `step` of the last of `tasks`, after the other tasks are finished.

    All tasks have samples in its batches. extractor: the task's extractor from an earlier step.
    kept_units: the units of pruned extractors (default: all).
    """
    torch.manual_seed(0)
    method = METHODS[name](backbone(), METHODS[name].Settings(**settings), 0)
    method.scenario, method.stream = "class", tasks
    parts = (
        {"copies": pack(backbone(seed=5), kept_units or all_on()), "masks": kept_units or all_on()}
        if name != "der"
        else None
    )
    states = [task_state(name, task, position, parts) for position, task in enumerate(tasks[:-1])]
    for state in states:
        method.load_task(state)
    now = len(tasks) - (step == "train")
    tensors = {
        f"heads/{task.name}/weight": torch.randn(task.num_classes, D * now) for task in tasks[:now]
    }
    carried = None
    if tensors:
        for kind, parts_by_name in (extractor or {}).items():
            for part_name, part in parts_by_name.items():
                tensors[f"{kind}/{part_name}"] = part.detach()
        carried = Carried(tensors, {"memory": memory or {}})
    groups: list[ParamGroup] = []
    if step != "herd":
        groups = method.begin(step_context(tasks[-1], step, carried, RATES, tasks))
    method.groups = groups  # type: ignore[assignment]
    freeze_others(method, groups)
    return method.train()


def all_on(value: bool = True) -> dict[str, Tensor]:
    return {site: torch.full((size,), value) for site, size in unit_sites(backbone()).items()}


def some(share: float = 0.5, seed: int = 0) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        site: torch.rand(size, generator=noise) < share
        for site, size in unit_sites(backbone()).items()
    }


def stepped(
    method: Any, *tasks: Task, progress: Progress = START, lr: float = 0.1
) -> dict[str, bool]:
    """Take one step as in the training loop, and return whether each parameter changed."""
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    train = TrainSettings(optimizer="sgd", lr=lr)
    job: Any = type("Job", (), {"train": train})
    loop.train_step(
        method, optim.build_optimizer(method.groups, train), [batch(*tasks)], progress, job, Group()
    )
    return {name: not torch.equal(p, before[name]) for name, p in method.named_parameters()}


# ---- the loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize("soft", [False, True])
def test_loss_adds_classifier_and_weighted_auxiliary_cross_entropy(soft: bool) -> None:
    method = begun("der", A, B, C, auxiliary=0.7)
    stepped(method, A, B, C)
    targets = (
        torch.rand(6, 7, generator=torch.Generator().manual_seed(2)).softmax(1)
        if soft
        else F.one_hot(wide(batch(A, B, C), A, B, C), 7).float()
    )
    b = batch(A, B, C, targets=targets if soft else None)
    loss, terms = method.loss(b, START)
    extractors = [backbone(seed=10), backbone(seed=11), method.backbone]
    u = torch.cat([extractor.eval()(b.images) for extractor in extractors], 1)
    w = torch.cat([method.heads[name].weight for name in "abc"])
    ce = F.cross_entropy(u @ w.T, targets)
    auxiliary = F.cross_entropy(
        u[:, 2 * D :] @ method.auxiliary.weight.T,
        torch.cat([targets[:, :5].sum(1, keepdim=True), targets[:, 5:]], 1),
    )
    assert u.shape == (6, 3 * D)
    assert method.auxiliary.weight.shape == (1 + C.num_classes, D)
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "auxiliary": auxiliary.item()}, rel=1e-4
    )
    assert loss.item() == pytest.approx((ce + 0.7 * auxiliary).item(), rel=1e-4)


def test_auxiliary_targets_merge_all_old_classes_into_one() -> None:
    soft = torch.tensor([[0.025, 0.295, 0.025, 0.655], [0.025, 0.655, 0.025, 0.295]])
    assert torch.allclose(
        sum_old_targets(soft, 2), torch.tensor([[0.32, 0.025, 0.655], [0.68, 0.025, 0.295]])
    )
    hard = sum_old_targets(F.one_hot(torch.arange(5), 5), 3).argmax(1)
    assert hard.tolist() == [0, 0, 0, 1, 2], "c < O_t -> 0, else c - O_t + 1"


def test_first_task_uses_only_cross_entropy() -> None:
    method = begun("der", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(
        loss,
        F.cross_entropy(
            method.backbone(batch(A).images) @ method.heads["a"].weight.T, batch(A).labels
        ),
    )


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_temperature_scales_outputs_in_fine_tuning_but_not_in_serving(
    temperature: float,
) -> None:
    method = begun(
        "der",
        A,
        B,
        step="finetune",
        extractor={"copies": dict(backbone(seed=11).named_parameters())},
        temperature=temperature,
    )
    stepped(method, A, B)
    b = batch(A, B)
    u = torch.cat([backbone(seed=s).eval()(b.images) for s in (10, 11)], 1)
    z = u @ torch.cat([method.heads[name].weight for name in "ab"]).T
    loss, terms = method.loss(b, START)
    assert terms.keys() == {"ce"}
    assert loss.item() == pytest.approx(
        F.cross_entropy(z / temperature, wide(b, A, B)).item(), rel=1e-4
    )
    assert torch.allclose(method.eval().logits(b.images, None), z, rtol=1e-4, atol=1e-4)


# ---- trained parameters --------------------------------------------------------------------------
def test_training_changes_only_newest_extractor_and_heads() -> None:
    method = begun("der", A, B)
    before = compute_digest(method.extractors)
    changed = stepped(method, A, B)
    for name, moved in changed.items():
        assert moved == (name.startswith(("backbone.", "heads.")) or name == "auxiliary.weight"), (
            name
        )
    assert compute_digest(method.extractors) == before
    assert all(not m.training for m in method.extractors.modules())
    assert all(p.grad is None for p in method.extractors.parameters())
    assert method.backbone.training


def test_fine_tuning_changes_only_the_classifier() -> None:
    method = begun(
        "der",
        A,
        B,
        step="finetune",
        extractor={"copies": dict(backbone(seed=11).named_parameters())},
    )
    before = [compute_digest(method.extractors), compute_digest(method.backbone)]
    changed = stepped(method, A, B)
    assert {name for name, moved in changed.items() if moved} == {
        "heads.layers.0.weight",
        "heads.layers.1.weight",
    }
    assert [compute_digest(method.extractors), compute_digest(method.backbone)] == before
    assert not any(
        m.training for part in (method.backbone, method.extractors) for m in part.modules()
    )
    assert method.auxiliary is None


@pytest.mark.parametrize("name", EVERY)
def test_extractor_starts_as_copy_of_the_previous_one(name: str) -> None:
    method = begun(name, A, B, C)
    expected = dict(backbone(seed=5 if name != "der" else 11).named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in method.backbone.named_parameters())


@pytest.mark.parametrize("name", ["der_p", "simple_der"])
def test_extractor_after_pruned_one_has_all_units(
    name: str,
) -> None:
    method, expected = (
        begun(name, A, B, kept_units=some()),
        unpack(backbone(), pack(backbone(seed=5), some()), some(), fill=True),
    )
    assert all(torch.equal(p, expected[n]) for n, p in method.backbone.named_parameters())
    assert sum(p.numel() for p in method.extractors.parameters()) < sum(
        p.numel() for p in method.backbone.parameters()
    )


def test_classifier_is_reinitialised_over_all_features_in_each_step() -> None:
    rows = {
        step: begun(
            "der",
            A,
            B,
            step=step,
            extractor={"copies": dict(backbone(seed=11).named_parameters())}
            if step == "finetune"
            else None,
        ).heads
        for step in ("train", "finetune")
    }
    for heads in rows.values():
        assert [tuple(heads[name].weight.shape) for name in "ab"] == [(2, 2 * D), (3, 2 * D)]
        assert all(heads[name].bias is None for name in "ab")
        assert all(0.015 < heads[name].weight.std() < 0.025 for name in "ab"), (
            "rows from earlier steps are not used"
        )
    assert not torch.equal(rows["train"]["b"].weight, rows["finetune"]["b"].weight)


@pytest.mark.parametrize(("restart", "at"), [(0.0, None), (0.5, 4), (0.2, 1)])
def test_heads_are_reinitialised_once_if_restart_is_set(restart: float, at: int | None) -> None:
    method, was_restarted = begun("der", A, B, restart=restart), []
    for step in range(10):
        stepped(method, A, B, progress=Progress(step // 5, step % 5, 2, 5), lr=1.0)
        was_restarted.append(
            float(method.heads["b"].weight.detach().std()) < 0.025
            and float(method.auxiliary.weight.detach().std()) < 0.025
        )
    assert [step for step, anew in enumerate(was_restarted) if anew] == ([] if at is None else [at])


# ---- the balanced subset -------------------------------------------------------------------------
def test_fine_tuning_draws_equally_many_images_per_class() -> None:
    memory = {"a": {"a1": [f"a1/{i}" for i in range(7)], "a2": [f"a2/{i}" for i in range(5)]}}
    method = begun("der", A, B, memory=memory)
    whole = {name: [f"{name}/{i}" for i in range(20)] for name in B.classes}
    context = step_context(B, "finetune", Carried(meta={"memory": memory}), data=keys_data(whole))
    chosen = method.memory(context)
    assert {name: len(keys) for name, keys in chosen.items()} == {"a": 10, "b": 15}
    counts = [
        sum(key.startswith(f"{name}/") for keys in chosen.values() for key in keys)
        for name in ("a1", "a2", *B.classes)
    ]
    assert counts == [5] * 5
    assert all(len({*keys}) == len(keys) for keys in chosen.values())
    assert chosen["b"][:5] != whole["b1"][:5], "drawn at random, not the first ones"
    assert method.memory(context) == chosen
    method.seed = 1
    assert method.memory(context) != chosen
    scarce = {name: [f"{name}/{i}" for i in range(3)] for name in B.classes}
    assert {
        len(keys) for keys in method.memory(replace(context, data=keys_data(scarce))).values()
    } == {6, 9}, "new classes can have the fewest images"


def test_training_uses_all_task_images_and_all_exemplars() -> None:
    memory = {"a": {"a1": ["k1", "k2"], "a2": ["k3"]}}
    assert begun("der", A, B).memory(
        step_context(B, "train", Carried(meta={"memory": memory}))
    ) == {"a": ["k1", "k2", "k3"]}


# ---- in a stream ---------------------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize("name", EVERY)
def test_an_extractor_is_stored_once_and_never_changes(lab: Lab, name: str) -> None:
    run = stream(lab, name, memory=20)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "finetune", "herd"],
    ]
    for task in (0, 1):
        *before, last = [run.lab.finished[run.artifact(job).key] for job in run.stages(task)]
        assert {n.split("/")[0] for n in last[1].tensors} == ({"heads"} if task else set())
        assert last[0].copies.keys() == dict(run.fresh().backbone.named_parameters()).keys()
        for state, carried in before:
            assert not state.copies
            assert all(
                torch.equal(carried.tensors[f"copies/{n}"], t) for n, t in last[0].copies.items()
            ), "unchanged since training"
    assert run.state(1).head["weight"].shape == (3, 2 * D)
    assert run.carried(1).tensors["heads/two/weight"].shape == (2, 2 * D)
    assert any(not torch.equal(t, run.state(1).copies[n]) for n, t in run.state(0).copies.items())
    (finetune,) = history(run.artifact(run.stages(1)[1]))
    assert finetune["images"] == 5 * 10


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EVERY)
def test_base_task_uses_backbone_and_its_head_first(lab: Lab, name: str) -> None:
    run = stream(lab, name, base="two", memory=20)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "finetune", "herd"],
    ]
    state, images = run.state(0), run.images(0)
    assert state.sizes() == {"masks": 0, "tokens": 0, "head": 4 * 2 * (D + 1), "copies": 0}
    served, later, plain = run.served(0), run.served(1), run.fresh().backbone.eval()
    with torch.no_grad():
        assert torch.allclose(
            served.logits(images, None),
            F.linear(plain(images), state.head["weight"], state.head["bias"]),
            atol=1e-5,
        )
        assert torch.allclose(later.features(images)[:, :D], plain(images), atol=1e-5)
        assert later.logits(images, None).shape == (len(images), 5)
    assert later.heads["two"].bias is None


@pytest.mark.slow
def test_der_works_on_a_convolutional_backbone(lab: Lab) -> None:
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in TASKS.items()
    ]
    run = lab.run_of(
        "der",
        {**TRAIN, "lr": 1e-3},
        backbone={"name": "resnet18", "img_size": 32, "options": {"norm_layer": "groupnorm"}},
        methods={"der": {"memory": 20}},
        stream={"scenario": "class", "tasks": tasks},
    )
    assert run.state(1).head["weight"].shape == (3, 2 * 512)
    assert len(run.evaluated(1)["rows"]) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_give_the_results_of_one(lab: Lab, tmp_path: Path, name: str) -> None:
    tasks = [
        {"card": str(lab.card), "name": task, "classes": list(classes)}
        for task, classes in TASKS.items()
    ]
    settings = {"memory": 20, **({"mask_lr": 0.05} if name == "der_p" else {})}
    run = lab.run_of(
        name,
        {**OPTIMIZERS["sgd"], "epochs": 1},
        methods={name: settings},
        stream={"scenario": "class", "tasks": tasks},
    )
    train, finetune, herd = run.stages(1)
    run.trained(1)
    jobs = [again(train, "ranks")]
    jobs.append(again(finetune, "ranks", previous={"train": jobs[0].key}))
    jobs.append(again(herd, "ranks", previous={"finetune": jobs[1].key}))
    on_ranks(jobs, 2, tmp_path / "ranks")
    many = Artifact.need(herd.root, jobs[2].key)
    ranks_state, alone = TaskState.from_bytes(many.read("task.safetensors")), run.state(1)
    assert ranks_state.masks.keys() == alone.masks.keys()
    assert all(torch.equal(mask, alone.masks[site]) for site, mask in ranks_state.masks.items())
    assert all(torch.allclose(t, alone.copies[n], atol=1e-3) for n, t in ranks_state.copies.items())
    assert torch.allclose(ranks_state.head["weight"], alone.head["weight"], atol=1e-3)


# ---- pruning -------------------------------------------------------------------------------------
def test_annealed_mask_scale_has_the_worked_values() -> None:
    assert [compute_annealed_scale(step, 5, 10.0) for step in range(5)] == pytest.approx(
        [0.1, 2.575, 5.05, 7.525, 10.0]
    )


def test_embedding_gradient_is_compensated_for_the_scale() -> None:
    """The gradient of sigmoid(s e) with respect to e is multiplied by a factor.

    The factor is s_max sigmoid(e)(1 - sigmoid(e)) / (s sigmoid(s e)(1 - sigmoid(s e))).
    """
    method = begun("der_p", A, s_max=10.0)
    e, s = method.mask.embedding, compute_annealed_scale(2, 5, 10.0)
    (gradient,) = torch.autograd.grad(method.mask.sample(s).sum(), e)
    sigmoid, hard = torch.sigmoid(e.detach().double()), torch.sigmoid(s * e.detach().double())
    plain = s * hard * (1 - hard)
    assert torch.allclose(
        gradient.double(),
        10.0 * plain * (sigmoid * (1 - sigmoid)) / (s * hard * (1 - hard)),
        rtol=1e-4,
    )


def test_sparsity_is_kept_share_of_block_weights() -> None:
    """It is sum_l |m_{l-1}|_1 |m_l|_1 / sum_l c_{l-1} c_l over the weights of the blocks.

    The residual stream counts as unmasked.
    """
    method = begun("der_p", A, s_max=10.0, sparsity=0.3)
    b = batch(A)
    loss, terms = method.loss(b, Progress(0, 1, 1, 5))
    m = method.by_site(
        torch.sigmoid(compute_annealed_scale(1, 5, 10.0) * method.mask.embedding.detach())
    )
    sums = {site: float(site_mask.sum()) for site, site_mask in m.items()}
    left = full = 0.0
    for i in range(2):
        for kind, weights in (("qk", 2), ("v", 2), ("ff", 2)):  # matrices: q and k, or in and out
            left += weights * D * sums[f"blocks.{i}.{kind}"]
            full += weights * D * len(m[f"blocks.{i}.{kind}"])
    assert float(terms["sparsity"]) == pytest.approx(left / full, rel=1e-5)
    method.weight_overrides = masked_weights(method.backbone, m)
    ce = F.cross_entropy(method.features(b.images) @ method.heads["a"].weight.T, b.labels)
    assert loss.item() == pytest.approx(ce.item() + 0.3 * left / full, rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_cut_network_equals_masked_network_and_is_smaller(share: float) -> None:
    vit, masks, images = backbone().eval(), some(share), batch(A).images
    stored = pack(vit, masks)
    with torch.no_grad():
        expected = torch.func.functional_call(vit, masked_weights(vit, masks), (images,))
        zeroed = copy.deepcopy(vit)
        zeroed.load_state_dict(unpack(vit, stored, masks, fill=False), strict=False)
        assert torch.allclose(zeroed(images), expected, atol=1e-5)
        cut_units(zeroed, masks)
        assert torch.allclose(zeroed(images), expected, atol=1e-5)
        for block in zeroed.blocks:
            block.attn.fused_attn = False
        assert torch.allclose(zeroed(images), expected, atol=1e-5), (
            "also without fused attention, where timm scales the queries itself"
        )
    num_kept = sum(int(mask.sum()) for mask in masks.values())
    saved = (sum(map(len, masks.values())) - num_kept) * 2 * D
    biases = sum(
        int((~mask).sum()) * {"qk": 2, "v": 1, "ff": 1}[site.split(".")[-1]]
        for site, mask in masks.items()
    )
    assert (
        sum(t.numel() for t in vit.parameters()) - sum(t.numel() for t in stored.values())
        == saved + biases
    ), "a unit has 2 D weights"
    assert (
        sum(p.numel() for p in zeroed.parameters()) < sum(p.numel() for p in vit.parameters())
    ) == (share < 1)


def test_dropped_units_are_refilled_from_the_backbone() -> None:
    vit, other, masks = backbone(), backbone(seed=1), some()
    whole = unpack(other, pack(vit, masks), masks, fill=True)
    ff, name = masks["blocks.1.ff"], "blocks.1.mlp.fc2.weight"
    assert torch.equal(whole[name][:, ff], vit.get_parameter(name)[:, ff])
    assert torch.equal(whole[name][:, ~ff], other.get_parameter(name)[:, ~ff])
    assert torch.equal(whole["norm.weight"], vit.norm.weight)


@pytest.mark.parametrize("name", ["der_p", "simple_der"])
def test_pruned_extractor_is_served_with_its_hard_masks(name: str) -> None:
    """Validation in `train` uses the same network as the carried state."""
    method = begun(name, A)
    if name == "der_p":
        with torch.no_grad():
            method.mask.embedding.normal_(generator=torch.Generator().manual_seed(3))
    else:
        method.kept.copy_(torch.cat([*some().values()]))
    images, hard = batch(A).images, method.by_site(method.hard())
    with torch.no_grad():
        expected = (
            torch.func.functional_call(
                method.backbone, masked_weights(method.backbone, hard), (images,)
            )
            @ method.heads["a"].weight.T
        )
        assert torch.allclose(method.eval().logits(images, None), expected, atol=1e-5)
    _, carried = method.finish()
    handed = METHODS[name](backbone(), method.settings, 0)
    handed.scenario, handed.stream = "class", (A,)
    handed.load_carried(Carried.from_bytes(carried.to_bytes()))
    with torch.no_grad():
        assert torch.allclose(
            handed.backbone.eval()(images) @ method.heads["a"].weight.T, expected, atol=1e-5
        )
    assert sum(p.numel() for p in handed.backbone.parameters()) < sum(
        p.numel() for p in method.backbone.parameters()
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["der_p", "simple_der"])
def test_pruned_extractors_are_smaller_and_cheaper_in_a_stream(lab: Lab, name: str) -> None:
    run = stream(lab, name, memory=20, **({"sparsity": 0.3} if name == "der_p" else {}))
    densities = [
        torch.cat([*run.state(task).masks.values()]).float().mean().item() for task in (0, 1)
    ]
    assert all(0.05 < share < 0.95 for share in densities), densities
    (row,) = history(run.artifact(run.stages(1)[0]))
    assert row["density"] == pytest.approx(densities[1], abs=1e-6)
    whole = stream(lab, "der", memory=20)
    assert run.trained(1).manifest["sizes"]["copies"] < whole.trained(1).manifest["sizes"]["copies"]
    assert run.trained(1).manifest["flops_share"] < whole.trained(1).manifest["flops_share"] == 2.0
    assert run.served(1).logits(run.images(0), None).shape[1] == 5


@pytest.mark.parametrize("name", ["der_p", "simple_der"])
def test_flops_are_counted_after_training_with_stochastic_depth(lab: Lab, name: str) -> None:
    """The last batch drew its drops for all its samples, but one image is used for counting."""
    run = lab.run_of(
        name,
        {**OPTIMIZERS["adamw"], "epochs": 1, "batch_size": 32},
        backbone={**TINY, "drop_path": 0.1},
    )
    share = run.artifact(run.stages(0)[0]).manifest["flops_share"]
    assert share is not None
    assert 0 < share <= 1


def test_a_pruned_state_of_another_shape_is_refused() -> None:
    vit, masks = backbone(), some()
    stored = pack(vit, masks)
    with pytest.raises(UserError, match=r"blocks.0.*has shape .* leave"):
        unpack(vit, stored, some(0.2), fill=False)
    with pytest.raises(UserError, match="not those of this backbone"):
        unpack(vit, stored, {}, fill=False)
    other: Method = METHODS["der"](backbone(), DerSettings(), 0)
    with pytest.raises(UserError, match="the extractor of task 'a' does not fit"):
        other.load_task(task_state("der", A, 0, {"copies": {"norm.weight": torch.ones(3)}}))


def test_der_p_refuses_unsuitable_backbone_epoch_length_and_mask_rate() -> None:
    with pytest.raises(UserError, match="vision transformer"):
        METHODS["der_p"].check_backbone(
            DerPSettings(), build(BackboneSettings(name="resnet18")), (A,)
        )
    with pytest.raises(UserError, match="one step per epoch"):
        begun("der_p", A).loss(batch(A), Progress(0, 0, 1, 1))
    with pytest.raises(UserError, match="mask_lr is 'auto'"):
        METHODS["der_p"].validate(
            DerPSettings(), TrainSettings(optimizer="sgd"), DataSettings(), "class"
        )


# ---- Simple-DER ----------------------------------------------------------------------------------
def test_old_outputs_are_distilled_from_heads_before_the_task() -> None:
    method = begun("simple_der", A, B, C, tau=3.0, distillation=0.4)
    stepped(method, A, B, C)
    b = batch(A, B, C)
    loss, terms = method.loss(b, START)
    u = method.features(b.images)
    taught = u[:, : 2 * D] @ torch.cat([head.weight for head in method.before]).T
    kd = kd_ce(method.all_logits(u)[:, :5], taught, 3.0)
    assert terms["kd"].item() == pytest.approx(kd.item(), rel=1e-4)
    assert loss.item() == pytest.approx(
        (terms["ce"] + terms["auxiliary"] + 0.4 * kd).item(), rel=1e-4
    )
    assert [head.weight.shape for head in method.before] == [(2, 2 * D), (3, 2 * D)]
    assert all(p.grad is None for head in method.before for p in head.parameters())
    assert begun("simple_der", A).loss(batch(A), START)[1].keys() == {"ce"}


def test_weakest_units_are_pruned_halfway() -> None:
    method, masks_by_step = begun("simple_der", A, keep=0.25, prune_after=0.5), []
    sizes = {}
    for step in range(4):
        if step == 2:
            sizes = magnitudes(method.backbone)
        stepped(method, A, progress=Progress(0, step, 1, 4))
        masks_by_step.append(method.kept.clone())
        dropped = ~method.by_site(method.kept)["blocks.0.v"]
        assert not method.backbone.blocks[0].attn.proj.weight.grad[:, dropped].any(), (
            "dropped units have no gradient"
        )
    assert [bool(mask.all()) for mask in masks_by_step] == [True, True, False, False]
    assert torch.equal(masks_by_step[2], masks_by_step[3])
    for site, mask in method.by_site(masks_by_step[2]).items():
        for part, size in zip(
            mask.chunk(1 if site.endswith("ff") else 2),
            sizes[site].chunk(1 if site.endswith("ff") else 2),
            strict=True,
        ):
            assert int(part.sum()) == len(part) // 4
            assert size[part].min() >= size[~part].max()


def test_unit_magnitude_is_product_of_its_weight_norms() -> None:
    """A bias counts as one more weight into a unit.

    The bias of a key does not count, because it adds the same value to all scores of a query.
    """
    vit = backbone()
    unit_magnitudes, block = magnitudes(vit), vit.blocks[1]
    (q, k, v), (q_bias, _, v_bias) = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
    query, value = torch.cat([q[5], q_bias[5:6]]), torch.cat([v[5], v_bias[5:6]])
    neuron = torch.cat([block.mlp.fc1.weight[5], block.mlp.fc1.bias[5:6]])
    assert unit_magnitudes["blocks.1.qk"][5].item() == pytest.approx(
        (query.norm() * k[5].norm()).item(), rel=1e-5
    )
    assert unit_magnitudes["blocks.1.v"][5].item() == pytest.approx(
        (value.norm() * block.attn.proj.weight[:, 5].norm()).item(), rel=1e-5
    )
    assert unit_magnitudes["blocks.1.ff"][5].item() == pytest.approx(
        (neuron.norm() * block.mlp.fc2.weight[:, 5].norm()).item(), rel=1e-5
    )


def test_large_bias_alone_keeps_a_neuron() -> None:
    vit = backbone()
    mlp = vit.blocks[0].mlp
    with torch.no_grad():
        mlp.fc1.bias.zero_()
        mlp.fc1.weight[3] = 0.0
        mlp.fc1.bias[3] = 10.0
    assert int(magnitudes(vit)["blocks.0.ff"].argmax()) == 3


def test_magnitudes_without_biases_use_weights_only() -> None:
    options = SMALL.options | {"qkv_bias": False}
    vit = backbone(SMALL.model_copy(update={"options": options}))
    q, k, _ = vit.blocks[1].attn.qkv.weight.chunk(3)
    assert torch.allclose(magnitudes(vit)["blocks.1.qk"], q.norm(dim=1) * k.norm(dim=1))


@pytest.mark.parametrize("name", EVERY)
def test_changed_setting_reruns_only_the_steps_reading_it(name: str) -> None:
    method = METHODS[name]
    every = {*method.Settings.model_fields}
    read = {
        step: every - method.ignored_settings(step)
        for step in ("train", "finetune", "herd", "evaluate")
    }
    assert read["herd"] == {"memory", "per_class", "selection"}
    assert read["finetune"] == {"temperature"}
    own_settings = {
        "der": set(),
        "der_p": {*DerPSettings.model_fields} - {*DerSettings.model_fields},
        "simple_der": {*SimpleDerSettings.model_fields} - {*DerSettings.model_fields},
    }[name]
    assert read["train"] == {"auxiliary", "restart", *own_settings}
    assert read["evaluate"] == every


def test_features_follow_stream_order_not_load_order() -> None:
    features = []
    for order in ((0, 1), (1, 0)):
        method = METHODS["der"](backbone(), DerSettings(), 0)
        method.scenario, method.stream = "class", (A, B)
        for index in order:
            method.load_task(task_state("der", (A, B)[index], index))
        features.append(method.eval().features(batch(A).images))
    assert torch.equal(*features)
