"""Tests of configs/cluster: pinned Ray versions, authentication tokens, and no open ports."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import settings as config
from pipeline.data import card_files
from workers.storage.artifact import is_local

REPOSITORY = Path(__file__).resolve().parent.parent
CLUSTER = REPOSITORY / "configs" / "cluster"
RAY = next(
    line.partition("==")[2]
    for line in (REPOSITORY / "constraints.txt").read_text().split()
    if line.startswith("ray==")
)
MANIFESTS = {
    "kuberay-cluster.yaml": "RayCluster",
    "kuberay-job.yaml": "RayJob",
    "kuberay-service.yaml": "RayService",
}
LAUNCHERS = ("ray-aws.yaml", "ray-gcp.yaml")
# Key of the RayCluster in the `spec` of each kind.
CLUSTER_KEYS = {"RayCluster": "", "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
# Fields with content that KubeRay does not define: pods and Ray options.
NOT_KUBERAYS = ("template", "submitterPodTemplate", "rayStartParams", "securityContext")


def body(name: str) -> dict[str, Any]:
    """Return a parsed file; if it has several documents, the first."""
    parsed: dict[str, Any] = next(yaml.safe_load_all((CLUSTER / name).read_text()))
    return parsed


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = body(name)["spec"]
    key = CLUSTER_KEYS[MANIFESTS[name]]
    cluster: dict[str, Any] = spec[key] if key else spec
    return cluster


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Return the pod spec of each group of a manifest, including the submitter."""
    cluster = cluster_spec(name)
    pod_specs = {
        "head": cluster["headGroupSpec"],
        **{group["groupName"]: group for group in cluster["workerGroupSpecs"]},
    }
    specs = {group: spec["template"]["spec"] for group, spec in pod_specs.items()}
    submitter = body(name)["spec"].get("submitterPodTemplate")
    if submitter:
        specs["submitter"] = submitter["spec"]
    return specs


def containers(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, pod in pods(name).items():
        for container in pod["containers"]:
            yield group, container


# ---- Ray's launcher ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_file_matches_ray_schema(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(body(name)))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_starts_nodes_with_token_and_pinned_packages(name: str) -> None:
    launcher = body(name)
    assert re.search(rf":{re.escape(RAY)}-py3\d\d$", launcher["docker"]["image"])
    assert not any("gpus" in option for option in launcher["docker"]["run_options"]), (
        "the head has no GPU"
    )
    assert launcher["head_node_type"] in launcher["available_node_types"]
    assert launcher["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert all(
        (REPOSITORY / mount).exists()
        for mount in launcher["file_mounts"].values()
        if not mount.startswith("~")
    )
    assert "--env RAY_AUTH_MODE=token" in launcher["docker"]["run_options"]
    assert "chmod 600 ~/.ray/auth_token" in launcher["setup_commands"]
    assert launcher["setup_commands"][1:] == [
        "cd ~/accrete && python -m pip install -q '.[all]' -c constraints.txt",
    ], "must install the constrained dependencies without test packages"
    starts = [
        line
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in launcher[key]
        if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


# ---- KubeRay -------------------------------------------------------------------------------------
def known_fields() -> dict[str, tuple[int, ...]]:
    """Return the KubeRay fields in README.md with the versions that added them."""
    section = (CLUSTER / "README.md").read_text().split("## Fields of KubeRay", 1)[1]
    fields = {}
    for version, names in re.findall(r"^\| (\d[\d.]*) \| (.*) \|$", section, re.MULTILINE):
        for field in re.findall(r"`([^`]+)`", names):
            fields[field] = tuple(map(int, version.split(".")))
    return fields


def used_fields(values: Any, path: str) -> Iterator[str]:
    """Yield the dotted paths of all KubeRay fields below `path`."""
    if isinstance(values, list):
        for value in values:
            yield from used_fields(value, path)
    elif isinstance(values, dict):
        for key, value in values.items():
            field = f"{path}.{key}"
            yield field
            if key not in NOT_KUBERAYS:
                yield from used_fields(value, field)


@pytest.mark.parametrize("name", MANIFESTS)
def test_used_kuberay_fields_are_listed_and_determine_oldest_version(name: str) -> None:
    kind = MANIFESTS[name]
    prefix = f"RayJob.{CLUSTER_KEYS[kind]}" if kind == "RayJob" else f"{kind}.{CLUSTER_KEYS[kind]}"
    fields = known_fields()
    least = re.search(r"KubeRay (\d+\.\d+\.\d+) or newer", (CLUSTER / name).read_text())
    assert least
    oldest = tuple(map(int, least[1].split(".")))
    needed = []
    for used in used_fields(body(name)["spec"], kind):
        field = used
        if CLUSTER_KEYS[kind] and used.startswith(f"{prefix}."):
            field = used.replace(prefix, "RayCluster", 1)
        assert field in fields, f"{field}: add it to README.md, with the first KubeRay version"
        needed.append(fields[field])
    assert max(needed) == oldest


def test_the_three_manifests_start_the_same_cluster() -> None:
    """They are equal except for fields that only one needs: dashboard host, job config, service
    port and token, and autoscaling."""
    specs = []
    for name in MANIFESTS:
        spec = cluster_spec(name)
        for key in ("enableInTreeAutoscaling", "autoscalerOptions"):
            spec.pop(key, None)
        head = spec["headGroupSpec"]
        head["rayStartParams"].pop("dashboard-host", None)
        pod = head["template"]["spec"]
        pod.pop("serviceAccountName")
        pod["volumes"] = [each for each in pod["volumes"] if each["name"] != "config"]
        mounts = pod["containers"][0]["volumeMounts"]
        pod["containers"][0]["volumeMounts"] = [each for each in mounts if each["name"] != "config"]
        ports = pod["containers"][0]["ports"]
        pod["containers"][0]["ports"] = [each for each in ports if each["name"] != "serve"]
        worker = spec["workerGroupSpecs"][0]
        for key in ("replicas", "minReplicas", "maxReplicas"):
            worker.pop(key)
        container = worker["template"]["spec"]["containers"][0]
        container.pop("resources")
        container.pop("env", None)
        specs.append(spec)
    assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_what_kuberay_requires(name: Any) -> None:
    manifest, cluster = body(name), cluster_spec(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", MANIFESTS[name])
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", manifest["metadata"]["name"])
    assert cluster["rayVersion"] == RAY
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), (
            "KubeRay accepts only strings"
        )
    for group in cluster["workerGroupSpecs"]:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_kuberay_job_has_deadline_and_shuts_down_its_cluster() -> None:
    job, config_map = yaml.safe_load_all((CLUSTER / "kuberay-job.yaml").read_text())
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["activeDeadlineSeconds"] == 8 * 3600
    head = pods("kuberay-job.yaml")["head"]
    (volume,) = [each for each in head["volumes"] if each["name"] == "config"]
    (mount,) = [each for each in head["containers"][0]["volumeMounts"] if each["name"] == "config"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    folder, _, file = spec["entrypoint"].split()[-1].rpartition("/")
    assert folder == mount["mountPath"]
    assert file in config_map["data"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_containers_use_only_the_token_provided_by_the_operator(name: Any) -> None:
    """The operator calls the cluster with the token of `authOptions`, and gives it to the first
    container of each pod. A different token in a container would lock the operator out."""
    assert cluster_spec(name)["authOptions"] == {"mode": "token"}
    assert tuple(map(int, RAY.split("."))) >= (2, 52, 0), (
        "KubeRay refuses tokens with older Ray versions"
    )
    assert [len(pod["containers"]) for pod in pods(name).values()] == [1] * len(pods(name))
    for group, container in containers(name):
        names = {entry["name"] for entry in container.get("env", ())}
        assert not names & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}, group


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_container_has_the_pinned_image_and_limits(name: Any) -> None:
    assert [group for group, _ in containers(name)] == ["head", "workers", "submitter"][
        : len(pods(name))
    ]
    for group, container in containers(name):
        assert container["image"].endswith(f":ray{RAY}-py311-cpu"), group
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys()
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pods(name)[group]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_mount_storage_and_bounded_cache_with_termination_grace_period(name: Any) -> None:
    for group in ("head", "workers"):
        pod = pods(name)[group]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert mounts.items() >= {"storage": "/storage", "cache": "/tmp"}.items()
        assert volumes["storage"]["persistentVolumeClaim"]["claimName"]
        assert re.fullmatch(r"\d+Gi", volumes["cache"]["emptyDir"]["sizeLimit"])
        assert pod["terminationGracePeriodSeconds"] >= 60


def test_kuberay_cluster_dashboard_listens_on_loopback() -> None:
    assert (
        cluster_spec("kuberay-cluster.yaml")["headGroupSpec"]["rayStartParams"]["dashboard-host"]
        == "127.0.0.1"
    )


def test_kuberay_service_matches_ray_schema_and_names_existing_deployments() -> None:
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve.schema import ServeDeploySchema

    from pipeline.serving import ray_service
    from pipeline.serving.deployment import Deployment

    text = body("kuberay-service.yaml")["spec"]["serveConfigV2"]
    (served,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert served.import_path == f"{ray_service.__name__}:{ray_service.application.__name__}"
    builder: Any = ray_service.application
    assert isinstance(
        call_user_app_builder_with_args_if_necessary(builder, served.args), Application
    )
    arguments = ray_service.ServiceArguments.model_validate(served.args)
    name = body("kuberay-service.yaml")["metadata"]["name"]
    assert arguments.hosts == [f"{name}-serve-svc"], "the Service that KubeRay creates"
    head = pods("kuberay-service.yaml")["head"]["containers"][0]
    assert {"name": "serve", "containerPort": 8000} in head["ports"], (
        "if ports are listed, KubeRay creates the Service from the port `serve`"
    )
    deployments: Any = (ray_service.Ingress, Deployment)
    assert [each.name for each in served.deployments] == [each.name for each in deployments]


def test_service_workers_have_cpus_for_min_and_max_replicas() -> None:
    from pipeline.serving.deployment import TARGET_ONGOING_REQUESTS

    spec = cluster_spec("kuberay-service.yaml")
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["headGroupSpec"]["template"]["spec"]["serviceAccountName"] == "", (
        "every pod of that account would get the autoscaler's role"
    )
    text = body("kuberay-service.yaml")["spec"]["serveConfigV2"]
    ingress, model = yaml.safe_load(text)["applications"][0]["deployments"]
    scaling = model["autoscaling_config"]
    assert scaling["target_ongoing_requests"] == TARGET_ONGOING_REQUESTS
    group = spec["workerGroupSpecs"][0]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    readers = ingress["num_replicas"] * ingress["ray_actor_options"]["num_cpus"]
    for nodes, replicas in (("minReplicas", "min_replicas"), ("maxReplicas", "max_replicas")):
        needed = scaling[replicas] * model["ray_actor_options"]["num_cpus"] + readers
        assert needed <= group[nodes] * cpus


def test_service_reads_token_from_optional_secret() -> None:
    from pipeline.serving.serve_command import TOKEN

    container = pods("kuberay-service.yaml")["workers"]["containers"][0]
    (variable,) = container["env"]
    assert variable["name"] == TOKEN
    secret = variable["valueFrom"]["secretKeyRef"]
    assert secret["optional"] is True, "pods must start without the Secret"
    command = "kubectl create secret generic {name} --from-literal={key}=".format(**secret)
    assert command in (CLUSTER / "README.md").read_text()


# ---- all files -----------------------------------------------------------------------------------
def commands() -> list[list[str]]:
    """Return the arguments of each run command in README.md and slurm.sh."""
    texts = [
        (CLUSTER / "README.md").read_text(),
        (CLUSTER / "slurm.sh").read_text(),
    ]
    blocks = re.findall(
        r"(?:pipeline run|slurm\.sh) (\S*configs/\S+\.yaml(?: --set \S+)*)", "\n".join(texts)
    )
    return [shlex.split(line) for line in blocks]


def test_cluster_commands_use_existing_configs_and_settings() -> None:
    assert len(commands()) >= 6
    for path, *rest in commands():
        settings = [word for word in rest if word != "--set"]
        loaded = config.load(str(REPOSITORY / path), settings)
        assert loaded.cluster.workers >= 1
        assert loaded.storage != "storage", "all nodes must see the storage"
        assert is_local(loaded.storage) or not loaded.tracking.enabled, "MLflow needs local storage"
        for entry in loaded.stream.tasks:
            source = card_files.load_without_source(entry.card).source
            assert source.format == "sklearn", "every node must have the data"


def test_cluster_files_contain_no_secret_and_no_wildcard_address() -> None:
    for path in CLUSTER.iterdir():
        text = path.read_text()
        assert "0.0.0.0" not in text, path
        assert not re.search(
            r"\b[0-9a-f]{32,}\b|BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}", text
        ), path


# ---- Slurm ---------------------------------------------------------------------------------------
FAKES = {
    "scontrol": """echo "scontrol $*" >> "$SAID"
case "$*" in
*small*) echo node1;;
*large*) printf 'node2\\nnode3\\n';;
*show*) printf 'node1\\nnode2\\nnode3\\n';;
esac""",
    "hostname": """case "$1" in
--ip-address) echo "${HOST_ADDRESS:-10.0.0.7 fe80::1}";;
--all-ip-addresses) echo "10.0.0.7 fe80::1";;
esac""",
    # Runs the task of one node, and prints the message of the real srun if the task fails or is
    # signalled.
    "srun": """words="srun $* mode=$RAY_AUTH_MODE"
echo "${words//[[:space:]]/ }" >> "$SAID"
while [[ "$1" == --* ]]; do shift; done
"$@" & task=$!
trap 'echo "srun: error: Killed" >&2; kill "$task"' TERM
wait "$task" || { echo "srun: error: exit code $?" >&2; exit 1; }""",
    "ray": """case "$1" in
health-check) echo "health-check $3" >> "$SAID"; [ "$(grep -c '^health-check' "$SAID")" -ge 3 ];;
start) [ -z "$RAY_FAILS" ] || exit 1
    echo "ray ${*: -1}" >> "$SAID"
    trap 'echo stopped >> "$SAID"; exit 1' TERM
    while :; do sleep 0.05; done;;
esac""",
    "python": """case "$1" in
-c) case "$2" in
    *secrets*) echo faketoken;;
    *socket*) echo "7001 7002 7003";;
    *ray.nodes*) echo "nodes $3 $4" >> "$SAID"; [ "$(grep -c '^nodes' "$SAID")" -ge 2 ];;
    esac;;
-m) token=$(cat "$RAY_AUTH_TOKEN_PATH") rights=$(stat -c %a "$RAY_AUTH_TOKEN_PATH")
    trap 'asked=yes; echo "driver was asked to end" >> "$SAID"' TERM
    echo "driver $* address=$RAY_ADDRESS mode=$RAY_AUTH_MODE token=$token rights=$rights" >> "$SAID"
    [ -n "$STAYS" ] || exit "${DRIVER_CODE:-0}"
    while [ -z "$asked" ]; do sleep 0.05; done
    for _ in {1..20}; do sleep 0.05; done  # it saves
    exit "${ENDS_WITH:-143}";;
esac""",
    "sleep": "exec /bin/sleep 0.02",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on three nodes. Its programs only log their arguments."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in FAKES.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)
    return {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "8",
        "ACCRETE_PYTHON": "python",
        "ACCRETE_RAY": "ray",
        "HOME": str(tmp_path),
    }


def job(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sh"), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def logged_commands(env: dict[str, str]) -> list[str]:
    return Path(env["SAID"]).read_text().splitlines()


def test_slurm_script_is_executable_valid_bash() -> None:
    assert subprocess.run(["bash", "-n", str(CLUSTER / "slurm.sh")], check=False).returncode == 0
    assert (CLUSTER / "slurm.sh").stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize("code", [0, 2])
def test_slurm_job_starts_head_workers_driver_and_stops(
    slurm: Any, code: int, tmp_path: Path
) -> None:
    process = job({**slurm, "DRIVER_CODE": str(code)}, "configs/a b.yaml", "--set", "seed=1")
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, out + err
    ray_log = tmp_path / "ray-42.log"
    assert ray_log.exists() == bool(code), "Ray's output must be kept only if the run fails"
    if code:
        assert "srun: error" not in ray_log.read_text(), "no task may be killed"
    assert "srun" not in err
    lines = logged_commands(slurm)
    starts = [i for i, line in enumerate(lines) if line.startswith("srun")]
    head, other_lines = (lines[i] for i in starts)
    for words in (
        "--nodelist=node1",
        "--head",
        "--node-ip-address=10.0.0.7",
        "--port=7001",
        "--dashboard-host=127.0.0.1",
        "--dashboard-port=7002",
        "--cpus-per-task=8",
        "--ray-client-server-port=7003",
        "--num-cpus=8",
        "--block",
        "--export=ALL",
        " /tmp/ray-42 ",
        "mode=token",
    ):
        assert words in head
    for words in (
        "--nodes=2",
        "--ntasks=2",
        "--exclude=node1",
        "--address=10.0.0.7:7001",
        "--cpus-per-task=8",
        "--num-cpus=8",
        "--block",
        "--export=ALL",
        " /tmp/ray-42 ",
        "mode=token",
    ):
        assert words in other_lines
    assert lines.count("ray --temp-dir=/tmp/ray-42") == 2, (
        "both starts must use the folder of this job"
    )
    asked = [i for i, line in enumerate(lines) if line == "health-check 10.0.0.7:7001"]
    assert len(asked) == 3
    assert starts[0] < max(asked) < starts[1], "workers must start after the head answers"
    assert lines.count("nodes 10.0.0.7:7001 3") == 2, (
        "it must poll until all three nodes have joined"
    )
    driver = next(i for i, line in enumerate(lines) if line.startswith("driver"))
    assert lines[driver] == (
        "driver -m pipeline run configs/a b.yaml --set seed=1 address=10.0.0.7:7001 mode=token "
        "token=faketoken rights=600"
    )
    assert driver > max(i for i, line in enumerate(lines) if line.startswith("nodes"))
    assert lines.count("stopped") == 2
    assert not any("requeue" in line for line in lines)
    assert not list(tmp_path.glob(".ray-*")), "the token must be deleted"


def test_a_job_of_an_array_runs_one_seed(slurm: Any) -> None:
    process = job({**slurm, "SLURM_ARRAY_TASK_ID": "7"}, "configs/digits-seeds.yaml")
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    (driver,) = [line for line in logged_commands(slurm) if line.startswith("driver")]
    assert driver.startswith("driver -m pipeline run configs/digits-seeds.yaml --set seeds=[7] ")


def test_ray_runs_on_all_components_of_a_heterogeneous_job(slurm: Any) -> None:
    components = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "small",
        "SLURM_CPUS_PER_TASK_HET_GROUP_0": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "large[1-2]",
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "16",
    }
    process = job({**slurm, **components}, "configs/demo.yaml")
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    lines = logged_commands(slurm)
    head, large = [line for line in lines if line.startswith("srun")]
    for words in ("--het-group=0", "--nodelist=node1", "--head", "--num-cpus=2"):
        assert words in head
    for words in ("--het-group=1", "--nodes=2", "--num-cpus=16", "--address=10.0.0.7:7001"):
        assert words in large
    assert "--cpus-per-task=16" in large
    assert lines.count("nodes 10.0.0.7:7001 3") == 2


def test_slurm_head_uses_reachable_address_instead_of_loopback(slurm: Any) -> None:
    process = job({**slurm, "HOST_ADDRESS": "127.0.1.1"}, "configs/demo.yaml")
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    assert any("--node-ip-address=10.0.0.7" in line for line in logged_commands(slurm))


@pytest.mark.parametrize(
    ("number", "ends_with", "requeues"),
    [(signal.SIGUSR1, 143, 1), (signal.SIGTERM, 143, 0), (signal.SIGUSR1, 0, 0)],
    ids=["preempted", "cancelled", "preempted when it had finished"],
)
def test_only_preempted_unfinished_slurm_job_is_requeued(
    slurm: Any, number: Any, ends_with: int, requeues: int, tmp_path: Path
) -> None:
    process = job({**slurm, "STAYS": "1", "ENDS_WITH": str(ends_with)}, "configs/demo.yaml")
    log = Path(slurm["SAID"])
    while not (log.exists() and any(line.startswith("driver") for line in logged_commands(slurm))):
        assert process.poll() is None, process.communicate()
        os.sched_yield()
    process.send_signal(number)
    out, err = process.communicate(timeout=900)
    assert process.returncode == ends_with, out + err
    lines = logged_commands(slurm)
    assert lines.count("driver was asked to end") == 1
    assert lines.count("stopped") == 2
    assert lines.count("scontrol requeue 42") == requeues
    assert not list(tmp_path.glob(".ray-*"))


def test_two_signals_stop_the_driver_only_once(slurm: Any) -> None:
    """A job preempted shortly before its time limit gets two signals. A second signal to the driver
    would end it before it has saved."""
    process = job({**slurm, "STAYS": "1"}, "configs/demo.yaml")
    log = Path(slurm["SAID"])
    for awaited in ("driver -m", "driver was asked to end"):
        while not (log.exists() and awaited in log.read_text()):
            assert process.poll() is None, process.communicate()
            os.sched_yield()
        process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 143, out + err
    lines = logged_commands(slurm)
    assert lines.count("driver was asked to end") == 1
    assert lines.count("scontrol requeue 42") == 1


def test_slurm_script_allows_requeue() -> None:
    assert "#SBATCH --requeue" in (CLUSTER / "slurm.sh").read_text().splitlines()


def test_failed_ray_start_ends_job_with_message(slurm: Any, tmp_path: Path) -> None:
    process = job({**slurm, "RAY_FAILS": "1"}, "configs/demo.yaml")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "accrete: Ray did not start on a node" in err
    assert not any(line.startswith("driver") for line in logged_commands(slurm))
    assert not list(tmp_path.glob(".ray-*"))


def test_embedded_python_of_slurm_script_works(slurm: Any) -> None:
    """Check the Python code in slurm.sh, which the fake `python` does not run."""
    codes = re.findall(r"'(import [^']*)'", (CLUSTER / "slurm.sh").read_text())
    assert len(codes) == 3
    token = subprocess.run(
        [sys.executable, "-c", codes[0]], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    ports: set[int] = set()
    for job_id in range(1000, 1010):
        command = [sys.executable, "-S", "-c", codes[1], str(job_id)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ports |= {int(port) for port in printed.split()}
    assert len(ports) == 30, "jobs on one node must not share ports"
    assert max(ports) < 32768, "the kernel assigns higher ports to any process"
    compile(codes[2], "slurm.sh", "exec")
