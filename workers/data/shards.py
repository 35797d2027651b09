"""Shards: the tar files and the index that ingest wrote.

They are read at random or as a stream, and every record is checked against its digest.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageOps

from workers.data.cache import Cache, CachedFile
from workers.errors import DamagedArtifact, UserError
from workers.storage import filesystem
from workers.storage.artifact import Artifact, FileInfo, resolve

INDEX = "index.parquet"
MAX_PIXELS = 50_000_000
# of all that Pillow knows: PostScript is a program, and others are seldom looked after
IMAGE_FORMATS = (
    "BMP",
    "GIF",
    "JPEG",
    "PNG",
    "PPM",
    "TIFF",
    "WEBP",
)
TILE = (322, 323)  # TIFF's tags of a tile's sides
PIECE = 16 << 20  # bytes of a shard that are asked for at a time
SCHEMA = pa.schema(
    [
        (name, pa.int64() if name in ("offset", "bytes") else pa.string())
        for name in ("split", "key", "class", "shard", "offset", "bytes", "sha256", "ext")
    ]
)
# `open_image` has its own limit, a setting, and applies it before a pixel is decoded
Image.MAX_IMAGE_PIXELS = None


class Shards:
    """The images of one ingest stage.

    index: one row per image, in the order in which the shards hold them: split, key, class, shard
    (file name), offset and bytes of the image inside the shard, sha256, ext.
    """

    def __init__(self, artifact: Artifact, index: pa.Table, cache: Cache | None = None):
        self.artifact = artifact
        self.index = index
        is_remote = "://" in artifact.root and not artifact.root.startswith("file://")
        self.cache = cache if is_remote else None
        self.max_pixels = int(artifact.manifest.get("max_pixels", MAX_PIXELS))
        self._mending = Lock()
        # Rows are read shard after shard. A shard that is open cannot leave the cache.
        self._file = lru_cache(maxsize=8)(self._open)

    @classmethod
    def open(cls, root: str, key: str, cache: Cache | None = None) -> Shards:
        """Open the result of the ingest stage `key`.

        cache: holds whole shards of remote storage; without it they are read piece by piece from
        there. Raise `DamagedArtifact` when the result is missing or its index is damaged.
        """
        artifact = Artifact.need(root, key)
        return cls(artifact, read_index(artifact), cache)

    @property
    def key(self) -> str:
        """Key of the ingest stage."""
        return self.artifact.key

    def select(self, split: str, classes: Sequence[str]) -> pa.Table:
        """The rows of a split and of `classes`, in index order, with the column `position`: the row
        in the index."""
        table = self.index.append_column("position", pa.array(np.arange(self.index.num_rows)))
        in_split = pc.equal(table["split"], split)
        in_classes = pc.is_in(table["class"], pa.array(classes, pa.string()))
        return table.filter(pc.and_(in_split, in_classes))

    def uri(self, shard: str) -> str:
        """URI of a file of the stage; of its folder for an empty name."""
        return self.artifact.uri(shard)

    def read(self, shard: str, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset` of a shard; thread-safe. Return fewer when the shard is
        truncated, which `verify` finds."""
        return self._file(shard).read_at(size, offset)

    def verify(self, record: str, data: bytes, sha256: str) -> bytes:
        """Return `data` if it is what ingest wrote, else the record's bytes in storage.

        Raise `DamagedArtifact` when those are damaged too.
        """
        if hashlib.sha256(data).hexdigest() != sha256 and self.cache is not None:
            data = self._fetched_again(record)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedArtifact(
                self.key,
                f"image {record!r} in {self.uri('')}: its bytes are not those that ingest wrote "
                "(sha256 differs from the index); run the same command again to ingest anew",
            )
        return data

    def stream(self, shards: Sequence[str], seed: int | None = None) -> Iterator[tuple[str, bytes]]:
        """Yield (key, image bytes) of all records of `shards` through WebDataset.

        Shards come in the order of `shards`, or shuffled by `seed`; records in their shard's order.
        Raise `DamagedArtifact` when a shard is cut short.
        """
        import webdataset as wds
        from webdataset.tariterators import group_by_keys, tar_file_expander

        pipeline = wds.DataPipeline(
            wds.SimpleShardList([*shards], seed=seed),
            self._opened,
            tar_file_expander,
            group_by_keys,
        )
        try:
            for sample in pipeline:
                yield sample["__key__"], _image_of(sample)
        except (tarfile.TarError, EOFError) as error:
            raise DamagedArtifact(
                self.key,
                f"a shard in {self.uri('')} is damaged ({error.args[0]}); run the same command "
                "again to ingest anew",
            ) from None

    def _opened(self, sources: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        # WebDataset's own opener knows neither s3:// nor our credentials: every shard is opened
        # through pyarrow.
        for source in sources:
            with self._open(source["url"]) as stream:
                yield {"url": source["url"], "stream": stream}

    def _open(self, shard: str) -> pa.NativeFile | CachedFile:
        """Open a shard in storage, or this node's copy of a remote one."""
        try:
            if self.cache is not None:
                info = self.artifact.manifest["files"][shard]
                return self.cache.open_file(
                    _cache_name(info),
                    info["bytes"],
                    lambda stream: self._download(shard, info, stream),
                    info["sha256"],
                )
            system, path = resolve(self.uri(shard))
            return system.open_input_file(path)
        except FileNotFoundError:
            raise DamagedArtifact(
                self.key, f"{self.uri(shard)} is missing; run the same command again to ingest anew"
            ) from None

    def _download(self, shard: str, info: FileInfo, stream: BinaryIO) -> None:
        """Write a whole shard to `stream`. Raise `DamagedArtifact` when it is not what ingest
        wrote."""
        system, path = resolve(self.uri(shard))
        digest = hashlib.sha256()
        try:
            with system.open_input_file(path) as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
                    stream.write(piece)
        except FileNotFoundError:
            raise DamagedArtifact(
                self.key, f"{self.uri(shard)} is missing; run the same command again to ingest anew"
            ) from None
        if digest.hexdigest() != info["sha256"]:
            raise DamagedArtifact(
                self.key,
                f"{self.uri(shard)} is not what ingest wrote (its sha256 differs from the "
                "manifest); run the same command again to ingest anew",
            )

    def _fetched_again(self, record: str) -> bytes:
        """Read a record again whose cached copy is damaged; drop that copy of the shard.

        One thread does it for all: the others find the new copy.
        """
        assert self.cache is not None
        row = self.index.filter(pc.equal(self.index["key"], record)).to_pylist()[0]
        with self._mending:
            data = self.read(row["shard"], row["offset"], row["bytes"])
            if hashlib.sha256(data).hexdigest() == row["sha256"]:
                return data
            return self._replaced(row)

    def _replaced(self, row: dict[str, Any]) -> bytes:
        """The bytes of a record after its shard was downloaded again."""
        assert self.cache is not None
        filesystem.notify(
            f"cache: image {row['key']!r} in {self.cache.folder} is not what was written there; "
            "its shard is fetched "
            "again"
        )
        self.cache.forget(_cache_name(self.artifact.manifest["files"][row["shard"]]))
        self._file.cache_clear()
        return self.read(row["shard"], row["offset"], row["bytes"])


def _image_of(sample: dict[str, Any]) -> bytes:
    """The image of a WebDataset record: its one file besides the class."""
    for extension, data in sample.items():
        if extension != "cls" and not extension.startswith("__"):
            image: bytes = data
            return image
    raise tarfile.ReadError("a record has no image")


def _cache_name(info: FileInfo) -> str:
    return f"shards/{info['sha256']}"


def read_index(artifact: Artifact) -> pa.Table:
    """Read the index of an ingest stage.

    Raise `DamagedArtifact` when it is not an index, or points to bytes that its shards do not have.
    """
    try:
        table = pq.read_table(io.BytesIO(artifact.read(INDEX)))
        _check_index(table, artifact.manifest["files"])
    except (pa.ArrowException, OSError) as error:
        raise DamagedArtifact(
            artifact.key,
            f"{artifact.uri(INDEX)} is not readable as an index ({str(error).splitlines()[0]}); "
            "run the same command again to ingest anew",
        ) from None
    return table


def _check_index(table: pa.Table, files: dict[str, Any]) -> None:
    """Raise `pa.ArrowInvalid` when a table is no index of the shards in a manifest's `files`."""
    if table.schema != SCHEMA:
        columns = ", ".join(f"{column.name}: {column.type}" for column in table.schema)
        raise pa.ArrowInvalid(f"its columns are {columns[:200]}")
    shards = table["shard"].combine_chunks().dictionary_encode()
    names = shards.dictionary.to_pylist()
    if any(column.null_count for column in table.columns) or not set(names) <= files.keys():
        raise pa.ArrowInvalid("it leaves out values, or names shards that are not there")
    sizes = pa.array([files[name]["bytes"] for name in names], pa.int64())
    end = pc.add_checked(table["offset"], table["bytes"])  # of the image in its shard
    remainder = pc.subtract(sizes.take(shards.indices), end)
    for column in (table["offset"], table["bytes"], remainder):
        least = pc.min(column).as_py()
        if least is not None and least < 0:
            raise pa.ArrowInvalid("it points outside its shards")


def open_image(
    data: bytes, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = IMAGE_FORMATS
) -> Image.Image:
    """Open an image: its header is read, its pixels are not.

    Raise `ValueError` or `OSError` when it is no image, or has more than `max_pixels`. A small TIFF
    may be a corner of one huge tile, which is decoded whole, so that tiles count too.
    """
    image = Image.open(io.BytesIO(data), formats=formats)
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag, 0) for tag in TILE]
    for width, height in (image.size, tile):
        if width * height > max_pixels:
            raise ValueError(f"{width} x {height} is more than max_pixels = {max_pixels}")
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode -> RGB, upright. 16 bits are scaled to 8; transparent pixels lie on white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def decode(data: bytes, side: int, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Image bytes -> uint8 (side, side, 3): the short side resized to `side` (bicubic,
    antialiased), the centre cut out. Raise `UserError` when the bytes cannot be decoded."""
    try:
        image = to_rgb(open_image(data, max_pixels))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(
            f"an image of {len(data)} bytes cannot be decoded here ({error}), though ingest could; "
            "use the same version of Pillow on all machines"
        ) from None
    return resize_square(image, side)


def resize_square(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """RGB image -> uint8 (side, side, 3): its central square, resized (bicubic, antialiased)."""
    square = min(image.size)
    left = (image.width - square) / 2
    top = (image.height - square) / 2
    box = (left, top, left + square, top + square)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box))
