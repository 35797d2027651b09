"""TensorBoard's event files hold the curves that MLflow gets, once, whatever was interrupted."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import fake_run
import pytest

from pipeline import cli
from pipeline.config import TrackingSettings, check
from pipeline.tracking import mlflow_client
from pipeline.tracking.recorder import Recorder
from pipeline.tracking.replicas import ReplicatedRecorder
from pipeline.tracking.run_writer import RunIdentity
from tests import small_run
from workers.errors import UserError

pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
SETTINGS = TrackingSettings(enabled=False, tensorboard=True)


def curves(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points of all event files below a folder: folder -> metric -> (step, value).

    A file is a sequence of records: length (8 bytes, little-endian), its checksum (4), the event,
    its checksum (4). A wrong checksum fails.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        run = points.setdefault(path.parent.relative_to(folder).as_posix(), {})
        data = path.read_bytes()
        offset = 0
        while offset < len(data):
            header = data[offset : offset + 8]
            (length,) = struct.unpack("<Q", header)
            body = data[offset + 12 : offset + 12 + length]
            checksums = data[offset + 8 : offset + 12] + data[offset + 12 + length :][:4]
            assert checksums == struct.pack("<II", masked_crc32c(header), masked_crc32c(body))
            event = Event.FromString(body)
            assert bool(offset) == (not event.file_version)  # the first record alone has it
            for value in event.summary.value:
                run.setdefault(value.tag, []).append((event.step, value.simple_value))
            offset += 16 + length
    return points


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write the event files of a run that was killed after six stages and resumed."""
    storage = str(tmp_path_factory.mktemp("storage"))
    stages = [stage.id for stage in fake_run.stages() if stage.step != "report"]
    for part in (stages[:6], stages[6:]):
        recorder = Recorder(SETTINGS, storage)
        recorder.start(fake_run.record())
        for stage, manifest in fake_run.write(storage, set(part)):
            recorder.stage(stage, manifest)
        recorder.finish({})
        assert recorder.warnings == []
    return Path(storage, "runs", "tiny", "tensorboard")


def test_losses_are_curves_over_epochs_and_accuracies_over_tasks(written: Path) -> None:
    points = curves(written)
    loss = points["meat/birds"]["train/loss"]
    assert [step for step, _ in loss] == [1, 2, 3, 4, 5, 6]
    assert points["meat/birds"]["train/val_accuracy"][-1][1] > 0.8
    method = points["finetune"]
    steps = [step for step, _ in method["acc/birds"]]
    assert steps == [1, 2, 3]
    correct = round(120 * fake_run.accuracy("finetune", 3, 1))
    assert method["acc/birds"][-1][1] == pytest.approx(correct / 120, abs=1e-6)
    assert len(method["average_accuracy"]) == len(method["forgetting"]) == 4
    assert points["."]["average_accuracy/finetune"] == method["average_accuracy"]


def test_every_point_stands_once_though_the_run_was_interrupted(written: Path) -> None:
    for folder, metrics in curves(written).items():
        for name, points in metrics.items():
            steps = [step for step, _ in points]
            assert len(set(steps)) == len(steps), f"{folder}: {name}"


@pytest.mark.slow
def test_the_points_are_those_of_mlflow(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    storage = str(tmp_path)
    list(fake_run.write(storage))
    identity = RunIdentity(pictures=False)
    recorder = Recorder(TrackingSettings(), storage, identity=identity)
    recorder.start(fake_run.record())
    recorder.finish({})
    client, _, experiment = mlflow_client.open_store(storage)
    runs = client.search_runs([experiment], max_results=1000)
    points = curves(written)
    assert len(runs) == 1 + 1 + 3 + 3 * 4
    for run in runs:
        parts = [run.data.tags.get("label", ""), run.data.tags.get("task", "")]
        folder = "/".join(part for part in parts if part) or "."
        names = run.data.metrics.keys()
        assert points.get(folder, {}).keys() == names, folder
        for name in names:
            last = max(points[folder][name])[1]
            assert last == pytest.approx(run.data.metrics[name], rel=1e-5), (folder, name)


def test_event_files_of_other_programs_stay(written: Path) -> None:
    other = written / "meat" / "events.out.tfevents.1.other"
    other.write_bytes(b"")
    recorder = Recorder(SETTINGS, str(written.parents[2]))
    before = curves(written)
    recorder.start(fake_run.record())
    recorder.finish({})
    assert other.exists()
    assert curves(written) == before


def test_each_replica_has_a_folder(written: Path) -> None:
    storage = str(written.parents[2])
    replicas: dict[str, Any] = {}
    for seed in ("1", "2"):
        replicas[seed] = {**fake_run.record(), "name": f"tiny-seed-{seed}"}
    recorder = ReplicatedRecorder(SETTINGS, storage, replicas)
    record: Any = {**fake_run.record(), "name": "both"}
    recorder.start(record)
    recorder.finish({})
    assert recorder.warnings == []
    points = curves(Path(storage, "runs", "both", "tensorboard"))
    expected = curves(written)
    for name in ("tiny-seed-1", "tiny-seed-2"):
        assert points[f"{name}/meat"] == expected["meat"]
        assert points[name] == expected["."]


def test_a_full_disk_is_a_warning_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(fake_run.write(str(tmp_path)))
    recorder = Recorder(SETTINGS, str(tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    assert recorder.events is not None
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", refuse)
    recorder.start(fake_run.record())
    recorder.finish({})
    assert len(recorder.warnings) == 1
    assert "TensorBoard" in recorder.warnings[0]
    assert "No space left" in recorder.warnings[0]


@pytest.mark.slow
def test_a_run_without_mlflow_writes_them_and_names_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_pictures: None
) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, methods=("linear",), train={"epochs": 1})
    body["tracking"] = {"enabled": False, "tensorboard": True}
    config = small_run.write_config(tmp_path / "run.yaml", body)
    folder = tmp_path / "storage" / "runs" / "small" / "tensorboard"
    assert cli.main(["run", config]) == 0
    assert f"TensorBoard's event files: {folder}" in capsys.readouterr().out
    points = curves(folder)
    assert {"average_accuracy", "acc/base", "acc/a"} <= points["linear"].keys()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert cli.main(["run", config]) == 0  # nothing to do
    assert f"TensorBoard's event files: {folder}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_bucket_is_refused_in_one_sentence() -> None:
    stream = {"tasks": [{"card": "digits"}]}
    body = {
        "name": "x",
        "storage": "s3://bucket/runs",
        "tracking": {"tensorboard": True},
        "stream": stream,
        "methods": {"linear": {}},
    }
    with pytest.raises(UserError, match=r"storage is 's3://bucket/runs': event files .* on a disk"):
        check(body, "x.yaml", with_methods=False)
    body["storage"] = "storage"
    assert check(body, "x.yaml", with_methods=False).tracking.tensorboard


def test_without_tensorboardx_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package tensorboardX, which is not installed"):
        Recorder(SETTINGS, "storage")
