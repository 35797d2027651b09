"""Tests of BiC: the fit of the bias, the loss, the data of each step, and two parallel steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from class_incremental_steps import SMALL, START, TRAIN, A, B, C, batch, begun, moved, stream, wide
from rank_runs import on_ranks
from torch import Tensor
from torch.nn import functional as F

from pipeline.testing.lab import Lab, Run, again, history
from workers import loop
from workers.data.feed import Feed
from workers.errors import UserError
from workers.methods.bic import Bic, BicSettings
from workers.model.bias import apply_bias, fit_bias
from workers.model.distill import kd_ce
from workers.model.vit import build
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried

NEW = slice(3, 5)


# ---- the bias ------------------------------------------------------------------------------------
def logits(n: int = 40, seed: int = 0) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_alpha_one_and_beta_zero_change_nothing() -> None:
    assert torch.equal(apply_bias(logits(), NEW, torch.tensor([1.0, 0.0])), logits())
    assert torch.equal(
        apply_bias(logits().float(), NEW, torch.tensor([1.0, 0.0])), logits().float()
    )


def test_bias_leaves_other_classes_bit_identical() -> None:
    corrected = apply_bias(logits(), slice(1, 3), torch.tensor([2.0, -0.5], dtype=torch.float64))
    assert torch.equal(corrected[:, [0, 3, 4]], logits()[:, [0, 3, 4]])
    assert torch.allclose(corrected[:, 1:3], 2 * logits()[:, 1:3] - 0.5)


def objective(z: Tensor, labels: Tensor, bias: Tensor, decay: float) -> Tensor:
    """Return the objective as a mean over classes, so that each class counts the same."""
    corrected = torch.cat([z[:, :3], bias[0] * z[:, 3:] + bias[1]], 1)
    each = F.cross_entropy(corrected, labels, reduction="none")
    return (
        torch.stack([each[labels == c].mean() for c in labels.unique()]).mean()
        + decay * bias[1] ** 2 / 2
    )


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("uneven", [False, True])
def test_fit_has_zero_gradient_of_the_objective(decay: float, uneven: bool) -> None:
    labels = torch.arange(40) % 5
    if uneven:
        labels[10:20] = 4
    z = logits() + 1.5 * F.one_hot(labels, 5) + torch.tensor([0.0, 0, 0, 2, 2])
    bias = fit_bias(z, labels, NEW, decay).requires_grad_()
    objective(z, labels, bias, decay).backward()
    assert bias.dtype == torch.float64
    assert bias.grad is not None
    assert bias.grad.abs().max() < 1e-6
    assert float(bias[1].detach()) < 0, "the fit lowers the new outputs, which are too large"


def test_decay_shrinks_only_beta() -> None:
    labels = torch.arange(40) % 5
    z = logits() + F.one_hot(labels, 5) + torch.tensor([0.0, 0, 0, 3, 3])
    free, held = (fit_bias(z, labels, NEW, decay) for decay in (0.0, 1e6))
    assert abs(float(held[1])) < 1e-5 < abs(float(free[1]))
    assert abs(float(held[0]) - 1) > 0.05


def test_fit_inverts_a_known_scale_and_shift() -> None:
    """Labels are drawn from softmax(z), and the new outputs are then scaled and shifted.

    The fit returns the inverse, up to the noise of the labels.
    """
    z = 2 * logits(200_000)
    labels = torch.multinomial(z.softmax(1), 1, generator=torch.Generator().manual_seed(1)).squeeze(
        1
    )
    # the same number of samples per class
    of_class = torch.cat([(labels == c).nonzero()[:30_000] for c in range(5)]).squeeze(1)
    z, labels = z[of_class], labels[of_class]
    alpha, beta = fit_bias(apply_bias(z, NEW, torch.tensor([2.0, 1.0])), labels, NEW, 0.0).tolist()
    assert (alpha, beta) == (pytest.approx(0.5, abs=0.01), pytest.approx(-0.5, abs=0.02))


def test_fit_weights_classes_equally() -> None:
    labels = torch.arange(40) % 5
    z = logits() + F.one_hot(labels, 5) + torch.tensor([0.0, 0, 0, 1, 1])
    twice = torch.cat([torch.arange(40), *[(labels == 1).nonzero().squeeze(1)] * 3])
    assert torch.allclose(
        fit_bias(z[twice], labels[twice], NEW, 0.1), fit_bias(z, labels, NEW, 0.1), atol=1e-5
    )


def test_fit_converges_on_separable_classes() -> None:
    z, labels = 9 * torch.eye(5), torch.arange(5)
    z[:, 3:] -= 1
    bias = fit_bias(z, labels, NEW, 0.1)
    assert torch.isfinite(bias).all()
    assert (apply_bias(z.double(), NEW, bias).argmax(1) == labels).all()


# ---- the loss ------------------------------------------------------------------------------------
BIASES = {
    "a": torch.tensor([0.5, 1.0], dtype=torch.float64),
    "b": torch.tensor([2.0, -1.0], dtype=torch.float64),
}


@pytest.mark.parametrize("mode", ["newest", "all"])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_distillation_uses_bias_corrected_outputs_of_the_teacher(mode: str, tau: float) -> None:
    """With `all`, the outputs of all old tasks are corrected in teacher and student."""
    method, b = begun("bic", A, B, C, tau=tau, bias_mode=mode), batch(A, B, C)
    raw = torch.cat([method.heads[name](method.backbone(b.images)) for name in "ab"], 1).detach()
    moved(method)
    method.biases = dict(BIASES)
    loss, terms = method.loss(b, START)
    z = torch.cat([method.heads[name](method.backbone(b.images)) for name in "abc"], 1)
    b_only = torch.cat([raw[:, :2], 2 * raw[:, 2:] - 1], 1)
    if mode == "all":
        z, taught = (
            torch.cat([0.5 * z[:, :2] + 1, 2 * z[:, 2:5] - 1, z[:, 5:]], 1),
            torch.cat([0.5 * raw[:, :2] + 1, b_only[:, 2:]], 1),
        )
    else:
        taught = b_only
    ce, kd = F.cross_entropy(z, wide(b, A, B, C)), kd_ce(z[:, :5], taught, tau)
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "kd": kd.item()}, abs=1e-5
    )
    assert torch.allclose(loss, 2 / 7 * ce + 5 / 7 * kd, atol=1e-5)


def test_first_task_uses_plain_cross_entropy() -> None:
    method = begun("bic", A)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(loss, F.cross_entropy(method.logits(batch(A).images, None), batch(A).labels))


@pytest.mark.parametrize("mode", ["newest", "all"])
def test_logits_use_the_bias_of_newest_or_all_tasks(mode: str) -> None:
    method, pictures = begun("bic", A, B, bias_mode=mode).eval(), batch(A).images
    z = torch.cat([method.heads[name](method.backbone(pictures)) for name in "ab"], 1)
    method.biases = dict(BIASES)
    first = 0.5 * z[:, :2] + 1 if mode == "all" else z[:, :2]
    assert torch.allclose(
        method.logits(pictures, None), torch.cat([first, 2 * z[:, 2:] - 1], 1), atol=1e-6
    )
    del method.biases["b"]
    assert torch.allclose(
        method.logits(pictures, None), torch.cat([first, z[:, 2:]], 1), atol=1e-6
    ), "the last task has no bias yet"


# ---- the data of each step -----------------------------------------------------------------------
def looked_at(run: Run, task: int) -> dict[str, list[tuple[str, str]]]:
    """Return step -> (class, key) of all samples in its train feeds.

    This runs the steps of the task a second time.
    """
    samples: dict[str, list[tuple[str, str]]] = {}
    for job in run.stages(task):
        run.artifact(job)
        made: list[Feed] = []

        def noted(job: Any, tasks: Any, split: str, *rest: Any, made: list[Feed] = made) -> Feed:
            feed = Feed(job, tasks, split, *rest)
            made.extend([feed] if split == "train" else [])
            return feed

        with mock.patch.object(loop, "Feed", noted):
            run.lab.stage(again(job, f"looked-at-{len(run.lab.live)}"))
        tables = {
            tuple(
                zip(
                    feed.samples.table["class"].to_pylist(),
                    feed.samples.table["key"].to_pylist(),
                    strict=True,
                )
            )
            for feed in made
        }
        assert len(tables) == 1
        samples[job.step] = [*tables.pop()]
    return samples


def keys_of(memory: dict[str, dict[str, list[str]]], *tasks: str) -> set[str]:
    return {key for name in tasks for keys in memory[name].values() for key in keys}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [{}, {"memory": 60}, {"per_class": 20, "val_share": 0.3}], ids=str
)
def test_bias_images_are_balanced_and_never_trained_on(lab: Lab, settings: dict[str, Any]) -> None:
    run = stream(lab, "bic", **settings)
    first, second = looked_at(run, 0), looked_at(run, 1)
    before, after = run.carried(0).meta, run.carried(1).meta
    assert first.keys() == {"train", "herd"}
    assert second.keys() == {"train", "calibrate", "herd"}
    on = {step: {key for _, key in keys} for step, keys in second.items()}
    was_on = {key for _, key in first["train"]}
    each = {"{}": 3, "{'memory': 60}": 3, "{'per_class': 20, 'val_share': 0.3}": 6}[
        str(settings)
    ]  # held-out images per class: of 36, of a quota of 30, of a quota of 20
    assert sorted(c for c, _ in second["calibrate"]) == sorted("01234" * each)
    assert not on["calibrate"] & (was_on | on["train"])
    assert {key for _, key in first["herd"]} == was_on, (
        "exemplars are chosen from the training images"
    )
    assert len(was_on) == 2 * (36 - each)
    new = {key for c, key in second["train"] if c in "234"}
    assert len(new) == 3 * (36 - each)
    assert on["herd"] == new
    assert on["train"] - new == keys_of(before["memory"], "two")
    assert on["calibrate"] & keys_of(before["validation"], "two") == {
        key for c, key in second["calibrate"] if c in "01"
    }
    assert not keys_of(after["memory"], "two", "three") & keys_of(
        after["validation"], "two", "three"
    )


def test_exemplars_and_held_out_images_share_the_memory(lab: Lab) -> None:
    run = stream(lab, "bic", memory=60)
    for task, classes in ((0, 2), (1, 5)):
        meta = run.carried(task).meta
        counts = {
            c: (len(keys), len(meta["validation"][name][c]))
            for name, classes_of_task in meta["memory"].items()
            for c, keys in classes_of_task.items()
        }
        share = 60 // classes
        assert set(counts.values()) == {(share - share // 10, share // 10)}
    first, second = run.carried(0).meta, run.carried(1).meta
    for kind in ("memory", "validation"):
        assert all(
            second[kind]["two"][c] == keys[: len(second[kind]["two"][c])]
            for c, keys in first[kind]["two"].items()
        ), "lists are shortened, not chosen again"


def test_small_memory_holds_out_and_trains_one_image() -> None:
    method = Bic(build(SMALL), BicSettings(), 0)
    method.stream = (A, B)
    held_out = method.held_out(
        B, {"b1": ["x"], "b2": ["x", "y"], "b3": [str(i) for i in range(57)]}
    )
    assert {name: len(keys) for name, keys in held_out.items()} == {"b1": 0, "b2": 1, "b3": 5}


def test_held_out_images_depend_on_seed_but_not_order() -> None:
    held = []
    for seed, order in ((0, 1), (0, -1), (1, 1)):
        method = Bic(build(SMALL), BicSettings(), seed)
        method.stream = (A,)
        held.append(method.held_out(A, {"a1": [str(i) for i in range(500)][::order]})["a1"])
    assert held[0] == held[1]
    assert len(held[0]) == 50
    assert set(held[0]) != set(held[2])


# ---- parallel steps ------------------------------------------------------------------------------
def handed_on(run: Run, task: int, step: str) -> Carried:
    job = next(job for job in run.stages(task) if job.step == step)
    return Carried.from_bytes(run.artifact(job).read("carried.safetensors"))


def test_calibration_and_herding_both_follow_training_and_precede_evaluation(
    lab: Lab,
) -> None:
    run = stream(lab, "bic")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "calibrate", "herd"],
    ]
    train, calibrate, herd = run.stages(1)
    assert calibrate.previous == herd.previous == {"train": train.key}
    assert run.evaluate_job(1).previous == {"calibrate": calibrate.key, "herd": herd.key}


def test_calibration_carries_only_the_bias(lab: Lab) -> None:
    run = stream(lab, "bic")
    carried, herded = handed_on(run, 1, "calibrate"), handed_on(run, 1, "herd")
    assert {name: tuple(t.shape) for name, t in carried.tensors.items()} == {"bias/three": (2,)}
    assert carried.meta == {}
    assert not any(name.startswith("bias/") for name in herded.tensors)
    assert herded.meta.keys() == {"memory", "validation"}
    assert {n.split("/")[1] for n in herded.tensors if n.startswith("heads/")} == {"two"}
    (row,) = history(run.artifact(run.stages(1)[1]))
    assert [row["alpha"], row["beta"]] == carried.tensors["bias/three"].tolist()
    assert "val_correct" in row


def test_calibration_does_not_change_the_network(lab: Lab) -> None:
    run = stream(lab, "bic")
    calibrate = run.stages(1)[1]
    run.artifact(calibrate)
    live, trained = lab.live[calibrate.key], handed_on(run, 1, "train").tensors
    network = {f"backbone/{n}": t for n, t in live.backbone.state_dict().items()}
    network |= {
        f"heads/{name}/{n}": t
        for name in ("two", "three")
        for n, t in live.heads.export(name).items()
    }
    assert network.keys() == trained.keys()
    assert all(torch.equal(t, trained[n]) for n, t in network.items())


def test_bias_is_fitted_on_outputs_of_held_out_images(lab: Lab) -> None:
    run = stream(lab, "bic", beta_decay=0.3)
    alpha, beta = handed_on(run, 1, "calibrate").tensors["bias/three"].tolist()
    job = run.stages(1)[1]
    live: Any = lab.live[job.key]
    images, labels = [], []
    for b in live.context.data.feed("train").evaluate():
        images.append(b.images)
        labels.append(b.labels + torch.tensor([0, 2])[b.tasks])
    features = live.eval().features(torch.cat(images))
    z, y = (
        torch.cat([live.heads[name](features) for name in ("two", "three")], 1).detach().double(),
        torch.cat(labels),
    )
    bias = torch.tensor([alpha, beta], dtype=torch.float64, requires_grad=True)
    (
        F.cross_entropy(torch.cat([z[:, :2], bias[0] * z[:, 2:] + bias[1]], 1), y)
        + 0.3 * bias[1] ** 2 / 2
    ).backward()
    assert bias.grad is not None
    assert bias.grad.abs().max() < 1e-4
    assert (alpha, beta) != (1, 0)


def test_served_outputs_of_new_classes_are_bias_corrected(lab: Lab) -> None:
    run = stream(lab, "bic")
    served, images = run.served(1), run.images(1)
    alpha, beta = handed_on(run, 1, "calibrate").tensors["bias/three"].tolist()
    two, three = (served.logits(images, name) for name in ("two", "three"))
    assert torch.allclose(
        served.logits(images, None), torch.cat([two, alpha * three + beta], 1), atol=1e-5
    )


def test_two_ranks_fit_the_same_bias(lab: Lab, tmp_path: Path) -> None:
    run = stream(lab, "bic")
    job = run.stages(1)[1]
    alone = run.artifact(job)
    on_ranks([again(job, "ranks")], 2, tmp_path / "ranks")
    assert Artifact.need(job.root, f"{job.key}-ranks").read("carried.safetensors") == alone.read(
        "carried.safetensors"
    )


@pytest.mark.parametrize("mode", ["newest", "all"])
def test_biases_of_all_tasks_are_carried_to_the_third(lab: Lab, mode: str) -> None:
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in (("x", "01"), ("y", "23"), ("z", "4"))
    ]
    run = lab.run_of(
        "bic",
        TRAIN,
        methods={"bic": {"bias_mode": mode}},
        stream={"scenario": "class", "tasks": tasks},
    )
    run.order = ("x", "y", "z")
    assert run.stages(2)[0].previous.keys() == {"calibrate", "herd"}
    served: Any = run.served(2)
    assert served.biases.keys() == {"y", "z"}
    assert torch.equal(served.biases["y"], handed_on(run, 1, "calibrate").tensors["bias/y"])
    features = served.features(run.images(2))
    logits_of_all, (alpha, beta) = served.logits(run.images(2), None), served.biases["y"].tolist()
    y = served.heads["y"](features)
    assert torch.allclose(
        logits_of_all[:, 2:4], alpha * y + beta if mode == "all" else y, atol=1e-5
    )
    train: Any = lab.live[run.stages(2)[0].key]
    assert train.biases.keys() == {"y"}, "the only bias is the teacher's"


def test_base_task_provides_held_out_images_for_the_bias(lab: Lab) -> None:
    run = stream(lab, "bic", base="two")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "calibrate", "herd"],
    ]
    assert {c: len(keys) for c, keys in run.carried(0).meta["validation"]["two"].items()} == {
        "0": 3,
        "1": 3,
    }
    assert run.evaluated(1)["rows"][1]["total"] == 60


def test_memory_too_small_for_bias_and_training_is_refused() -> None:
    with pytest.raises(UserError, match="give it memory 14 or more"):
        Bic.check_backbone(BicSettings(memory=13), build(SMALL), (A, B, C))
    with pytest.raises(UserError, match="per_class 2"):
        Bic.check_backbone(BicSettings(per_class=1), build(SMALL), (A, B, C))
    Bic.check_backbone(BicSettings(memory=14), build(SMALL), (A, B, C))
