"""Image sources as users have them: folders, tables, Parquet files and shards of many layouts."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.image_data import make_image

NAMES = ("ant", "bee", "cow", "dog")


def png(seed: int) -> bytes:
    """Return a PNG of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_table(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def plain_csv(folder: Path) -> Path:
    lines = ["filename,label"]
    for number in range(24):
        make_image(folder / "img" / f"{number}.png", number)
        lines.append(f"img/{number}.png,{NAMES[number % 4]}")
    return write_table(folder / "labels.csv", lines)


def ids_beside_a_folder(folder: Path) -> Path:
    lines = ["id;breed"]
    for number in range(24):
        make_image(folder / "train" / f"{number}.jpg", number)
        lines.append(f"{number};{NAMES[number % 4]}")
    write_table(folder / "labels.csv", lines)
    return folder


def splits_in_a_column(folder: Path) -> Path:
    lines = ["image_path\tclass\tsplit"]
    for number in range(24):
        make_image(folder / f"{number}.png", number)
        split = "Train" if number % 3 else "valid"
        lines.append(f"{number}.png\t{number % 4 + 1}\t{split}")
    return write_table(folder / "all.tsv", lines)


def no_header(folder: Path) -> Path:
    lines = []
    for number in range(24):
        make_image(folder / f"{number}.png", number)
        lines.append(f"{number}.png,{NAMES[number % 4]}")
    return write_table(folder / "list.csv", lines)


def table_for_each_split(folder: Path) -> Path:
    for split in ("train", "test"):
        lines = ["file,label"]
        for number in range(12):
            make_image(folder / split / f"{number}.png", number + 50 * (split == "test"))
            lines.append(f"{split}/{number}.png,{NAMES[number % 4]}")
        write_table(folder / f"{split}.csv", lines)
    return folder


def paths_in_parquet(folder: Path) -> Path:
    paths = [make_image(folder / "im" / f"{number}.png", number) for number in range(24)]
    columns = {
        "path": [f"im/{path.name}" for path in paths],
        "label": [NAMES[number % 4] for number in range(24)],
    }
    pq.write_table(pa.table(columns), folder / "table.parquet")
    return folder


def hub_parquet(folder: Path) -> Path:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": NAMES}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("about")
    files = ("train-00000-of-00002-abc", "train-00001-of-00002-def", "test-00000-of-00001-x")
    for start, name in enumerate(files):
        images = [{"bytes": png(100 * start + n), "path": f"{n}.png"} for n in range(12)]
        table = pa.table({"image": images, "label": [n % 4 for n in range(12)]})
        path = folder / "data" / f"{name}.parquet"
        pq.write_table(table.replace_schema_metadata(metadata), path)
    return folder


def numbers_in_parquet(folder: Path) -> Path:
    folder.mkdir()
    table = pa.table({"img": [png(n) for n in range(20)], "target": [n % 4 + 3 for n in range(20)]})
    pq.write_table(table, folder / "flowers.parquet")
    return folder / "flowers.parquet"


def write_tar(path: Path, start: int, labels: Callable[[int], dict[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number in range(8):
            for extension, data in {"png": png(start + number), **labels(number)}.items():
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def shards(folder: Path) -> Path:
    for number in range(3):
        write_tar(
            folder / f"shard-{number:06d}.tar",
            100 * number,
            lambda n: {"cls": b"%d" % (n % 4), "txt": NAMES[n % 4].encode()},
        )
    return folder


def shards_with_splits(folder: Path) -> Path:
    for name in ("im-train-0000", "im-train-0001", "im-val-0000"):
        write_tar(
            folder / f"{name}.tar",
            len(name) * 100 + int(name[-1]) * 10,
            lambda n: {"json": json.dumps({"label": NAMES[n % 4]}).encode()},
        )
    return folder


def flat_test_of_a_contest(folder: Path) -> Path:
    for number in range(24):
        make_image(folder / "train" / NAMES[number % 4] / f"{number}.jpg", number)
    for number in range(6):
        make_image(folder / "test" / f"{number}.jpg", 100 + number)
    return folder


def tables_beside_their_images(folder: Path) -> Path:
    for split in ("train", "test"):
        lines = ["file_name,label"]
        for number in range(12):
            make_image(folder / split / f"{number}.png", number + 50 * (split == "test"))
            lines.append(f"{number}.png,{NAMES[number % 4]}")
        write_table(folder / split / "metadata.csv", lines)
    return folder


def lists_of_paths(folder: Path) -> Path:
    for split in ("train", "test"):
        lines = []
        for number in range(12):
            make_image(folder / "images" / split / f"{number}.png", number + 50 * (split == "test"))
            lines.append(f"images/{split}/{number}.png {number % 4}")
        write_table(folder / f"{split}.txt", lines)
    return folder


def fine_and_coarse_labels(folder: Path) -> Path:
    features = {
        "img": {"_type": "Image"},
        "fine": {"_type": "ClassLabel", "names": NAMES},
        "coarse": {"_type": "ClassLabel", "names": NAMES[:2]},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    folder.mkdir(parents=True)
    for start, split in enumerate(("train", "test")):
        table = pa.table(
            {
                "img": [{"bytes": png(50 * start + n), "path": f"{n}.png"} for n in range(12)],
                "fine": [n % 4 for n in range(12)],
                "coarse": [n % 2 for n in range(12)],
            }
        )
        path = folder / f"{split}-00000-of-00001.parquet"
        pq.write_table(table.replace_schema_metadata(metadata), path)
    return folder


def unpacked_on_a_mac(folder: Path) -> Path:
    for number in range(24):
        name = NAMES[number % 4]
        make_image(folder / "zoo" / name / f"IMG {number}.JPEG", number)
        for litter in (folder / "zoo" / name, folder / "__MACOSX" / "zoo" / name):
            litter.mkdir(parents=True, exist_ok=True)
            (litter / f"._IMG {number}.JPEG").write_bytes(b"no image")
    (folder / "zoo" / ".DS_Store").write_bytes(b"x")
    (folder / "zoo" / "ant" / "Thumbs.db").write_bytes(b"x")
    return folder


def few_of_some_classes(folder: Path) -> Path:
    for name, count in (("many", 20), ("some", 5), ("two", 2), ("one", 1)):
        for number in range(count):
            make_image(folder / name / f"{number}.png", 100 * count + number)
    return folder


def links_to_images(folder: Path) -> Path:
    for number in range(24):
        target = make_image(folder.parent / "blobs" / f"{number:03d}.jpg", number)
        link = folder / NAMES[number % 4] / f"{number}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return folder


def absolute_paths(folder: Path) -> Path:
    lines = ["Image Path;Class"]
    for number in range(24):
        path = make_image(folder / "a b" / f"{number}.PNG", number)
        lines.append(f"{path};{NAMES[number % 4]}")
    path = folder / "export.csv"
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    return path


def every_mode(folder: Path) -> Path:
    """Write images in several modes: grey, 16 bits, alpha, palette, CMYK, and rotated by EXIF."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    for number, name in enumerate(NAMES):
        below = folder / f"{name} \u00e9 & co"
        below.mkdir(parents=True)
        image = Image.fromarray(pixels + np.uint8(number))
        turned = Image.Exif()
        turned[0x0112] = 6
        image.save(below / "turned.JPG", exif=turned)
        image.convert("CMYK").save(below / "print.jpg")
        image.convert("L").save(below / "grey.PNG")
        image.convert("RGBA").save(below / "alpha.png")
        image.convert("P").save(below / "palette.gif")
        deep = pixels[..., 0].astype(np.uint16) * 256 + number
        Image.fromarray(deep).save(below / "deep.tiff")
    return folder


def nested_split_folders(folder: Path) -> Path:
    for split, start in (("seg_train", 0), ("seg_test", 50)):
        for number in range(12):
            below = folder / split / split / NAMES[number % 4]
            make_image(below / f"{number}.jpg", start + number)
    for number in range(4):
        make_image(folder / "seg_pred" / "seg_pred" / f"{number}.jpg", 90 + number)
    return folder


def ids_in_an_odd_column(folder: Path) -> Path:
    lines = ["id_code,diagnosis"]
    for number in range(24):
        make_image(folder / "train_images" / f"im{number}.png", number)
        lines.append(f"im{number},{number % 4}")
    write_table(folder / "train.csv", lines)
    for number in range(3):
        make_image(folder / "test_images" / f"im{number}.png", 50 + number)
    write_table(folder / "test.csv", ["id_code", "im0", "im1", "im2"])
    return folder


def ids_over_two_folders(folder: Path) -> Path:
    lines = ["image_id,label,age"]
    for number in range(40):
        part = f"part_{1 + number % 2}"
        make_image(folder / part / f"im{number}.jpg", number)
        lines.append(f"im{number},{NAMES[number % 4]},{number}")
    write_table(folder / "metadata.csv", lines)
    return folder


def folder_for_each_table(folder: Path) -> Path:
    for split, start in (("train", 0), ("test", 50)):
        lines = ["filename,label"]
        for number in range(start, start + 12):
            make_image(folder / split / f"{number}.png", number)
            lines.append(f"{number}.png,{NAMES[number % 4]}")
        write_table(folder / f"{split}_labels.csv", lines)
    return folder
