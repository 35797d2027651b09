"""Tests of source checks: errors that a listing shows are reported before any image is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import cli
from pipeline.data.cards import Card
from pipeline.data.formats import require_entries
from pipeline.data.formats.tar import TarJob, list_tar
from pipeline.data.in_place import index_shards
from pipeline.data.ingest import ingest
from pipeline.data.source_checks import check_source
from tests import small_run
from tests.image_data import class_folders, make_image
from tests.image_sources import png, write_tar
from workers.errors import UserError

NAMES = ("ant", "bee")


def card_of(path: Path, form: str = "folder", **changes: Any) -> Card:
    source = {"format": form, "path": str(path), **changes.pop("source", {})}
    body = {"name": "zoo", "licence": "none", "classes": NAMES, "source": source}
    return Card.model_validate(body | changes)


def folders(path: Path, train: tuple[str, ...] = NAMES, test: tuple[str, ...] = NAMES) -> None:
    class_folders(path / "train", train, 6)
    if test:
        class_folders(path / "test", test, 2)


def no_test(path: Path) -> Card:
    folders(path, test=())
    return card_of(path)


def other_test_classes(path: Path) -> Card:
    folders(path)
    (path / "test").rename(path / "away")
    class_folders(path / "test", ("cat",), 1)
    return card_of(path, max_bad_fraction=0.5)


def no_train_of_a_class(path: Path) -> Card:
    folders(path, train=NAMES[:1])
    return card_of(path, source={"splits": {"train": "train", "test": "test"}})


def class_of_links(path: Path) -> Card:
    folders(path, train=NAMES[:1])
    (path / "train" / "bee").mkdir()
    (path / "train" / "bee" / "x.png").symlink_to("nowhere.png")
    return card_of(path, max_bad_fraction=0.9)


def one_image_of_each_class(path: Path) -> Card:
    class_folders(path, NAMES, 1)
    return card_of(path, source={"splits": {"train": "."}}, test_fraction=0.2)


def too_many_without_a_class(path: Path) -> Card:
    folders(path)
    for number in range(3):
        make_image(path / "train" / f"{number}.png", number)
    return card_of(path)


def too_few(path: Path) -> Card:
    folders(path)
    return card_of(path, counts={"train": 13, "test": 4})


def too_few_of_each_class(path: Path) -> Card:
    folders(path)
    return card_of(path, counts={"train": 12, "test": 4}, per_class={"train": 3, "test": 2})


def two_unicode_forms(path: Path) -> Card:
    folders(path)
    for name in ("\u00e9.png", "e\u0301.png"):
        make_image(path / "train" / "ant" / name, 1)
    return card_of(path)


def table(path: Path, labels: str, **changes: Any) -> Card:
    lines = ["image,label"]
    for number, label in enumerate(labels.split()):
        make_image(path / f"{number}.png", number)
        lines.append(f"{number}.png,{label}")
    (path / "t.csv").write_text("\n".join(lines))
    return card_of(path / "t.csv", "csv", test_fraction=0.2, **changes)


def table_lacks_a_class(path: Path) -> Card:
    return table(path, "ant ant ant ant")


def table_of_missing_files(path: Path) -> Card:
    card = table(path, "ant ant bee bee")
    (path / "0.png").unlink()
    return card


def table_without_test(path: Path) -> Card:
    table(path, "ant ant bee bee")
    return card_of(path / "t.csv", "csv")


def parquet(path: Path, names: tuple[str, ...], **changes: Any) -> Card:
    path.mkdir()
    for start, name in enumerate(names):
        images = [png(10 * start + number) for number in range(4)]
        columns = {"image": images, "label": [NAMES[number % 2] for number in range(4)]}
        pq.write_table(pa.table(columns), path / f"{name}-0.parquet")
    return card_of(path, "parquet", **changes)


def parquet_without_test(path: Path) -> Card:
    return parquet(path, ("train",))


def parquet_without_train(path: Path) -> Card:
    return parquet(path, ("test",))


def parquet_without_a_column(path: Path) -> Card:
    return parquet(path, ("train", "test"), source={"label": "kind"})


def parquet_that_is_none(path: Path) -> Card:
    card = parquet(path, ("train", "test"))
    (path / "test-0.parquet").write_bytes(b"PAR1")
    return card


def tars(path: Path, names: tuple[str, ...], form: str, **source: Any) -> Card:
    for start, name in enumerate(names):
        write_tar(path / f"{name}.tar", 10 * start, lambda n: {"cls": NAMES[n % 2].encode()})
    return card_of(path, form, source={"label": "cls", **source})


def tars_without_test(path: Path) -> Card:
    return tars(path, ("train-0",), "tar")


def tar_that_is_a_link_to_nothing(path: Path) -> Card:
    card = tars(path, ("train-0", "test-0"), "tar")
    (path / "train-1.tar").symlink_to("nowhere.tar")
    return card


def shards_without_test(path: Path) -> Card:
    return tars(path, ("train-0",), "webdataset", splits={"train": "train-0.tar"})


def unknown_set(path: Path) -> Card:
    return card_of(path, "sklearn", source={"name": "iris"})


def unknown_library_set(path: Path) -> Card:
    return card_of(path, "torchvision", source={"name": "Nothing"})


BAD: list[Callable[[Path], Card]] = [
    no_test,
    other_test_classes,
    no_train_of_a_class,
    class_of_links,
    one_image_of_each_class,
    too_many_without_a_class,
    too_few,
    too_few_of_each_class,
    two_unicode_forms,
    table_lacks_a_class,
    table_of_missing_files,
    table_without_test,
    parquet_without_test,
    parquet_without_train,
    parquet_without_a_column,
    parquet_that_is_none,
    tars_without_test,
    tar_that_is_a_link_to_nothing,
    shards_without_test,
    unknown_set,
    unknown_library_set,
]


def ingested(card: Card, root: Path) -> None:
    run = index_shards if card.source.format == "webdataset" else ingest
    run(card, str(root), "k", map, {"step": "ingest"})


@pytest.mark.parametrize("make", BAD)
def test_source_check_and_ingest_raise_the_same_error(
    make: Callable[[Path], Card], tmp_path: Path
) -> None:
    card = make(tmp_path / "data")
    with pytest.raises(UserError) as ingest_error:
        ingested(card, tmp_path / "storage")
    with pytest.raises(UserError) as listing_error:
        check_source(card, require_entries(card))
    assert str(listing_error.value) == str(ingest_error.value)


def good_folders(path: Path) -> Card:
    folders(path)
    return card_of(path, counts={"train": 12, "test": 4})


def good_folder_alone(path: Path) -> Card:
    class_folders(path, NAMES, 2)
    return card_of(path, source={"splits": {"train": "."}}, test_fraction=0.2)


def good_table(path: Path) -> Card:
    return table(path, "ant ant bee bee")


def good_parquet(path: Path) -> Card:
    return parquet(path, ("train", "test"))


def parquet_to_hold_out(path: Path) -> Card:
    return parquet(path, ("train",), test_fraction=0.2)


def only_tests(path: Path) -> Card:
    return parquet(path, ("test",), source={"splits": {"test": "test"}})


def images_alone(path: Path) -> Card:
    class_folders(path / "train", ("x",), 3)
    return card_of(path, classes=["image"], source={"label": None, "splits": {"train": "train"}})


def good_shards(path: Path) -> Card:
    splits = {"train": "a.tar", "test": "b.tar"}
    return tars(path, ("a", "b"), "webdataset", splits=splits)


def good_digits(path: Path) -> Card:
    return card_of(path, "sklearn", source={"name": "digits"})


@pytest.mark.parametrize(
    "make",
    [
        good_folders,
        good_folder_alone,
        good_table,
        good_parquet,
        parquet_to_hold_out,
        only_tests,
        images_alone,
        good_shards,
        good_digits,
    ],
)
def test_source_check_accepts_sources_that_ingest_accepts(
    make: Callable[[Path], Card], tmp_path: Path
) -> None:
    card = make(tmp_path / "data")
    check_source(card, require_entries(card))
    if card.source.format != "sklearn":
        ingested(card, tmp_path / "storage")


def test_plan_ingest_and_run_refuse_source_identically_without_decoding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card = no_test(tmp_path / "data")
    for image in (tmp_path / "data").rglob("*.png"):
        image.write_bytes(b"x")  # damaged images, which a listing does not show
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(json.loads(card.model_dump_json())))
    body = small_run.make_body(tmp_path, {"zoo": str(tmp_path / "card.yaml")})
    config = small_run.write_config(tmp_path / "config.yaml", body)
    sentences = set()
    for command in ("plan", "ingest", "run"):
        capfd.readouterr()
        assert cli.main([command, config]) == 2
        sentences.add(capfd.readouterr().err)
    (sentence,) = sentences
    assert "there are no test images" in sentence
    assert not list((tmp_path / "storage").rglob("*.tar"))


def test_the_row_in_an_error_counts_ignored_samples(tmp_path: Path) -> None:
    words = {0: "no", 1: "yes", 2: "no"}

    def texts(number: int) -> dict[str, bytes]:
        return {"cls": b"ant", "json": json.dumps({"set": words.get(number, "other")}).encode()}

    write_tar(tmp_path / "all.tar", 0, texts)
    splits = {"train": ["yes"], "ignore": ["no"]}
    source = {"label": "cls", "split": "json:set", "splits": splits}
    card = card_of(tmp_path, "tar", source=source)
    with pytest.raises(UserError, match="row 3 has 'other'"):
        list_tar(TarJob(card, None, str(tmp_path / "all.tar")))
