"""Tests of the calls of KubeRay's operator to a Ray head node that requires a token.

The operator polls these while a RayJob or a RayService runs; if a call fails, it considers the
cluster dead. The methods, paths, header and response fields are those of KubeRay's dashboard client
and probes, versions 1.5 to 1.7.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from pipeline.tracking import ui
from tests import small_run
from tests.several_nodes import nodes_up, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[1]
SERVE = "/api/serve/applications/"
JOBS = "/api/jobs/"


class Operator:
    """The operator's dashboard client, with or without a token."""

    def __init__(self, port: int, token: str = "") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"x-ray-authorization": f"Bearer {token}"} if token else {}

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        return requests.request(
            method, self.url + path, json=body, headers=self.headers, timeout=120
        )

    def answer(self, method: str, path: str, body: Any = None) -> Any:
        """Call the dashboard, require success, and return the JSON of the response."""
        response = self.call(method, path, body)
        assert 200 <= response.status_code <= 299, (path, response.status_code, response.text)
        return response.json() if response.text else None


def token() -> str:
    """Return the token of the Ray processes on this machine."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    return os.environ.get("RAY_AUTH_TOKEN") or Path(path).read_text().strip()


def manifest(name: str) -> Any:
    """Return the first document of a manifest, which is the Ray resource."""
    return next(yaml.safe_load_all((REPOSITORY / "configs" / "cluster" / name).read_text()))


def test_kuberay_operator_follows_job_and_service_with_token_only(tmp_path: Path) -> None:
    port = ui.find_port("127.0.0.1")
    body = small_run.make_body(
        tmp_path, small_run.make_cards(tmp_path, ["a"]), ["meat"], cluster={"workers": 1}
    )
    config = small_run.write_config(tmp_path / "config.yaml", body)
    with nodes_up([3], dashboard_port=port) as nodes:
        operator = Operator(port, token())
        wait_for(lambda: is_listening(port), 120)
        wait_for(lambda: operator.call("GET", "/api/version").status_code == 200, 120)
        check_probes(port)
        check_strangers(port)
        check_job(operator, config)
        model = str(tmp_path / "model")
        small_run.run(["bundle", config, "--out", model], tmp_path / "bundle.txt")
        check_service(operator, model)
        assert nodes.nodes


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def check_probes(port: int) -> None:
    """Check the health probe of a pod, which sends no token."""
    response = Operator(port).call("GET", "/api/gcs_healthz")
    assert (response.status_code, response.text) == (200, "success")


def check_strangers(port: int) -> None:
    calls = [("GET", JOBS), ("POST", JOBS), ("GET", SERVE), ("PUT", SERVE), ("DELETE", JOBS + "x")]
    for method, path in calls:
        assert Operator(port).call(method, path, {}).status_code == 401, (method, path)
        assert Operator(port, "wrong" * 8).call(method, path, {}).status_code == 403, (method, path)


def check_job(operator: Operator, config: str) -> None:
    """Submit the job of our manifest with a small config, and follow it until it ends."""
    entrypoint = manifest("kuberay-job.yaml")["spec"]["entrypoint"].split()
    entrypoint[0] = sys.executable
    entrypoint[-1] = config
    name = "accrete-demo-x7k2p"
    request = {
        "entrypoint": " ".join(entrypoint),
        "submission_id": name,
        "runtime_env": {"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
    }
    assert operator.call("GET", JOBS + name).status_code == 404, "the job must not exist yet"
    assert operator.answer("POST", JOBS, request)["job_id"] == name
    again = operator.call("POST", JOBS, request)
    assert again.status_code == 500
    assert "Please use a different submission_id" in again.text

    def has_ended() -> Any:
        job = operator.answer("GET", JOBS + name)
        return job["status"] in ("SUCCEEDED", "FAILED", "STOPPED") and job

    job = wait_for(has_ended, 400)
    log = operator.answer("GET", f"{JOBS}{name}/logs")["logs"]
    assert job["status"] == "SUCCEEDED", log
    assert job["submission_id"] == name
    assert job["entrypoint"] == request["entrypoint"]
    assert 0 < job["start_time"] < job["end_time"]
    assert isinstance(job["message"], str)
    assert "stages run" in log
    assert [listed["submission_id"] for listed in operator.answer("GET", JOBS)] == [name]
    operator.answer("DELETE", JOBS + name)
    assert operator.call("GET", JOBS + name).status_code == 404


def check_service(operator: Operator, model: str) -> None:
    """Deploy the application of our manifest with a small model and one replica per deployment."""
    details = operator.answer("GET", f"{SERVE}?api_type=declarative")
    assert details["applications"] == {}
    serve = yaml.safe_load(manifest("kuberay-service.yaml")["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    application["args"]["bundle"] = model
    application["runtime_env"] = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
    for deployment in application["deployments"]:
        deployment.pop("autoscaling_config", None)
        deployment["num_replicas"] = 1
    port = ui.find_port("127.0.0.1")
    serve["http_options"] = {"host": "127.0.0.1", "port": port}
    operator.answer("PUT", SERVE, serve)

    def has_settled() -> Any:
        found = operator.answer("GET", f"{SERVE}?api_type=declarative")["applications"]
        state = found.get(application["name"], {})
        return state.get("status") in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY") and state

    state = wait_for(has_settled, 300)
    assert state["status"] == "RUNNING", state["message"]
    statuses = {name: each["status"] for name, each in state["deployments"].items()}
    assert statuses == {each["name"]: "HEALTHY" for each in application["deployments"]}
    tasks = requests.get(f"http://127.0.0.1:{port}/tasks", timeout=60).json()["tasks"]
    assert [task["name"] for task in tasks] == ["a"]
    health = requests.get(f"http://127.0.0.1:{port}/-/healthz", timeout=60)
    assert (health.status_code, health.text) == (200, "success"), (
        "the probe of a worker pod must succeed"
    )
