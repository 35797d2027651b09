"""What tests of hostile files share: a place with an outside, processes whose memory is measured,
and the bytes that strangers send."""

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
    """A place of a test's own. `own` is for its files; whatever stands beside it is outside."""

    def __init__(self, folder: Path) -> None:
        self.own_folder, self.outside = folder / "own", folder / "outside"
        self.own_folder.mkdir()
        self.outside.mkdir()
        (self.outside / "kept").write_text("kept")
        self.mark = self.outside / MARK

    def pickled(self) -> bytes:
        """What would leave the mark if it was loaded."""
        return b"cos\nsystem\n(V" + f"touch {self.mark}".encode() + b"\ntR."

    def card(self, **changes: Any) -> str:
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
        body = small_run.make_body(self.own_folder, {"bad": card}, ["finetune"], **changes)
        return small_run.write_config(self.own_folder / "config.yaml", body)

    def untouched(self) -> None:
        assert [p.name for p in self.outside.iterdir()] == ["kept"]
        assert (self.outside / "kept").read_text() == "kept"
        assert sorted(p.name for p in self.own_folder.parent.iterdir()) == ["outside", "own"]


# ---- backbones that a config or a model folder may ask for; what is said of each -----------------
def backbones(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Settings of a backbone by the name of the attack, with words of the sentence that refuses
    them. folder: what they try to reach."""
    small = small_run.BACKBONE["options"]

    def options(**values: Any) -> dict[str, Any]:
        return {**small_run.BACKBONE, "options": {**small, **values}}

    address = {"url": "http://127.0.0.1:9/x.pth", "custom_load": True}
    return {
        "loads weights": (options(pretrained=True), "how timm loads or makes a model"),
        "loads from an address": (
            options(pretrained_cfg=address),
            "how timm loads or makes a model",
        ),
        "loads a file": (
            options(pretrained_cfg_overlay={"file": str(folder / "kept")}),
            "how timm loads or makes a model",
        ),
        "loads a checkpoint": (
            options(checkpoint_path=str(folder / "kept")),
            "how timm loads or makes a model",
        ),
        "writes a cache": (
            options(cache_dir=str(folder / "cache")),
            "how timm loads or makes a model",
        ),
        "wraps the model": (options(features_only=True), "how timm loads or makes a model"),
        "names a class": (options(block_fn="Block"), "how timm loads or makes a model"),
        "names a device": (options(device="cuda"), "how timm loads or makes a model"),
        "names a function": (
            options(act_layer="exec"),
            "backbone.options.act_layer is 'exec': it must be a layer that timm has by name",
        ),
        "names a module": (options(norm_layer="os.system"), "a word has letters, digits and '_'"),
        "names an unknown attention": (
            options(attn_layer="eval"),
            "backbone.options.attn_layer is 'eval': it must be a layer",
        ),
        "hides in a name": (options(__class__=3), "'__class__' is no name of an option"),
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
            "weights, more than 10000000000",
        ),
        "more positions than there is memory": (
            {"name": "convit_local", "img_size": 1024, "options": {"patch_size": 1}},
            "weights, more than 10000000000",
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
        "a model of the hub": (
            {**small_run.BACKBONE, "name": "hf-hub:timm/resnet18"},
            "it must be a model's name alone",
        ),
        "a model of a folder": (
            {**small_run.BACKBONE, "name": f"local-dir:{folder}"},
            "it must be a model's name alone",
        ),
        "a model with a tag": (
            {**small_run.BACKBONE, "name": "vit_tiny_patch16_224.augreg_in21k"},
            "it must be a model's name alone",
        ),
    }


BACKBONES = tuple(backbones(Path("outside")))


# ---- in a process of its own, whose memory is measured -------------------------------------------
def measured(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # so that a test that fails does not take the machine with it
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        outcome = function(*arguments)
    except UserError as error:
        outcome = str(error)
    except BaseException as error:
        outcome = f"!!! {type(error).__name__}: {error}"
    pipe.send((outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10))


def costs(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """(what it gave or said as UserError, megabytes by which it grew the memory of its process)."""
    context = small_run.processes()
    parent_end, other = context.Pipe()
    process = context.Process(target=measured, args=(other, function, arguments))
    process.start()
    other.close()
    outcome, megabytes = parent_end.recv()
    process.join()
    return outcome, megabytes


# ---- bytes ---------------------------------------------------------------------------------------
def png(color: int = 0) -> bytes:
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
    attempt = Attempt(str(site.own_folder), "k" * 32)
    attempt.write("train-00000.tar", data)
    attempt.write(INDEX, parquet(pa.Table.from_pylist([ROW], SCHEMA)) if index is None else index)
    assert attempt.commit({"kind": "ingest"})
    return attempt.key


def source(site: Site, data: bytes) -> str:
    (site.own_folder / "raw").mkdir()
    for split in ("train", "test"):
        (site.own_folder / "raw" / f"{split}.parquet").write_bytes(data)
    return site.config(
        site.card(source={"format": "parquet", "path": str(site.own_folder / "raw")})
    )
