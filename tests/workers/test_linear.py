"""Tests of the linear probe (cached features give the same results, and are used only if they do
not change), and of `individual`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from rank_runs import on_ranks, small_batches
from test_feed import PLACES, feed_of, root  # noqa: F401 (a fixture)

from pipeline.testing.lab import OPTIMIZERS, TINY, Lab, Run, again, history
from workers.dist import Group
from workers.methods import METHODS
from workers.methods.base import Method, ParamGroup, StepContext
from workers.methods.individual import Individual
from workers.methods.linear import Linear
from workers.storage.artifact import Artifact
from workers.storage.taskstate import TaskState

PLAIN: dict[str, Any] = {"crop": "none", "flip": 0.0, "erase": 0.0}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list of the number of images in each forward of the backbone."""
    seen: list[int] = []
    features = Method.features

    def noted(self: Any, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return features(self, images)

    with mock.patch.object(Method, "features", noted):
        yield seen


def recomputed() -> Any:
    return mock.patch.object(Linear, "precompute", return_value=None)


def probe(lab: Lab, **data: Any) -> Run:
    run = lab.run_of(
        "linear",
        {**OPTIMIZERS["sgd"], "epochs": 5, "batch_size": 23},
        data={"val_fraction": 0.125, **data},
        backbone={**TINY, "drop_path": 0.3},
    )
    run.prepare(run.stages(0)[0])
    return run


@pytest.mark.parametrize(
    "data", [{}, {"smoothing": 0.2}, {"repeats": 2}, {"resident_mb": 0}], ids=repr
)
def test_cached_features_give_the_results_of_recomputing(lab: Lab, data: dict[str, Any]) -> None:
    """The results are equal up to rounding, because the batches of a forward differ. This includes
    smoothed labels, repeated images and streamed images."""
    name = "-".join(["of", *data])  # resident_mb is not part of the key
    job = again(probe(lab, **data).stages(0)[0], name)
    with counted() as seen:
        cached_artifact = lab.stage(job)
    images = history(cached_artifact)[0]["images"] + history(cached_artifact)[0]["val_total"]
    assert sum(seen) == images, "one pass over the training and validation images is expected"
    with counted() as seen, recomputed():
        expected = lab.stage(again(job, "recomputed"))
    assert sum(seen) == 5 * images
    for cached_epoch, expected_epoch in zip(
        history(cached_artifact), history(expected), strict=True
    ):
        assert cached_epoch == pytest.approx(expected_epoch, rel=1e-5)
    cached_head, expected_head = (
        TaskState.from_bytes(stage.read("task.safetensors")).head
        for stage in (cached_artifact, expected)
    )
    assert all(
        torch.allclose(cached_head[name], expected_head[name], atol=1e-6) for name in expected_head
    )
    assert not torch.equal(cached_head["bias"], torch.zeros(2)), "the head must have been trained"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "data",
    [
        {"crop": "pad"},
        {"crop": "resized"},
        {"flip": 0.5},
        {"randaugment": 1},
        {"mixup": 0.2},
        {"cutmix": 0.2},
        {"erase": 0.2},
    ],
    ids=repr,
)
def test_with_augmentation_features_are_recomputed(lab: Lab, data: dict[str, Any]) -> None:
    """Only the features of validation images do not change."""
    job = probe(lab, **data).stages(0)[0]
    with counted() as seen:
        epochs = history(lab.stage(job))
    assert sum(seen) == 5 * epochs[0]["images"] + epochs[0]["val_total"]
    with recomputed():
        expected = history(lab.stage(again(job, "recomputed")))
    assert epochs == expected, "the histories must be bit-identical"


def test_features_are_not_cached_if_backbone_is_trained(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thawed(Linear):
        name, freezes_backbone = "thawed", False

        def begin(self, context: StepContext) -> list[ParamGroup]:
            return [
                *super().begin(context),
                {"name": "norm", "params": [self.backbone.get_parameter("norm.bias")]},
            ]

    monkeypatch.setitem(METHODS, "thawed", Thawed)
    job = again(probe(lab).stages(0)[0], "thawed", method="thawed")
    with counted() as seen:
        epochs = history(lab.stage(job))
    assert sum(seen) == 5 * (epochs[0]["images"] + epochs[0]["val_total"])


def test_two_ranks_train_the_same_head(lab: Lab) -> None:
    """The heads are equal up to the order in which gradients are summed."""
    jobs = [again(probe(lab).stages(0)[0], f"on-{world}-ranks") for world in (1, 2)]
    with small_batches():
        lab.stage(jobs[0])
    on_ranks(jobs[1:], 2, lab.folder / "ranks-linear")
    one, two = (Artifact.need(job.root, job.key) for job in jobs)
    for epoch_on_one, epoch_on_two in zip(history(one), history(two), strict=True):
        assert epoch_on_one == pytest.approx(epoch_on_two, rel=1e-5)
    head_on_one, head_on_two = (
        TaskState.from_bytes(stage.read("task.safetensors")).head for stage in (one, two)
    )
    assert all(
        torch.allclose(head_on_one[name], head_on_two[name], atol=1e-6) for name in head_on_two
    )


# ---- the feed ------------------------------------------------------------------------------------
def made_of(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1).double().cumsum(1)[:, -2:]


@pytest.mark.parametrize("storage", PLACES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_feed_yields_cached_features_in_place_of_images(
    root: Any,  # noqa: F811
    storage: str,
    world: int,
) -> None:
    """This holds for each sample, in any epoch and for any number of ranks. Labels and targets are
    those of the image."""
    options: dict[str, Any] = {"batch": 4, "accumulate": 2, "data": {**PLAIN, "smoothing": 0.1}}
    plain = feed_of(root, storage, **options)
    feeds = [feed_of(root, storage, rank, world, **options) for rank in range(world)]
    shares = [[made_of(b.images) for b in feed.evaluate(3)] for feed in feeds]
    for feed in feeds:
        with small_batches(), mock.patch.object(Group, "gather", return_value=shares):
            feed.cache_features(made_of)
        assert feed.cached_features is not None
        assert len(feed.cached_features) == feed.num_samples
    for epoch in (0, 1):
        want = {
            (step, row): (made_of(b.images)[i], b.labels[i], b.targets[i])
            for step, batches in enumerate(plain.epoch(epoch))
            for b in batches
            if b.weight
            for i, row in enumerate(b.draw.positions.tolist())
        }
        got = {
            (step, row): (b.images[i], b.labels[i], b.targets[i])
            for feed in feeds
            for step, batches in enumerate(feed.epoch(epoch))
            for b in batches
            if b.weight
            for i, row in enumerate(b.draw.positions.tolist())
        }
        assert got.keys() == want.keys()
        assert all(
            torch.equal(cached_tensor, expected_tensor)
            for key in want
            for cached_tensor, expected_tensor in zip(got[key], want[key], strict=True)
        )


@pytest.mark.parametrize("storage", PLACES)
def test_a_feed_with_cached_features_decodes_no_image(
    root: Any,  # noqa: F811
    storage: str,
) -> None:
    feed = feed_of(root, storage, data=PLAIN)
    feed.cache_features(made_of)
    with mock.patch.object(feed.source, "_gather" if storage == "resident" else "_make") as look:
        assert sum(len(b) for batches in feed.epoch(0) for b in batches) == feed.num_samples
        assert [key for b in feed.evaluate() for key in b.keys or []] == feed.samples.table[
            "key"
        ].to_pylist()
    look.assert_not_called()


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_features_above_the_limit_are_not_cached(
    root: Any,  # noqa: F811
    world: int,
    fits: bool,
) -> None:
    """All ranks decide alike, even a rank that has no batch and so does not know the row size."""
    feeds = [feed_of(root, "resident", rank, world, batch=16, data=PLAIN) for rank in range(world)]
    max_bytes = 2 * 8 * feeds[0].num_samples - (not fits)
    with mock.patch.object(Group, "gather", return_value=[[]]) as gather:
        for feed in feeds:
            feed.cache_features(made_of, max_bytes)
    shares = [call.args[0] for call in gather.call_args_list]  # one per rank
    assert [bool(share) for share in shares] == [fits, fits, False][:world]
    with mock.patch.object(Group, "gather", return_value=shares):
        for feed in feeds:
            feed.cache_features(made_of, max_bytes)
    assert [feed.cached_features is not None for feed in feeds] == [fits] * world


# ---- full fine-tuning of a network per task ------------------------------------------------------
def test_individual_stores_only_a_network_and_a_head(lab: Lab) -> None:
    run = lab.run("individual")
    live = run.live(0)
    assert isinstance(live, Individual)
    parameters = sum(p.numel() for p in live.backbone.parameters())
    assert run.state(0).sizes() == {
        "masks": 0,
        "tokens": 0,
        "copies": 4 * parameters,
        "head": 4 * 2 * (32 + 1),
    }
    assert run.trained(0).manifest["sizes"] == run.state(0).sizes()
    assert run.trained(0).manifest["carried_bytes"] == 0
    assert run.state(0).copies.keys() == {name for name, _ in live.backbone.named_parameters()}
