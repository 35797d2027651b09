"""NABirds: lists as CUB-200-2011 has them, with an identifier in place of an image's number.

classes.txt has the whole hierarchy, in which a name may occur again; only the leaves have images.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation import cub
from pipeline.data.preparation.base import LabelledImage, OfficialLayout, class_names
from pipeline.data.preparation.official import OfficialFolder
from workers.errors import UserError


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images; a class is called by its number and name, `0817.Oak_Titmouse`."""
    names = files.table(cub.CLASSES)
    where = files.where(cub.CLASSES)
    numbered: list[tuple[str, str]] = []
    for number, name in names.items():
        if not number.isdecimal():
            raise UserError(f"{where}: {number!r:.60} is not a number of a class; fetch it again")
        numbered.append((number, f"{number:0>4}.{name.replace(' ', '_')}"))
    return cub.read_lists(files, class_names(numbered, where))


LAYOUTS = (OfficialLayout(cub.NEEDS, read),)
