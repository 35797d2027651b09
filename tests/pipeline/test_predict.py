"""Tests of `predict`, `bundle`, `tasks` and the MLflow model of a finished run."""

from __future__ import annotations

import base64
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Finished, finished

from pipeline import cli
from tests import small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a star and a chain on three tasks, one of which is the base task."""
    folder = tmp_path_factory.mktemp("predict")
    config = small_run.write_config(
        folder / "config.yaml",
        small_run.make_body(
            folder, small_run.make_cards(folder, ("base", "a", "b")), ["meat", "hat"]
        ),
    )
    small_run.run(["run", config], folder / "out.txt")
    return folder, config


def output_of(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main([str(a) for a in argv]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def counts(folder: Path, label: str) -> dict[str, int]:
    stage_results = small_run.results(folder / "storage")
    return {
        row["task"]: row["correct"]
        for task in ("base", "a", "b")
        for row in stage_results[f"{label}/{task}/evaluate"]["rows"]
    }


def images_of(folder: Path, task: str) -> list[Path]:
    return sorted((folder / "raw" / task / "test").rglob("*.png"))


@pytest.mark.few(1)
@pytest.mark.parametrize("label", ["meat", "hat"])
def test_predict_on_files_matches_the_evaluation_counts(
    run: Any, label: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, config = run
    for task, right in counts(folder, label).items():
        images = images_of(folder, task)
        text = output_of(
            capsys,
            "predict",
            config,
            *images,
            "--method",
            label,
            "--task",
            task,
            "--csv",
            tmp_path / "t.csv",
        )
        with open(tmp_path / "t.csv", newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert sum(row["class"] == Path(row["image"]).parent.name for row in rows) == right
        assert len(text.splitlines()) == 1 + len(images)


def test_bundle_folder_gives_the_same_predictions_as_the_run(
    run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, config = run
    image = images_of(folder, "a")[0]
    expected = output_of(capsys, "predict", config, image, "--method", "hat", "--task", "a")
    assert "hat, 3 tasks" in output_of(
        capsys, "bundle", config, "--method", "hat", "--out", tmp_path / "model"
    )
    assert output_of(capsys, "predict", tmp_path / "model", image, "--task", "a") == expected


def test_tasks_are_listed_exported_removed_and_imported(
    run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, config = run
    model, file = tmp_path / "model", tmp_path / "a.task"
    output_of(capsys, "bundle", config, "--method", "meat", "--out", model)

    def names() -> list[str]:
        return [
            line.split()[0] for line in output_of(capsys, "tasks", model, "list").splitlines()[1:]
        ]

    assert names() == ["base", "a", "b"]
    output_of(capsys, "tasks", model, "export", "a", file)
    assert "no longer serves a" in output_of(capsys, "remove", model, "--task", "a")
    assert names() == ["base", "b"]
    assert "serves a too, 2 classes" in output_of(capsys, "tasks", model, "import", file)
    assert names() == ["base", "b", "a"]
    rows = output_of(capsys, "tasks", model, "versions").splitlines()
    assert [row.split()[0] for row in rows] == ["version", "2", "3"]
    assert ["current" in row for row in rows] == [False, False, True]
    assert "serves version 2 again: base, b" in output_of(capsys, "tasks", model, "rollback")
    assert names() == ["base", "b"]
    assert "no version before the current one" in output_of(
        capsys, "tasks", model, "rollback", code=2
    )
    output_of(capsys, "bundle", config, "--method", "hat", "--out", tmp_path / "chain")
    assert "trained independently of each other (a star) can be imported" in output_of(
        capsys, "tasks", tmp_path / "chain", "import", file, code=2
    )
    assert "later tasks depend on them" in output_of(
        capsys, "remove", tmp_path / "chain", "--task", "a"
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["IMAGE"], "has several methods; choose one with --method: hat, meat"),
        (["IMAGE", "--method", "mat"], "--method is 'mat'"),
        (["IMAGE", "--method", "meat"], "needs to be told the task"),
        (["IMAGE", "--method", "meat", "--task", "c"], "task 'c' is not served"),
        (
            ["no.png", "--method", "meat", "--task", "a"],
            "image 0 (no.png) cannot be read (No such file or directory)",
        ),
        (["CONFIG", "--method", "meat", "--task", "a"], "is not an image that can be read here"),
        (["IMAGE", "--method", "meat", "--rule", "best"], "rule is 'best'"),
        (["IMAGE", "--method", "meat", "--task", "a", "--top", "-1"], "top is -1"),
    ],
)
def test_invalid_predict_arguments_get_one_sentence(
    run: Any, argv: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = run
    arguments = [{"IMAGE": images_of(folder, "a")[0], "CONFIG": config}.get(a, a) for a in argv]
    text = output_of(capsys, "predict", config, *arguments, code=2)
    assert sentence in text
    assert text.count("\n") == 1


def test_invalid_tasks_and_bundle_arguments_are_refused(
    run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, config = run
    assert "is not a model folder" in output_of(capsys, "tasks", tmp_path, "list", code=2)
    assert "exists already and is not an empty folder" in output_of(
        capsys, "bundle", config, "--method", "meat", "--out", folder, code=2
    )
    shutil.copytree(folder / "storage", tmp_path / "storage")
    key = small_run.manifests(folder / "storage")["hat/b/evaluate"]["key"]
    (tmp_path / "storage" / "stages" / key / "manifest.json").unlink()
    text = output_of(
        capsys,
        "bundle",
        config,
        "--method",
        "hat",
        "--out",
        tmp_path / "m",
        "--set",
        f"storage={tmp_path}/storage",
        code=2,
    )
    assert "stage hat/b/evaluate has no result yet; finish the run" in text


# ---- MLflow --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pipeline.tracking.mlflow_client import open_store

    client, uri, experiment = open_store(str(tmp_path_factory.mktemp("tracking")))
    with pytest.MonkeyPatch.context() as patch:
        # `set_tracking_uri` would also apply to later tests
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield SimpleNamespace(client=client, uri=uri, experiment=experiment)


def published(tracking: Any, finished: Finished, folder: Path, name: str = "") -> Any:
    from pipeline.tracking import publish

    finished.bundle.write(str(folder / "bundle"))
    made = tracking.client.create_run(tracking.experiment)
    tracking.client.set_terminated(made.info.run_id, "FINISHED", end_time=12345)
    return made.info.run_id, publish.log(
        tracking.uri, made.info.run_id, str(folder / "bundle"), name
    )


MODELS = {
    "meat": ("meat", "", None),
    "hat": ("hat", "", None),
    "icarl": ("icarl", "class", None),
    "supsup": ("supsup", "class", {"outputs": 5}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*MODELS])
def test_mlflow_model_reproduces_the_recorded_accuracy(
    lab: Any, tracking: Any, tmp_path: Path, name: Any
) -> None:
    import mlflow
    import pandas as pd

    run = finished(lab, *MODELS[name], epochs=1)
    model = mlflow.pyfunc.load_model(published(tracking, run, tmp_path)[1].model)
    right = {}
    for task in run.names:
        images, classes = run.images(task)
        frame = pd.DataFrame({"image": [base64.b64encode(data).decode() for data in images]})
        answers = model.predict(frame if MODELS[name][1] else frame.assign(task=task))
        right[task] = int(((answers["class"] == classes) & (answers["task"] == task)).sum())
    assert right == run.recorded()


def test_finished_run_gets_one_model_and_is_otherwise_unchanged(
    lab: Any, tracking: Any, tmp_path: Path
) -> None:
    from pipeline.tracking import publish

    run = finished(lab, "meat", epochs=1)
    run_id, first = published(tracking, run, tmp_path, "digits")
    info = tracking.client.get_run(run_id).info
    assert (info.status, info.end_time) == ("FINISHED", 12345)
    assert first == publish.Published("models:/digits@champion", "1")
    assert publish.log(tracking.uri, run_id, str(tmp_path / "bundle"), "digits") == first
    assert (
        len(
            tracking.client.search_logged_models(
                [tracking.experiment], f"source_run_id = '{run_id}'"
            )
        )
        == 1
    )
    models = [
        tracking.client.get_logged_model(o.model_id)
        for o in tracking.client.get_run(run_id).outputs.model_outputs
    ]
    assert [m.artifact_location for m in models] == [
        tracking.client.get_model_version_by_alias("digits", "champion").source
    ]
    large = publish.log(tracking.uri, run_id, str(tmp_path / "bundle"), max_bytes=10)
    assert not large.model
    assert (
        "was not logged to MLflow; `python -m pipeline bundle` makes a folder of it"
        in large.warning
    )


class Killed(BaseException):
    """Simulates SIGKILL: after it, nothing from the process reaches the server."""


MODEL_CALLS = (
    "get_run",
    "search_logged_models",
    "create_logged_model",
    "log_model_artifacts",
    "log_outputs",
    "finalize_logged_model",
    "create_registered_model",
    "create_model_version",
    "set_registered_model_alias",
)


def test_logging_again_after_a_kill_creates_no_duplicate_model(
    lab: Any, tracking: Any, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    from pipeline.tracking import publish

    folder = str(tmp_path / "bundle")
    finished(lab, "linear", epochs=1).bundle.write(folder)
    num_kills = 0
    for last in range(1, 40):
        name = f"killed-{last}"
        run_id = tracking.client.create_run(tracking.experiment).info.run_id
        count = 0

        def counted(call: Any, *args: Any, last: int = last, **options: Any) -> Any:
            nonlocal count
            if count == last:
                raise Killed
            answer = call(*args, **options)
            count += 1
            return answer

        with pytest.MonkeyPatch.context() as patch:
            for method in MODEL_CALLS:
                call = getattr(MlflowClient, method)
                patch.setattr(MlflowClient, method, partialmethod(partial(counted, call)))
            try:
                publish.log(tracking.uri, run_id, folder, name)
            except Killed:
                num_kills += 1
        assert publish.log(tracking.uri, run_id, folder, name).version == "1"
        query = f"source_run_id = '{run_id}'"
        models = tracking.client.search_logged_models([tracking.experiment], query)
        versions = tracking.client.search_model_versions(f"name = '{name}'")
        outputs = tracking.client.get_run(run_id).outputs.model_outputs
        assert [len(models), len(versions), len(outputs)] == [1, 1, 1], last
        if count < last:
            break
    assert num_kills >= 7


@pytest.fixture(scope="module")
def loaded(lab: Any, tracking: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import mlflow

    folder = tmp_path_factory.mktemp("loaded")
    run = finished(lab, "meat", epochs=1)
    return run, mlflow.pyfunc.load_model(published(tracking, run, folder, "loaded")[1].model)


@pytest.mark.parametrize(
    ("record", "params", "sentence"),
    [
        ({"image": "IMAGE", "task": "tow"}, {}, "task 'tow' is not served; did you mean two"),
        ({"image": "IMAGE"}, {}, "needs to be told the task"),
        ({"image": "/etc/passwd", "task": "two"}, {}, "no files are read here"),
        ({"image": [[1, 2]], "task": "two"}, {}, "has shape"),
        ({"image": "IMAGE", "task": "two"}, {"rule": "x"}, "rule is 'x'"),
        ({"image": 3, "task": "two"}, {}, "image 0 is a int"),
    ],
)
def test_mlflow_model_refuses_invalid_requests_with_status_400(
    loaded: Any, record: Any, params: Any, sentence: str
) -> None:
    from mlflow.exceptions import MlflowException

    run, model = loaded
    data = base64.b64encode(run.images("two")[0][0]).decode()
    with pytest.raises(MlflowException) as error:
        model.predict([{k: data if v == "IMAGE" else v for k, v in record.items()}], params=params)
    assert error.value.get_http_status_code() == 400
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_mlflow_model_accepts_records_bytes_and_lists(loaded: Any) -> None:
    import numpy as np
    import pandas as pd

    run, model = loaded
    data = run.images("two")[0][0]
    rows = [
        run.served.predict([image], "two")[0].row()
        for image in (data, np.zeros((3, 4, 3), np.uint8))
    ]
    assert (
        model.predict(pd.DataFrame({"image": [data], "task": ["two"]})).to_dict("records")
        == rows[:1]
    )
    assert (
        model.predict([{"image": np.zeros((3, 4, 3), int).tolist(), "task": "two"}]).to_dict(
            "records"
        )
        == rows[1:]
    )
    assert (
        len(
            model.predict(
                [{"image": base64.b64encode(data).decode()}], params={"rule": "confident", "top": 1}
            )["probabilities"][0]
        )
        == 1
    )


@pytest.mark.slow
def test_mlflow_model_loads_without_a_checkout(loaded: Any, tracking: Any, tmp_path: Path) -> None:
    run, _ = loaded
    (tmp_path / "image").write_bytes(run.images("two")[0][0])
    image = base64.b64encode(run.images("two")[0][0]).decode()
    code = f"""if True:
        import sys, mlflow
        mlflow.set_tracking_uri({tracking.uri!r})
        model = mlflow.pyfunc.load_model("models:/loaded@champion")
        found = model.predict([{{"image": {image!r}, "task": "two"}}])
        assert "pipeline" not in sys.modules and "mlartifacts" in sys.modules["workers"].__file__
        print(found["probability"][0])"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(
        run.served.predict(run.images("two")[0][:1], "two")[0].probability, abs=1e-6
    )
