"""A stage fails on another node: one command, which the terminal names, has all that is known."""

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
# Python imports it at its start: each training step of task `a` in a process of the node prints a
# note first.
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
    """Run a head node without CPUs, where the driver is, and a node for workers.

    module: what Python imports at the start of each process of that node.
    """
    small_run.start_server()  # later tests use it, and it must not import the module
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
    """Wait for the end of a run that fails, and return what it printed."""
    process.join(900)
    output = (folder / "out.txt").read_text()
    assert process.exitcode == 2, output
    assert "Traceback" not in output
    return output


def answer_of_the_named_command(output: str) -> str:
    """Run the command that the output names for the log of what failed, and return its answer."""
    match = re.search(r"; its log: ([^;]*);", output)
    assert match, output
    arguments = shlex.split(match[1])
    return answer_of(*arguments[arguments.index("logs") :])


def answer_of(*arguments: str) -> str:
    """Return what a command prints."""
    completed = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_an_error_has_its_traceback_node_rank_and_log(tmp_path: Path) -> None:
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
    """Return the process of the one rank that there is."""
    [worker] = [
        process for process in nodes.processes(nodes.nodes[0]) if "TrainWorker" in title(process)
    ]
    return worker


def test_a_killed_worker_stands_in_the_log_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """With the number of retries that there is without a setting."""
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


def test_a_killed_worker_has_its_node_its_rank_and_its_log(tmp_path: Path) -> None:
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
