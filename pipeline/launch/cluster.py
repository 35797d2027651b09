"""The Ray cluster: joined or started, what it consists of, how much of it is ours, and whether its
nodes can do what this machine can."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import ClusterSettings
from workers.errors import UserError, require_package
from workers.storage.artifact import exists, join, resolve, temporary_name, write_bytes
from workers.storage.filesystem import without_retries

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # a process per group; the driver looks once for all
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# whatever the system: without, a node's address is 127.0.0.1
OTHER_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ASK_S = 3.0  # for the answer to one small question
# of Ray's client server, of its head
CLIENT_QUESTION, HEAD_QUESTION = (
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
)
TOKEN_REMEDY = (
    "set RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node, or put that into "
    "~/.ray/auth_token or into the file that "
    "RAY_AUTH_TOKEN_PATH names, with RAY_AUTH_MODE=token (RAY_AUTH_MODE=disabled for a cluster "
    "without tokens)"
)
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
NAMESPACE = "accrete"
HEAD = {
    "node:__internal_head__": 1e-3
}  # what only the head node has: losing it is the end of the cluster anyway
# what workers compute with
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
# Not sent to the nodes. Patterns as in .gitignore: one that starts with / is of the root alone, as
# `workers/storage` holds code.
LEFT_AT_HOME = ["/.venv", "/.git", "/storage", "/tests", "/benchmarks", "__pycache__"]


# ---- joined or started ---------------------------------------------------------------------------
def connect(cluster: ClusterSettings) -> Any:
    """Joins the named Ray cluster, or starts a private local one: a forgotten cluster must not
    capture the run. Returns ray."""
    import logging

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    require_package("ray", "everything but a run with cluster.workers=0", "set that for a run")
    import ray  # after the environment is set: it is read at import

    if ray.is_initialized():
        return ray
    address = address_of(cluster)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        cpus = max(os.cpu_count() or 1, cluster.workers * cluster.cpus_per_worker)
        start_private(ray, cpus, quiet)
        return ray
    check_reachable(address)
    if address != "auto":
        check_token(address)
    root = str(Path(__file__).resolve().parents[2])
    code: dict[str, Any] = (
        {} if is_submitted_job() else {"working_dir": root, "excludes": LEFT_AT_HOME}
    )
    try:
        ray.init(address=address, runtime_env={**code, "env_vars": variables()}, **quiet)
    except Exception as error:  # Ray raises bare ones
        ray.shutdown()
        raise UserError(
            f"the Ray cluster at {address!r} cannot be joined ({refusal(error)}); mend that, or "
            "set cluster.address=local"
        ) from None
    return ray


@contextmanager
def on_loopback() -> Iterator[None]:
    """Inside, Ray starts processes that listen on 127.0.0.1: a private cluster has no other nodes,
    and its metrics pages ask for no token. What Ray has no address for, it binds to all: the
    rendezvous of torch.distributed."""
    constants = sys.modules.get("ray._private.ray_constants")
    before, usual = os.environ.get(OTHER_NODES), getattr(constants, "ENABLE_RAY_CLUSTER", True)
    os.environ[OTHER_NODES] = "0"
    if constants is not None:
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.environ.pop(OTHER_NODES)
        if before is not None:
            os.environ[OTHER_NODES] = before
        if constants is not None:
            constants.ENABLE_RAY_CLUSTER = usual  # type: ignore[attr-defined]


def address_of(cluster: ClusterSettings) -> str:
    """host:port, ray://host:port, auto; `local` for a private cluster."""
    return cluster.address or os.environ.get("RAY_ADDRESS", "") or "local"


def is_submitted_job() -> bool:
    """Whether this process was started by `ray job submit`, which has brought the code along."""
    return JOB in os.environ


def variables() -> dict[str, str]:
    """What workers get of this environment. What a job was submitted with, Ray brings along, and
    refuses to be told again."""
    submitted = json.loads(os.environ.get(JOB, "{}")).get("runtime_env") or {}
    return {
        name: os.environ[name] for name in ENVIRONMENT if name not in submitted.get("env_vars", {})
    }


def refusal(error: Exception) -> str:
    """Why a cluster did not let us in, in the words of its error that say it."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "oken" in text and "uthenticat" in text:
        return f"it asks for its token: {TOKEN_REMEDY}"
    if "local Raylet" in text or "raylet" in text:
        return (
            "this machine is no node of it: from outside give ray://host:10001, the port of "
            "Ray's client server"
        )
    return text[:300]


def check_token(address: str) -> None:
    """Raise UserError where a cluster does not take the token of this machine: Ray itself tries
    again for 20 to 80 s, and then reports a timeout. Whatever else goes wrong here, joining tells
    better."""
    import grpc

    # adds the token as RAY_AUTH_MODE and the rest say
    from ray._private.grpc_utils import (
        init_grpc_channel,
    )
    from ray.exceptions import AuthenticationError

    method = CLIENT_QUESTION if address.startswith("ray://") else HEAD_QUESTION
    try:
        channel = init_grpc_channel(address.removeprefix("ray://"))
        try:
            channel.unary_unary(method)(b"", timeout=ASK_S)
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
                f"{token_source()}; {TOKEN_REMEDY}"
            ) from None


def token_source() -> str:
    """What this machine shows to a cluster, without the token itself."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            f"it asks for a token, and RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE', '')!r} "
            "here"
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the token in RAY_AUTH_TOKEN is not the one of the cluster"
    place = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return f"the token in {place} is not the one of the cluster"


def start_private(ray: Any, cpus: int, quiet: dict[str, Any]) -> None:
    """A local cluster of its own, in a second try too: on a very busy machine Ray's 30 s for its
    processes are not enough."""
    for tries_left in (1, 0):
        try:
            with on_loopback():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    object_store_memory=200_000_000,
                    **quiet,
                )
            return
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            if not tries_left:
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UserError(
                    f"Ray did not start on this machine ({said}); run the same command again "
                    "when it is less busy, "
                    "or without Ray by --set cluster.workers=0"
                ) from None


def check_reachable(address: str) -> None:
    """A dead address takes Ray two minutes to give up on; a plain connection tells in two
    seconds."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
        if address == "auto":
            return
        raise UserError(
            f"cluster address {address!r} is not of the form host:port; mend cluster.address or "
            "RAY_ADDRESS, or set cluster.address=local"
        )
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name of a host that cannot be one
        raise UserError(
            f"no Ray cluster answers at {address!r} ({error}); start it, mend cluster.address "
            "or RAY_ADDRESS, "
            "or set cluster.address=local"
        ) from None


# ---- what it consists of -------------------------------------------------------------------------
@dataclass(frozen=True)
class Node:
    """A node as Ray knows it. why: what Ray says of its death. leaves: it was announced that it is
    going to be taken away."""

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
    """nodes: by id, the dead ones too. drivers: id of a job -> names of what it has registered."""

    nodes: Mapping[str, Node]
    drivers: Mapping[str, tuple[str, ...]]


def get_cluster_state() -> ClusterState:
    """Runs inside the cluster, where also a driver that is outside can have it asked."""
    import ray
    from ray._private.state import state  # Ray tells of announced ends nowhere else
    from ray.util import list_named_actors

    leaving = state.get_draining_nodes()
    nodes = {
        n["NodeID"]: Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            n["Alive"],
            n.get("DeathReasonMessage") or "",
            n["NodeID"] in leaving,
            n.get("Resources") or {},
        )
        for n in ray.nodes()
    }
    drivers: dict[str, tuple[str, ...]] = {}
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            job = actor["name"].partition("-")[0]
            drivers[job] = tuple(sorted((*drivers.get(job, ()), actor["name"])))
    return ClusterState(nodes, drivers)


class DriverRegistration:
    """An actor by which others see that a driver is there. It looks around where the cluster can be
    seen from."""

    def get_cluster_state(self) -> ClusterState:
        return get_cluster_state()


def actor_name(ray: Any, search: bool = False) -> str:
    """A name to register an actor by: others see that this driver is there, and leave it its share.
    search: its trials register too."""
    return (
        f"{ray.get_runtime_context().get_job_id()}-{'search' if search else uuid.uuid4().hex[:8]}"
    )


def register_actor(ray: Any, actor: type, name: str) -> Any:
    """A handle of a new actor, which others find by its name. It lives on the head node, and ends
    with this driver."""
    return ray.remote(
        num_cpus=0, resources=HEAD, name=name, namespace=NAMESPACE, scheduling_strategy="DEFAULT"
    )(actor).remote()


def where_ray_writes(uri: str) -> dict[str, Any]:
    """A place for the books that Ray keeps of its own, as its RunConfig wants it. It knows no
    patience but its own."""
    system, path = resolve(uri)
    return {"storage_path": path, "storage_filesystem": without_retries(system)}


# ---- how much of it is ours ----------------------------------------------------------------------
def resources_per_worker(cluster: ClusterSettings) -> dict[str, float]:
    """What one worker takes, in Ray's words."""
    wanted = {
        "CPU": cluster.cpus_per_worker,
        "GPU": cluster.gpus_per_worker,
        "memory": cluster.memory_gb_per_worker * 2**30,
        **cluster.resources,
    }
    return {name: amount for name, amount in wanted.items() if amount}


def worker_slots(around: ClusterState, cluster: ClusterSettings) -> int:
    """How many workers the nodes hold that are there and stay."""
    wanted, least = resources_per_worker(cluster), cluster.min_workers or cluster.workers
    each = [
        int(min(node.resources.get(name, 0.0) / amount + 1e-9 for name, amount in wanted.items()))
        for node in around.nodes.values()
        if node.alive and not node.leaves
    ]
    if cluster.placement == "STRICT_PACK":
        each = [count for count in each if count >= least]
    if cluster.placement == "STRICT_SPREAD" and sum(count > 0 for count in each) < least:
        return 0
    return sum(each)


def fair_share(total: int, mine: str, all_: tuple[str, ...]) -> int:
    """An equal part of `total`; what is left over goes to those whose names come first."""
    names = sorted({*all_, mine})
    return total // len(names) + (names.index(mine) < total % len(names))


def sizes_of_groups(
    around: ClusterState, cluster: ClusterSettings, name: str, width: int
) -> list[int]:
    """The workers of each group that this driver may have now: every driver on the cluster has the
    same share of it, and has a group even where that is none. name: what this one has registered.
    width: most stages that can run side by side."""
    job = name.partition("-")[0]
    mine = fair_share(worker_slots(around, cluster), job, tuple(around.drivers))
    mine = fair_share(
        mine,
        name,
        tuple(other for other in around.drivers.get(job, ()) if not other.endswith("-search")),
    )
    least = cluster.min_workers or cluster.workers
    groups = max(1, min(width, cluster.groups or width, mine // least))
    return [max(least, min(cluster.workers, mine // groups))] * groups


def check_fits(around: ClusterState, cluster: ClusterSettings) -> None:
    """Raises UserError where the cluster has no room for a group, unless it was said that nodes
    come when they are asked for."""
    least = cluster.min_workers or cluster.workers
    if worker_slots(around, cluster) >= least or cluster.groups:
        return
    total: dict[str, float] = {}
    for node in around.nodes.values():
        for name in resources_per_worker(cluster) if node.alive else ():
            total[name] = total.get(name, 0.0) + node.resources.get(name, 0.0)
    per_worker = in_words(resources_per_worker(cluster))
    raise UserError(
        f"{least} workers that take {per_worker} each do not fit into this "
        f"cluster ({in_words(total) or 'no node'}); lower "
        "cluster.workers or what each takes, add nodes, or, where nodes are started on demand, "
        "say how many groups to ask for "
        "with cluster.groups"
    )


def in_words(resources: Mapping[str, float]) -> str:
    words = {"CPU": "{:g} CPUs", "GPU": "{:g} GPUs"}
    return ", ".join(
        f"{amount / 2**30:.3g} GB of memory"
        if name == "memory"
        else words.get(name, "{:g} x " + name).format(amount)
        for name, amount in resources.items()
    )


# ---- whether its nodes can do what this machine can ----------------------------------------------
def versions() -> dict[str, str]:
    """Of Python and of what workers compute with; an empty one where a package is missing."""
    found = {"Python": platform.python_version().rpartition(".")[0]}
    for name in PACKAGES:
        found[name] = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


def facts(probe: str) -> tuple[dict[str, str], str]:
    """On a node: its versions, and why it does not see the file `probe` of the storage; empty where
    it does."""
    try:
        return versions(), "" if exists(probe) else "it is not there"
    except (OSError, UserError) as error:
        return versions(), " ".join(str(error).split())[:300]


def check_nodes(ray: Any, nodes: Mapping[str, Node], storage: str) -> None:
    """Raises UserError where a node has other versions than this machine, or does not see the
    storage."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = join(storage, f".probe-{temporary_name()}")
    write_bytes(probe, b"accrete")
    try:
        asked = {
            ray.remote(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )(facts).remote(probe): node
            for node in nodes.values()
            if node.alive
        }
        for answer, node in asked.items():
            try:
                theirs, unseen = ray.get(answer)
            except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
                raise UserError(
                    f"node {node} cannot run this project's code "
                    f"({str(error).strip().splitlines()[-1]}); install the versions of "
                    "constraints.txt there"
                ) from None
            except ray.exceptions.RayError:  # it was lost meanwhile
                continue
            compare(node, theirs, versions())
            if unseen:
                raise UserError(
                    f"node {node} does not see storage {storage!r} ({unseen}); give a folder "
                    "that all nodes share, or a bucket whose "
                    "credentials they have, with --set storage=PLACE"
                )
    finally:
        system, path = resolve(probe)
        system.delete_file(path)


def compare(node: Node, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raises UserError at the first version that differs."""
    for name, version in ours.items():
        if theirs.get(name, "") != version:
            has = f"has {name} {theirs[name]}" if theirs.get(name) else f"has no {name}"
            raise UserError(
                f"node {node} {has}, this machine {version or 'has none'}: results would not be "
                "the same; install the versions of "
                "constraints.txt on both"
            )
