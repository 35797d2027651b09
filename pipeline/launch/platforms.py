"""The files by which a config runs on Slurm, on Kubernetes or on a cloud, for a person to read."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from pipeline.config.invocation import this_python
from pipeline.config.settings import Config
from pipeline.config.version import CHECKOUT, COMMIT, git_commit
from pipeline.launch.machines import machine_for
from pipeline.launch.portable import Portable
from pipeline.launch.sizes import MEMORY_GB_PER_CPU, Size
from pipeline.launch.template import KeyPath, read_template, with_directives, with_values
from workers.errors import UserError
from workers.storage.artifact import is_local

VOLUME = "/storage"  # where pods see the claim
CLAIM = "accrete-storage"
SERVICE_SUFFIX = "-model"  # of the name of a service
RUN_FOLDER = "/home/ray/run"  # where the head's pod sees a config
IMAGE = "accrete:ray2.60.0-py311"
CACHE_SIZE = "60Gi"
LONGEST_NAME = 40  # characters: KubeRay adds some, and Kubernetes takes 63
DIGEST = 6  # characters of a digest, where a name had to be changed
LARGEST_INDEX = 1000  # of a job array, unless Slurm is configured otherwise
SERVING_NODES = (2, 4)  # fewest and most that serve a bundle
REPLICAS_PER_NODE = 3  # of one CPU each, where they take no GPU
PAGE = "http://127.0.0.1:8265"
JOB = f"job submit --address {PAGE} --working-dir ."
NO_ACCOUNT = "nodes have no role that may use the bucket: name one with --service-account"
OTHER_CHARACTERS = re.compile(r"[^a-z0-9-]+")
IMAGE_NAME = re.compile(r"[a-z0-9][\w./:-]*")
AWS_HEAD = "m6i.2xlarge"
CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # what its roles allow


@dataclass(frozen=True)
class Submission:
    """files: text by name. commands: what a person types to submit, from the checkout."""

    files: dict[str, str]
    commands: list[str]


@dataclass(frozen=True)
class Pods:
    """What a person chooses of the pods on Kubernetes.

    image: without the device at its end. selector, tolerations: of nodes for workers, `KEY=VALUE`.
    account: service account, which stands for a role of the cloud. secret: its keys become
    environment variables.
    """

    image: str = IMAGE
    selector: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    account: str = "default"
    secret: str = ""


@dataclass(frozen=True)
class Machines:
    """What a person chooses of machines on a cloud. image: of machines with GPUs. project: of
    Google Cloud. account: instance profile on AWS, e-mail of a service account on Google Cloud."""

    cloud: str = "aws"
    is_spot: bool = False
    image: str = ""
    project: str = ""
    account: str = ""


def name_of(config: Config, suffix: str = "") -> str:
    """Return the name of a run as platforms take it: other runs have other names."""
    full = f"accrete-{config.name}{suffix}"
    name = OTHER_CHARACTERS.sub("-", full.lower()).strip("-")
    if name == full and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(full.encode()).hexdigest()[:DIGEST]
    return f"{name[: LONGEST_NAME - DIGEST - 1].strip('-')}-{digest}"


# ---- Slurm ---------------------------------------------------------------------------------------
def slurm(run: Portable, size: Size, folder: str, with_array: bool = False) -> Submission:
    """Return the script and the config of a run on Slurm.

    with_array: a job for each of the config's seeds. Raise `UserError` when it has none.
    """
    name = name_of(run.config)
    directives = [
        f"--job-name={name}",
        f"--nodes={size.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={size.cpus}",
        f"--mem={size.memory_gb}G",
    ]
    if size.gpus:
        directives.append(f"--gpus-per-node={size.gpus}")
    log = f"{name}-%j.log"
    if with_array:
        directives.append(f"--array={','.join(map(str, array_seeds(run.config)))}")
        log = f"{name}-%A_%a.log"
    directives += [
        f"--time={size.hours:02d}:00:00",
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
        f"--output={log}",
    ]
    script = with_directives(read_template("slurm.sh"), directives)
    config = os.path.join(folder, run.file)
    command = shlex.join(["sbatch", os.path.join(folder, "slurm.sh"), config])
    if Path.cwd() != CHECKOUT:  # whose environment the script looks for
        python = this_python()
        ray = os.path.join(os.path.dirname(python), "ray")
        command = f"ACCRETE_PYTHON={shlex.quote(python)} ACCRETE_RAY={shlex.quote(ray)} {command}"
    commands = [command]
    return Submission({"slurm.sh": script, **run.files}, commands)


def array_seeds(config: Config) -> tuple[int, ...]:
    """Return the seeds of a config, each the index of a job. Raise `UserError` where none can."""
    if not config.seeds:
        raise UserError("--array makes a job of each seed, and the config has no `seeds`; add them")
    if max(config.seeds) > LARGEST_INDEX:
        raise UserError(
            f"--array: seed {max(config.seeds)} is more than {LARGEST_INDEX}, the largest index of "
            "a job array; choose smaller seeds, or leave --array out"
        )
    return config.seeds


# ---- Kubernetes ----------------------------------------------------------------------------------
def kuberay(run: Portable, size: Size, folder: str, pods: Pods) -> Submission:
    """Return the manifests of a run on Kubernetes: a job, a cluster that stays, a service.

    Raise `UserError` when the image is no name to which the device can be added.
    """
    check_image(pods.image)
    name = name_of(run.config)
    storage = run.config.storage
    has_claim = is_local(storage)
    spec: KeyPath = ("spec",)
    cluster = {("metadata", "name"): name, **cluster_values(spec, size, pods, has_claim)}
    job = {
        ("metadata", "name"): name,
        ("spec", "entrypoint"): f"python -m pipeline run {RUN_FOLDER}/{run.file}",
        ("spec", "activeDeadlineSeconds"): size.hours * 3600,
        (*spec, "submitterPodTemplate", "spec", "containers", 0, "image"): f"{pods.image}-cpu",
        **cluster_values((*spec, "rayClusterSpec"), size, pods, has_claim, config_map=name),
    }
    template, _, _ = read_template("kuberay-job.yaml").partition("---\n")
    files = {
        "kuberay-job.yaml": f"{with_values(template, job)}---\n{config_map(name, run.files)}",
        "kuberay-cluster.yaml": with_values(read_template("kuberay-cluster.yaml"), cluster),
        "kuberay-service.yaml": kuberay_service(run.config, pods, has_claim),
    }
    manifest = os.path.join(folder, "kuberay-job.yaml")
    return Submission(files, [shlex.join(["kubectl", "apply", "-f", manifest])])


def check_image(image: str) -> None:
    """Raise `UserError` when an image is no name to which the device can be added."""
    if IMAGE_NAME.fullmatch(image) and not image.endswith(("-cpu", "-gpu")):
        return
    raise UserError(
        f"--image is {image!r}; give the name and tag that the images have in the registry, "
        f"without -gpu or -cpu and without a digest, such as registry/{IMAGE}"
    )


def cluster_values(
    spec: KeyPath, size: Size, pods: Pods, has_claim: bool, config_map: str = ""
) -> dict[KeyPath, Any]:
    """Return the values of a RayCluster. spec: where it stands in the manifest. has_claim: whether
    storage is a volume. config_map: holds the config, for the head; empty for none."""
    head = (*spec, "headGroupSpec", "template", "spec")
    group = (*spec, "workerGroupSpecs", 0)
    worker = (*group, "template", "spec")
    device = "cpu"
    amounts: dict[str, Any] = {"cpu": str(size.cpus), "memory": f"{size.memory_gb}Gi"}
    tolerations = [toleration(text) for text in pods.tolerations]
    if size.gpus:
        device = "gpu"
        amounts["nvidia.com/gpu"] = size.gpus
        tolerations.insert(0, {"key": "nvidia.com/gpu", "operator": "Exists"})
    values: dict[KeyPath, Any] = {
        (*worker, "nodeSelector"): dict(pair(text, "--select") for text in pods.selector),
        (*worker, "tolerations"): tolerations,
        (*worker, "containers", 0, "image"): f"{pods.image}-{device}",
        (*worker, "containers", 0, "resources", "requests"): amounts,
        (*worker, "containers", 0, "resources", "limits"): amounts,
        (*head, "containers", 0, "image"): f"{pods.image}-cpu",
    }
    for key in ("replicas", "minReplicas", "maxReplicas"):
        values[(*group, key)] = size.nodes
    environment = []
    if pods.secret:
        environment.append({"secretRef": {"name": pods.secret}})
    for pod, holds_config in ((head, config_map), (worker, "")):
        volumes, mounts = volumes_of(has_claim, holds_config)
        values[(*pod, "serviceAccountName")] = pods.account
        values[(*pod, "volumes")] = volumes
        values[(*pod, "containers", 0, "envFrom")] = environment
        values[(*pod, "containers", 0, "volumeMounts")] = mounts
    return values


def volumes_of(has_claim: bool, config_map: str) -> tuple[list[Any], list[Any]]:
    """Return the volumes of a pod, and where its container mounts them."""
    volumes: list[Any] = [{"name": "cache", "emptyDir": {"sizeLimit": CACHE_SIZE}}]
    mounts = [{"name": "cache", "mountPath": "/tmp"}]
    if has_claim:
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": CLAIM}})
        mounts.append({"name": "storage", "mountPath": VOLUME})
    if config_map:
        volumes.append({"name": "config", "configMap": {"name": config_map}})
        mounts.append({"name": "config", "mountPath": RUN_FOLDER})
    return volumes, mounts


def pair(text: str, option: str) -> tuple[str, str]:
    """Return the parts of `KEY=VALUE`. Raise `UserError` when it is none."""
    key, equals_sign, value = text.partition("=")
    if not key or not equals_sign:
        raise UserError(f"{option} is {text!r}; write KEY=VALUE")
    return key, value


def toleration(text: str) -> dict[str, str]:
    """Return the toleration of a taint `KEY` or `KEY=VALUE`, whatever its effect."""
    if "=" not in text:
        return {"key": text, "operator": "Exists"}
    key, value = pair(text, "--tolerate")
    return {"key": key, "operator": "Equal", "value": value}


def kuberay_service(config: Config, pods: Pods, has_claim: bool) -> str:
    """Return the manifest of a service for the bundle of a run.

    Replicas take no GPU, or as much of one as a rank of the run does. Its name is not that of the
    cluster: KubeRay would give both the same Service.
    """
    name = name_of(config, SERVICE_SUFFIX)
    template = read_template("kuberay-service.yaml")
    gpus_per_replica = min(1.0, config.cluster.gpus_per_worker)
    replicas_per_node = REPLICAS_PER_NODE
    if gpus_per_replica:
        replicas_per_node = int(1 / gpus_per_replica)
    fewest, most = SERVING_NODES
    cpus = max(REPLICAS_PER_NODE, replicas_per_node) + 1  # one for those that read requests
    memory_gb = MEMORY_GB_PER_CPU * cpus
    size = Size(fewest, cpus, math.ceil(gpus_per_replica), memory_gb, 0, "")
    cluster: KeyPath = ("spec", "rayClusterConfig")
    group = (*cluster, "workerGroupSpecs", 0)
    token = (*group, "template", "spec", "containers", 0, "env", 0, "valueFrom", "secretKeyRef")
    values: dict[KeyPath, Any] = {
        ("metadata", "name"): name,
        ("spec", "serveConfigV2"): serve_config(
            template, config, most * replicas_per_node, gpus_per_replica
        ),
        **cluster_values(cluster, size, pods, has_claim),
        (*cluster, "headGroupSpec", "template", "spec", "serviceAccountName"): "",
        (*group, "maxReplicas"): most,
        (*token, "name"): f"{name}-clients",
    }
    return with_values(template, values)


def serve_config(manifest: str, config: Config, most_replicas: int, gpus_per_replica: float) -> str:
    """Return the configuration of Ray Serve in a manifest, for the bundle of a run."""
    text = yaml.safe_load(manifest)["spec"]["serveConfigV2"]
    application: KeyPath = ("applications", 0)
    model = (*application, "deployments", 1)
    values: dict[KeyPath, Any] = {
        (*application, "args", "bundle"): f"{config.storage}/models/{config.name}",
        (*application, "args", "hosts"): [f"{name_of(config, SERVICE_SUFFIX)}-serve-svc"],
        (*model, "autoscaling_config", "max_replicas"): most_replicas,
    }
    if gpus_per_replica:
        values[(*application, "args", "device")] = "cuda"
        values[(*model, "ray_actor_options")] = {"num_cpus": 1, "num_gpus": gpus_per_replica}
    return with_values(text, values)


def config_map(name: str, files: Mapping[str, str]) -> str:
    """Return a ConfigMap that holds files, as YAML."""
    lines = ["apiVersion: v1", "kind: ConfigMap", "metadata:", f"  name: {name}", "data:"]
    for file, text in files.items():
        lines += [f"  {file}: |", indent(text.rstrip("\n"), "    ")]
    return "\n".join([*lines, ""])


# ---- Ray's launcher ------------------------------------------------------------------------------
def ray_launcher(run: Portable, size: Size, folder: str, machines: Machines) -> Submission:
    """Return the file of a cluster on a cloud, and the config that it runs.

    Raise `UserError` when storage is no bucket, GPUs have no machine image, Google Cloud has no
    project, or the current folder is not the checkout.
    """
    check_current_folder(folder)
    if is_local(run.config.storage):
        raise UserError(
            f"storage is {run.config.storage!r}, a folder of this machine, which the nodes do not "
            "see; name a bucket: --set storage=s3://bucket/folder, or gs:// on gcp"
        )
    if size.gpus and not machines.image:
        raise UserError(
            "nodes with GPUs need a machine image with NVIDIA's driver 580 or newer, for CUDA 13, "
            "and its container toolkit; name one with --machine-image"
        )
    if machines.cloud == "gcp" and not machines.project:
        raise UserError("--cloud gcp needs the project that pays; name it with --project ID")
    file = f"ray-{machines.cloud}.yaml"
    if file in run.files:
        raise UserError(
            f"the config is called {run.config.name!r}, and {file} is the cluster's file; give it "
            "another name with --set name=NAME"
        )
    worker: KeyPath = ("available_node_types", "worker")
    values: dict[KeyPath, Any] = {
        ("cluster_name",): name_of(run.config),
        ("max_workers",): size.nodes,
        (*worker, "min_workers"): size.nodes,
        (*worker, "max_workers"): size.nodes,
    }
    text = read_template(file)
    if size.gpus:
        image = re.search(r"^  image: (\S+)", text, re.MULTILINE)
        assert image
        values[("docker", "worker_image")] = f"{image[1]}-gpu"
        values[("docker", "worker_run_options")] = ["--gpus all"]
    machine_values = {"aws": aws_machine, "gcp": gcp_machine}[machines.cloud]
    values |= machine_values(worker, size, machines)
    path = shlex.quote(os.path.relpath(os.path.join(folder, file)))
    config = shlex.quote(os.path.relpath(os.path.join(folder, run.file)))
    job = f"{JOB} -- {COMMIT}={git_commit()} python -m pipeline run {config}"
    ray = os.path.join(os.path.dirname(this_python()), "ray")
    commands = [
        f"{ray} get-auth-token --generate > /dev/null; export RAY_AUTH_MODE=token",
        f"{ray} up -y {path}",
        f"{ray} dashboard {path} & until curl -so /dev/null {PAGE}; do sleep 1; done",
        f"{ray} {job}",
        f"{ray} down -y {path}",
    ]
    if not machines.account:
        commands.insert(0, f"# {NO_ACCOUNT}")
    return Submission({file: with_values(text, values), **run.files}, commands)


def check_current_folder(folder: str) -> None:
    """Raise `UserError` unless the current folder is the checkout, which jobs take along, and
    `folder` lies in it."""
    if Path.cwd() != CHECKOUT:
        raise UserError(
            f"a job takes the current folder along, which is not the checkout; go to {CHECKOUT}, "
            "and give the same command there"
        )
    if os.path.relpath(folder).startswith(os.pardir):
        raise UserError(
            f"--out is {folder!r}, outside of the current folder, which a job takes along; "
            "name a folder in it"
        )


def aws_machine(worker: KeyPath, size: Size, machines: Machines) -> dict[KeyPath, Any]:
    """Return the values of the workers' node type on AWS."""
    node: dict[str, Any] = {"InstanceType": machine_for("aws", size).name}
    if machines.image:
        node["ImageId"] = machines.image
    if machines.is_spot:
        node["InstanceMarketOptions"] = {"MarketType": "spot"}
    values: dict[KeyPath, Any] = {(*worker, "node_config"): node}
    if machines.account:
        profile = {"Name": machines.account}
        node["IamInstanceProfile"] = profile
        head: KeyPath = ("available_node_types", "head", "node_config")
        values[head] = {"InstanceType": AWS_HEAD, "IamInstanceProfile": profile}
    return values


def gcp_machine(worker: KeyPath, size: Size, machines: Machines) -> dict[KeyPath, Any]:
    """Return the values of the workers' node type, and of the project, on Google Cloud."""
    machine = machine_for("gcp", size)
    config = (*worker, "node_config")
    resources = {"CPU": machine.cpus}
    values: dict[KeyPath, Any] = {
        ("provider", "project_id"): machines.project,
        (*config, "machineType"): machine.name,
    }
    scheduling: dict[str, Any] = {}
    if machines.is_spot:
        scheduling = {"preemptible": True}
    if machine.gpus:
        resources["GPU"] = machine.gpus
        scheduling["onHostMaintenance"] = "TERMINATE"
        driver = {"key": "install-nvidia-driver", "value": "True"}
        values[(*config, "guestAccelerators")] = [
            {"acceleratorType": machine.accelerator, "acceleratorCount": machine.gpus}
        ]
        values[(*config, "metadata")] = {"items": [driver]}
    if machines.account:
        account = {"email": machines.account, "scopes": [CLOUD_SCOPE]}
        values[(*config, "serviceAccounts")] = [account]
    if machines.image:
        source: KeyPath = (*config, "disks", 0, "initializeParams", "sourceImage")
        values[source] = machines.image
    values[(*config, "scheduling")] = scheduling
    values[(*worker, "resources")] = resources
    return values


# ---- all of them ---------------------------------------------------------------------------------
def write(submission: Submission, folder: str) -> list[str]:
    """Write the files of a submission, and return their paths.

    Raise `UserError`, with nothing written, where a file is there with another content.
    """
    paths = {os.path.join(folder, name): text for name, text in submission.files.items()}
    for path, text in paths.items():
        if os.path.lexists(path) and Path(path).read_text(encoding="utf-8") != text:
            raise UserError(
                f"{path} is there with another content, and nothing was written; "
                "name another folder with --out"
            )
    os.makedirs(folder, exist_ok=True)
    for path, text in paths.items():
        Path(path).write_text(text, encoding="utf-8")
    return [*paths]
