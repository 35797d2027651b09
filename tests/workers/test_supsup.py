"""Tests of SupSup: the reference's worked numbers, masks, shared outputs, and task inference."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import method_steps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from method_steps import PROGRESS
from torch import Tensor
from torch.nn import functional as F
from two_domains import COLOURS, STRIPES, batch, begun, learned, samples, vit

from pipeline.testing.lab import OPTIMIZERS, TASKS, Lab, Run
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, TrainSettings
from workers.methods import supsup
from workers.methods.base import ParamGroup, StepContext
from workers.methods.bases.task_inference import LOGIT_GAP
from workers.methods.supsup import OUTPUTS, SupSup, SupSupSettings
from workers.model.masks import TopK, keep_largest
from workers.model.superposition import (
    compute_superfluous_share,
    entropy,
    infer_at_once,
    infer_by_halves,
    shares,
    slopes,
    superfluous,
    superpose,
    values,
)
from workers.model.vit import build
from workers.storage.checkpoint import trained_state
from workers.storage.taskstate import TaskState

RANDOM = {"weights": "signed_constant", "start": "kaiming", "density": 0.5, "mask_travel": 8}
KEPT: dict[str, Any] = method_steps.OPTIMIZERS | {
    "adamw": lambda groups: torch.optim.AdamW(
        [g | {"weight_decay": 0.05} if g["name"] != "masks" else g for g in groups], lr=1e-2
    )
}


def made(**settings: Any) -> SupSup:
    return SupSup(vit(), SupSupSettings(**{"outputs": 10, **settings}), seed=1)


@pytest.fixture(scope="module")
def states() -> list[TaskState]:
    """Return the states of both domains, learned by separate methods."""
    return [learned(made(), task)[0] for task in (STRIPES, COLOURS)]


def serving(states: list[TaskState], **settings: Any) -> SupSup:
    method = made(**settings)
    method.scenario, method.stream = "class", (STRIPES, COLOURS)
    method_steps.serving(method, states)
    return method


@torch.no_grad()
def answers(method: SupSup, task: str | None, images: Tensor) -> Tensor:
    return method.eval().logits(images, task).clone()


# ---- the reference's worked numbers --------------------------------------------------------------
WORKED = {"w": torch.tensor([[3.0, -3.0], [3.0, -3.0]])}  # inputs x outputs
MASKS = [
    {"w": torch.tensor([[True, True], [False, False]])},
    {"w": torch.tensor([[False, False], [True, True]])},
]
HALF = torch.tensor([0.5, 0.5])
X = torch.eye(2)[:, None]  # two groups of one image; the first is of the first task


def linear(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ weights["w"]


def judged(alive: Any, groups: Tensor) -> Tensor:
    return slopes(linear, WORKED, [MASKS[i] for i in alive], HALF, groups, entropy)


def test_worked_example_gives_the_reference_numbers() -> None:
    mixed = superpose(WORKED, MASKS, HALF)
    assert linear(mixed, X[0]).tolist() == [[1.5, -1.5]]
    assert entropy(linear(mixed, X[0])).item() == pytest.approx(0.190865, abs=1e-6)
    scores = judged(range(2), X)
    assert scores.tolist() == pytest.approx(
        [pytest.approx([-0.8132, 0], abs=1e-4), pytest.approx([0, -0.8132], abs=1e-4)]
    )
    assert infer_at_once(judged, X, 2)[0].tolist() == [0, 1], "the entropy must be minimised"


def test_alpha_slopes_equal_gradients() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(6, 5), "b": torch.randn(5, 4)}
    masks = [{name: torch.rand(w.shape) < 0.6 for name, w in weights.items()} for _ in range(3)]
    groups = torch.randn(7, 2, 6)

    def network(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ w["a"]) @ w["b"]

    for objective in (entropy, partial(superfluous, real=2)):
        alpha = torch.tensor([0.5, 0.2, 0.3], requires_grad=True)
        want = [
            torch.autograd.grad(
                objective(network(superpose(weights, masks, alpha), group)).mean(), alpha
            )[0]
            for group in groups
        ]
        with torch.no_grad():
            alpha_slopes = slopes(network, weights, masks, alpha.detach(), groups, objective)
        assert torch.allclose(alpha_slopes, torch.stack(want), atol=1e-6)


def test_batched_groups_give_the_same_slopes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = torch.randn(9, 1, 2)
    whole = judged(range(2), groups)
    monkeypatch.setattr("workers.model.superposition.MAX_GRADIENT_BYTES", 4 * 4 * 2)
    assert torch.allclose(judged(range(2), groups), whole)


def test_superposition_with_one_weighted_mask_equals_that_mask() -> None:
    method = made()
    begun(method, STRIPES)
    masks = [
        {f"{site}.weight": mask for site, mask in method.hard().items()},
        {f"{site}.weight": ~mask for site, mask in method.hard().items()},
    ]
    weights = {f"{site}.weight": weight.detach() for site, weight in method.sites.items()}
    images = samples(STRIPES, 4)[0]
    with torch.no_grad():
        alone = method.network(superpose(weights, masks, torch.tensor([1.0, 0.0])), images)[:, :2]
    assert torch.equal(alone, answers(method, "stripes", images))


def test_one_shot_and_brute_force_inference_agree_on_worked_example() -> None:
    tried = values(linear, WORKED, MASKS, X, [entropy] * 2)
    assert tried.shape == (2, 2)
    assert tried[0, 0].item() == pytest.approx(entropy(torch.tensor([[3.0, -3.0]])).item())
    assert tried[0, 1].item() == pytest.approx(math.log(2))
    assert tried.argmin(1).tolist() == infer_at_once(judged, X, 2)[0].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("ties", [False, True])
def test_binary_search_ends_after_log2_rounds_with_one_mask(count: int, ties: bool) -> None:
    scores = (
        torch.zeros(6, count)
        if ties
        else torch.rand(6, count, generator=torch.Generator().manual_seed(count))
    )
    rounds: list[list[int]] = [[] for _ in range(6)]

    def judge(alive: Any, rows: Tensor) -> Tensor:
        for row in rows[:, 0].long().tolist():
            rounds[row].append(len(alive))
        return scores[rows[:, 0].long()][:, list(alive)]

    picked_tasks, sure = infer_by_halves(judge, torch.arange(6.0)[:, None], count)
    assert picked_tasks.tolist() == scores.argmin(1).tolist()
    assert all(len(asked) == math.ceil(math.log2(count)) for asked in rounds)
    assert all(asked == [math.ceil(count / 2**i) for i in range(len(asked))] for asked in rounds), (
        "each round keeps the better half, rounded up"
    )
    assert ((sure > 0) & (sure <= 1)).all()
    if ties:
        assert sure.tolist() == pytest.approx([1 / count] * 6, rel=1e-5)


def test_confidence_is_the_share_of_the_picked_mask() -> None:
    nu = shares(torch.tensor([[-0.8132, 0.0]]))[0]
    assert nu.tolist() == pytest.approx(
        [math.exp(0.8132) / (1 + math.exp(0.8132)), 1 / (1 + math.exp(0.8132))]
    )
    for rule in (infer_at_once, infer_by_halves):  # two masks take one round
        assert rule(judged, X, 2)[1].tolist() == pytest.approx([nu[0].item()] * 2, abs=1e-4)


def test_superfluous_objective_has_no_gradient_for_real_outputs() -> None:
    outputs = torch.randn(3, 5, requires_grad=True)
    superfluous(outputs, 2).sum().backward()
    gradient = outputs.grad
    assert gradient is not None
    assert (gradient[:, :2] == 0).all()
    assert torch.allclose(gradient[:, 2:], outputs.softmax(1)[:, 2:])


# ---- masks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.05, 0.1, 0.3, 0.5, 0.77, 0.9, 1.0])
def test_topk_keeps_the_exact_number_of_entries_with_ties(density: float) -> None:
    drawn = torch.randn(13, 7, generator=torch.Generator().manual_seed(0))
    for scores in (drawn, drawn.round(), torch.ones(13, 7)):
        mask = TopK(scores, density).hard()
        assert int(mask.sum()) == 91 - int((1 - density) * 91)
        assert scores.abs()[mask].min() >= scores.abs()[~mask].max() if not mask.all() else True
        dropped = 91 - int(mask.sum())
        assert not dropped or torch.equal(
            keep_largest(scores.abs().flatten(), dropped), mask.flatten()
        ), "`keep_largest` must find the same mask"


def test_layer_densities_follow_the_budget_formula() -> None:
    method = SupSup(
        build(BackboneSettings(options={"depth": 1})), SupSupSettings(budget=16, outputs=100), 0
    )
    expected_budgets = {
        "patch_embed.proj": 16 * (192 + 3) / (192 * 3 * 256),
        "blocks.0.attn.qkv": 16 * (576 + 192) / (576 * 192),
        "blocks.0.attn.proj": 16 * 384 / 192**2,
        "blocks.0.mlp.fc1": 16 * 960 / (768 * 192),
        "blocks.0.mlp.fc2": 16 * 960 / (768 * 192),
        "outputs": 16 * 292 / 19200,
    }
    assert {site: method.density(site) for site in method.sites} == pytest.approx(expected_budgets)
    generous = SupSup(vit(), SupSupSettings(budget=1000), 0)
    assert {generous.density(site) for site in generous.sites} == {0.5}


def test_initial_scores_follow_weight_magnitudes_or_are_uniform() -> None:
    for scores in ("topk", "threshold"):
        method = made(scores=scores, density=0.9)
        begun(method, STRIPES)
        masks = method.hard()
        for site, weight in method.sites.items():
            if site != OUTPUTS:
                largest = TopK(weight.detach(), 0.9).hard()
                assert torch.equal(masks[site], largest), "the smallest tenth must be dropped"
    method = made(scores="threshold", start="kaiming")
    begun(method, STRIPES)
    for site, mask in method.hard().items():
        bound = 1 / math.sqrt(method.sites[site][0].numel())
        values = method.masks[site].get_parameter("scores")
        assert 0.9 * bound < values.abs().max() <= bound
        assert torch.equal(mask, values >= 0)


def test_score_gradient_is_weight_gradient_times_weight_and_sign() -> None:
    method = made(start="kaiming")
    begun(method, STRIPES)
    loss, _ = method.loss(batch(STRIPES, 0), PROGRESS)
    effective = {site: method.weight_overrides[f"{site}.weight"] for site in method.sites}
    for weight in effective.values():
        weight.retain_grad()
    loss.backward()
    for site, mask in method.masks.items():
        scores = mask.get_parameter("scores")
        weight_gradient = effective[site].grad
        assert weight_gradient is not None
        assert scores.grad is not None
        expected = weight_gradient * method.sites[site] * scores.sign()
        assert torch.equal(scores.grad, expected), site
        assert (scores.grad != 0).any()


def test_random_weights_depend_only_on_seed_and_are_not_stored() -> None:
    a, b = made(**RANDOM), made(**RANDOM)
    other = SupSup(vit(), SupSupSettings(outputs=10, **RANDOM), seed=2)
    assert list(a.sites) == [*(site for site in made(outputs=0).sites), OUTPUTS]
    for site, weight in a.sites.items():
        assert torch.equal(weight, b.sites[site])
        assert not torch.equal(weight, other.sites[site])
        assert weight.abs().unique().tolist() == pytest.approx([math.sqrt(2 / weight[0].numel())])
        assert abs(weight.sign().mean()) < 0.2
    assert not torch.equal(a.sites["blocks.0.mlp.fc1"], a.sites["blocks.1.mlp.fc1"])
    begun(a, STRIPES)
    assert set(trained_state(a)) == {f"mask_modules.{i}.scores" for i in range(len(a.sites))}
    assert torch.equal(made().sites[OUTPUTS], a.sites[OUTPUTS]), (
        "the shared outputs are random also with a pretrained backbone"
    )


def test_random_weights_remove_all_influence_of_pretrained_layers() -> None:
    """The pretrained layers affect neither serving nor training nor task inference."""
    method, images = made(objective="entropy", **RANDOM), samples(STRIPES, 4)[0]
    begun(method, STRIPES)
    before = answers(method, "stripes", images)
    with torch.no_grad():
        for name, p in method.backbone.named_parameters():
            if name not in ("cls_token", "pos_embed"):
                p.normal_()
        assert torch.equal(answers(method, "stripes", images), before)
        method.weight_overrides = method.training_weights(batch(STRIPES, 0), PROGRESS)
        everything = method.features(images)
        assert torch.equal(everything[:, :2], before)
        assert torch.allclose(
            method.judge([method.hard()], [0], images[:, None])[:, 0], entropy(everything)
        )


# ---- shared outputs ------------------------------------------------------------------------------
def test_loss_uses_all_outputs_with_hard_and_soft_targets() -> None:
    method, colour_batch = made(), batch(COLOURS, 0)
    begun(method, COLOURS)
    outputs = torch.randn(len(colour_batch), 10)
    assert torch.equal(
        method.classification_loss(outputs, colour_batch),
        F.cross_entropy(outputs, colour_batch.labels),
    )
    colour_batch.targets = torch.full((len(colour_batch), 3), 0.05) + 0.85 * F.one_hot(
        colour_batch.labels, 3
    )
    soft = torch.cat([colour_batch.targets, torch.zeros(len(colour_batch), 7)], 1)
    assert torch.allclose(
        method.classification_loss(outputs, colour_batch),
        -(soft * outputs.log_softmax(1)).sum(1).mean(),
    )


def test_training_pushes_superfluous_outputs_down(states: list[TaskState]) -> None:
    method = serving(states)
    images, labels = samples(COLOURS, 30)
    logits = answers(method, "colours", images)
    method.activate_task("colours")
    with torch.no_grad():
        everything = method.features(images)
    assert torch.equal(everything[:, :3], logits)
    assert everything.softmax(1)[:, 3:].sum(1).max() < 0.1
    assert (logits.argmax(1) == labels).float().mean() > 0.9


def test_task_with_more_classes_than_outputs_is_refused() -> None:
    SupSup.check_backbone(SupSupSettings(outputs=3, objective="entropy"), vit(), (STRIPES, COLOURS))
    with pytest.raises(
        UserError,
        match="task 'colours' has 3 classes, and method 'supsup' has outputs = 2 for them to "
        "share; set outputs to 3 or more",
    ):
        SupSup.check_backbone(
            SupSupSettings(outputs=2, objective="entropy"), vit(), (STRIPES, COLOURS)
        )
    with pytest.raises(UserError, match="set outputs to 4 or more"):
        SupSup.check_backbone(SupSupSettings(outputs=3), vit(), (STRIPES, COLOURS))
    SupSup.check_backbone(SupSupSettings(outputs=0), vit(), (STRIPES, COLOURS))


@pytest.mark.parametrize(
    ("settings", "train", "scenario", "says"),
    [
        ({}, {"optimizer": "sgd"}, "task", "mask_lr is 'auto' with train.optimizer 'sgd'"),
        ({"outputs": 0}, {}, "class", "outputs is 0 with stream.scenario 'class'"),
        (
            {"weights": "signed_constant"},
            {},
            "task",
            "start is 'weights' with weights 'signed_constant'.*set start=kaiming",
        ),
    ],
)
def test_incompatible_settings_are_refused(
    settings: dict[str, Any], train: dict[str, Any], scenario: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        SupSup.validate(
            SupSupSettings(**settings), TrainSettings(**train), DataSettings(), scenario
        )
    SupSup.validate(SupSupSettings(), TrainSettings(), DataSettings(), "class")


def test_random_weights_with_batch_norm_are_refused() -> None:
    cnn = build(BackboneSettings(name="resnet18", img_size=32, weights="hub"))
    with pytest.raises(UserError, match="the backbone has batch norms"):
        SupSup.check_backbone(SupSupSettings(**RANDOM), cnn)


def test_base_task_gets_a_mask_only_with_shared_outputs() -> None:
    assert (
        SupSup.steps_for(SupSupSettings(), -1)
        == SupSup.steps_for(SupSupSettings(outputs=0), 0)
        == SupSup.steps
    )
    assert SupSup.steps_for(SupSupSettings(outputs=0), -1) == ()


# ---- sizes of states, and old answers ------------------------------------------------------------
@pytest.mark.parametrize("outputs", [0, 100])
def test_stored_size_equals_the_formula(outputs: int) -> None:
    """A state has one bit for each of the N_w = 5,455,872 weights of the backbone.

    It also has one bit for each weight of the shared outputs, or a head of 32 bits per number.
    """
    torch.manual_seed(0)
    method = SupSup(build(BackboneSettings()), SupSupSettings(outputs=outputs), 0)
    begun(method, COLOURS)
    state = method.finish()[0]
    expected_sizes = {
        "masks": 5_455_872 // 8 + outputs * 192 // 8,
        "tokens": 0,
        "head": 0 if outputs else 4 * 3 * 193,
        "copies": 0,
    }
    assert state.sizes() == expected_sizes
    data = state.to_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == sum(expected_sizes.values())


def kept_answers(method: SupSup, optimizer: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the answers on the first task, before and after the training of the second task.

    The second task has more classes.
    """
    images = samples(STRIPES, 8)[0]
    method.load_task(learned(made(**settings), STRIPES, 6, optimizer=KEPT[optimizer])[0])
    before = answers(method, "stripes", images)
    learned(method, COLOURS, 6, optimizer=KEPT[optimizer])
    assert answers(method, "colours", images).shape == (8, 3)
    return before, answers(method, "stripes", images)


@pytest.mark.parametrize("optimizer", KEPT)
@pytest.mark.parametrize(
    "settings",
    [{}, {"outputs": 0}, {"scores": "threshold", **RANDOM}],
    ids=["shared", "heads", "random"],
)
def test_earlier_answers_stay_bit_equal(optimizer: str, settings: dict[str, Any]) -> None:
    settings = settings | {"mask_lr": 0.05}
    assert torch.equal(*kept_answers(made(**settings), optimizer, settings))


def test_training_the_weights_changes_earlier_answers() -> None:
    class Thaws(SupSup):
        def begin(self, context: StepContext) -> list[ParamGroup]:
            return [
                *super().begin(context),
                {"name": "weights", "params": [*self.sites.values()]},
            ]

    assert not torch.equal(*kept_answers(Thaws(vit(), SupSupSettings(outputs=10), 1), "adamw", {}))


# ---- task inference ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"infer_images": 5},
        {"objective": "entropy"},
        {"infer": "one_shot", "objective": "entropy"},
        {"infer": "binary", "objective": "entropy"},
        {"infer": "one_shot", "infer_images": 4},
    ],
)
def test_inferred_task_is_right_well_above_chance(
    states: list[TaskState], settings: dict[str, Any]
) -> None:
    method = serving(states, **settings)
    for task_index, task in enumerate((STRIPES, COLOURS)):
        images, labels = samples(task, 16)
        with torch.no_grad():
            picked_tasks, sure = method.infer(images)
            logits = method.logits(images, None)
        assert (picked_tasks == task_index).float().mean() > 0.8
        assert ((sure > 0.5) & (sure <= 1)).all()
        assert (logits.argmax(1) == labels + (0, 2)[task_index]).float().mean() > 0.8


def test_logits_are_placed_in_columns_of_the_picked_task(states: list[TaskState]) -> None:
    method, images = serving(states), samples(STRIPES, 6)[0]
    picked_tasks = torch.tensor([0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        logits = method.answer(images, picked_tasks, None)
    assert logits.shape == (6, 5)
    assert logits.isfinite().all()
    for row, picked_index in enumerate(picked_tasks.tolist()):
        task, own_columns, other = [
            ("stripes", slice(0, 2), slice(2, 5)),
            ("colours", slice(2, 5), slice(0, 2)),
        ][picked_index]
        task_logits = answers(method, task, images[row : row + 1])[0]
        assert torch.allclose(logits[row, own_columns], task_logits, atol=1e-5)
        assert logits[row, other].max() < logits[row, own_columns].min() - 0.99 * LOGIT_GAP
        assert torch.allclose(
            logits[row].softmax(0)[own_columns], task_logits.softmax(0), atol=1e-5
        )


def test_each_group_of_infer_images_gets_one_task(
    states: list[TaskState],
) -> None:
    method = serving(states, infer_images=4)
    mixed = torch.cat([samples(STRIPES, 4)[0], samples(COLOURS, 4)[0], samples(STRIPES, 2)[0]])
    with torch.no_grad():
        picked_tasks, sure = method.infer(mixed)
    assert picked_tasks.tolist() == [0] * 4 + [1] * 4 + [0] * 2
    assert [len(part.unique()) for part in sure.split(4)] == [1, 1, 1]
    alone = serving(states, infer_images=100).infer(mixed[4:8])
    assert torch.allclose(alone[1], sure[4:8], atol=1e-5)


def test_superfluous_outputs_lower_mask_score(
    states: list[TaskState],
) -> None:
    """By default, a mask's score is the log of the softmax share of superfluous outputs.

    These are all outputs except those of the task's classes.
    """
    outputs = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    assert compute_superfluous_share(outputs, 2).exp().tolist() == pytest.approx(
        [0.119203, 0.5], abs=1e-6
    )
    method, images = serving(states), samples(COLOURS, 3)[0]
    assert (method.settings.infer, method.settings.objective) == ("brute_force", "superfluous")
    masks = [method.loaded[name] for name in ("stripes", "colours")]
    for alive in ((0, 1), (1, 0), (1,)):
        scores = method.judge(masks, alive, images[:, None])
        for column, mask_index in enumerate(alive):
            method.activate_task(("stripes", "colours")[mask_index])
            with torch.no_grad():
                superfluous = method.features(images).softmax(1)[:, (2, 3)[mask_index] :].sum(1)
            assert torch.allclose(scores[:, column], superfluous.log(), atol=1e-5)


def test_single_task_needs_no_inference(
    states: list[TaskState], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = serving(states[:1])
    monkeypatch.setattr(supsup, "slopes", None)
    picked_tasks, sure = method.infer(samples(COLOURS, 3)[0])
    assert (picked_tasks.tolist(), sure.tolist()) == ([0, 0, 0], [1, 1, 1])
    assert method.candidates() == {"stripes": ("stripes",)}


def test_task_inference_changes_no_parameter_or_gradient(states: list[TaskState]) -> None:
    method, images = serving(states), samples(COLOURS, 5)[0]
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    task_logits = answers(method, "stripes", images)
    answers(method, None, images)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in method.named_parameters())
    assert torch.equal(answers(method, "stripes", images), task_logits)


def test_separate_heads_require_the_task() -> None:
    method = made(outputs=0)
    method.load_task(learned(made(outputs=0), STRIPES, 1)[0])
    with pytest.raises(
        UserError,
        match=r"'supsup' needs to be told the task where each has a head of its own \(outputs is "
        r"0\); give one of \['stripes'\]",
    ):
        method.logits(samples(STRIPES, 1)[0], None)
    assert method.candidates() == {}


# ---- measuring -----------------------------------------------------------------------------------
def not_told(lab: Lab, method: str, **settings: Any) -> Run:
    stream = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in TASKS.items()
    ]
    return lab.run_of(
        method,
        OPTIMIZERS["adamw"],
        stream={"scenario": "class", "tasks": stream},
        methods={method: settings},
    )


def predictions(run: Run, task: int) -> list[dict[str, Any]]:
    parquet = run.artifact(run.evaluate_job(task)).read("predictions.parquet")
    rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(parquet)).to_pylist()
    return rows


def test_evaluation_records_picked_tasks_and_confidences(lab: Lab) -> None:
    run = not_told(lab, "supsup", outputs=5)
    evaluation, lines, served = run.evaluated(1), predictions(run, 1), run.served(1)
    assert [row["task"] for row in evaluation["rows"]] == [*TASKS]
    for task_index, row in enumerate(evaluation["rows"]):
        task_lines = [line for line in lines if line["task"] == row["task"]]
        with torch.no_grad():
            picked_tasks, sure = served.infer(run.images(task_index))
            task_answers = served.logits(run.images(task_index), row["task"]).argmax(1)
            logits = served.answer(run.images(task_index), picked_tasks, None)
        first = 2 * task_index
        labels = torch.tensor([line["label"] for line in task_lines])
        assert [line["picked"] for line in task_lines] == [
            [*TASKS][p] for p in picked_tasks.tolist()
        ]
        assert [line["picked_confidence"] for line in task_lines] == pytest.approx(sure.tolist())
        assert [line["prediction"] for line in task_lines] == logits.argmax(1).tolist()
        assert row["correct"] == int((logits.argmax(1) == labels).sum())
        assert (
            row["correct_task_aware"]
            == int((task_answers + first == labels).sum())
            >= row["correct"]
        )
        picks = row["picks"]
        assert picks["candidates"] == [*TASKS]
        assert picks["picked"] == [
            [line["picked"] for line in task_lines].count(name) for name in TASKS
        ]
        assert picks["right"] == picks["picked"][task_index]
        for kind, is_right in (("right", True), ("wrong", False)):
            those = [
                line["picked_confidence"]
                for line in task_lines
                if (line["picked"] == row["task"]) is is_right
            ]
            assert picks[f"confidence_{kind}"] == (
                pytest.approx(sum(those) / len(those)) if those else None
            )
    assert sum(row["picks"]["right"] for row in evaluation["rows"]) < len(lines), (
        "all picks are right, so that the counts of wrong picks are not tested"
    )


@pytest.mark.slow
def test_evaluation_without_task_inference_records_no_picks(lab: Lab) -> None:
    for run in (not_told(lab, "finetune"), lab.run("supsup")):
        assert not any("picks" in row for row in run.evaluated(1)["rows"])
        assert {*predictions(run, 1)[0]} == {"task", "key", "label", "prediction", "confidence"}


def test_task_with_the_most_classes_can_come_first(states: list[TaskState]) -> None:
    method = serving(states[::-1])
    method.stream = (COLOURS, STRIPES)
    assert method.class_slices() == {"colours": slice(0, 3), "stripes": slice(3, 5)}
    assert answers(method, None, samples(STRIPES, 4)[0]).argmax(1).tolist() == [3, 4, 3, 4]
