"""Pin the inputs of keys: settings with their defaults and neutral values, revisions, and the keys
of the demo's stages.

golden/keys.json holds the shared part, golden/methods/NAME.json the part of each method.

    .venv/bin/python -m tests.golden_keys      # updates the files after an intended change
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

from pipeline.config import settings as config
from pipeline.data import cards, ingest
from pipeline.data.digests import ClassDigests
from pipeline.data.splits import SPLITS
from pipeline.graph import build, raw_data, run_record, store
from pipeline.search import spec
from workers import evaluate, loop
from workers.data import decoding
from workers.job import (
    BackboneSettings,
    ContextSettings,
    DataSettings,
    Neutral,
    TrainSettings,
    key_inputs,
)
from workers.methods import METHODS

GOLDEN = Path(__file__).parent / "golden"
FILE = GOLDEN / "keys.json"
METHOD_FILES = GOLDEN / "methods"
PREFIX = "methods."
DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
COMMAND = ".venv/bin/python -m tests.golden_keys"
IF_MEANT = f"if that is meant, run {COMMAND}"
REQUIRED = "(required)"
SHARED = (
    BackboneSettings,
    ContextSettings,
    DataSettings,
    TrainSettings,
    config.BackboneChoice,
    config.StreamSettings,
    config.TaskEntry,
    cards.Card,
    cards.Source,
    cards.Counts,
    spec.SearchSettings,
)


def read() -> dict[str, Any]:
    """Return the pinned inputs from the files, in the form of `pinned`."""
    pins: dict[str, Any] = json.loads(FILE.read_text())
    for path in sorted(METHOD_FILES.glob("*.json")):
        method = json.loads(path.read_text())
        pins["settings"][PREFIX + path.stem] = method["settings"]
        pins["revisions"][PREFIX + path.stem] = method["revision"]
    return pins


def write(pins: dict[str, Any]) -> None:
    """Write the golden files; keep the recorded step costs of each method."""
    for name in METHODS:
        change = {
            "settings": pins["settings"].pop(PREFIX + name),
            "revision": pins["revisions"].pop(PREFIX + name),
        }
        update(method_file(name), change)
    update(FILE, pins)
    for path in METHOD_FILES.glob("*.json"):
        if path.stem not in METHODS:
            path.unlink()


def method_file(name: str) -> Path:
    return METHOD_FILES / f"{name}.json"


def update(path: Path, change: Mapping[str, Any]) -> None:
    """Replace these entries of a JSON file; create the file if it is missing."""
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**body, **change}, indent=1, sort_keys=True) + "\n")


def pinned() -> dict[str, Any]:
    """Compute the pinned inputs from the current code."""
    models: dict[str, type[BaseModel]] = {model.__name__: model for model in SHARED}
    models |= {PREFIX + name: method.Settings for name, method in METHODS.items()}
    demo = config.load(str(DEMO))

    def digests(_: object, card: cards.Card, source: object) -> ClassDigests:
        return {split: {name: f"{split}/{name}" for name in card.classes} for split in SPLITS}

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(raw_data, "class_digests", digests),  # as if the images were ingested
    ):
        graph, _ = build.build_graph(demo, store.Store(folder))
    pins = {
        "key_version": run_record.KEY_VERSION,
        "settings": {name: describe_fields(model) for name, model in models.items()},
        "revisions": revisions(),
        "demo": {stage.id: stage.key for stage in graph},
    }
    restored: dict[str, Any] = json.loads(json.dumps(pins))
    return restored


def describe_fields(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Map the name of each field in a config to its default and, if it has one, neutral value."""
    fields = {}
    for name, info in model.model_fields.items():
        default = REQUIRED
        if not info.is_required():
            default = as_json(info.get_default(call_default_factory=True))
        field = {"default": default}
        marks = [mark for mark in info.metadata if isinstance(mark, Neutral)]
        if marks:
            field["neutral"] = as_json(marks[0].value)
        fields[info.alias or name] = field
    return fields


def as_json(value: Any) -> Any:
    return key_inputs(value) if isinstance(value, BaseModel) else value


def revisions() -> dict[str, int]:
    """Return the revision numbers, which are raised if results change for the same settings."""
    versions = {
        name: getattr(module, name)
        for module, name in (
            (loop, "TRAIN_REVISION"),
            (evaluate, "EVALUATE_REVISION"),
            (decoding, "DECODING"),
            (build, "BACKBONE_REVISION"),
            (build, "REPORT_REVISION"),
        )
    }
    versions["ingest.REVISION"] = ingest.REVISION
    return versions | {PREFIX + name: method.revision for name, method in METHODS.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe each difference in a sentence: the change, its effect on stored results, the remedy.

    Args:
        old: The inputs in the files.
        new: The inputs in the code.
    """
    sentences = []
    if old["key_version"] != new["key_version"]:
        change = f"{old['key_version']} -> {new['key_version']}"
        sentences.append(
            f"KEY_VERSION: {change}: every stored result is computed again; {IF_MEANT}"
        )
    for group in sorted(old["settings"].keys() | new["settings"].keys()):
        sentences += group_differences(
            group, old["settings"].get(group), new["settings"].get(group)
        )
    for name, revision in new["revisions"].items():
        if old["revisions"].get(name) != revision:
            change = f"revision of {name}: {old['revisions'].get(name)} -> {revision}"
            sentences.append(f"{change}: its results are computed again; {IF_MEANT}")
    stages = [
        stage
        for stage in sorted(old["demo"].keys() | new["demo"].keys())
        if old["demo"].get(stage) != new["demo"].get(stage)
    ]
    if stages and not sentences:
        sentences.append(
            f"the key of stage {stages[0]} of configs/demo.yaml changed ({len(stages)} stages in "
            "all), and no setting, no default and no revision did: stored results would be lost; "
            f"put back what is in the key, or raise KEY_VERSION if it is meant, then run {COMMAND}"
        )
    return sentences


Fields = Mapping[str, Mapping[str, Any]]


def group_differences(group: str, old: Fields | None, new: Fields | None) -> list[str]:
    if old is None:
        return [f"{group}: this group of settings is new; {IF_MEANT}"]
    if new is None:
        return [f"{group}: this group of settings is gone; {IF_MEANT}"]
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return [field_difference(f"{group}.{name}", old.get(name), new.get(name)) for name in changed]


def field_difference(
    name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> str:
    """Explain the difference between a setting in the files and in the code."""
    if new is None:
        return (
            f"{name} is gone: stored results whose keys hold it are not found any more; put it "
            f"back, or {IF_MEANT}"
        )
    if old is None:
        if "neutral" in new or new["default"] == REQUIRED:
            return f"{name} is new, and no key changes; run {COMMAND}"
        return (
            f"{name} is new and has no neutral value, so that every stored result would be lost: "
            "declare it as Annotated[TYPE, Neutral(VALUE)], VALUE the one that gives the results "
            f"of the code before, then run {COMMAND}"
        )
    if "neutral" in old and ("neutral" not in new or old["neutral"] != new["neutral"]):
        return (
            f"{name}: its neutral value {old['neutral']!r} became {new.get('neutral', 'none')!r}; "
            "a neutral value never changes, put it back"
        )
    if "neutral" in new and "neutral" not in old:
        return (
            f"{name}: it has been in every key, and with the neutral value {new['neutral']!r} "
            "results at that value would be lost; a neutral value is for new settings, take it "
            "away"
        )
    return (
        f"{name}: its default {old['default']!r} became {new['default']!r}: results of configs "
        f"without it are computed again under other keys; {IF_MEANT}"
    )


def main() -> None:
    write(pinned())


if __name__ == "__main__":
    main()
