"""CUB-200-2011: `CUB_200_2011/images/CLASS/*.jpg` and lists that identify images by number."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation.base import (
    ImageBox,
    LabelledImage,
    OfficialLayout,
    choose_split,
    look_up_value,
    map_class_folders,
    parse_box,
)
from pipeline.data.preparation.official import OfficialFolder

IMAGES = "images.txt"
LABELS = "image_class_labels.txt"
SPLIT = "train_test_split.txt"
CLASSES = "classes.txt"
BOXES = "bounding_boxes.txt"
NEEDS = ((IMAGES,), (LABELS,), (SPLIT,), (CLASSES,), ("images",))


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images. A class has the name of the folder, e.g. `001.Black_footed_Albatross`."""
    names = files.table(CLASSES)
    return read_lists(files, map_class_folders(names.items(), files.where(CLASSES)))


def read_lists(files: OfficialFolder, classes: dict[str, str]) -> Iterator[LabelledImage]:
    """Yield all images of the lists. `classes` maps the number of a class to its folder."""
    labels = files.table(LABELS)
    splits = files.table(SPLIT)
    boxes = read_boxes(files)
    for image, path in files.rows(IMAGES, 2):
        number = look_up_value(labels, image, files.where(LABELS))
        is_train = look_up_value(splits, image, files.where(SPLIT)) == "1"
        yield LabelledImage(
            choose_split(is_train),
            look_up_value(classes, number, files.where(CLASSES)),
            f"images/{path}",
            boxes.get(image),
        )


def read_boxes(files: OfficialFolder) -> dict[str, ImageBox]:
    """Map the number of each image to its box; the result is empty if the list is missing."""
    if files.first((BOXES,)) is None:
        return {}
    where = files.where(BOXES)
    return {image: parse_box(numbers, where) for image, *numbers in files.rows(BOXES, 5)}


LAYOUTS = (OfficialLayout(NEEDS, read),)
