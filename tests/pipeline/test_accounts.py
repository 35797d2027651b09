"""Tests of the account of source files (used, rejected, not read) and of the preview page."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.data.account import Account
from tests.image_data import class_folders, make_image
from tests.small_run import make_body, write_config
from workers.errors import UserError

LITTER = {
    "README.md": b"about",
    "notes.csv": b"a,b\n1,2\n",
    "old.zip": b"PK",
    ".DS_Store": b"\0",
    "ant/._0.png": b"\0",
    "ant/cut.png": b"\x89PNG\r\n\x1a\n",
    "empty.txt": b"",
}


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; the data set `zoo` is next to it."""
    class_folders(tmp_path / "zoo", ("ant", "bee", "cow"), 20)
    for name, data in LITTER.items():
        (tmp_path / "zoo" / name).write_bytes(data)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def load_account(storage: Path) -> Account:
    """Load the account of the only ingested data set."""
    (path,) = storage.glob("stages/*/*/account.json")
    return Account.from_json(path.read_bytes())


def test_every_file_is_accounted_for(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_files = sum(len(files) for _, _, files in os.walk(workdir.parent / "zoo"))
    assert cli.main(["init", "../zoo"]) == 0
    printed = capsys.readouterr().out
    assert f"{num_files} files = 61 used + 0 rejected + 6 not read" in printed
    assert printed.splitlines()[-1] == "preview: zoo-preview.html"
    assert cli.main(["ingest", "zoo.yaml", "--set=tracking=off"]) == 0
    printed = capsys.readouterr().out
    assert f"{num_files} files = 60 used + 1 rejected + 6 not read" in printed
    account = load_account(workdir / "storage")
    assert account.used == {"image": 60}
    assert account.rejected == {"corrupt": 1}
    assert account.not_read == {"hidden": 2, "table": 1, "archive": 1, "other file": 2}
    assert account.places["corrupt"] == ["ant/"]


def test_account_that_does_not_add_up_is_refused() -> None:
    from pipeline.data.cards import Card

    body = {"name": "zoo", "licence": "x", "classes": ["a", "b"], "source": {"format": "folder"}}
    with pytest.raises(UserError, match="has 3 files, and 2 of them are accounted for"):
        Account(3, {"image": 1}, {}, {"hidden": 1}).check(Card.model_validate(body))


def test_preview_shows_each_class_and_escapes_names(workdir: Path) -> None:
    name = "!<script>alert(1)<"
    make_image(workdir.parent / "zoo" / "ant" / f"{name}.png", 99)
    class_folders(workdir.parent / "zoo", ("<b>dog",), 20)
    assert cli.main(["init", "../zoo"]) == 0
    page = (workdir / "zoo-preview.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    for label in ("ant", "bee", "cow"):
        assert f"<h3>{label} <small>2" in page
    assert "<h3>&lt;b&gt;dog <small>2" in page
    assert "<b>" not in page
    assert page.count("data:image/jpeg;base64,") == 32


def test_card_preview_shows_only_classes_of_card(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    assert cli.main(["init", "../zoo"]) == 0
    (workdir / "zoo-preview.html").unlink()
    card = yaml.safe_load((workdir / "zoo-card.yaml").read_text())
    card |= {"classes": ["ant", "bee"], "num_classes": 2}
    (workdir / "zoo-card.yaml").write_text(yaml.safe_dump(card))
    capsys.readouterr()
    assert cli.main(["data", "preview", "./zoo-card.yaml"]) == 0
    page = (workdir / "zoo-preview.html").read_text()
    assert "which the card does not list, are left out" in page
    assert "<h3>cow" not in page


@pytest.mark.parametrize("kind", ["a page of someone else", "a link", "a folder"])
def test_preview_does_not_overwrite_other_files(
    kind: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workdir / "zoo-preview.html"
    if kind == "a link":
        path.symlink_to(workdir / "elsewhere.html")
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_text("<p>mine</p>")
    assert cli.main(["init", "../zoo"]) == 2
    assert "is not a preview" in capsys.readouterr().err
    assert sorted(os.listdir(workdir)) == ["zoo-preview.html"]


@pytest.mark.parametrize(
    "forged",
    [
        b"no JSON",
        b"[" * 100_000,
        b'{"used": {"image": "many"}}',
        b'{"used": 3}',
        b"[]",
    ],
)
def test_forged_account_is_refused(forged: bytes) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Account.from_json(forged)


def test_control_characters_are_not_printed() -> None:
    body = {"files": 1, "used": {"image\x1b[2J": 1}, "notes": ["\x1b]0;x\x07"]}
    assert "\x1b" not in "".join(Account.from_json(json.dumps(body).encode()).lines())


def test_class_folder_without_images_is_noted(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir.parent / "zoo" / "dog").mkdir()
    assert cli.main(["init", "../zoo"]) == 0
    assert "without train images are not classes: 'dog'" in capsys.readouterr().out


def test_image_in_two_classes_is_noted(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = workdir.parent / "zoo"
    first = sorted((zoo / "bee").iterdir())[0]
    (zoo / "cow" / "again.png").write_bytes(first.read_bytes())
    card = {
        "name": "zoo",
        "licence": "x",
        "classes": ["ant", "bee", "cow"],
        "test_fraction": 0.2,
        "max_bad_fraction": 0.1,
        "leaks": "allow",
        "source": {"format": "folder", "path": str(zoo), "splits": {"train": "."}},
    }
    (workdir / "card.yaml").write_text(yaml.safe_dump(card))
    body = make_body(workdir, {"base": "./card.yaml"}, {"linear": {}})
    assert cli.main(["ingest", write_config(workdir / "c.yaml", body)]) == 0
    assert "1 image with copies in another class" in capsys.readouterr().out
