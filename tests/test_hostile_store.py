"""Tests of hostile stores, bundles and names. Each is refused, or read as plain text.

They must not run code, reach files outside their folder, or inject markup.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from test_bad_inputs import sentence

from pipeline import cli
from pipeline.config import yaml_files
from pipeline.config.yaml_files import CARDS
from pipeline.data import cards
from pipeline.graph.store import Store
from pipeline.report import page, plots
from pipeline.report.html_parts import NO_VALUE, render_macro
from tests import small_run
from tests.hostile import (
    BACKBONES,
    ROW,
    Site,
    backbones,
    costs,
    ingested,
    parquet,
    png,
    source,
)
from tests.pipeline import fake_run
from workers.data.decoding import decode
from workers.data.rows import select
from workers.data.shards import SCHEMA, Shards
from workers.errors import DamagedArtifact, UserError
from workers.job import Task
from workers.serving.bundle import Bundle
from workers.storage import checkpoint
from workers.storage.artifact import Artifact, compute_sha256, file_info


# ---- shards and their index ----------------------------------------------------------------------
def test_pickle_in_a_stored_shard_is_not_loaded(site: Any) -> None:
    """A pickle is read only if the index names it, and then it is not an image."""
    pickled = site.pickled()
    digest = hashlib.sha256(pickled).hexdigest()
    index = rows(offset=600, bytes=len(pickled), sha256=digest, key="train/a/1")
    key = ingested(site, index, data=bytes(600) + pickled + bytes(1024))
    samples = select(str(site.own_folder), (Task("t", "card", key, ("a",)),), "train", 0.0)
    with pytest.raises(UserError, match="cannot be decoded"):
        decode(samples.read_bytes(1), 8)
    with pytest.raises(DamagedArtifact, match="train/a/0"):
        samples.read_bytes(0)


def test_invalid_digest_in_an_index_damages_only_that_image(site: Any) -> None:
    good = hashlib.sha256(bytes(70)).hexdigest()
    for digest in ("", "0", good[:-1], good + "0", "é" * 32):
        table = [{**ROW, "sha256": good}, {**ROW, "sha256": digest, "key": "train/a/1"}]
        other = parquet(pa.Table.from_pylist(table, SCHEMA))
        artifact = site.own_folder / ("k" * 32)
        if artifact.exists():
            shutil.rmtree(artifact)
        key = ingested(site, other)
        samples = select(str(site.own_folder), (Task("t", "card", key, ("a",)),), "train", 0.0)
        bad = samples.keys(np.arange(2)).index("train/a/1")
        assert samples.read_bytes(1 - bad) == bytes(70)
        with pytest.raises(DamagedArtifact, match="train/a/1"):
            samples.read_bytes(bad)


def rows(**changes: Any) -> bytes:
    return parquet(pa.Table.from_pylist([ROW, {**ROW, **changes}], SCHEMA))


INDICES: dict[str, Callable[[], bytes]] = {
    "offset below zero": lambda: rows(offset=-1),
    "bytes below zero": lambda: rows(bytes=-70),
    "beyond the shard": lambda: rows(offset=4090),
    "beyond 64 bits": lambda: rows(offset=2**63 - 1),
    "size of terabytes": lambda: rows(bytes=1 << 45),
    "shard that climbs": lambda: rows(shard="../../outside/kept"),
    "shard that is absolute": lambda: rows(shard="/etc/passwd"),
    "no shard": lambda: rows(shard=None),
    "no key": lambda: rows(key=None),
    "no split": lambda: rows(split=None),
    "no class": lambda: rows(**{"class": None}),
    "columns of other types": lambda: parquet(
        pa.table({**{k: [v] for k, v in ROW.items()}, "offset": ["512"]})
    ),
    "column left out": lambda: parquet(
        pa.Table.from_pylist([ROW], SCHEMA).drop_columns(["offset"])
    ),
    "truncated": lambda: rows()[:-20],
    "cut in the middle": lambda: rows()[:100],
    "no Parquet": lambda: b"PAR1" * 10,
    "pickle": lambda: pickle.dumps([ROW]),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_hostile_index_is_refused(case: Any, site: Any) -> None:
    shards = Shards.open(str(site.own_folder), ingested(site, INDICES[case]()))
    for read in (shards.read_index, partial(shards.select, "train", ["a"])):
        with pytest.raises(
            DamagedArtifact, match=r"not readable as an index .*; run the same command again"
        ):
            read()


def test_a_valid_index_is_read(site: Any) -> None:
    assert Shards.open(str(site.own_folder), ingested(site)).read_index().num_rows == 1


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "file that climbs": lambda m: m["files"].update({"../../../outside/kept": file_info(b"kept")}),
    "file that is absolute": lambda m: m["files"].update({"/etc/passwd": file_info(b"")}),
    "file that climbs within": lambda m: m["files"].update({"a/../../../x": file_info(b"")}),
    "attempt that is absolute": lambda m: m.update(attempt="/etc"),
    "attempt that climbs": lambda m: m.update(attempt=".."),
    "attempt that is not a text": lambda m: m.update(attempt=3),
    "no attempt": lambda m: m.pop("attempt"),
    "files that are a list": lambda m: m.update(files=["x"]),
    "size that is text": lambda m: m["files"].update({"x": {"bytes": "1", "sha256": ""}}),
    "digest that climbs": lambda m: m["files"].update(
        {"x": {"bytes": 1, "sha256": "../../../outside/kept"}}
    ),
    "digest of another length": lambda m: m["files"].update({"x": {"bytes": 1, "sha256": "0"}}),
    "name with a NUL": lambda m: m["files"].update({"x\0y": file_info(b"")}),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifest_with_files_outside_its_folder_is_invalid(case: Any, site: Any) -> None:
    key = ingested(site)
    path = site.own_folder / key / "manifest.json"
    body = json.loads(path.read_text())
    MANIFESTS[case](body)
    path.write_text(json.dumps({**body, "sha256": compute_sha256(body)}))
    assert Artifact.open(str(site.own_folder), key) is None


DEEP, ENDLESS = "[" * 100_000, '{"name": ' + "9" * 5000 + "}"


@pytest.mark.parametrize(
    "text",
    [DEEP, ENDLESS, '{"a": NaN}', '"text"', "3", "null", "\ufeff{}", "{" * 1000],
    ids=lambda text: text[:8],
)
def test_hostile_json_records_are_ignored(
    text: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(site.own_folder / "storage"))
    card = small_run.make_card(site.own_folder, "good", "01", 3, 2)
    for path in (
        "stages/k/manifest.json",
        "runs/small/run.json",
        "checkpoints/k/latest.json",
        "sources/x.json",
        "model/model.json",
    ):
        (site.own_folder / "storage" / path).parent.mkdir(parents=True, exist_ok=True)
        (site.own_folder / "storage" / path).write_text(text)
    assert Artifact.open(store.root, "k") is None
    assert store.record("small") is None
    assert store.remembered("x") is None
    assert checkpoint.load_checkpoint(store.root, "k") is None
    with pytest.raises(UserError, match=r"model\.json"):
        Bundle.open(str(site.own_folder / "storage" / "model"))
    assert cli.main(["plan", site.config(card)]) == 0


def read_one(path: str) -> str:
    from workers.storage.artifact import read_json

    try:
        return str(read_json(path))
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_huge_json_file_is_refused_with_little_memory(site: Any) -> None:
    with open(site.own_folder / "manifest.json", "wb") as stream:
        stream.truncate(4 << 30)
    outcome, megabytes = costs(read_one, str(site.own_folder / "manifest.json"))
    assert "larger than" in outcome
    assert megabytes < 200


@pytest.mark.parametrize(
    "name",
    [
        "../../outside/kept",
        "/etc/passwd",
        "../k2/e00000-s000000-00000000.safetensors",
        "e00000-s000000-00000000.safetensors/../x",
    ],
)
def test_checkpoint_outside_its_folder_is_not_loaded_or_deleted(name: str, site: Any) -> None:
    root, folder = str(site.own_folder / "stages"), site.own_folder / "checkpoints" / "k"
    folder.mkdir(parents=True)
    (site.own_folder / "checkpoints" / "k2").mkdir()
    (site.own_folder / "checkpoints" / "k2" / "e00000-s000000-00000000.safetensors").write_text(
        "kept"
    )
    data = (folder / name).resolve().read_bytes() if (folder / name).resolve().exists() else b""
    (folder / "latest.json").write_text(
        json.dumps({"file": name.replace("../../outside", str(site.outside)), **file_info(data)})
    )
    assert checkpoint.load_checkpoint(root, "k") is None
    model = torch.nn.Linear(2, 2)
    checkpoint.save_checkpoint(
        root,
        "k",
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {},
        checkpoint.Checkpoint(0, 1, [], {}, {}),
    )
    assert checkpoint.load_checkpoint(root, "k") is not None
    assert (site.own_folder / "checkpoints" / "k2" / "e00000-s000000-00000000.safetensors").exists()


def test_checkpoint_with_unknown_fields_is_ignored(site: Any) -> None:
    folder = site.own_folder / "checkpoints" / "k"
    folder.mkdir(parents=True)
    data = safetensors.torch.save({"x": torch.zeros(1)}, {"accrete": json.dumps({"nothing": 1})})
    name = "e00000-s000001-00000000.safetensors"
    (folder / name).write_bytes(data)
    (folder / "latest.json").write_text(json.dumps({"file": name, **file_info(data)}))
    assert checkpoint.load_checkpoint(str(site.own_folder / "stages"), "k") is None


@pytest.mark.parametrize(
    "key", ["../../../outside", "/etc", "a/b", "..", "<script>", "", None, 3.5, ["x"]]
)
def test_record_with_invalid_stage_keys_is_not_read(key: Any, site: Any) -> None:
    store = Store(str(site.own_folder))
    good: Any = {"name": "r", "stages": [{"id": "x", "key": "0" * 32, "step": "train"}]}
    store.save_record(good)
    assert store.record("r") is not None
    bad: Any = {"name": "r", "stages": [{"id": "x", "key": key, "step": "train"}]}
    store.save_record(bad)
    assert store.record("r") is None


@pytest.mark.parametrize(
    "stage",
    [
        {"key": "0" * 32, "step": "train"},
        {"id": "x", "key": "0" * 32},
        {"id": 3, "key": "0" * 32, "step": "train"},
        "x",
        None,
    ],
)
def test_a_record_with_an_incomplete_stage_is_not_read(stage: Any, site: Any) -> None:
    store = Store(str(site.own_folder))
    store.save_record(cast(Any, {"name": "r", "stages": [stage]}))
    assert store.record("r") is None


# ---- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", ".", "..", "", "x\ny", "x\n"])
def test_card_name_with_a_path_is_refused(
    name: str, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(
        capfd,
        [
            "ingest",
            site.config(site.card(name=name, source={"format": "sklearn", "name": "digits"})),
        ],
    )
    assert "card.yaml" in message
    assert "name is" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x\0y"},
        {"classes": ["a", "x\0y"]},
        {"source": {"format": "folder", "path": "a\0b"}},
        {"licence": "\0"},
    ],
)
def test_a_card_with_a_nul_character_is_refused(
    changes: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(capfd, ["ingest", site.config(site.card(**changes))])
    assert "card.yaml" in message
    assert "a character that no file can be named with" in message


@pytest.mark.parametrize("name", ["x\ny", "x\x1b[2Jy", "", "x" * 10_000, "x\u202ey"])
def test_unprintable_class_name_is_refused(
    name: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    message = sentence(
        capfd,
        [
            "ingest",
            site.config(
                site.card(
                    classes=["a", name], source={"format": "folder", "path": str(site.own_folder)}
                )
            ),
        ],
    )
    assert "printable characters" in message
    assert "\x1b" not in message


@pytest.mark.parametrize(
    "name", ["../../outside/x", "..", "a/../b", "<script>", "$\\bad{$", "x" * 200, "c:\\x", "a b.c"]
)
def test_hostile_class_names_give_safe_sample_keys(name: Any, site: Any) -> None:
    (site.own_folder / "raw").mkdir()
    for color, split in ((0, "train"), (4, "test")):
        images = [png(color + n) for n in range(4)]
        table = pa.table({"image": images, "label": ["a", name, "a", name]})
        pq.write_table(table, site.own_folder / "raw" / f"{split}.parquet")
    assert (
        cli.main(
            [
                "ingest",
                site.config(
                    site.card(
                        classes=["a", name],
                        source={"format": "parquet", "path": str(site.own_folder / "raw")},
                    )
                ),
            ]
        )
        == 0
    )
    key = next((site.own_folder / "storage" / "stages").iterdir()).name
    shards = Shards.open(str(site.own_folder / "storage" / "stages"), key)
    assert {*shards.read_index()["class"].to_pylist()} == {"a", name}
    for path in shards.read_index()["key"].to_pylist():
        assert len(path.split("/")) == 3
        assert not {"..", ".", ""} & {*path.split("/")}
    tasks = (Task("t", "card", key, ("a", name)),)
    samples = select(str(site.own_folder / "storage" / "stages"), tasks, "train", 0.0)
    assert [samples.read_bytes(row)[:4] for row in range(4)] == [b"\x89PNG"] * 4


def test_hostile_labels_are_not_printed(site: Any, capfd: pytest.CaptureFixture[str]) -> None:
    table = pa.table(
        {"image": [png(n) for n in range(4)], "label": ["a", "x" * 4000, "\x1b[2J" * 50, "b"]}
    )
    config_path = source(site, parquet(table))
    site.card(
        max_bad_fraction=0.0, source={"format": "parquet", "path": str(site.own_folder / "raw")}
    )
    message = sentence(capfd, ["ingest", config_path])
    assert "4 of 8 images are corrupt or unlabelled" in message
    assert "\x1b" not in message


EVIL = [
    "<script>alert(1)</script>",
    "<span class=soft><img src=x onerror=alert(1)>",
    "$\\bad{$",
    "\"'><svg onload=alert(1)>",
    "a&b",
    "{{7*7}}",
]


def test_names_of_tasks_and_classes_are_escaped_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        {**task, "classes": [f"{EVIL[i % len(EVIL)]}{i}" for i, _ in enumerate(task["classes"])]}
        for task in fake_run.TASKS
    ]
    tasks[1]["name"], tasks[2]["name"] = EVIL[0], EVIL[1]
    monkeypatch.setattr(fake_run, "TASKS", tasks)
    monkeypatch.setattr(plots, "to_png", lambda figure: b"")  # the plots are not needed
    fake_run.write(str(tmp_path / "storage"))
    record = fake_run.record()
    files = page.build_run_report(str(tmp_path / "storage"), record)
    text = files["report.html"].decode()
    for word in ("<script>alert", "<img src=x", "<svg onload"):
        assert word not in text
    assert "&lt;script&gt;alert(1)" in text


def test_table_cells_are_escaped_in_html() -> None:
    for evil in EVIL[:4]:
        assert evil not in render_macro("table", ["x"], [[evil]], 1) or "<" not in evil
    assert NO_VALUE in render_macro("table", ["x"], [[NO_VALUE]], 1)


def test_bundle_with_paths_or_control_characters_is_refused(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    file = {"bytes": 1, "sha256": "0"}
    body: dict[str, Any] = {
        "format": 1,
        "method": "finetune",
        "settings": {},
        "backbone": {},
        "backbone_digest": "",
        "scenario": "task",
        "seed": 0,
        "carried": {},
        "preprocessing": {},
        "max_pixels": 1,
        "provenance": {},
        "files": {"backbone.safetensors": file},
        "tasks": [{"name": "a", "classes": ["x"], "card": "c", "data": "d", "role": "task"}],
    }
    for change in (
        {"files": {"../../outside/kept": file}},
        {"carried": {"train": "carried/../../x.safetensors"}},
        {"carried": {"../x": "backbone.safetensors"}},
        {"tasks": [{**body["tasks"][0], "name": "../x"}]},
        {"tasks": [{**body["tasks"][0], "classes": ["\x1b[2J"]}]},
        {"seed": -1},
    ):
        changed = {**body, **change}
        (site.own_folder / "model.json").write_text(
            json.dumps({**changed, "sha256": compute_sha256(changed)})
        )
        message = sentence(capfd, ["tasks", str(site.own_folder), "list"])
        assert "model.json" in message
        assert "\x1b" not in message
    (site.own_folder / "model.json").write_text(
        json.dumps({**body, "sha256": compute_sha256(body)})
    )
    assert "tasks/a.safetensors" in sentence(capfd, ["tasks", str(site.own_folder), "list"]), (
        "no error about the missing file"
    )


# ---- model folders -------------------------------------------------------------------------------
def model_of_a_stranger(site: Site, **changes: Any) -> str:
    """Write a model folder with these changes of `model.json` and a correct digest.

    Returns:
        The path of the folder.
    """
    files = {
        name: {"bytes": 1, "sha256": "0"}
        for name in ("backbone.safetensors", "tasks/a.safetensors")
    }
    body = {
        "format": 1,
        "method": "finetune",
        "settings": {},
        "backbone": small_run.BACKBONE,
        "backbone_digest": "",
        "scenario": "task",
        "seed": 0,
        "carried": {},
        "preprocessing": {},
        "max_pixels": 1,
        "provenance": {},
        "files": files,
        "tasks": [{"name": "a", "classes": ["x"], "card": "c", "data": "d", "role": "task"}],
        **changes,
    }
    (site.own_folder / "model.json").write_text(
        json.dumps({**body, "sha256": compute_sha256(body)})
    )
    return str(site.own_folder)


@pytest.mark.parametrize("case", BACKBONES)
def test_model_folder_with_a_hostile_backbone_is_refused(
    case: Any, site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder is refused by `predict`, and when its method is built."""
    backbone, says = backbones(site.outside)[case]
    folder = model_of_a_stranger(site, backbone=backbone)
    (site.own_folder / "x.png").write_bytes(png())
    message = sentence(capfd, ["predict", folder, str(site.own_folder / "x.png"), "--task", "a"])
    assert says in message
    with pytest.raises(UserError):
        Bundle.open(folder).method()


def test_incomplete_backbone_is_refused_before_model_is_built(
    site: Any,
) -> None:
    backbone = {
        **small_run.BACKBONE,
        "options": {**small_run.BACKBONE["options"], "embed_dim": 8192, "num_heads": 1},
    }
    outcome, megabytes = costs(load_model, model_of_a_stranger(site, backbone=backbone))
    assert "backbone.safetensors has 1 bytes, but a backbone of these settings" in outcome
    assert megabytes < 300


def load_model(folder: str) -> str:
    return str(Bundle.open(folder).method())


def test_class_names_of_shipped_cards_are_printable() -> None:
    names = sorted(path.parent.name for path in CARDS.glob("*/card.yaml"))
    assert len(names) > 5
    for name in names:
        classes = yaml_files.read_yaml(CARDS / name / "card.yaml", "a card")["classes"]
        assert all(
            c.isprintable() and 0 < len(c) <= cards.MAX_CLASS_CHARACTERS
            for c in classes
            if classes != "from_source"
        )
