"""Helpers for tests of hostile files: a watched folder, memory measurement, and malicious bytes."""

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
from workers.data.shards import INDEX, SCHEMA
from workers.errors import UserError
from workers.storage.artifact import Attempt

MARK = "the-code-of-a-stranger-ran"
# A row of the index of a data set.
ROW = {
    "split": "train",
    "key": "train/a/0",
    "class": "a",
    "shard": "train-00000.tar",
    "offset": 512,
    "bytes": 70,
    "sha256": "0" * 64,
    "ext": "png",
}


class Site:
    """Two folders: `own_folder` for the files of a test, and `outside`, which must not change.

    mark: the file that appears in `outside` when code from a hostile file runs.
    """

    def __init__(self, folder: Path) -> None:
        self.own_folder = folder / "own"
        self.outside = folder / "outside"
        self.own_folder.mkdir()
        self.outside.mkdir()
        (self.outside / "kept").write_text("kept")
        self.mark = self.outside / MARK

    def pickled(self) -> bytes:
        """Return a pickle that makes the mark when it is loaded."""
        return b"cos\nsystem\n(V" + f"touch {self.mark}".encode() + b"\ntR."

    def card(self, **changes: Any) -> str:
        """Write a card of two classes with these changes, and return its path."""
        body = {
            "name": "bad",
            "licence": "none",
            "classes": ["a", "b"],
            "max_bad_fraction": 0.9,
            **changes,
        }
        (self.own_folder / "card.yaml").write_text(yaml.safe_dump(body))
        return str(self.own_folder / "card.yaml")

    def config(self, card: str, **changes: Any) -> str:
        """Write a config with these changes and one task of this card, and return its path."""
        body = small_run.make_body(self.own_folder, {"bad": card}, ["finetune"], **changes)
        return small_run.write_config(self.own_folder / "config.yaml", body)

    def untouched(self) -> None:
        """Raise AssertionError if a file appeared, changed or vanished outside `own_folder`."""
        assert [p.name for p in self.outside.iterdir()] == ["kept"]
        assert (self.outside / "kept").read_text() == "kept"
        assert sorted(p.name for p in self.own_folder.parent.iterdir()) == ["outside", "own"]


# ---- hostile backbone settings, and the errors that they raise -----------------------------------
HOW_TIMM_LOADS = "how timm loads or makes a model"
NAME_ALONE = "it must be a model's name alone"
TOO_MANY_WEIGHTS = "weights, more than 10000000000"


def backbones(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the attacks: name -> (backbone settings, part of the error that they raise).

    folder: the folder that the attacks try to read or write.
    """
    small = small_run.BACKBONE["options"]

    def options(**values: Any) -> dict[str, Any]:
        return {**small_run.BACKBONE, "options": {**small, **values}}

    address = {"url": "http://127.0.0.1:9/x.pth", "custom_load": True}
    return {
        "loads weights": (options(pretrained=True), HOW_TIMM_LOADS),
        "loads from an address": (options(pretrained_cfg=address), HOW_TIMM_LOADS),
        "loads a file": (
            options(pretrained_cfg_overlay={"file": str(folder / "kept")}),
            HOW_TIMM_LOADS,
        ),
        "loads a checkpoint": (options(checkpoint_path=str(folder / "kept")), HOW_TIMM_LOADS),
        "writes a cache": (options(cache_dir=str(folder / "cache")), HOW_TIMM_LOADS),
        "wraps the model": (options(features_only=True), HOW_TIMM_LOADS),
        "names a class": (options(block_fn="Block"), HOW_TIMM_LOADS),
        "names a device": (options(device="cuda"), HOW_TIMM_LOADS),
        "names a function": (
            options(act_layer="exec"),
            "backbone.options.act_layer is 'exec': it must be a layer that timm has by name",
        ),
        "names a module": (options(norm_layer="os.system"), "a word has letters, digits and '_'"),
        "names an unknown attention": (
            options(attn_layer="eval"),
            "backbone.options.attn_layer is 'eval': it must be a layer",
        ),
        "hides in a name": (options(__class__=3), "'__class__' is not a name of an option"),
        "hides in a mapping": (options(depth={"a": 1}), "'depth' holds a dict"),
        "hides in a list of lists": (options(patch_size=[[4], [4]]), "'patch_size' holds a list"),
        "fills a list": (options(patch_size=[4] * 10_000), "a list has at most 16"),
        "sets the input": (options(img_size=8), "given by backbone.img_size"),
        "sets the classes": (options(num_classes=10), "given by the classes of a task"),
        "no such option": (
            options(patchsize=4),
            "backbone.options.patchsize is 4, and 'vit_tiny_patch16_224' has no such option; "
            "did you mean 'patch_size'",
        ),
        "no heads": (
            options(num_heads=0),
            "backbone.options.num_heads is 0: it must be greater than 0",
        ),
        "patches of nothing": (
            options(patch_size=0),
            "backbone.options.patch_size is 0: it must be greater than 0",
        ),
        "no blocks": (options(depth=0), "backbone.options.depth is 0: it must be greater than 0"),
        "too many blocks": (
            options(depth=100_000),
            "'depth' is 100000, and it must be a number of at most 200",
        ),
        "too many blocks together": (
            {
                "name": "resnet18",
                "options": {"layers": [90, 90, 90, 90], "norm_layer": "groupnorm1"},
            },
            "at most 200 blocks",
        ),
        "a number without end": (options(embed_dim=10**400), "at most 65536"),
        "no number": (options(mlp_ratio=float("nan")), "at most 65536"),
        "more weights than there is memory": (
            options(embed_dim=65_536, num_heads=1, depth=2),
            TOO_MANY_WEIGHTS,
        ),
        "more positions than there is memory": (
            {"name": "convit_local", "img_size": 1024, "options": {"patch_size": 1}},
            TOO_MANY_WEIGHTS,
        ),
        "a word for a switch": (
            options(qkv_bias="no"),
            "backbone.options.qkv_bias is 'no': input should be a valid boolean",
        ),
        "a switch for a number": (
            options(depth=True),
            "backbone.options.depth is True: input should be a valid integer",
        ),
        "a size below zero": (options(reg_tokens=-1), "negative dimension"),
        "an image of gigabytes": (
            {**small_run.BACKBONE, "img_size": 10**20},
            "less than or equal to 4096",
        ),
        "a crop of nothing": (
            {**small_run.BACKBONE, "crop_pct": 1e-300},
            "greater than or equal to 0.1",
        ),
        "a model of the hub": ({**small_run.BACKBONE, "name": "hf-hub:timm/resnet18"}, NAME_ALONE),
        "a model of a folder": ({**small_run.BACKBONE, "name": f"local-dir:{folder}"}, NAME_ALONE),
        "a model with a tag that timm has not": (
            {**small_run.BACKBONE, "name": "vit_tiny_patch16_224.evil"},
            "timm has no weights of 'vit_tiny_patch16_224' with the tag 'evil'",
        ),
        "a path in a tag": (
            {**small_run.BACKBONE, "name": "vit_tiny_patch16_224.augreg/../x"},
            NAME_ALONE,
        ),
    }


BACKBONES = tuple(backbones(Path("outside")))


# ---- calls in a separate process with measured memory --------------------------------------------
def measured(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function, and send the result of `costs` through the pipe."""
    # Limit the memory to 24 GiB, so that a failing test does not exhaust the machine.
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        outcome = function(*arguments)
    except UserError as error:
        outcome = str(error)
    except BaseException as error:
        outcome = f"!!! {type(error).__name__}: {error}"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pipe.send((outcome, grown_kib >> 10))


def costs(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Call a function in a new process. Return (outcome, peak memory growth in MiB).

    outcome: the function's return value, the text of a UserError, or "!!!" and the text of another
    error.
    """
    context = small_run.processes()
    parent_end, child_end = context.Pipe()
    process = context.Process(target=measured, args=(child_end, function, arguments))
    process.start()
    child_end.close()
    outcome, megabytes = parent_end.recv()
    process.join()
    return outcome, megabytes


# ---- bytes ---------------------------------------------------------------------------------------
def png(color: int = 0) -> bytes:
    """Return a PNG of 8 x 8 grey pixels."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def member(
    name: str,
    data: bytes = b"",
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    size: int | None = None,
) -> bytes:
    """Return a member of a tar file as bytes.

    size: the size in its header in bytes (default: the size of `data`).
    """
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = len(data)
    if size is not None:
        info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def parquet(table: pa.Table, **options: Any) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def ingested(site: Site, index: bytes | None = None, data: bytes = bytes(4096)) -> str:
    """Write the result of an ingest stage with correct digests, and return its key.

    index: bytes of the index (default: an index of the single image `ROW`). data: bytes of the
    shard.
    """
    if index is None:
        index = parquet(pa.Table.from_pylist([ROW], SCHEMA))
    attempt = Attempt(str(site.own_folder), "k" * 32)
    attempt.write("train-00000.tar", data)
    attempt.write(INDEX, index)
    assert attempt.commit({"kind": "ingest"})
    return attempt.key


def source(site: Site, data: bytes) -> str:
    """Write a source of Parquet files with these bytes, and return the config's path."""
    folder = site.own_folder / "raw"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.parquet").write_bytes(data)
    return site.config(site.card(source={"format": "parquet", "path": str(folder)}))
