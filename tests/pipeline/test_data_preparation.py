"""Tests of `data prepare`, which turns the official files of a data set into class folders.

The tests use small generated data in the layout of the official files.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from pipeline.data import card_files
from pipeline.data.ingest import ingest
from pipeline.data.preparation.base import ImageBox
from pipeline.data.preparation.target import crop_image
from tests.official_files import labels_of, prepare, small_card, write_image, write_lists
from workers.data.decoding import ORIENTATION

# ---- CUB-200-2011 --------------------------------------------------------------------------------
CUB_CLASSES = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
BOX = (3.0, 2.0, 10.0, 7.0)  # left, top, width, height


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    """Return the official files of two species with two training and two test images each."""
    folder = tmp_path / "CUB_200_2011"
    lines: dict[str, list[str]] = {
        "images": [],
        "image_class_labels": [],
        "train_test_split": [],
        "bounding_boxes": [],
    }
    for number in range(1, 9):
        label = (number - 1) // 4
        path = f"{CUB_CLASSES[label]}/Bird_{number:04d}.jpg"
        write_image(folder / "images" / path, number)
        lines["images"].append(f"{number} {path}")
        lines["image_class_labels"].append(f"{number} {label + 1}")
        lines["train_test_split"].append(f"{number} {number % 2}")
        lines["bounding_boxes"].append(f"{number} {' '.join(map(str, BOX))}")
    classes = [f"{number} {name}" for number, name in enumerate(CUB_CLASSES, start=1)]
    write_lists(folder, classes=classes, **lines)
    return folder


@pytest.fixture
def cub_card(tmp_path: Path) -> str:
    return small_card(tmp_path, "cub200", num_classes=2)


def test_cub_becomes_class_folders_of_links(
    cub: Path, cub_card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = prepare(capsys, cub_card, tmp_path)
    assert "4 train and 4 test images of 2 classes" in text
    expected = dict.fromkeys(CUB_CLASSES, 2)
    assert labels_of(cub_card) == {"train": expected, "test": expected}
    link = tmp_path / "prepared" / "train" / CUB_CLASSES[0] / "Bird_0001.jpg"
    assert os.path.realpath(link) == str((cub / "images" / CUB_CLASSES[0] / link.name).resolve())
    assert sorted(os.listdir(tmp_path / "prepared")) == ["test", "train"]


def test_prepared_data_can_be_ingested(
    cub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_card(tmp_path, "cub200", num_classes=2, counts={"train": 4, "test": 4})
    prepare(capsys, card, cub, "--copy")
    assert not (tmp_path / "prepared/test" / CUB_CLASSES[1] / "Bird_0008.jpg").is_symlink()
    manifest = ingest(card_files.load_card_file(card), str(tmp_path / "store"), "k", map, {})
    assert manifest["counts"] == {"train": 4, "test": 4}
    assert manifest["rejected"] == {}


def test_cub_images_are_cropped_to_their_boxes(
    cub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_card(tmp_path, "cub200-cropped", num_classes=2)
    prepare(capsys, card, cub)
    assert labels_of(card)["test"] == dict.fromkeys(CUB_CLASSES, 2)
    path = Path("train", CUB_CLASSES[0], "Bird_0001.jpg")
    cut = np.asarray(Image.open(tmp_path / "prepared" / path)).astype(np.int64)
    whole = np.asarray(Image.open(cub / "images" / Path(*path.parts[1:]))).astype(np.int64)
    assert cut.shape == (7, 10, 3)
    assert np.abs(cut - whole[2:9, 3:13]).mean() < 4, "JPEG at quality 95"
    assert np.abs(cut - whole[3:10, 3:13]).mean() > 20


def replace_line(path: Path, old: str, new: str) -> None:
    """Replace a text that must occur exactly once in a list file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


FIRST = f"1 {CUB_CLASSES[0]}/Bird_0001.jpg"


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("images", FIRST, "1 ../../secret.jpg", "leads out of the folder"),
        ("images", FIRST, "1 /etc/secret.jpg", "is missing"),
        ("images", FIRST, f"1 {CUB_CLASSES[0]}/Bird_0009.jpg", "is missing"),
        ("images", FIRST, "1 ../bounding_boxes.txt", "leads out of the folder"),
        ("images", FIRST, f"1 {CUB_CLASSES[0]}/notes.txt", "is not an image"),
        ("images", FIRST, f"1 {CUB_CLASSES[0]}/Bird_0003.jpg", "two images of class"),
        ("images", FIRST, "1", "line 1: '1' has not the 2 columns"),
        ("classes", "1 001.Black_footed_Albatross", "1 ..", "is not a name of a class"),
        ("classes", "1 001.Black_footed_Albatross", "7 x", "classes.txt says nothing about '1'"),
        ("classes", CUB_CLASSES[0], CUB_CLASSES[1], "are both called"),
        ("train_test_split", "8 0\n", "", "train_test_split.txt says nothing about '8'"),
        ("bounding_boxes", f"1 {BOX[0]}", "1 x", "is not a box"),
        ("bounding_boxes", f"1 {BOX[0]}", "1 inf", "is not a box"),
    ],
)
def test_damaged_list_is_reported_and_nothing_is_written(
    cub: Path,
    cub_card: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    old: str,
    new: str,
    words: str,
) -> None:
    path = cub / f"{name}.txt"
    if old.startswith("1 3"):
        path.write_text(path.read_text().replace(old, new, 1))
    else:
        replace_line(path, old, new)
    (tmp_path / "secret.jpg").touch()
    assert words in prepare(capsys, cub_card, cub, code=2)
    prepared = tmp_path / "prepared"
    assert not prepared.exists() or os.listdir(prepared) == []


def test_links_out_of_the_folder_are_refused(
    cub: Path, cub_card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = cub / "images" / CUB_CLASSES[0] / "Bird_0001.jpg"
    image.rename(tmp_path / "outside.jpg")
    image.symlink_to(tmp_path / "outside.jpg")
    text = prepare(capsys, cub_card, cub, code=2)
    assert "1 of 8 images" in text
    assert "is a link out of the folder" in text
    image.unlink()
    (tmp_path / "outside.jpg").rename(image)
    (cub / "images").rename(tmp_path / "elsewhere")
    (cub / "images").symlink_to(tmp_path / "elsewhere")
    text = prepare(capsys, cub_card, cub, code=2)
    assert "8 of 8 images" in text
    assert "reached by a link that leaves the folder" in text
    (cub / "classes.txt").rename(tmp_path / "classes.txt")
    (cub / "classes.txt").symlink_to(tmp_path / "classes.txt")
    assert "classes.txt is a link out of" in prepare(capsys, cub_card, cub, code=2)


def test_oversized_or_unreadable_list_is_refused(
    cub: Path, cub_card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(cub / "images.txt", "wb") as stream:
        stream.truncate(1 << 40)
    assert "images.txt cannot be read (it has" in prepare(capsys, cub_card, cub, code=2)
    (cub / "images.txt").write_bytes(b"x" * 5000)
    assert "a line of more than 4096 bytes" in prepare(capsys, cub_card, cub, code=2)
    (cub / "images.txt").write_bytes(b"1 \xff")
    assert "it is not UTF-8" in prepare(capsys, cub_card, cub, code=2)
    (cub / "images.txt").unlink()
    os.mkfifo(cub / "images.txt")
    assert "images.txt cannot be read" in prepare(capsys, cub_card, cub, code=2)


def test_error_names_found_and_missing_files(
    cub: Path, cub_card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cub / "classes.txt").unlink()
    (cub / "bounding_boxes.txt").unlink()
    text = prepare(capsys, cub_card, tmp_path, code=2)
    assert "holds CUB_200_2011, card.yaml" in text
    assert "needs also classes.txt; fetch" in text
    assert "https://www.vision.caltech.edu" in text
    assert "is not a folder; name the one" in prepare(capsys, cub_card, tmp_path / "x", code=2)
    archive = tmp_path / "CUB_200_2011.tgz"
    archive.touch()
    text = prepare(capsys, cub_card, archive, code=2)
    assert f"name the folder: tar -xf {archive}" in text


def test_incomplete_archive_is_refused(
    cub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_card(tmp_path, "cub200", counts={"train": 5994, "test": 5794})
    text = prepare(capsys, card, cub, code=2)
    assert "has 4 train and 4 test images of 2 classes" in text
    assert "says 5994 train and 5794 test images of 200 classes" in text


def test_output_is_not_overwritten_and_can_be_redirected(
    cub: Path, cub_card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(capsys, cub_card, cub)
    assert "is there already and is not overwritten" in prepare(capsys, cub_card, cub, code=2)
    text = prepare(capsys, cub_card, cub, "--to", str(tmp_path / "other"))
    assert text.endswith(f"init {tmp_path / 'other'}")
    assert sorted(os.listdir(tmp_path / "other")) == ["test", "train"]


def test_output_folder_can_be_the_folder_of_official_files(
    cub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"source": {"format": "folder", "path": str(cub)}}
    card = small_card(tmp_path, "cub200", num_classes=2)
    path = Path(card)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | body))
    prepare(capsys, card, cub)
    assert labels_of(card)["train"] == dict.fromkeys(CUB_CLASSES, 2)


def test_image_without_a_usable_box_or_pixels_is_refused(
    cub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_card(tmp_path, "cub200-cropped", num_classes=2)
    boxes = cub / "bounding_boxes.txt"
    lines = boxes.read_text().splitlines()
    boxes.write_text("\n".join(["1 30.0 2.0 10.0 7.0", *lines[1:]]))
    assert "holds no pixel of 20 x 16" in prepare(capsys, card, cub, code=2)
    boxes.write_text("\n".join(lines[1:]))
    assert "has no bounding box" in prepare(capsys, card, cub, code=2)
    boxes.write_text("\n".join(lines))
    (cub / "images" / CUB_CLASSES[0] / "Bird_0001.jpg").write_bytes(b"no image")
    assert "cannot be cut to its box" in prepare(capsys, card, cub, code=2)
    assert os.listdir(tmp_path / "prepared") == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digits", "is not fetched by hand"),
        ("imagenet-a", "as they are, from"),
        ("nothing", "does not exist"),
    ],
)
def test_card_without_preparation_is_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert words in prepare(capsys, name, tmp_path, code=2)


def test_box_is_cropped_before_exif_rotation() -> None:
    pixels = np.zeros((16, 20, 3), np.uint8)
    pixels[2:9, 3:13] = 255
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    cut = np.asarray(
        Image.open(io.BytesIO(crop_image(buffer.getvalue(), ImageBox(3, 2, 12.2, 8.5))))
    )
    assert cut.shape == (10, 7, 3), "the crop must be upright, with the box rounded outwards"
    assert (cut == 255).all()


@pytest.mark.parametrize("folder", ["..", "../x", ".", ""])
def test_split_outside_a_subfolder_is_refused(
    cub: Path, cub_card: str, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    path = Path(cub_card)
    body = yaml.safe_load(path.read_text())
    body["source"]["splits"] = {"train": "train", "test": folder}
    path.write_text(yaml.safe_dump(body))
    assert "source.splits.test is" in prepare(capsys, cub_card, cub, code=2)
