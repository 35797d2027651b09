"""Launch on a cluster of several nodes: nodes are lost, announced to go, added; drivers come from
outside and side by side. The numbers stay."""

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
    """What one process makes of a star and of a chain."""
    return {
        kind: Reference.made_in(
            tmp_path_factory.mktemp(kind),
            ("base", "a", "b"),
            methods={label: {} for label in labels},
            **LONGER,
        )
        for kind, labels in KINDS.items()
    }


def on(nodes: Nodes, reference: Reference, folder: Path, **cluster: Any) -> str:
    """checkpoint_s: checkpoints after each step make the moments of the tests sharp."""
    body = {"workers": 1, "address": nodes.address, "checkpoint_s": 1e-6, "retries": 1, **cluster}
    return reference.config(folder, cluster=body)


def working(nodes: Nodes) -> list[Any]:
    """Nodes on which a worker of a group runs."""
    return nodes.nodes_running("TrainWorker")


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_is_lost_and_one_is_added_and_the_numbers_are_those_of_one_process(
    kind: Any, references: Any, tmp_path: Path
) -> None:
    reference = references[kind]
    with nodes_up([1, 1, 1]) as nodes:
        process = small_run.start(["run", on(nodes, reference, tmp_path)], tmp_path / "out.txt")
        until_checkpoint(tmp_path, f"{KINDS[kind][0]}/a/train", process, "out.txt")
        victim = working(nodes)[0]
        before = published_attempts(tmp_path)
        nodes.kill(victim)
        nodes.nodes.append(nodes.add(1))
        process.join(240)
        output = (tmp_path / "out.txt").read_text()
        assert process.exitcode == 0, output
    assert "was lost; what ran on it goes on from its last checkpoint" in output
    assert " joined (1 CPUs)" in output
    assert "Traceback" not in output
    assert before.items() <= small_run.attempts(tmp_path / "storage").items()
    assert small_run.results(tmp_path / "storage") == reference.expected


def test_a_node_that_is_announced_to_go_is_left_without_losing_a_step(tmp_path: Path) -> None:
    """Checkpoints by the clock are turned off, so what is saved was saved because of the notice;
    the stage has no try to lose."""
    reference = Reference.made_in(
        tmp_path / "one", ("base", "a"), methods={"hat": {}}, train={"epochs": 600}
    )
    with nodes_up([1, 1]) as nodes:
        process = small_run.start(
            ["run", on(nodes, reference, tmp_path, checkpoint_s=0, retries=0, groups=1)],
            tmp_path / "out.txt",
        )
        # then the next task is trained
        wait_for(lambda: "hat/base/train" in published_attempts(tmp_path), 200, process)
        [node] = working(nodes)
        nodes.announce_preemption(node)
        process.join(240)
        output = (tmp_path / "out.txt").read_text()
        assert process.exitcode == 0, output
    assert "is going to be taken away; what runs on it is saved and moved" in output
    assert "hat/a/train: it is told to leave, its state is saved; it goes on from there" in output
    assert small_run.results(tmp_path / "storage") == reference.expected


# Processes of Ray's that end with their worker group, by their titles.
REMAINS = "Train|Cleaner|QueueActor|DatasetManager|run_segment"


@pytest.mark.parametrize("moment", ["while its workers start", "while they train"])
def test_a_controller_that_is_killed_holds_nothing_and_leaves_nobody(
    moment: str, references: Any, tmp_path: Path
) -> None:
    """One CPU: were it still reserved, no other group could start."""
    reference = references["chain"]
    with nodes_up([1]) as nodes:
        process = small_run.start(["run", on(nodes, reference, tmp_path)], tmp_path / "out.txt")
        if moment == "while they train":
            until_checkpoint(tmp_path, "hat/a/train", process, "out.txt")
        else:
            wait_for(lambda: working(nodes), 120, process)
        [controller] = [
            candidate
            for candidate in nodes.all_processes()
            if "TrainController" in title(candidate)
        ]
        controller.kill()
        process.join(240)
        assert process.exitcode == 0, (tmp_path / "out.txt").read_text()
        wait_for(
            lambda: (
                not [
                    candidate
                    for candidate in nodes.all_processes()
                    if re.search(REMAINS, title(candidate))
                ]
            ),
            60,
        )
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not [*(tmp_path / "storage" / "ray").iterdir()]


def test_an_elastic_group_goes_on_with_fewer_ranks_and_grows_again(
    references: Any, tmp_path: Path
) -> None:
    reference = references["chain"]
    with nodes_up([1, 1]) as nodes:
        config = on(nodes, reference, tmp_path, workers=2, min_workers=1, groups=1)
        process = small_run.start(["run", config], tmp_path / "out.txt")
        until_checkpoint(tmp_path, "hat/a/train", process, "out.txt")
        nodes.kill(working(nodes)[0])
        wait_for(lambda: "hat/a/train" in published_attempts(tmp_path), 200, process)
        nodes.add(1)
        process.join(300)
        output = (tmp_path / "out.txt").read_text()
        assert process.exitcode == 0, output
    manifests = small_run.manifests(tmp_path / "storage")
    assert manifests["hat/a/train"]["workers"] == 1
    assert manifests["hat/b/evaluate"]["workers"] == 2, "it has grown again"
    results = small_run.results(tmp_path / "storage")
    for stage_id, expected in reference.expected.items():
        if stage_id.endswith("/evaluate"):
            for one, two in zip(expected["rows"], results[stage_id]["rows"], strict=True):
                assert abs(one["correct"] - two["correct"]) <= 2, (
                    "gradients are summed in another order, and that is all"
                )


def test_two_drivers_on_one_cluster_one_of_them_outside_train_each_stage_once(
    references: Any, tmp_path: Path
) -> None:
    """The same config and store at the same moment: one driver on a node, one through Ray's client
    server, which stands on no node."""
    reference = references["star"]
    with nodes_up([1, 1], client_port=free_port()) as nodes:
        config = on(nodes, reference, tmp_path)
        inside = small_run.start(["run", config], tmp_path / "inside.txt")
        outside = small_run.start(
            ["run", config, "--set", f"cluster.address={nodes.client}"], tmp_path / "outside.txt"
        )
        for process in (inside, outside):
            process.join(300)
        outputs = [(tmp_path / f"{name}.txt").read_text() for name in ("inside", "outside")]
        assert (inside.exitcode, outside.exitcode) == (0, 0), outputs
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not [*(tmp_path / "storage").rglob("*.part")]
    attempts = [
        folder
        for stage in (tmp_path / "storage" / "stages").iterdir()
        for folder in stage.iterdir()
        if folder.is_dir()
    ]
    assert len(attempts) == len(reference.expected) + 1, attempts  # and the report's


def test_a_submitted_job_ends_as_one_process_does_and_the_same_command_resumes_a_stopped_one(
    references: Any, tmp_path: Path
) -> None:
    """By Ray's own command, twice: the first job is stopped once a stage stands. The head has no
    CPUs, so the driver is not where the workers are."""
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
            timeout=120,
        )
        wait_for(lambda: published_attempts(tmp_path), 240)
        stopped = subprocess.run(
            [*ray, "stop", *where, "first"], capture_output=True, text=True, timeout=120
        )
        assert "was stopped" in stopped.stdout + stopped.stderr
        before = published_attempts(tmp_path)
        done = subprocess.run(
            [*ray, "submit", *where, *run], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(reference.expected) + 1 - len(before)} stages run" in done.stdout + done.stderr
    assert before.items() <= small_run.attempts(tmp_path / "storage").items(), (
        "what stood was computed again"
    )
    assert small_run.results(tmp_path / "storage") == reference.expected


@pytest.mark.skipif(
    not DATA.exists(), reason="the images of real7 are not here: ACCRETE_DATA names their folder"
)
@pytest.mark.parametrize("method", ["meat", "hat"])
def test_seven_real_tasks_over_three_nodes_lose_one_and_end_as_on_one(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A star and a chain; a node is killed while it trains, another one is added. Says how long it
    took until the lost stage was further than before, and what had to be done again."""
    base = [
        f"configs/methods/{method}-real7.yaml",
        *overrides(name="small", tracking="off", **{"train.epochs": 1, "cluster.checkpoint_s": 5}),
    ]
    one = ["run", *base, *overrides(storage=tmp_path / "one" / "storage", **{"cluster.workers": 0})]
    (tmp_path / "three").mkdir()
    (tmp_path / "one").mkdir()
    began = time.monotonic()
    small_run.run(one, tmp_path / "one" / "out.txt", 1200)
    alone_s = time.monotonic() - began
    with nodes_up([1, 1, 1]) as nodes:
        storage, out = tmp_path / "three" / "storage", tmp_path / "three" / "out.txt"
        began = time.monotonic()
        process = small_run.start(
            [
                "run",
                *base,
                *overrides(
                    storage=storage, **{"cluster.workers": 1, "cluster.address": nodes.address}
                ),
            ],
            out,
        )
        marks = wait_for(lambda: [*storage.glob("checkpoints/*/latest.json")], 900, process)
        lost_key, before = marks[0].parent.name, published_attempts(tmp_path / "three")
        for node in working(nodes)[:1]:
            nodes.kill(node)
        killed = time.time()
        nodes.add(1)
        process.join(1200)
        three_s = time.monotonic() - began
        assert process.exitcode == 0, out.read_text()
    output = out.read_text()
    lost = [
        line
        for line in output.splitlines()
        if "it goes on from there" in line or "tried again" in line
    ]
    again_s = (storage / "stages" / lost_key / "manifest.json").stat().st_mtime - killed
    with capsys.disabled():
        print(
            f"\n{method}: one process {alone_s:.0f} s; three nodes, one killed and one added "
            f"{three_s:.0f} s; the stage whose checkpoint was seen stood "
            f"{again_s:.0f} s after the kill; {lost}"
        )
    assert "was lost; " in output
    assert lost
    assert before.items() <= small_run.attempts(storage).items(), "what stood was computed again"
    assert small_run.results(storage) == small_run.results(tmp_path / "one" / "storage")


def overrides(**values: Any) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_what_the_storage_of_a_submitted_job_must_be_is_said(
    references: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipeline import cli

    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({}))
    assert cli.main(["run", references["star"].config(tmp_path), "--set", "storage=here"]) == 2
    assert "the folder of a submitted job goes when it ends" in capsys.readouterr().err
