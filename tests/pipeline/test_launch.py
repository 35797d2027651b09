"""Tests of `accrete launch`: the written config, the size, and the files for each platform.

The files in configs/cluster are the output for the demo.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import UndefinedError

from pipeline.app import runs as app
from pipeline.cli import main
from pipeline.config import settings as config
from pipeline.data import source_classes
from pipeline.graph import raw_data
from pipeline.launch import platforms
from pipeline.launch.cost import SPREADS, Basis, Cost, Estimate, Forecast
from pipeline.launch.machines import MACHINES, choose_machine
from pipeline.launch.portable import make_portable
from pipeline.launch.sharing import ALWAYS_BUSY, Sharing
from pipeline.launch.sizes import HOURS, Size, choose_size, choose_time_limit
from pipeline.launch.template import format_inline_yaml, render_file
from tests import small_run
from workers.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "configs" / "cluster"
DEMO = str(REPOSITORY / "configs" / "demo.yaml")
BUCKET = ["--set", "storage=s3://bucket/accrete"]
VALUES: list[Any] = [
    *("plain", "a, b: [c", "12", "yes", "", "#", "'", '"', "-", "{{ name }}", "x" * 500),
    {"a": "1", "b, c": ["{", "}"]},
    [],
]
PLATFORMS = {
    "slurm.sh": ["--on", "slurm"],
    "kuberay-job.yaml": ["--on", "kuberay"],
    "kuberay-cluster.yaml": ["--on", "kuberay"],
    "kuberay-service.yaml": ["--on", "kuberay"],
    "ray-aws.yaml": ["--on", "ray", *BUCKET],
    "ray-gcp.yaml": ["--on", "ray", "--cloud", "gcp", "--project", "PROJECT", *BUCKET],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder without measurements as working directory and checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "CHECKOUT", tmp_path)
    return tmp_path


def launched(source: str, *options: str, hours: int = HOURS) -> dict[str, str]:
    """Run the command and return its files: name -> text."""
    assert main(["launch", source, "--out", "out", "--hours", str(hours), *options]) == 0
    return {path.name: path.read_text() for path in Path("out").iterdir()}


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command, check that it writes nothing, and return its error."""
    assert main(["launch", "--out", "out", "--hours", "1", *options]) == 2
    assert not Path("out").exists()
    return capsys.readouterr().err


def settings(*lines: str) -> config.Config:
    """Return the demo's config with overrides of the form `key=value`."""
    return config.load(DEMO, [*lines])


def test_files_of_a_card_are_copied_and_its_folders_named_in_full(tmp_path: Path) -> None:
    further = {"path": "further", "splits": {"train": "."}}
    path = Path(small_run.make_card(tmp_path, "digits", "01", without_images="bad.txt"))
    card = yaml.safe_load(path.read_text())
    card["source"]["more"] = [further]
    path.write_text(yaml.safe_dump(card))
    (path.parent / "bad.txt").write_text("a.png\nb.png\n")
    body = small_run.make_body(tmp_path, {"digits": str(path)}, ["linear"])
    source = small_run.write_config(tmp_path / "c.yaml", body)
    files = make_portable(source, []).files
    copied = yaml.safe_load(files["digits-card.yaml"])
    assert copied["source"]["more"][0]["path"] == str(path.parent / "further")
    assert files[copied["without_images"]] == "a.png\nb.png\n"
    with pytest.raises(UserError, match=r"further', which the nodes do not see"):
        make_portable(source, [], str(tmp_path / "raw"))


# ---- the files of the repository -----------------------------------------------------------------
@pytest.mark.parametrize("file", PLATFORMS)
def test_configs_cluster_equals_the_output_for_the_demo(file: str) -> None:
    assert launched(DEMO, *PLATFORMS[file])[file] == (CLUSTER / file).read_text()


@pytest.mark.parametrize("file", PLATFORMS)
def test_a_template_without_one_of_its_variables_is_an_error(file: str) -> None:
    with pytest.raises(UndefinedError, match="is undefined"):
        render_file(file)


@pytest.mark.parametrize("value", VALUES)
def test_values_of_a_template_are_quoted(value: Any) -> None:
    text = format_inline_yaml(value)
    assert len(text.splitlines()) == 1
    assert yaml.safe_load(f"before: 1\nkey: {text}  # comment\nafter: 2\n") == {
        "before": 1,
        "key": value,
        "after": 2,
    }


def test_a_value_with_a_line_break_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for account in ("a\nb: c", "a\u2028b"):
        error = refusal(capsys, DEMO, "--on", "kuberay", "--service-account", account)
        assert f"{account!r} contains a line break; write it on one line" in error


def test_options_are_quoted_in_every_file() -> None:
    text = "a, b: [c] #d"
    files = launched(
        DEMO,
        *("--on", "kuberay", "--service-account", text, "--secret", text, "--select", f"k={text}"),
        *("--tolerate", text),
    )
    worker = yaml.safe_load(files["kuberay-cluster.yaml"])["spec"]["workerGroupSpecs"][0]
    pod = worker["template"]["spec"]
    assert pod["serviceAccountName"] == text
    assert pod["nodeSelector"] == {"k": text}
    assert pod["tolerations"] == [{"key": text, "operator": "Exists"}]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": text}}]


@pytest.mark.parametrize("cloud", MACHINES)
def test_options_are_quoted_in_the_file_of_the_launcher(cloud: str) -> None:
    text = "a, b: [c] #d"
    options = ["--cloud", cloud, "--machine-image", text, "--service-account", text]
    if cloud == "gcp":
        options += ["--project", text]
    files = launched(DEMO, "--on", "ray", *BUCKET, *options)
    launcher = yaml.safe_load(files[f"ray-{cloud}.yaml"])
    node = launcher["available_node_types"]["worker"]["node_config"]
    if cloud == "aws":
        assert node["ImageId"] == text
        assert node["IamInstanceProfile"] == {"Name": text}
    else:
        assert launcher["provider"]["project_id"] == text
        assert node["disks"][0]["initializeParams"]["sourceImage"] == text
        assert node["serviceAccounts"][0]["email"] == text


# ---- the written config --------------------------------------------------------------------------
def test_the_written_config_has_the_keys_of_the_original(folder: Path) -> None:
    """Even after the original, its base and its cards are deleted."""
    cards = small_run.make_cards(folder, ("base", "a"))
    body = small_run.make_body(folder, cards, ["linear"])
    small_run.write_config(folder / "base.yaml", body)
    (folder / "config.yaml").write_text("extends: base.yaml\nname: small\n")
    overrides = ["train.epochs=3", "methods.meat.lambda=0.8"]
    options = [word for override in overrides for word in ("--set", override)]
    files = launched("config.yaml", "--on", "slurm", *options)
    expected = app.prepare("config.yaml", overrides)
    name = expected.config.name
    assert files.keys() == {"slurm.sh", f"{name}.yaml", "base-card.yaml", "a-card.yaml"}
    for file in ("base.yaml", "config.yaml", "cards/base.yaml", "cards/a.yaml"):
        (folder / file).unlink()
    run = app.prepare(f"out/{name}.yaml")
    assert run.keys == expected.keys
    assert run.store.root == expected.store.root
    assert run.config.name == name
    assert run.config.cluster.workers == 1, "a cluster needs Ray"
    assert run.config.cluster.cache == "/tmp"


@pytest.mark.parametrize(
    ("options", "storage", "is_tracked"),
    [
        (["--on", "kuberay"], "/storage", True),
        (["--on", "kuberay", *BUCKET], "s3://bucket/accrete", False),
        (
            ["--on", "ray", *BUCKET, "--set", "tracking.uri=https://mlflow"],
            "s3://bucket/accrete",
            True,
        ),
    ],
)
def test_nodes_see_the_storage_of_a_run(options: list[str], storage: str, is_tracked: bool) -> None:
    """MLflow's own database cannot be in a bucket."""
    files = launched(DEMO, *options)
    if "kuberay" in options:
        job, written = yaml.safe_load_all(files["kuberay-job.yaml"])
        assert job["spec"]["entrypoint"] == "python -m pipeline run /home/ray/run/demo.yaml"
        text = written["data"]["demo.yaml"]
    else:
        text = files["demo.yaml"]
    body = yaml.safe_load(text)
    assert body["storage"] == storage
    assert config.check(body, "demo.yaml").tracking.enabled == is_tracked


def test_storage_inside_the_volume_stays_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for storage, written in (("/storage/team", "/storage/team"), ("/mnt/nfs/team", "/storage")):
        out = storage.replace("/", "_")
        arguments = ["--on", "kuberay", "--hours", "1", "--out", out]
        assert main(["launch", DEMO, *arguments, "--set", f"storage={storage}"]) == 0
        assert f"storage: {written}\n" in capsys.readouterr().out
        service = yaml.safe_load(Path(out, "kuberay-service.yaml").read_text())
        (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        assert application["args"]["bundle"] == f"{written}/models/demo"


def test_a_run_in_a_bucket_needs_no_volume() -> None:
    volumes = {}
    for name, options in (("disk", []), ("bucket", BUCKET)):
        arguments = ["--on", "kuberay", "--hours", "1", "--out", name, *options]
        assert main(["launch", DEMO, *arguments]) == 0
        manifest = yaml.safe_load(Path(name, "kuberay-cluster.yaml").read_text())
        pod = manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]
        volumes[name] = [volume["name"] for volume in pod["volumes"]]
    assert volumes == {"disk": ["cache", "storage"], "bucket": ["cache"]}


# ---- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lines", "ranks_per_node", "expected"),
    [
        ([], 0, (1, 2, 0, 8)),
        (["cluster.workers=4"], 0, (4, 2, 0, 8)),
        (["cluster.workers=4", "cluster.groups=2", "cluster.cpus_per_worker=4"], 4, (2, 16, 0, 64)),
        (["cluster.workers=2", "cluster.gpus_per_worker=1"], 0, (2, 2, 1, 8)),
        (["cluster.workers=8", "cluster.gpus_per_worker=1"], 4, (2, 4, 4, 16)),
        (["cluster.workers=8", "cluster.gpus_per_worker=0.25"], 0, (2, 4, 1, 16)),
        (["cluster.workers=3", "cluster.gpus_per_worker=0.5"], 0, (2, 2, 1, 8)),
        (["cluster.workers=5", "cluster.gpus_per_worker=0.4"], 5, (1, 5, 3, 20)),
        (["cluster.workers=2", "cluster.memory_gb_per_worker=24"], 2, (1, 2, 0, 50)),
        (["cluster.workers=1", "cluster.stages={evaluate: {cpus: 6}}"], 0, (1, 6, 0, 24)),
    ],
)
def test_nodes_have_the_resources_of_their_ranks(
    lines: list[str], ranks_per_node: int, expected: tuple[int, ...]
) -> None:
    size = choose_size(settings(*lines), None, ranks_per_node, 1)
    assert (size.nodes, size.cpus, size.gpus, size.memory_gb) == expected


def forecast(
    seconds: float | None, wall_s: float = 0.0, basis: Basis = "same method", groups: int = 1
) -> Forecast:
    """Return the forecast for a run with one stage."""
    cost = Cost("meat", "train", 100.0, 2, seconds, "unknown" if seconds is None else basis)
    wall = Estimate(wall_s, wall_s / SPREADS[basis], wall_s * SPREADS[basis])
    return Forecast({"meat/a/train": cost}, 1, groups, {"meat": wall, "together": wall}, ())


@pytest.mark.parametrize(
    ("prediction", "hours", "why"),
    [
        (None, HOURS, "not forecast"),
        (forecast(None), HOURS, "the cost of 1 stage is unknown"),
        (forecast(60.0, 60.0), 1, "2 times"),
        (forecast(1e4, 9000.0), 5, "2 times the 2.5 h"),
        (forecast(1e4, 9000.0, "formula"), 13, "the upper end of the 2.5 h"),
        (forecast(9000.0, 60.0, groups=0), 5, "2 times the 2.5 h"),  # sized for one group
        (Forecast({}, 1, 1, {}, ()), 1, "nothing is to run"),
    ],
)
def test_the_time_limit_follows_from_the_forecast(prediction: Any, hours: int, why: str) -> None:
    limit, text = choose_time_limit(prediction)
    assert limit == hours
    assert why in text


def test_ranks_that_share_a_gpu_raise_the_time_limit() -> None:
    prediction = replace(forecast(9000.0, groups=0), workers=2)
    assert choose_time_limit(prediction)[0] == 3
    sharing = Sharing(frozenset({"meat/a/train"}), 2, 2, ALWAYS_BUSY)
    assert choose_time_limit(replace(prediction, sharing=sharing))[0] == 5


def test_slurm_script_contains_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--set", "cluster.workers=8", "--set", "cluster.gpus_per_worker=1"]
    four = ["--ranks-per-node", "4"]
    files = launched(DEMO, "--on", "slurm", *wide, *four, hours=30)
    lines = files["slurm.sh"].splitlines()
    for directive in ("nodes=2", "cpus-per-task=4", "gpus-per-node=4", "mem=16G", "time=30:00:00"):
        assert f"#SBATCH --{directive}" in lines
    printed = capsys.readouterr().out
    assert "2 nodes with 4 CPUs, 4 GPUs, 16 GB of memory; 30 h (as --hours says)" in printed
    assert shlex.split(printed.splitlines()[-1]) == ["sbatch", "out/slurm.sh", "out/demo.yaml"]


@pytest.mark.slow
def test_measurements_of_an_earlier_run_set_the_time_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(folder, ("base", "a"))
    path = small_run.write_config(
        folder / "config.yaml", small_run.make_body(folder, cards, ["linear"])
    )
    small_run.run(["run", path], folder / "out.txt")
    again = ["--set", "seed=6", "--out", "files"]
    assert main(["launch", path, "--on", "slurm", *again]) == 0
    assert "1 h (2 times the" in capsys.readouterr().out
    assert "#SBATCH --time=01:00:00" in Path("files/slurm.sh").read_text()


# ---- Slurm ---------------------------------------------------------------------------------------
def test_an_array_has_a_job_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = str(REPOSITORY / "configs" / "digits-seeds.yaml")
    lines = launched(seeds, "--on", "slurm", "--array")["slurm.sh"].splitlines()
    assert "#SBATCH --array=0,1,2" in lines
    assert "#SBATCH --output=accrete-digits-seeds-%A_%a.log" in lines


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([DEMO, "--on", "slurm", "--array"], "the config has no `seeds`"),
        (
            [DEMO, "--on", "slurm", "--array", "--set", "seeds=[1, 5000]"],
            "seed 5000 is more than 1000",
        ),
        ([DEMO, "--on", "slurm", "--spot"], "--spot works only with --on ray"),
        ([DEMO, "--on", "ray", "--secret", "aws"], "--secret works only with --on kuberay"),
        (
            [DEMO, "--on", "slurm", "--service-account", "a"],
            "--service-account works only with --on kuberay or ray",
        ),
        ([DEMO, "--on", "ray", *BUCKET, "--project", "a"], "--project works only with --cloud gcp"),
        ([DEMO, "--on", "ray", *BUCKET, "--cloud", "gcp"], "name it with --project ID"),
        ([DEMO, "--on", "ray", *BUCKET, "--set", "name=ray-aws"], "ray-aws.yaml is the cluster's"),
        ([DEMO, "--on", "kuberay", "--image", "bad name: {x"], "--image is 'bad name: {x'"),
        ([DEMO, "--on", "kuberay", "--image", "accrete:1-gpu"], "without -gpu or -cpu"),
        ([DEMO, "--on", "kuberay", "--image", "accrete@sha256:12"], "without a digest"),
        (
            [str(REPOSITORY / "configs" / "search" / "hat-s_max.yaml"), "--on", "slurm"],
            "this is a search",
        ),
        ([DEMO, "--on", "ray"], "name a bucket: --set storage=s3://bucket/folder"),
        (
            [DEMO, "--on", "ray", *BUCKET, "--set", "cluster.gpus_per_worker=1"],
            "NVIDIA's driver 580 or newer",
        ),
        ([DEMO, "--on", "kuberay", "--select", "spot"], "--select is 'spot'; write KEY=VALUE"),
        ([DEMO, "--on", "slurm", "--ranks-per-node", "-1"], "--ranks-per-node is -1"),
        (
            [DEMO, "--on", "kuberay", "--set", "backbone.weights=/data/w.safetensors"],
            "backbone.weights names '/data/w.safetensors', which the nodes do not see",
        ),
    ],
)
def test_requests_that_cannot_run_are_refused(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, *options)


def test_data_that_pods_do_not_see_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (raw_data, source_classes):
        monkeypatch.setattr(module, "FIRST_CONTACT_S", 0.0)
    cards = small_run.make_cards(folder, ("a",))
    path = small_run.write_config(
        folder / "config.yaml", small_run.make_body(folder, cards, ["linear"])
    )
    assert "card 'a' names" in refusal(capsys, path, "--on", "kuberay")
    card = yaml.safe_load(Path(cards["a"]).read_text())
    for place in ("s3://bucket/a", "/storage/a"):
        card["source"]["path"] = place
        Path(cards["a"]).write_text(yaml.safe_dump(card))
        assert main(["launch", path, "--on", "kuberay", "--out", place.replace("/", "_")]) == 0
        assert "no forecast: " in capsys.readouterr().out, "this machine does not see the data"


def test_a_method_of_a_stream_keeps_its_recommended_settings() -> None:
    stream = str(REPOSITORY / "configs" / "streams" / "digits-class.yaml")
    files = launched(stream, "--on", "slurm", "--method", "icarl", "--set", "seed=2")
    (name,) = [name for name in files if name.endswith(".yaml")]
    assert name == "digits-class-icarl-seed-2.yaml"
    written = config.load(str(Path("out") / name))
    assert config.computed(written) == config.computed(
        config.load(stream, ["methods=icarl", "seed=2"])
    )
    assert written.methods["icarl"].settings == {"memory": 50}


def test_a_shipped_config_is_launched_from_any_folder() -> None:
    assert "demo.yaml" in launched("configs/demo.yaml", "--on", "slurm")


def test_files_of_another_run_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    before = launched(DEMO, "--on", "slurm")
    assert launched(DEMO, "--on", "slurm") == before
    assert main(["launch", DEMO, "--on", "slurm", "--hours", "9", "--out", "out"]) == 2
    assert "exists with another content, so nothing was written" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in Path("out").iterdir()} == before


def test_printed_commands_work_from_any_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(DEMO, "--on", "slurm")
    assert "\n  sbatch out/slurm.sh out/demo.yaml\n" in capsys.readouterr().out
    monkeypatch.setattr(platforms, "CHECKOUT", REPOSITORY)
    launched(DEMO, "--on", "slurm")
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "sbatch" in line]
    python, ray, *rest = shlex.split(command)
    assert rest == ["sbatch", "out/slurm.sh", "out/demo.yaml"]
    assert Path(python.removeprefix("ACCRETE_PYTHON=")).samefile(sys.executable)
    assert Path(ray.removeprefix("ACCRETE_RAY=")).name == "ray"
    assert main(["launch", DEMO, "--on", "ray", *BUCKET, "--hours", "1", "--out", "other"]) == 2
    assert f"go to {REPOSITORY}" in capsys.readouterr().err


def test_names_on_a_platform_are_unique() -> None:
    names = [
        platforms.name_run(settings(f"name={name}"))
        for name in ("a.b", "a-b", "A-b", "x" * 50, "x" * 51, "demo")
    ]
    assert len({*names}) == len(names)
    for name in names:
        assert re.fullmatch(r"accrete-[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)
        assert len(name) <= platforms.MAX_NAME_LENGTH
    assert names[-1] == "accrete-demo"


# ---- Kubernetes ----------------------------------------------------------------------------------
def test_service_and_cluster_have_different_names() -> None:
    """KubeRay creates a Kubernetes Service for the head of each, named after it."""
    files = launched(DEMO, "--on", "kuberay", "--set", f"name={'x' * 60}")
    manifests = [yaml.safe_load(files[f"kuberay-{kind}.yaml"]) for kind in ("cluster", "service")]
    cluster, service = (manifest["metadata"]["name"] for manifest in manifests)
    assert cluster != service
    (application,) = yaml.safe_load(manifests[1]["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["hosts"] == [f"{service}-serve-svc"]
    assert f"the Service `{service}-serve-svc`" in files["kuberay-service.yaml"]


def test_pod_options_reach_the_manifests() -> None:
    files = launched(
        DEMO,
        *("--on", "kuberay", "--image", "registry/accrete:1", "--service-account", "trainer"),
        *("--select", "cloud/spot=true", "--tolerate", "spot", "--tolerate", "team=vision"),
        *("--secret", "bucket", "--set", "cluster.gpus_per_worker=1"),
    )
    job = next(yaml.safe_load_all(files["kuberay-job.yaml"]))
    spec = job["spec"]["rayClusterSpec"]
    head = spec["headGroupSpec"]["template"]["spec"]
    worker = spec["workerGroupSpecs"][0]["template"]["spec"]
    assert worker["nodeSelector"] == {"cloud/spot": "true"}
    assert worker["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "spot", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "vision"},
    ]
    assert "nodeSelector" not in head, "the run would end with a head on a spot node"
    for pod, image in ((head, "registry/accrete:1-cpu"), (worker, "registry/accrete:1-gpu")):
        (container,) = pod["containers"]
        assert container["image"] == image
        assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        assert pod["serviceAccountName"] == "trainer"
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == 1


# ---- Ray's launcher ------------------------------------------------------------------------------
@pytest.mark.parametrize("cloud", MACHINES)
def test_containers_see_the_gpus_of_a_cluster(cloud: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    files = launched(
        DEMO,
        *("--on", "ray", "--cloud", cloud, *BUCKET, "--spot", "--machine-image", "image-1"),
        *(("--project", "project-1") if cloud == "gcp" else ()),
        *("--service-account", "trainer"),
        *("--set", "cluster.workers=2", "--set", "cluster.gpus_per_worker=1"),
    )
    launcher = yaml.safe_load(files[f"ray-{cloud}.yaml"])
    validate_config(prepare_config(launcher))
    assert launcher["docker"]["worker_run_options"] == ["--gpus all"]
    assert launcher["docker"]["worker_image"] == f"{launcher['docker']['image']}-gpu"
    worker = launcher["available_node_types"]["worker"]
    assert worker["min_workers"] == worker["max_workers"] == launcher["max_workers"] == 2
    node = worker["node_config"]
    head = launcher["available_node_types"]["head"]
    assert head["resources"] == {"CPU": 0}, "no rank may run on the head"
    body = yaml.safe_load(files["demo.yaml"])
    assert body["cluster"]["groups"] == 1, "otherwise a run does not wait for starting nodes"
    if cloud == "aws":
        profile = {"Name": "trainer"}
        assert head["node_config"]["IamInstanceProfile"] == profile
        assert node == {
            "InstanceType": "g5.xlarge",
            "ImageId": "image-1",
            "InstanceMarketOptions": {"MarketType": "spot"},
            "IamInstanceProfile": profile,
        }
        return
    assert launcher["provider"]["project_id"] == "project-1"
    (account,) = node["serviceAccounts"]
    assert account["email"] == "trainer"
    assert worker["resources"] == {"CPU": 4, "GPU": 1}
    assert node["guestAccelerators"] == [
        {"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 1}
    ]
    assert node["scheduling"] == {"preemptible": True, "onHostMaintenance": "TERMINATE"}
    assert node["disks"][0]["initializeParams"]["sourceImage"] == "image-1"


@pytest.mark.parametrize("cloud", MACHINES)
def test_the_smallest_fitting_machine_is_chosen(cloud: str) -> None:
    for machine in MACHINES[cloud]:
        size = Size(1, machine.cpus, machine.gpus, machine.memory_gb, 1, "")
        assert choose_machine(cloud, size) == machine
    with pytest.raises(UserError, match="lower --ranks-per-node"):
        choose_machine(cloud, Size(1, 2, 9, 8, 1, ""))
    size = choose_size(settings("cluster.memory_gb_per_worker=12"), None)
    assert 0.7 * choose_machine(cloud, size).memory_gb >= 12, (
        "ranks may reserve 70 % of a node's memory"
    )


@pytest.mark.parametrize(
    ("gpus", "gpus_per_replica", "replicas", "cpus"),
    [(2, 1.0, 4, 4), (1, 1.0, 4, 4), (0.5, 0.5, 8, 4), (0.125, 0.125, 32, 9)],
)
def test_service_replicas_use_gpus_if_the_run_does(
    gpus: float, gpus_per_replica: float, replicas: int, cpus: int
) -> None:
    files = launched(DEMO, "--on", "kuberay", "--set", f"cluster.gpus_per_worker={gpus}")
    spec = yaml.safe_load(files["kuberay-service.yaml"])["spec"]
    group = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    (container,) = group["template"]["spec"]["containers"]
    assert container["image"].endswith("-gpu")
    limits = {"cpu": str(cpus), "memory": f"{4 * cpus}Gi", "nvidia.com/gpu": 1}
    assert container["resources"] == {"requests": limits, "limits": limits}
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["args"]["device"] == "cuda"
    _, model = application["deployments"]
    assert model["ray_actor_options"] == {"num_cpus": 1, "num_gpus": gpus_per_replica}
    assert model["autoscaling_config"]["max_replicas"] == replicas
