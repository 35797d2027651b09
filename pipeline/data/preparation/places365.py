"""Places365-Standard: a folder of images for each split, and lists of paths and class numbers.

Both image sizes are supported, small (256) and large. The official validation set is used as test.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation.base import (
    LabelledImage,
    OfficialLayout,
    look_up_value,
    map_class_folders,
)
from pipeline.data.preparation.class_folders import read_with_val
from pipeline.data.preparation.official import OfficialFolder
from workers.errors import UserError

CLASSES = "categories_places365.txt"
TRAIN = "places365_train_standard.txt"
TEST = "places365_val.txt"
# folder names in the archives, and the names that torchvision gives to the folders
TRAIN_IMAGES = ("data_256", "data_256_standard", "data_large", "data_large_standard")
TEST_IMAGES = ("val_256", "val_large")


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images. `/a/apartment_building/outdoor` becomes apartment_building-outdoor."""
    where = files.where(CLASSES)
    classes = map_class_folders(_categories(files), where)
    train_images = files.need(TRAIN_IMAGES)
    for path, number in files.rows(TRAIN, 2):
        label = look_up_value(classes, number, where)
        yield LabelledImage("train", label, f"{train_images}/{path.removeprefix('/')}")
    test_images = files.need(TEST_IMAGES)
    for path, number in files.rows(TEST, 2):
        label = look_up_value(classes, number, where)
        yield LabelledImage("test", label, f"{test_images}/{path.removeprefix('/')}")


def _categories(files: OfficialFolder) -> Iterator[tuple[str, str]]:
    """Yield number and name of each class, without the letter at the start of the path."""
    for path, number in files.rows(CLASSES, 2):
        parts = path.strip("/").split("/")
        if len(parts) < 2:
            raise UserError(
                f"{files.where(CLASSES)}: {path!r:.60} is not a path of a category; fetch it again"
            )
        yield number, "/".join(parts[1:])


NEEDS = ((CLASSES,), (TRAIN,), (TEST,), TRAIN_IMAGES, TEST_IMAGES)
SORTED = (("train/airfield",), ("val/airfield",))  # layout of the archive "easyformat"
LAYOUTS = (OfficialLayout(NEEDS, read), OfficialLayout(SORTED, read_with_val))
