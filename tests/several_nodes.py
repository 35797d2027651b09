"""A Ray cluster of several nodes on this machine.

A node can be killed as when its machine fails: at once, with all its processes.
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
    elsewhere. client_port: where Ray's client server listens; 0 starts none. dashboard_port: where
    jobs are submitted; 0 starts no dashboard.
    """

    def __init__(self, cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> None:
        from pipeline.launch.cluster import ENVIRONMENT

        # directly in /tmp: paths of sockets must be short
        self.folder = tempfile.TemporaryDirectory(prefix="acc", dir="/tmp")
        os.environ |= {**ENVIRONMENT, "RAY_TMPDIR": self.folder.name}
        from ray._private.authentication.authentication_token_setup import (
            ensure_token_if_auth_enabled,
        )
        from ray.cluster_utils import Cluster

        ensure_token_if_auth_enabled()  # `ray.init` makes one where the home has none, this not
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, **SMALL}
        if client_port:
            head["ray_client_server_port"] = client_port
        # Jobs go through the head's agent. Port 0 lets it choose a free port: the default one
        # may be in use by another Ray on this machine.
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
        """Start a node that unpacks our code into a folder of its own.

        The first worker of a node makes it delete that folder and unpack the code again. If all
        nodes shared one folder, that would take the code away from the workers of the others.
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
        """Return the nodes with a process whose command line contains `text`."""
        nodes = []
        for node in self.cluster.worker_nodes:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                if any(text in title(process) for process in self.processes(node)):
                    nodes.append(node)
        return nodes

    def busiest_node(self, text: str, seconds: float = 1) -> Any:
        """Return the node whose processes with `text` in their titles use the CPU most."""
        nodes = self.nodes_running(text)
        before = [self.cpu_seconds(node, text) for node in nodes]
        time.sleep(seconds)
        used = [
            self.cpu_seconds(node, text) - earlier
            for node, earlier in zip(nodes, before, strict=True)
        ]
        return nodes[used.index(max(used))]

    def cpu_seconds(self, node: Any, text: str) -> float:
        """Return the CPU time of the processes of a node with `text` in their titles."""
        total = 0.0
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                if text in title(process):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def kill(self, node: Any) -> None:
        """Kill all processes of a node with SIGKILL, as when its machine fails."""
        processes = self.processes(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 20)
        self.cluster.worker_nodes.discard(node)

    def announce_preemption(self, node: Any, seconds: float = 120) -> None:
        """Announce a preemption of a node in `seconds`, as a cloud does for spot instances."""
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
        """Stop the cluster, and delete its folder."""
        self.cluster.shutdown()
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.folder.cleanup()
            except OSError:  # a process that ends has written another file meanwhile
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def title(process: psutil.Process) -> str:
    """Return the command line of a process, or "" when the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def nodes_up(cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> Iterator[Nodes]:
    """Start a cluster, and stop it at the end; the environment variables are restored."""
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

    Raise AssertionError when this takes longer than `seconds`, or the process `or_end_of` ends.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert or_end_of is None or or_end_of.is_alive(), "the run ended before"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
    return result
