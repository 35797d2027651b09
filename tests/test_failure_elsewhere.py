"""Tests of failures on another node: the command named in the terminal shows all details."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import small_run
from tests.several_nodes import Nodes, nodes_up, title
from tests.test_recovery_on_ray import until_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REPOSITORY = Path(__file__).parents[1]
STAGE = "finetune/a/train"
NOTE = "a note of this node"
# A sitecustomize module, which Python imports at its start. Each training step of task `a` first
# prints a note.
PRINT = f"""
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "workers.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_change(module):
            execute(module)
            train_step = module.train_step
            def step_of_this_node(method, optimizer, batches, progress, job, *rest):
                if job.task.name == "a":
                    print({NOTE!r}, file=sys.stderr)
                    FAULT
                return train_step(method, optimizer, batches, progress, job, *rest)
            module.train_step = step_of_this_node
        spec.loader.exec_module = execute_and_change
        return spec

sys.meta_path.insert(0, Finder())
"""
FAIL = PRINT.replace("FAULT", 'raise ArithmeticError("this node cannot count")')


@contextlib.contextmanager
def two_nodes(folder: Path, module: str) -> Iterator[Nodes]:
    """Run a head node without CPUs for the driver, and a worker node.

    module: source of the module that each process of the worker node imports at its start.
    """
    small_run.start_server()  # later tests share it, and it must not import the module
    with nodes_up([]) as nodes, pytest.MonkeyPatch.context() as patch:
        (folder / "sitecustomize.py").write_text(module)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        nodes.nodes.append(nodes.add(1))
        yield nodes


def start(nodes: Nodes, folder: Path, **changes: Any) -> Any:
    """Start a run on the nodes, with its output in out.txt."""
    cluster = {"workers": 1, "address": nodes.address, "checkpoint_s": 1e-6, "retries": 0}
    body = small_run.make_body(
        folder, small_run.make_cards(folder, ["base", "a"]), ["finetune"], cluster=cluster
    )
    config = small_run.write_config(folder / "config.yaml", body | changes)
    return small_run.start(["run", config], folder / "out.txt")


def failed_output(process: Any, folder: Path) -> str:
    """Wait for a run to fail, and return its output."""
    process.join(900)
    output = (folder / "out.txt").read_text()
    assert process.exitcode == 2, output
    assert "Traceback" not in output
    return output


def answer_of_the_named_command(output: str) -> str:
    """Run the log command that the output names, and return its output."""
    match = re.search(r"; its log: ([^;]*);", output)
    assert match, output
    arguments = shlex.split(match[1])
    return answer_of(*arguments[arguments.index("logs") :])


def answer_of(*arguments: str) -> str:
    """Return the output of a command."""
    completed = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_remote_error_is_reported_with_traceback_node_rank_and_log(tmp_path: Path) -> None:
    with two_nodes(tmp_path, FAIL) as nodes:
        output = failed_output(start(nodes, tmp_path), tmp_path)
    place = f"(at {tmp_path}/sitecustomize.py:"
    assert f"{STAGE}: failed: ArithmeticError: this node cannot count {place}" in output
    answer = answer_of_the_named_command(output)
    assert f"stage: {STAGE}\n" in answer
    assert f"host: {platform.node()}\nrank: 0 of 1\nprocess: " in answer
    assert re.search(r"^log: \S+/logs/worker-\S+\.err$", answer, re.MULTILINE)
    assert "Traceback (most recent call last):" in answer
    assert "in step_of_this_node" in answer
    assert "ArithmeticError: this node cannot count\n" in answer
    assert "the end of its log (" in answer
    assert NOTE in answer.rpartition("the end of its log")[2]


def training_worker(nodes: Nodes) -> Any:
    """Return the process of the only rank."""
    [worker] = [
        process for process in nodes.processes(nodes.nodes[0]) if "TrainWorker" in title(process)
    ]
    return worker


def test_killed_worker_is_logged_and_its_stage_retried(tmp_path: Path) -> None:
    """The number of retries is the default."""
    with two_nodes(tmp_path, PRINT.replace("FAULT", "pass")) as nodes:
        cluster = {"workers": 1, "address": nodes.address, "checkpoint_s": 1e-6}
        process = start(nodes, tmp_path, train={"epochs": 60}, cluster=cluster)
        until_checkpoint(tmp_path, STAGE, process, "out.txt")
        worker = training_worker(nodes)
        address = nodes.nodes[0].node_ip_address
        worker.kill()
        process.join(900)
    output = (tmp_path / "out.txt").read_text()
    assert process.exitcode == 0, output
    died = f"rank 0 on {address} died: process {worker.pid} was killed or crashed"
    assert f"{STAGE}: {died}" in output
    assert "tried again from its last checkpoint (try 2 of 3)" in output
    answer = answer_of("logs", "small", STAGE, "--storage", str(tmp_path / "storage"))
    assert f"host: {address}\nrank: 0 of 1\nprocess: {worker.pid}\n" in answer
    assert answer.count(f"started in group 0 on {address}") == 2
    assert "checkpoint before step " in answer
    assert NOTE in answer.rpartition("the end of its log (")[2]


def test_failure_by_killed_worker_names_node_rank_and_log(tmp_path: Path) -> None:
    with two_nodes(tmp_path, PRINT.replace("FAULT", "pass")) as nodes:
        process = start(nodes, tmp_path, train={"epochs": 400})
        until_checkpoint(tmp_path, STAGE, process, "out.txt")
        worker = training_worker(nodes)
        address = nodes.nodes[0].node_ip_address
        worker.kill()
        output = failed_output(process, tmp_path)
    died = f"rank 0 on {address} died: process {worker.pid} was killed or crashed"
    assert f"{STAGE}: failed: {died}" in output
    assert "RayTaskError" not in output
    assert "(raylet)" not in output
    driver_log = (tmp_path / "storage" / "runs" / "small" / "driver.log").read_text()
    assert "a raylet: A worker died or was killed" in driver_log
    answer = answer_of_the_named_command(output)
    assert f"host: {address}\nrank: 0 of 1\nprocess: {worker.pid}\n" in answer
    assert "The actor is dead because its worker process has died" in answer
    log = re.search(rf"^log: (\S+/logs/worker-\S+-{worker.pid}\.err)$", answer, re.MULTILINE)
    assert log
    assert NOTE in answer.rpartition(f"the end of its log ({log[1]}):\n")[2]
