"""All uses of Ray's private names in this project.

Ray can rename or remove a private name in any release. tests/pipeline/test_ray_internals.py has a
test for each name, so that after an upgrade the tests show which name is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A resource that only the head node has, for actors that must run there.
HEAD_NODE_RESOURCE = "node:__internal_head__"
# Environment variable with the job's configuration as JSON. `ray job submit` sets it.
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Environment variable; "0": processes of Ray listen only on 127.0.0.1. Despite its name, Ray reads
# it on every system.
ALLOW_OTHER_NODES_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# gRPC methods without side effects, called to check that a cluster accepts our token: of a Ray
# Client server, and of the head node.
CLIENT_SERVER_REQUEST = "/ray.rpc.RayletDriver/ClusterInfo"
HEAD_REQUEST = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@contextmanager
def listen_on_loopback() -> Iterator[None]:
    """Context manager in which Ray starts processes that listen only on 127.0.0.1.

    This is for a private cluster, which a run starts for itself on this machine. No other node
    needs its ports, and its metrics endpoints require no token, so other machines must not reach
    them. The exception is the rendezvous of torch.distributed, which torch binds to all addresses.
    """
    variable_before = os.environ.get(ALLOW_OTHER_NODES_VARIABLE)
    constants: Any = sys.modules.get("ray._private.ray_constants")
    constant_before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    os.environ[ALLOW_OTHER_NODES_VARIABLE] = "0"
    # `ray_constants` read the variable when it was imported, so the constant is set too.
    if constants is not None:
        constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        os.environ.pop(ALLOW_OTHER_NODES_VARIABLE)
        if variable_before is not None:
            os.environ[ALLOW_OTHER_NODES_VARIABLE] = variable_before
        if constants is not None:
            constants.ENABLE_RAY_CLUSTER = constant_before


NODE_DIED = "its node has died"  # part of Ray's report about an actor on a lost node


def log_messages_of_raylets(log: Callable[[str], None]) -> None:
    """Pass the messages of raylets, for example about the death of a worker, to `log`.

    A raylet is Ray's process on each node. By default, Ray prints these messages in long lines
    between the output of the run. A second call changes nothing.
    """
    from ray._private import worker

    module: Any = worker
    if getattr(module.print_to_stdstream, "logs_messages", False):
        return
    print_as_ray = module.print_to_stdstream

    def log_or_print(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet":
            print_as_ray(data, ignore_prefix)
            return
        for line in data["lines"]:
            log(str(line))

    log_or_print.logs_messages = True  # type: ignore[attr-defined]
    module.print_to_stdstream = log_or_print


def open_channel(address: str) -> Any:
    """Open a gRPC channel to `host:port`, authenticated with the token of this machine."""
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(address)


def list_draining_node_ids() -> Iterable[str]:
    """Return the ids of draining nodes. Ray has no public function for this."""
    from ray._private.state import state

    return state.get_draining_nodes()


def list_orphaned_placement_groups() -> list[Any]:
    """Return the placement groups of this job whose creator is a dead actor.

    These groups still reserve resources, or wait for them. Ray removes them only when the driver of
    the creator ends. Groups that a driver or a task created are left out.
    """
    import ray
    from ray.util.placement_group import PlacementGroup

    no_actor = ray.ActorID.nil().binary()
    return [
        PlacementGroup(ray.PlacementGroupID(row.placement_group_id))
        for row in _placement_group_rows()
        if row.creator_actor_dead and row.creator_actor_id != no_actor
    ]


def list_waiting_placement_groups() -> list[bytes]:
    """Return the ids of the placement groups of this job that wait for resources."""
    from ray.core.generated import gcs_pb2

    messages: Any = gcs_pb2  # generated code without types
    table = messages.PlacementGroupTableData
    waiting = (table.PENDING, table.RESCHEDULING)
    return [row.placement_group_id for row in _placement_group_rows() if row.state in waiting]


def _placement_group_rows() -> list[Any]:
    """Return Ray's records of the placement groups of this job, without removed groups."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    messages: Any = gcs_pb2  # generated code without types
    table = messages.PlacementGroupTableData
    job_id = ray.get_runtime_context().get_job_id()
    rows = []
    for entry in state._connect_and_get_accessor().get_placement_group_table():
        row = table.FromString(entry)
        if row.state != table.REMOVED and row.creator_job_id.hex() == job_id:
            rows.append(row)
    return rows


def trainer_class() -> Any:
    """Return `TorchTrainer` without three actors that this project does not need.

    Each of these actors takes seconds to start:

    - The cleaner of placement groups. Without a dashboard, it does not notice that a controller was
      killed, and never ends. Our queue actor removes placement groups instead, see
      `list_orphaned_placement_groups`.
    - The manager of data sets of Ray Data, which this project does not use.
    - The coordinator that requests resources from the autoscaler. The controller would wait for it.
      The pending placement group of the workers already requests the same resources.
    """
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class Policy(FixedScalingPolicy):
        def after_controller_start(self, train_run_context: Any) -> None:
            """Request nothing: see `trainer_class`."""

        def _maybe_send_resource_request(self) -> None:
            """Request nothing: see `trainer_class`."""

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            left_out = (PlacementGroupCleanerCallback, DatasetsCallback)
            return [callback for callback in callbacks if not isinstance(callback, left_out)]

        def _initialize_and_run_controller(self, **settings: Any) -> Any:
            settings["scaling_policy"] = Policy(settings["scaling_policy"].scaling_config)
            return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]

    return Trainer


def is_startup_timeout(error: Exception) -> bool:
    """Return whether Ray Train failed because the workers of a group did not start in time."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import ControllerError

    if not isinstance(error, ControllerError):
        return False
    return isinstance(error.controller_failure, WorkerGroupStartupTimeoutError)


def find_died_workers(error: Exception) -> dict[int, str]:
    """Return Ray's reports about the workers whose death ended their group, by rank.

    Workers on a lost node are left out.
    """
    from ray.exceptions import ActorDiedError

    reports = {}
    for rank, failure in _worker_failures(error).items():
        if isinstance(failure, ActorDiedError) and NODE_DIED not in str(failure):
            reports[rank] = str(failure)
    return reports


def has_only_unreachable_workers(error: Exception) -> bool:
    """Return whether workers could not be reached, and no worker died on a living node.

    In this case, their node is assumed to be lost, even if Ray has not declared it dead yet.
    """
    from ray.exceptions import RayActorError

    failures = _worker_failures(error).values()
    is_any_lost = any(isinstance(failure, RayActorError) for failure in failures)
    return is_any_lost and not find_died_workers(error)


def _worker_failures(error: Exception) -> dict[int, Any]:
    """Return the error of each failed worker of a group, by rank.

    If the health check of a worker failed, this is the error of the health check.
    """
    cause = getattr(error, "cause", error)  # a RayTaskError has the original error as its cause
    failures = getattr(cause, "worker_failures", {}).items()
    return {rank: getattr(failure, "health_check_failure", failure) for rank, failure in failures}


def run_config(name: str, location: dict[str, Any]) -> Any:
    """Return the `RunConfig` for a trainer that logs only errors.

    If a worker or the controller fails, the trainer ends: our driver starts the next group itself.

    Args:
        name: Name of the run, for Ray.
        location: Arguments of `RunConfig` with the place of Ray's own files.
    """
    # The type hints of the public classes in ray.train are those of version 1 of Ray Train.
    from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig

    failures = FailureConfig(max_failures=0, controller_failure_limit=0)
    return RunConfig(
        name=name,
        failure_config=failures,
        logging_config=LoggingConfig("ERROR"),
        **location,
    )
