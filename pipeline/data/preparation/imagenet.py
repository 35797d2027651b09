"""ImageNet-1k: train in folders by WordNet id, and all validation images in one folder.

The official validation set is used as test. Its labels come from the development kit
(`ILSVRC2012_devkit_t12`), in which line N is the class of image N, or from LOC_val_solution.csv of
the Kaggle edition.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from pipeline.data.preparation import matlab
from pipeline.data.preparation.base import LabelledImage, OfficialLayout, look_up_value
from pipeline.data.preparation.class_folders import read_with_val
from pipeline.data.preparation.official import OfficialFolder
from workers.errors import UserError

KIT = "ILSVRC2012_devkit_t12/data"
TRUTH = tuple(
    f"{folder}ILSVRC2012_validation_ground_truth.txt" for folder in (f"{KIT}/", "data/", "")
)
META = tuple(f"{folder}meta.mat" for folder in (f"{KIT}/", "data/", ""))
SOLUTION = "LOC_val_solution.csv"
KAGGLE_IMAGES = "ILSVRC/Data/CLS-LOC"
SYNSET_FIELDS = ("ILSVRC2012_ID", "WNID")
WORDNET_ID = re.compile("n[0-9]{8}")


def read_with_kit(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield the images of train, and those of val as test, with labels of the development kit."""
    yield from read_train(files, "train")
    classes = read_wordnet_ids(files)
    truth = files.need(TRUTH)
    for image, (number,) in enumerate(files.rows(truth, 1), start=1):
        label = look_up_value(classes, number, files.where(files.need(META)))
        yield LabelledImage("test", label, f"val/ILSVRC2012_val_{image:08d}.JPEG")


def read_kaggle(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of the Kaggle edition."""
    yield from read_train(files, f"{KAGGLE_IMAGES}/train")
    where = files.where(SOLUTION)
    for image, prediction in files.rows(SOLUTION, 2, separator=","):
        if image == "ImageId":
            continue
        label = _wordnet_id(prediction.split(" ")[0], where)
        yield LabelledImage("test", label, f"{KAGGLE_IMAGES}/val/{image}.JPEG")


def read_train(files: OfficialFolder, folder: str) -> Iterator[LabelledImage]:
    """Yield the images in the folders of WordNet ids; raise `UserError` if they do not exist."""
    labels = [name for name in files.subfolders(folder) if WORDNET_ID.fullmatch(name)]
    if not labels:
        path = shlex.quote(files.absolute(folder))
        raise UserError(
            f"{files.where(folder)} has no folder of a WordNet id such as n01440764; unpack the "
            f"archive of each class: cd {path} && for class in n*.tar; do "
            'mkdir -p "${class%.tar}" && tar -xf "$class" -C "${class%.tar}"; done'
        )
    for label in labels:
        for path in files.images(f"{folder}/{label}"):
            yield LabelledImage("train", label, path)


def read_wordnet_ids(files: OfficialFolder) -> dict[str, str]:
    """Map the number of each class in the development kit to its WordNet id."""
    name = files.need(META)
    where = files.where(name)
    rows = matlab.require_structs(files.matlab(name, ["synsets"])["synsets"], where, SYNSET_FIELDS)
    ids: dict[str, str] = {}
    for row in rows:
        number = matlab.require_integer(row["ILSVRC2012_ID"], where)
        ids[str(number)] = _wordnet_id(matlab.require_text(row["WNID"], where), where)
    return ids


def _wordnet_id(text: str, where: str) -> str:
    if WORDNET_ID.fullmatch(text) is None:
        raise UserError(
            f"{where}: {text!r:.60} is not a WordNet id such as n01440764; fetch the official "
            "files again"
        )
    return text


# present if the validation images are already in class folders; n01440764 is the first class
SORTED = (("train/n01440764",), ("val/n01440764",))
LAYOUTS = (
    OfficialLayout(SORTED, read_with_val),
    OfficialLayout((("train",), ("val",), TRUTH, META), read_with_kit),
    OfficialLayout(
        ((SOLUTION,), (f"{KAGGLE_IMAGES}/train",), (f"{KAGGLE_IMAGES}/val",)), read_kaggle
    ),
)
