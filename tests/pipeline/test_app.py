"""Tests of `pipeline.app`: concurrent reports of one run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import reports
from pipeline.app import runs as app
from pipeline.app.prepared import find_or_make_record
from pipeline.report import page
from tests import small_run

pytestmark = pytest.mark.usefixtures("small_pictures")


@pytest.mark.slow
def test_concurrent_drivers_build_the_report_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock, both would write below the report's key, and the first to finish would delete
    the unfinished files of the other."""
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "a"), ["linear"])
    config_path = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["run", config_path]) == 0
    run = app.prepare(config_path)
    record = find_or_make_record(run)
    stage = run.graph["report"]
    run.store.withdraw(stage.key)
    build = page.build_run_report
    builds = []

    def slow_build(*arguments: Any) -> dict[str, bytes]:
        builds.append(1)
        time.sleep(0.3)
        return build(*arguments)

    monkeypatch.setattr(page, "build_run_report", slow_build)
    with ThreadPoolExecutor(2) as drivers:
        futures = [drivers.submit(reports.make_report, run, record, stage) for _ in range(2)]
        manifests = [future.result() for future in futures]
    assert len(builds) == 1
    assert sorted("reused" in manifest for manifest in manifests) == [False, True]
