"""Tests of data sets by name: the shipped cards, and the commands that list and describe them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.data import card_files, catalogue
from pipeline.data.cards import Card
from workers.errors import UserError

# card -> classes, train and test images, as the authors state them
SIZES = {
    "cifar10": (10, 50000, 10000),
    "cifar100": (100, 50000, 10000),
    "cub200": (200, 5994, 5794),
    "cub200-cropped": (200, 5994, 5794),
    "dtd": (47, 3760, 1880),
    "fgvc-aircraft": (100, 6667, 3333),
    "flowers102": (102, 2040, 6149),
    "imagenet": (1000, 1281167, 50000),
    "imagenet-a": (200, 0, 7500),
    "imagenet-r": (200, 0, 30000),
    "nabirds": (555, 23929, 24633),
    "places365": (365, 1803460, 36500),
    "sketches": (250, 16000, 4000),
    "stanford-cars": (196, 8144, 8041),
    "stanford-cars-cropped": (196, 8144, 8041),
    "stanford-dogs": (120, 12000, 8580),
    "tu-berlin": (250, 16000, 4000),
    "wikiart": (195, 42129, 10628),
}


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """Run a command; return its output on stdout and stderr."""
    assert cli.main([*argv]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def write_card(folder: Path, name: str, text: str) -> None:
    """Write a card into a folder that replaces `datasets`."""
    (folder / name).mkdir()
    (folder / name / "card.yaml").write_text(text)


def test_every_card_is_listed_without_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "data", "list").split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[1:]] == card_files.list_card_names()
    assert lines[0].split()[:4] == ["card", "classes", "train", "test"]
    assert all(len(line) <= 160 and line == line.rstrip() for line in lines)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SIZES)
def test_card_sizes_match_the_published_sizes(name: str) -> None:
    row = dict(zip(catalogue.HEADING, rows_by_name()[name], strict=True))
    numbers = tuple(int(row[column]) for column in ("classes", "train", "test"))
    assert numbers == SIZES[name]


def rows_by_name() -> dict[str, list[str]]:
    """Return the rows of the catalogue by card."""
    return {entry.card: entry.cells for entry in catalogue.read_catalogue().entries}


@pytest.mark.parametrize("name", card_files.list_card_names())
def test_card_has_a_licence_and_a_download_address(name: str) -> None:
    card = card_files.load_without_source(name)
    assert card.name == name
    assert card.licence
    if catalogue.how(card).startswith("by hand"):
        assert card.archive is not None
        assert re.match(r"https?://", card.archive.address)


def test_list_marks_data_sets_that_were_not_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verified = {name for name, row in rows_by_name().items() if row[5] == "yes"}
    network = {name for name, row in rows_by_name().items() if row[4].startswith("automatic")}
    assert "digits" in verified
    assert "cifar10" in network - verified
    assert "nothing was checked against the real data" in output(capsys, "data", "list", "cifar10")


def test_list_shows_the_path_of_the_files_and_their_presence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_IMAGES", str(tmp_path))
    assert "data prepare cub200 FROM" in output(capsys, "data", "list", "cub200")
    text = output(capsys, "data", "list", "imagenet-a", "digits")
    assert "7500 test images" in text
    assert f"read from: {tmp_path}/imagenet-a (missing)" in text
    assert "with scikit-learn" in text
    (tmp_path / "imagenet-a").mkdir()
    assert "(there)" in output(capsys, "data", "list", "imagenet-a")


def test_unknown_card_suggests_a_similar_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'cub200'?" in output(capsys, "data", "list", "cub20", code=2)


def test_broken_card_does_not_hide_other_cards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_files, "CARDS", tmp_path)
    write_card(tmp_path, "bad", "name: [")
    write_card(tmp_path, "good", "name: good\nsource: {format: folder}\nlicence: x\nclasses: [a]")
    text = output(capsys, "data", "list", code=2)
    assert re.search(r"^good +1 +- +- +a folder of yours +no +x$", text, re.M)
    assert "bad/card.yaml" in text
    assert "Traceback" not in text


def test_descriptive_fields_do_not_change_the_card_identity() -> None:
    card = card_files.load_without_source("cub200")
    body = card.model_dump()
    plain = Card.model_validate(body | {"archive": None, "verified": "", "licence": "x"})
    noted = Card.model_validate(body | {"verified": "yes"})
    assert card.identity() == plain.identity() == noted.identity()


def test_test_only_card_reads_classes_from_the_unpacked_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_IMAGES", str(tmp_path))
    for number in range(200):
        (tmp_path / "imagenet-a" / f"n{number:08d}").mkdir(parents=True)
    (tmp_path / "imagenet-a" / "README.txt").touch()
    assert card_files.load_card_file("imagenet-a").classes[:2] == ("n00000000", "n00000001")


def test_missing_data_error_names_the_list_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRETE_IMAGES", str(tmp_path))
    with pytest.raises(UserError, match=r"put the data there \(`accrete data list cub200`"):
        card_files.load_card_file("cub200")
