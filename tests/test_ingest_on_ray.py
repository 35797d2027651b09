"""Tests of ingest on a private Ray cluster: killed workers or drivers do not change the shards."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline.data.card_files import load_card_file
from pipeline.data.ingest import ingest
from pipeline.data.packs import UnitJob
from tests import small_run
from tests.ingest_sources import picture

PADDING = bytes(1 << 20)  # appended to each image, so that few images make a unit
SIDE = 1500  # in pixels: large, so that a unit takes a while


def write_config(folder: Path) -> str:
    """Write 40 images of a megabyte, a card and a config for two workers; return its path."""
    images = [picture(seed, "JPEG", side=SIDE) + PADDING for seed in range(2)]
    for split, count in (("train", 16), ("test", 4)):
        for label in "ab":
            place = folder / "raw" / split / label
            place.mkdir(parents=True)
            for number in range(count):
                data = images[number % 2] + f"{split}{label}{number}".encode()
                (place / f"{number:02d}.jpg").write_bytes(data)
    card = {
        "name": "heavy",
        "licence": "MIT",
        "classes": ["a", "b"],
        "shard_images": 5,
        "source": {"format": "folder", "path": str(folder / "raw")},
    }
    (folder / "card.yaml").write_text(yaml.safe_dump(card))
    body = small_run.make_body(folder, {"heavy": str(folder / "card.yaml")})
    body["cluster"] |= {"workers": 2, "address": "local"}
    return small_run.write_config(folder / "config.yaml", body)


def processes_below(pid: int, title: str) -> list[psutil.Process]:
    """Return the descendants of a process that have a command line starting with `title`."""
    matching = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if " ".join(process.cmdline()).startswith(title):
                    matching.append(process)
    return matching


def kill_one(driver: Any, title: str, seconds: float = 120) -> str:
    """Kill the first process with this title, and return its command line; "" if none was found."""
    deadline = time.monotonic() + seconds
    while driver.is_alive() and time.monotonic() < deadline:
        for process in processes_below(driver.pid, title):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                process.kill()
                return command
        time.sleep(0.02)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ingest_survives_a_killed_ray_worker(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    driver = small_run.start(["ingest", config], tmp_path / "out.txt")
    command = kill_one(driver, "ray::write_unit")
    driver.join(900)
    output = (tmp_path / "out.txt").read_text()
    assert driver.exitcode == 0, output
    assert command, "no worker was killed"
    card = load_card_file(str(tmp_path / "card.yaml"))
    expected = ingest(card, str(tmp_path / "expected"), "k", map, {})
    (stored,) = (tmp_path / "storage" / "stages").glob("*/a-*")
    digests = {name: info for name, info in expected["files"].items() if name.endswith(".tar")}
    assert len(digests) == 10
    for name in digests:
        assert (stored / name).read_bytes() == read_expected(tmp_path, name)
    assert not list((tmp_path / "storage").rglob("*.pack"))


def read_expected(folder: Path, name: str) -> bytes:
    (path,) = (folder / "expected" / "k").glob(f"a-*/{name}")
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ingest_on_ray_keeps_packed_shards(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    driver = small_run.start(["ingest", config], tmp_path / "out.txt")
    deadline = time.monotonic() + 900
    workers: list[psutil.Process] = []
    while driver.is_alive() and time.monotonic() < deadline:
        workers = processes_below(driver.pid, "ray::") or workers
        if len(list((tmp_path / "storage" / "stages").glob("*/packs-*/unit-*.parquet"))) >= 2:
            break
        time.sleep(0.02)
    driver.kill()
    driver.join(900)
    (packs,) = (tmp_path / "storage" / "stages").glob("*/packs-*")
    gone = [process for process in workers if process.is_running()]
    psutil.wait_procs(gone, timeout=60)  # Ray ends them once the driver is gone
    done = {path.stem for path in packs.glob("unit-*.parquet")}
    assert len(done) >= 2
    units: list[str] = []

    def counting(fn: Any, jobs: Any) -> Any:
        for job in jobs:
            if isinstance(job, UnitJob):
                units.append(job.name)
            yield fn(job)

    card = load_card_file(str(tmp_path / "card.yaml"))
    manifest = ingest(card, str(packs.parents[1]), packs.parent.name, counting, {})
    read_again = set(units)
    units.clear()
    expected = ingest(card, str(tmp_path / "expected"), "k", counting, {})
    assert read_again == set(units) - done
    assert manifest["files"] == expected["files"]
