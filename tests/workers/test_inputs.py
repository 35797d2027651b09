"""Tests of the counts of served inputs: distances to test images, files, and damaged folders."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from serving import Finished, finished

from pipeline.testing.lab import EPOCHS
from tests import small_run
from workers.errors import UserError
from workers.serving import input_counts, recorder, single_tasks
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.input_counts import (
    DayCounts,
    TaskCounts,
    find_obstacle,
    read_counts,
    write_counts,
)
from workers.serving.measuring import with_measurements
from workers.serving.model_file import REFERENCE
from workers.serving.recorder import InputRecorder, recording
from workers.serving.reference import (
    CHANGED_TASK,
    OLD_FOLDER,
    TaskReference,
    load_reference,
)
from workers.serving.server import Predictor

DAY = date(2026, 11, 27)
METHODS = {"meat": "", "toast": "", "icarl": "class", "supsup": "class", "dytox": "class"}
SETTINGS = {"supsup": {"outputs": 5}}


@pytest.fixture(scope="module")
def runs(lab: Any) -> Any:
    made: dict[str, Finished] = {}

    def run(name: str) -> Finished:
        if name not in made:
            epochs = max(4, EPOCHS.get(name, 0))
            made[name] = finished(lab, name, METHODS[name], SETTINGS.get(name), epochs=epochs)
        return made[name]

    return run


@pytest.fixture
def model(runs: Any, tmp_path: Path) -> str:
    """Write a model folder with a reference; return its path."""
    folder = str(tmp_path / "model")
    with_measurements(runs("meat").bundle).write(folder)
    return folder


def pixels_of(run: Finished, task: str) -> Any:
    images, _ = run.images(task)
    return run.served.read_pixels(images, Limits())


def read_total(folder: str) -> TaskCounts:
    """Return the sum of the counts of all files, days, models and tasks."""
    files, damaged = input_counts.read_counts(f"{folder}/inputs")
    assert damaged == []
    total = TaskCounts()
    for counts in files.values():
        for tasks in counts.models.values():
            for task in tasks.values():
                total.add_counts(task)
    return total


# ---- distances -----------------------------------------------------------------------------------
def test_distance_is_relative_to_the_median_test_image() -> None:
    levels = torch.linspace(1, 19, 19)  # median 10, and 19 at 95 %
    reference = TaskReference(torch.tensor([[0.0, 0.0], [30.0, 40.0]]), levels, 100)
    features = torch.tensor([[0.0, 5.0], [30.0, 30.0], [0.0, 0.0], [-30.0, -40.0]])
    assert reference.distances(features).tolist() == pytest.approx([0.5, 1.0, 0.0, 5.0])
    assert reference.far == pytest.approx(1.9)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_measures_its_own_test_images_as_near(runs: Any, name: str) -> None:
    run = runs(name)
    reference = load_reference(with_measurements(run.bundle))
    assert reference.missing == {}
    for task in run.names:
        pixels = pixels_of(run, task)
        near = reference.tasks[task].distances(run.served.features(pixels, task))
        assert near.quantile(0.5) == pytest.approx(1.0, abs=0.01)
        assert (near > reference.tasks[task].far).float().mean() <= 0.1
        far = reference.tasks[task].distances(run.served.features(255 - pixels, task))
        if name != "icarl":  # after such a short training, its features hardly differ
            assert (far > 1).float().mean() > 0.9


def test_a_task_without_its_images_has_no_reference(runs: Any, tmp_path: Path) -> None:
    bundle = runs("meat").bundle
    assert bundle.job is not None
    job = replace(bundle.job, tasks=tuple(replace(t, data="gone") for t in bundle.job.tasks))
    complete = with_measurements(replace(bundle, job=job))
    reference = load_reference(complete)
    assert reference.tasks == {}
    assert all("gone" in reason for reason in reference.missing.values())
    complete.write(str(tmp_path / "model"))


def test_missing_reference_of_a_task_has_a_reason(runs: Any, model: str) -> None:
    run = runs("meat")
    assert load_reference(run.bundle).missing == dict.fromkeys(run.names, OLD_FOLDER)
    task = run.names[0]
    body = json.loads(Path(model, "model.json").read_text())
    assert REFERENCE in body["files"]
    single_tasks.import_task(
        model, single_tasks.export_task(Bundle.open(model), task), "task", replace=True
    )
    assert load_reference(Bundle.open(model)).missing == {}, "the state is the same"
    other = Path(model, REFERENCE).read_bytes()
    state = body["files"][f"tasks/{task}.safetensors"]["sha256"]
    changed = other.replace(state.encode(), b"0" * 64)
    bundle = Bundle.open(model)
    files = {**bundle.body["files"], REFERENCE: input_file_info(changed)}
    damaged = replace(bundle, body={**bundle.body, "files": files}, fetch=lambda _: changed)
    assert load_reference(damaged).missing == {task: CHANGED_TASK}


def input_file_info(data: bytes) -> Any:
    from workers.storage.artifact import file_info

    return file_info(data)


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 20,
        len(NESTED).to_bytes(8, "little") + NESTED.encode(),
        safetensors.torch.save({"a": torch.zeros(1)}, {"accrete.reference": NESTED}),
    ],
    ids=["zeros", "nested header", "nested metadata"],
)
def test_damaged_reference_file_is_refused(runs: Any, model: str, data: bytes) -> None:
    bundle = Bundle.open(model)
    files = {**bundle.body["files"], REFERENCE: input_file_info(data)}
    damaged = replace(bundle, body={**bundle.body, "files": files}, fetch=lambda _: data)
    with pytest.raises(UserError, match=r"reference\.safetensors cannot be used"):
        load_reference(damaged)


# ---- counts --------------------------------------------------------------------------------------
def test_recording_counts_answers_and_distances(runs: Any, model: str) -> None:
    run = runs("meat")
    images, classes = run.images("two")
    served = Predictor(Bundle.open(model))
    with recording(served, model):
        answers = served.predict(images, "two")
        served.predict(images[:3], None, rule="confident")
    total = read_total(model)
    assert total.inputs == len(images) + 3
    assert total.picked == 3
    assert total.measured == total.inputs == sum(total.distances) == sum(total.confidence)
    probabilities = [answer.probability for answer in answers]
    assert total.confidence_sum >= sum(probabilities) - 1e-6
    assert sum(total.classes.values()) == total.inputs
    assert total.far <= 0.1 * total.inputs + 3
    assert set(classes) <= set(total.classes)
    served.predict(images, "two")
    assert read_total(model).inputs == total.inputs, "nothing is counted after `recording`"


def test_count_file_contains_only_counts(runs: Any, model: str) -> None:
    """No field can contain an image, features, or values of a single input."""
    run = runs("meat")
    served = Predictor(Bundle.open(model))
    with recording(served, model):
        served.predict(run.images("two")[0], "two")
    (path,) = Path(model, "inputs").glob("*.json")
    body = json.loads(path.read_text())
    assert body.keys() == {"format", "day", "parts", "models"}
    assert [*body["models"]] == [served.bundle.body["sha256"]]
    for counts in body["models"][served.bundle.body["sha256"]].values():
        numbers = {
            "inputs": int,
            "picked": int,
            "confidence_sum": float,
            "measured": int,
            "far": int,
            "test_images": int,
        }
        assert counts.keys() == {*numbers, "classes", "confidence", "distances"}
        assert all(isinstance(counts[name], type_) for name, type_ in numbers.items())
        assert len(counts["confidence"]) == 10
        assert len(counts["distances"]) == 41
        assert set(counts["classes"]) <= {"0", "1"}
        everything = [*counts["confidence"], *counts["distances"], *counts["classes"].values()]
        assert all(isinstance(number, int) for number in everything)
    assert path.stat().st_size < 2000


def test_histograms_count_values_at_their_ends() -> None:
    counts = TaskCounts()
    for probability in (0.0, 0.0999, 0.5, 1.0):
        counts.add_answer("a", probability, False)
    assert counts.confidence == [2, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    for distance in (0.0, 0.1, 3.95, 4.0, 1e9):
        counts.add_distance(distance, distance > 1)
    assert (counts.distances[0], counts.distances[1]) == (1, 1)
    assert (counts.distances[39], counts.distances[40], counts.far) == (1, 2, 3)


def test_recorder_measures_distances_in_its_share_of_time(runs: Any, model: str) -> None:
    run = runs("meat")
    served = Predictor(Bundle.open(model))
    counter = InputRecorder(served, model, share=0.001)
    images = run.images("two")[0][:4]
    for _ in range(50):
        served.predict(images, "two")
    counter.close()
    total = read_total(model)
    assert total.inputs == 200
    assert 4 <= total.measured <= 40


def test_recorder_continues_after_distances_that_are_not_finite(
    runs: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("meat")
    served = Predictor(Bundle.open(model))
    features = served.features
    monkeypatch.setattr(served, "features", lambda *job: features(*job) * torch.inf)
    counter = InputRecorder(served, model, share=1.0)
    for _ in range(5):
        served.predict(run.images("two")[0][:4], "two")
    counter.close()
    total = read_total(model)
    assert (total.inputs, total.measured) == (20, 0)


def count_in_process(folder: str, images: list[bytes], times: int) -> None:
    torch.set_num_threads(1)
    served = Predictor(Bundle.open(folder))
    with recording(served, folder):
        for _ in range(times):
            served.predict(images, "two")


def test_two_processes_count_all_inputs(runs: Any, model: str) -> None:
    images = runs("meat").images("two")[0][:5]
    with ProcessPoolExecutor(2, small_run.processes()) as pool:
        for future in [pool.submit(count_in_process, model, images, n) for n in (3, 4)]:
            future.result()
    assert read_total(model).inputs == 35
    assert len([*Path(model, "inputs").glob("*.json")]) == 2


def count_until_killed(folder: str, images: list[bytes]) -> None:
    torch.set_num_threads(1)
    recorder.WRITE_S = 0.01
    count_in_process(folder, images, 1_000_000)


@pytest.mark.slow
def test_a_killed_process_leaves_readable_files(runs: Any, model: str) -> None:
    images = runs("meat").images("two")[0][:2]
    process = small_run.processes().Process(target=count_until_killed, args=(model, images))
    process.start()
    deadline = time.monotonic() + 900
    while not [*Path(model, "inputs").glob("*.json")] and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert read_total(model).inputs > 0


# ---- folders -------------------------------------------------------------------------------------
def test_unwritable_folder_does_not_stop_predictions(
    runs: Any, model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WRITE_S", 0.01)
    images = runs("meat").images("two")[0][:2]
    served = Predictor(Bundle.open(model))
    Path(model, "inputs").write_text("a file in the way")
    with recording(served, model):
        for _ in range(3):
            assert len(served.predict(images, "two")) == 2
            time.sleep(0.05)
    assert sum("inputs are not counted" in text for text in caplog.messages) == 1


def test_find_obstacle_explains_why_inputs_are_not_counted(tmp_path: Path) -> None:
    assert input_counts.find_obstacle(str(tmp_path)) == ""
    assert "is not on a disk" in input_counts.find_obstacle("s3://bucket/model")
    assert "has no folder" in input_counts.find_obstacle(str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "inputs").rmdir()
    (tmp_path / "inputs").write_text("")
    assert "cannot be written" in input_counts.find_obstacle(str(tmp_path))


def write_days(folder: Path, days: int, per_day: int) -> None:
    for back in range(days):
        day = DAY - timedelta(days=back)
        for _ in range(per_day):
            counts = DayCounts(day=day)
            counts.task("0" * 64, "a").add_answer("x", 0.9, False)
            input_counts.write_counts(input_counts.new_file(str(folder), day), counts)


def test_count_files_of_past_days_are_merged(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_days(folder, 5, 6)
    input_counts.merge_count_files(str(folder), DAY)
    assert len([*folder.iterdir()]) == 6 + 6 + 3
    assert read_total(str(tmp_path)).inputs == 30
    input_counts.merge_count_files(str(folder), DAY)
    assert read_total(str(tmp_path)).inputs == 30


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_kill_while_merging_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_days(folder, 4, 3)
    delete = os.unlink
    calls = 0

    def unlink(path: str) -> None:
        nonlocal calls
        if path.endswith(".json"):
            if calls == kept:
                raise KeyboardInterrupt
            calls += 1
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            input_counts.merge_count_files(str(folder), DAY)
    assert read_total(str(tmp_path)).inputs == 12
    input_counts.merge_count_files(str(folder), DAY)
    assert read_total(str(tmp_path)).inputs == 12
    assert len([*folder.glob("*.json")]) == 3 + 3 + 1 + 1


def test_past_day_is_written_and_removed_from_memory(
    runs: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WRITE_S", 0.01)
    days = [DAY]
    served = Predictor(Bundle.open(model))
    counter = InputRecorder(served, model, share=1.0, today=lambda: days[0])
    images = runs("meat").images("two")[0][:2]
    served.predict(images, "two")
    days[0] = DAY + timedelta(days=1)
    served.predict(images, "two")
    deadline = time.monotonic() + 900
    while DAY in counter.days and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [*counter.days] == [days[0]]
    counter.close()
    files, _ = input_counts.read_counts(f"{model}/inputs")
    assert sorted(counts.day for counts in files.values()) == [DAY, days[0]]
    assert read_total(model).inputs == 4


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_days(folder, 1, 1)
    bad = {"2026-11-27-00000000.json": "{", "2026-11-27-00000001.json": '{"pixels": [1]}'}
    for name, text in bad.items():
        (folder / name).write_text(text)
    (folder / "2026-11-27-00000002.json.part").write_text("{")
    files, damaged = input_counts.read_counts(str(folder))
    assert len(files) == 1
    assert damaged == sorted(bad)


# ---- untrusted folders ---------------------------------------------------------------------------
def test_pipes_and_files_over_the_size_limit_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"2026-11-2{n}-0123456{n}.json" for n in range(4)]
    for name in names[1:]:
        write_counts(str(tmp_path / name), DayCounts(day=date.fromisoformat(name[:10])))
    os.mkfifo(tmp_path / names[0])
    size = (tmp_path / names[1]).stat().st_size
    monkeypatch.setattr(input_counts, "MAX_BYTES", 2 * size)
    valid, damaged = read_counts(str(tmp_path))
    assert (sorted(valid), damaged) == (names[1:3], [names[0], names[3]])


def test_inputs_are_not_counted_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "inputs").symlink_to(tmp_path / "elsewhere")
    assert "is a link" in find_obstacle(str(tmp_path / "model"))
    assert [*(tmp_path / "elsewhere").iterdir()] == []
