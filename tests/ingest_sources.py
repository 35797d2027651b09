"""Data sources for the golden test of ingest, which compares results byte for byte.

`python -m tests.ingest_sources` writes tests/golden/ingest.json from the current code.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipeline.data.card_files import load_card_file
from pipeline.data.cards import Card
from pipeline.data.ingest import ingest
from workers.data.shards import Shards
from workers.storage.artifact import Artifact, compute_sha256

GOLDEN = Path(__file__).parent / "golden" / "ingest.json"
CLASSES = ("cat", "dog", "Straße", "caf\u00e9")
MapFn = Callable[[Any, Any], Any]


def picture(seed: int, form: str = "PNG", mode: str = "RGB", side: int = 9) -> bytes:
    """Return an encoded image of random pixels."""
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 2, *channels), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def make_folder(root: Path, train: int = 12, test: int = 4) -> Path:
    """Write an image folder with many kinds of problem files, and return it.

    It has copies, rare formats, equal stems, long and odd names, and non-image files.
    """
    for c, name in enumerate(CLASSES):
        for split, count in (("train", train), ("test", test)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                seed = 1000 * c + 100 * (split == "test") + i
                (folder / f"{i:03d}.png").write_bytes(picture(seed))
    cat = root / "train" / "cat"
    (cat / "deep").mkdir()
    for name in ("a.png", "a.jpg", "deep/a.png", "a b.png", "a_b.png"):
        (cat / name).write_bytes(picture(5000 + len(name), "JPEG" if "jpg" in name else "PNG"))
    for i, form in enumerate(("BMP", "GIF", "TIFF", "PPM", "WEBP")):
        (cat / f"rare{i}.{form.lower()}").write_bytes(picture(6000 + i, form))
    (cat / f"{'long' * 50}.png").write_bytes(picture(7000))
    (cat / "z\u00e9ro.png").write_bytes(picture(7001, mode="RGBA"))
    (cat / "again.png").write_bytes((cat / "000.png").read_bytes())
    (cat / "leak.png").write_bytes((root / "test" / "dog" / "001.png").read_bytes())
    (root / "train" / "dog" / "other.png").write_bytes((cat / "003.png").read_bytes())
    (root / "test" / "dog" / "twice.png").write_bytes((cat / "004.png").read_bytes())
    (root / "test" / "dog" / "twice2.png").write_bytes((cat / "004.png").read_bytes())
    (cat / "cut.png").write_bytes(picture(1)[:120])
    (cat / "text.jpg").write_text("no image")
    (cat / "=notes.txt").write_text("notes")
    (cat / "huge.png").write_bytes(picture(2, side=40))
    (root / "train" / "stray.png").write_bytes(picture(3))
    (root / "train" / "bird").mkdir()
    (root / "train" / "bird" / "a.png").write_bytes(picture(4))
    for odd_name in (b"caf\xe9.png", b"caf\xe8.png"):
        with open(os.fsencode(cat) + b"/" + odd_name, "wb") as stream:
            stream.write(picture(sum(odd_name)))
    return root


def make_tars(root: Path, source: Path) -> Path:
    """Write the images of a folder as tar files with a label file for each image.

    Returns:
        The folder of the tar files.
    """
    root.mkdir()
    for split in ("train", "test"):
        for part in range(2):
            with tarfile.open(root / f"{split}-{part}.tar", "w") as tar:
                for n, file in enumerate(sorted((source / split).rglob("*.[jp][pn]g"))):
                    if n % 2 != part:
                        continue
                    label = file.relative_to(source / split).parts[0]
                    members = ((file.suffix[1:], file.read_bytes()), ("cls", label.encode()))
                    for suffix, data in members:
                        member = tarfile.TarInfo(f"{n % 5}/{n:04d}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
    return root


def make_parquet(root: Path, source: Path) -> Path:
    """Write the images of a folder as Parquet tables with several row groups.

    Returns:
        The folder of the tables.
    """
    root.mkdir()
    for split in ("train", "test"):
        rows: list[dict[str, Any]] = []
        for file in sorted((source / split).rglob("*.[jp][pn]g")):
            label = file.relative_to(source / split).parts[0]
            path = os.fsencode(file.name).decode("utf-8", "replace")
            rows.append({"image": {"bytes": file.read_bytes(), "path": path}, "label": label})
        rows += [{"image": None, "label": "cat"}, {"image": rows[0]["image"], "label": None}]
        half = len(rows) // 2
        for part, part_rows in enumerate((rows[:half], rows[half:])):
            table = pa.Table.from_pylist(part_rows)
            pq.write_table(table, root / f"{split}-{part}.parquet", row_group_size=6)
    return root


def card_of(path: Path, form: str, **changes: Any) -> Card:
    """Return a card for one of these sources."""
    return Card.model_validate(
        {
            "name": "tiny",
            "licence": "MIT",
            "classes": CLASSES,
            "shard_images": 7,
            "source": {"format": form, "path": str(path), **changes.pop("source", {})},
            "max_bad_fraction": 0.5,
            "max_pixels": 1000,
            "leaks": "allow",
            **changes,
        }
    )


def replace_file(artifact: Artifact, name: str, data: bytes) -> None:
    """Replace a file of a stored result and update all digests, as an attacker could."""
    Path(artifact.uri(name)).write_bytes(data)
    path = Path(artifact.root) / artifact.key / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps({**body, "sha256": compute_sha256(body)}))


def to_parquet(table: pa.Table) -> bytes:
    """Return the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def make_cards(folder: Path) -> dict[str, Card]:
    """Write all sources below `folder`, and return their cards by case name."""
    images = make_folder(folder / "images")
    tars = make_tars(folder / "tars", images)
    tables = make_parquet(folder / "tables", images)
    few = {"train": 5, "test": 2}
    return {
        "folder": card_of(images, "folder"),
        "folder, drop, per_class": card_of(images, "folder", duplicates="drop", per_class=few),
        "folder, held out": card_of(
            images, "folder", source={"splits": {"train": "train"}}, test_fraction=0.3
        ),
        "tar": card_of(tars, "tar"),
        "tar, held out, drop": card_of(
            tars, "tar", source={"splits": {"train": "*"}}, test_fraction=0.2, duplicates="drop"
        ),
        "parquet": card_of(tables, "parquet", per_class=few),
        "digits": load_card_file("digits"),
    }


def result_of(card: Card, root: Path, map_fn: MapFn) -> dict[str, Any]:
    """Ingest a card below `root`, and return the parts of the result that must not change."""
    manifest = ingest(card, str(root), "k", map_fn, {"step": "ingest"})
    artifact = Artifact.need(str(root), "k")
    rows = Shards.open(str(root), "k").read_index().to_pylist()
    files = manifest["files"]
    return {
        "shards": {n: info["sha256"] for n, info in sorted(files.items()) if n.endswith(".tar")},
        "index": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "rejected.csv": hashlib.sha256(artifact.read("rejected.csv")).hexdigest(),
        "rejected": manifest["rejected"],
        "counts": manifest["counts"],
        "content": manifest["content"],
        "raw_content": manifest["raw_content"],
        "fingerprint": manifest["fingerprint"],
    }


def serial(fn: Any, items: Any) -> Any:
    """Apply a function to the items one after the other."""
    return [fn(item) for item in items]


def main() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        cards = make_cards(Path(folder))
        results = {
            name: result_of(card, Path(folder) / f"result {name}", serial)
            for name, card in cards.items()
        }
    GOLDEN.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
