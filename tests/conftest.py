"""Shared fixtures and pytest hooks: stages of tiny streams, uninterrupted runs, an S3 server."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Must be set before torch is imported. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads this when it is imported. Clusters that tests start in this process require tokens, like
# the clusters of `accrete`.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Otherwise Ray kills its workers when the test processes use most of the memory.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
# Ray's default niceness for workers is 15. With two other test processes on two cores, workers
# would get 3 % of a core and take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")
# Helper modules in which pytest rewrites assertions, so that failures show the compared values.
HELPERS = (
    "class_incremental_steps",
    "cosine_head_steps",
    "pipeline.testing.lab",
    "pipeline.testing.promises",
    "rank_runs",
    "on_strict_device",
    "strict_device",
    "method_steps",
    "tests.hostile",
    "tests.recovery",
    "two_domains",
)
pytest.register_assert_rewrite(*HELPERS)
# Files with tests that start clusters, or that kill processes at times measured in a reference run.
# One process runs the files of a group in sequence. In parallel on two cores, they exceed their
# time limits.
GROUPS = {
    "kills": (
        "test_failure_elsewhere.py",
        "test_killed_additions.py",
        "test_kills.py",
        "test_recovery.py",
        "test_recovery_of_a_chain.py",
        "test_recovery_on_ray.py",
        "test_removals.py",
        "test_two_drivers.py",
    ),
    "services": (
        "test_elastic_runs.py",
        "test_gpu_benchmark.py",
        "test_growing_story.py",
        "test_ingest_on_ray.py",
        "test_on_s3.py",
        "test_outside_methods.py",
        "test_plugins.py",
        "test_search.py",
        "test_server_load.py",
        "test_server_updates.py",
        "test_servers.py",
        "test_several_nodes.py",
        "test_slurm.py",
        "test_stage_limits.py",
        "test_wheel.py",
    ),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Run the tests of a file in one process, and all files of a group of `GROUPS` in one."""
    from xdist.scheduler import LoadFileScheduling

    group_of_file = {file: group for group, files in GROUPS.items() for file in files}

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return group_of_file.get(Path(file).name, file)

        def _assign_work_unit(self, node: object) -> None:
            for group in GROUPS:  # the groups take longest, so they start first
                if group in self.workqueue:
                    self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of each test with the mark `few` as slow.

    `make test` runs the remaining cases, and `make test-all` runs all. The arguments of the mark
    are the ids of these cases, or their number. In the second case, they are spread evenly.
    """
    cases: dict[object, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few"):
            cases.setdefault(item.function, []).append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("few")
        assert marker is not None
        kept = {f"{group[0].originalname}[{case}]" for case in marker.args}
        if isinstance(marker.args[0], int):
            (count,) = marker.args
            kept = {group[len(group) * number // count].name for number in range(count)}
        for item in group:
            if item.name not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the id of a failed test immediately: `make test-all` takes more than an hour."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_collection_finish() -> None:
    """Collect garbage less often: imported modules have millions of objects that stay alive."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def start_no_loaders() -> None:
    """Reset the time spent on images before each test: loaders start when it reaches 2 s."""
    loaders = sys.modules.get("workers.data.loaders")
    if loaders is not None:
        loaders._shared.seconds = 0.0


@pytest.fixture(scope="session", autouse=True)
def copied_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create the tables of MLflow once and then copy the database: creation takes seconds."""
    from pipeline.tracking import mlflow_internals
    from pipeline.tracking.database import sqlite_path

    template = tmp_path_factory.mktemp("database") / "mlflow.db"
    create_tables = mlflow_internals.create_tables

    def copy_tables(uri: str) -> None:
        path = sqlite_path(uri)
        assert path is not None
        if not template.exists():
            create_tables(f"sqlite:///{template}")
        shutil.copyfile(template, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_internals, "create_tables", copy_tables)
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Return a lab that runs streams of tiny tasks through the real stages, each once: see
    `pipeline.testing.Lab`."""
    import torch

    from pipeline.testing.lab import Lab

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Lab(tmp_path_factory.mktemp("lab"))
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Start a process that registers the strict device, so that this process does not."""
    from concurrent.futures import ProcessPoolExecutor

    from tests import on_strict_device, small_run

    folder = tmp_path_factory.mktemp("strict")
    with ProcessPoolExecutor(
        1, small_run.processes(), on_strict_device.start, (folder,)
    ) as process:
        yield process


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Remove the methods that a test registers, and its modules (`my_...`, `hostile`)."""
    from workers.methods import METHODS, registration

    imported = {*sys.modules}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "REGISTERED", {})
        before = dict(METHODS)
        yield
        METHODS.clear()
        METHODS.update(before)
    for name in {*sys.modules} - imported:
        if name.startswith(("my_", "hostile")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Run a config once without interruption: see `recovery.Reference`."""
    from tests.recovery import Reference

    return Reference.made_in(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Run a class-incremental chain (DyTox) once without interruption."""
    from tests.recovery import Reference

    dytox = {"memory": 8, "steps": {"finetune": {"epochs": 4}}}
    return Reference.made_in(
        tmp_path_factory.mktemp("chain"), ("a", "b"), methods={"dytox": dytox}, scenario="class"
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[object]:
    """Provide a folder, and check after the test that nothing outside it has changed: see
    `hostile.Site`."""
    from tests.hostile import Site

    folder = Site(tmp_path)
    yield folder
    folder.untouched()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the report of runs in this process by a stub, which saves seconds."""
    from pipeline.report import page

    monkeypatch.setattr(page, "build_run_report", lambda *_: {"report.html": b"a page"})


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """Start an S3-compatible server for the session, and return its port."""
    from tests import s3

    with s3.server() as port:
        yield port


@pytest.fixture
def bucket(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Create a bucket behind a proxy that can make requests fail: see `s3.Proxy`.

    The environment variables of this process point to the proxy.
    """
    import uuid

    from tests import s3
    from workers.storage import filesystem

    with s3.Proxy(s3_server, bucket=f"bucket-{uuid.uuid4().hex[:8]}").served() as proxy:
        for name, value in s3.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        filesystem.open_filesystem.cache_clear()  # it may point to the proxy of another test
        s3.client_of(s3_server).create_bucket(Bucket=proxy.bucket)
        yield proxy
    filesystem.open_filesystem.cache_clear()
