"""The folder that a card reads: `SPLIT/CLASS/IMAGE`, filled with links, copies or crops."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.data.formats.base import MAX_IMAGE_BYTES
from pipeline.data.names import printable
from pipeline.data.preparation.base import ImageBox, LabelledImage
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split
from workers.data.decoding import open_image, to_rgb
from workers.errors import UserError
from workers.storage.regular_file import read_regular

UNFINISHED = ".preparing-"  # prefix of the name of an incomplete folder
JPEG_QUALITY = 95
THREADS = 4
MAX_WAITING = 64  # images being cropped or waiting


class TargetFolder:
    """A folder to fill.

    Args:
        path: Path of the folder.
        splits: Sub-folder of each split.

    Raises:
        UserError: If the sub-folder of a split exists.
    """

    def __init__(self, path: str, splits: Mapping[Split, str]):
        self.path = path
        self.splits = splits
        for name in splits.values():
            split_path = os.path.join(path, name)
            if os.path.lexists(split_path):
                raise UserError(
                    f"{printable(split_path)} is there already and is not overwritten; use it, or "
                    f"prepare it again after `rm -r {shlex.quote(split_path)}`, or name another "
                    "folder with --to"
                )

    def write(
        self, files: OfficialFolder, images: Sequence[LabelledImage], crop: bool, copy: bool
    ) -> None:
        """Write the images to a hidden folder, then rename the folder of each split.

        Therefore a kill leaves no incomplete split folder.

        Args:
            files: The official files.
            images: The images.
            crop: Crop images to their boxes.
            copy: Write copies instead of links.

        Raises:
            UserError: If an image has no box or cannot be cropped, or if two images of a class have
                the same file name.
        """
        os.makedirs(self.path, exist_ok=True)
        unfinished = tempfile.mkdtemp(prefix=UNFINISHED, dir=self.path)
        try:
            self._make_folders(unfinished, images)
            if crop:
                self._cut_all(files, images, unfinished)
            else:
                self._link_all(files, images, unfinished, copy)
            for name in self.splits.values():
                os.rename(os.path.join(unfinished, name), os.path.join(self.path, name))
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _make_folders(self, unfinished: str, images: Sequence[LabelledImage]) -> None:
        for split in self.splits.values():
            os.makedirs(os.path.join(unfinished, split))
        for split, label in sorted({(image.split, image.label) for image in images}):
            os.mkdir(os.path.join(unfinished, self.splits[split], label))

    def _make_path(self, unfinished: str, image: LabelledImage) -> str:
        """Return the path of an image to write; raise `UserError` if it exists."""
        name = os.path.basename(image.path)
        path = os.path.join(unfinished, self.splits[image.split], image.label, name)
        if os.path.lexists(path):
            raise UserError(
                f"two images of class {image.label!r} are called {name!r:.80}; fetch the official "
                "files again"
            )
        return path

    def _link_all(
        self, files: OfficialFolder, images: Sequence[LabelledImage], unfinished: str, copy: bool
    ) -> None:
        write = shutil.copyfile if copy else os.symlink
        for image in images:
            write(files.absolute(image.path), self._make_path(unfinished, image))

    def _cut_all(
        self, files: OfficialFolder, images: Sequence[LabelledImage], unfinished: str
    ) -> None:
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for image in images:
                path = self._make_path(unfinished, image)
                # create it now, so that `_make_path` finds a second image of this name
                open(path, "x").close()
                waiting.append(pool.submit(write_crop, files, image, path))
                if len(waiting) >= MAX_WAITING:
                    waiting.popleft().result()
            for future in waiting:
                future.result()


def write_crop(files: OfficialFolder, image: LabelledImage, path: str) -> None:
    """Crop an image to its box and write the result.

    A JPEG is written as JPEG without chroma subsampling, other formats as PNG.

    Raises:
        UserError: If the image has no box, or cannot be decoded.
    """
    if image.box is None:
        raise UserError(
            f"{files.where(image.path)} has no bounding box in the lists; fetch the list of boxes "
            "too"
        )
    try:
        data = read_regular(files.absolute(image.path), MAX_IMAGE_BYTES)
        encoded = crop_image(data, image.box)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0:1] or [type(error).__name__]
        raise UserError(
            f"{files.where(image.path)} cannot be cut to its box ({reason[0]:.200}); fetch the "
            "archive of the images again"
        ) from None
    with open(path, "wb") as stream:
        stream.write(encoded)


def crop_image(data: bytes, box: ImageBox) -> bytes:
    """Crop an encoded image to a box, which is rounded outwards and clipped at the borders.

    Boxes refer to the pixels as stored, before the EXIF orientation is applied. The result is
    upright.

    Raises:
        ValueError: If the box contains no pixel of the image.
        OSError: If the bytes are not an image.
    """
    image = open_image(data)
    left = max(int(box.left), 0)
    top = max(int(box.top), 0)
    right = min(-int(-box.right // 1), image.width)
    bottom = min(-int(-box.bottom // 1), image.height)
    if left >= right or top >= bottom:
        raise ValueError(f"its box {tuple(box)} holds no pixel of {image.width} x {image.height}")
    part = to_rgb(image.crop((left, top, right, bottom)))
    buffer = io.BytesIO()
    if image.format == "JPEG":
        part.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    else:
        part.save(buffer, "PNG")
    return buffer.getvalue()
