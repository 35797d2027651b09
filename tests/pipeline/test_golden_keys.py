"""Tests that keys stay stable: new settings keep old keys, changed defaults give new keys, and the
golden files report every change."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from pipeline.graph.store import compute_key
from tests import golden_keys
from workers.job import (
    BackboneSettings,
    ContextSettings,
    DataSettings,
    Frozen,
    Neutral,
    TrainSettings,
    key_inputs,
)
from workers.methods.meat import MeatSettings
from workers.storage.taskstate import Carried, TaskState, load_tensors


def key(settings: Frozen) -> str:
    return compute_key(key_inputs(settings), [])


class Newer(TrainSettings):
    """Training settings of a later version with one more setting."""

    lookahead: Annotated[int, Neutral(0)] = 0


class Tuned(TrainSettings):
    """A version in which the default of that setting is not the neutral value."""

    lookahead: Annotated[int, Neutral(0)] = 5


class Faster(TrainSettings):
    """A version in which a default changed."""

    epochs: int = 11


def test_keys_and_defaults_match_the_golden_files() -> None:
    old = golden_keys.read()
    new = golden_keys.pinned()
    assert old == new, "\n".join(
        [*golden_keys.differences(old, new), f"see {golden_keys.__file__}"]
    )


def test_a_new_setting_with_a_neutral_value_changes_no_key() -> None:
    assert key(Newer()) == key(TrainSettings())
    assert key(Newer(epochs=3)) == key(TrainSettings(epochs=3))
    assert key(Newer(lookahead=2)) != key(Newer())


def test_a_default_that_is_not_neutral_is_in_the_key() -> None:
    assert key_inputs(Tuned())["lookahead"] == 5
    assert key(Tuned()) == key(Newer(lookahead=5)) != key(TrainSettings())
    assert key(Tuned(lookahead=0)) == key(TrainSettings()), "the neutral value gives the old key"


def test_changed_default_changes_keys_but_old_value_keeps_its_key() -> None:
    assert key(Faster()) != key(TrainSettings())
    assert key(Faster(epochs=10)) == key(TrainSettings())


def test_equal_value_of_another_type_is_not_neutral() -> None:
    class Either(Frozen):
        value: Annotated[bool | int | None, Neutral(0)] = None

    assert [key_inputs(Either(value=v)) for v in (0, False, None)] == [
        {},
        {"value": False},
        {"value": None},
    ]


def test_nested_settings_omit_neutral_values_from_keys() -> None:
    class Inner(Frozen):
        old: int = 1
        new: Annotated[int, Neutral(2)] = 2

    class Outer(Frozen):
        one: Inner = Inner()
        many: tuple[Inner, ...] = (Inner(), Inner(new=3))
        named: dict[str, Inner] = Field({"a": Inner()}, alias="by_name")

    assert key_inputs(Outer()) == {
        "one": {"old": 1},
        "many": ({"old": 1}, {"old": 1, "new": 3}),
        "by_name": {"a": {"old": 1}},
    }


def test_settings_added_later_keep_old_keys() -> None:
    assert key(DataSettings()) == "6a906f7e9952c4e2a390cdaef6ab21f4"
    assert key(BackboneSettings()) == "7658907c31e404a95275872880bb4bce"
    assert key_inputs(BackboneSettings(context=ContextSettings()))["context"]["kind"] == "cb"
    assert "lambda" in key_inputs(MeatSettings())
    assert "lambda" not in key_inputs(MeatSettings(), ("lambda",))


def test_neutral_values_stay_in_the_record() -> None:
    """A record holds every value: a missing one would become the default, which may change."""
    assert Tuned.model_validate(Tuned(lookahead=0).model_dump()).lookahead == 0
    assert DataSettings().model_dump()["repeats"] == 1


# ---- differences from the golden files -----------------------------------------------------------
def edited(pinned: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with one value changed, or removed if `value` is None."""
    changed = copy.deepcopy(pinned)
    parent = changed
    for part in path[:-1]:
        parent = parent[part]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed


TRAIN = ("settings", "TrainSettings")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ((*TRAIN, "fresh"), {"default": 3}, "TrainSettings.fresh is new and has no neutral value"),
        ((*TRAIN, "fresh"), {"default": 3, "neutral": 0}, "fresh is new, and no key changes"),
        ((*TRAIN, "clip"), {"default": 1.0}, "TrainSettings.clip: its default 0.0 became 1.0"),
        ((*TRAIN, "clip"), None, "TrainSettings.clip is gone"),
        ((*TRAIN, "clip"), {"default": 0.0, "neutral": 0.0}, "neutral value is for new settings"),
        ((*TRAIN, "schedule", "neutral"), "epoch", "a neutral value never changes"),
        ((*TRAIN, "schedule", "neutral"), None, "a neutral value never changes"),
        (
            ("settings", "methods.meat", "lambda", "default"),
            0.8,
            "meat.lambda: its default 0.9 became",
        ),
        (("revisions", "methods.meat"), 99, r"revision of methods.meat: \d+ -> 99"),
        (("key_version",), 99, "KEY_VERSION: 1 -> 99: every stored result is computed again"),
        (
            ("demo", "backbone"),
            "0" * 32,
            "the key of stage backbone of configs/demo.yaml changed .1 st",
        ),
    ],
)
def test_every_key_change_is_described_in_one_sentence(
    path: tuple[str, ...], value: Any, sentence: str
) -> None:
    pinned = golden_keys.read()
    sentences = golden_keys.differences(pinned, edited(pinned, path, value))
    assert len(sentences) == 1
    assert re.search(sentence, sentences[0])
    assert re.search(f"{golden_keys.COMMAND}|put it back|take it away", sentences[0])


def test_command_writes_one_file_per_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(golden_keys.GOLDEN, tmp_path / "golden")
    monkeypatch.setattr(golden_keys, "FILE", tmp_path / "golden" / "keys.json")
    monkeypatch.setattr(golden_keys, "METHOD_FILES", tmp_path / "golden" / "methods")
    before = {path: path.read_text() for path in (tmp_path / "golden").rglob("*.json")}
    gone = golden_keys.method_file("hat")
    gone.unlink()
    other = golden_keys.method_file("no-method")
    other.write_text(before[golden_keys.method_file("meat")])
    golden_keys.write(golden_keys.read() | golden_keys.pinned())
    after = {path: path.read_text() for path in (tmp_path / "golden").rglob("*.json")}
    assert json.loads(after.pop(gone)).keys() == {"settings", "revision"}
    del before[gone]
    assert after == before, "step costs must stay, and files of unknown methods must be deleted"


# ---- files ---------------------------------------------------------------------------------------
ORDER = """
import sys
from workers.storage.taskstate import Carried, TaskState
data = sys.stdin.buffer.read()
print(*Carried.from_bytes(data).tensors)
"""


def test_tensors_load_in_the_same_order_in_every_process() -> None:
    import torch

    names = [f"t{number:02d}" for number in range(40)]
    data = Carried({name: torch.zeros(1) for name in reversed(names)}).to_bytes()
    done = subprocess.run(
        [sys.executable, "-c", ORDER], input=data, capture_output=True, check=True
    )
    assert done.stdout.decode().split() == names
    state = TaskState(
        "a",
        ("x",),
        "m",
        "d",
        masks={n: torch.ones(3, dtype=torch.bool) for n in reversed(names)},
        copies={n: torch.zeros(1) for n in reversed(names)},
    )
    again = TaskState.from_bytes(state.to_bytes())
    assert [*again.masks] == [*again.copies] == names
    assert [*load_tensors(data, "")[0]] == names
