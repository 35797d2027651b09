"""Tests of result files: round trips, refusal of invalid files, and the commands."""

from __future__ import annotations

import copy
import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pytest

from pipeline import cli
from pipeline.graph.store import Store
from pipeline.report.comparison import compare_runs
from pipeline.report.comparison_page import render_comparison_page
from pipeline.results.metrics import metrics_for
from pipeline.results.results_file import MAX_BYTES, encode_results, read_results
from pipeline.results.tables import RunTables
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")

TASKS = [task["name"] for task in fake_run.TASKS]
MATRIX: list[list[Any]] = [
    [0.9, None, None, None],
    [0.8, 0.9, None, None],
    [0.7, 0.8, 0.9, None],
    [0.5] * 4,
]


@pytest.fixture
def run(storage: str) -> RunTables:
    return RunTables.load(storage, fake_run.record("tiny"))


@pytest.fixture
def body(run: RunTables) -> dict[str, Any]:
    """Return the content of the run's file, without its digest."""
    content: dict[str, Any] = json.loads(encode_results([run]))
    del content["sha256"]
    return content


def write_json(folder: Path, body: Any, name: str = "lab.json") -> str:
    path = folder / name
    path.write_text(json.dumps(body))
    return str(path)


def write_csv(folder: Path, names: list[str], rows: list[list[Any]]) -> str:
    path = folder / "peer.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["after", *names])
        for name, row in zip(names, rows, strict=False):
            writer.writerow([name, *("" if value is None else value for value in row)])
    return str(path)


# ---- results as JSON -----------------------------------------------------------------------------
def test_result_file_round_trips_matrices_metrics_and_sizes(run: RunTables, tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_bytes(encode_results([run]))
    (read,) = read_results(str(path))
    assert read.labels == run.labels
    assert read.environment() == run.environment()
    for label in run.labels:
        np.testing.assert_array_equal(read.matrix(label).correct, run.matrix(label).correct)
        np.testing.assert_array_equal(read.matrix(label).chance, run.matrix(label).chance)
        assert read.matrix(label).final == run.matrix(label).final
        assert read.method(label) == run.method(label)
        for row, read_row in zip(run.sizes(label), read.sizes(label), strict=True):
            assert read_row == row
    comparison = compare_runs([run, read])
    for metric in metrics_for("comparison"):
        difference = comparison.entries[-1].difference(
            comparison.entries[len(run.labels) - 1], metric.name
        )
        assert difference.mean == 0, metric.name
    assert [group.name for group in comparison.groups][1] == "tiny [lab.json]"
    assert comparison.setting_rows() == []


def test_result_file_contains_no_local_paths_or_secrets(run: RunTables) -> None:
    record = copy.deepcopy(run.record)
    record["config"] |= {
        "storage": "/home/somebody/storage",
        "tracking": {"uri": "http://host"},
        "backbone": {"weights": "s3://user:secret@bucket/w"},
    }
    text = encode_results([RunTables(run.storage, record, run.artifacts)]).decode()
    for word in ("/home/somebody", "http://host", "secret"):
        assert word not in text


def test_metrics_stored_in_a_result_file_are_ignored(body: dict[str, Any], tmp_path: Path) -> None:
    honest = read_results(write_json(tmp_path, body))[0].matrix("meat").final
    for method in body["runs"][0]["methods"]:
        method["metrics"] = dict.fromkeys(method["metrics"], 1.0)
        method["accuracy"] = [[1.0] * 4] * 4
        method["chance"] = "anything"
    assert read_results(write_json(tmp_path, body))[0].matrix("meat").final == honest


def test_seeds_of_two_files_are_paired(body: dict[str, Any], tmp_path: Path) -> None:
    second = copy.deepcopy(body["runs"][0]) | {"name": "tiny-seed-1", "seed": 1}
    body["runs"].append(second)
    paths = [write_json(tmp_path, body, name) for name in ("a.json", "b.json")]
    comparison = compare_runs([run for path in paths for run in read_results(path)])
    assert [len(group.runs) for group in comparison.groups] == [2, 2]
    assert len({group.name for group in comparison.groups}) == 2
    last = comparison.entries[-1]
    base = comparison.base(last)
    assert base is not None
    assert last.difference(base, "average_accuracy").paired


def test_different_test_images_of_a_task_are_noted(body: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for name, digest in (("a", "1" * 64), ("b", "2" * 64)):
        body["runs"][0]["name"] = name
        body["runs"][0]["tasks"][1]["images_sha256"] = digest
        runs += read_results(write_json(tmp_path, body))
    assert "The images of birds are not the same in all runs." in compare_runs(runs).notes


Change = Callable[[dict[str, Any]], Any]


def _of_meat(**fields: Any) -> Change:
    return lambda body: body["runs"][0]["methods"][0].update(fields)


def _of_run(**fields: Any) -> Change:
    return lambda body: body["runs"][0].update(fields)


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda body: body.update(format="other"), "it holds no results (its `format` is not"),
        (lambda body: body.update(version=2), "its version is 2, this program reads 1"),
        (lambda body: body.update(sha256="0" * 64), "it was changed after it was written"),
        (lambda body: body.update(runs=[]), "runs is []"),
        (lambda body: body.update(runs=body["runs"] * 65), "runs is"),
        (lambda body: body.update(code="import os"), "code is not a known key"),
        (_of_run(name="../../escape"), "runs.0.name is '../../escape'"),
        (_of_run(seed=-1), "runs.0.seed"),
        (_of_run(config={"a": _deep(40)}), "it is nested more than 20 deep"),
        (_of_run(config=dict.fromkeys(map(str, range(20_000)), 1)), "more than 10000 settings"),
        (_of_run(tasks=[{"name": "a\x1b[2J"}]), "runs.0.tasks.0.name"),
        (_of_run(tasks=[{"name": "birds"}] * 2), "task 'birds' is there twice"),
        (_of_meat(label="finetune"), "method 'finetune' is there twice"),
        (_of_meat(tasks=["nowhere"]), "which are not tasks of the stream"),
        (_of_meat(tasks=TASKS[::-1]), "which are not tasks of the stream in its order"),
        (_of_meat(correct=[[1]]), "a matrix is not of 4 x 4"),
        (_of_meat(correct=[["1"] * 4] * 4), "correct.0.0"),
        (_of_meat(correct=[[True] * 4] * 4), "correct.0.0"),
        (_of_meat(correct=[[-1] * 4] * 4), "correct.0.0"),
        (_of_meat(correct=[[10**14] * 4] * 4), "more correct images than images"),
        (_of_meat(correct=[[None] * 4] * 4), "one count without the other"),
        (_of_meat(correct=[[0] * 4] * 4, total=[[0] * 4] * 4), "more correct images than images"),
        (_of_meat(correct=None, accuracy=None), "neither `correct` and `total` nor `accuracy`"),
        (_of_meat(correct=None, accuracy=[[1.5] * 4] * 4), "accuracy.0.0 is 1.5"),
        (_of_meat(sizes=[{"after": "nowhere"}]), "sizes are of 'nowhere', no task of it"),
        (_of_meat(sizes=[{"after": "birds", "carried": -1}]), "sizes.0.carried is -1"),
    ],
)
def test_invalid_result_file_is_refused_in_one_sentence(
    body: dict[str, Any],
    tmp_path: Path,
    change: Change,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(body)
    path = write_json(tmp_path, body)
    assert cli.main(["compare", path, "x", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert path in error
    assert error.count("\n") == 1
    assert len(error) < 800


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
        (b"[[" + b"9" * 5000 + b"]]", "cannot be read as JSON"),
        (b"[[NaN]]", "it holds NaN, which is not JSON"),
        (b"[[1e999]]", "write accuracies from 0 to 1"),
        (b"[[61.2]]", "divide per cent by 100"),
        (b'[["1"]]', "write accuracies from 0 to 1"),
        (b"[[true]]", "write accuracies from 0 to 1"),
        (b"[1]", "write a list of numbers for each task"),
        (b"[]", "it holds no accuracy matrix"),
        (b"[[1, 1]]", "row 1 of its matrix has 2 values"),
        (b"[" + b"[]," * 300 + b"[]]", "it has 301 tasks, more than 256"),
        (b'"text"', "it holds no results"),
    ],
)
def test_unreadable_result_file_is_refused_with_a_reason(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_results(str(path))


def test_oversized_missing_and_remote_files_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    device = tmp_path / "device.json"
    device.symlink_to("/dev/zero")
    for path in (large, device, tmp_path / "absent.csv", tmp_path):
        with pytest.raises(UserError, match="the file of results cannot be read"):
            read_results(str(path))
    with pytest.raises(UserError, match="only read from disk; copy it first"):
        read_results("s3://bucket/x.json")


def test_names_in_a_result_file_are_escaped_in_html(body: dict[str, Any], tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    body["runs"][0]["methods"] = body["runs"][0]["methods"][:1]
    text = json.dumps(body).replace('"birds"', json.dumps(evil)).replace('"meat"', '"<b>"')
    other = json.loads(text)
    other["runs"][0] |= {"config": {evil: evil, "train": 1}, "versions": {evil: [evil]}}
    runs = [
        *read_results(write_json(tmp_path, json.loads(text), "a.json")),
        *read_results(write_json(tmp_path, other, "b.json")),
    ]
    page = render_comparison_page(compare_runs(runs))
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


# ---- a plain matrix ------------------------------------------------------------------------------
def test_csv_matrix_is_compared_by_task_names(body: dict[str, Any], tmp_path: Path) -> None:
    body["runs"][0]["methods"] = body["runs"][0]["methods"][:1]
    path = write_csv(tmp_path, TASKS, MATRIX)
    comparison = compare_runs(
        [*read_results(write_json(tmp_path, body)), *read_results(path)],
    )
    peer = comparison.entries[-1]
    assert peer.spread("average_accuracy").mean == pytest.approx(0.5)
    assert peer.spread("forgetting").mean == pytest.approx(0.4)
    base = comparison.base(peer)
    assert base is not None
    assert not peer.difference(base, "average_accuracy").paired
    assert any("without counts" in note for note in comparison.notes)
    assert "The settings of peer are not known." in render_comparison_page(comparison)


def test_accuracy_matrix_can_be_triangular_or_square(tmp_path: Path) -> None:
    full = [[0.9, 0.1], [0.8, 0.7]]
    (ragged,) = read_results(write_json(tmp_path, [[0.9], [0.8, 0.7]]))
    (square,) = read_results(write_json(tmp_path, full))
    np.testing.assert_array_equal(ragged.matrix("lab").rates, square.matrix("lab").rates)
    assert any("before they are learned" in note for note in square.notes)
    assert len(ragged.notes) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it holds no accuracy matrix"),
        ("after\nbirds\n", "it holds no accuracy matrix"),
        ("after,a,a\n", "give each task a name of its own"),
        ("after,a,\n", "give each task a name of its own"),
        ("after,a\x1b[2J\n", "give each task a name of its own"),
        ("after,a,b\nb,0.1,0.2\n", "row 2 begins with 'b' where 'a' is due"),
        ("after,a\na,0.1\na,0.1\n", "row 3 begins with 'a' where no further row is due"),
        ("after,a\na,x\n", "row 2 holds 'x', which is not a number"),
        ("after,a\na,61.2\n", "divide per cent by 100"),
        ("after,a\na,inf\n", "write accuracies from 0 to 1"),
        ("after,a\na,0.1,0.2\n", "row 1 of its matrix has 2 values"),
        ("after,a\na,\xff\n", "cannot be read as CSV"),
        ("label,after_index,task_index\n", "it is the long table of a report"),
        ("after," + ",".join(map(str, range(300))) + "\n", "more than 256"),
    ],
)
def test_invalid_csv_file_is_refused_with_a_reason(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "peer.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_results(str(path))


# ---- commands ------------------------------------------------------------------------------------
def test_compare_accepts_a_run_a_result_file_and_a_matrix(
    run: RunTables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [stage for stage in run.record["stages"] if stage["label"] in (None, "meat")]
    run.record["stages"] = stages
    Store(run.storage).save_record(run.record)
    lab = tmp_path / "lab.json"
    lab.write_bytes(encode_results([run]))
    peer = write_json(tmp_path, MATRIX, "meat.json")
    assert cli.main(["compare", "tiny", str(lab), peer, "--storage", run.storage]) == 0
    output = capsys.readouterr().out
    assert re.search(r"meat +1 +50\.0 % +40\.0 %", output)
    assert "taken for those of tiny in order" in output
    folder = Path(run.storage) / "compare" / "tiny~tiny~meat"
    with (folder / "differences.csv").open() as stream:
        rows = [r for r in csv.DictReader(stream) if r["number"] == "average_accuracy"]
    assert {r["entry"] for r in rows} >= {"meat", "tiny [lab.json]"}


def test_unnamed_matrix_must_have_as_many_tasks_as_the_run(
    run: RunTables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(run.storage).save_record(run.record)
    peer = write_json(tmp_path, [[0.5]], "peer.json")
    assert cli.main(["compare", "tiny", peer, "--storage", run.storage]) == 2
    assert "it has 1 tasks without names, and 'tiny' has 4" in capsys.readouterr().err
