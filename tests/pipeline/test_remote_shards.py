"""Tests of shards on web servers, in buckets and on the hub: index, reads, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from test_in_place import CLASSES, SPLITS, card_of, picture, run, write_shards

from pipeline.data import in_place
from pipeline.data.formats import fingerprint, is_local_source, source_state
from pipeline.graph import raw_data
from pipeline.graph.store import Store, compute_key
from tests import s3
from tests.web_server import Server, serve
from workers.data.cache import Cache
from workers.data.reader import make_sequential_reader
from workers.data.rows import select
from workers.errors import SourceChanged, UserError
from workers.job import Task
from workers.storage import filesystem, hub_files, web


@pytest.fixture
def shards_folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "wds", "tiny-train", range(12))
    write_shards(tmp_path / "wds", "tiny-val", range(100, 104))
    return tmp_path / "wds"


@pytest.fixture
def server(shards_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve the shards from this machine, and allow requests to its private address."""
    monkeypatch.setattr(web, "is_private", lambda host: False)
    monkeypatch.setattr(filesystem, "FIRST_S", 0.001)
    with serve(shards_folder) as started:
        yield started


def read_all(card: Any, root: Path, cache: Cache | None) -> list[bytes]:
    """Return the training images in order, as a rank reads them."""
    task = Task("t", "tiny", "k", CLASSES, shard_urls=in_place.get_shard_urls(card))
    samples = select(str(root), (task,), "train", 0.0)
    reader = make_sequential_reader(samples, cache)
    try:
        steps = np.arange(len(samples)).reshape(-1, 1)
        return [reader.read(int(row)) for (row,) in reader.ahead(iter(steps))]
    finally:
        reader.close()


# ---- web servers ---------------------------------------------------------------------------------
def test_http_shards_equal_local_shards(
    server: Server, shards_folder: Path, tmp_path: Path
) -> None:
    _, expected = run(card_of(shards_folder), tmp_path / "disk")
    card = card_of(server.url)
    server.num_failures = 2
    _, shards = run(card, tmp_path / "store")
    assert shards.read_index().equals(expected.read_index())
    assert shards.files == expected.files
    assert shards.is_remote
    cache = Cache(str(tmp_path / "cache"), 1 << 30)
    images = [picture(number) for number in range(12)]
    assert read_all(card, tmp_path / "store", cache) == images
    server.requests.clear()
    assert read_all(card, tmp_path / "store", cache) == images
    assert not server.requests


def test_indexing_reads_each_remote_shard_once(server: Server, tmp_path: Path) -> None:
    card = card_of(server.url)
    source_state(card)
    server.requests.clear()
    in_place.index_shards(card, str(tmp_path / "store"), "k", map, {"step": "ingest"})
    asked = [request for request in server.requests if request[1] != "bytes=0-0"]
    assert len(asked) == len(set(asked)) == 4


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0.0.0.0"])
def test_private_addresses_are_refused_without_a_connection(host: str, shards_folder: Path) -> None:
    with serve(shards_folder) as started:
        card = card_of(f"http://{host}:{started.server_port}")
        with pytest.raises(UserError, match=r"is a private address|is not an address of"):
            fingerprint(card)
        assert started.num_connections == 0


def test_redirect_to_a_private_address_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "is_private", lambda host: host != "127.0.0.1")
    server.mode = "redirects"
    server.target = f"http://127.0.0.2:{server.server_port}"
    with pytest.raises(UserError, match=r"127\.0\.0\.2 is a private address"):
        fingerprint(card_of(server.url))


def test_endless_redirects_are_refused(server: Server) -> None:
    server.mode = "redirects"
    server.target = server.url
    with pytest.raises(UserError, match="from one address to the next"):
        fingerprint(card_of(server.url))
    assert len(server.requests) <= 4 * (web.MAX_REDIRECTIONS + 1)


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
    ],
)
def test_all_forms_of_private_addresses_are_recognised(host: str) -> None:
    assert web.is_private(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_not_private(host: str) -> None:
    assert not web.is_private(host)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("whole", "gives no parts of a file"),
        ("lies", "another part than was asked for"),
    ],
)
def test_server_that_mishandles_range_requests_is_refused(
    mode: str, says: str, server: Server
) -> None:
    server.mode = mode
    with pytest.raises(UserError, match=says):
        fingerprint(card_of(server.url))


def test_response_longer_than_the_requested_range_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "PATIENCE_S", 0.0)
    server.mode = "endless"
    with pytest.raises(UserError, match=r"Connection closed \(\d{1,7} bytes of 1\)"):
        web.WebFile(f"{server.url}/tiny-val-0000.tar")


def test_url_with_a_secret_is_refused_without_a_request(server: Server) -> None:
    with pytest.raises(UserError, match="has a user, a password or a key in it"):
        fingerprint(card_of("", {"train": f"{server.url}/a.tar?X-Amz-Signature=abc"}))
    assert not server.requests


def test_missing_and_changed_remote_shards_are_reported(
    server: Server, shards_folder: Path, tmp_path: Path
) -> None:
    card = card_of(server.url)
    run(card, tmp_path / "store")
    state = source_state(card)
    path = shards_folder / "tiny-train-0001.tar"
    before = path.read_bytes()
    altered = bytearray(before)
    altered[altered.index(picture(5)) + 60] ^= 1
    path.write_bytes(altered)
    with pytest.raises(SourceChanged, match=r"tiny-train-0001\.tar changed after"):
        read_all(card, tmp_path / "store", None)
    changed = source_state(card)
    path.write_bytes(before)
    run(card, tmp_path / "store")  # the next run indexes it again
    assert state is not None
    assert changed is not None
    assert changed.fingerprint == state.fingerprint
    assert changed.modified != state.modified
    path.unlink()
    with pytest.raises(UserError, match="1 of its 4 shards are missing"):
        fingerprint(card)
    with pytest.raises(SourceChanged, match=r"tiny-train-0001\.tar, .* \(it is missing\)"):
        read_all(card, tmp_path / "store", None)


def test_plan_of_indexed_remote_shards_makes_no_request(server: Server, tmp_path: Path) -> None:
    card = card_of(server.url)
    store = Store(str(tmp_path))
    source = raw_data.find_source(store, card)
    key = compute_key(raw_data.stage_inputs(card, source), ())
    in_place.index_shards(card, store.root, key, map, {"step": "ingest"})
    server.requests.clear()
    assert raw_data.find_source(store, card, check_remote=False).key_text == source.key_text
    absolute = card_of("", {"train": f"{server.url}/{SPLITS['train']}"}, test_fraction=0.5)
    raw_data.find_source(store, absolute)
    assert len(server.requests) == 3
    assert not is_local_source(absolute)


# ---- buckets and the hub -------------------------------------------------------------------------
def test_bucket_shards_equal_local_shards(shards_folder: Path, tmp_path: Path, bucket: Any) -> None:
    client = s3.client_of(bucket.upstream)
    for path in shards_folder.iterdir():
        client.put_object(Bucket=bucket.bucket, Key=f"wds/{path.name}", Body=path.read_bytes())
    _, expected = run(card_of(shards_folder), tmp_path / "disk")
    card = card_of(f"s3://{bucket.bucket}/wds?region=us-east-1")
    assert fingerprint(card) == fingerprint(card_of(shards_folder))
    _, shards = run(card, tmp_path / "store")
    assert shards.read_index().equals(expected.read_index())
    assert read_all(card, tmp_path / "store", None) == [picture(number) for number in range(12)]


def test_hub_shards_equal_local_shards(
    shards_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    for path in shards_folder.iterdir():
        memory.pipe_file(f"/datasets/somebody/wds/{path.name}", path.read_bytes())
    monkeypatch.setattr(
        hub_files, "open_hub", lambda uri: (memory, uri.replace("hf://", "memory://"))
    )
    _, expected = run(card_of(shards_folder), tmp_path / "disk")
    card = card_of("hf://datasets/somebody/wds")
    assert fingerprint(card) == fingerprint(card_of(shards_folder))
    _, shards = run(card, tmp_path / "store")
    assert shards.read_index().equals(expected.read_index())
    assert read_all(card, tmp_path / "store", None) == [picture(number) for number in range(12)]
