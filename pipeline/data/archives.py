"""The key `archive` of a card: official files of a data set that the user downloads by hand."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workers.job import Frozen

# each name is a module in pipeline/data/preparation
OfficialLayout = Literal[
    "class_folders",
    "cub",
    "dtd",
    "fgvc_aircraft",
    "flowers",
    "imagenet",
    "nabirds",
    "places365",
    "stanford_cars",
    "stanford_dogs",
]


class Archive(Frozen):
    """The official files of a data set that the user downloads by hand."""

    address: str = Field(
        min_length=1, description="where to download them by hand, and their content"
    )
    layout: OfficialLayout | None = Field(
        None,
        description="how they are laid out, for `accrete data prepare`; null: they are used as "
        "they are, unpacked at source.path",
    )
    crop: bool = Field(False, description="images are cut to their bounding boxes")
