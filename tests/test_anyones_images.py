"""Tests of `run PATH` on unprepared data: one command produces a report. Input that is not a data
set gives a one-sentence error, and nothing is written."""

from __future__ import annotations

import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from tests import image_sources as sources
from tests.image_data import class_folders, make_image

NAMES = ("ant", "bee", "cow", "dog")
QUICK = [
    "--set=tracking=off",
    "--set=train={epochs: 1, batch_size: 16}",
    "--set=backbone.img_size=16",
    "--set=backbone.options={patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}",
    "--set=methods={linear: {}}",
    "--set=data={val_fraction: 0}",
    "--set=cluster={workers: 0, checkpoint_s: 0, loader_workers: 1, cpus_per_worker: 1}",
]


def plain_folders(folder: Path) -> Path:
    return class_folders(folder, NAMES, 5)


def folders_with_splits(folder: Path) -> Path:
    class_folders(folder / "Training", NAMES, 4)
    class_folders(folder / "valid", NAMES, 2)
    return folder


def folder_of_data_sets(folder: Path) -> Path:
    class_folders(folder / "farm", NAMES[:2], 5)
    class_folders(folder / "wood", NAMES[2:], 5)
    return folder


FORMS: dict[str, Callable[[Path], Path]] = {
    "class folders": plain_folders,
    "csv": sources.plain_csv,
    "train and valid": folders_with_splits,
    "folder of data sets": folder_of_data_sets,
    "ids beside a folder": sources.ids_beside_a_folder,
    "split column": sources.splits_in_a_column,
    "table of each split": sources.table_for_each_split,
    "paths in parquet": sources.paths_in_parquet,
    "parquet of the hub": sources.hub_parquet,
    "numbers in parquet": sources.numbers_in_parquet,
    "shards": sources.shards,
    "shards with splits": sources.shards_with_splits,
    "flat test": sources.flat_test_of_a_contest,
    "tables beside their images": sources.tables_beside_their_images,
    "lists": sources.lists_of_paths,
    "fine and coarse labels": sources.fine_and_coarse_labels,
    "unpacked on a Mac": sources.unpacked_on_a_mac,
    "few of some classes": sources.few_of_some_classes,
    "links to images": sources.links_to_images,
    "absolute paths": sources.absolute_paths,
    "every mode": sources.every_mode,
    "nested split folders": sources.nested_split_folders,
    "ids in an odd column": sources.ids_in_an_odd_column,
    "ids over two folders": sources.ids_over_two_folders,
    "folder for each table": sources.folder_for_each_table,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory. Tests put data next to it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run_to_a_report(make: Callable[[Path], Path], here: Path) -> None:
    path = os.path.relpath(make(here.parent / "data"))
    assert cli.main(["run", path, *QUICK]) == 0
    assert list((here / "storage" / "runs").glob("*/report.html"))


@pytest.mark.few(8)
@pytest.mark.parametrize("case", FORMS)
def test_single_command_produces_a_report(case: str, here: Path, quick: None) -> None:
    run_to_a_report(FORMS[case], here)


def test_data_sets_with_the_same_classes_run_as_domains(here: Path, quick: None) -> None:
    paths = [str(class_folders(here.parent / name, NAMES, 5)) for name in ("a", "b")]
    assert cli.main(["run", *paths, *QUICK, "--set=methods={finetune: {}}"]) == 0
    assert "scenario: domain" in (here / "a.yaml").read_text()
    assert list((here / "storage" / "runs").glob("*/report.html"))


# ---- input that is not a data set ----------------------------------------------------------------
def table(text: str | bytes, name: str = "t.csv") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def parquet(**columns: list[object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        pq.write_table(pa.table(columns), folder / "t.parquet")

    return make


def shard(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "x").write_bytes(b"x")
        with tarfile.open(folder / "t.tar", "w") as tar:
            for name in names:
                tar.add(folder / "x", name)
        (folder / "x").unlink()

    return make


def tree(*files: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        for number, file in enumerate(files):
            make_image(folder / file, number)

    return make


def unclear_label(folder: Path) -> None:
    rows = "".join(f"{n}.png,{'xy'[n % 2]},{'uvw'[n % 3]}\n" for n in range(6))
    table(f"image,class,category\n{rows}")(folder)
    for number in range(6):
        make_image(folder / f"{number}.png", number)


def unix_socket(folder: Path) -> None:
    folder.mkdir()
    server = socket.socket(socket.AF_UNIX)
    before = os.getcwd()
    os.chdir(folder)
    try:
        server.bind("s")
    finally:
        os.chdir(before)
        server.close()


def dangling_link(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def links_out(folder: Path) -> None:
    folder.mkdir()
    for name in NAMES:
        (folder / name).symlink_to("/usr")


def fifo(folder: Path) -> None:
    os.mkfifo(folder)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda folder: None, "does not exist"),
    "dangling link": (dangling_link, "does not exist"),
    "empty folder": (lambda folder: folder.mkdir(), "is empty"),
    "hidden files alone": (table("x", ".hidden"), "is empty"),
    "images in no class": (tree("a.png", "b.png"), "2 images in no folder of a class"),
    "one class": (tree("ant/a.png", "ant/b.png"), "one class, 'ant'"),
    "notes": (table("x", "notes.doc"), "'notes.doc'"),
    "links alone": (links_out, "not followed"),
    "test alone": (tree("test/a/x.png", "test/b/x.png"), "no train images"),
    "no class in train": (
        tree("train/x.png", "test/y.png"),
        "2 folders ('test', 'train'), 2 images below, which is not a data set of images",
    ),
    "other classes": (
        tree("train/a/x.png", "train/b/x.png", "test/c/x.png"),
        "no test image has a label of train; test has labels such as 'c', and train 'a', 'b'",
    ),
    "two names of train": (tree("train/a/x.png", "Training/b/x.png"), "both train images"),
    "class that nothing shows": (
        tree("a\x1b/x.png", "b/x.png"),
        "empty, too long or not printable",
    ),
    "two unicode forms": (tree("\u00e9/x.png", "e\u0301/x.png"), "two Unicode forms"),
    "one class below": (tree("farm/cow/x.png", "farm/dog/x.png", "wood/ant/x.png"), "one class"),
    "one image of each class": (tree("a/x.png", "b/x.png"), "leave none to test on"),
    "socket": (unix_socket, "'s'"),
    "pipe": (fifo, "neither a config nor a data set"),
    "empty table": (table(""), "no rows"),
    "header alone": (table("image,label"), "no rows"),
    "latin-1": (table("image,label\n\u00fc.png,a".encode("latin-1")), "not text in UTF-8"),
    "images that are not there": (table("image,label\na.png,x\nb.png,y"), "'a.png'"),
    "images elsewhere": (table("image,label\n/etc/a.png,x\n../b.png,y"), "not below"),
    "addresses": (
        table("image,label\nhttp://h/a.png,x\nhttp://h/b.png,y"),
        "by addresses such as 'http://h/a.png', which are not fetched",
    ),
    "unclear label": (
        unclear_label,
        "columns 'image', 'class', 'category', and which is the label",
    ),
    "endless line": (table("x" * (1 << 21)), "line of more than"),
    "many columns": (table(",".join("x" * 2000)), "columns in line"),
    "no parquet": (table("PAR1", "t.parquet"), "not readable as Parquet"),
    "parquet without images": (parquet(a=[1, 2], b=[3, 4]), "'a', 'b'"),
    "parquet of one class": (parquet(image=[b"x", b"y"], label=["a", "a"]), "one class, 'a'"),
    "labels that are lists": (
        parquet(image=[b"x", b"y"], label=[[1], [2]]),
        "not read from lists or structs",
    ),
    "no tar": (table("no tar" * 200, "t.tar"), "cannot be read as an uncompressed tar"),
    "tar without images": (shard("a.txt", "b.txt"), "no images"),
    "tar without labels": (shard("a.jpg", "b.jpg"), "no label beside them"),
    "tar that leads out": (shard("../../a.jpg"), "points outside"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_data_gives_one_line_error_and_no_files(
    case: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, says = BAD[case]
    make(here.parent / "data")
    capfd.readouterr()
    assert cli.main(["run", "../data"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("accrete: ")
    assert len(err.splitlines()) == 1
    assert err.strip().isprintable()
    assert "Traceback" not in err
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("torchvision:Nothing", "not a data set of torchvision"),
        ("hf://models/x", "not a data set on the hub"),
        ("${HOME}", "cannot be written on a card"),
        ("", "cannot be written on a card"),
        ("images.zip", "does not exist"),
    ],
)
def test_invalid_source_address_gives_one_line_error(
    path: str, says: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", path]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1
    assert os.listdir(here) == []
