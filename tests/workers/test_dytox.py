"""Tests of DyTox: its loss and parameter counts as published, the parameters that each step trains,
and the stored tasks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from step_contexts import step_context
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.testing.lab import OPTIMIZERS, TASKS, Lab
from workers import optim
from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import BackboneSettings, Task
from workers.loop import freeze_others
from workers.methods.base import OptimPlan, Progress
from workers.methods.dytox import DyTox, DyToxSettings
from workers.model.distill import kd_kl
from workers.model.heads import sum_old_targets
from workers.model.task_attention import TaskAttention, TokenHead, TokenHeads, TokenNetwork
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

SMALL = BackboneSettings(
    name="convit_local",
    img_size=16,
    weights="none",
    options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
)
ONE, TWO, THREE = (
    Task(name, "card", "", tuple(name + c for c in "123"[:count]))
    for name, count in (("one", 2), ("two", 3), ("three", 2))
)
RATES = OptimPlan(lr=1e-2, weight_decay=1e-6, batch_size=6, full_rate_steps=10.0)
START = Progress(0, 0, 1, 10)


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(4))


def batch(*tasks: Task, **parts: Any) -> Batch:
    """Return six samples that alternate between the tasks."""
    rows = torch.arange(6)
    task_indices = rows % len(tasks)
    labels = torch.tensor(
        [
            int(row) % tasks[task_index].num_classes
            for row, task_index in zip(rows, task_indices, strict=True)
        ]
    )
    return Batch(
        images(), labels, task_indices, StepRng(7, 0, 0, rows, 6, torch.device("cpu")), **parts
    )


def begun(
    *tasks: Task,
    step: str = "train",
    carried: Carried | None = None,
    settings: BackboneSettings = SMALL,
    **method_settings: Any,
) -> Any:
    """Return the method at `step` of the last task. The older tasks have heads."""
    torch.manual_seed(0)
    method = DyTox(build(settings), DyToxSettings(**method_settings), 0)
    method.scenario, method.stream = "class", tasks
    for task in tasks[:-1] if step == "train" else tasks:
        method.heads.add(task.name, task.num_classes, 0)
    groups = method.begin(step_context(tasks[-1], step, carried, RATES, tasks))
    freeze_others(method, groups)
    method.groups = groups  # type: ignore[assignment]
    return method.train()


def stepped(method: Any, *tasks: Task) -> dict[str, bool]:
    """Make an optimizer step, and return name -> whether the parameter has changed."""
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    optimizer = torch.optim.AdamW([g for g in method.groups if g["params"]], lr=1e-2)
    method.loss(batch(*tasks), START)[0].backward()
    optimizer.step()
    return {name: not torch.equal(p, before[name]) for name, p in method.named_parameters()}


# ---- the loss ------------------------------------------------------------------------------------
def test_loss_matches_the_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two old classes and a new one. The first sample is new, and the second is old."""
    method = begun(ONE, Task("new", "card", "", ("n1",)))
    monkeypatch.setattr(method, "features", lambda images: torch.zeros(2, 64))
    monkeypatch.setattr(method, "all_logits", lambda e: torch.tensor([[0.0, 1, 2], [1, 0, -1]]))
    method.before = (lambda images: torch.tensor([[1.0, -1], [0, 2]]),)
    monkeypatch.setattr(method.auxiliary, "forward", lambda e: torch.tensor([[0.5, 0], [0, 1]]))
    draw = StepRng(7, 0, 0, torch.arange(2), 2, torch.device("cpu"))
    loss, terms = method.loss(
        Batch(images(2), torch.tensor([0, 0]), torch.tensor([1, 0]), draw), START
    )
    assert {name: t.item() for name, t in terms.items()} == pytest.approx(
        {"bce": 0.57550124, "kd": 0.41436246, "div": 0.91840826}, abs=1e-7
    )
    assert method.old_share == pytest.approx(2 / 3)
    assert loss.item() == pytest.approx(0.55991621, abs=1e-7)


def test_distillation_loss_has_the_worked_values() -> None:
    y, z = torch.tensor([[2.0, 0, -1], [0.5, 0.5, 0]]), torch.tensor([[1.0, 1, 0], [0, 1, -1]])
    assert kd_kl(z, y).item() == pytest.approx(0.09367011, abs=1e-7)
    assert kd_kl(z, y, 2.0).item() == pytest.approx(4 * 0.02842763, abs=1e-7)
    assert kd_kl(z, z).item() == pytest.approx(0, abs=1e-7)


def test_soft_targets_of_old_classes_are_summed() -> None:
    soft = torch.tensor([[0.025, 0.295, 0.025, 0.655], [0.025, 0.655, 0.025, 0.295]])
    assert torch.allclose(
        sum_old_targets(soft, 2), torch.tensor([[0.32, 0.025, 0.655], [0.68, 0.025, 0.295]])
    )


@pytest.mark.parametrize("soft", [False, True])
def test_loss_combines_terms_as_published(soft: bool) -> None:
    method = begun(ONE, TWO)
    method.eval()
    targets = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) if soft else None
    mixed_batch = batch(ONE, TWO, targets=targets)
    loss, terms = method.loss(mixed_batch, START)
    z = method.logits(mixed_batch.images, None)
    y = (
        targets
        if targets is not None
        else F.one_hot(mixed_batch.labels + 2 * mixed_batch.tasks, 5).float()
    )
    e = method.network().embeddings(mixed_batch.images)
    taught = method.before[0](mixed_batch.images)
    want = {
        "bce": F.binary_cross_entropy_with_logits(z, y),
        "kd": kd_kl(z[:, :2], taught),
        "div": F.binary_cross_entropy_with_logits(method.auxiliary(e[:, 1]), sum_old_targets(y, 2)),
    }
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(
        {name: value.item() for name, value in want.items()}, abs=1e-6
    )
    assert method.old_share == 2 / 5
    assert loss.item() == pytest.approx(
        (0.6 * want["bce"] + 0.4 * want["kd"] + 0.1 * want["div"]).item(), abs=1e-6
    )


def test_first_task_uses_only_cross_entropy() -> None:
    method = begun(ONE)
    loss, terms = method.loss(batch(ONE), START)
    assert {*terms} == {"bce"}
    assert loss.item() == terms["bce"].item()
    later = begun(ONE, TWO)
    later.eval()
    assert later.loss(batch(ONE, TWO), START)[1]["kd"].item() == pytest.approx(0, abs=1e-7)


def test_without_distillation_the_loss_is_the_other_two_terms() -> None:
    method = begun(ONE, TWO, distillation=False)
    assert method.before == (None,)
    loss, terms = method.loss(batch(ONE, TWO), START)
    assert {*terms} == {"bce", "div"}
    assert loss.item() == pytest.approx((terms["bce"] + 0.1 * terms["div"]).item(), abs=1e-6)
    with_it = begun(ONE, TWO).loss(batch(ONE, TWO), START)[1]
    assert {name: terms[name].item() for name in terms} == pytest.approx(
        {name: with_it[name].item() for name in terms}, abs=1e-7
    )


def test_all_tasks_can_share_the_first_token() -> None:
    """All heads then classify the same embedding."""
    method = begun(ONE, TWO, THREE, expand_tokens=False).eval()
    heads = [method.heads[task.name] for task in (ONE, TWO, THREE)]
    encoded = method.backbone.forward_features(images())
    patches = encoded[:, method.backbone.num_prefix_tokens :]
    e = method.decoder(heads[0].token[None], patches)[:, 0]
    expected = torch.cat([head(e) for head in heads], 1)
    assert torch.allclose(method.logits(images(), None), expected, atol=1e-6)
    assert method.features(images()).shape == (6, 32)


@pytest.mark.parametrize("step", ["train", "finetune"])
def test_a_shared_token_is_trained_with_every_task(step: str) -> None:
    moved = stepped(begun(ONE, TWO, step=step, expand_tokens=False), ONE, TWO)
    assert moved["heads.layers.0.token"]
    assert not moved["heads.layers.1.token"]
    assert moved["heads.layers.1.weight"]
    assert moved["heads.layers.0.weight"] == (step == "finetune")


def test_a_shared_token_is_stored_once(lab: Lab) -> None:
    settings = {"memory": 20, "expand_tokens": False}
    run = lab.run_of("dytox", {**OPTIMIZERS["adamw"], "epochs": 1}, methods={"dytox": settings})
    run.evaluated(1)
    first, second = (run.state(task) for task in (0, 1))
    assert set(first.tokens) == {"token"}
    assert not second.tokens
    served = run.served(1)
    logits = served.logits(run.images(1), None)
    assert logits.shape[1] == sum(task.num_classes for task in served.stream)
    assert torch.isfinite(logits).all()


def test_state_without_token_is_refused_unless_tokens_are_shared() -> None:
    method = begun(ONE)
    state, _ = method.finish()
    state.tokens.clear()
    for shared in (False, True):
        torch.manual_seed(0)
        served: Any = DyTox(build(SMALL), DyToxSettings(expand_tokens=not shared), 0)
        served.scenario, served.stream = "class", (ONE,)
        if shared:
            served.load_task(state)
        else:
            with pytest.raises((KeyError, RuntimeError, UserError), match="token"):
                served.load_task(state)


# ---- trained parameters --------------------------------------------------------------------------
def test_training_updates_everything_except_old_tokens_and_heads() -> None:
    method = begun(ONE, TWO)
    taught = copy.deepcopy(method.before[0].state_dict())
    moved = stepped(method, ONE, TWO)
    for name, changed in moved.items():
        of_old = name.startswith("heads.layers.0.")
        assert changed == (not of_old and name != "auxiliary.token"), name
    assert all(torch.equal(t, taught[name]) for name, t in method.before[0].state_dict().items())
    assert not method.before[0].training


def test_balanced_step_updates_everything_except_the_encoder() -> None:
    method = begun(ONE, TWO, step="finetune")
    assert not method.backbone.training
    assert method.decoder.training
    for name, changed in stepped(method, ONE, TWO).items():
        assert changed == (not name.startswith("backbone.")), name
    assert method.before is None
    loss, terms = method.loss(batch(ONE, TWO), START)
    assert {*terms} == {"bce"}
    assert not any(p.grad is not None for p in method.backbone.parameters())
    assert loss.requires_grad


def test_untrained_new_task_does_not_change_old_logits() -> None:
    method = begun(ONE, TWO)
    before = method.eval().logits(images(), None)
    method.stream = (ONE, TWO, THREE)
    method.heads.add("three", 2, 0)
    after = method.logits(images(), None)
    assert after.shape == (6, 7)
    assert torch.allclose(after[:, :5], before, atol=1e-6)


def test_answers_of_a_task_depend_only_on_its_token_head() -> None:
    method = begun(ONE, TWO, THREE).eval()
    before = method.logits(images(), None)
    with torch.no_grad():
        for p in method.heads["two"].parameters():
            p.add_(torch.linspace(0, 1, p.numel()).view(p.shape))
    after = method.logits(images(), None)
    assert torch.equal(after[:, :2], before[:, :2])
    assert torch.equal(after[:, 5:], before[:, 5:])
    assert not torch.allclose(after[:, 2:5], before[:, 2:5])
    assert torch.equal(method.logits(images(), "two"), after[:, 2:5])


def test_batched_heads_equal_separate_heads_of_different_sizes() -> None:
    network = begun(ONE, TWO, THREE).eval().network()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        e = network.embeddings(images())
        assert torch.allclose(
            network.logits(e),
            torch.cat([head(e[:, index]) for index, head in enumerate(network.each())], 1),
            atol=1e-5,
        )


def test_permuting_patches_with_their_positions_keeps_vit_embeddings() -> None:
    """Attention itself has no positions, and task tokens attend to all patches (T11)."""
    method = begun(
        ONE,
        TWO,
        settings=BackboneSettings(
            img_size=16, options={"patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
        ),
    ).eval()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = method.network().embeddings(images())
        handle = method.backbone.patch_embed.register_forward_hook(
            lambda module, inputs, patches: patches[:, order]
        )
        assert not torch.allclose(method.network().embeddings(images()), before, atol=1e-4)
        method.backbone.pos_embed[:, 1:] = method.backbone.pos_embed[:, 1:][:, order]
        assert torch.allclose(method.network().embeddings(images()), before, atol=1e-5)
    handle.remove()


# ---- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("image", "tasks", "classes", "total"),
    [
        (32, 10, 10, 10_733_584),
        (32, 20, 5, 10_745_104),
        (32, 50, 2, 10_779_664),
        (32, 1, 100, 10_723_216),
        (224, 10, 10, 11_060_752),
        (224, 10, 100, 11_407_252),
    ],
)
def test_network_has_the_published_parameter_count(
    image: int, tasks: int, classes: int, total: int
) -> None:
    with torch.device("meta"):
        encoder: Any = build(
            BackboneSettings(
                name="convit_local",
                img_size=image,
                weights="none",
                options={"patch_size": 4 if image == 32 else 16},
            )
        )
        network = TokenNetwork(
            encoder, TaskAttention(384, 12), [TokenHead(384, classes) for _ in range(tasks)]
        )
    assert sum(p.numel() for p in network.parameters()) == total


def test_task_state_contains_only_token_and_head() -> None:
    method = begun(ONE, TWO, step="finetune")
    state = TaskState.from_bytes(method.finish()[0].to_bytes())
    assert state.sizes() == {
        "masks": 0,
        "tokens": 4 * 32,
        "head": 4 * (2 * 32 + 3 * 33),
        "copies": 0,
    }
    other = DyTox(build(SMALL), DyToxSettings(), 0)
    other.backbone_digest = method.backbone_digest
    other.load_task(state)
    assert all(
        torch.equal(t, method.heads.export("two")[name])
        for name, t in other.heads.export("two").items()
    )


# ---- other encoders, refusals --------------------------------------------------------------------
def test_decoder_replaces_last_block_of_vision_transformer() -> None:
    method = begun(
        ONE,
        TWO,
        settings=BackboneSettings(
            img_size=16, options={"patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
        ),
    )
    assert len(method.backbone.blocks) == 2
    assert isinstance(method.backbone.norm, nn.Identity)
    assert method.backbone.num_prefix_tokens == 1
    patches = method.backbone.forward_features(images())[:, 1:]
    want = method.decoder(
        torch.stack([method.heads[name].token for name in ("one", "two")]), patches
    )
    method.eval()
    assert torch.allclose(
        method.network().embeddings(images()),
        method.decoder(torch.stack([method.heads[n].token for n in ("one", "two")]), patches),
    )
    assert want.shape == (6, 2, 32)
    assert all(
        changed or name in ("auxiliary.token",) or name.startswith("heads.layers.0.")
        for name, changed in stepped(method.train(), ONE, TWO).items()
    )


def test_base_task_shallow_backbone_and_small_memory_are_refused() -> None:
    base = Task("base", "card", "", ("x", "y"), "base")
    with pytest.raises(
        UserError,
        match="task 'base' has role `base`, and 'dytox' trains its encoder on the stream itself",
    ):
        DyTox.check_backbone(DyToxSettings(), build(SMALL), (base, ONE))
    with pytest.raises(
        UserError,
        match="puts its decoder in the place of the backbone's last block, and there is no other",
    ):
        DyTox.check_backbone(
            DyToxSettings(),
            build(
                BackboneSettings(
                    img_size=16,
                    options={"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2},
                )
            ),
            (ONE,),
        )
    with pytest.raises(UserError, match="memory is 4, and the stream has 5 classes"):
        DyTox.check_backbone(DyToxSettings(memory=4), build(SMALL), (ONE, TWO))
    DyTox.check_backbone(DyToxSettings(), build(SMALL), (ONE, TWO))


def test_initial_token_depends_on_task_name_not_position() -> None:
    a, b = TokenHeads(32), TokenHeads(32)
    for name in ("x", "y"):
        a.add(name, 2, 0)
    b.add("y", 2, 0)
    assert torch.equal(a["y"].token, b["y"].token)  # type: ignore[arg-type]
    assert not torch.equal(a["x"].token, a["y"].token)  # type: ignore[arg-type]
    assert 0 < a["x"].token.std() < 0.03  # type: ignore[operator]
    assert a["x"].weight.abs().max() <= 32**-0.5


# ---- sharpness -----------------------------------------------------------------------------------
def test_ascend_moves_weights_uphill_and_restores_them() -> None:
    torch.manual_seed(1)
    weights = [
        torch.randn(3, 2, requires_grad=True),
        torch.randn(4, requires_grad=True),
        torch.randn(2, requires_grad=True),
    ]
    (weights[0].square().sum() + weights[1].exp().sum()).backward()
    before, gradients = (
        [w.detach().clone() for w in weights],
        [None if w.grad is None else w.grad.clone() for w in weights],
    )
    norm = (
        sum(
            float((w.abs() * g).square().sum())
            for w, g in zip(before, gradients, strict=True)
            if g is not None
        )
        ** 0.5
    )
    with optim.ascend(weights, 3.0):
        for w, old, g in zip(weights, before, gradients, strict=True):
            assert torch.allclose(w, old if g is None else old + 3.0 * old**2 * g / norm, atol=1e-6)
    assert all(torch.equal(w, old) for w, old in zip(weights, before, strict=True))


def test_sam_radius_is_positive_only_when_training_later_tasks() -> None:
    assert begun(ONE, rho=3.0).sam_radius() == 0
    assert begun(ONE, TWO, step="finetune", rho=3.0).sam_radius() == 0
    method = begun(ONE, TWO, rho=3.0)
    assert method.sam_radius() == 3.0


def test_only_training_of_later_tasks_takes_sharpness_aware_steps(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    ascend = optim.ascend

    def counted_ascend(parameters: Any, rho: float) -> Any:
        calls.append(rho)
        return ascend(parameters, rho)

    monkeypatch.setattr(optim, "ascend", counted_ascend)
    run = lab.run_of("dytox", {**OPTIMIZERS["adamw"], "epochs": 1}, methods={"dytox": {"rho": 3.0}})
    run.carried(1)
    assert [job.step for job in run.stages(1)] == ["train", "herd", "finetune"]
    images = 5 * 36  # of both tasks, without validation images
    assert calls == [3.0] * -(-images // 16), (
        "only the steps of the second task's training must ascend"
    )


# ---- the chain -----------------------------------------------------------------------------------
def test_memory_is_shared_equally_and_older_lists_are_shortened(lab: Lab) -> None:
    run = lab.run_of(
        "dytox", {**OPTIMIZERS["adamw"], "epochs": 1}, methods={"dytox": {"memory": 12}}
    )
    first, second = (run.carried(task).meta["memory"] for task in (0, 1))
    assert {name: [len(keys) for keys in classes.values()] for name, classes in first.items()} == {
        "two": [6, 6]
    }
    assert {name: [len(keys) for keys in classes.values()] for name, classes in second.items()} == {
        "two": [2, 2],
        "three": [2, 2, 2],
    }
    assert all(second["two"][name] == first["two"][name][:2] for name in TASKS["two"])
    assert [job.step for job in run.stages(0)] == ["train", "herd"]


def test_each_step_keeps_its_frozen_tensors_bit_identical(lab: Lab) -> None:
    """`train` freezes old tokens and heads, `herd` everything, and the balanced step the encoder.

    The balanced step trains on the same number of images of each class.
    """
    run = lab.run_of(
        "dytox", {**OPTIMIZERS["adamw"], "epochs": 1}, methods={"dytox": {"memory": 20}}
    )
    run.trained(1)
    first = run.state(0)
    train, herd, finetune = {
        job.step: Carried.from_bytes(run.artifact(job).read("carried.safetensors")).tensors
        for job in run.stages(1)
    }.values()

    def part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if name.startswith(start)}

    def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(
            torch.equal(t, other[name]) for name, t in one.items()
        )

    old = {f"heads/two/{name}": t for name, t in (first.head | first.tokens).items()}
    assert equal(part(train, "heads/two/"), old)
    assert equal(herd, train)
    assert part(finetune, "backbone/")
    assert equal(part(finetune, "backbone/"), part(train, "backbone/"))
    assert not any(
        equal(part(finetune, start), part(train, start)) for start in ("heads/two/", "decoder/")
    )
    assert not any(torch.equal(t, train[name]) for name, t in part(finetune, "heads/two/").items())
    rows = run.live(1).context.data.feed("train", True).samples.table  # of the balanced step
    assert sorted(rows["class"].to_pylist()) == sorted("01234" * 4)
    memory = run.carried(1).meta["memory"]
    assert {*rows["key"].to_pylist()} == {
        key for classes in memory.values() for keys in classes.values() for key in keys
    }
