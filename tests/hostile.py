"""What tests of hostile files share: a place with an outside, processes whose memory is measured, and the bytes that strangers send."""

from __future__ import annotations

import io
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from tests import small_run
from workers.artefact import Attempt
from workers.data.shards import INDEX, SCHEMA
from workers.errors import UserError

MARK = "the-code-of-a-stranger-ran"
ROW = {"split": "train", "key": "train/a/0", "class": "a", "shard": "train-00000.tar", "offset": 512, "bytes": 70, "sha256": "0" * 64, "ext": "png"}


class Site:
    """A place of a test's own. `own` is for its files; whatever stands beside it is outside."""

    def __init__(self, folder: Path):
        self.own, self.outside = folder / "own", folder / "outside"
        self.own.mkdir()
        self.outside.mkdir()
        (self.outside / "kept").write_text("kept")
        self.mark = self.outside / MARK

    def pickled(self) -> bytes:
        """What would leave the mark if it was loaded."""
        return b"cos\nsystem\n(V" + f"touch {self.mark}".encode() + b"\ntR."

    def card(self, **changes: Any) -> str:
        body = {"name": "bad", "licence": "none", "classes": ["a", "b"], "max_bad_fraction": 0.9, **changes}
        (self.own / "card.yaml").write_text(yaml.safe_dump(body))
        return str(self.own / "card.yaml")

    def config(self, card: str, **changes: Any) -> str:
        body = small_run.make_body(self.own, {"bad": card}, ["finetune"], **changes)
        return small_run.write_config(self.own / "config.yaml", body)

    def untouched(self) -> None:
        assert [p.name for p in self.outside.iterdir()] == ["kept"]
        assert (self.outside / "kept").read_text() == "kept"
        assert sorted(p.name for p in self.own.parent.iterdir()) == ["outside", "own"]


# ---- in a process of its own, whose memory is measured ---------------------------------------------------------------------
def measured(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))  # so that a test that fails does not take the machine with it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        said = function(*arguments)
    except UserError as error:
        said = str(error)
    except BaseException as error:
        said = f"!!! {type(error).__name__}: {error}"
    pipe.send((said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10))


def costs(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """(what it gave or said as UserError, megabytes by which it grew the memory of its process)."""
    context = small_run.processes()
    mine, other = context.Pipe()
    process = context.Process(target=measured, args=(other, function, arguments))
    process.start()
    other.close()
    said, megabytes = mine.recv()
    process.join()
    return said, megabytes


# ---- bytes -----------------------------------------------------------------------------------------------------------------
def png(color: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", size: int | None = None) -> bytes:
    """A member as bytes, with a size that need not be true."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def parquet(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def ingested(site: Site, index: bytes | None = None, data: bytes = bytes(4096)) -> str:
    """The key of an ingest stage as a stranger may have written it: all its digests are right."""
    attempt = Attempt(str(site.own), "k" * 32)
    attempt.write("train-00000.tar", data)
    attempt.write(INDEX, parquet(pa.Table.from_pylist([ROW], SCHEMA)) if index is None else index)
    assert attempt.commit({"kind": "ingest"})
    return attempt.key


def source(site: Site, data: bytes) -> str:
    (site.own / "raw").mkdir()
    for split in ("train", "test"):
        (site.own / "raw" / f"{split}.parquet").write_bytes(data)
    return site.config(site.card(source={"format": "parquet", "path": str(site.own / "raw")}))
