"""Tests of the versions of a model folder: publish, roll back, forget, and kills at any call."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.serving.model_source import FolderModel
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.serving import model_file, versions
from workers.serving.bundle import Bundle
from workers.serving.versions import Versions, forget, list_versions, publish, rollback
from workers.storage.artifact import file_info, join, list_files, temporary_name
from workers.storage.lock import file_lock

KILLS = 20
OTHERS_FILE = "tasks/mine.safetensors"  # no version names this file


def make_bundle(**states: str) -> Bundle:
    """Return a bundle of a backbone and of tasks. states: task -> text that makes its state."""
    contents = {"backbone.safetensors": b"backbone" * 1000}
    for task, state in states.items():
        contents[model_file.state_file(task)] = f"{task} {state}".encode() * 100
    rows = [
        {"name": task, "classes": ["x"], "card": "c", "data": "d", "role": "task"}
        for task in states
    ]
    body = {
        "format": 1,
        "method": "linear",
        "settings": {},
        "backbone": BackboneSettings().model_dump(mode="json"),
        "backbone_digest": "b",
        "scenario": "task",
        "seed": 0,
        "tasks": rows,
        "carried": {},
        "preprocessing": {},
        "max_pixels": 1,
        "provenance": {},
        "files": {name: file_info(data) for name, data in contents.items()},
    }
    return Bundle(model_file.sealed(body), contents.__getitem__, "test")


def read_all(bundle: Bundle) -> dict[str, bytes]:
    """Return the verified bytes of all files of a bundle."""
    return {name: bundle.read(name) for name in bundle.body["files"]}


def open_kept(uri: str) -> list[dict[str, bytes]]:
    """Return the verified files of each kept version."""
    kept = list_versions(uri)
    assert [row.is_current for row in kept] == [False] * (len(kept) - 1) + [True]
    files = [Bundle.open(uri, versions.version_file(row.number)) for row in kept[:-1]]
    return [read_all(bundle) for bundle in (*files, Bundle.open(uri))]


def find_strays(uri: str) -> set[str]:
    """Return the files of a folder that belong to no kept version."""
    state = Versions(uri)
    expected = {model_file.MODEL, versions.LOCK}
    for number in state.kept:
        body = state.bodies[number]
        expected.add(versions.version_file(number))
        expected |= {model_file.find_place(body, name) for name in body["files"]}
    return list_files(uri).keys() - expected


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_bundle(a="1").write(str(tmp_path / "model"))
    return str(tmp_path / "model")


def rows(uri: str) -> list[tuple[int, tuple[str, ...]]]:
    return [(row.number, row.tasks) for row in list_versions(uri)]


# ---- publish -------------------------------------------------------------------------------------
def test_published_bundle_is_served(folder: str) -> None:
    source = FolderModel(folder)
    before = source.version()
    assert rows(folder) == [(1, ("a",))]
    new = make_bundle(a="1", b="1")
    assert publish(folder, new) == 2
    assert source.version() != before
    assert read_all(source.open()) == read_all(new)
    assert rows(folder) == [(1, ("a",)), (2, ("a", "b"))]
    assert open_kept(folder)[0] == read_all(make_bundle(a="1"))


def test_equal_content_makes_no_version(folder: str) -> None:
    publish(folder, make_bundle(a="2"))  # its state is stored at another path
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert publish(folder, make_bundle(a="2")) == 2
    assert publish(folder, Bundle.open(folder)) == 2
    after = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert after == before


def test_last_three_versions_are_kept(folder: str) -> None:
    for number in range(2, 7):
        assert publish(folder, make_bundle(a=str(number))) == number
    assert [row.number for row in list_versions(folder)] == [4, 5, 6]
    expected = [read_all(make_bundle(a=str(number))) for number in (4, 5, 6)]
    assert open_kept(folder) == expected
    assert find_strays(folder) == set()


def test_equal_bytes_are_written_once(folder: str) -> None:
    backbone = Path(folder, "backbone.safetensors")
    written = backbone.stat()
    publish(folder, make_bundle(a="1", b="1"))
    publish(folder, make_bundle(a="2", b="1"))
    assert backbone.stat() == written
    assert publish(folder, make_bundle(a="1")) == 4  # equal to version 1
    assert len(list(Path(folder, "tasks").iterdir())) == 3
    body = json.loads(Path(folder, "model.json").read_text())
    assert "at" not in body["files"]["tasks/a.safetensors"]


def test_files_of_others_are_never_touched(folder: str) -> None:
    Path(folder, OTHERS_FILE).write_text("mine")
    for number in range(5):
        publish(folder, make_bundle(a="1", mine=str(number)))
        assert read_all(Bundle.open(folder)) == read_all(make_bundle(a="1", mine=str(number)))
    assert Path(folder, OTHERS_FILE).read_text() == "mine"
    assert find_strays(folder) == {OTHERS_FILE}


def test_open_bundle_outlives_a_new_version(folder: str) -> None:
    old = Bundle.open(folder)
    publish(folder, make_bundle(a="2"))
    publish(folder, make_bundle(b="2"))
    assert read_all(old) == read_all(make_bundle(a="1"))


def test_written_copy_has_files_at_their_names(folder: str, tmp_path: Path) -> None:
    publish(folder, make_bundle(a="2"))
    assert '"at"' in Path(folder, "model.json").read_text()
    make_bundle(a="2").write(str(tmp_path / "fresh"))
    Bundle.open(folder).write(str(tmp_path / "copy"))
    for file in ("model.json", "tasks/a.safetensors"):
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "fresh" / file).read_bytes()


def test_second_publisher_waits_for_the_first(folder: str) -> None:
    with file_lock(os.path.join(folder, versions.LOCK)):
        thread = threading.Thread(target=publish, args=(folder, make_bundle(b="1")))
        thread.start()
        time.sleep(0.2)
        assert rows(folder) == [(1, ("a",))]
    thread.join(30)
    assert rows(folder) == [(1, ("a",)), (2, ("b",))]


# ---- rollback and forget -------------------------------------------------------------------------
def test_rollback_repeats_until_none_is_kept(folder: str) -> None:
    first = Path(folder, "model.json").read_bytes()
    publish(folder, make_bundle(a="2"))
    publish(folder, make_bundle(a="3", b="3"))
    assert rollback(folder).tasks == ("a",)
    assert open_kept(folder) == [read_all(make_bundle(a="1")), read_all(make_bundle(a="2"))]
    assert rollback(folder).number == 1
    assert Path(folder, "model.json").read_bytes() == first
    assert find_strays(folder) == set()
    with pytest.raises(UserError, match="no version before the current one is kept"):
        rollback(folder)
    assert publish(folder, make_bundle(c="1")) == 2


def test_rollback_to_an_equal_version_drops_one(folder: str) -> None:
    publish(folder, make_bundle(a="2"))
    publish(folder, make_bundle(a="1"))
    assert rollback(folder).number == 2
    assert rollback(folder).number == 1
    assert rows(folder) == [(1, ("a",))]


def test_rollback_refuses_a_version_that_lost_a_file(folder: str) -> None:
    publish(folder, make_bundle(b="1"))
    Path(folder, "tasks/a.safetensors").unlink()
    with pytest.raises(UserError, match=r"tasks/a\.safetensors is missing"):
        rollback(folder)
    assert read_all(Bundle.open(folder)) == read_all(make_bundle(b="1"))


def test_forget_drops_versions_of_a_task(folder: str) -> None:
    publish(folder, make_bundle(a="1", secret="1"))
    publish(folder, make_bundle(a="1"))
    assert forget(folder, "secret") == [2]
    assert rows(folder) == [(1, ("a",)), (3, ("a",))]
    assert not any("secret" in path for path in list_files(folder))
    assert forget(folder) == [1]
    assert forget(folder) == []
    assert rows(folder) == [(3, ("a",))]
    assert find_strays(folder) == set()


def test_publish_can_forget_a_task(folder: str) -> None:
    publish(folder, make_bundle(a="1", secret="1"))
    publish(folder, make_bundle(a="1", secret="2"))
    digest = Bundle.open(folder).body["files"]["tasks/secret.safetensors"]["sha256"]
    with versions.changing(folder) as state:
        state.publish(make_bundle(a="1"), forget="secret")
    assert rows(folder) == [(1, ("a",)), (4, ("a",))]
    for path in Path(folder).rglob("*"):
        assert "secret" not in path.name
        if path.is_file():
            assert b"secret" not in path.read_bytes()
            assert digest.encode() not in path.read_bytes()


# ---- kills ---------------------------------------------------------------------------------------
class Killed(BaseException):
    """Simulates a kill: it is raised in place of a call."""


def change_with_kill(
    change: Callable[[], object], at: int, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run a change, and kill it before its write or deletion number `at`.

    Returns:
        Whether the change reached this call.
    """
    calls = 0

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        for module, name in (
            (versions, "write_bytes"),
            (model_file, "write_bytes"),
            (versions, "link_file"),
            (versions, "_delete_file"),
        ):
            patch.setattr(module, name, count(getattr(module, name)))
        try:
            change()
        except Killed:
            return True
    return False


def publish_forgetting(uri: str) -> None:
    with versions.changing(uri) as state:
        state.publish(make_bundle(new="1"), forget="a")


CHANGES: dict[str, tuple[Callable[[str], object], list[dict[str, str]]]] = {
    "publish": (lambda uri: publish(uri, make_bundle(a="4")), [{"a": "3"}, {"a": "4"}]),
    "publish and forget": (publish_forgetting, [{"a": "3"}, {"new": "1"}]),
    "rollback": (rollback, [{"a": "3"}, {"a": "2"}]),
    "forget": (forget, [{"a": "3"}]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_folder_is_whole_after_a_kill_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, contents = CHANGES[name]
    possible = [read_all(make_bundle(**states)) for states in contents]
    seen = []
    for at in range(1, 100):
        folder = str(tmp_path / str(at))
        make_bundle(a="1").write(folder)
        publish(folder, make_bundle(a="2"))
        publish(folder, make_bundle(a="3"))
        Path(folder, OTHERS_FILE).write_text("mine")
        is_killed = change_with_kill(partial(change, folder), at, monkeypatch)
        current = open_kept(folder)[-1]
        assert current in possible
        seen.append(possible.index(current))
        Path(folder, f"tasks/a.safetensors.{temporary_name()}.part").write_bytes(b"part")
        publish(folder, make_bundle(last="1"))
        assert open_kept(folder)[-1] == read_all(make_bundle(last="1"))
        assert find_strays(folder) == {OTHERS_FILE}
        if not is_killed:
            break
    assert len(seen) >= 4
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == len(possible) - 1


def test_killed_removal_is_finished_by_the_next_change(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while True:
        at += 1
        publish(folder, make_bundle(a=str(at)))
        is_killed = change_with_kill(partial(publish_forgetting, folder), at, monkeypatch)
        with versions.changing(folder) as state:
            has_a = "a" in state.describe(state.current).tasks
            assert has_a == any("a" in row.tasks for row in list_versions(folder))
        if not is_killed:
            break
    assert at > 4


def publish_for_ever(uri: str, seed: int) -> None:
    """Publish until killed."""
    signal.alarm(60)
    for number in range(10**6):
        publish(uri, make_bundle(a=f"{seed} {number}", b=str(number % 3)))


@pytest.mark.few(1)
def test_sigkill_at_random_moments_leaves_a_whole_folder(folder: str) -> None:
    draw = random.Random(7)
    source = FolderModel(folder)
    for kill in range(KILLS):
        before = source.version()
        pid = os.fork()
        if pid == 0:
            try:
                publish_for_ever(folder, kill)
            finally:
                os._exit(1)
        while source.version() == before:  # wait until it has published
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        open_kept(folder)
    publish(folder, make_bundle(a="last"))
    assert len(open_kept(folder)) == versions.MAX_VERSIONS
    assert find_strays(folder) <= {versions.LOCK}


# ---- forged folders, and an object store ---------------------------------------------------------
@pytest.mark.parametrize(
    "at", ["../x", "/etc/passwd", "tasks/../../x.safetensors", "model.json", "other/x.safetensors"]
)
@pytest.mark.parametrize("file", ["model.json", "versions/1.json"])
def test_place_outside_the_folder_is_refused(folder: str, at: str, file: str) -> None:
    publish(folder, make_bundle(a="2"))
    body = json.loads(Path(folder, file).read_text())
    body["files"]["tasks/a.safetensors"]["at"] = at
    model_file.write_model(folder, model_file.sealed(body), file)
    with pytest.raises(UserError, match=rf"{file}: files.*at is "):
        publish(folder, make_bundle(a="3"))
    with pytest.raises(UserError, match=rf"{file}: files.*at is "):
        list_versions(folder)


def test_linked_subfolder_is_not_changed(folder: str, tmp_path: Path) -> None:
    Path(folder, "tasks").rename(tmp_path / "elsewhere")
    Path(folder, "tasks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="tasks is a link"):
        publish(folder, make_bundle(b="1"))


def test_damaged_list_of_dropped_versions_is_ignored(folder: str) -> None:
    publish(folder, make_bundle(a="2"))
    for text in ("{", '{"1": 2}', '["1", [2]]'):
        Path(folder, versions.DROPPED).write_text(text)
        assert len(list_versions(folder)) == 2
    publish(folder, make_bundle(a="3"))
    assert find_strays(folder) == set()


def test_versions_work_in_a_bucket(bucket: Any) -> None:
    uri = join(bucket.uri, "model")
    make_bundle(a="1").write(uri)
    for number in (2, 3, 4):
        assert publish(uri, make_bundle(a=str(number), b="1")) == number
    assert rows(uri) == [(2, ("a", "b")), (3, ("a", "b")), (4, ("a", "b"))]
    assert rollback(uri).number == 3
    expected = [read_all(make_bundle(a=str(number), b="1")) for number in (2, 3)]
    assert open_kept(uri) == expected
    assert find_strays(uri) == set()
    assert forget(uri, "b") == [2]
    assert open_kept(uri) == expected[1:]


def test_deletion_by_another_writer_is_noticed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store has no lock: another process may delete new files as leftovers."""
    new = make_bundle(b="1")

    def fetch(name: str) -> bytes:
        Path(folder, versions.version_file(2)).unlink()
        return new.fetch(name)

    with pytest.raises(UserError, match=r"another process deleted versions/2\.json"):
        publish(folder, Bundle(new.body, fetch, "test"))
    assert read_all(Bundle.open(folder)) == read_all(make_bundle(a="1"))
