"""Tests of detection: the data sets at a path, the files left out, and refusals."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.data.detection import data_set as data_sets
from pipeline.data.detection import detect as detection
from pipeline.data.detection.data_set import DataSet, Request
from pipeline.data.detection.detect import detect
from pipeline.data.names import get_file_name
from tests.image_data import class_folders, make_image
from tests.image_sources import nested_split_folders
from workers.errors import UserError

NAMES = ("ant", "bee", "cow")


def found(path: Path) -> DataSet:
    """Return the only data set at a path."""
    (data_set,) = detect(Request(str(path)))
    return data_set


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        detect(Request(str(path)))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_class_folders_without_splits_are_one_data_set(tmp_path: Path) -> None:
    class_folders(tmp_path / "zoo", NAMES)
    data_set = found(tmp_path / "zoo")
    assert data_set.name == "zoo"
    assert data_set.classes == NAMES
    assert data_set.source["splits"] == {"train": "."}
    assert data_set.counts == {"train": 9}
    assert data_set.are_folders
    assert data_set.sizes[0] == (12, 10)


@pytest.mark.parametrize(
    ("train", "test"),
    [("train", "test"), ("Training", "Testing"), ("TRAIN", "valid"), ("train", "validation")],
)
def test_common_names_of_split_folders_are_recognised(
    train: str, test: str, tmp_path: Path
) -> None:
    class_folders(tmp_path / train, NAMES, 4)
    class_folders(tmp_path / test, NAMES, 2)
    data_set = found(tmp_path)
    assert data_set.source["splits"] == {"train": train, "test": test}
    assert data_set.counts == {"train": 12, "test": 6}


def test_validation_and_test_folders_are_separate_splits(tmp_path: Path) -> None:
    for split, images in (("train", 4), ("val", 1), ("test", 2)):
        class_folders(tmp_path / split, NAMES, images)
    data_set = found(tmp_path)
    assert data_set.source["splits"] == {"train": "train", "val": "val", "test": "test"}
    assert data_set.counts == {"train": 12, "val": 3, "test": 6}
    assert data_set.notes == ()


def test_train_folder_alone_gives_no_test_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", NAMES)
    assert not found(tmp_path).has_test


def test_split_names_are_found_inside_folder_names(tmp_path: Path) -> None:
    data_set = found(nested_split_folders(tmp_path / "scenes"))
    splits = {"train": "seg_train/seg_train", "test": "seg_test/seg_test"}
    assert data_set.source["splits"] == splits
    assert data_set.counts == {"train": 12, "test": 12}
    assert "'seg_pred'" in "; ".join(data_set.notes)
    assert data_set.account.places["image in another folder"] == ["seg_pred/"]


@pytest.mark.parametrize("form", ["{name}_{split}", "{split}-{name}"])
def test_split_word_inside_a_class_name_is_not_its_split(form: str, tmp_path: Path) -> None:
    names = ("latest", "testudo", "trainer", "valley")
    for split, images in (("train", 4), ("val", 1), ("test", 2)):
        folders = [form.format(name=name, split=split) for name in names]
        class_folders(tmp_path, folders, images)
    data_set = found(tmp_path)
    assert data_set.classes == names
    assert data_set.counts == {"train": 16, "val": 4, "test": 8}


def test_class_names_that_contain_split_names_stay_classes(tmp_path: Path) -> None:
    names = ("test_tube", "train_station", "tree")
    class_folders(tmp_path / "zoo", names)
    assert found(tmp_path / "zoo").classes == names


def test_unlabelled_test_folder_is_replaced_by_validation(tmp_path: Path) -> None:
    for split in ("train", "val"):
        class_folders(tmp_path / split, NAMES)
    make_image(tmp_path / "test" / "unknown" / "1.png", 1)
    data_set = found(tmp_path)
    assert data_set.source["splits"] == {"train": "train", "test": "val"}
    (note,) = data_set.notes
    assert "'test'" in note
    assert "labels" in note
    assert data_set.account.not_read == {"image in another folder": 1}
    assert data_set.account.places["image in another folder"] == ["test/"]


def test_wrapping_folders_are_skipped(tmp_path: Path) -> None:
    class_folders(tmp_path / "zoo" / "archive" / "images", NAMES)
    (tmp_path / "zoo" / "archive" / "README.txt").write_text("about")
    data_set = found(tmp_path / "zoo")
    assert data_set.source["path"] == str(tmp_path / "zoo")
    assert data_set.source["splits"] == {"train": "archive/images"}
    assert data_set.classes == NAMES
    assert data_set.name == "zoo"


def test_images_in_subfolders_of_a_class_are_counted(tmp_path: Path) -> None:
    class_folders(tmp_path, NAMES)
    make_image(tmp_path / "ant" / "2019" / "x.png", 1)
    assert found(tmp_path).counts == {"train": 10}


def test_folder_of_data_sets_gives_one_per_subfolder(tmp_path: Path) -> None:
    class_folders(tmp_path / "insects", ("ant", "bee"))
    class_folders(tmp_path / "Farm animals" / "train", ("cow", "dog"))
    class_folders(tmp_path / "Farm animals" / "test", ("cow", "dog"))
    (tmp_path / "papers").mkdir()
    data_sets = detect(Request(str(tmp_path)))
    assert [data_set.name for data_set in data_sets] == ["Farm-animals", "insects"]
    assert [data_set.has_test for data_set in data_sets] == [True, False]


def test_skipped_and_rejected_files_are_reported(tmp_path: Path) -> None:
    class_folders(tmp_path, NAMES)
    (tmp_path / "notes.txt").write_text("x")
    make_image(tmp_path / ".hidden" / "x.png", 6)
    make_image(tmp_path / "__MACOSX" / "ant" / "x.png", 6)
    make_image(tmp_path / "stray.png", 7)
    make_image(tmp_path / ".thumbnail.png", 8)
    data_set = found(tmp_path)
    assert data_set.classes == NAMES
    assert data_set.are_folders
    assert data_set.bad_fraction == 0.1
    (note,) = data_set.notes
    assert note.startswith("1 train image without a label")
    account = data_set.account
    assert account.used == {"image": 9}
    assert account.rejected == {"unlabelled": 1}
    assert account.not_read == {"hidden": 3, "other file": 1}
    assert account.places == {
        "unlabelled": ["stray.png"],
        "hidden": [".hidden/", ".thumbnail.png", "__MACOSX/"],
        "other file": ["notes.txt"],
    }
    assert account.lines()[0] == "14 files = 9 used + 1 rejected + 4 not read"


def test_empty_class_folder_is_reported(tmp_path: Path) -> None:
    class_folders(tmp_path, NAMES)
    (tmp_path / "empty").mkdir()
    data_set = found(tmp_path)
    assert data_set.classes == NAMES
    assert not data_set.are_folders
    assert "'empty'" in "; ".join(data_set.notes)


def test_links_to_folders_outside_are_not_followed(tmp_path: Path) -> None:
    class_folders(tmp_path / "zoo", NAMES)
    class_folders(tmp_path / "outside", ("dog",))
    os.symlink(tmp_path / "outside", tmp_path / "zoo" / "dog")
    data_set = found(tmp_path / "zoo")
    assert data_set.classes == NAMES
    assert data_set.counts == {"train": 9}
    assert data_set.account.rejected == {"link": 1}
    assert data_set.account.places == {"link": ["dog"]}


def test_a_link_to_a_folder_inside_is_followed_once(tmp_path: Path) -> None:
    class_folders(tmp_path / "zoo", NAMES)
    class_folders(tmp_path / "zoo" / ".store", ("dog",))
    os.symlink(tmp_path / "zoo" / ".store" / "dog", tmp_path / "zoo" / "dog")
    os.symlink(tmp_path / "zoo", tmp_path / "zoo" / "ant" / "again")
    data_set = found(tmp_path / "zoo")
    assert data_set.classes == (*NAMES, "dog")
    assert data_set.counts == {"train": 12}
    assert data_set.account.not_read == {"link that is not followed": 1}
    assert data_set.account.places == {"link that is not followed": ["ant/"]}


def test_class_without_train_images_is_left_out(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", NAMES)
    class_folders(tmp_path / "test", (*NAMES, "yak"))
    data_set = found(tmp_path)
    assert data_set.classes == NAMES
    assert data_set.counts == {"train": 9, "test": 9}
    (note,) = data_set.notes
    assert note.startswith("3 test images without a label, or with one that train lacks")
    assert "'yak'" in note
    assert data_set.account.rejected == {"unlabelled": 3}
    assert data_set.account.places == {"unlabelled": ["test/"]}


def test_counts_are_inexact_above_the_file_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path, NAMES)
    for module in (data_sets, detection):
        monkeypatch.setattr(module, "MAX_FILES", 7)
    data_set = found(tmp_path)
    assert data_set.classes == NAMES
    assert not data_set.is_exact
    assert data_set.counts["train"] < 9


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    class_folders(tmp_path, ("ant", "b\x1b[31mee"))
    message = refusal(tmp_path)
    assert "\x1b" not in message
    assert "'b\\x1b[31mee'" in message


def write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # the path of a socket must be short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)
            os.close(here)


def links_alone(path: Path) -> None:
    path.mkdir()
    for number, target in enumerate(("/usr", "/etc")):
        (path / str(number)).symlink_to(target)


BAD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "nothing": ("does not exist", lambda path: None),
    "empty": ("is empty", lambda path: path.mkdir()),
    "images alone": ("1 image in no folder", lambda path: make_image(path / "a.png", 1)),
    "one class": ("one class, 'ant'", lambda path: class_folders(path, ("ant",))),
    "notes": ("'x.doc'", lambda path: write(path / "x.doc")),
    "a file": ("neither a config nor a data set", write),
    "test alone": ("'test' and no train images", lambda path: class_folders(path / "test", NAMES)),
    "other classes in test": (
        "no test image has a label of train; test has labels such as 'x', and train 'ant', 'bee'",
        lambda path: (class_folders(path / "train", NAMES), class_folders(path / "test", ("x",))),
    ),
    "socket": ("neither a config nor a data set", make_socket),
    "links alone": ("not followed", links_alone),
}


@pytest.mark.parametrize("case", BAD)
def test_refusal_describes_the_unsupported_folder(case: str, tmp_path: Path) -> None:
    says, make = BAD[case]
    make(tmp_path / "data")
    message = refusal(tmp_path / "data")
    assert says in message
    assert str(tmp_path / "data") in message


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    for split in ("training", "Train", "test"):
        class_folders(tmp_path / split, NAMES)
    message = refusal(tmp_path)
    assert "'Train', 'training' are both train images; say which with --set" in message
    assert "source.splits={train: [Train]}" in message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("My leaves (2019)", "My-leaves-2019"),
        ("großes Bild", "groes-Bild"),
        ("../..", "data"),
        ("葉", "data"),
    ],
)
def test_any_text_gives_a_valid_file_name(text: str, name: str) -> None:
    assert get_file_name(text) == name
