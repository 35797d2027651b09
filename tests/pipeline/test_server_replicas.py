"""Tests of a server with several replicas: one retry after a replica dies, and checks of
options and resources before the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline import cli
from pipeline.serving.replicas import ReplicaSettings
from workers.errors import UserError


class FakeHandle:
    """A fake deployment handle. Each call takes the next outcome: a reply or an exception."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[bytes] = []
        self.predict = self

    def remote(self, data: bytes) -> Any:
        self.asked.append(data)
        outcome = self.outcomes.pop(0)

        async def response() -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return response()


def predict(handle: FakeHandle) -> Any:
    from pipeline.serving.deployment import make_predict

    async def main() -> Any:
        return await make_predict(handle)(b"body")  # type: ignore[arg-type]

    return asyncio.run(main())


def test_request_of_a_dead_replica_is_answered_by_another() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from pipeline.serving.http_server import Reply

    reply = Reply(200, {"predictions": []})
    for death in (ActorDiedError(), ActorUnavailableError("gone", None)):
        handle = FakeHandle(death, reply)
        assert predict(handle) == reply
        assert handle.asked == [b"body", b"body"]


def test_request_is_not_retried_on_a_third_replica() -> None:
    from ray.exceptions import ActorDiedError

    handle = FakeHandle(ActorDiedError(), ActorDiedError(), AssertionError())
    reply = predict(handle)
    assert reply.status == 503
    assert "send this request again later" in reply.body["error"]
    assert len(handle.asked) == 2


def test_request_to_full_queue_is_not_retried() -> None:
    from ray.serve.exceptions import BackPressureError

    handle = FakeHandle(BackPressureError(320, 320))
    assert predict(handle).status == 503
    assert len(handle.asked) == 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("2",), ReplicaSettings(2, 2)),
        (("1:4", 2), ReplicaSettings(1, 4, 2)),
        (("1", 1, 0.25), ReplicaSettings(gpus=0.25)),
        (("1", 1, 2.0), ReplicaSettings(gpus=2.0)),
    ],
)
def test_replica_options_are_parsed(options: Any, settings: ReplicaSettings) -> None:
    assert ReplicaSettings.parse(*options) == settings
    assert settings.is_scaled == (options[0] == "1:4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("0",), "--replicas is '0'; give a number of at least 1, or MIN:MAX"),
        (("4:2",), "--replicas is '4:2'"),
        (("-1",), "--replicas is '-1'"),
        (("many",), "--replicas is 'many'"),
        (("1", 0), "--cpus is 0"),
        (("1", 1, 1.5), "--gpus is 1.5; give a fraction"),
        (("1", 1, -1.0), "--gpus is -1"),
        (("1", 1, float("nan")), "--gpus is nan"),
    ],
)
def test_invalid_replica_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReplicaSettings.parse(*options)


def test_deployment_requests_configured_resources_and_replicas() -> None:
    from pipeline.serving.deployment import build_deployment

    scaled = build_deployment(ReplicaSettings(1, 3, 2, 0.5))
    assert scaled.ray_actor_options == {"num_cpus": 2, "num_gpus": 0.5}
    limits = scaled._deployment_config.autoscaling_config
    assert (limits.min_replicas, limits.max_replicas) == (1, 3)
    assert build_deployment(ReplicaSettings(2, 2)).num_replicas == 2


def test_missing_gpus_are_reported_before_replicas_start() -> None:
    from pipeline.serving.application import check_replica_gpus

    class FakeRay:
        def cluster_resources(self) -> dict[str, float]:
            return {"GPU": 1.0}

    check_replica_gpus(FakeRay(), ReplicaSettings(2, 4, 1, 0.5), is_private=True)
    check_replica_gpus(FakeRay(), ReplicaSettings(3, 4, 1, 0.5), is_private=False)
    with pytest.raises(UserError, match=r"3 replicas with --gpus 0.5 need 1.5 GPUs, and this .* 1"):
        check_replica_gpus(FakeRay(), ReplicaSettings(3, 4, 1, 0.5), is_private=True)


def test_server_refuses_ray_client_address(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.serving import application

    monkeypatch.setattr(application, "connect", lambda cluster: pytest.fail("it has connected"))
    with (
        pytest.raises(UserError, match=r"'ray://10.0.0.1:10001' is an address for Ray Client"),
        application.started("ray://10.0.0.1:10001", ReplicaSettings(), 1),
    ):
        pass


def test_serve_command_checks_options_before_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serve", "model", "--replicas", "2:1"]) == 2
    assert "--replicas is '2:1'" in capfd.readouterr().err
