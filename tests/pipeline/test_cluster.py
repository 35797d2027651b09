"""Tests of the driver's view of a cluster: shares, group sizes, connection and node checks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from pipeline.config.settings import ClusterSettings
from pipeline.launch import cluster, ray_internals, shares, train
from pipeline.launch.cluster import ClusterState
from tests.pipeline.nodes import nodes_of
from workers.errors import UserError

THREE = [{"CPU": 4.0, "GPU": 2.0, "memory": 64 * 2.0**30}] * 3


def sizes(state: ClusterState, width: int = 100, name: str = "01-a", **settings: Any) -> list[int]:
    """Return the sizes of a driver's groups under these settings of the section `cluster`."""
    return shares.compute_group_sizes(state, ClusterSettings(**settings), name, width)


def test_number_of_groups_fits_resources_and_parallel_stages() -> None:
    alone = nodes_of(THREE, drivers={"01": ("01-a",)})
    assert sizes(alone, workers=1) == [1] * 12
    assert sizes(alone, width=2, workers=1) == [1, 1]
    assert sizes(alone, workers=1, groups=5) == [1] * 5
    assert sizes(alone, workers=4) == [4] * 3
    assert sizes(alone, workers=1, gpus_per_worker=1) == [1] * 6
    assert sizes(alone, workers=1, gpus_per_worker=0.1, cpus_per_worker=4) == [1] * 3
    assert sizes(alone, workers=1, memory_gb_per_worker=40) == [1] * 3
    assert sizes(alone, workers=1, resources={"fast_disk": 1}) == [1], (
        "no group fits, but one is still requested"
    )


def test_a_tenth_of_a_gpu_fits_ten_times() -> None:
    assert sizes(nodes_of([{"CPU": 99.0, "GPU": 1.0}]), workers=1, gpus_per_worker=0.1) == [1] * 10


@pytest.mark.parametrize(
    ("gpus", "share", "groups"),
    [(2.0, 0.4, 4), (2.0, 0.5, 4), (3.0, 0.7, 3), (2.0, 0.1, 20), (1.2, 0.4, 2), (4.0, 2.0, 2)],
)
def test_fractional_gpu_worker_stays_on_one_gpu(gpus: float, share: float, groups: int) -> None:
    node = [{"CPU": 99.0, "GPU": gpus}]
    assert sizes(nodes_of(node), workers=1, gpus_per_worker=share) == [1] * groups


@pytest.mark.parametrize(
    ("gpus", "backend"), [(0, "gloo"), (0.5, "gloo"), (1, "cpu:gloo,cuda:nccl")]
)
def test_nccl_backend_is_added_only_for_whole_gpus(gpus: float, backend: str) -> None:
    assert train.choose_collectives(ClusterSettings(workers=2, gpus_per_worker=gpus)) == backend


def test_a_worker_does_not_span_two_nodes() -> None:
    assert sizes(nodes_of([{"CPU": 3.0}] * 2), workers=1, cpus_per_worker=2) == [1, 1]


def test_lost_and_leaving_nodes_are_not_counted() -> None:
    assert sizes(nodes_of(THREE, lost=[0], leaving=[2]), workers=1) == [1] * 4


def test_elastic_groups_grow_to_the_available_cpus() -> None:
    settings: dict[str, Any] = {"workers": 4, "min_workers": 1}
    assert sizes(nodes_of([{"CPU": 1.0}] * 3), width=1, **settings) == [3]
    assert sizes(nodes_of([{"CPU": 1.0}] * 3, lost=[1, 2]), width=1, **settings) == [1]
    assert sizes(nodes_of([{"CPU": 1.0}] * 9), width=1, **settings) == [4]
    assert sizes(nodes_of([{"CPU": 1.0}] * 9), width=3, **settings) == [3] * 3
    assert sizes(nodes_of([{"CPU": 1.0}] * 2), width=7, **settings) == [1, 1], (
        "many small groups before few large ones: a group of one rank waits for no reduction"
    )


def test_drivers_on_one_cluster_get_equal_shares() -> None:
    around = nodes_of(THREE, drivers={"01": ("01-a",), "02": ("02-b",)})
    assert sizes(around, workers=1) == sizes(around, name="02-b", workers=1) == [1] * 6
    three = nodes_of(
        [{"CPU": 1.0}] * 4, drivers={"01": ("01-a",), "02": ("02-b",), "03": ("03-c",)}
    )
    assert [len(sizes(three, name=name, workers=1)) for name in ("01-a", "02-b", "03-c")] == [
        2,
        1,
        1,
    ], "the whole cluster must be used"
    crowd = nodes_of([{"CPU": 1.0}], drivers={f"0{i}": (f"0{i}-a",) for i in range(5)})
    assert all(sizes(crowd, name=f"0{i}-a", workers=1) == [1] for i in range(5)), (
        "each driver has a group, which waits for its turn"
    )


def test_trials_of_a_search_divide_the_share_of_the_search() -> None:
    around = nodes_of(
        [{"CPU": 8.0}], drivers={"01": ("01-a", "01-b", "01-search"), "02": ("02-c",)}
    )
    assert len(sizes(around, workers=1)) == 2
    assert len(sizes(around, name="02-c", workers=1)) == 4


def test_error_names_workers_that_do_not_fit_and_cluster_size() -> None:
    around = nodes_of([{"CPU": 2.0}] * 2)
    with pytest.raises(
        UserError,
        match="this cluster \\(4 CPUs, 0 GPUs\\) has no room for 2 workers with 1 CPU, 1 GPU each",
    ):
        shares.check_fits(around, ClusterSettings(workers=2, gpus_per_worker=1))
    # With `groups` set, an autoscaler may add nodes.
    shares.check_fits(around, ClusterSettings(workers=2, gpus_per_worker=1, groups=1))
    shares.check_fits(around, ClusterSettings(workers=9, min_workers=4))
    with pytest.raises(UserError, match="5 workers"):
        shares.check_fits(around, ClusterSettings(workers=9, min_workers=5))


@pytest.mark.parametrize(
    ("node_versions", "message"),
    [
        ({"torch": "1.0"}, "has torch 1.0"),
        ({"torch": ""}, "has no torch"),
        ({"Python": "3.9"}, "has Python 3.9"),
    ],
)
def test_version_mismatch_error_names_node_and_remedy(node_versions: Any, message: str) -> None:
    node, driver_versions = nodes_of(THREE).nodes["1"], cluster.versions()
    cluster.check_versions(node, driver_versions, driver_versions)
    with pytest.raises(
        UserError, match=f"node 10.0.0.1 .* {message}, this machine .*constraints.txt"
    ):
        cluster.check_versions(node, driver_versions | node_versions, driver_versions)


def test_versions_omit_the_build_suffix() -> None:
    assert all("+" not in version for version in cluster.versions().values())
    assert cluster.versions()["torch"]


def test_a_node_reports_whether_it_can_access_the_storage(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("x")
    assert cluster.collect_facts(str(tmp_path / "probe")).unseen == ""
    assert cluster.collect_facts(str(tmp_path / "other")).unseen == "it is not there"
    assert "nothing://" in cluster.collect_facts("nothing://there/x").unseen


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("Authentication failed: Authentication token is missing", "get-auth-token"),
        (
            "this node has an IP address of 1.2.3.4, but we cannot find a local Raylet with the "
            "same address",
            "ray://",
        ),
        ("Could not connect to the raylet socket", "10001"),
        ("", "RuntimeError"),
        ("Version mismatch: The cluster was started with: Ray 1.0", "Version mismatch"),
    ],
)
def test_explanation_of_a_refused_connection_is_one_short_line(raised: str, message: str) -> None:
    assert message in cluster.explain_refusal(RuntimeError(raised))
    assert "\n" not in cluster.explain_refusal(RuntimeError(raised + "\n at line 3"))
    assert len(cluster.explain_refusal(RuntimeError(raised + " more" * 1000))) <= 300


@pytest.mark.parametrize(
    "address",
    [
        "nowhere",
        "127.0.0.1:1",
        "ray://127.0.0.1:1",
        "ray://x",
        "no..host:6379",
        f"{'x' * 70}:6379",
        "here:\N{SUPERSCRIPT TWO}",
    ],
)
def test_unreachable_or_invalid_address_is_reported(address: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.address=local"):
        cluster.check_cluster_reachable(address)


def test_reachable_address_is_accepted(listening: Any) -> None:
    for address in (listening, f"ray://{listening}", "auto"):
        cluster.check_cluster_reachable(address)


class Gate:
    """A gRPC service that accepts only requests with the right token.

    Ray's head and its client server do the same.
    """

    def __init__(self, token: str) -> None:
        self.token, self.methods = token, list[str]()

    def service(self, details: Any) -> Any:
        import grpc

        sent = dict(details.invocation_metadata).get("authorization", "")
        self.methods.append(details.method)

        def answer(_: bytes, context: Any) -> bytes:
            if sent != f"Bearer {self.token}":
                context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "Invalid or missing authentication token"
                )
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


ASK = """
import sys
from pipeline.launch import cluster
from workers.errors import UserError
try:
    cluster.check_token(sys.argv[1])
    print("let in")
except UserError as error:
    print(error)
"""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RAY_AUTH_TOKEN": "right" * 8}, "let in"),
        (
            {"RAY_AUTH_TOKEN": "wrong" * 8},
            "the token in RAY_AUTH_TOKEN is not the one of the cluster",
        ),
        ({}, "no token was found here"),
        (
            {"RAY_AUTH_MODE": "disabled"},
            "it asks for a token, and RAY_AUTH_MODE is 'disabled' here",
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["ray://", ""])
def test_wrong_or_missing_token_is_reported_quickly(
    scheme: str, environment: Any, message: str, tmp_path: Path
) -> None:
    """Run in a subprocess, because Ray reads its authentication mode and token only once."""
    import concurrent.futures

    import grpc

    gate = Gate("right" * 8)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[gate])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        process = subprocess.run(
            [sys.executable, "-c", ASK, f"{scheme}127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
            env={**bare, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token", **environment},
        )
    finally:
        server.stop(None)
    assert message in process.stdout
    assert process.stdout.count("\n") == 1
    assert "rightright" not in process.stdout
    assert "wrongwrong" not in process.stdout
    if message != "let in":
        assert "RAY_AUTH_TOKEN_PATH" in process.stdout
        assert "RAY_AUTH_MODE=token" in process.stdout


# ---- joining a cluster, starting a private one ---------------------------------------------------
class FakeRay:
    """A Ray module that records the arguments of each `init`.

    errors: raised one by one by the first calls of `init`. up: whether Ray is initialized already.
    """

    def __init__(self, *errors: Exception, up: bool = False) -> None:
        self.errors = list(errors)
        self.up = up
        self.started: list[dict[str, Any]] = []
        self.ended = 0

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **how: Any) -> None:
        self.started.append(how)
        if self.errors:
            raise self.errors.pop(0)

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that this project sets or reads, and restore them after the test."""
    for name in (*cluster.ENVIRONMENT, "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def listening() -> Iterator[Any]:
    """Return the address of a port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def connected(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, **settings: Any) -> Any:
    monkeypatch.setattr(cluster, "check_token", lambda address: None)  # it needs the real Ray
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert cluster.connect(ClusterSettings(**settings)) is ray
    return ray.started


def test_joining_driver_uploads_code_and_environment_variables(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.runtime_env.packaging import _get_excludes  # Ray's own filter

    (how,) = connected(monkeypatch, FakeRay(), address=listening)
    assert how["address"] == listening
    assert how["log_to_driver"] is False
    brought = how["runtime_env"]
    assert (
        brought["env_vars"]
        == cluster.ENVIRONMENT
        == {name: os.environ[name] for name in cluster.ENVIRONMENT}
    )
    root = Path(brought["working_dir"])
    assert root == Path(cluster.__file__).parents[2]
    is_excluded = _get_excludes(root, brought["excludes"])
    for name in (".git", ".venv", "storage", "tests"):
        assert is_excluded(root / name), name
    code = [
        path
        for folder in ("pipeline", "workers", "configs", "datasets")
        for path in [root / folder, *(root / folder).rglob("*")]
        if "__pycache__" not in path.parts
    ]
    assert root / "workers" / "storage" in code
    assert [path for path in code if is_excluded(path)] == []


def test_installed_wheel_uploads_only_its_packages(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "IS_CHECKOUT", False)
    (how,) = connected(monkeypatch, FakeRay(), address=listening)
    assert "working_dir" not in how["runtime_env"], "it would contain all of site-packages"
    folders = [Path(folder) for folder in how["runtime_env"]["py_modules"]]
    assert [folder.name for folder in folders] == ["pipeline", "workers"]
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_submitted_job_adds_only_variables_that_it_lacks(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refuses a variable given twice, and prints all variables, also credentials."""
    from ray.runtime_env.runtime_env import _merge_runtime_env

    job: dict[str, Any] = {
        "runtime_env": {
            "working_dir": "gcs://code.zip",
            "env_vars": {"RAY_DEDUP_LOGS": "1", "AWS_SECRET_ACCESS_KEY": "hush"},
        },
        "metadata": {},
    }
    for submitted, expected in (
        (job, cluster.ENVIRONMENT.keys() - {"RAY_DEDUP_LOGS"}),
        ({"runtime_env": {}}, cluster.ENVIRONMENT.keys()),
        ({}, cluster.ENVIRONMENT.keys()),
    ):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
        (how,) = connected(monkeypatch, FakeRay(), address=listening)
        assert how["runtime_env"].keys() == {"env_vars"}
        assert how["runtime_env"]["env_vars"].keys() == expected
        runtime_env: Any = submitted.get("runtime_env")
        merged = _merge_runtime_env(runtime_env, how["runtime_env"])
        assert merged is not None, "Ray would refuse these variables"


def test_submitted_job_is_detected_by_an_environment_variable_of_ray(
    bare_environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert not cluster.is_submitted_job()
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")
    assert cluster.is_submitted_job()


def test_exported_variable_overrides_the_default_on_driver_and_workers(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    (how,) = connected(monkeypatch, FakeRay(), address=listening)
    assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "300"
    assert how["runtime_env"]["env_vars"] == {
        **cluster.ENVIRONMENT,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    }


def test_private_cluster_ignores_forgotten_clusters(
    bare_environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for settings, cpus in (({}, 4), ({"workers": 3, "cpus_per_worker": 2}, 6)):
        (how,) = connected(monkeypatch, FakeRay(), **settings)
        assert (how["address"], how["num_cpus"], how["include_dashboard"]) == ("local", cpus, False)
        assert "runtime_env" not in how, "workers on this machine have this environment and code"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert [how["address"] for how in connected(monkeypatch, FakeRay(), address="local")] == [
        "local"
    ]
    assert cluster.get_address(ClusterSettings()) == "10.0.0.1:6379"
    assert cluster.get_address(ClusterSettings(address="ray://h:10001")) == "ray://h:10001"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster.get_address(ClusterSettings()) == "local"


def test_only_a_private_cluster_is_limited_to_loopback(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants

    seen: list[tuple[str | None, bool]] = []

    class Watched(FakeRay):
        def init(self, **how: Any) -> None:
            seen.append(
                (
                    os.environ.get(ray_internals.ALLOW_OTHER_NODES_VARIABLE),
                    ray_constants.ENABLE_RAY_CLUSTER,
                )
            )
            super().init(**how)

    monkeypatch.delenv(ray_internals.ALLOW_OTHER_NODES_VARIABLE, raising=False)
    connected(monkeypatch, Watched())
    connected(monkeypatch, Watched(), address=listening)
    assert seen == [("0", False), (None, True)]
    assert ray_internals.ALLOW_OTHER_NODES_VARIABLE not in os.environ
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == ray_internals.ALLOW_OTHER_NODES_VARIABLE


def test_initialized_ray_is_reused(bare_environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected(monkeypatch, FakeRay(up=True), address="127.0.0.1:1") == []


def test_unreachable_cluster_is_reported_and_leaves_nothing(
    bare_environment: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(RuntimeError("Version mismatch: Ray 1.0\n  at line 3"))
    with pytest.raises(
        UserError,
        match=rf"cluster at '{listening}' cannot be joined \(Version mismatch: Ray 1\.0 at line "
        r"3\); .*cluster\.address=local",
    ):
        connected(monkeypatch, ray, address=listening)
    assert (len(ray.started), ray.ended) == (1, 1), (
        "`init` is called once, and its remains are shut down"
    )
    away = FakeRay()
    with pytest.raises(UserError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        connected(monkeypatch, away, address="127.0.0.1:1")
    assert away.started == [], "Ray itself would try for two minutes"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("took too long\nmore"), r"\(took too long\)"),
        (TimeoutError(), r"\(TimeoutError\)"),
    ],
)
def test_start_of_a_private_cluster_is_tried_twice(
    error: Any, message: str, bare_environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(error)
    assert len(connected(monkeypatch, ray)) == 2
    assert ray.ended == 1
    ray = FakeRay(error, error)
    with pytest.raises(
        UserError, match=rf"Ray did not start on this machine {message}; .*--set cluster\.workers=0"
    ):
        connected(monkeypatch, ray)
    assert (len(ray.started), ray.ended) == (2, 2)


def test_python_path_with_a_space_is_refused(
    bare_environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/my envs/bin/python")
    ray = FakeRay()
    with pytest.raises(UserError, match=r"with a space \(/my envs/bin/python\); make .*workers=0"):
        connected(monkeypatch, ray)
    assert not ray.started


def test_private_cluster_starts_in_the_checkout_folder(
    bare_environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Watched(FakeRay):
        def init(self, **how: Any) -> None:
            seen.append(os.getcwd())
            super().init(**how)

    monkeypatch.chdir(tmp_path)
    connected(monkeypatch, Watched())
    assert seen == [str(Path(__file__).parents[2])]
    assert Path.cwd() == tmp_path


# ---- nodes of the cluster ------------------------------------------------------------------------
class Asked:
    """A Ray module that runs remote functions in this process.

    answers: node id -> the result, or the exception, that replaces that of the function. nodes:
    ids of the nodes on which functions were started.
    """

    def __init__(self, answers: Any = None) -> None:
        import ray.exceptions

        self.exceptions = ray.exceptions
        self.answers = answers or {}
        self.nodes: list[str] = []

    def remote(self, **how: Any) -> Any:
        node = how["scheduling_strategy"].node_id
        assert how["num_cpus"] == 0, "a node without a free CPU must answer too"
        assert how["scheduling_strategy"].soft is False, "no other node may answer instead"
        self.nodes.append(node)
        return lambda function: SimpleNamespace(
            remote=lambda *args: partial(self.answer_of, node, function(*args))
        )

    def answer_of(self, node: Any, answer: Any) -> Any:
        answer = self.answers.get(node, answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get(self, answer: Any) -> Any:
        return answer()


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray's strategy, which accepts only ids of real Ray nodes."""
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy",
        lambda node, soft: SimpleNamespace(node_id=node, soft=soft),
    )


def test_storage_check_asks_all_live_nodes(affinity: Any, tmp_path: Path) -> None:
    ray = Asked()
    cluster.check_nodes(ray, nodes_of(THREE, lost=[1]).nodes, str(tmp_path))
    assert ray.nodes == ["0", "2"]
    lost = Asked({"0": ray.exceptions.NodeDiedError("gone")})
    cluster.check_nodes(lost, nodes_of(THREE).nodes, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda ray: ray.exceptions.RuntimeEnvSetupError("bad\nno timm"),
            r"cannot run this project's code \(no timm\); .*constraints\.txt",
        ),
        (lambda ray: ({**cluster.versions(), "torch": "1.0"}, ""), "has torch 1.0"),
        (
            lambda ray: (cluster.versions(), "it is not there"),
            r"does not see storage '.*' \(it is not there\); .*--set storage=PLACE",
        ),
    ],
)
def test_node_check_names_the_unusable_node(
    answer: Any, message: str, affinity: Any, tmp_path: Path
) -> None:
    ray = Asked()
    ray.answers["1"] = answer(ray)
    with pytest.raises(UserError, match=rf"node 10\.0\.0\.1 \(1\) {message}"):
        cluster.check_nodes(ray, nodes_of(THREE).nodes, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_registration_actor_uses_no_cpu_and_runs_on_the_head() -> None:
    made = []

    class Registry:
        def get_runtime_context(self) -> Any:
            return SimpleNamespace(get_job_id=lambda: "01")

        def remote(self, **how: Any) -> Any:
            made.append(how)
            return lambda actor: SimpleNamespace(remote=actor)

    assert cluster.make_actor_name(Registry(), search=True) == "01-search"
    name, other = (cluster.make_actor_name(Registry()) for _ in range(2))
    assert name != other, "the trials of a search are drivers of one job"
    assert name.startswith("01-")
    assert isinstance(
        cluster.register_actor(Registry(), cluster.DriverRegistration, name),
        cluster.DriverRegistration,
    )
    assert made == [
        {
            "num_cpus": 0,
            "resources": cluster.HEAD,
            "name": name,
            "namespace": cluster.NAMESPACE,
            "scheduling_strategy": "DEFAULT",
        }
    ]


def test_ray_gets_the_plain_file_system(tmp_path: Path) -> None:
    streams = cluster.make_ray_storage_arguments(str(tmp_path))
    assert streams["storage_path"] == str(tmp_path)
    assert isinstance(streams["storage_filesystem"], fs.LocalFileSystem)
    streams = cluster.make_ray_storage_arguments("s3://bucket/runs/ray?region=eu-west-1")
    assert streams["storage_path"] == "bucket/runs/ray"
    assert isinstance(streams["storage_filesystem"], fs.S3FileSystem), (
        "Ray gets the plain file system, because the project's wrapper has no output streams"
    )


def test_queue_actor_does_not_import_torch() -> None:
    code = "import sys, pipeline.launch.queue_actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
