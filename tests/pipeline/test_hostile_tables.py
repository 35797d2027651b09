"""Tests of tables and lists of images with blank lines, damaged sizes or lone surrogates."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from pipeline.config import settings as configs
from pipeline.data import column_files
from pipeline.data.names import printable
from pipeline.data.preparation.matlab import MatError, _to_integer
from pipeline.data.tables import column_names, read_rows
from pipeline.growing.new_data import list_used_cards
from pipeline.growing.stream_edits import StreamEditor
from tests import small_run
from workers.errors import UserError


@pytest.mark.parametrize("start", ["\n", "\n\n", "# a comment\n\n", "sep=;\n\n"])
def test_empty_lines_before_the_header_of_a_csv_are_skipped(start: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{start}image;label\n1.png;cat\n2.png;dog\n")
    assert column_names(str(path)) == ["image", "label"]
    rows = [row.values for row in read_rows(str(path), ["image", "label"])]
    assert rows == [("1.png", "cat"), ("2.png", "dog")]


def test_message_with_a_negative_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"label": ["a"]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(column_files, "_parse_message", lambda head, *_: (0, 0, -len(head) - 8))
    with pytest.raises(UserError, match="is not readable as Arrow"):
        column_files.read_row_groups(str(path))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_size_that_is_no_number_is_an_error_of_the_file(number: float) -> None:
    with pytest.raises(MatError):
        _to_integer(number)


def test_lone_surrogates_can_be_printed() -> None:
    assert printable("a\ud800b") == "a\\ud800b"
    assert printable("a\udcffb") == "a\\xffb"


def test_two_cards_with_one_list_keep_the_lines_of_both(tmp_path: Path) -> None:
    cards = {}
    for name, classes in (("a", "01"), ("b", "23")):
        cards[name] = small_run.make_card(
            tmp_path, name, classes, train=4, test=2, without_images="out.txt"
        )
    (tmp_path / "cards" / "out.txt").write_text("old.png\n")
    body = small_run.make_body(tmp_path, cards, ["linear"])
    path = small_run.write_config(tmp_path / "c.yaml", body)
    config = configs.check(yaml.safe_load(Path(path).read_text()), path)
    used = list_used_cards(config)
    editor = StreamEditor(path, config, used, {})
    for card, line in zip(used, ("one.png", "two.png"), strict=True):
        editor.leave_out_images(card, [line])
    assert [*editor.new_files.values()] == ["old.png\none.png\ntwo.png\n"]
