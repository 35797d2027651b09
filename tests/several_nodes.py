"""A Ray cluster of several nodes on this machine, whose nodes can be killed as a machine dies: at
once, with all that runs on them."""

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
    """A head without CPUs, and nodes of some. address: host:port of the cluster; client: what a
    driver outside of it gives. client_port: where Ray's client server listens, if it is wanted.
    dashboard_port: where jobs are submitted, if any are."""

    def __init__(self, cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> None:
        from pipeline.launch.cluster import ENVIRONMENT

        # short: sockets lie below
        self.folder = tempfile.TemporaryDirectory(prefix="acc", dir="/tmp")
        os.environ |= {**ENVIRONMENT, "RAY_TMPDIR": self.folder.name}
        from ray.cluster_utils import Cluster

        more: dict[str, Any] = {"ray_client_server_port": client_port} if client_port else {}
        # jobs go through the agent of the head, whose own port is that of any other Ray on this
        # machine unless it is asked for
        if dashboard_port:
            more |= {
                "include_dashboard": True,
                "dashboard_port": dashboard_port,
                "dashboard_agent_listen_port": 0,
            }
        self.num_added = 0
        self.cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL, **more},
        )
        self.address, self.client = self.cluster.address, f"ray://127.0.0.1:{client_port}"
        self.nodes: list[Any] = [self.add(count) for count in cpus]

    def add(self, cpus: int) -> Any:
        """Start a node that unpacks our code into a folder of its own.

        The first worker of a node makes it delete that folder and unpack the code anew. If all
        nodes shared one folder, that would take the code away from the workers of the others.
        """
        self.num_added += 1
        folder = f"runtime_resources_{self.num_added}"
        return self.cluster.add_node(num_cpus=cpus, runtime_env_dir_name=folder, **SMALL)

    def processes(self, node: Any) -> list[psutil.Process]:
        """Everything that runs on a node: its raylet first."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def everything(self) -> list[psutil.Process]:
        return [
            process for node in self.cluster.list_all_nodes() for process in self.processes(node)
        ]

    def holding(self, what: str) -> list[Any]:
        """Nodes on which a process runs whose command line has `what` in it."""
        found = []
        for node in self.cluster.worker_nodes:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                if any(what in title(process) for process in self.processes(node)):
                    found.append(node)
        return found

    def kill(self, node: Any) -> None:
        """The machine is gone: nothing on it ends in good order."""
        processes = self.processes(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 20)
        self.cluster.worker_nodes.discard(node)

    def announce(self, node: Any, seconds: float = 120) -> None:
        """The machine is going to be taken away: what a cloud says of a spot instance some time
        before."""
        import ray._raylet
        from ray.core.generated import autoscaler_pb2

        raylet: Any = ray._raylet
        messages: Any = autoscaler_pb2

        reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        taken, why = raylet.GcsClient(address=self.address).drain_node(
            node.node_id, reason, "spot", int((time.time() + seconds) * 1000)
        )
        assert taken, why

    def close(self) -> None:
        self.cluster.shutdown()
        self.folder.cleanup()


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def nodes_up(cpus: list[int], client_port: int = 0, dashboard_port: int = 0) -> Iterator[Nodes]:
    before = dict(os.environ)
    nodes = Nodes(cpus, client_port, dashboard_port)
    try:
        yield nodes
    finally:
        nodes.close()
        os.environ.clear()
        os.environ.update(before)


def wait_for(what: Any, seconds: float, or_end_of: Any = None) -> Any:
    """What `what` gives as soon as it gives something; raises where it takes too long, or a process
    ends before."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert or_end_of is None or or_end_of.is_alive(), "the run ended before"
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)
    return found
