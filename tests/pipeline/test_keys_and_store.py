"""Tests of the store: keys, publication, damaged results, garbage, and look-up."""

import errno
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import fs

from pipeline import cli
from pipeline.app.garbage import delete_garbage, find_garbage
from pipeline.graph import store as store_module
from pipeline.graph.run import look_up_all
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store, compute_key, why
from workers.errors import DamagedArtifact, UserError
from workers.job import DataSettings, key_inputs
from workers.storage.artifact import Artifact, Attempt, join, parent, resolve, write_bytes


def stage(key: str, inputs: dict[str, Any] | None = None) -> Stage:
    return Stage("meat/a/train", "train", key, inputs or {"lambda": 0.9})


def publish(store: Store, key: str, files: dict[str, bytes]) -> bool:
    attempt = Attempt(store.root, key)
    for name, data in files.items():
        attempt.write(name, data)
    return attempt.commit({"kind": "train"})


def test_keys_are_pinned() -> None:
    """A change of the key function orphans all stored results. It must be deliberate: raise
    KEY_VERSION."""
    inputs = {
        "step": "train",
        "lambda": 0.9,
        "epochs": 3,
        "classes": ["a", "b"],
        "compile": False,
        "select": None,
    }
    assert compute_key(inputs, ["p1", "p2"]) == "efe562425d7f48298519f134b8987744"


def test_disabled_repeats_do_not_change_existing_keys() -> None:
    plain, once, twice, thrice = (
        compute_key(key_inputs(settings), [])
        for settings in (
            DataSettings(),
            DataSettings(repeats=1),
            DataSettings(repeats=2),
            DataSettings(repeats=3),
        )
    )
    assert plain == once == "6a906f7e9952c4e2a390cdaef6ab21f4"
    assert len({plain, twice, thrice}) == 3


@pytest.mark.parametrize(
    "pair",
    [
        (1, 1.0),
        (1, "1"),
        (True, 1),
        (None, "None"),
        (["a", "b"], ["ab"]),
        ({"a": 1}, [["a", 1]]),
        ([], {}),
    ],
)
def test_values_of_different_types_have_different_keys(pair: Any) -> None:
    assert compute_key({"x": pair[0]}, []) != compute_key({"x": pair[1]}, [])


def test_keys_depend_on_parent_order_but_not_setting_order() -> None:
    assert compute_key({"a": 1, "b": 2}, []) == compute_key({"b": 2, "a": 1}, [])
    assert compute_key({}, ["p", "q"]) != compute_key({}, ["q", "p"])


def test_a_value_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(TypeError):
        compute_key({"x": object()}, [])


def test_a_result_without_manifest_does_not_exist(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    Attempt(store.root, "k").write("state.safetensors", b"half")
    assert not store.look_up(stage("k")).hit


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_result_file_is_named_and_its_result_withdrawn(tmp_path: Path, harm: str) -> None:
    store = Store(str(tmp_path))
    publish(store, "k", {"state.safetensors": b"0123456789", "other": b"x"})
    assert store.look_up(stage("k")).hit
    artifact = Artifact.need(store.root, "k")
    path = artifact.uri("state.safetensors")
    if harm == "remove":
        fs.LocalFileSystem().delete_file(path)
    else:
        with open(path, "wb") as stream:
            stream.write(b"0123456788" if harm == "flip" else b"01234")
    with pytest.raises(DamagedArtifact, match=r"state\.safetensors"):
        artifact.read("state.safetensors")
    lookup = store.look_up(stage("k"))
    assert not lookup.hit
    assert lookup.must_withdraw
    assert "state.safetensors" in lookup.reason
    store.withdraw("k")
    assert Artifact.open(store.root, "k") is None
    assert (tmp_path / "stages" / "k" / artifact.manifest["attempt"] / "other").exists(), (
        "undamaged files are kept: they may be the only copies"
    )
    assert publish(store, "k", {"state.safetensors": b"again"})


def test_commit_deletes_partial_files_of_a_killed_attempt(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path), "k", "a-1")
    attempt.write("shard.tar", b"whole")
    (tmp_path / "k/a-1/shard.tar.0.part").write_bytes(b"who")
    assert attempt.commit({"kind": "ingest"})
    assert [path.name for path in (tmp_path / "k/a-1").iterdir()] == ["shard.tar"]


def test_first_of_two_attempts_is_published_without_mixing_files(tmp_path: Path) -> None:
    root = str(tmp_path)
    first, second = Attempt(root, "k"), Attempt(root, "k")
    first.write("a", b"first")
    second.write("a", b"second")
    second.write("b", b"second")
    assert first.commit({}) is True
    assert second.commit({}) is False
    artifact = Artifact.need(root, "k")
    assert artifact.read("a") == b"first"
    assert set(artifact.manifest["files"]) == {"a"}
    assert sorted(p.name for p in (tmp_path / "k").iterdir()) == sorted(
        ["manifest.json", first.name]
    )


def test_publishing_works_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = Store(str(tmp_path))
    assert publish(store, "k", {"a": b"1"})
    assert not publish(store, "k", {"a": b"2"})
    assert Artifact.need(store.root, "k").read("a") == b"1"
    assert not list(tmp_path.rglob("*.part"))


def test_damaged_manifest_is_a_miss_and_can_be_republished(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, "k", {"a": b"1"})
    path = tmp_path / "stages" / "k" / "manifest.json"
    whole = path.read_text()
    for text in (
        whole[:40],
        json.dumps({"kind": "train"}),
        "[]",
        whole.replace("train", "trawn"),
        whole + "x",
        "",
    ):
        path.write_text(text)
        assert Artifact.open(store.root, "k") is None
        lookup = store.look_up(stage("k"))
        assert not lookup.hit
        assert "manifest.json is not as it was written" in lookup.reason
        store.withdraw("k")
        assert publish(store, "k", {"a": b"1"}), "the stage can be published again"
        assert store.look_up(stage("k")).hit


def test_look_up_miss_states_its_reason() -> None:
    before = {
        "stages": [
            {"id": "meat/a/train", "key": "old", "inputs": {"lambda": 0.9, "train": {"epochs": 3}}}
        ]
    }
    assert (
        why(stage("new", {"lambda": 0.8, "train": {"epochs": 3}}), before)
        == "changed lambda: 0.9 -> 0.8"
    )
    assert (
        why(stage("new", {"lambda": 0.9, "train": {"epochs": 4}}), before)
        == "changed train.epochs: 3 -> 4"
    )
    assert (
        why(stage("new", {"lambda": 0.9, "train": {"epochs": 3}}), before)
        == "an earlier stage changed"
    )
    assert why(stage("old", {"lambda": 0.9, "train": {"epochs": 3}}), before) == "not finished"
    assert why(stage("any"), None) == "new"


def test_results_that_no_run_needs_are_garbage(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, "kept", {"a": b"1"})
    publish(store, "lost", {"a": b"12345"})
    store.save_record(
        cast(
            Any,
            {
                "name": "r",
                "stages": [
                    {"id": "a", "key": "kept", "step": "train"},
                    {"id": "b", "key": "unfinished", "step": "train"},
                ],
            },
        )
    )
    Attempt(store.root, "unfinished").write("a", b"1")  # may be in progress
    assert [path for path, *_ in find_garbage(store)] == ["stages/lost"]
    assert find_garbage(store)[0][1] > 5


def test_garbage_is_limited_by_age_and_kept_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path))
    store.save_record(cast(Any, {"name": "r", "stages": []}))
    for days, key in enumerate(("new", "yesterday", "older")):
        publish(store, key, {"a": b"x" * 1000})
        written = time.time() - days * 86400 - 60
        for path in (tmp_path / "stages" / key).rglob("*"):
            os.utime(path, (written, written))

    def keys(**options: Any) -> list[str]:
        return [path.partition("/")[2] for path, *_ in find_garbage(store, **options)]

    assert keys() == ["new", "older", "yesterday"]
    assert keys(older_than_s=86400) == ["older", "yesterday"]
    assert keys(older_than_s=2 * 86400) == ["older"]
    sizes = [folder.size_bytes for folder in find_garbage(store)]
    assert keys(keep_bytes=sizes[0]) == ["older", "yesterday"]
    assert keys(keep_bytes=sizes[0] + sizes[2]) == ["older"]
    assert keys(keep_bytes=sum(sizes)) == []
    assert keys(keep_bytes=sizes[0], older_than_s=2 * 86400) == ["older"]
    command = ["gc", "--storage", str(tmp_path), "--older-than"]
    assert cli.main([*command, "36h", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "stages/older" in printed
    assert "stages/yesterday" not in printed
    assert keys() == ["new", "older", "yesterday"]
    assert cli.main([*command, "1d", "--yes"]) == 0
    assert keys() == ["new"]
    assert cli.main([*command, "30d", "--yes"]) == 0
    assert "younger than --older-than" in capsys.readouterr().out
    assert cli.main([*command, "a month"]) == 2
    assert "is not an age; give a number with d, h or m" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [["--older-than", "30d"], ["--keep-gb", "0.000001"]])
def test_earlier_record_stays_until_its_last_result_is_deleted(
    bound: list[str], tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    stages = [{"id": key, "key": key, "step": "train"} for key in ("data", "aged", "young")]
    store.save_record(cast(Any, {"name": "r", "stages": stages}))
    for stage_of_record in stages:
        publish(store, stage_of_record["key"], {"a": b"x" * 500})
    written = time.time() - 40 * 86400
    for path in (tmp_path / "stages" / "aged").rglob("*"):
        os.utime(path, (written, written))
    store.save_record(cast(Any, {"name": "r", "stages": stages[:1]}))
    command = ["gc", "--storage", str(tmp_path), "--yes"]
    assert cli.main([*command, "--earlier", *bound]) == 0
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {"data", "young"}
    assert store.earlier_names() == ["r"]
    assert find_garbage(store) == []
    assert cli.main([*command, "--earlier"]) == 0
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {"data"}
    assert not (tmp_path / "runs" / "r" / "earlier").exists()


def test_unreadable_earlier_record_is_kept(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path))
    publish(store, "k", {"a": b"1"})
    stages = [{"id": "a", "key": "k", "step": "train"}]
    store.save_record(cast(Any, {"name": "r", "stages": stages}))
    store.save_record(cast(Any, {"name": "r", "stages": []}))
    (path,) = (tmp_path / "runs" / "r" / "earlier").iterdir()
    path.write_text("{")
    delete_garbage(store, [], ["r"])
    assert path.exists()
    delete_garbage(store, ["stages/k"], ["r"])
    assert not path.exists()


@pytest.mark.parametrize(
    "bounds", [{"keep_bytes": -1.0}, {"keep_bytes": math.nan}, {"older_than_s": -math.inf}]
)
def test_invalid_garbage_bounds_are_refused(bounds: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a finite number of at least 0"):
        find_garbage(Store(str(tmp_path)), **bounds)


def test_remains_of_attempts_are_garbage_after_the_result_exists(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path))
    interrupted, damaged = Attempt(store.root, "k"), Attempt(store.root, "k")
    interrupted.write("a", b"half")
    damaged.write("a", b"1")
    damaged.commit({})
    store.withdraw("k")
    write_bytes(join(str(tmp_path), "checkpoints", "k", "latest.json"), b"{}")
    record: Any = {"name": "r", "stages": [{"id": "a", "key": "k", "step": "train"}]}
    store.save_record(record)
    assert find_garbage(store) == []
    publish(store, "k", {"a": b"1"})
    assert not {interrupted.name, damaged.name} & {
        path.name for path in (tmp_path / "stages" / "k").iterdir()
    }, "on a local disk, the commit deletes other attempts"
    interrupted.write("a", b"half")  # the attempt was still alive; its commit is refused
    assert {path for path, *_ in find_garbage(store)} == {
        "checkpoints/k",
        f"stages/k/{interrupted.name}",
    }
    assert not interrupted.commit({})


def test_find_garbage_refuses_an_unreadable_run_record(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, "k", {"a": b"1"})
    record: Any = {"name": "r", "stages": [{"id": "a", "key": "k", "step": "train"}]}
    store.save_record(record)
    (tmp_path / "runs" / "r" / "run.json").write_text("{")
    with pytest.raises(UserError, match="what run 'r' needs is not known"):
        find_garbage(store)


def test_join_keeps_the_query_of_a_uri_at_the_end() -> None:
    """E.g. `s3://bucket/folder?region=...`. With plain string joins, all results would have the
    same path."""
    uri = "s3://bucket/runs?region=eu-west-1&scheme=http"
    assert join(uri, "stages", "k") == "s3://bucket/runs/stages/k?region=eu-west-1&scheme=http"
    assert parent(join(uri, "stages")) == uri
    system, path = resolve(join(uri, "stages", "k"))
    assert (path, system.handler.system.region) == ("bucket/runs/stages/k", "eu-west-1")
    assert parent("/a/b/") == "/a"


def test_store_remembers_the_key_of_a_source(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.remembered("card") is None
    store.remember("card", "abc")
    assert Store(str(tmp_path)).remembered("card") == "abc"
    assert join(store.storage, "sources").startswith(str(tmp_path))


def test_object_store_look_ups_run_concurrently_and_keep_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least eight look-ups run at the same time."""
    graph = Graph.of("g", [Stage(f"s{i}", "train", f"key-{i}", {"lambda": i}) for i in range(32)])
    previous = {
        "stages": [
            {"id": s.id, "key": "old", "inputs": {"lambda": 7}} for s in graph if s.id != "s31"
        ]
    }
    together = threading.Barrier(8)

    def look_up(self: Any, stage: Any, before: Any, verify: Any) -> Any:
        together.wait(timeout=60)
        return Lookup(False, why(stage, before))

    monkeypatch.setattr(Store, "look_up", look_up)
    lookups = look_up_all(graph, Store("s3://bucket/storage"), cast(Any, previous))
    assert list(lookups) == [f"s{i}" for i in range(32)]
    assert (lookups["s3"].reason, lookups["s7"].reason, lookups["s31"].reason) == (
        "changed lambda: 7 -> 3",
        "an earlier stage changed",
        "new",
    )


def test_read_only_use_needs_no_writable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pipeline.graph.store.write_bytes", refuse)
    store = Store(str(tmp_path))
    store.check_usable(to_write=False)
    with pytest.raises(UserError, match="Read-only file system"):
        store.check_usable(to_write=True)
    with pytest.raises(UserError, match="Read-only file system"):
        Store(str(tmp_path / "new")).check_usable(to_write=False)


def test_concurrent_callers_compute_a_result_once(tmp_path: Path) -> None:
    """The second caller gets the manifest of the first, even if it had to wait."""
    store, computed = Store(str(tmp_path)), []

    def compute() -> dict[str, Any]:
        computed.append(threading.get_ident())
        time.sleep(0.2)
        attempt = Attempt(store.root, "k")
        attempt.write("a", b"data")
        attempt.commit({"kind": "report"})
        return dict(Artifact.need(store.root, "k").manifest)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: store.compute_once("k", compute), range(2))
    assert len(computed) == 1
    assert sorted([first.get("reused", False), second.get("reused", False)]) == [False, True]
    assert first["attempt"] == second["attempt"]


def test_nothing_is_remembered_in_a_read_only_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> None:
        def write(uri: str, data: bytes) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(store_module, "write_bytes", write)

    store = Store(str(tmp_path))
    fail(errno.EROFS)
    store.remember("a", 1)
    assert store.remembered("a") is None
    fail(errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        store.remember("a", 1)
