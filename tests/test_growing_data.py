"""Tests of growing data: a task depends only on its own images, and other results are reused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

import pipeline
from pipeline import cli
from pipeline.data.digests import digest_classes
from tests import small_run
from workers.data.held_out import hold_out

METHODS = ("linear", "ewc")
TASKS = {"one": ["ant", "bee"], "two": ["cat", "dog"]}


class Animals:
    """A data set of class folders, its card, and runs with tasks on its classes."""

    def __init__(self, folder: Path, train: int = 12, side: int = 16):
        self.folder = folder
        self.raw = folder / "raw"
        self.train = train
        self.side = side

    def draw(self, name: str, count: int | None = None, first: int = 0) -> None:
        """Write noise images of a class; the pixels depend only on class, split and number."""
        for split, number in (("train", count or self.train), ("test", 4)):
            target = self.raw / split / name
            target.mkdir(parents=True, exist_ok=True)
            for index in range(first, first + number):
                draws = np.random.default_rng([index, *f"{split}{name}".encode()])
                pixels = draws.integers(0, 256, (self.side, self.side, 3), np.uint8)
                Image.fromarray(pixels).save(target / f"{index:04d}.png")

    def load(
        self,
        tasks: Mapping[str, Sequence[str]],
        classes: Sequence[str],
        storage: str = "storage",
        card: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> pipeline.Experiment:
        """Return an experiment with `tasks` on a card with `classes`, which may be more classes."""
        path = self.folder / "animals.yaml"
        source = {"format": "folder", "path": str(self.raw)}
        body = {"name": "animals", "licence": "none", "classes": list(classes), "source": source}
        path.write_text(yaml.safe_dump(body | dict(card or {})))
        entries = [
            {"name": name, "card": str(path), "classes": list(of)} for name, of in tasks.items()
        ]
        config = small_run.make_body(self.folder, {}, **{"methods": METHODS, **changes})
        config["stream"]["tasks"] = entries
        config["storage"] = str(self.folder / storage)
        return pipeline.load(config)


def states(experiment: pipeline.Experiment) -> dict[str, str]:
    """Return the state of each stage in the last run, such as `done` (computed) or `reused`."""
    rows = experiment.status()
    return dict(zip(rows["id"], rows["state"], strict=True))


def contents(animals: Animals, storage: str, task: str) -> dict[str, Any]:
    """Return the results of the stages of a task: digests of states, losses, counts."""
    of_stages = small_run.results(animals.folder / storage)
    return {stage: body for stage, body in of_stages.items() if f"/{task}/" in stage}


@pytest.fixture
def animals(tmp_path: Path, quick: None) -> Animals:
    made = Animals(tmp_path)
    for name in ("ant", "bee", "cat", "dog"):
        made.draw(name)
    return made


# ---- stages that run again -----------------------------------------------------------------------
def test_new_classes_run_only_their_own_task(
    animals: Animals, capsys: pytest.CaptureFixture[str]
) -> None:
    animals.load(TASKS, ["ant", "bee", "cat", "dog"]).run(quiet=True)
    for name in ("bat", "eel"):  # between the other classes in sorted order
        animals.draw(name)
    grown = animals.load(
        {**TASKS, "three": ["bat", "eel"]}, ["ant", "bat", "bee", "cat", "dog", "eel"]
    )
    assert not isinstance(grown.source, str)
    path = small_run.write_config(animals.folder / "config.yaml", grown.source)
    assert cli.main(["plan", path]) == 0
    output = capsys.readouterr().out
    assert "other files than before: bat (new, 16 files), eel (new, 16 files)\n" in output
    plan = grown.plan().set_index("stage")
    waiting = plan[plan["reason"] == "unknown until ingest"].index
    assert {*plan.index} - {*waiting} == {"data/animals", "backbone"}
    assert (plan["status"][waiting] == "miss").all(), "an unknown stage must not be a hit"
    grown.run(quiet=True)
    done = {stage for stage, state in states(grown).items() if state == "done"}
    assert done == {
        "data/animals",
        "report",
        *(f"linear/three/{step}" for step in ("train", "evaluate")),
        *(f"ewc/three/{step}" for step in ("train", "importance", "evaluate")),
    }
    assert (grown.plan()["status"] == "hit").all()


def test_new_images_rerun_their_task_and_later_chain_tasks(animals: Animals) -> None:
    classes = ["ant", "bee", "cat", "dog"]
    animals.load(TASKS, classes).run(quiet=True)
    animals.draw("dog", 3, first=100)
    grown = animals.load(TASKS, classes)
    grown.run(quiet=True)
    done = {stage for stage, state in states(grown).items() if state == "done"}
    assert {stage.partition("/")[2].partition("/")[0] for stage in done if "/" in stage} == {
        "animals",
        "two",
    }
    account = small_run.artifact(animals.folder / "storage", "data/animals", "account.json")
    assert "since the last ingest: 7 images added, 0 changed" in account.read_text()
    animals.draw("ant", 3, first=100)
    grown.run(quiet=True)
    reused = {stage for stage, state in states(grown).items() if state == "reused"}
    assert reused == {"backbone", "linear/two/train"}, "in a star, the other task must be reused"


@pytest.mark.slow
def test_corrected_label_reruns_both_affected_tasks(animals: Animals) -> None:
    tasks = {"one": ["ant", "bee"], "two": ["cat", "dog"], "three": ["eel", "fox"]}
    for name in ("eel", "fox"):
        animals.draw(name)
    experiment = animals.load(tasks, [name for of in tasks.values() for name in of])
    experiment.run(quiet=True)
    animals.raw.joinpath("train/ant/0000.png").rename(animals.raw / "train" / "cat" / "0999.png")
    experiment.run(quiet=True)
    trained = {stage for stage, state in states(experiment).items() if state == "done"}
    assert {"linear/one/train", "linear/two/train"} <= trained
    assert "linear/three/train" not in trained


def test_results_stay_valid_without_images_and_shards(animals: Animals) -> None:
    experiment = animals.load(TASKS, ["ant", "bee", "cat", "dog"])
    experiment.run(quiet=True)
    plan = experiment.plan().set_index("stage")
    shutil.rmtree(animals.raw)
    shutil.rmtree(animals.folder / "storage" / "stages" / plan["key"]["data/animals"])
    again = experiment.plan().set_index("stage")
    assert again["key"].equals(plan["key"])
    assert {*again.index[again["status"] == "miss"]} == set()
    before = small_run.attempts(animals.folder / "storage")
    experiment.run(quiet=True)
    assert small_run.attempts(animals.folder / "storage") == before


def test_failed_ingest_does_not_stop_other_data_sets(animals: Animals, tmp_path: Path) -> None:
    broken = small_run.make_card(tmp_path, "a", "23")
    for path in tmp_path.glob("raw/a/*/*/*.png"):
        path.write_bytes(b"no image")
    body = animals.load(TASKS, ["ant", "bee", "cat", "dog"])
    config = yaml.safe_load(yaml.safe_dump(body.source))
    config["stream"]["tasks"].append({"name": "bad", "card": broken})
    experiment = pipeline.load(config)
    with pytest.raises(pipeline.UserError, match="data/a failed"):
        experiment.run(quiet=True)
    after = states(experiment)
    assert after["linear/two/evaluate"] == "done"
    assert after["linear/bad/train"] == "blocked"


def test_a_task_of_one_class_is_refused_with_two_remedies(animals: Animals) -> None:
    tasks = {**TASKS, "two": ["cat"]}
    experiment = animals.load(tasks, ["ant", "bee", "cat", "dog"])
    with pytest.raises(pipeline.UserError, match=r"one class, 'cat', .* or set stream\.scenario"):
        experiment.plan()
    together = animals.load(
        tasks, ["ant", "bee", "cat", "dog"], methods=["finetune"], stream={"scenario": "class"}
    )
    assert "finetune/two/train" in set(together.plan()["stage"])


# ---- the same images next to other classes -------------------------------------------------------
@pytest.fixture(scope="module", params=[150, pytest.param(900, marks=pytest.mark.slow)])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Animals, dict[str, Any]]:
    """Return a data set of 3 or 20 MB with one trained task, and the results of that task.

    It is larger than 2 MiB, so that its shards are read in several ranges.
    """
    made = Animals(tmp_path_factory.mktemp("animals"), train=request.param, side=64)
    for name in TASKS["one"]:
        made.draw(name)
    made.load({"one": TASKS["one"]}, TASKS["one"]).run(quiet=True)
    num_bytes = sum(path.stat().st_size for path in made.raw.rglob("train/*/*.png"))
    assert num_bytes > request.param * 22e3  # more than 2 MiB in any case
    return made, contents(made, "storage", "one")


@pytest.mark.slow
def test_shard_size_does_not_change_training_results(alone: Any) -> None:
    animals, expected = alone
    animals.load({"one": TASKS["one"]}, TASKS["one"], "again", card={"shard_images": 7}).run(
        quiet=True
    )
    assert contents(animals, "again", "one") == expected


@pytest.mark.slow
def test_class_outside_the_task_leaves_its_results_bit_identical(alone: Any) -> None:
    animals, expected = alone
    animals.draw("asp", 50)
    for storage in ("beside", "storage"):  # ingested together, or appended later
        grown = animals.load({"one": TASKS["one"]}, ["ant", "asp", "bee"], storage)
        grown.run(quiet=True)
        assert contents(animals, storage, "one") == expected
    assert states(grown)["linear/one/train"] == "reused"


def test_digests_of_classes_ignore_other_classes_and_shards() -> None:
    rows = [
        {"split": split, "class": name, "key": f"{split}/{name}/{n}", "sha256": f"{n}{name}"}
        for split in ("train", "test")
        for name in ("ant", "bee")
        for n in range(3)
    ]
    places = [{"shard": f"{n % 2}.tar", "offset": n} for n in range(len(rows))]
    index = pa.Table.from_pylist([row | place for row, place in zip(rows, places, strict=True)])
    digests = digest_classes(index, is_in_place=False)
    assert {split: set(names) for split, names in digests.items()} == {
        "train": {"ant", "bee"},
        "test": {"ant", "bee"},
    }
    mixed = index.take(pa.array([5, 0, 2, 1, 9, 4, 3, 6, 11, 8, 7, 10]))
    assert digest_classes(mixed, is_in_place=False) == digests
    one = index.slice(0, 3)
    assert digest_classes(one, is_in_place=False) == {"train": {"ant": digests["train"]["ant"]}}
    assert digest_classes(index.slice(0, 2), is_in_place=False) != digest_classes(one, False)
    assert digest_classes(one, is_in_place=True) != digest_classes(one, is_in_place=False)
    for column in ("sha256", "key"):  # another image, another name
        place = one.schema.get_field_index(column)
        changed = one.set_column(place, column, [["x", "y", "z"]])
        assert digest_classes(changed, False) != digest_classes(one, False), column
    assert digest_classes(one, False, "other pixels") != digest_classes(one, False)


# ---- held-out images -----------------------------------------------------------------------------
def table_of(count: int) -> pa.Table:
    draws = np.random.default_rng(0)
    digests = [draws.bytes(32).hex() for _ in range(count)]
    keys = [f"train/ant/{number}" for number in range(count)]
    return pa.table({"key": keys, "class": ["ant"] * count, "sha256": digests})


@pytest.mark.parametrize("added", [1, 100, 1000])
def test_threshold_hold_out_never_moves_existing_images(added: int) -> None:
    everything = table_of(100 + added)
    before = hold_out(everything.slice(0, 100), 0.2, "threshold")
    after = hold_out(everything, 0.2, "threshold")
    for part, grown in zip(before, after, strict=True):
        assert set(part["key"].to_pylist()) <= set(grown["key"].to_pylist())


def test_rank_hold_out_moves_existing_images_when_images_are_added() -> None:
    everything = table_of(200)
    _, before = hold_out(everything.slice(0, 100), 0.2)
    train, _ = hold_out(everything, 0.2)
    assert set(before["key"].to_pylist()) & set(train["key"].to_pylist())


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_a_threshold_holds_out_its_share_on_average(fraction: float) -> None:
    train, val = hold_out(table_of(20_000), fraction, "threshold")
    assert len(train) + len(val) == 20_000
    assert (
        abs(len(val) / 20_000 - fraction) < 4 * (fraction * (1 - fraction) / 20_000) ** 0.5 + 1e-9
    )


def test_held_out_test_images_keep_their_split_when_data_grows(animals: Animals) -> None:
    shutil.rmtree(animals.raw / "test")
    for name in ("ant", "bee", "cat", "dog"):
        shutil.rmtree(animals.raw / "train" / name)
        animals.raw.joinpath(name).mkdir()
    source = {"format": "folder", "path": str(animals.raw), "splits": {"train": "."}}
    card = {"test_fraction": 0.3, "hold_out": "threshold", "source": source}

    def sides() -> dict[str, set[str]]:
        experiment = animals.load(TASKS, ["ant", "bee", "cat", "dog"], card=card)
        experiment.ingest(quiet=True)
        key = experiment.plan().set_index("stage")["key"]["data/animals"]
        stage = animals.folder / "storage" / "stages" / key
        attempt = json.loads((stage / "manifest.json").read_text())["attempt"]
        rows = pq.read_table(stage / attempt / "index.parquet").to_pylist()
        return {
            split: {row["sha256"] for row in rows if row["split"] == split}
            for split in ("train", "test")
        }

    for number, name in enumerate(("ant", "bee", "cat", "dog")):
        for image in range(30):
            pixels = np.random.default_rng([number, image]).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(animals.raw / name / f"{image}.png")
    before = sides()
    assert 0.1 < len(before["test"]) / 120 < 0.5
    for image in range(30, 80):
        pixels = np.random.default_rng([9, image]).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(animals.raw / "ant" / f"{image}.png")
    after = sides()
    assert before["train"] <= after["train"]
    assert before["test"] <= after["test"]
