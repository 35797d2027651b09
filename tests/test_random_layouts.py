"""Tests of `init` and `ingest` on random data sets with a known truth: no silent errors.

A wrong label, a wrong split, a lost image, or an account that does not add up fails the test. A
refusal fails it only if the layout is usual, or if too many unusual layouts are refused.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.data import card_files, in_place, ingest, starter
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.formats import get_format
from tests.random_layouts import MAKERS, Layout, expected_split, make_layout
from workers.data.shards import Shards
from workers.errors import UserError
from workers.storage.artifact import Artifact

FAST_ROUNDS = 8  # layouts of each kind in `make test`
SLOW_LAYOUTS = 1000
MIN_UNDERSTOOD = 0.5  # minimum fraction of unusual layouts that are read
REFUSED = "refused"
RIGHT = "right"


def read_layout(layout: Layout, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return `right`, `refused`, or what is wrong with the ingested data set."""
    here = folder / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    store = str(folder / "store")
    try:
        starter.start([str(layout.folder)], "accrete", lambda line: None)
        cards = sorted(here.glob("*-card.yaml"))
        if len(cards) != 1:
            return f"{len(cards)} data sets"
        card = card_files.load_card_file(str(cards[0]))
        write = in_place.index_shards if get_format(card).list_shards else ingest.ingest
        write(card, store, "key", map, {})
    except UserError:
        return REFUSED
    return problem_of_index(layout, store) or problem_of_account(layout, store) or RIGHT


def problem_of_index(layout: Layout, store: str) -> str:
    """Return a difference between the index and the truth, or "" if there is none."""
    truth = {picture.sha256: picture for picture in layout.pictures}
    seen: Counter[str] = Counter()
    for row in Shards.open(store, "key").read_index().to_pylist():
        picture = truth.get(row["sha256"])
        if picture is None:
            return f"{row['key']} is not an image of the data set"
        seen[row["sha256"]] += 1
        if row["class"] != picture.label:
            return f"{row['key']} has class {row['class']}, not {picture.label}"
        split = expected_split(layout, picture)
        if row["split"] != split and (split is not None or row["split"] == "val"):
            return f"{row['key']} has split {row['split']}, not {split}"
    if set(seen.values()) != {1} or len(seen) != len(truth):
        return f"{len(truth) - len(seen)} images are lost, and {seen.most_common(1)} is there often"
    return ""


def problem_of_account(layout: Layout, store: str) -> str:
    """Return a difference between the account and the files on disk, or "" if there is none."""
    account = Account.from_json(Artifact.need(store, "key").read(ACCOUNT))
    num_files = sum(path.is_file() for path in layout.folder.rglob("*"))
    parts = (account.used, account.rejected, account.not_read)
    total = sum(sum(part.values()) for part in parts)
    return "" if account.files == total == num_files else f"{total} of {num_files} files"


def judge(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], list[str]]:
    """Return the number of layouts per kind and verdict, and a description of each wrong one."""
    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        layout = make_layout(folder, seed)
        verdict = read_layout(layout, folder, monkeypatch)
        kind = "unusual" if layout.is_unusual else "usual"
        verdicts[f"{kind} {verdict if verdict in (RIGHT, REFUSED) else 'wrong'}"] += 1
        if verdict not in (RIGHT, REFUSED):
            wrong.append(f"seed {seed}, {layout.kind}: {verdict}")
    return verdicts, wrong


@pytest.mark.few(5)
@pytest.mark.parametrize("maker", range(len(MAKERS)), ids=lambda index: MAKERS[index].__name__)
def test_random_layouts_are_never_misread(
    maker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(maker, FAST_ROUNDS * len(MAKERS), len(MAKERS))
    verdicts, wrong = judge(seeds, tmp_path, monkeypatch)
    assert not wrong
    assert not verdicts["usual refused"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousand_random_layouts_are_never_misread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts, wrong = judge(range(1000, 1000 + SLOW_LAYOUTS), tmp_path, monkeypatch)
    print(dict(verdicts))
    assert not wrong
    assert not verdicts["usual refused"]
    understood = verdicts["unusual right"]
    assert understood >= MIN_UNDERSTOOD * (understood + verdicts["unusual refused"])


def test_layout_checks_detect_wrong_label_split_or_file_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout(tmp_path, MAKERS.index(next(m for m in MAKERS if "plain" in m.__name__)))
    assert read_layout(layout, tmp_path, monkeypatch) == RIGHT
    store = str(tmp_path / "store")
    first = layout.pictures[0]
    layout.pictures[0] = first._replace(label="another")
    assert "has class" in problem_of_index(layout, store)
    layout.pictures[0] = first
    layout.has_splits = True
    layout.pictures[0] = first._replace(split="val")
    layout.pictures.append(first._replace(split="test", data=b"another"))
    assert "split" in problem_of_index(layout, store)
    (layout.folder / "more.txt").write_text("one file more")
    assert "files" in problem_of_account(layout, store)
