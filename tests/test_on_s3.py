"""Tests of runs on an S3-compatible server with failing requests.

The results are the same as on a disk, and no secret leaks.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import s3, small_run
from tests.recovery import Reference
from workers.storage.artifact import join, list_files

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("ACCRETE_DATA", "../shared/data"))


def config_of(reference: Reference, bucket: s3.Proxy, folder: Path, **changes: Any) -> str:
    body = small_run.make_body(folder, reference.cards, storage=bucket.uri)
    body["cluster"]["cache"] = str(folder / "cache")
    return small_run.write_config(folder / "config.yaml", body | changes)


def through(
    argv: list[str], bucket: s3.Proxy, folder: Path, stop_before: int = 0
) -> tuple[int, str]:
    """Run a command on the bucket, and return its exit code and output."""
    process = s3.start(argv, folder / "out.txt", s3.environment(bucket.port), stop_before)
    process.join(900)
    return process.exitcode, (folder / "out.txt").read_text()


def judge(reference: Reference, bucket: s3.Proxy, folder: Path) -> None:
    storage = s3.fetched(bucket.upstream, bucket.bucket, folder / "bucket") / "storage"
    assert small_run.results(storage) == reference.expected
    assert not list(storage.glob("checkpoints/*/*"))
    assert not s3.leaks(folder)


@pytest.mark.slow
def test_run_with_transient_s3_errors_has_equal_results(
    reference: Any, bucket: Any, tmp_path: Path
) -> None:
    bucket.share = 0.05
    config = config_of(reference, bucket, tmp_path)
    code, output = through(["run", config], bucket, tmp_path)
    assert code == 0, output
    assert sum(bool(fault) for _, _, fault in bucket.seen) > 10
    judge(reference, bucket, tmp_path)
    stages = len(reference.expected) + 1
    for argv, expected in (
        (["run", config], "nothing to do"),
        (["plan", config], f"{stages} up to date, 0 to run"),
        (["report", config], "report: s3://"),
        (["gc", "--storage", bucket.uri, "--yes"], "nothing to delete"),
    ):
        code, output = through(argv, bucket, tmp_path)
        assert code == 0, output
        assert expected in output
    bucket.share = 0.0
    code, output = through(["gc", "--storage", join(bucket.uri, "nowhere")], bucket, tmp_path)
    assert code == 2
    assert "holds no file; give the folder that holds the runs" in output


@pytest.mark.slow
@pytest.mark.parametrize("call", [9, 31])
def test_killed_run_resumes_with_equal_results(
    call: int, reference: Any, bucket: Any, tmp_path: Path
) -> None:
    bucket.share = 0.05
    config = config_of(reference, bucket, tmp_path)
    code, _ = through(["run", config], bucket, tmp_path, stop_before=call)
    assert code == -9
    before = {name for name in list_files(bucket.uri) if name.endswith("manifest.json")}
    code, output = through(["run", config], bucket, tmp_path)
    assert code == 0, output
    assert f"{len(before)} reused" in output or not before
    judge(reference, bucket, tmp_path)


@pytest.mark.slow
def test_each_stage_makes_few_requests(reference: Any, bucket: Any, tmp_path: Path) -> None:
    """Most requests read the manifests of parent stages; there are no checkpoints.

    The graph is built twice, before and after the data are ingested.
    """
    body = small_run.make_body(
        tmp_path,
        reference.cards,
        storage=bucket.uri,
        cluster={"checkpoint_s": 1e6, "cache": str(tmp_path / "cache")},
    )
    config = small_run.write_config(tmp_path / "config.yaml", body)
    code, output = through(["run", config], bucket, tmp_path)
    assert code == 0, output
    stages = len(reference.expected) + 1
    of_shards = bucket.counts(".tar")
    assert of_shards.total() == 3 * of_shards["GET"], "each is written, looked up, and read"
    assert of_shards["GET"] == 12  # three cards, train and test, two classes: once each
    assert len(bucket.seen) - of_shards.total() < 36 * stages


@pytest.mark.slow
def test_ray_run_with_transient_s3_errors_has_equal_results(
    reference: Any, bucket: Any, tmp_path: Path
) -> None:
    bucket.share = 0.05
    body = small_run.make_body(tmp_path, reference.cards, storage=bucket.uri)
    body["cluster"] |= {
        "workers": 1,
        "groups": 1,
        "address": "local",
        "cache": str(tmp_path / "cache"),
    }
    code, output = through(
        ["run", small_run.write_config(tmp_path / "config.yaml", body)], bucket, tmp_path
    )
    assert code == 0, output
    judge(reference, bucket, tmp_path)
    assert not [name for name in list_files(bucket.uri) if name.startswith("ray/")], (
        "Ray's own files are removed"
    )


@pytest.mark.slow
def test_tracking_artifacts_go_to_bucket_with_database_on_disk(
    reference: Any, bucket: Any, tmp_path: Path
) -> None:
    config = config_of(
        reference,
        bucket,
        tmp_path,
        tracking={"uri": f"sqlite:///{tmp_path}/mlflow.db", "models": False},
    )
    bucket.share = 0.02
    code, output = through(["run", config], bucket, tmp_path)
    assert code == 0, output
    # so small a run learns little, so there are warnings about its tasks
    warnings = [line for line in output.splitlines() if "warning" in line.lower()]
    assert [line for line in warnings if ": task '" not in line] == []
    judge(reference, bucket, tmp_path)
    artifacts = [name for name in list_files(bucket.uri) if name.startswith("mlartifacts/")]
    assert any(name.endswith("report.html") for name in artifacts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (DATA / "real7").exists(), reason="real7 is not below ACCRETE_DATA")
def test_seven_real_tasks_with_transient_errors_have_equal_results(
    bucket: Any, tmp_path: Path
) -> None:
    """A star and a chain on the pretrained ViT-Ti, at 32 px, in small shards."""
    bucket.share = 0.05
    methods = ["linear", "hat"]
    body = {
        "extends": str(Path("configs/streams/real7-64px.yaml").resolve()),
        "name": "small",
        "tracking": False,
        "backbone": {"img_size": 32},
        "train": {"epochs": 1, "batch_size": 64},
        "methods": {name: {} for name in methods},
        "cluster": {"workers": 0, "checkpoint_s": 2, "cache": str(tmp_path / "cache")},
    }
    local = small_run.write_config(
        tmp_path / "local.yaml", {**body, "storage": str(tmp_path / "local")}
    )
    small_run.run(["run", local], tmp_path / "local.txt", timeout=1500)
    remote = small_run.write_config(tmp_path / "remote.yaml", {**body, "storage": bucket.uri})
    process = s3.start(["run", remote], tmp_path / "remote.txt", s3.environment(bucket.port))
    process.join(1500)
    assert process.exitcode == 0, (tmp_path / "remote.txt").read_text()
    storage = s3.fetched(bucket.upstream, bucket.bucket, tmp_path / "bucket") / "storage"
    results = small_run.results(storage)
    assert results == small_run.results(tmp_path / "local")
    assert len(results) == 7 + 1 + 2 * 14
    assert not s3.leaks(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cluster_ingests_and_learns_images_in_a_bucket(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cloud, a config names the bucket, and the environment has its credentials."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)  # for Ray workers
    monkeypatch.chdir(tmp_path)
    small_run.make_card(tmp_path, "leaves", "0123", train=30, test=10)
    client = s3.client_of(bucket.upstream)
    images = tmp_path / "raw" / "leaves"
    for image in images.rglob("*.png"):
        name = f"leaves/{image.relative_to(images).as_posix()}"
        client.put_object(Bucket=bucket.bucket, Key=name, Body=image.read_bytes())
    shutil.rmtree(tmp_path / "raw")
    code, output = through(["init", f"s3://{bucket.bucket}/leaves"], bucket, tmp_path)
    assert code == 0, output
    settings = {
        "storage": bucket.uri,
        "tracking": "off",
        "methods": "{linear: {}}",
        "backbone": "{weights: none, img_size: 16, options: {patch_size: 4, embed_dim: 32, "
        "depth: 2, num_heads: 2}}",
        "train.epochs": 1,
        "cluster.workers": 2,
        "cluster.address": "local",
        "cluster.cache": tmp_path / "cache",
    }
    options = []
    for key, value in settings.items():
        options += ["--set", f"{key}={value}"]
    code, output = through(["run", "leaves.yaml", *options], bucket, tmp_path)
    assert code == 0, output
    manifests = []
    for name, data in s3.files(bucket.upstream, bucket.bucket).items():
        if name.endswith("manifest.json"):
            manifests.append(json.loads(data))
    (manifest,) = [one for one in manifests if one.get("counts")]
    assert manifest["counts"] == {"train": 120, "test": 40}
    assert "report: s3://" in output
    assert not s3.leaks(tmp_path)
