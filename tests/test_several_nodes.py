"""Tests of runs on a Ray cluster of several nodes.

Nodes die, are preempted or join. Drivers connect from outside or run in parallel. The results must
be those of one process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import small_run
from tests.recovery import Reference, published_attempts
from tests.several_nodes import Nodes, nodes_up, title, wait_for
from tests.test_recovery_on_ray import until_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DATA = Path(os.environ.get("ACCRETE_DATA", "../shared/data"))
LONGER = {"train": {"epochs": 60}}
KINDS = {"star": ("meat", "piggyback"), "chain": ("hat",)}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Run a star and a chain in one process each."""
    references = {}
    for kind, labels in KINDS.items():
        methods: dict[str, Any] = {label: {} for label in labels}
        references[kind] = Reference.made_in(
            tmp_path_factory.mktemp(kind), ("base", "a", "b"), methods=methods, **LONGER
        )
    return references


def on(nodes: Nodes, reference: Reference, folder: Path, **cluster: Any) -> str:
    """Write the config of the reference's run for this cluster, and return its path.

    Checkpoints are written after each step, so that tests can act at an exact step.
    """
    body = {"workers": 1, "address": nodes.address, "checkpoint_s": 1e-6, "retries": 1, **cluster}
    return reference.config(folder, cluster=body)


def working(nodes: Nodes) -> list[Any]:
    """Return the nodes on which a worker of a group runs."""
    return nodes.nodes_running("TrainWorker")


@pytest.mark.parametrize("kind", KINDS)
def test_results_survive_a_lost_and_a_new_node(kind: Any, references: Any, tmp_path: Path) -> None:
    reference = references[kind]
    with nodes_up([1, 1, 1]) as nodes:
        process = small_run.start(["run", on(nodes, reference, tmp_path)], tmp_path / "out.txt")
        until_checkpoint(tmp_path, f"{KINDS[kind][0]}/a/train", process, "out.txt")
        victim = nodes.busiest_node("TrainWorker", 0.3)
        before = published_attempts(tmp_path)
        nodes.kill(victim)
        nodes.nodes.append(nodes.add(1))
        process.join(900)
        output = (tmp_path / "out.txt").read_text()
        assert process.exitcode == 0, output
    # "have continued": the work continued before Ray declared the node dead. The last text: the
    # driver missed the group before that.
    continuation = "its stages continue from their last checkpoints|its stages have continued"
    loss = f"was lost; ({continuation})|(was|may be) lost, and at most"
    assert re.search(loss, output)
    assert "RayTaskError" not in output
    assert " joined (1 CPU)" in output
    assert "Traceback" not in output
    assert before.items() <= small_run.attempts(tmp_path / "storage").items()
    assert small_run.results(tmp_path / "storage") == reference.expected


def test_preempted_stage_moves_without_losing_a_step(
    tmp_path: Path,
) -> None:
    """Periodic checkpoints are off, so that only the preemption notice makes a checkpoint.

    The stage has no retries.
    """
    reference = Reference.made_in(
        tmp_path / "one", ("base", "a"), methods={"hat": {}}, train={"epochs": 600}
    )
    with nodes_up([1, 1]) as nodes:
        process = small_run.start(
            ["run", on(nodes, reference, tmp_path, checkpoint_s=0, retries=0, groups=1)],
            tmp_path / "out.txt",
        )
        # From now on, the next task is trained.
        wait_for(lambda: "hat/base/train" in published_attempts(tmp_path), 200, process)
        [node] = working(nodes)
        nodes.announce_preemption(node)
        process.join(900)
        output = (tmp_path / "out.txt").read_text()
        assert process.exitcode == 0, output
    assert "will be taken away; its stages are saved and moved" in output
    assert (
        "hat/a/train: its group was asked to leave, its state is saved; it continues from there"
        in output
    )
    assert small_run.results(tmp_path / "storage") == reference.expected


# Titles of Ray's processes that must end with their worker group.
GROUP_TITLES = "Train|Cleaner|QueueActor|DatasetManager|run_worker_group"


@pytest.mark.parametrize("moment", ["while its workers start", "while they train"])
def test_killed_controller_leaves_no_reservation_or_process(
    moment: str, references: Any, tmp_path: Path
) -> None:
    """The cluster has one CPU. If it stayed reserved, no other group could start."""
    reference = references["chain"]
    with nodes_up([1]) as nodes:
        process = small_run.start(["run", on(nodes, reference, tmp_path)], tmp_path / "out.txt")
        if moment == "while they train":
            until_checkpoint(tmp_path, "hat/a/train", process, "out.txt")
        else:
            wait_for(lambda: working(nodes), 120, process)
        processes = nodes.all_processes()
        [controller] = [p for p in processes if "TrainController" in title(p)]
        controller.kill()
        process.join(900)
        assert process.exitcode == 0, (tmp_path / "out.txt").read_text()

        def group_has_ended() -> bool:
            titles = [title(process) for process in nodes.all_processes()]
            return not any(re.search(GROUP_TITLES, name) for name in titles)

        wait_for(group_has_ended, 60)
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not [*(tmp_path / "storage" / "ray").iterdir()]


def test_two_drivers_on_one_cluster_train_each_stage_once(references: Any, tmp_path: Path) -> None:
    """Both run the same config on the same store at the same time.

    One driver is on a node, the other outside the cluster, through Ray's client server.
    """
    reference = references["star"]
    with nodes_up([1, 1], client_port=free_port()) as nodes:
        config = on(nodes, reference, tmp_path)
        inside = small_run.start(["run", config], tmp_path / "inside.txt")
        outside = small_run.start(
            ["run", config, "--set", f"cluster.address={nodes.client}"], tmp_path / "outside.txt"
        )
        for process in (inside, outside):
            process.join(900)
        outputs = [(tmp_path / f"{name}.txt").read_text() for name in ("inside", "outside")]
        assert (inside.exitcode, outside.exitcode) == (0, 0), outputs
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not [*(tmp_path / "storage").rglob("*.part")]
    attempts = [path for path in (tmp_path / "storage" / "stages").glob("*/*") if path.is_dir()]
    assert len(attempts) == len(reference.expected) + 1, attempts  # one more for the report


def test_submitted_job_equals_one_process_and_resumes(references: Any, tmp_path: Path) -> None:
    """`ray job submit` is called twice; the first job is stopped once it has stored a stage.

    The head node has no CPUs, so that driver and workers run on different nodes.
    """
    reference = references["chain"]
    port = free_port()
    with nodes_up([1, 1], dashboard_port=port):
        config = reference.config(
            tmp_path, cluster={"workers": 1, "retries": 0, "checkpoint_s": 1e-6}
        )
        ray = [str(Path(sys.executable).with_name("ray")), "job"]
        where = ["--address", f"http://127.0.0.1:{port}"]
        run = [
            "--working-dir",
            str(Path(__file__).parents[1]),
            "--",
            sys.executable,
            "-m",
            "pipeline",
            "run",
            config,
        ]
        wait_for(
            lambda: subprocess.run([*ray, "list", *where], capture_output=True).returncode == 0, 60
        )
        subprocess.run(
            [*ray, "submit", *where, "--submission-id", "first", "--no-wait", *run],
            check=True,
            capture_output=True,
            timeout=900,
        )
        wait_for(lambda: published_attempts(tmp_path), 240)
        stopped = subprocess.run(
            [*ray, "stop", *where, "first"], capture_output=True, text=True, timeout=900
        )
        assert "was stopped" in stopped.stdout + stopped.stderr
        before = published_attempts(tmp_path)
        done = subprocess.run(
            [*ray, "submit", *where, *run], capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(reference.expected) + 1 - len(before)} stages run" in done.stdout + done.stderr
    assert before.items() <= small_run.attempts(tmp_path / "storage").items(), (
        "a stored stage was computed again"
    )
    assert small_run.results(tmp_path / "storage") == reference.expected


@pytest.mark.skipif(
    not DATA.exists(), reason="the images of real7 are missing; set ACCRETE_DATA to their folder"
)
@pytest.mark.parametrize("method", ["meat", "hat"])
def test_seven_tasks_survive_loss_of_a_node(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill a node while it trains, and add another one, for a star and a chain.

    The test prints the durations of the runs, the time from the kill until the interrupted stage
    was stored, and the driver's log about the loss.
    """
    base = [
        "configs/streams/real7-64px.yaml",
        f"--method={method}",
        *overrides(name="small", tracking="off", **{"train.epochs": 1, "cluster.checkpoint_s": 5}),
    ]
    one = ["run", *base, *overrides(storage=tmp_path / "one" / "storage", **{"cluster.workers": 0})]
    (tmp_path / "three").mkdir()
    (tmp_path / "one").mkdir()
    began = time.monotonic()
    small_run.run(one, tmp_path / "one" / "out.txt", 1200)
    alone_s = time.monotonic() - began
    with nodes_up([1, 1, 1]) as nodes:
        storage = tmp_path / "three" / "storage"
        out = tmp_path / "three" / "out.txt"
        began = time.monotonic()
        cluster = {"cluster.workers": 1, "cluster.address": nodes.address}
        process = small_run.start(["run", *base, *overrides(storage=storage, **cluster)], out)
        checkpoints = wait_for(lambda: [*storage.glob("checkpoints/*/latest.json")], 900, process)
        lost_key = checkpoints[0].parent.name
        before = published_attempts(tmp_path / "three")
        # Another node may have a group that has evaluated or that waits for a stage.
        nodes.kill(nodes.busiest_node("TrainWorker"))
        killed = time.time()
        nodes.add(1)
        process.join(1200)
        three_s = time.monotonic() - began
        assert process.exitcode == 0, out.read_text()
    output = out.read_text()
    lost = [
        line
        for line in output.splitlines()
        if "it continues from there" in line or "tried again" in line
    ]
    again_s = (storage / "stages" / lost_key / "manifest.json").stat().st_mtime - killed
    with capsys.disabled():
        print(
            f"\n{method}: one process {alone_s:.0f} s; three nodes, one killed and one added "
            f"{three_s:.0f} s; the stage whose checkpoint was seen was stored "
            f"{again_s:.0f} s after the kill; {lost}"
        )
    assert "was lost; " in output
    assert lost
    assert before.items() <= small_run.attempts(storage).items(), "a stored stage ran again"
    assert small_run.results(storage) == small_run.results(tmp_path / "one" / "storage")


def overrides(**values: Any) -> list[str]:
    """Return the arguments `--set KEY=VALUE` of the command line for these settings."""
    arguments = []
    for key, value in values.items():
        arguments += ["--set", f"{key}={value}"]
    return arguments


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_submitted_job_refuses_a_relative_storage_folder(
    references: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipeline import cli

    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({}))
    assert cli.main(["run", references["star"].config(tmp_path), "--set", "storage=here"]) == 2
    assert "the folder of a submitted job is deleted when the job ends" in capsys.readouterr().err
