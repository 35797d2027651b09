"""Tests of `accrete launch --on slurm` on a real Slurm with two nodes: results equal one
process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.cli import main
from tests import small_run
from tests.recovery import Reference, published_attempts
from tests.slurm import Slurm, slurm_up, why_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_missing()), reason=why_missing()),
]
LONGER: dict[str, Any] = {"methods": {"hat": {}}, "train": {"epochs": 60}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_up(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a reference run long enough to be interrupted."""
    return Reference.made_in(tmp_path_factory.mktemp("longer"), **LONGER)


def launch(config: str, folder: Path, *options: str) -> list[str]:
    """Write the files for a config, and return the arguments for `sbatch`."""
    out = folder / "launch"
    assert (
        main(["launch", config, "--on", "slurm", "--hours", "1", "--out", str(out), *options]) == 0
    )
    (written,) = [path for path in out.glob("*.yaml") if not path.name.endswith("-card.yaml")]
    return [str(out / "slurm.sh"), str(written)]


def logs_of(slurm: Slurm, job: str) -> str:
    """Return the output of a job."""
    return "\n".join(path.read_text() for path in slurm.folder.glob(f"accrete-*-{job}*.log"))


def until_published(folder: Path, slurm: Slurm, job: str) -> None:
    """Wait until a stage of the run below `folder` has a result."""
    while not published_attempts(folder):
        assert slurm.states(job) <= {"PENDING", "CONFIGURING", "RUNNING"}, slurm.logs()
        time.sleep(0.2)


def test_two_slurm_nodes_give_results_of_one_process(
    slurm: Slurm, reference: Any, tmp_path: Path
) -> None:
    """The token reaches all nodes, even if the job gets only some of the submitter's variables."""
    config = reference.config(tmp_path, cluster={"workers": 1, "groups": 2})
    variables = "--export=PATH,HOME,SLURM_CONF,PYTHONPATH,ACCRETE_PYTHON,ACCRETE_RAY"
    job = slurm.submit(variables, *launch(config, tmp_path))
    until_published(tmp_path, slurm, job)
    for node in ("node1", "node2"):
        raylets = [
            process.environ()
            for process in psutil.process_iter()
            if process.name() == "raylet" and of_step(process, job, node)
        ]
        assert [environment["RAY_AUTH_MODE"] for environment in raylets] == ["token"]
    slurm.wait(job, "COMPLETED")
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not Path(f"/tmp/ray-{job}").exists(), "Ray's files must be deleted from the nodes"
    log = logs_of(slurm, job)
    assert "report:" in log
    assert "Ray runtime" not in log
    assert "srun:" not in log
    assert not list(slurm.folder.glob(f"*ray-{job}*")), "Ray's log and token must be deleted"


def test_preempted_slurm_job_saves_requeues_and_resumes(
    slurm: Slurm, longer: Reference, tmp_path: Path
) -> None:
    config = longer.config(tmp_path, cluster={"workers": 1})
    job = slurm.submit(*launch(config, tmp_path))
    until_published(tmp_path, slurm, job)
    before = published_attempts(tmp_path)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for_restart(job)
    assert "stopped on request; running stages are saved" in logs_of(slurm, job)
    time.sleep(5)  # a node refuses the job in the second in which it was requeued
    with contextlib.suppress(AssertionError):  # it may already be running again
        slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    slurm.wait(job, "COMPLETED")
    assert before.items() <= small_run.attempts(tmp_path / "storage").items()
    assert small_run.results(tmp_path / "storage") == longer.expected


def test_run_completes_after_losing_a_node(slurm: Slurm, longer: Reference, tmp_path: Path) -> None:
    """All processes of the job on the node are killed, as if its machine failed."""
    config = longer.config(tmp_path, cluster={"workers": 1, "groups": 2})
    job = slurm.submit(*launch(config, tmp_path))
    until_published(tmp_path, slurm, job)
    steps = psutil.Process(slurm.nodes["node2"].pid).children(recursive=True)
    lost = [process for process in psutil.process_iter() if of_step(process, job, "node2")]
    assert lost or steps
    for process in {*lost, *steps}:
        process.kill()
    slurm.wait(job, "COMPLETED")
    log = logs_of(slurm, job)
    # The run may end before Ray declares the node dead. Then only the second message is logged.
    assert " was lost; " in log or "their node may be lost, and" in log
    assert small_run.results(tmp_path / "storage") == longer.expected


def of_step(process: psutil.Process, job: str, node: str) -> bool:
    """Return whether a process belongs to a job on a node."""
    try:
        variables = process.environ()
    except psutil.Error:
        return False
    return (variables.get("SLURM_JOB_ID"), variables.get("SLURMD_NODENAME")) == (job, node)


def test_slurm_array_job_results_are_reused(
    slurm: Slurm, reference: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {**small_run.make_body(tmp_path, reference.cards), "seeds": [5, 6]}
    del body["seed"]
    body["cluster"]["workers"] = 1
    config = small_run.write_config(tmp_path / "config.yaml", body)
    job = slurm.submit(*launch(config, tmp_path, "--array"))
    slurm.wait(job, "COMPLETED")
    capsys.readouterr()
    small_run.run(["run", config, "--set", "cluster.workers=0"], tmp_path / "out.txt")
    assert "1 stages run, 25 reused" in (tmp_path / "out.txt").read_text(), (
        "only the report must run"
    )


def test_heterogeneous_job_trains_on_its_larger_node(
    slurm: Slurm, reference: Any, tmp_path: Path
) -> None:
    """A rank with three CPUs fits only on the second node, so Ray must run on both components."""
    config = reference.config(tmp_path, cluster={"workers": 1, "cpus_per_worker": 3})
    small = ["--nodes=1", "--cpus-per-task=1", "--mem=8G"]
    large = ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=3", "--mem=8G"]
    job = slurm.submit(*small, ":", *large, *launch(config, tmp_path))
    slurm.wait(job, "COMPLETED")
    assert small_run.results(tmp_path / "storage").keys() == reference.expected.keys()
