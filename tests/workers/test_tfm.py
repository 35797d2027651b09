"""Tests of TFM: growth of layers, bit-identical answers of old tasks, states of units, and the
weights in effect."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import ONE, THREE, TRAININGS, TWO, Left, batch, images, in_turn, rates, serving
from pydantic import ValidationError
from step_contexts import step_context
from timm.layers import SwiGLU
from torch import Tensor, nn

from workers import optim
from workers.errors import UserError
from workers.job import BackboneSettings, Task, TrainSettings
from workers.methods.base import Progress
from workers.methods.tfm import Tfm, TfmSettings
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState

WIDTH, HEADS, HIDDEN, DEPTH = 32, 2, 64, 2
TASKS = [ONE, TWO, THREE]
OPTIMIZERS = TRAININGS | {
    "sgd": TrainSettings(optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=0.05)
}
GROWN: dict[str, Any] = {
    "growth": 0.2,
    "heads_every": 2,
}  # 16 new units of 64 per task; a head for the first and the third task


def vit(**options: Any) -> Any:
    return method_steps.vit(
        **{
            "patch_size": 4,
            "embed_dim": WIDTH,
            "depth": DEPTH,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            **options,
        }
    )


def begun(
    method: Tfm, task: Task, carried: Carried | None, train: TrainSettings = TRAININGS["adamw"]
) -> list[dict[str, Any]]:
    torch.manual_seed(len(task.name))
    return method.begin(step_context(task, "train", carried, rates(10.0, train), (task,)))


def trained(
    method: Tfm, task: Task, carried: Carried | None, train: TrainSettings = TRAININGS["adamw"]
) -> Left:
    method_steps.train(
        method,
        optim.build_optimizer(begun(method, task, carried, train), train),
        lambda progress: batch(classes=task.num_classes),
        steps=4,
    )
    return method.finish()


def stream(
    cls: type[Tfm] = Tfm,
    train: TrainSettings = TRAININGS["adamw"],
    tasks: list[Task] = TASKS,
    backbone: nn.Module | None = None,
    **settings: Any,
) -> list[Left]:
    """Train a stream, each task with a new method on a copy of the backbone, as the loop does.

    Return the state and the carried state of each task.
    """
    backbone = backbone or vit()

    def learn(task: Task, carried: Carried | None) -> Left:
        method = cls(copy.deepcopy(backbone), TfmSettings(**settings), 0)
        return trained(method, task, carried, train)

    results: list[Left] = in_turn(tasks, learn)
    return results


def served(
    results: list[Left], cls: type[Tfm] = Tfm, backbone: nn.Module | None = None, **settings: Any
) -> Tfm:
    fresh = cls(copy.deepcopy(backbone or vit()), TfmSettings(**settings), 0)
    _, carried = results[-1]
    method: Tfm = serving(fresh, [state for state, _ in results], carried)
    return method


@torch.no_grad()
def answers(method: Tfm, task: str) -> Tensor:
    return method.logits(images(), task).clone()


# ---- nothing is forgotten ------------------------------------------------------------------------
def old_answers_stay(cls: type[Tfm], train: TrainSettings, **settings: Any) -> None:
    results = stream(cls, train, **settings)
    last = served(results, cls)
    for position, task in enumerate(TASKS):
        assert torch.equal(
            answers(last, task.name), answers(served(results[: position + 1], cls), task.name)
        ), task.name


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "settings", [GROWN, {"growth": 0.2}, {"growth": 0}, {**GROWN, "first": "trained"}], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_old_answers_stay_bit_identical_when_the_network_grows(
    optimizer: str, settings: dict[str, Any]
) -> None:
    old_answers_stay(Tfm, OPTIMIZERS[optimizer], **settings)


class OneNormalisation(Tfm):
    """A broken TFM: the normalisation of a new task overwrites that of old tasks."""

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        for task, other in self.loaded.items():
            self.loaded[task] = replace(
                other, copies={n: state.copies[n][: len(t)] for n, t in other.copies.items()}
            )


class TrainsOldRows(Tfm):
    """A broken TFM: units of earlier tasks continue to learn."""

    def finish(self) -> tuple[TaskState, Carried]:
        self.shared = {
            name: t * (1 - 1e-4) for name, t in self.shared.items()
        }  # as a step of weight decay would do
        return super().finish()


class KeepsLaterUnits(Tfm):
    """A broken TFM: an old task also uses the units of later tasks."""

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        newest = [*self.loaded.values()][-1]
        return self.in_effect(newest.masks, self.loaded[task].copies)


@pytest.mark.parametrize("broken", [OneNormalisation, TrainsOldRows, KeepsLaterUnits])
def test_tfm_interference_is_detected(broken: type[Tfm]) -> None:
    with pytest.raises(AssertionError):
        old_answers_stay(broken, TRAININGS["adamw"], **GROWN)


def test_only_new_units_normalisation_and_the_head_get_gradients() -> None:
    """Rows of units of earlier tasks are not parameters."""
    carried = stream(tasks=TASKS[:1], **GROWN)[0][1]
    before, method = carried.to_bytes(), Tfm(vit(), TfmSettings(**{**GROWN, "heads_every": 1}), 0)
    groups = begun(method, TASKS[1], carried)
    with torch.no_grad():
        for name, p in method.new.items():
            if name.endswith(
                ".columns"
            ):  # columns start at 0, which makes the gradients of rows and biases 0
                p.normal_()
    method.train().loss(batch(classes=TASKS[1].num_classes), Progress(0, 0, 1, 1))[0].backward()
    shapes = (
        {"rows": (3, 16, WIDTH), "bias": (3, 16), "columns": (WIDTH, 16)},
        {"rows": (1, 16, WIDTH), "bias": (1, 16), "columns": (WIDTH, 16)},
    )
    for i in range(DEPTH):
        for part, expected in zip(("attn", "mlp"), shapes, strict=True):
            assert {
                kind: tuple(method.new[f"blocks.{i}.{part}.{kind}"].shape) for kind in expected
            } == expected
        assert {tuple(method.new[f"blocks.{i}.{site}.gamma"].shape) for site in ("qk", "v")} == {
            (WIDTH + WIDTH // HEADS,)
        }
        assert tuple(method.new[f"blocks.{i}.ff.beta"].shape) == (HIDDEN + 16,)
    of_keys = {
        f"blocks.{i}.attn.bias" for i in range(DEPTH)
    }  # adding a constant to all keys changes nothing
    for name, p in method.new.items():
        assert p.grad is not None
        assert (
            bool((p.grad[[0, 2]] if name in of_keys else p.grad).abs().amin() > 0)
            or "gamma" in name
        ), name
    assert all(p.grad is None for p in method.backbone.parameters())
    assert not any(t.requires_grad for t in method.shared.values())
    assert {id(p) for g in groups for p in g["params"]} == {
        id(p) for p in (*method.new.values(), *method.heads["two"].parameters())
    }
    assert carried.to_bytes() == before


def test_weight_decay_excludes_biases_and_normalisation() -> None:
    method = Tfm(vit(), TfmSettings(**GROWN), 0)
    groups = begun(method, TASKS[0], None)
    name_of = {
        id(p): n
        for n, p in [
            *method.new.items(),
            *((f"head.{n}", p) for n, p in method.heads["one"].named_parameters()),
        ]
    }
    decayed = {
        name_of[id(p)].rsplit(".", 1)[1] for g in groups if g["weight_decay"] for p in g["params"]
    }
    assert decayed == {"rows", "columns", "weight"}
    assert {
        name_of[id(p)].rsplit(".", 1)[1] for g in groups if g.get("lr") == 1e-2 for p in g["params"]
    } == {"gamma", "beta"}


# ---- states and widths ---------------------------------------------------------------------------
def states_of(results: list[Left], site: str) -> Tensor:
    """Return the states of a site's units, (units, tasks): 0 unused, 1 forward-only, 2 normal."""
    masks = [state.masks for state, _ in results]
    columns = [m[f"{site}.used"].int() + m[f"{site}.own"].int() for m in masks]
    width = max(map(len, columns))
    return torch.stack([nn.functional.pad(c, (0, width - len(c))) for c in columns], 1)


def test_a_unit_is_unused_then_normal_then_forward_only() -> None:
    results = stream(**GROWN)
    old, one, two, three = [1, 1, 1], [2, 1, 1], [0, 2, 1], [0, 0, 2]
    assert (
        states_of(results, "blocks.1.ff").tolist()
        == [old] * HIDDEN + [one] * 16 + [two] * 16 + [three] * 16
    )
    for site in ("blocks.0.qk", "blocks.1.v"):
        assert states_of(results, site).tolist() == [old] * WIDTH + [one] * 16 + [three] * 16


def test_tfm_first_task_uses_normal_units() -> None:
    backbone = vit()
    results = stream(backbone=backbone, **{**GROWN, "heads_every": 1}, first="trained")
    assert (
        states_of(results, "blocks.0.ff").tolist()
        == [[2, 1, 1]] * HIDDEN + [[0, 2, 1]] * 16 + [[0, 0, 2]] * 16
    )
    assert (
        states_of(results, "blocks.0.v").tolist()
        == [[2, 1, 1]] * WIDTH + [[0, 2, 1]] * 16 + [[0, 0, 2]] * 16
    )
    assert not results[0][0].copies
    first = {n.removeprefix("weights/"): t for n, t in results[0][1].tensors.items()}
    original: dict[str, Tensor] = dict(backbone.named_parameters())
    assert first.keys() == original.keys()
    assert not any(torch.equal(t, original[name]) for name, t in first.items())
    assert all(torch.equal(results[2][1].tensors[f"weights/{n}"], t) for n, t in first.items())


def test_stochastic_depth_is_active_only_for_full_backbone_training() -> None:
    for first, expected in (("trained", [True, False]), ("adapted", [False, False])):
        method, carried = Tfm(vit(), TfmSettings(first=first), 0), None
        for task, on in zip(TASKS, expected, strict=False):
            carried = trained(method, task, carried)[1]
            assert method.train().backbone.training == on


@pytest.mark.parametrize(
    ("growth", "units"), [(0.0, 0), (0.01, 8), (0.125, 8), (0.126, 16), (1.0, 64)]
)
def test_hidden_units_come_in_multiples_of_eight(growth: float, units: int) -> None:
    carried = stream(tasks=TASKS[:1], growth=growth)[0][1]
    widths = {name: t.shape[1] for name, t in carried.tensors.items()}
    assert widths == (
        {
            f"blocks.{i}.mlp.{kind}": units
            for i in range(DEPTH)
            for kind in ("rows", "bias", "columns")
        }
        if units
        else {}
    )


@pytest.mark.parametrize(
    ("every", "heads"), [(0, [0, 0, 0]), (1, [1, 2, 3]), (2, [1, 1, 2]), (3, [1, 1, 1])]
)
def test_attention_heads_are_added_every_n_tasks(every: int, heads: list[int]) -> None:
    heads_added = [
        len(state.masks["blocks.0.v.used"]) for state, _ in stream(growth=0, heads_every=every)
    ]
    assert heads_added == [WIDTH + n * WIDTH // HEADS for n in heads]


@pytest.mark.parametrize(("settings", "heads"), [({}, 0), ({"heads_every": 1}, 1)])
def test_stored_bytes_match_the_formula_for_deit_ti(settings: dict[str, Any], heads: int) -> None:
    """Checks the formula for DeiT-Ti to the byte. The backbone has 13,824 units. Each task adds 80
    hidden units to each block, and each new head adds 64 channels at two sites."""
    carried, units = None, 13_824
    for task in TASKS[:2]:
        method = Tfm(build(BackboneSettings()), TfmSettings(**settings), 0)
        begun(method, task, carried)
        state, carried = method.finish()
        grown = units + 12 * (80 + heads * 2 * 64)
        assert state.sizes() == {
            "masks": grown * 2 // 8,
            "copies": units * 64 // 8,
            "tokens": 0,
            "head": 4 * task.num_classes * 193,
        }
        restored = TaskState.from_bytes(state.to_bytes())
        assert all(torch.equal(mask, state.masks[name]) for name, mask in restored.masks.items())
        assert restored.masks.keys() == state.masks.keys()
        units = grown


def test_operations_grow_with_the_widths() -> None:
    state = stream(tasks=TASKS[:1], **GROWN)[0][0]
    tokens, patches = 17, 16
    plain = patches * 3 * 4 * 4 * WIDTH + DEPTH * (
        tokens * WIDTH * (4 * WIDTH + 2 * HIDDEN) + 2 * tokens * tokens * WIDTH
    )
    more = DEPTH * (tokens * WIDTH * (4 * 16 + 2 * 16) + 2 * tokens * tokens * 16)
    assert Tfm(vit(), TfmSettings(), 0).flops_share(state) == pytest.approx((plain + more) / plain)


def test_pictures_show_the_units_that_a_task_uses() -> None:
    state, carried = stream(tasks=TASKS[:1], **GROWN)[0]
    display_masks = Tfm.display_masks(state, carried)
    assert {
        name: int(mask.sum()) for name, mask in display_masks.items() if name.startswith("blocks.1")
    } == {"blocks.1.qk": WIDTH + 16, "blocks.1.v": WIDTH + 16, "blocks.1.ff": HIDDEN + 16}


@pytest.mark.parametrize("first", ["adapted", "trained"])
def test_carried_state_is_a_copy_of_the_received_state(first: str) -> None:
    received = stream(tasks=TASKS[:1], **GROWN, first=first)[0][1]
    handed = trained(Tfm(vit(), TfmSettings(growth=0, first=first), 0), TASKS[1], received)[1]
    assert handed.to_bytes() == Carried(received.tensors, {"tasks": 2}).to_bytes()
    assert not {t.data_ptr() for t in handed.tensors.values()} & {
        t.data_ptr() for t in received.tensors.values()
    }


# ---- the weights in effect -----------------------------------------------------------------------
def by_hand(backbone: nn.Module, state: TaskState, carried: Carried) -> nn.Module:
    """Return a plain, wider timm ViT with a task's units; hooks renormalise its activations."""
    t, wide = carried.tensors, copy.deepcopy(backbone)
    for i, block in enumerate(wide.blocks):  # type: ignore[arg-type]
        attention, mlp = block.attn, block.mlp
        attention.num_heads, attention.attn_dim = attention.num_heads + 1, WIDTH + 16
        rows = attention.qkv.weight.split(WIDTH)  # q, k, v
        attention.qkv.weight = nn.Parameter(
            torch.cat([part for p in range(3) for part in (rows[p], t[f"blocks.{i}.attn.rows"][p])])
        )
        bias = torch.zeros(3 * WIDTH) if attention.qkv.bias is None else attention.qkv.bias
        attention.qkv.bias = nn.Parameter(
            torch.cat(
                [
                    part
                    for p in range(3)
                    for part in (bias.split(WIDTH)[p], t[f"blocks.{i}.attn.bias"][p])
                ]
            )
        )
        attention.proj.weight = nn.Parameter(
            torch.cat([attention.proj.weight, t[f"blocks.{i}.attn.columns"]], 1)
        )
        mlp.fc1.weight = nn.Parameter(torch.cat([mlp.fc1.weight, t[f"blocks.{i}.mlp.rows"][0]]))
        mlp.fc1.bias = nn.Parameter(torch.cat([mlp.fc1.bias, t[f"blocks.{i}.mlp.bias"][0]]))
        mlp.fc2.weight = nn.Parameter(torch.cat([mlp.fc2.weight, t[f"blocks.{i}.mlp.columns"]], 1))

        def renormalised(slices: dict[str, slice]) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                output = output.clone()
                for site, old in slices.items():
                    output[..., old] = (
                        output[..., old] * state.copies[f"{site}.gamma"]
                        + state.copies[f"{site}.beta"]
                    )
                return output

            return hook

        values = 2 * (WIDTH + 16)
        attention.qkv.register_forward_hook(
            renormalised(
                {f"blocks.{i}.qk": slice(0, WIDTH), f"blocks.{i}.v": slice(values, values + WIDTH)}
            )
        )
        mlp.fc1.register_forward_hook(renormalised({f"blocks.{i}.ff": slice(0, HIDDEN)}))
    return wide.eval()


KINDS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True},
    {"qkv_bias": False},
    {"reg_tokens": 2, "init_values": 0.5},
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_weights_in_effect_equal_a_wider_renormalised_network(
    options: dict[str, Any], fused: bool
) -> None:
    backbone = vit(**options)
    for block in backbone.blocks:
        block.attn.fused_attn = fused
    results = stream(backbone=backbone, tasks=TASKS[:1], train=TrainSettings(lr=0.05), **GROWN)
    state, carried = results[0]
    assert (
        min(
            (state.copies["blocks.0.qk.gamma"] - 1).abs().max(),
            state.copies["blocks.1.v.beta"].abs().max(),
        )
        > 0.01
    )
    with torch.no_grad():
        expected = nn.functional.linear(
            by_hand(backbone, state, carried)(images()), state.head["weight"], state.head["bias"]
        )
    assert torch.allclose(answers(served(results, backbone=backbone), "one"), expected, atol=1e-4)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_new_task_starts_with_the_features_of_the_previous_network(options: dict[str, Any]) -> None:
    """The new network is wider, but new columns are 0 and nothing is renormalised, so its features
    are those of the network before."""
    backbone = vit(**options)
    state, carried = stream(backbone=backbone, tasks=TASKS[:1], **GROWN)[0]
    plain = replace(
        state,
        copies={
            name: torch.full_like(t, name.endswith("gamma")) for name, t in state.copies.items()
        },
    )
    for before, expected in ((None, backbone), (carried, by_hand(backbone, plain, carried))):
        method = Tfm(copy.deepcopy(backbone), TfmSettings(growth=1.0, heads_every=1), 0)
        begun(method, TASKS[1], before)
        with torch.no_grad():
            method.activate_task("two")
            assert torch.allclose(method.features(images()), expected(images()), atol=1e-5)
    assert method.weight_overrides["blocks.0.attn.proj.weight"].shape == (WIDTH, WIDTH + 2 * 16)
    assert method.weight_overrides["blocks.0.mlp.fc1.weight"].shape == (HIDDEN + 16 + HIDDEN, WIDTH)


@pytest.mark.parametrize(
    ("site", "at", "cut"),
    [
        ("blocks.0.qk", 5, "attn.qkv"),
        ("blocks.1.v", 3, "attn.proj"),
        ("blocks.1.ff", 7, "mlp.fc2"),
        ("blocks.0.ff", HIDDEN + 2, "mlp.fc2"),
        ("blocks.0.v", WIDTH + 2, "attn.proj"),
    ],
)
def test_unused_unit_does_not_affect_the_logits(site: str, at: int, cut: str) -> None:
    """Covers old and new units. If a channel of q is 0, its product with k does not contribute to
    the attention."""
    state, carried = stream(tasks=TASKS[:1], **GROWN)[0]
    wide = by_hand(vit(), state, carried)
    before = answers(served([(state, carried)]), "one")
    state.masks[f"{site}.used"][at] = False
    layer: Any = wide.get_submodule(f"{site.rsplit('.', 1)[0]}.{cut}")
    with torch.no_grad():
        if site.endswith("qk"):
            state.copies[f"{site}.gamma"][at] = state.copies[f"{site}.beta"][at] = 0
        else:
            layer.weight[:, at] = 0
        expected = nn.functional.linear(wide(images()), state.head["weight"], state.head["bias"])
    logits = answers(served([(state, carried)]), "one")
    assert torch.allclose(logits, expected, atol=1e-4)
    assert not torch.allclose(logits, before, atol=1e-4)


def test_attention_keys_are_never_renormalised() -> None:
    state, carried = stream(tasks=TASKS[:1], **GROWN)[0]
    method = served([(state, carried)])
    method.activate_task("one")
    inside, plain = (
        method.weight_overrides["blocks.0.attn.qkv.weight"].split(WIDTH + 16),
        dict(vit().named_parameters())["blocks.0.attn.qkv.weight"].split(WIDTH),
    )
    assert [torch.equal(a[:WIDTH], b) for a, b in zip(inside, plain, strict=True)] == [
        False,
        True,
        False,
    ]


def test_timm_attention_is_restored_even_after_an_error() -> None:
    method = served(stream(**GROWN))
    attention: Any = method.backbone.get_submodule("blocks.0.attn")
    answers(method, "three")
    assert (attention.num_heads, attention.attn_dim) == (HEADS, WIDTH)
    with pytest.raises(AssertionError):
        method.logits(torch.zeros(1, 3, 8, 8), "three")
    assert (attention.num_heads, attention.attn_dim) == (HEADS, WIDTH)
    assert method.weight_overrides["blocks.0.attn.proj.weight"].shape == (WIDTH, WIDTH + 32)


@pytest.mark.parametrize("first", ["adapted", "trained"])
def test_base_task_is_served_by_the_unchanged_backbone(first: str) -> None:
    backbone = vit()
    head = {"weight": torch.randn(4, WIDTH), "bias": torch.randn(4)}
    results = stream(backbone=backbone, **GROWN, first=first)
    method = served(
        [
            (
                TaskState("zero", tuple("abcd"), "base", compute_digest(backbone), head=head),
                Carried(),
            ),
            *results,
        ],
        backbone=backbone,
    )
    expected = nn.functional.linear(backbone(images()), head["weight"], head["bias"])
    before = answers(method, "three")
    assert torch.equal(answers(method, "zero"), expected)
    assert torch.equal(answers(method, "three"), before)


def test_weights_are_computed_once_per_task_switch() -> None:
    method = served(stream(**GROWN))
    with mock.patch.object(method, "in_effect", wraps=method.in_effect) as in_effect:
        for task in ("one", "one", "two", "two", "one"):
            answers(method, task)
    assert in_effect.call_count == 3


def test_task_under_retraining_is_served_in_its_current_state() -> None:
    results = stream(tasks=TASKS[:1], **GROWN)
    method = served(results, **GROWN)
    begun(method, TASKS[0], None)
    assert torch.allclose(answers(method, "one"), method.heads["one"](vit()(images())), atol=1e-4)


# ---- mistakes ------------------------------------------------------------------------------------
def test_invalid_states_backbones_and_settings_are_refused() -> None:
    results = stream(**GROWN)
    with pytest.raises(
        UserError,
        match=r"blocks\.0\.attn: a task's state has 64 units, the carried weights have 48",
    ):
        answers(served([results[2], results[0]], **GROWN), "three")
    for options in ({"scale_mlp_norm": True}, {"scale_attn_norm": True}, {"mlp_layer": SwiGLU}):
        with pytest.raises(
            UserError, match="block 0 of the backbone has no plain attention and FFN"
        ):
            Tfm(vit(**options), TfmSettings(), 0)
    for wrong in (
        {"growth": -0.1},
        {"growth": 1.5},
        {"heads_every": -1},
        {"first": "all"},
        {"norm_lr": 0},
    ):
        with pytest.raises(ValidationError):
            TfmSettings(**wrong)
