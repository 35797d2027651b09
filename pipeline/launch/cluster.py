"""The Ray cluster of a run: join or start it, list its nodes and drivers, and check the nodes.

A run starts a private cluster that ends with its process, or joins a running one: from a node of
that cluster (`host:port`, `auto`), or from outside with Ray Client (`ray://`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.settings import ClusterSettings
from pipeline.config.yaml_files import IS_CHECKOUT, PACKAGE
from pipeline.graph.failures import ANSI
from pipeline.launch import ray_internals
from workers.errors import UserError, describe_error, require_package
from workers.storage.artifact import exists, join, resolve, temporary_name, write_bytes
from workers.storage.filesystem import unwrap_filesystem

LOG = logging.getLogger("accrete.ray")
# Default environment variables. They are set before Ray is imported, because Ray reads some of
# them at import.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # pause of Ray Train between two looks at its workers (default: 2 s)
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # do not redirect `print` to Ray's logger
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # search trials keep the current folder
    # Ray's watcher is a process per group. Our driver detects preempted nodes for all groups.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray tasks without GPUs keep CUDA_VISIBLE_DEVICES
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's earlier form of progress output
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
ANSWER_TIMEOUT_S = 3.0  # seconds to wait for the answer to the request that tests the token
CONNECTION_TIMEOUT_S = 2.0  # seconds to wait for a TCP connection
PRIVATE_STORE_BYTES = 200_000_000  # size of Ray's object store; results do not use it
START_TRIES = 2
MAX_REASON = 300  # maximum number of characters of a Ray error in a message
TOKEN_REMEDY = (
    "set RAY_AUTH_TOKEN to the output of `ray get-auth-token` on its head node, "
    "or put that into ~/.ray/auth_token or into the file that RAY_AUTH_TOKEN_PATH names, "
    "with RAY_AUTH_MODE=token (RAY_AUTH_MODE=disabled for a cluster without tokens)"
)
NAMESPACE = "accrete"  # Ray namespace of the actors that drivers register
SEARCH_SUFFIX = "-search"  # end of the name of a search's actor
# Resource request that places an actor on the head node. Every cluster has that node.
HEAD = {ray_internals.HEAD_NODE_RESOURCE: 1e-3}
# Packages that affect results: other versions could give other results.
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "ray",
    "webdataset",
    "pyarrow",
    "numpy",
    "pillow",
    "safetensors",
    "pydantic",
)
# Paths not sent to the nodes, as patterns of .gitignore. A leading / limits a pattern to
# the root of the checkout; for example, `workers/storage` contains code and must be sent.
EXCLUDED_PATHS = [
    "/.venv", "/.git", "/build", "/dist", "/storage", "/tests", "/benchmarks", "__pycache__"
]  # fmt: skip


# ---- joining or starting -------------------------------------------------------------------------
def connect(cluster: ClusterSettings) -> Any:
    """Join the cluster of the config or of RAY_ADDRESS, or else start a private cluster.

    Ray's own search for a running cluster is not used, because a run must not join a cluster that
    the user has forgotten. If this process is connected to Ray already, nothing changes.

    Returns:
        The module `ray`.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    require_package("ray", "everything but a run with cluster.workers=0", "set that for a run")
    import ray  # after the environment is set; takes about a second

    if ray.is_initialized():
        return ray
    address = get_address(cluster)
    if address == "local":
        # at least enough for one group, even if this machine has fewer CPUs
        cpus = max(os.cpu_count() or 1, cluster.workers * cluster.cpus_per_worker)
        start_private(ray, cpus)
    else:
        join_cluster(ray, address)
    return ray


def get_address(cluster: ClusterSettings) -> str:
    """Return `host:port`, `ray://host:port` or `auto`, or `local` for a private cluster."""
    return cluster.address or os.environ.get("RAY_ADDRESS", "") or "local"


def join_cluster(ray: Any, address: str) -> None:
    """Join a running cluster and send this project's code to its nodes.

    Args:
        ray: The module `ray`.
        address: As returned by `get_address`, but not `local`.

    Raises:
        UserError: If the cluster cannot be joined.
    """
    check_cluster_reachable(address)
    if address != "auto":
        check_token(address)
    runtime_env: dict[str, Any] = {"env_vars": variables()}
    if not is_submitted_job():
        if IS_CHECKOUT:
            runtime_env |= {"working_dir": str(PACKAGE.parent), "excludes": EXCLUDED_PATHS}
        else:
            packages = [str(PACKAGE), str(PACKAGE.parent / "workers")]
            runtime_env |= {"py_modules": packages}
    try:
        ray.init(address=address, runtime_env=runtime_env, **quiet())
    except Exception as error:  # Ray raises plain exceptions
        ray.shutdown()
        raise UserError(
            f"the Ray cluster at {address!r} cannot be joined ({explain_refusal(error)}); "
            "fix that, or set cluster.address=local"
        ) from None


def start_private(ray: Any, cpus: int) -> None:
    """Start a cluster on this machine that ends with this process.

    The start is tried twice: on a very busy machine, Ray's processes may take longer than the 30 s
    that Ray allows.

    Args:
        ray: The module `ray`.
        cpus: Number of CPUs of the cluster.

    Raises:
        UserError: If both tries fail.
    """
    if " " in sys.executable:  # Ray starts workers with a shell, which splits the path
        raise UserError(
            f"Ray starts no workers from a Python in a folder with a space ({sys.executable}); "
            "make the environment in another folder, or run without Ray by --set cluster.workers=0"
        )
    for tries_left in reversed(range(START_TRIES)):
        try:
            # Workers import from the current folder first. It may contain another folder
            # `pipeline`, so the workers are started in the folder of this project.
            with contextlib.chdir(PACKAGE.parent), ray_internals.listen_on_loopback():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    object_store_memory=PRIVATE_STORE_BYTES,
                    **quiet(),
                )
            return
        except Exception as error:  # Ray raises plain exceptions
            ray.shutdown()
            if not tries_left:
                reason = describe_error(error, only_first_line=True)
                raise UserError(
                    f"Ray did not start on this machine ({reason}); run the same command again "
                    "when it is less busy, or without Ray by --set cluster.workers=0"
                ) from None


def quiet() -> dict[str, Any]:
    """Redirect the messages of raylets (Ray's process on each node) to the log of the driver.

    Returns:
        The arguments of `ray.init` that suppress its output.
    """
    ray_internals.log_messages_of_raylets(partial(LOG.info, "a raylet: %s"))
    return {"log_to_driver": False, "logging_level": logging.ERROR}


def is_submitted_job() -> bool:
    """Return whether this process was started by `ray job submit`, which also sent the code."""
    return ray_internals.JOB_CONFIG_VARIABLE in os.environ


def variables() -> dict[str, str]:
    """Return the variables of ENVIRONMENT that this process passes to its workers.

    If this process is a submitted job, the variables of the job are left out: Ray passes them on
    itself, and refuses duplicates.
    """
    job = json.loads(os.environ.get(ray_internals.JOB_CONFIG_VARIABLE, "{}"))
    submitted = (job.get("runtime_env") or {}).get("env_vars", {})
    return {name: os.environ[name] for name in ENVIRONMENT if name not in submitted}


def explain_refusal(error: Exception) -> str:
    """Return the reason in one line why a cluster cannot be joined, from the error of Ray."""
    text = describe_error(error)
    if "oken" in text and "uthenticat" in text:
        return f"it asks for its token: {TOKEN_REMEDY}"
    if "local Raylet" in text or "raylet" in text:
        return (
            "this machine is not a node of it: from outside give ray://host:10001, "
            "the port of Ray's client server"
        )
    return text[:MAX_REASON]


def check_cluster_reachable(address: str) -> None:
    """Check that a server listens at an address. Without this check, Ray tries for two minutes.

    Raises:
        UserError: If the address is malformed, or nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
        raise UserError(
            f"cluster address {address!r} is not of the form host:port; "
            "fix cluster.address or RAY_ADDRESS, or set cluster.address=local"
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECTION_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        raise UserError(
            f"no Ray cluster answers at {address!r} ({error}); "
            "start it, fix cluster.address or RAY_ADDRESS, or set cluster.address=local"
        ) from None


def check_token(address: str) -> None:
    """Check that a cluster accepts the token of this machine.

    Without this check, Ray tries for 20 to 80 s and then reports a timeout. Other errors are
    ignored here, because `ray.init` reports them better.

    Raises:
        UserError: If the token is missing or refused.
    """
    import grpc  # installed with Ray
    from ray.exceptions import AuthenticationError

    request = ray_internals.HEAD_REQUEST
    if address.startswith("ray://"):
        request = ray_internals.CLIENT_SERVER_REQUEST
    try:
        channel = ray_internals.open_channel(address.removeprefix("ray://"))
        try:
            channel.unary_unary(request)(b"", timeout=ANSWER_TIMEOUT_S)
        finally:
            channel.close()
    except AuthenticationError:
        raise UserError(
            f"the Ray cluster at {address!r} cannot be joined: no token was found here; "
            f"{TOKEN_REMEDY}"
        ) from None
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise UserError(
                f"the Ray cluster at {address!r} does not let this machine in: "
                f"{describe_token_source()}; {TOKEN_REMEDY}"
            ) from None


def describe_token_source() -> str:
    """Return a sentence about the source of the refused token, without the token itself."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode != "token":
        return f"it asks for a token, and RAY_AUTH_MODE is {mode!r} here"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the token in RAY_AUTH_TOKEN is not the one of the cluster"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return f"the token in {path} is not the one of the cluster"


# ---- nodes and drivers ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Node:
    """A node as Ray describes it.

    Attributes:
        id: Ray's id.
        address: IP address.
        alive: Whether Ray considers the node alive.
        why: Ray's message about the death of the node, or empty.
        leaves: Whether the node is draining, for example because a cloud reclaims a spot instance.
        resources: Total resources of the node, by Ray's names.
    """

    id: str
    address: str
    alive: bool
    why: str
    leaves: bool
    resources: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class ClusterState:
    """Nodes and drivers of a cluster.

    Attributes:
        nodes: Nodes by id, including dead nodes.
        drivers: Id of a Ray job -> names of the actors that drivers of the job registered.
    """

    nodes: Mapping[str, Node]
    drivers: Mapping[str, tuple[str, ...]]


def get_cluster_state() -> ClusterState:
    """Return the nodes and drivers of the cluster.

    This function must run inside the cluster. A driver may be outside (Ray Client), so it asks
    the actor that it has registered.
    """
    import ray  # slow to import, but already loaded here
    from ray.util import list_named_actors

    draining = ray_internals.list_draining_node_ids()
    nodes = {}
    for info in ray.nodes():
        node_id = info["NodeID"]
        nodes[node_id] = Node(
            node_id,
            info["NodeManagerAddress"],
            info["Alive"],
            info.get("DeathReasonMessage") or "",
            node_id in draining,
            info.get("Resources") or {},
        )
    names = [
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE
    ]
    return ClusterState(nodes, group_by_job(names))


def group_by_job(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group the names of registered actors by the id of their Ray job."""
    drivers: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        job = parse_job(name)
        drivers[job] = (*drivers.get(job, ()), name)
    return drivers


class DriverRegistration:
    """An actor that makes its driver visible to other drivers, so that they can share the cluster.

    It also returns the state of the cluster, which a driver outside the cluster cannot read itself.
    """

    def get_cluster_state(self) -> ClusterState:
        """Return the nodes and drivers of the cluster."""
        return get_cluster_state()


def make_actor_name(ray: Any, search: bool = False) -> str:
    """Return a name for the actor that registers this driver.

    Args:
        ray: The module `ray`.
        search: Whether the driver is a search, whose trials register actors of their own.
    """
    job = ray.get_runtime_context().get_job_id()
    return f"{job}{SEARCH_SUFFIX}" if search else f"{job}-{uuid.uuid4().hex[:8]}"


def parse_job(name: str) -> str:
    """Return the id of the Ray job from the name of a registered actor."""
    return name.partition("-")[0]


def is_search_actor(name: str) -> bool:
    """Return whether a registered actor belongs to a search, and not to a trial."""
    return name.endswith(SEARCH_SUFFIX)


def register_actor(ray: Any, actor: type, name: str) -> Any:
    """Start an actor on the head node that other drivers can find by its name.

    Args:
        ray: The module `ray`.
        actor: Class of the actor.
        name: See `make_actor_name`.

    Returns:
        The handle of the actor. The actor ends with this driver.
    """
    options = {
        "num_cpus": 0,
        "resources": HEAD,
        "name": name,
        "namespace": NAMESPACE,
        "scheduling_strategy": "DEFAULT",  # not inside the placement group of a search trial
    }
    return ray.remote(**options)(actor).remote()


def make_ray_storage_arguments(uri: str) -> dict[str, Any]:
    """Return the arguments of Ray's `RunConfig` that store Ray's own files below `uri`.

    The filesystem does not retry, because Ray itself retries.
    """
    system, path = resolve(uri)
    return {"storage_path": path, "storage_filesystem": unwrap_filesystem(system)}


# ---- checks of the nodes -------------------------------------------------------------------------
class NodeFacts(NamedTuple):
    """Facts about a node that decide whether it can run this project.

    Attributes:
        versions: Versions of Python and of packages.
        unseen: Reason why the node cannot read a test file in the storage; empty if it can.
    """

    versions: dict[str, str]
    unseen: str


def versions() -> dict[str, str]:
    """Return the versions that must agree: of Python and of `PACKAGES`, by name.

    The patch version of Python and local version labels such as `+cpu` are left out. The version of
    a missing package is "".
    """
    by_name = {"Python": platform.python_version().rpartition(".")[0]}
    for name in PACKAGES:
        by_name[name] = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name).partition("+")[0]
    return by_name


def collect_facts(probe: str) -> NodeFacts:
    """Return the facts about this node. Runs as a Ray task on each node.

    Args:
        probe: URI of a test file that the driver wrote into the storage.
    """
    try:
        unseen = "" if exists(probe) else "it is not there"
    except (OSError, UserError) as error:
        unseen = " ".join(str(error).split())[:MAX_REASON]
    return NodeFacts(versions(), unseen)


def check_nodes(ray: Any, nodes: Mapping[str, Node], storage: str) -> None:
    """Check that all nodes have the package versions of this machine and can read the storage.

    Args:
        ray: The module `ray`.
        nodes: The nodes by id.
        storage: URI of the storage.

    Raises:
        UserError: If a node has other versions, or cannot read the storage.
    """
    probe = join(storage, f".probe-{temporary_name()}")
    write_bytes(probe, b"accrete")
    try:
        # ask all nodes before the first answer is read, so that they answer in parallel
        answers = [(node, ask_facts(ray, node, probe)) for node in nodes.values() if node.alive]
        for node, answer in answers:
            check_node(ray, node, answer, storage)
    finally:
        system, path = resolve(probe)
        system.delete_file(path)


def ask_facts(ray: Any, node: Node, probe: str) -> Any:
    """Run `collect_facts` on one node, even if it is busy. Return a Ray reference to the result."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # slow to import

    on_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node)(collect_facts)
    return remote.remote(probe)


def check_node(ray: Any, node: Node, answer: Any, storage: str) -> None:
    """Check the answer of a node to `ask_facts`. A node that was lost meanwhile is ignored.

    Args:
        ray: The module `ray`.
        node: The node.
        answer: Result of `ask_facts`.
        storage: URI of the storage, for the message.

    Raises:
        UserError: If the node cannot run this project, has other versions, or cannot read the
            storage.
    """
    try:
        node_facts = NodeFacts(*ray.get(answer))
    except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise make_unfit_error(f"node {node}", error) from None
    except ray.exceptions.RayError:
        return
    check_versions(node, node_facts.versions, versions())
    if node_facts.unseen:
        raise UserError(
            f"node {node} does not see storage {storage!r} ({node_facts.unseen}); "
            "give a folder that all nodes share, "
            "or a bucket whose credentials they have, with --set storage=PLACE"
        )


def make_unfit_error(where: str, error: Exception) -> UserError:
    """Return the error to raise if a process of Ray could not start this project's code.

    Args:
        where: Name of the node, for the message.
        error: Error of Ray. Its last line is the reason.
    """
    reason = ANSI.sub("", str(error)).strip().splitlines()[-1]
    return UserError(
        f"{where} cannot run this project's code ({reason}); "
        "install this project and the versions of its constraints.txt there"
    )


def check_versions(node: Node, on_node: Mapping[str, str], on_driver: Mapping[str, str]) -> None:
    """Raise `UserError` if a version differs between node and driver."""
    for name, version in on_driver.items():
        other = on_node.get(name, "")
        if other == version:
            continue
        has = f"has {name} {other}" if other else f"has no {name}"
        raise UserError(
            f"node {node} {has}, this machine {version or 'has none'}: "
            "results would not be the same; install the versions of constraints.txt on both"
        )
