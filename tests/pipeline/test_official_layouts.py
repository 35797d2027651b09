"""Tests of the preparation of official data sets: small made-up copies become class folders with
the labels and splits of the official lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.data.preparation import matlab
from tests.official_files import (
    cells,
    labels_of,
    prepare,
    small_card,
    structs,
    write_image,
    write_lists,
    write_mat,
)

Captured = pytest.CaptureFixture[str]


def image_at(folder: Path, split: str, label: str, name: str) -> bytes:
    """Return the bytes of a prepared image."""
    return (folder / "prepared" / split / label / name).read_bytes()


# ---- NABirds -------------------------------------------------------------------------------------
def test_nabirds_are_labelled_by_identifiers_and_hierarchy(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "nabirds"
    birds = {"0817": ["a-1", "a-2", "a-3"], "0295": ["b-1", "b-2"]}
    lists: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": []}
    for number, images in birds.items():
        for index, identifier in enumerate(images):
            path = f"{number}/{identifier.replace('-', '')}.jpg"
            write_image(folder / "images" / path, index)
            lists["images"].append(f"{identifier} {path}")
            lists["image_class_labels"].append(f"{identifier} {int(number)}")
            lists["train_test_split"].append(f"{identifier} {int(index == 0)}")
    names = ["0 Birds", "5 Oak Titmouse", "295 Snow Goose (White morph)", "817 Oak Titmouse"]
    write_lists(folder, classes=names, hierarchy=["5 0", "817 5", "295 0"], **lists)
    card = small_card(tmp_path, "nabirds", num_classes=2)
    prepare(capsys, card, folder)
    goose, titmouse = "0295.Snow_Goose_(White_morph)", "0817.Oak_Titmouse"
    assert labels_of(card) == {
        "train": {goose: 1, titmouse: 1},
        "test": {goose: 1, titmouse: 2},
    }


# ---- Stanford Cars -------------------------------------------------------------------------------
CARS = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"]
CAR_LABELS = {"train": {CARS[0]: 2, "Ram C-V Cargo Van Minivan 2012": 1}}
CAR_LABELS["test"] = {CARS[0]: 1, "Ram C-V Cargo Van Minivan 2012": 2}
CAR_BOX = {"bbox_x1": 2, "bbox_y1": 3, "bbox_x2": 11, "bbox_y2": 9}  # 1-based, inclusive


def write_cars(folder: Path) -> None:
    """Write the layout with a folder for each split."""
    write_mat(folder / "devkit/cars_meta.mat", class_names=np.array([CARS], object))
    for split, name in (
        ("train", "devkit/cars_train_annos"),
        ("test", "cars_test_annos_withlabels"),
    ):
        classes = {"train": [1, 1, 2], "test": [1, 2, 2]}[split]
        rows = []
        for number, label in enumerate(classes, start=1):
            write_image(folder / f"cars_{split}" / f"{number:05d}.jpg", number)
            rows.append({**CAR_BOX, "class": label, "fname": f"{number:05d}.jpg"})
        write_mat(folder / f"{name}.mat", annotations=structs(rows))


def test_cars_in_two_folders_are_prepared(tmp_path: Path, capsys: Captured) -> None:
    write_cars(tmp_path / "stanford_cars")
    card = small_card(tmp_path, "stanford-cars", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == CAR_LABELS


def test_cars_are_cropped_by_one_based_boxes(tmp_path: Path, capsys: Captured) -> None:
    write_cars(tmp_path / "stanford_cars")
    card = small_card(tmp_path, "stanford-cars-cropped", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == CAR_LABELS
    cut = np.asarray(Image.open(tmp_path / "prepared/train" / CARS[0] / "00001.jpg")).astype(
        np.int64
    )
    whole = np.asarray(Image.open(tmp_path / "stanford_cars/cars_train/00001.jpg")).astype(np.int64)
    assert cut.shape == (7, 10, 3)
    assert np.abs(cut - whole[2:9, 1:11]).mean() < 4


def test_cars_in_one_folder_are_prepared(tmp_path: Path, capsys: Captured) -> None:
    rows = []
    for number, (label, is_test) in enumerate([(1, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 1)], 1):
        path = f"car_ims/{number:06d}.jpg"
        write_image(tmp_path / path, number)
        rows.append({"relative_im_path": path, **CAR_BOX, "class": label, "test": is_test})
    names = np.array([CARS], object)
    write_mat(tmp_path / "cars_annos.mat", annotations=structs(rows), class_names=names)
    card = small_card(tmp_path, "stanford-cars", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == CAR_LABELS


def test_car_annotations_without_valid_labels_are_refused(tmp_path: Path, capsys: Captured) -> None:
    write_cars(tmp_path)
    card = small_card(tmp_path, "stanford-cars", num_classes=2)
    rows = [{**CAR_BOX, "fname": "00001.jpg"}, {**CAR_BOX, "fname": "00002.jpg"}]
    write_mat(tmp_path / "cars_test_annos_withlabels.mat", annotations=structs(rows))
    assert "has no field 'class'" in prepare(capsys, card, tmp_path, code=2)
    rows = [{**CAR_BOX, "class": 3, "fname": "00001.jpg"}]
    write_mat(tmp_path / "cars_test_annos_withlabels.mat", annotations=structs(rows))
    assert "says nothing about '3'" in prepare(capsys, card, tmp_path, code=2)
    (tmp_path / "cars_test_annos_withlabels.mat").unlink()
    text = prepare(capsys, card, tmp_path, code=2)
    assert "needs also cars_test_annos_withlabels.mat" in text


# ---- FGVC-Aircraft -------------------------------------------------------------------------------
def test_aircraft_are_labelled_by_variant(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "fgvc-aircraft-2013b" / "data"
    for number in range(5):
        write_image(data / "images" / f"{number:07d}.jpg", number)
    write_lists(
        data,
        variants=["707-320", "F/A-18"],
        images_variant_trainval=["0000000 707-320", "0000001 707-320", "0000002 F/A-18"],
        images_variant_test=["0000003 F/A-18", "0000004 707-320"],
    )
    card = small_card(tmp_path, "fgvc-aircraft", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == {
        "train": {"707-320": 2, "F-A-18": 1},
        "test": {"707-320": 1, "F-A-18": 1},
    }


# ---- Flowers-102 ---------------------------------------------------------------------------------
def write_flowers(folder: Path, **splits: list[int]) -> None:
    """Write six flowers of three species."""
    for number in range(1, 7):
        write_image(folder / "jpg" / f"image_{number:05d}.jpg", number)
    write_mat(folder / "imagelabels.mat", labels=np.array([[1, 1, 2, 77, 77, 77]], np.uint8))
    numbers: dict[str, Any] = {
        name: np.array([values], np.uint16) for name, values in splits.items()
    }
    write_mat(folder / "setid.mat", **numbers)


def test_flowers_of_train_and_validation_lists_become_train(
    tmp_path: Path, capsys: Captured
) -> None:
    write_flowers(tmp_path, trnid=[2, 3], valid=[4], tstid=[1, 5, 6])
    card = small_card(tmp_path, "flowers102", num_classes=3)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == {
        "train": {"001": 1, "002": 1, "077": 1},
        "test": {"001": 1, "077": 2},
    }
    original = (tmp_path / "jpg" / "image_00004.jpg").read_bytes()
    assert image_at(tmp_path, "train", "077", "image_00004.jpg") == original


def test_a_flower_without_a_label_is_refused(tmp_path: Path, capsys: Captured) -> None:
    write_flowers(tmp_path, trnid=[2, 3], valid=[7], tstid=[1])
    card = small_card(tmp_path, "flowers102", num_classes=3)
    assert "image 7 is none of the 6" in prepare(capsys, card, tmp_path, code=2)


# ---- .mat files ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"MATLAB 7.3 MAT-file".ljust(512, b"\0") + b"\x89HDF\r\n\x1a\n", "of MATLAB 7.3"),
        (b"", "it has no header of version 5"),
        (b"no .mat file" * 50, "cannot be read as a .mat file"),
    ],
)
def test_files_other_than_mat_version_5_are_refused(
    tmp_path: Path, capsys: Captured, data: bytes, words: str
) -> None:
    write_flowers(tmp_path, trnid=[2, 3], valid=[4], tstid=[1])
    (tmp_path / "setid.mat").write_bytes(data)
    card = small_card(tmp_path, "flowers102", num_classes=3)
    assert words in prepare(capsys, card, tmp_path, code=2)


def test_incomplete_mat_file_is_refused(tmp_path: Path, capsys: Captured) -> None:
    card = small_card(tmp_path, "flowers102", num_classes=3)
    write_flowers(tmp_path, trnid=[2, 3], valid=[4])
    assert "has no variable 'tstid'" in prepare(capsys, card, tmp_path, code=2)
    data = (tmp_path / "imagelabels.mat").read_bytes()
    (tmp_path / "imagelabels.mat").write_bytes(data[:-20])
    assert "imagelabels.mat cannot be read" in prepare(capsys, card, tmp_path, code=2)
    write_mat(tmp_path / "imagelabels.mat", labels="words")
    assert "has no whole numbers where" in prepare(capsys, card, tmp_path, code=2)


def test_mat_file_that_unpacks_beyond_the_limit_is_refused(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_flowers(tmp_path, trnid=[2, 3], valid=[4], tstid=[1])
    write_mat(tmp_path / "imagelabels.mat", labels=np.zeros((1, 8 << 20), np.uint8))
    assert (tmp_path / "imagelabels.mat").stat().st_size < 1 << 16
    monkeypatch.setattr(matlab, "MAX_BYTES", 1 << 20)
    card = small_card(tmp_path, "flowers102", num_classes=3)
    text = prepare(capsys, card, tmp_path, code=2)
    assert "unpacks to more than 1048576 bytes" in text


# ---- DTD, Stanford Dogs, Places365 ---------------------------------------------------------------
def test_textures_of_train_and_validation_lists_become_train(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "dtd"
    paths: list[str] = []
    for label in ("banded", "dotted"):
        paths += [f"{label}/{label}_{number:04d}.jpg" for number in (1, 2, 3)]
    for index, path in enumerate(paths):
        write_image(folder / "images" / path, index)
    write_lists(
        folder / "labels", train1=paths[::3], val1=paths[1::3], test1=paths[2::3], train2=paths
    )
    card = small_card(tmp_path, "dtd", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == {
        "train": {"banded": 2, "dotted": 2},
        "test": {"banded": 1, "dotted": 1},
    }


@pytest.mark.parametrize("lists", ["", "lists"])
def test_dogs_are_prepared_from_mat_file_lists(
    tmp_path: Path, capsys: Captured, lists: str
) -> None:
    breeds = ("n02085620-Chihuahua", "n02085782-Japanese_spaniel")
    paths = [f"{breed}/{breed[:9]}_{number}.jpg" for breed in breeds for number in (1, 2, 3)]
    for index, path in enumerate(paths):
        write_image(tmp_path / "Images" / path, index)
    for name, part in (("train_list", paths[::3] + paths[1::3]), ("test_list", paths[2::3])):
        labels = np.ones((len(part), 1), np.uint8)
        write_mat(tmp_path / lists / f"{name}.mat", file_list=cells(part), labels=labels)
    card = small_card(tmp_path, "stanford-dogs", num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == {"train": dict.fromkeys(breeds, 2), "test": dict.fromkeys(breeds, 1)}


@pytest.mark.parametrize("folder", ["data_256", "data_large_standard"])
def test_places_are_labelled_by_category_paths(
    tmp_path: Path, capsys: Captured, folder: str
) -> None:
    train = ["/a/airfield/00000001.jpg", "/a/apartment_building/outdoor/00000001.jpg"]
    for index, path in enumerate(train):
        write_image(tmp_path / folder / path.strip("/"), index)
    for number in (1, 2, 3):
        write_image(tmp_path / "val_256" / f"Places365_val_{number:08d}.jpg", 5 + number)
    write_lists(
        tmp_path,
        categories_places365=["/a/airfield 0", "/a/apartment_building/outdoor 8"],
        places365_train_standard=[f"{train[0]} 0", f"{train[1]} 8"],
        places365_val=[
            f"Places365_val_{number:08d}.jpg {8 * (number > 1)}" for number in (1, 2, 3)
        ],
    )
    card = small_card(tmp_path, "places365", num_classes=2)
    prepare(capsys, card, tmp_path)
    building = "apartment_building-outdoor"
    assert labels_of(card) == {
        "train": {"airfield": 1, building: 1},
        "test": {"airfield": 1, building: 2},
    }


# ---- WikiArt and Sketches ------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["wikiart", "sketches"])
def test_class_folders_are_used_unchanged(tmp_path: Path, capsys: Captured, name: str) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for label in ("claude-monet", "paul_klee"):
            for number in range(count):
                write_image(tmp_path / "copy" / split / label / f"{number}.png", number)
    card = small_card(tmp_path, name, num_classes=2)
    prepare(capsys, card, tmp_path)
    labels = ("claude-monet", "paul_klee")
    assert labels_of(card) == {"train": dict.fromkeys(labels, 3), "test": dict.fromkeys(labels, 2)}


# ---- ImageNet ------------------------------------------------------------------------------------
TENCH, GOLDFISH, TOILET = "n01440764", "n01443537", "n15075141"  # TOILET is not on imagenet100
KIT = "ILSVRC2012_devkit_t12/data"


def write_imagenet(folder: Path, images: str = "") -> None:
    """Write two train images of each of three classes, and three validation images."""
    for label in (TENCH, GOLDFISH, TOILET):
        for number in (1, 2):
            name = f"{label}_{number}.JPEG"
            write_image(folder / images / "train" / label / name, number)
    for number in (1, 2, 3):
        write_image(folder / images / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 5 + number)


def write_kit(folder: Path) -> None:
    """Write the labels of the validation images; the kit's class numbers differ from ours."""
    numbers = {1: TOILET, 2: TENCH, 3: GOLDFISH}
    rows = [{"ILSVRC2012_ID": number, "WNID": label} for number, label in numbers.items()]
    write_mat(folder / "meta.mat", synsets=structs(rows).T)
    write_lists(folder, ILSVRC2012_validation_ground_truth=["2", "1", "3"])


@pytest.mark.parametrize("kit", ["", "data", KIT])
def test_the_development_kit_labels_validation_images(
    tmp_path: Path, capsys: Captured, kit: str
) -> None:
    write_imagenet(tmp_path / "imagenet")
    write_kit(tmp_path / "imagenet" / kit)
    card = small_card(tmp_path, "imagenet", num_classes=3)
    prepare(capsys, card, tmp_path / "imagenet")
    labels = (TENCH, GOLDFISH, TOILET)
    assert labels_of(card) == {"train": dict.fromkeys(labels, 2), "test": dict.fromkeys(labels, 1)}
    for number, label in ((1, TENCH), (2, TOILET), (3, GOLDFISH)):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        original = (tmp_path / "imagenet" / "val" / name).read_bytes()
        assert image_at(tmp_path, "val", label, name) == original


def test_kaggle_imagenet_is_labelled_by_its_csv_table(tmp_path: Path, capsys: Captured) -> None:
    write_imagenet(tmp_path, "ILSVRC/Data/CLS-LOC")
    rows = ["ImageId,PredictionString"]
    for number, label in ((2, TENCH), (1, TOILET), (3, GOLDFISH)):
        rows.append(f"ILSVRC2012_val_{number:08d},{label} 85 1 499 272 {label} 1 2 3 4 ")
    (tmp_path / "LOC_val_solution.csv").write_text("\r\n".join(rows))
    card = small_card(tmp_path, "imagenet", num_classes=3)
    prepare(capsys, card, tmp_path)
    assert labels_of(card)["test"] == dict.fromkeys((TENCH, GOLDFISH, TOILET), 1)
    name = "ILSVRC2012_val_00000002.JPEG"
    original = tmp_path / "ILSVRC/Data/CLS-LOC/val" / name
    assert image_at(tmp_path, "val", TENCH, name) == original.read_bytes()


def test_imagenet_100_has_only_the_classes_of_its_card(tmp_path: Path, capsys: Captured) -> None:
    write_imagenet(tmp_path / "imagenet")
    write_kit(tmp_path / "imagenet")
    card = small_card(tmp_path, "imagenet100", num_classes=2, classes=[TENCH, GOLDFISH])
    prepare(capsys, card, tmp_path / "imagenet")
    labels = (TENCH, GOLDFISH)
    assert labels_of(card) == {"train": dict.fromkeys(labels, 2), "test": dict.fromkeys(labels, 1)}


def test_packed_class_archives_are_refused_with_unpack_command(
    tmp_path: Path, capsys: Captured
) -> None:
    write_kit(tmp_path / KIT)
    write_image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / f"{TENCH}.tar").touch()
    card = small_card(tmp_path, "imagenet", num_classes=3)
    text = prepare(capsys, card, tmp_path, code=2)
    assert f"cd {tmp_path}/train && for class in n*.tar; do" in text


@pytest.mark.parametrize(
    ("name", "labels"), [("imagenet", (TENCH, GOLDFISH)), ("places365", ("airfield", "zen_garden"))]
)
def test_validation_images_in_class_folders_are_used_unchanged(
    tmp_path: Path, capsys: Captured, name: str, labels: tuple[str, ...]
) -> None:
    for split, count in (("train", 2), ("val", 1)):
        for label in labels:
            for number in range(count):
                write_image(tmp_path / "unpacked" / split / label / f"{number}.jpg", number)
    card = small_card(tmp_path, name, num_classes=2)
    prepare(capsys, card, tmp_path)
    assert labels_of(card) == {"train": dict.fromkeys(labels, 2), "test": dict.fromkeys(labels, 1)}
