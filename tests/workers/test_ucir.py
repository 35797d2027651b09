"""Tests of UCIR: its loss, trained parameters, new class vectors, and carried states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from class_incremental_steps import SMALL, START, A, B, C, batch, moved, stream, wide
from cosine_head_steps import begun, counted, feed_of_three_batches, trained
from rank_runs import on_ranks
from torch.nn import functional as F

from pipeline.testing.lab import Lab, again
from workers.data.feed import Feed
from workers.dist import Group
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.ucir import Ucir, UcirSettings
from workers.model.cosine import margin_rank
from workers.model.pod import cosine_distance
from workers.model.vit import build, compute_digest
from workers.storage.artifact import Artifact
from workers.storage.taskstate import Carried


# ---- the loss ------------------------------------------------------------------------------------
@pytest.mark.parametrize("base", [0.0, 5.0])
def test_ucir_loss_has_three_terms(
    base: float,
) -> None:
    method, b = (
        begun("ucir", A, B, C, scale=4.0, margin=0.3, **{"lambda": base}),
        counted(batch(A, B, C), A, B, C),
    )
    taught = method.backbone(b.images).detach()
    moved(method)
    loss, terms = method.loss(b, START)
    features, labels = method.backbone(b.images), wide(b, A, B, C)
    vectors = torch.cat([method.heads[name].weight[:, 0] for name in "abc"])
    cosines = F.normalize(features, dim=1) @ F.normalize(vectors, dim=1).T
    ce, turn = (
        F.cross_entropy(method.heads.scale * cosines, labels),
        (1 - F.cosine_similarity(features, taught)).mean(),
    )
    old = [i for i, label in enumerate(labels.tolist()) if label < 5]
    rank = torch.stack(
        [
            F.relu(0.3 - cosines[i, labels[i]] + s)
            for i in old
            for s in cosines[i, 5:].topk(2).values
        ]
    ).mean()
    assert len(old) == 4
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {"ce": ce.item(), "distance": turn.item(), "rank": rank.item()}, abs=1e-5
    )
    assert torch.allclose(loss, ce + base * math.sqrt(5 / 2) * turn + rank, atol=1e-5)
    assert min(map(float, terms.values())) > 1e-3


def test_distance_is_zero_for_a_student_equal_to_its_teacher() -> None:
    method, b = begun("ucir", A, B), counted(batch(A, B), A, B)
    assert float(method.loss(b, START)[1]["distance"]) == pytest.approx(0.0, abs=1e-6)
    features = torch.randn(4, 8, requires_grad=True)
    distance = cosine_distance(features, features.detach())
    distance.backward()
    assert float(distance.detach()) == pytest.approx(0.0, abs=1e-6)
    assert features.grad is not None
    assert features.grad.abs().max() < 1e-6
    assert float(cosine_distance(features.detach(), -3 * features.detach())) == pytest.approx(
        2.0, abs=1e-6
    )


def test_first_task_uses_scaled_cross_entropy_alone() -> None:
    method = begun("ucir", A, scale=4.0)
    loss, terms = method.loss(batch(A), START)
    assert terms.keys() == {"ce"}
    assert torch.equal(
        loss,
        F.cross_entropy(
            4.0 * method.heads["a"].similarity(method.backbone(batch(A).images)), batch(A).labels
        ),
    )


def test_margin_loss_is_zero_without_old_samples() -> None:
    method, b = begun("ucir", A, C), batch(C)
    b.tasks, b.counts = torch.ones(6, dtype=torch.long), (0, 6)
    loss, terms = method.loss(b, START)
    assert float(terms["rank"]) == 0
    assert torch.isfinite(loss)


@pytest.mark.parametrize("cuts", [(3,), (1, 2), (2, 5)])
def test_losses_of_batch_parts_sum_to_the_whole(cuts: tuple[int, ...]) -> None:
    """This holds for any number of old samples in each rank or micro-batch."""
    method, whole = begun("ucir", A, B), batch(A, B)
    whole.tasks = torch.tensor([0, 0, 1, 1, 1, 0])
    whole.labels = torch.tensor([0, 1, 2, 0, 1, 1])
    moved(method)
    expected, terms = method.loss(counted(whole, A, B), START)
    total, parts = 0.0, dict.fromkeys(terms, 0.0)
    for first, last in zip((0, *cuts), (*cuts, 6), strict=True):
        rows = slice(first, last)
        part = batch(A, B, rows=rows, counts=(3, 3))
        part.tasks, part.labels = whole.tasks[rows], whole.labels[rows]
        loss, part_terms = method.loss(part, START)
        total += float(loss.detach()) * (last - first) / 6
        parts = {
            name: value + float(part_terms[name]) * (last - first) / 6
            for name, value in parts.items()
        }
    assert total == pytest.approx(float(expected.detach()), abs=1e-5)
    assert parts == pytest.approx({name: float(t) for name, t in terms.items()}, abs=1e-5)
    labels = wide(whole, A, B)
    with torch.no_grad():
        each = margin_rank(method.similarity(method.backbone(whole.images)), labels, 2, 2, 0.5)
    assert float(terms["rank"]) == pytest.approx(float(each[labels < 2].mean()), abs=1e-5)


def test_feed_counts_samples_per_task_in_the_global_batch(lab: Lab) -> None:
    run = stream(lab, "ucir")
    run.trained(0)
    job = run.stages(1)[0]
    memory = {"two": run.carried(0).meta["memory"]["two"]["0"][:7]}
    feeds = [Feed(job, job.tasks, "train", Group(rank, 2), True, memory) for rank in range(2)]
    total = torch.zeros(2, dtype=torch.long)
    for shares in zip(*(feed.epoch(0) for feed in feeds), strict=True):
        held = [b for batches in shares for b in batches if b.weight]
        batch_counts = torch.cat([b.tasks for b in held]).bincount(minlength=2)
        assert {b.counts for b in held} == {tuple(batch_counts.tolist())}
        total += batch_counts
    assert total.tolist() == [7, 3 * 36]


# ---- trained parameters --------------------------------------------------------------------------
def digests(method: Any) -> dict[str, Any]:
    return {
        "backbone": compute_digest(method.backbone),
        "scale": method.heads.scale.item(),
        **{
            name: method.heads.export(name)["weight"].numpy().tobytes()
            for name in method.heads.names
        },
    }


def changed(method: Any, before: dict[str, Any]) -> set[str]:
    return {name for name, value in digests(method).items() if value != before[name]}


def test_training_keeps_the_vectors_of_old_classes() -> None:
    method = begun("ucir", A, B)
    before = digests(method)
    assert changed(trained(method, A, B), before) == {"backbone", "scale", "b"}
    groups = {g["name"]: g for g in method.groups}
    assert groups["head.scale"]["weight_decay"] == 0
    assert groups["head.weight"]["weight_decay"] == 0.05


def test_the_first_task_trains_everything() -> None:
    method = begun("ucir", A)
    before = digests(method)
    assert changed(trained(method, A), before) == {"backbone", "scale", "a"}


def test_fine_tuning_trains_only_the_classifier_with_cross_entropy() -> None:
    method = begun("ucir", A, B, step="finetune", finetune=True)
    before = digests(method)
    assert method.teacher is None
    assert method.loss(counted(batch(A, B), A, B), START)[1].keys() == {"ce"}
    assert changed(trained(method, A, B), before) == {"scale", "a", "b"}


def test_backbone_is_in_evaluation_mode_during_fine_tuning() -> None:
    assert not begun("ucir", A, B, step="finetune", finetune=True).backbone.training
    assert begun("ucir", A, B, finetune=True).backbone.training


def test_new_vectors_start_along_class_means_of_previous_network() -> None:
    method = begun("ucir", A, B)
    batches = feed_of_three_batches(A, B).evaluate()
    with torch.no_grad():
        h = torch.cat([method.teacher.backbone(b.images) for b in batches])
    tasks, labels = torch.cat([b.tasks for b in batches]), torch.cat([b.labels for b in batches])
    vectors = method.heads["b"].weight.detach()[:, 0]
    for label in range(3):
        mean = F.normalize(h[(tasks == 1) & (labels == label)], dim=1).mean(0)
        assert F.cosine_similarity(vectors[label], mean, dim=0) == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(
        vectors.norm(dim=1), method.heads["a"].weight.norm(dim=2).mean().expand(3), rtol=1e-5
    )


# ---- in a stream ---------------------------------------------------------------------------------
def test_chain_keeps_old_vectors_and_carries_each_head_once(lab: Lab) -> None:
    run = stream(lab, "ucir")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "herd"],
    ]
    first, carried, second = run.state(0).head, run.carried(1).tensors, run.state(1).head
    assert torch.equal(carried["heads/two/weight"], first["weight"]), "frozen, bit for bit"
    assert not any(name.startswith("heads/three") for name in carried)
    assert not any(name.startswith("heads/") for name in run.carried(0).tensors)
    assert carried["heads/two/scale"] == second["scale"] != first["scale"]
    assert {name: len(keys) for name, keys in run.carried(1).meta["memory"]["three"].items()} == {
        "2": 20,
        "3": 20,
        "4": 20,
    }


def test_every_task_is_served_with_the_current_scale(lab: Lab) -> None:
    run = stream(lab, "ucir")
    served: Any = run.served(1)
    assert float(served.heads.scale) == float(run.state(1).head["scale"])
    h = served.features(run.images(1))
    vectors = torch.cat([run.carried(1).tensors["heads/two/weight"], run.state(1).head["weight"]])[
        :, 0
    ]
    expected = served.heads.scale * F.normalize(h, dim=1) @ F.normalize(vectors, dim=1).T
    assert torch.allclose(served.logits(run.images(1), None), expected, atol=1e-5)
    assert (served.logits(run.images(1), None) / served.heads.scale).abs().max() <= 1


def test_two_ranks_learn_the_same_class_vectors_as_one(lab: Lab, tmp_path: Path) -> None:
    run = stream(lab, "ucir")
    alone, job = run.trained(1), run.stages(1)[0]
    on_ranks([again(job, "ranks")], 2, tmp_path / "ranks")
    expected = Carried.from_bytes(run.artifact(job).read("carried.safetensors")).tensors
    carried = Carried.from_bytes(
        Artifact.need(job.root, f"{job.key}-ranks").read("carried.safetensors")
    ).tensors
    assert alone.key != job.key
    assert carried.keys() == expected.keys()
    assert all(
        torch.allclose(carried[name], t, atol=2e-3)
        for name, t in expected.items()
        if name.startswith("heads/")
    )


def test_finetune_setting_tunes_the_classifier_on_the_memory(lab: Lab) -> None:
    run = stream(lab, "ucir", finetune=True, per_class=5)
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["train", "herd"],
        ["train", "herd", "finetune"],
    ]
    herd, tuned = (run.artifact(job) for job in run.stages(1)[1:])
    before, after = run.lab.finished[herd.key][1], run.carried(1)
    assert all(
        torch.equal(after.tensors[n], t)
        for n, t in before.tensors.items()
        if n.startswith("backbone/")
    )
    assert after.meta == before.meta
    assert not torch.equal(after.tensors["heads/two/weight"], before.tensors["heads/two/weight"])
    assert not torch.equal(run.state(1).head["weight"], before.tensors["heads/three/weight"])
    assert {n for n in before.tensors if n.startswith("heads/three")} == {
        "heads/three/weight",
        "heads/three/scale",
    }
    assert not any(n.startswith("heads/three") for n in after.tensors)
    live: Any = run.live(1)
    assert sorted(live.context.data.feed("train").samples.table["class"].to_pylist()) == sorted(
        "01234" * 5
    )
    assert tuned.manifest["trained_parameters"] == 5 * 32 + 1


def test_base_task_classes_get_vectors_from_backbone_features(lab: Lab) -> None:
    run = stream(lab, "ucir", base="two")
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [
        ["herd"],
        ["train", "herd"],
    ]
    state, method = run.state(0), run.fresh(0)
    assert {name: tuple(t.shape) for name, t in state.head.items()} == {
        "weight": (2, 1, 32),
        "scale": (),
    }
    feed, job = [], run.stages(0)[0]
    for b in Feed(job, (job.tasks[0],), "train", Group(), False).evaluate():
        with torch.no_grad():
            feed.append((method.eval().features(b.images), b.labels))
    h, labels = (torch.cat(parts) for parts in zip(*feed, strict=True))
    for label in range(2):
        mean = F.normalize(h[labels == label], dim=1).mean(0)
        assert F.cosine_similarity(state.head["weight"][label, 0], mean, dim=0) == pytest.approx(
            1.0, abs=1e-5
        )
    assert torch.equal(run.carried(1).tensors["heads/two/weight"], state.head["weight"])
    row = run.evaluated(0)["rows"][0]
    assert row["correct"] > 0.6 * row["total"]


# ---- refused settings ----------------------------------------------------------------------------
@pytest.mark.parametrize("data", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_mixup_and_cutmix_are_refused(data: dict[str, float]) -> None:
    with pytest.raises(UserError, match="set both to 0"):
        Ucir.validate(UcirSettings(), TrainSettings(), DataSettings(**data), "class")
    Ucir.validate(UcirSettings(), TrainSettings(), DataSettings(smoothing=0.1), "class")


def test_task_with_fewer_classes_than_top_k_is_refused() -> None:
    small = Task("small", "card", "", ("x",))
    with pytest.raises(UserError, match=r"top_k is 2, but .*'small' has fewer new classes \(1\)"):
        Ucir.check_backbone(UcirSettings(), build(SMALL), (A, small))
    Ucir.check_backbone(UcirSettings(), build(SMALL), (small, A))
    Ucir.check_backbone(UcirSettings(top_k=1), build(SMALL), (A, small))
