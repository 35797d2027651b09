"""Tests of runs without the packages ray, mlflow, webdataset, simplejpeg and isal.

Runs that need none succeed, and other runs name the missing package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import stream

CHECKOUT = Path(__file__).resolve().parent.parent
RUN = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(["ray", "mlflow", "webdataset", "sklearn", "simplejpeg", "isal"]))
from pipeline import cli
from pipeline.report import page
page.build_run_report = lambda *_: {"report.html": b"a page"}
results = {}
for name, options in json.loads(sys.argv[2]).items():
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = cli.main(["run", sys.argv[1], *options])
    results[name] = code, errors.getvalue()
print(json.dumps(results))
"""


@pytest.mark.slow
def test_missing_optional_package_is_named_only_if_needed(
    tmp_path: Path,
) -> None:
    card = stream.draw_images(tmp_path, 2, train=4, test=2, sides=(16,))
    config = tmp_path / "config.yaml"
    body = {
        "name": "bare",
        "storage": str(tmp_path / "storage"),
        "tracking": False,
        "stream": {"tasks": [{"card": card, "name": "t"}]},
        "methods": {"linear": {"train": {"epochs": 1}}},
        "backbone": dict(stream.tiny()),
    }
    config.write_text(yaml.safe_dump(body))
    runs = {
        "streamed": ["--set", "data.resident_mb=0"],
        "on Ray": ["--set", "cluster.workers=1"],
        "recorded": ["--set", "tracking=on"],
        "plain": [],
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(config), json.dumps(runs)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["plain"] == [0, ""]
    assert results["streamed"] == [0, ""]
    assert results["on Ray"] == [
        2,
        "accrete: everything but a run with cluster.workers=0 needs the package ray, which is not "
        "installed; install it, or set that for a run\n",
    ]
    assert results["recorded"] == [
        2,
        "accrete: the record of a run needs the package mlflow, which is not installed; install "
        "it, or set tracking=off\n",
    ]
