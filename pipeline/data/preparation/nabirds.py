"""NABirds: the lists of CUB-200-2011, with identifiers instead of image numbers.

classes.txt contains the whole hierarchy, in which names may repeat; only the leaves have images.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation import cub
from pipeline.data.preparation.base import LabelledImage, OfficialLayout, map_class_folders
from pipeline.data.preparation.official import OfficialFolder
from workers.errors import UserError


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images. A class is named by its number and name, e.g. `0817.Oak_Titmouse`."""
    names = files.table(cub.CLASSES)
    where = files.where(cub.CLASSES)
    numbered: list[tuple[str, str]] = []
    for number, name in names.items():
        if not number.isdecimal():
            raise UserError(f"{where}: {number!r:.60} is not a number of a class; fetch it again")
        numbered.append((number, f"{number:0>4}.{name.replace(' ', '_')}"))
    return cub.read_lists(files, map_class_folders(numbered, where))


LAYOUTS = (OfficialLayout(cub.NEEDS, read),)
