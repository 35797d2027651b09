"""A Ray cluster of several nodes on this machine.

A node can be killed with all its processes at once, as if its machine failed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

SMALL: dict[str, Any] = {"object_store_memory": 100_000_000}


class Nodes:
    """A head node without CPUs, and worker nodes with the given numbers of CPUs.

    address: host:port of the cluster, for drivers on it. client: the ray:// address, for drivers
    elsewhere. client_port: port of Ray's client server (0: not started). dashboard_port: port for
    job submission (0: no dashboard).
    """

    def __init__(self, cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> None:
        from pipeline.launch.cluster import ENVIRONMENT

        # directly in /tmp, because socket paths must be short
        self.folder = tempfile.TemporaryDirectory(prefix="acc", dir="/tmp")
        os.environ |= {**ENVIRONMENT, "RAY_TMPDIR": self.folder.name}
        from ray._private.authentication.authentication_token_setup import (
            ensure_token_if_auth_enabled,
        )
        from ray.cluster_utils import Cluster

        ensure_token_if_auth_enabled()  # `Cluster` creates no token, unlike `ray.init`
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, **SMALL}
        if client_port:
            head["ray_client_server_port"] = client_port
        # Jobs go through the head's agent. Port 0 lets it choose a free port, because another
        # Ray on this machine may use the default port.
        if dashboard_port:
            head |= {
                "include_dashboard": True,
                "dashboard_port": dashboard_port,
                "dashboard_agent_listen_port": 0,
            }
        self.num_added = 0
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address = self.cluster.address
        self.client = f"ray://127.0.0.1:{client_port}"
        self.nodes: list[Any] = [self.add(count) for count in cpus]

    def add(self, cpus: int) -> Any:
        """Start a node that unpacks our code into its own folder.

        The first worker of a node makes the node delete that folder and unpack the code again. With
        a shared folder, the workers of the other nodes would lose their code.
        """
        self.num_added += 1
        folder = f"runtime_resources_{self.num_added}"
        return self.cluster.add_node(num_cpus=cpus, runtime_env_dir_name=folder, **SMALL)

    def processes(self, node: Any) -> list[psutil.Process]:
        """Return all processes of a node, its raylet first."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def all_processes(self) -> list[psutil.Process]:
        """Return all processes of all nodes."""
        processes = []
        for node in self.cluster.list_all_nodes():
            processes += self.processes(node)
        return processes

    def nodes_running(self, text: str) -> list[Any]:
        """Return the nodes that have a process with `text` in its command line."""
        nodes = []
        for node in self.cluster.worker_nodes:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                if any(text in title(process) for process in self.processes(node)):
                    nodes.append(node)
        return nodes

    def busiest_node(self, text: str, seconds: float = 1) -> Any:
        """Return the node whose processes with `text` in the command line use the most CPU time."""
        nodes = self.nodes_running(text)
        before = [self.cpu_seconds(node, text) for node in nodes]
        time.sleep(seconds)
        used = [
            self.cpu_seconds(node, text) - earlier
            for node, earlier in zip(nodes, before, strict=True)
        ]
        return nodes[used.index(max(used))]

    def cpu_seconds(self, node: Any, text: str) -> float:
        """Return the CPU time of a node's processes with `text` in the command line."""
        total = 0.0
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                if text in title(process):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def kill(self, node: Any) -> None:
        """Kill all processes of a node with SIGKILL, as if its machine failed."""
        processes = self.processes(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 20)
        self.cluster.worker_nodes.discard(node)

    def announce_preemption(self, node: Any, seconds: float = 120) -> None:
        """Announce the preemption of a node in `seconds`, like a cloud with spot instances."""
        import ray._raylet
        from ray.core.generated import autoscaler_pb2

        raylet: Any = ray._raylet
        messages: Any = autoscaler_pb2

        reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + seconds) * 1000)
        client = raylet.GcsClient(address=self.address)
        is_accepted, rejection = client.drain_node(node.node_id, reason, "spot", deadline_ms)
        assert is_accepted, rejection

    def close(self) -> None:
        """Stop the cluster and delete its folder."""
        self.cluster.shutdown()
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.folder.cleanup()
            except OSError:  # an ending process wrote another file
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def title(process: psutil.Process) -> str:
    """Return the command line of a process, or "" if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def nodes_up(cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> Iterator[Nodes]:
    """Context manager that runs a cluster and restores the environment variables at the end."""
    before = dict(os.environ)
    nodes = Nodes(cpus, client_port, dashboard_port)
    try:
        yield nodes
    finally:
        nodes.close()
        os.environ.clear()
        os.environ.update(before)


def wait_for(condition: Any, seconds: float, or_end_of: Any = None) -> Any:
    """Call `condition` until its result is true, and return that result.

    Raises AssertionError after `seconds`, or if the process `or_end_of` ends first.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert or_end_of is None or or_end_of.is_alive(), "the run ended first"
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)
    return result
