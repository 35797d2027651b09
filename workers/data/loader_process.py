"""The program of the loader processes, which make images for a rank.

`workers/data/loaders.py` starts `python -m workers.data.loader_process MEMORY REQUESTS REPLIES
COUNT`; the first three arguments are file descriptors. This server process imports torch once and
forks COUNT loader processes, which share its memory. All loaders read from one request pipe. Each
message is one chunk: a few consecutive images of a block (`workers/data/shared_blocks.py`). An idle
loader takes the next chunk. Loaders exit when the rank closes its end of the pipe or is killed.
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
from workers.data.image_maker import Decode, ImageMaker, Normalisation, ReadPicture, ReadSquare
from workers.data.shared_blocks import DIED, READY, TOKEN, Block
from workers.storage.regular_file import regular_descriptor

MAX_BLOCKS = 32  # maximum number of blocks that a loader keeps mapped
MAX_FILES = 64  # maximum number of shards that a `ChunkMaker` keeps open
MAX_SPECS = 4  # maximum number of `ChunkMaker` objects that a loader keeps
WARM_UP_SIDE = 64  # side of the image of `warm_up`, in pixels


class ImageSpec(NamedTuple):
    """How a loader makes the images of a feed.

    Attributes:
        files: Path of each shard. "" for a shard that the rank reads itself.
        sizes: Expected size of each shard in bytes. A file of another size is an error.
        limits: Decoding limits of each shard.
        decode: Decodes an image file.
        kept_path: File with decoded pictures, which is read instead of shards. "": none.
        view: Size and crop of the images. None: the loader returns the decoded pictures.
        normalisation: Applied to the images. None: they stay uint8.
    """

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    limits: tuple[ImageLimits, ...]
    decode: Decode
    kept_path: str = ""
    view: View | None = None
    normalisation: Normalisation | None = None

    def to_bytes(self) -> bytes:
        """Serialize to JSON."""
        normalisation = None
        if self.normalisation is not None:
            normalisation = [part.flatten().tolist() for part in self.normalisation]
        decode: Any = self.decode
        if isinstance(decode, ReadSquare):
            decode = [astuple(decode.view)]
        view = self.view and astuple(self.view)
        fields = (self.files, self.sizes, self.limits, decode, self.kept_path, view, normalisation)
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ImageSpec:
        """Parse the output of `to_bytes`."""
        files, sizes, limits, decode, kept_path, view, scale_and_shift = json.loads(data)
        [read] = decode
        normalisation = None
        if scale_and_shift is not None:
            normalisation = Normalisation(
                *(torch.tensor(values).view(3, 1, 1) for values in scale_and_shift)
            )
        return cls(
            tuple(files),
            tuple(sizes),
            tuple(ImageLimits(pixels, span and tuple(span)) for pixels, span in limits),
            ReadSquare(View(*read)) if isinstance(read, list) else ReadPicture(read),
            kept_path,
            view and View(*view),
            normalisation,
        )


class ChunkMaker:
    """Makes the images of chunks for one `ImageSpec`. Keeps shards open between chunks."""

    def __init__(self, spec: ImageSpec):
        self.spec = spec
        self.arena = Arena()
        self.maker = ImageMaker(spec.view, spec.normalisation) if spec.view else None
        self.files: OrderedDict[int, int] = OrderedDict()  # index of a shard -> file descriptor
        self.kept_pixels: NDArray[np.uint8] | None = None
        if spec.kept_path:
            self.kept_pixels = np.asarray(np.memmap(spec.kept_path, np.uint8, "r"))

    def make(self, block: Block, chunk: int) -> None:
        """Make the images of chunk number `chunk` of a block, and mark them as made."""
        start, stop = block.borders[chunk : chunk + 2].tolist()
        requests = block.requests[start:stop]
        pictures = self._find_kept(requests)
        if self.kept_pixels is None:
            pictures = self._decode(block, requests)
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
            image_slots = requests["slot"].astype(np.int64)
            self.maker.make(pictures, images, image_slots, crops, np.arange(len(requests)))
        requests["is_made"] = True

    def _find_kept(self, requests: NDArray[Any]) -> Iterator[Picture]:
        assert self.kept_pixels is not None
        shapes = requests["shape"].tolist()
        for offset, (height, width, *sides) in zip(
            requests["offset"].tolist(), shapes, strict=True
        ):
            pixels = self.kept_pixels[offset : offset + 3 * height * width]
            yield Picture(pixels.reshape(height, width, 3), *sides)

    def _decode(self, block: Block, requests: NDArray[Any]) -> Iterator[Picture]:
        last = None
        names = ("file", "offset", "size", "is_inline", "digest")
        for request in zip(*(requests[name].tolist() for name in names), strict=True):
            if request != last:  # copies of an image are decoded once
                self.arena.clear()
                data = self._read(block, *request)
                picture = self.spec.decode(data, self.spec.limits[request[0]], self.arena)
                last = request
            yield picture

    def _read(
        self, block: Block, file: int, offset: int, size: int, is_inline: bool, digest: bytes
    ) -> bytes:
        if is_inline:
            return bytes(block.data()[offset : offset + size])
        data = os.pread(self._open(file), size, offset)
        if not is_intact(data, digest):
            raise OSError("the bytes in the shard differ from the index")
        return data

    def _open(self, number: int) -> int:
        descriptor = self.files.get(number)
        if descriptor is None:
            descriptor = regular_descriptor(self.spec.files[number])
            if os.fstat(descriptor).st_size != self.spec.sizes[number]:
                os.close(descriptor)
                raise OSError("the shard has another size")
            self.files[number] = descriptor
            if len(self.files) > MAX_FILES:
                os.close(self.files.popitem(last=False)[1])
        self.files.move_to_end(number)
        return descriptor

    def close(self) -> None:
        """Close the shards."""
        while self.files:
            os.close(self.files.popitem()[1])


class Loader:
    """Makes the images of requested chunks.

    Args:
        memory: File descriptor of the shared memory.
    """

    def __init__(self, memory: int):
        self.memory = memory
        self.has_failed = False
        self.blocks: OrderedDict[int, Block] = OrderedDict()
        self.makers: OrderedDict[int, ChunkMaker] = OrderedDict()

    @torch.inference_mode()  # resizing a crop skips the dispatch of autograd
    def make(self, page: int, chunk: int) -> None:
        """Make the images of a chunk.

        After an error, the images are not marked as made. The rank then makes them itself, and
        raises the error for the user if it occurs again. Only the first error is printed.

        Args:
            page: First page of the block in the shared memory.
            chunk: Number of the chunk in the block.
        """
        try:
            block = self._block(page)
            self._chunk_maker(block).make(block, chunk)
        except Exception as error:
            if not self.has_failed:
                self.has_failed = True
                print(f"loader process {os.getpid()}: {error!r:.300}", file=sys.stderr, flush=True)

    def _block(self, page: int) -> Block:
        block = self.blocks.get(page)
        if block is None:
            block = Block.open(self.memory, page)
            self.blocks[page] = block
            if len(self.blocks) > MAX_BLOCKS:
                self.blocks.popitem(last=False)
        self.blocks.move_to_end(page)
        return block

    def _chunk_maker(self, block: Block) -> ChunkMaker:
        page = block.get("spec_page")
        chunk_maker = self.makers.get(page)
        if chunk_maker is None:
            stored = Block.open(self.memory, page)
            spec = ImageSpec.from_bytes(bytes(stored.data()[: block.get("spec_bytes")]))
            chunk_maker = self.makers[page] = ChunkMaker(spec)
            if len(self.makers) > MAX_SPECS:
                self.makers.popitem(last=False)[1].close()
        self.makers.move_to_end(page)
        return chunk_maker


def serve_requests(memory: int, requests: int, replies: int) -> None:
    """Serve requests until the rank closes the request pipe or dies.

    All arguments are file descriptors.

    Args:
        memory: The shared memory.
        requests: The pipe from which chunks are read.
        replies: The pipe to which finished chunks are written.
    """
    loader = Loader(memory)
    with suppress(BrokenPipeError):
        os.write(replies, TOKEN.pack(READY, 0))
        while token := os.read(requests, TOKEN.size):
            loader.make(*TOKEN.unpack(token))
            os.write(replies, token)


def warm_up() -> None:
    """Make one image before the fork, so that loaders share the memory that this allocates."""
    file = io.BytesIO()
    Image.new("RGB", (WARM_UP_SIDE, WARM_UP_SIDE)).save(file, "JPEG")
    picture = read_picture(file.getvalue())
    Cutter(WARM_UP_SIDE // 2).resize(picture.pixels, Box(0, 0, WARM_UP_SIDE, WARM_UP_SIDE))


def main() -> None:
    """Fork the loaders, wait for them, and report an unexpected exit to the rank."""
    memory, requests, replies, count = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored: loaders exit when the rank does
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, `os.wait` does not work
    torch.set_num_threads(1)
    warm_up()
    gc.collect()
    gc.freeze()  # otherwise the collector writes to shared pages, and the kernel copies them
    loaders = set()
    for _ in range(count):
        pid = os.fork()
        if not pid:
            serve_requests(memory, requests, replies)
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
