"""Write the files to run a config on Slurm, Kubernetes or a cloud, for the user to submit.

One `render_...` function per platform returns the files and the commands that submit them. The
files come from the templates in `templates/`. `write_files` writes them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.invocation import this_python
from pipeline.config.settings import Config
from pipeline.config.version import CHECKOUT, COMMIT, git_commit
from pipeline.launch.machines import Machine, choose_machine
from pipeline.launch.portable import Portable
from pipeline.launch.sizes import MEMORY_GB_PER_CPU, Size
from pipeline.launch.template import render_file
from workers.errors import UserError
from workers.storage.artifact import is_local

VOLUME = "/storage"  # mount path of the storage volume in pods
SERVICE_SUFFIX = "-model"  # appended to the name of a config to name the service
RUN_FOLDER = "/home/ray/run"  # mount path of the config files in the head pod
IMAGE = "accrete:ray2.60.0-py311"  # default container image, without `-cpu` or `-gpu`
MAX_NAME_LENGTH = 40  # KubeRay appends to the name, and the limit of Kubernetes is 63 characters
DIGEST = 6  # characters of the digest at the end of a name that had to be changed
MAX_ARRAY_INDEX = 1000  # largest index of a job array in Slurm's default configuration
SERVING_NODES = (2, 4)  # minimum and maximum number of nodes of a service
# Serving processes of a service per node, if the nodes have no GPUs. Each process has one CPU.
REPLICAS_PER_NODE = 3
PAGE = "http://127.0.0.1:8265"  # address of Ray's dashboard
JOB = f"job submit --address {PAGE} --working-dir ."
NO_ACCOUNT = "nodes have no role that may use the bucket: name one with --service-account"
OTHER_CHARACTERS = re.compile(r"[^a-z0-9-]+")
IMAGE_NAME = re.compile(r"[a-z0-9][\w./:-]*")
AWS_HEAD = "m6i.2xlarge"  # machine type of the head node, which runs no ranks
CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # all APIs; roles limit the access


@dataclass(frozen=True)
class Submission:
    """Files of a run on a platform, and the commands to submit the run.

    Attributes:
        files: File name -> content.
        commands: Commands that submit the run from the checkout.
    """

    files: dict[str, str]
    commands: list[str]


@dataclass(frozen=True)
class Pods:
    """The user's choices for pods on Kubernetes.

    Attributes:
        image: Name and tag of the image without the suffix `-cpu` or `-gpu`, which is appended.
        selector: Labels of the nodes for workers, `KEY=VALUE`.
        tolerations: Taints that workers tolerate, `KEY` or `KEY=VALUE`.
        account: Service account of Kubernetes. A cloud can bind a role to it.
        secret: Name of a Secret. Its keys become environment variables.
    """

    image: str = IMAGE
    selector: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    account: str = "default"
    secret: str = ""


@dataclass(frozen=True)
class Machines:
    """The user's choices for machines on a cloud.

    Attributes:
        cloud: `aws` or `gcp`.
        is_spot: Whether workers run on spot machines.
        image: Machine image of the workers; required for GPUs.
        project: Id of the Google Cloud project.
        account: Instance profile on AWS, e-mail of a service account on Google Cloud.
    """

    cloud: str = "aws"
    is_spot: bool = False
    image: str = ""
    project: str = ""
    account: str = ""


def name_run(config: Config, suffix: str = "") -> str:
    """Return a name for a run that every platform accepts.

    Configs with different names get different names. A name that must be changed gets a digest of
    the original name at its end.

    Args:
        config: The config.
        suffix: Text to append to the name of the config.
    """
    full = f"accrete-{config.name}{suffix}"
    name = OTHER_CHARACTERS.sub("-", full.lower()).strip("-")
    if name == full and len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(full.encode()).hexdigest()[:DIGEST]
    return f"{name[: MAX_NAME_LENGTH - DIGEST - 1].strip('-')}-{digest}"


# ---- Slurm ---------------------------------------------------------------------------------------
def render_slurm(run: Portable, size: Size, folder: str, with_array: bool = False) -> Submission:
    """Return the script and the config of a run on Slurm, and the command that submits them.

    Args:
        run: The config.
        size: Number and size of the nodes.
        folder: Folder that the files will be written to, for the command.
        with_array: Whether to submit a job array with one job for each seed of the config.

    Raises:
        UserError: If `with_array` is set, and the config has no seeds or too large a seed.
    """
    seeds = list_array_seeds(run.config) if with_array else ()
    script = render_file("slurm.sh", name=name_run(run.config), size=size, seeds=seeds)
    config = os.path.join(folder, run.file)
    command = shlex.join(["sbatch", os.path.join(folder, "slurm.sh"), config])
    if Path.cwd() != CHECKOUT:  # the script looks for the environment in the current folder
        python = this_python()
        ray = os.path.join(os.path.dirname(python), "ray")
        command = f"ACCRETE_PYTHON={shlex.quote(python)} ACCRETE_RAY={shlex.quote(ray)} {command}"
    return Submission({"slurm.sh": script, **run.files}, [command])


def list_array_seeds(config: Config) -> tuple[int, ...]:
    """Return the seeds of a config, which become the indices of a job array.

    Raises:
        UserError: If the config has no seeds, or a seed is larger than the largest index.
    """
    if not config.seeds:
        raise UserError("--array makes a job per seed, but the config has no `seeds`; add them")
    if max(config.seeds) > MAX_ARRAY_INDEX:
        raise UserError(
            f"--array: seed {max(config.seeds)} is more than {MAX_ARRAY_INDEX}, the largest index "
            "of a job array; choose smaller seeds, or leave --array out"
        )
    return config.seeds


# ---- Kubernetes ----------------------------------------------------------------------------------
def render_kuberay(run: Portable, size: Size, folder: str, pods: Pods) -> Submission:
    """Return the manifests of a run on Kubernetes: a job, a permanent cluster, and a service.

    The command submits only the job, whose manifest contains the config.

    Args:
        run: The config.
        size: Number and size of the nodes.
        folder: Folder that the files will be written to, for the command.
        pods: Choices of the user.

    Raises:
        UserError: If `-cpu` or `-gpu` cannot be appended to the name of the image.
    """
    check_container_image(pods.image)
    values = {
        "name": name_run(run.config),
        "file": run.file,
        "files": run.files,
        "config_folder": RUN_FOLDER,
        "max_nodes": size.nodes,
        **describe_pods(size, pods, run.config.storage),
    }
    files = {
        "kuberay-job.yaml": render_file("kuberay-job.yaml", **values),
        "kuberay-cluster.yaml": render_file("kuberay-cluster.yaml", **values),
        "kuberay-service.yaml": render_service(run.config, pods),
    }
    manifest = os.path.join(folder, "kuberay-job.yaml")
    return Submission(files, [shlex.join(["kubectl", "apply", "-f", manifest])])


def check_container_image(image: str) -> None:
    """Raise `UserError` if `-cpu` or `-gpu` cannot be appended to the name of an image."""
    if IMAGE_NAME.fullmatch(image) and not image.endswith(("-cpu", "-gpu")):
        return
    raise UserError(
        f"--image is {image!r}; give the name and tag that the images have in the registry, "
        f"without -gpu or -cpu and without a digest, such as registry/{IMAGE}"
    )


def describe_pods(size: Size, pods: Pods, storage: str) -> dict[str, Any]:
    """Return the variables for the template of a RayCluster that depend on nodes and pods.

    Args:
        size: Number and size of the nodes.
        pods: Choices of the user.
        storage: Folder or URI of the storage. The pods mount a volume if it is a folder.
    """
    resources: dict[str, Any] = {"cpu": str(size.cpus), "memory": f"{size.memory_gb}Gi"}
    tolerations = [parse_toleration(text) for text in pods.tolerations]
    if size.gpus:
        resources["nvidia.com/gpu"] = size.gpus
        tolerations.insert(0, {"key": "nvidia.com/gpu", "operator": "Exists"})
    return {
        "size": size,
        "pods": pods,
        "device": "gpu" if size.gpus else "cpu",
        "resources": resources,
        "selector": dict(parse_pair(text, "--select") for text in pods.selector),
        "tolerations": tolerations,
        "variables": [{"secretRef": {"name": pods.secret}}] if pods.secret else [],
        "volume": VOLUME,
        "has_claim": is_local(storage),
    }


def parse_pair(text: str, option: str) -> tuple[str, str]:
    """Return key and value of `KEY=VALUE`. Raise `UserError` if the text has another form."""
    key, equals_sign, value = text.partition("=")
    if not key or not equals_sign:
        raise UserError(f"{option} is {text!r}; write KEY=VALUE")
    return key, value


def parse_toleration(text: str) -> dict[str, str]:
    """Return the toleration for a taint `KEY` or `KEY=VALUE`, with any effect."""
    if "=" not in text:
        return {"key": text, "operator": "Exists"}
    key, value = parse_pair(text, "--tolerate")
    return {"key": key, "operator": "Equal", "value": value}


def render_service(config: Config, pods: Pods) -> str:
    """Return the manifest of a Ray Serve service for the bundle (exported model) of a run.

    A replica of the service takes the same share of a GPU as a rank of the run, but at most one
    GPU. The name of the service differs from the name of the cluster, because KubeRay would give
    both the same Kubernetes Service.
    """
    gpus_per_replica = min(1.0, config.cluster.gpus_per_worker)
    replicas_per_node = REPLICAS_PER_NODE
    if gpus_per_replica:
        replicas_per_node = int(1 / gpus_per_replica)
    min_nodes, max_nodes = SERVING_NODES
    cpus = max(REPLICAS_PER_NODE, replicas_per_node) + 1  # one CPU for the HTTP ingress
    memory_gb = MEMORY_GB_PER_CPU * cpus
    size = Size(min_nodes, cpus, math.ceil(gpus_per_replica), memory_gb, 0, "")
    return render_file(
        "kuberay-service.yaml",
        name=name_run(config, SERVICE_SUFFIX),
        bundle=f"{config.storage}/models/{config.name}",
        gpus_per_replica=gpus_per_replica,
        max_replicas=max_nodes * replicas_per_node,
        max_nodes=max_nodes,
        **describe_pods(size, pods, config.storage),
    )


# ---- Ray's launcher ------------------------------------------------------------------------------
def render_ray_launcher(run: Portable, size: Size, folder: str, machines: Machines) -> Submission:
    """Return the cluster file for Ray's launcher, and the config to run on that cluster.

    Args:
        run: The config.
        size: Number and size of the nodes.
        folder: Folder that the files will be written to, for the commands.
        machines: Choices of the user.

    Raises:
        UserError: If the storage is not a bucket, if the machine image for GPUs or the project of
            Google Cloud is missing, if no machine is large enough, or if the current folder is not
            the checkout.
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
    describe_machines = {"aws": describe_aws, "gcp": describe_gcp}[machines.cloud]
    values = describe_machines(choose_machine(machines.cloud, size), machines)
    text = render_file(file, name=name_run(run.config), size=size, machines=machines, **values)
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
    return Submission({file: text, **run.files}, commands)


def check_current_folder(folder: str) -> None:
    """Check that the current folder, which a job uploads, is the checkout and contains `folder`.

    Raises:
        UserError: If the current folder is not the checkout, or does not contain `folder`.
    """
    if Path.cwd() != CHECKOUT:
        raise UserError(
            f"a job takes the current folder along, and it is not the checkout; go to {CHECKOUT}, "
            "and give the same command there"
        )
    if os.path.relpath(folder).startswith(os.pardir):
        raise UserError(
            f"--out is {folder!r}, outside of the current folder, which a job takes along; "
            "name a folder in the current one"
        )


def describe_aws(machine: Machine, machines: Machines) -> dict[str, Any]:
    """Return the `node_config` of the head and of the workers on AWS."""
    head: dict[str, Any] = {"InstanceType": AWS_HEAD}
    worker: dict[str, Any] = {"InstanceType": machine.name}
    if machines.image:
        worker["ImageId"] = machines.image
    if machines.is_spot:
        worker["InstanceMarketOptions"] = {"MarketType": "spot"}
    if machines.account:
        head["IamInstanceProfile"] = worker["IamInstanceProfile"] = {"Name": machines.account}
    return {"head": head, "worker": worker}


def describe_gcp(machine: Machine, machines: Machines) -> dict[str, Any]:
    """Return the variables for the template of Google Cloud."""
    resources = {"CPU": machine.cpus}
    scheduling: dict[str, Any] = {"preemptible": True} if machines.is_spot else {}
    if machine.gpus:
        resources["GPU"] = machine.gpus
        scheduling["onHostMaintenance"] = "TERMINATE"
    accounts = []
    if machines.account:
        accounts.append({"email": machines.account, "scopes": [CLOUD_SCOPE]})
    return {
        "machine": machine,
        "resources": resources,
        "scheduling": scheduling,
        "accounts": accounts,
    }


# ---- all platforms -------------------------------------------------------------------------------
def write_files(submission: Submission, folder: str) -> list[str]:
    """Write the files of a submission, and return their paths.

    Args:
        submission: The files.
        folder: Folder of the files.

    Raises:
        UserError: If a file exists with other content. In this case, nothing is written.
    """
    paths = {os.path.join(folder, name): text for name, text in submission.files.items()}
    for path, text in paths.items():
        if os.path.lexists(path) and Path(path).read_text(encoding="utf-8") != text:
            raise UserError(
                f"{path} exists with another content, so nothing was written; "
                "name another folder with --out"
            )
    os.makedirs(folder, exist_ok=True)
    for path, text in paths.items():
        Path(path).write_text(text, encoding="utf-8")
    return [*paths]
