"""A folder read like a bucket. Reads are counted, and some fail."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from workers.data.cache import LocalFile

URI = "test://bucket"
MANY = {"red": 300, "green": 300, "blue": 300}


class Bucket(fs.FileSystemHandler):  # type: ignore[misc]
    """File system that serves a folder like a bucket.

    Attributes:
        share: Probability that a read fails with a transient error.
        seen: File name and number of bytes of each successful read.
        refusal: Error that every open and every read raises, unless empty.
        refusal_of_reads: Error that every read raises, unless empty.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.share = 0.0
        self.refusal = ""
        self.refusal_of_reads = ""
        self.draw = random.Random(3)
        self.seen: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def get_type_name(self) -> str:
        return "bucket"

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = fs.LocalFileSystem().get_file_info(
            [str(self.folder / path) for path in paths]
        )
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        if self.refusal:
            raise OSError(self.refusal)
        return pa.PythonFile(Object(self, self.folder / path), mode="r")

    def bytes_read(self, part: str = ".tar") -> int:
        return sum(size for name, size in self.seen if part in name)

    def requests(self, part: str = ".tar") -> int:
        return sum(part in name for name, _ in self.seen)

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    normalize_path = get_file_info_selector = create_dir = delete_dir = _unused
    delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _unused
    open_input_stream = open_output_stream = open_append_stream = _unused


class Object(LocalFile):
    """A file of a `Bucket`."""

    def __init__(self, bucket: Bucket, path: Path):
        super().__init__(path)
        self.bucket = bucket

    def read(self, size: int | None = -1) -> bytes:
        with self.bucket.lock:
            refusal = self.bucket.refusal or self.bucket.refusal_of_reads
            if refusal:
                raise OSError(refusal)
            if self.bucket.draw.random() < self.bucket.share:
                raise OSError("AWS Error SLOW_DOWN during GetObject")
            data = super().read(-1 if size is None else size) or b""
            self.bucket.seen.append((Path(str(self.name)).name, len(data)))
            return data
