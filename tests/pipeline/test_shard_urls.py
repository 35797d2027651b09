"""Tests of the command `shards`: it prints URLs for webdataset, and opens only the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import braceexpand
import pytest
import webdataset
from test_in_place import digit_shards

from pipeline import cli
from pipeline.config.yaml_files import CARDS
from pipeline.data import card_files, in_place, ingest
from pipeline.data.braces import format_braces
from pipeline.data.cards import Card
from pipeline.data.formats import list_source
from pipeline.graph import raw_data
from pipeline.graph.store import Store, compute_key
from tests import small_run
from tests.shard_names import shard_name
from workers.data.in_place import urls_by_name
from workers.errors import UserError


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


def test_shards_of_ingested_cards_are_read_by_webdataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_run.make_card(tmp_path, "a", "23", shard_images=7)
    body = small_run.make_body(tmp_path, {"a": card}, ["finetune"])
    config = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["shards", config]) == 2
    message = capsys.readouterr().err
    assert "card 'a' has no shards in storage" in message
    assert "python -m pipeline ingest CONFIG" in message
    storage = str(tmp_path / "storage")
    store = Store(storage)
    loaded = card_files.load_card_file(card)
    key = compute_key(raw_data.stage_inputs(loaded, raw_data.find_source(store, loaded)), ())
    ingest.ingest(loaded, store.root, key, map, {"step": "ingest"})
    listed = output(capsys, "shards", config)
    assert listed == output(capsys, "shards", card, "--storage", storage)
    splits = [line.split("\t")[:2] for line in listed.splitlines()]
    assert splits == [["a", "train"]] * 2 + [["a", "test"]] * 2
    urls = output(capsys, "shards", config, "--split", "train").split()
    names = sorted(shard_name("train", label) for label in "23")
    for url, name in zip(urls, names, strict=True):
        assert url.endswith("/" + name.replace("00000", "{00000..00002}"))
    records = webdataset.WebDataset("::".join(urls), shardshuffle=False).decode("pil")
    labels = [label for _, label in records.to_tuple("jpg;png;webp", "txt")]
    assert sorted(labels) == ["2"] * 20 + ["3"] * 20


def test_in_place_shard_urls_are_printed_as_in_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = digit_shards(tmp_path, "a", "23")
    text = output(capsys, "shards", card, "--storage", str(tmp_path / "nowhere"))
    assert text.splitlines() == [
        f"a\ttrain\t{tmp_path}/a-train-{{0..0}}.tar",
        f"a\ttest\t{tmp_path}/a-test-{{0..0}}.tar",
    ]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], []),
        (["a/x-7.tar"], ["a/x-7.tar"]),
        ([f"a/x-{n:04d}.tar" for n in range(3, 12)], ["a/x-{0003..0011}.tar"]),
        (["x-08.tar", "x-09.tar", "x-11.tar"], ["x-{08..09}.tar", "x-11.tar"]),
        (["x-9.tar", "x-10.tar"], ["x-9.tar", "x-10.tar"]),
        (["a.tar", "b.tar"], ["a.tar", "b.tar"]),
        (["{1}/x-1.tar", "{1}/x-2.tar"], ["\\{1\\}/x-{1..2}.tar"]),
        (
            ["s3://b/x-1.tar?region=eu", "s3://b/x-2.tar?region=eu"],
            ["s3://b/x-{1..2}.tar?region=eu"],
        ),
    ],
)
def test_brace_patterns_expand_to_exactly_the_given_urls(
    urls: list[str], expected: list[str]
) -> None:
    patterns = format_braces(urls)
    assert patterns == expected
    expanded: list[Any] = []
    for pattern in patterns:
        expanded += braceexpand.braceexpand(pattern)
    assert expanded == urls


def test_imagenet_card_lists_its_shards_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCRETE_IMAGENET_WDS", raising=False)
    card = card_files.load_card_file("imagenet-wds")
    urls = in_place.get_shard_urls(card)
    assert urls is not None
    by_name = urls_by_name(urls)
    assert len(by_name) == 1024 + 64
    assert by_name["train-001023.tar"].endswith("imagenet-1k-wds/imagenet1k-train-1023.tar")
    assert by_name["test-000063.tar"].endswith("imagenet1k-validation-63.tar")
    assert list(card.classes) == sorted(set(card.classes))
    for order in (CARDS / "imagenet" / "orders").glob("*.yaml"):
        assert set(card_files.order_classes(f"imagenet/{order.stem}", card.classes)) <= set(
            card.classes
        )


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://[::1/a.tar", "Invalid IPv6 URL"),
        ("s3://a]b/a.tar", "Invalid IPv6 URL"),
        ("{" * 5000 + "a,b" + "}" * 5000 + ".tar", "more than 50 braces"),
        ("{" * 40 + "a,b.tar", "cannot be expanded"),
    ],
)
def test_malformed_shard_url_is_refused(address: str, says: str) -> None:
    body = {
        "name": "x",
        "licence": "x",
        "classes": ["a", "b"],
        "source": {"format": "webdataset", "splits": {"train": address}},
    }
    with pytest.raises(UserError, match=says):
        list_source(Card.model_validate(body))
