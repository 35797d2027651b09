"""Tests of ray_internals.py: each private name of Ray exists and behaves as expected."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipeline.launch import dead_workers, ray_internals


def test_head_node_resource_name_matches_ray() -> None:
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    assert ray_internals.HEAD_NODE_RESOURCE == HEAD_NODE_RESOURCE_NAME


def test_job_config_variable_name_matches_ray() -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert ray_internals.JOB_CONFIG_VARIABLE == RAY_JOB_CONFIG_JSON_ENV_VAR


def test_listen_on_loopback_sets_and_restores_rays_node_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import ray_constants, services

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == ray_internals.ALLOW_OTHER_NODES_VARIABLE
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda _: "192.0.2.1")
    address: Any = services.get_node_ip_address
    with ray_internals.listen_on_loopback():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
        assert address() == "127.0.0.1"
    assert ray_constants.ENABLE_RAY_CLUSTER is True
    assert address() == "192.0.2.1"


def test_open_channel_accepts_address_and_supports_unary_requests() -> None:
    channel = ray_internals.open_channel("127.0.0.1:1")
    assert callable(channel.unary_unary(ray_internals.HEAD_REQUEST))
    channel.close()


def test_probe_requests_are_methods_of_ray_services() -> None:
    from ray.core.generated import gcs_service_pb2_grpc, ray_client_pb2_grpc

    for request, module in (
        (ray_internals.HEAD_REQUEST, gcs_service_pb2_grpc),
        (ray_internals.CLIENT_SERVER_REQUEST, ray_client_pb2_grpc),
    ):
        assert request in inspect.getsource(module)


def test_draining_node_ids_come_from_ray_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.state import state

    monkeypatch.setattr(state, "get_draining_nodes", lambda: {"n1": 5})
    assert "n1" in ray_internals.list_draining_node_ids()
    assert list(inspect.signature(type(state).get_draining_nodes).parameters) == ["self"]


def test_orphaned_and_waiting_placement_groups_of_this_job_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    messages: Any = gcs_pb2
    table_row = messages.PlacementGroupTableData
    job = ray.JobID.from_int(1)
    actor = ray.ActorID.of(job, ray.TaskID.for_driver_task(job), 1)
    created = table_row.CREATED
    rows: dict[str, dict[str, Any]] = {
        "orphan": {"creator_actor_dead": True, "state": created},
        "waiting orphan": {"creator_actor_dead": True, "state": table_row.PENDING},
        "removed": {"creator_actor_dead": True, "state": table_row.REMOVED},
        "in use": {"creator_actor_dead": False, "state": created},
        "of another job": {
            "creator_actor_dead": True,
            "state": created,
            "creator_job_id": ray.JobID.from_int(2).binary(),
        },
        "of a driver": {
            "creator_actor_dead": True,
            "state": created,
            "creator_actor_id": ray.ActorID.nil().binary(),
        },
    }
    names = {}
    table = []
    for name, row in rows.items():
        placement_group_id = ray.PlacementGroupID.of(job)
        names[placement_group_id] = name
        usual = {"creator_job_id": job.binary(), "creator_actor_id": actor.binary()}
        entry = table_row(placement_group_id=placement_group_id.binary(), **{**usual, **row})
        table.append(entry.SerializeToString())
    accessor = SimpleNamespace(get_placement_group_table=lambda: table)
    monkeypatch.setattr(state, "_connect_and_get_accessor", lambda: accessor)
    context = SimpleNamespace(get_job_id=job.hex)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    orphans = ray_internals.list_orphaned_placement_groups()
    assert [names[orphan.id] for orphan in orphans] == ["orphan", "waiting orphan"]
    waiting = ray_internals.list_waiting_placement_groups()
    assert [names[ray.PlacementGroupID(identity)] for identity in waiting] == ["waiting orphan"]


def test_trainer_omits_callbacks_with_unused_actors() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def names_of(trainer_class: Any) -> list[str]:
        trainer = trainer_class(
            lambda: None, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig()
        )
        return [type(callback).__name__ for callback in trainer._create_default_callbacks()]

    usual = names_of(TorchTrainer)
    for name in ("PlacementGroupCleanerCallback", "DatasetsCallback"):
        assert name in usual
        usual.remove(name)
    assert names_of(ray_internals.trainer_class()) == usual


def test_trainer_starts_no_autoscaling_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution import scaling_policy
    from ray.train.v2.api.config import ScalingConfig

    announced: list[str] = []
    monkeypatch.setattr(
        scaling_policy.scaling_policy, "TrainAutoscalingCoordinatorClient", announced.append
    )
    monkeypatch.setattr(
        TorchTrainer, "_initialize_and_run_controller", lambda self, **settings: settings
    )
    config = ScalingConfig(num_workers=3)
    trainer = ray_internals.trainer_class()(lambda: None, scaling_config=config)
    usual: Any = scaling_policy.FixedScalingPolicy(config)
    settings = trainer._initialize_and_run_controller(scaling_policy=usual)
    policy = settings["scaling_policy"]
    policy.after_controller_start(SimpleNamespace(run_id="run"))
    decision = policy.make_decision_for_non_running_worker_group()
    assert decision.num_workers == 3
    assert not announced
    usual._send_resource_request = lambda: None
    usual.after_controller_start(SimpleNamespace(run_id="run"))
    assert announced


def test_failed_group_start_differs_from_controller_errors() -> None:
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import ControllerError

    assert ray_internals.is_startup_timeout(ControllerError(WorkerGroupStartupTimeoutError(2)))
    assert not ray_internals.is_startup_timeout(ControllerError(ValueError("x")))
    assert not ray_internals.is_startup_timeout(ValueError("x"))


def test_raylet_messages_are_logged_and_worker_messages_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import worker

    module: Any = worker
    source = inspect.getsource(module.listen_error_messages)
    assert "print_to_stdstream(" in source
    assert '"pid": "raylet"' in source
    printed: list[Any] = []
    monkeypatch.setattr(module, "print_to_stdstream", lambda *given: printed.append(given))
    logged: list[str] = []
    for _ in range(2):  # every connection calls it
        ray_internals.log_messages_of_raylets(logged.append)
    module.print_to_stdstream({"pid": "raylet", "lines": ["a", "b"]}, ignore_prefix=False)
    assert (logged, printed) == (["a", "b"], [])
    module.print_to_stdstream({"pid": 7, "lines": ["c"]}, ignore_prefix=True)
    assert printed == [({"pid": 7, "lines": ["c"]}, True)]


def test_ray_train_names_dead_worker_process_and_node() -> None:
    from ray.core.generated import common_pb2
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
    from ray.train.v2.api.exceptions import WorkerGroupError

    messages: Any = common_pb2
    context = messages.ActorDiedErrorContext(
        error_message="killed", pid=41, node_ip_address="10.0.0.2", actor_id=b"0" * 16
    )
    death = WorkerHealthCheckFailedError("a check failed", ActorDiedError(context))
    failures = {2: ValueError("x"), 1: death}
    error = WorkerGroupError("text", failures)
    of_a_task: Any = RayTaskError("run_worker_group", "text", ValueError("x"))
    of_a_task.cause = error
    for raised in (error, of_a_task):
        [worker] = dead_workers.list_dead_workers(raised)
        assert worker[:3] == (1, "10.0.0.2", 41)
        assert "killed" in worker.report
        assert not ray_internals.has_only_unreachable_workers(raised)
    assert dead_workers.list_dead_workers(ValueError("x")) == []
    assert not ray_internals.has_only_unreachable_workers(
        WorkerGroupError("text", {0: ValueError("x")})
    )
    lost = messages.ActorDiedErrorContext(
        error_message="The actor died because its node has died. Node Id: 5", actor_id=b"0" * 16
    )
    for failure in (ActorDiedError(lost), ActorUnavailableError("connection reset", b"0" * 16)):
        gone = WorkerGroupError("text", {0: WorkerHealthCheckFailedError("x", failure)})
        assert dead_workers.list_dead_workers(gone) == []
        assert ray_internals.has_only_unreachable_workers(gone)


def test_ray_train_run_config_disables_retries_and_sets_storage() -> None:
    config = ray_internals.run_config("group", {"storage_path": "/tmp/x"})
    failures = config.failure_config
    assert (failures.max_failures, failures.controller_failure_limit) == (0, 0)
    assert (config.name, config.storage_path) == ("group", "/tmp/x")


def test_remote_error_has_cause_and_traceback() -> None:
    """pipeline/graph/failures.py and RayMap read these attributes."""
    from ray.exceptions import RayTaskError

    cause = ValueError("why")
    error: Any = RayTaskError("f", "the text", cause)
    assert error.cause is cause
    assert error.traceback_str == "the text"
