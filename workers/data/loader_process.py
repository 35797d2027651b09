"""A loader process: it makes images for a rank, beside the rank's interpreter lock.

`python -m workers.data.loader_process MEMORY REQUESTS REPLIES COUNT`, with the descriptors of
`workers/data/loaders.py`, starts a server that imports what is needed once, and forks COUNT loaders
from it. They share its memory, and read requests from one pipe, so that whoever is idle takes the
next. All of them end when the rank closes its end of that pipe, or is killed.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from workers.data.arena import Arena
from workers.data.crops import Box, CropDraws, Cutter, View
from workers.data.decoding import ImageLimits, Picture, is_intact, read_picture
from workers.data.making import Decode, ImageMaker, ReadPicture, ReadSquare, Statistics
from workers.data.shared_blocks import DIED, READY, TOKEN, Block
from workers.storage.regular_file import regular_descriptor

MOST_BLOCKS = 32  # that a loader has mapped
MOST_FILES = 64  # that a loader has open
MOST_RECIPES = 4
SOME_SIDE = 64


class Recipe(NamedTuple):
    """How the images of some requests are made.

    Attributes:
        files: Paths of shards; of those that no loader can open, nothing.
        sizes: Bytes of each shard; a file of another size is not read.
        limits: Of the images of each shard.
        decode: Makes a picture of the bytes of an image.
        kept: Path of the file with kept pictures, which are not decoded; nothing without.
        view: Of the images that are made of pictures; None: they are the pictures' pixels.
        statistics: Of the network that images are normalised for; None: they stay uint8.
    """

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    limits: tuple[ImageLimits, ...]
    decode: Decode
    kept: str = ""
    view: View | None = None
    statistics: Statistics | None = None

    def to_bytes(self) -> bytes:
        """Return the recipe as JSON."""
        statistics = None
        if self.statistics is not None:
            statistics = [part.flatten().tolist() for part in self.statistics]
        decode: Any = self.decode
        if isinstance(decode, ReadSquare):
            decode = [astuple(decode.view)]
        view = self.view and astuple(self.view)
        fields = (self.files, self.sizes, self.limits, decode, self.kept, view, statistics)
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Recipe:
        """Return the recipe that `to_bytes` wrote."""
        files, sizes, limits, decode, kept, view, statistics = json.loads(data)
        [read] = decode
        return cls(
            tuple(files),
            tuple(sizes),
            tuple(ImageLimits(pixels, span and tuple(span)) for pixels, span in limits),
            ReadSquare(View(*read)) if isinstance(read, list) else ReadPicture(read),
            kept,
            view and View(*view),
            statistics and Statistics(*(torch.tensor(part).view(3, 1, 1) for part in statistics)),
        )


class Kitchen:
    """What a loader needs to follow a recipe."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.arena = Arena()
        self.maker = ImageMaker(recipe.view, recipe.statistics) if recipe.view else None
        self.files: OrderedDict[int, int] = OrderedDict()  # descriptors of shards
        self.kept: NDArray[np.uint8] | None = None
        if recipe.kept:
            self.kept = np.asarray(np.memmap(recipe.kept, np.uint8, "r"))

    def make(self, block: Block, chunk: int) -> None:
        """Make the images of a chunk, and mark them as made."""
        start, stop = block.borders[chunk : chunk + 2].tolist()
        requests = block.requests[start:stop]
        pictures = self._kept(requests) if self.recipe.kept else self._decoded(block, requests)
        if self.maker is None:
            slots = block.pixels().reshape(-1, block.get("slot_bytes"))
            for slot, picture in zip(requests["slot"].tolist(), pictures, strict=True):
                height, width, _ = picture.pixels.shape
                slots[slot, : picture.pixels.size].reshape(height, width, 3)[...] = picture.pixels
                shape = (height, width, picture.height, picture.width)
                block.requests["shape"][start] = shape
                start += 1
        else:
            view = self.maker.view
            images = torch.from_numpy(block.pixels()).view(self.maker.dtype)
            images = images.view(-1, 3, view.side, view.side)
            crops = CropDraws.load(requests) if view.longest_side is not None else None
            places = requests["slot"].astype(np.int64)
            self.maker.make(pictures, images, places, crops, np.arange(len(requests)))
        requests["is_made"] = True

    def _kept(self, requests: NDArray[Any]) -> Iterator[Picture]:
        assert self.kept is not None
        shapes = requests["shape"].tolist()
        for offset, (height, width, *sides) in zip(
            requests["offset"].tolist(), shapes, strict=True
        ):
            pixels = self.kept[offset : offset + 3 * height * width]
            yield Picture(pixels.reshape(height, width, 3), *sides)

    def _decoded(self, block: Block, requests: NDArray[Any]) -> Iterator[Picture]:
        last = None
        names = ("file", "offset", "size", "is_here", "digest")
        for request in zip(*(requests[name].tolist() for name in names), strict=True):
            if request != last:  # copies of an image are decoded once
                self.arena.clear()
                data = self._bytes(block, *request)
                picture = self.recipe.decode(data, self.recipe.limits[request[0]], self.arena)
                last = request
            yield picture

    def _bytes(
        self, block: Block, file: int, offset: int, size: int, is_here: bool, digest: bytes
    ) -> bytes:
        if is_here:
            return bytes(block.data()[offset : offset + size])
        data = os.pread(self._file(file), size, offset)
        if not is_intact(data, digest):
            raise OSError("these are not the bytes of the image")
        return data

    def _file(self, number: int) -> int:
        descriptor = self.files.get(number)
        if descriptor is None:
            descriptor = regular_descriptor(self.recipe.files[number])
            if os.fstat(descriptor).st_size != self.recipe.sizes[number]:
                os.close(descriptor)
                raise OSError("the shard has another size")
            self.files[number] = descriptor
            if len(self.files) > MOST_FILES:
                os.close(self.files.popitem(last=False)[1])
        self.files.move_to_end(number)
        return descriptor

    def close(self) -> None:
        """Close the shards."""
        while self.files:
            os.close(self.files.popitem()[1])


class Loader:
    """Makes the images of chunks.

    Args:
        memory: Descriptor of the file with all blocks.
    """

    def __init__(self, memory: int):
        self.memory = memory
        self.blocks: OrderedDict[int, Block] = OrderedDict()
        self.kitchens: OrderedDict[int, Kitchen] = OrderedDict()

    @torch.inference_mode()  # resizing a crop skips the dispatch of autograd
    def make(self, page: int, chunk: int) -> None:
        """Make the images of a chunk. Whatever goes wrong, the rank makes those that are not marked
        as made, and finds the same error."""
        try:
            block = self._block(page)
            self._kitchen(block).make(block, chunk)
        except Exception:
            return

    def _block(self, page: int) -> Block:
        block = self.blocks.get(page)
        if block is None:
            block = Block.open(self.memory, page)
            self.blocks[page] = block
            if len(self.blocks) > MOST_BLOCKS:
                self.blocks.popitem(last=False)
        self.blocks.move_to_end(page)
        return block

    def _kitchen(self, block: Block) -> Kitchen:
        page = block.get("recipe_page")
        kitchen = self.kitchens.get(page)
        if kitchen is None:
            stored = Block.open(self.memory, page)
            recipe = Recipe.from_bytes(bytes(stored.data()[: block.get("recipe_bytes")]))
            kitchen = self.kitchens[page] = Kitchen(recipe)
            if len(self.kitchens) > MOST_RECIPES:
                self.kitchens.popitem(last=False)[1].close()
        self.kitchens.move_to_end(page)
        return kitchen


def serve(memory: int, requests: int, replies: int) -> None:
    """Make chunks until the rank closes the pipe of requests, or is gone."""
    loader = Loader(memory)
    with suppress(BrokenPipeError):
        os.write(replies, TOKEN.pack(READY, 0))
        while token := os.read(requests, TOKEN.size):
            loader.make(*TOKEN.unpack(token))
            os.write(replies, token)


def make_one_image() -> None:
    """Use what images are made with, so that loaders share what that leaves in memory."""
    file = io.BytesIO()
    Image.new("RGB", (SOME_SIDE, SOME_SIDE)).save(file, "JPEG")
    picture = read_picture(file.getvalue())
    Cutter(SOME_SIDE // 2).resize(picture.pixels, Box(0, 0, SOME_SIDE, SOME_SIDE))


def main() -> None:
    """Fork loaders, wait for them, and tell the rank of one that ends by itself."""
    memory, requests, replies, count = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank decides when loaders end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever ignores it cannot wait for loaders
    torch.set_num_threads(1)
    make_one_image()
    gc.collect()
    gc.freeze()  # so that loaders go on sharing this memory
    loaders = set()
    for _ in range(count):
        pid = os.fork()
        if not pid:
            serve(memory, requests, replies)
            os._exit(0)
        loaders.add(pid)
    os.close(requests)
    while loaders:
        pid, status = os.wait()
        loaders.discard(pid)
        if status:
            with suppress(BrokenPipeError):
                os.write(replies, TOKEN.pack(DIED, status))


if __name__ == "__main__":
    main()
