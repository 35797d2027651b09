"""Tests of `add`: it adds classes and images to a run and trains only the stages that change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline import cli
from pipeline.config.yaml_files import parse_yaml
from tests import small_run
from tests.growing_run import TASKS, GrowingRun
from workers.methods import METHODS


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[GrowingRun, Path]:
    """A finished run, and a copy of the folder."""
    from pipeline.report import page

    folder = tmp_path_factory.mktemp("growing")
    made = GrowingRun(folder / "work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "build_run_report", lambda *_: {"report.html": b"a page"})
        assert cli.main(["run", made.config]) == 0
    shutil.copytree(made.folder, folder / "saved")
    return made, folder / "saved"


@pytest.fixture
def run(
    finished: tuple[GrowingRun, Path], quick: None, monkeypatch: pytest.MonkeyPatch
) -> GrowingRun:
    made, saved = finished
    shutil.rmtree(made.folder)
    shutil.copytree(saved, made.folder)
    monkeypatch.chdir(made.folder)
    return made


def add(run: GrowingRun, *words: str) -> int:
    return cli.main(["add", run.config, *words])


def tasks_of(run: GrowingRun) -> list[Any]:
    entries: list[Any] = parse_yaml(run.text, run.config)["stream"]["tasks"]
    return entries


def computed(run: GrowingRun) -> set[str]:
    """Return the stages that the last run computed."""
    rows = pipeline.load(run.config).status()
    return {row.id for row in rows.itertuples() if row.state == "done"}


def trained(run: GrowingRun) -> set[str]:
    return {stage for stage in computed(run) if stage.endswith("/train")}


def scratch(run: GrowingRun) -> Mapping[str, Any]:
    """Run the same config and data in an empty storage, and return the results."""
    path = run.folder / "scratch.yaml"
    path.write_text(run.text.replace(str(run.storage), str(run.folder / "scratch")))
    assert cli.main(["run", str(path)]) == 0
    return small_run.results(run.folder / "scratch")


# ---- classes -------------------------------------------------------------------------------------
def test_new_classes_become_a_task(run: GrowingRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.text
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    output = capsys.readouterr().out
    assert "raw: 2 new classes ('4', '5')\n" in output
    assert "linear trains digits-2 (each by itself)\n" in output
    assert "ewc trains digits-2 (a chain: each task continues from the previous one)\n" in output
    assert tasks_of(run)[2] == {"name": "digits-2", "card": "card.yaml", "classes": ["4", "5"]}
    lines = run.text.splitlines()
    assert [line for line in before.splitlines() if line not in lines] == []
    assert "num_classes: 6  # another number is an error\n" in run.card.read_text()
    assert trained(run) == {"linear/digits-2/train", "ewc/digits-2/train"}
    assert small_run.results(run.storage) == scratch(run)


def test_repeated_add_changes_nothing(run: GrowingRun) -> None:
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    text, attempts = run.text, small_run.attempts(run.storage)
    assert add(run, "raw") == 0
    assert run.text == text
    assert small_run.attempts(run.storage) == attempts


def test_data_in_another_folder_gets_a_new_card(run: GrowingRun) -> None:
    for digit in "67":
        run.put(run.folder / "more", digit)
    before = run.card.read_text()
    assert add(run, "more") == 0
    name = "config-more-card.yaml"
    assert tasks_of(run)[2] == {"name": "more", "card": name, "classes": ["6", "7"]}
    assert parse_yaml((run.folder / name).read_text(), name)["source"]["path"] == "more"
    assert run.card.read_text() == before
    assert trained(run) == {"linear/more/train", "ewc/more/train"}
    assert add(run, "more") == 0
    assert len(tasks_of(run)) == 3


def test_single_new_class_is_refused_in_scenario_task(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.put(run.raw, "8")
    before = run.text
    assert add(run, "raw") == 2
    error = capsys.readouterr().err
    assert "one new class, '8', is not a task in scenario `task`" in error
    assert "--into NAME, one of 'one', 'two'" in error
    assert "stream.scenario to class" in error
    assert run.text == before
    assert add(run, "raw", "--into", "two") == 0
    assert tasks_of(run)[1]["classes"] == ["2", "3", "8"]
    assert trained(run) == {"linear/two/train", "ewc/two/train"}


def test_single_new_class_becomes_a_task_in_scenario_class(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = GrowingRun(tmp_path, scenario="class", methods=["finetune"])
    assert cli.main(["run", run.config]) == 0
    run.put(run.raw, "8")
    assert add(run, "raw") == 0
    assert tasks_of(run)[2]["classes"] == ["8"]
    assert trained(run) == {"finetune/digits-2/train"}


def test_split_classes_are_written_into_config(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = "    - {card: card.yaml, split: 2, name: part}  # in two"
    run = GrowingRun(tmp_path, tasks=tasks, digits="2357", methods=["linear"])
    assert cli.main(["run", run.config]) == 0
    for digit in "14":  # sorts between the other classes
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    assert tasks_of(run) == [
        {"name": "part-0", "card": "card.yaml", "classes": ["2", "3"]},
        {"name": "part-1", "card": "card.yaml", "classes": ["5", "7"]},
        {"name": "digits-2", "card": "card.yaml", "classes": ["1", "4"]},
    ]
    assert trained(run) == {"linear/digits-2/train"}


def test_task_of_whole_card_keeps_its_classes(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = GrowingRun(tmp_path, tasks="    - card.yaml", methods=["linear"])
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 2, "the classes of the task are not recorded yet"
    for folder in run.raw.glob("*/[45]"):
        shutil.rmtree(folder)
    assert cli.main(["run", run.config]) == 0
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    first, second = tasks_of(run)
    assert first == {"name": "digits", "card": "card.yaml", "classes": ["0", "1", "2", "3"]}
    assert second["classes"] == ["4", "5"]
    assert trained(run) == {"linear/digits-1/train"}


def test_new_classes_are_appended_to_listed_classes_of_card(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = GrowingRun(tmp_path, classes="['3', '0', '2', '1']", methods=["linear"])
    run.card.write_text(run.card.read_text() + "class_order_seed: 1  # as in the paper\n")
    order = pipeline_order(run)
    assert cli.main(["run", run.config]) == 0
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    body = parse_yaml(run.card.read_text(), "card")
    assert body["classes"] == [*order, "4", "5"]
    assert "class_order_seed" not in body
    assert body["num_classes"] == 6
    assert trained(run) == {"linear/digits-2/train"}


def pipeline_order(run: GrowingRun) -> list[str]:
    from pipeline.data import card_files

    return [*card_files.load_card_file(str(run.card)).order()]


# ---- images --------------------------------------------------------------------------------------
def test_new_images_in_source_retrain_their_task(run: GrowingRun) -> None:
    run.put(run.raw, "3", train=5, test=0, first=40)
    before = run.text
    assert add(run, "raw") == 0
    assert run.text == before
    assert trained(run) == {"linear/two/train", "ewc/two/train"}


def test_images_in_another_folder_require_the_as_option(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for digit in "23":
        run.put(run.folder / "june", digit, train=5, test=0, first=40)
    assert add(run, "june") == 2
    error = capsys.readouterr().err
    assert "can be read in two ways; give --as images if" in error
    assert "--as task if all of it is a task" in error
    assert add(run, "june", "--as", "images") == 0
    more = parse_yaml(run.card.read_text(), "card")["source"]["more"]
    assert more == [{"path": "june", "splits": {"train": ["train"]}}]
    assert trained(run) == {"linear/two/train", "ewc/two/train"}
    account = small_run.artifact(run.storage, "data/digits", "account.json").read_text()
    assert "since the last ingest: 10 images added, 0 changed" in account
    card = run.card.read_text()
    assert add(run, "june", "--as", "images") == 0
    assert run.card.read_text() == card


def test_images_in_another_folder_can_become_a_task(run: GrowingRun) -> None:
    for digit in "23":
        run.put(run.folder / "june", digit, first=40)
    assert add(run, "june", "--as", "task", "--name", "later") == 0
    assert tasks_of(run)[2]["name"] == "later"
    assert trained(run) == {"linear/later/train", "ewc/later/train"}


def test_new_class_is_refused_with_as_images(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.put(run.folder / "june", "2", first=40)
    run.put(run.folder / "june", "7")
    assert add(run, "june", "--as", "images") == 2
    assert "has classes that no task has ('7')" in capsys.readouterr().err
    assert add(run, "june", "--as", "classes", "--into", "one") == 0
    assert tasks_of(run)[0]["classes"] == ["0", "1", "7"]


@pytest.mark.slow
def test_classes_in_another_folder_join_an_existing_task(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for digit in "67":
        run.put(run.folder / "more", digit)
    before = run.text
    assert add(run, "more", "--into", "two", "--as", "task") == 2
    assert "give one of the two" in capsys.readouterr().err
    assert add(run, "more", "--into", "two", "--name", "x") == 2
    assert "give one of the two" in capsys.readouterr().err
    assert run.text == before
    assert add(run, "more", "--into", "two") == 0
    assert [task["classes"] for task in tasks_of(run)] == [["0", "1"], ["2", "3", "6", "7"]]
    assert trained(run) == {"linear/two/train", "ewc/two/train"}


def test_new_task_may_combine_known_classes_with_one_new_class(run: GrowingRun) -> None:
    for digit in "016":
        run.put(run.folder / "more", digit, first=40)
    assert add(run, "more", "--as", "task") == 0
    assert tasks_of(run)[2]["classes"] == ["0", "1", "6"]


def test_ingested_classes_without_task_are_named_and_can_be_added(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.card.write_text(re.sub("num_classes.*", "", run.card.read_text()))
    for digit in "45":
        run.put(run.raw, digit)
    assert cli.main(["run", run.config]) == 0
    before = run.text
    assert add(run, "raw") == 2
    captured = capsys.readouterr()
    assert "'4', '5' are not new and in no task: `--as classes` takes them in" in captured.out
    assert "nothing was added: '4', '5' are in no task" in captured.err
    assert run.text == before
    run.put(run.raw, "3", train=5, test=0, first=40)
    assert add(run, "raw") == 0, "new images were added"
    assert add(run, "raw", "--as", "classes") == 0
    assert tasks_of(run)[2]["classes"] == ["4", "5"]


@pytest.mark.parametrize(
    ("data", "message"),
    [("raw/trian", "does not exist"), ("raw/june", "which reads no image there")],
)
def test_unread_folder_inside_a_source_is_refused(
    run: GrowingRun, data: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.put(run.raw / "june", "4")
    run.put(run.raw, "5")
    before = run.text
    assert add(run, data, "--into", "two") == 2
    assert message in capsys.readouterr().err
    assert run.text == before
    assert add(run, "raw/train/5", "--into", "two") == 0


@pytest.mark.slow
def test_removed_class_keeps_its_position_in_card(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.card.write_text(run.card.read_text().replace("from_source", "['0', '1', '2', '3']"))
    run.put(run.raw, "4")
    assert add(run, "raw", "--into", "two") == 0
    assert cli.main(["remove", run.config, "--class", "3", "--yes"]) == 0
    for digit in "56":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    body = parse_yaml(run.card.read_text(), "card")
    assert body["classes"] == [*"0123456"]
    assert body["without_classes"] == ["3"]
    assert body["num_classes"] == 7


def test_repeated_add_completes_a_card_after_a_kill(run: GrowingRun) -> None:
    run.card.write_text(run.card.read_text().replace("from_source", "['0', '1', '2', '3']"))
    before = run.card.read_text()
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    after = run.card.read_text()
    run.card.write_text(before)
    assert add(run, "raw") == 0
    assert run.card.read_text() == after


def test_add_keeps_comments_in_config_and_card(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = """\
    - card: card.yaml
      # all of it
      role: base  # learned first
"""
    listed = "\n  - '0'  # zero\n  - '1'\n  # and\n  - '2'  # two"
    run = GrowingRun(tmp_path, tasks=tasks, digits="012", classes=listed, methods=["linear"])
    assert cli.main(["run", run.config]) == 0
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    assert "- card: card.yaml\n      # all of it\n      role: base  # learned first\n" in run.text
    assert f"classes: {listed}\n  - '4'\n  - '5'\n" in run.card.read_text()


def test_new_card_is_written_beside_target_of_linked_config(run: GrowingRun) -> None:
    (run.folder / "links").mkdir()
    link = run.folder / "links" / "link.yaml"
    link.symlink_to("../config.yaml")
    for digit in "67":
        run.put(run.folder / "more", digit)
    assert cli.main(["add", str(link), "more"]) == 0
    assert link.is_symlink()
    assert (run.folder / tasks_of(run)[2]["card"]).exists()


@pytest.mark.slow
def test_add_works_after_removal_of_classes_and_images(run: GrowingRun) -> None:
    run.put(run.raw, "4")
    assert add(run, "raw", "--into", "two") == 0
    assert cli.main(["remove", run.config, "--class", "3", "--yes"]) == 0
    name = sorted((run.raw / "train" / "2").iterdir())[0].name
    lines = run.folder / "list.txt"
    lines.write_bytes(f"\ufefftrain/2/{name}\r\n\r\ntrain/2/{name}\r\n".encode())
    assert cli.main(["remove", run.config, "--images", str(lines), "--yes"]) == 0
    assert (run.folder / "card-without-images.txt").read_text() == f"train/2/{name}\n"
    for digit in "56":
        run.put(run.raw, digit)
    assert add(run, "raw") == 0
    assert [task["classes"] for task in tasks_of(run)] == [["0", "1"], ["2", "4"], ["5", "6"]]


def test_a_folder_that_holds_a_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = GrowingRun(tmp_path)
    before = run.card.read_text()
    assert add(run, ".", "--as", "images") == 2
    assert "holds the source of card 'digits', which the run has" in capsys.readouterr().err
    assert run.card.read_text() == before


def test_class_names_match_across_unicode_forms(run: GrowingRun) -> None:
    for split in ("train", "test"):
        (run.raw / split / "3").rename(run.raw / split / "caf\u00e9")
    Path(run.config).write_text(run.text.replace("'3'", "cafe\u0301"))
    assert cli.main(["run", run.config]) == 0
    run.put(run.folder / "june", "3", first=40)
    for split in ("train", "test"):
        (run.folder / "june" / split / "3").rename(run.folder / "june" / split / "caf\u00e9")
    assert add(run, "june", "--as", "images") == 0
    assert trained(run) == {"linear/two/train", "ewc/two/train"}


def test_validation_images_in_another_folder_are_read(run: GrowingRun) -> None:
    run.put(run.folder / "june", "2", train=6, test=2, first=40)
    (run.folder / "june" / "train" / "2").joinpath("x").mkdir()
    images = sorted((run.folder / "june" / "train" / "2").glob("*.png"))
    (run.folder / "june" / "val" / "2").mkdir(parents=True)
    for path in images[:2]:
        path.rename(run.folder / "june" / "val" / "2" / path.name)
    (run.folder / "june" / "train" / "2" / "x").rmdir()
    assert add(run, "june", "--as", "images") == 0
    manifest = small_run.manifests(run.storage)["data/digits"]
    assert manifest["counts"] == {"train": 48 + 4, "val": 2, "test": 16 + 2}


def test_new_classes_without_test_images_are_named(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.put(run.raw, "4", test=0)
    run.put(run.raw, "5")
    assert add(run, "raw") == 0
    text = "'4': no test images, so that the accuracy says nothing about them\n"
    assert text in capsys.readouterr().out


# ---- refused changes -----------------------------------------------------------------------------
def test_invalid_change_of_config_is_undone(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for digit in "45":
        run.put(run.raw, digit)
    before = run.text, run.card.read_text()
    assert add(run, "raw", "--name", "two") == 2
    assert "two tasks are called 'two'" in capsys.readouterr().err
    assert (run.text, run.card.read_text()) == before
    for digit in "67":
        run.put(run.folder / "more", digit)
    assert add(run, "more", "--name", "two") == 2
    assert not [*run.folder.glob("config-*")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["raw", "--into", "tow"], "did you mean 'two'"),
        (["nowhere"], "nowhere"),
        (["raw", "--method", "ewc"], "give one with --model"),
        (["raw", "--max-drop", "-1", "--model", "m", "--method", "ewc"], "--max-drop"),
        (["raw", "--max-drop", "2"], "give one with --model"),
        (["raw", "--name", "later"], "has no new class"),
    ],
)
def test_invalid_arguments_give_one_line_errors(
    run: GrowingRun, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.text
    assert add(run, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert run.text == before


def test_new_classes_are_refused_if_config_inherits_its_tasks(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    child = run.folder / "child.yaml"
    child.write_text("extends: config.yaml\n")
    for digit in "45":
        run.put(run.raw, digit)
    assert cli.main(["add", str(child), "raw"]) == 2
    assert "stream.tasks is not in this file" in capsys.readouterr().err
    for folder in run.raw.glob("*/[45]"):
        shutil.rmtree(folder)
    run.put(run.raw, "3", train=5, test=0, first=40)
    assert cli.main(["add", str(child), "raw"]) == 0, (
        "new images alone must not need a change of the config"
    )
    assert child.read_text() == "extends: config.yaml\n"
    assert TASKS.splitlines()[0] in run.text


@pytest.mark.parametrize("key", ["counts: {train: 48, test: 16}", "content: abc"])
def test_a_card_that_pins_its_data_cannot_grow(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = GrowingRun(tmp_path, methods=["linear"])
    run.card.write_text(run.card.read_text() + key + "\n")
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw") == 2
    assert "says what must be found" in capsys.readouterr().err


def test_growing_page_lists_each_method_in_its_row() -> None:
    page = Path(__file__).parent.parent / "docs" / "growing.md"
    rows = [
        line
        for line in page.read_text().splitlines()
        if re.match(r"\| (star|chain|all) ?[^|]*: `", line)
    ]
    star, chain, rehearsal, cumulative = (set(re.findall(r"`(\w+)`", row)) for row in rows)
    expected: dict[str, set[str]] = {
        "star": set(),
        "chain": set(),
        "rehearsal": set(),
        "all": set(),
    }
    for name, method in METHODS.items():
        kind = "star"
        if method.carries:
            kind = "rehearsal" if method.reads == "seen" else "chain"
        elif method.trains_on == "seen":
            kind = "all"
        expected[kind].add(name)
    assert [star, chain, rehearsal, cumulative] == [*expected.values()]


# ---- the served model ----------------------------------------------------------------------------
def test_model_folder_serves_new_task_after_add(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(run, "raw", "--model", "model", "--method", "ewc") == 0
    assert "model: version 1 serves one, two\n" in capsys.readouterr().out
    for digit in "45":
        run.put(run.raw, digit)
    assert add(run, "raw", "--model", "model") == 0
    assert "model: version 2 serves one, two, digits-2\n" in capsys.readouterr().out
    assert add(run, "raw", "--model", "model") == 0
    assert "model: serves one, two, digits-2, as before\n" in capsys.readouterr().out
    model = pipeline.open_model("model")
    assert model.tasks == ["one", "two", "digits-2"]
    assert cli.main(["tasks", "model", "rollback"]) == 0
    assert pipeline.open_model("model").tasks == ["one", "two"]


def test_a_model_that_gets_worse_is_not_published(
    run: GrowingRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.growing import publishing

    assert add(run, "raw", "--model", "model", "--method", "ewc") == 0
    for digit in "45":
        run.put(run.raw, digit)
    accuracies = iter([{"one": 0.9, "two": 0.8}, {"one": 0.88, "two": 0.81}])
    monkeypatch.setattr(publishing, "measure_accuracies", lambda *_: next(accuracies))
    assert add(run, "raw", "--model", "model") == 2
    error = capsys.readouterr().err
    assert "model keeps its version" in error
    assert "lose more than 1 points of accuracy on their test images (one by 2.0)" in error
    assert "`--max-drop 2.1` publishes it" in error
    assert pipeline.open_model("model").tasks == ["one", "two"]
    accuracies = iter([{"one": 0.9, "two": 0.8}, {"one": 0.88, "two": 0.81}])
    assert add(run, "raw", "--model", "model", "--max-drop", "2.1") == 0
    assert pipeline.open_model("model").tasks == ["one", "two", "digits-2"]


def test_publishing_does_not_measure_unchanged_star_tasks(
    run: GrowingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.growing import publishing

    def measure(*_: object) -> dict[str, float]:
        raise AssertionError("nothing can have changed their answers")

    monkeypatch.setattr(publishing, "measure_accuracies", measure)
    for digits in ("", "45"):
        for digit in digits:
            run.put(run.raw, digit)
        assert add(run, "raw", "--model", "model", "--method", "linear") == 0
    assert pipeline.open_model("model").tasks == ["one", "two", "digits-2"]


def test_accuracy_losses_are_measured_on_current_test_images(run: GrowingRun) -> None:
    from pipeline.app import runs as app
    from pipeline.app.prepared import read_run_tables
    from pipeline.growing import publishing
    from pipeline.results.bundles import build_run_bundle

    run.put(run.raw, "0", train=0, test=3, first=40)  # an accuracy of 0.5 would hide an error
    assert cli.main(["run", run.config]) == 0
    prepared = app.prepare(run.config)
    bundle = build_run_bundle(prepared.graph, prepared.store, "ewc")
    job = publishing.find_last_evaluation(prepared.graph, "ewc")
    matrix = read_run_tables(prepared)[""].matrix("ewc")
    accuracies = publishing.measure_accuracies(bundle, job, bundle.tasks)
    assert list(accuracies.values()) == matrix.rates[-1].tolist()
    assert accuracies["one"] != 0.5
    assert publishing.find_losses(bundle, bundle, job) == {}


def test_models_with_other_preprocessing_are_not_compared(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(run, "raw", "--model", "model", "--method", "ewc") == 0
    Path(run.config).write_text(run.text.replace("img_size: 16", "img_size: 24"))
    assert add(run, "raw", "--model", "model") == 2
    assert "model was made with another preprocessing" in capsys.readouterr().err


@pytest.mark.slow
def test_only_common_classes_are_compared(run: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.growing import publishing

    assert add(run, "raw", "--model", "model", "--method", "ewc") == 0
    text = run.text.replace("['2', '3']", "['3', '0']").replace("['0', '1']", "['1', '2']")
    Path(run.config).write_text(text)
    measured: list[list[tuple[str, ...]]] = []

    def measure(bundle: Any, job: Any, tasks: Any) -> dict[str, float]:
        measured.append([task.classes for task in tasks])
        return {task.name: 0.5 for task in tasks}

    monkeypatch.setattr(publishing, "measure_accuracies", measure)
    assert add(run, "raw", "--model", "model") == 0
    assert measured == [[("0", "1"), ("2", "3")], [("1",), ("3",)]]


def test_a_model_of_another_run_is_refused(
    run: GrowingRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert add(run, "raw", "--model", "model", "--method", "ewc") == 0
    other = GrowingRun(tmp_path / "other", methods=["linear"])
    assert cli.main(["add", other.config, str(other.raw), "--model", "model"]) == 2
    assert "model serves method 'ewc', and run 'small' has linear" in capsys.readouterr().err
    text = run.text
    Path(run.config).write_text(text.replace("    - {name: two, card: card.yaml, classes", "#"))
    assert add(run, "raw", "--model", "model") == 2
    assert "model serves two, which the run does not have" in capsys.readouterr().err
    assert pipeline.open_model("model").tasks == ["one", "two"]


def test_classes_cannot_join_a_pretrained_task(
    run: GrowingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number of classes is that of the classifier's outputs."""
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("role: base", "role: pretrained"))
    before = run.text
    for digit in "67":
        run.put(run.folder / "more", digit)
    assert add(run, "more", "--into", "one") == 2
    assert "task 'one' has role `pretrained`" in capsys.readouterr().err
    assert run.text == before
