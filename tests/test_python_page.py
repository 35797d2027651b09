"""Run the code blocks of docs/notebook.md in order, on a small config in place of the demo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pipeline
from docs.site.pages import text_of
from tests import small_run

TASKS = ("digits-01", "digits-45")
SPACE = {"train.lr": {"dist": "choice", "values": [1e-9, 3e-3]}}  # the first value learns nothing


def write_configs(folder: Path) -> None:
    """Write a config and a search to the paths that the page uses."""
    cards = {name: small_run.make_card(folder, name, name[-2:]) for name in TASKS}
    body = small_run.make_body(
        folder,
        cards,
        ["linear", "meat"],
        name="demo",
        train={"epochs": 1},
        data={"val_fraction": 0.3},
    )
    (folder / "configs" / "search").mkdir(parents=True)
    small_run.write_config(folder / "configs" / "demo.yaml", body)
    body |= {"methods": {"individual": {}}, "train": {**body["train"], "epochs": 20}}
    small_run.write_config(folder / "configs" / "base.yaml", body)
    search: dict[str, Any] = {"base": "../base.yaml", "space": SPACE, "seeds": [0]}
    small_run.write_config(folder / "configs" / "search" / "meat-lambda-alpha.yaml", search)


@pytest.mark.slow
def test_every_code_block_of_the_notebook_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnxruntime", "onnxscript", "optuna"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    results = pipeline.load("configs/demo.yaml").run(quiet=True)
    results.accuracy_matrix("linear").to_csv("peer.csv")
    Image.fromarray(small_run.digits()[0][3]).save("three.png")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text_of("docs/notebook.md"), re.DOTALL):
        exec(compile(block, "docs/notebook.md", "exec", dont_inherit=True), names)
    assert set(names["experiment"].plan()["status"]) == {"hit"}
    assert names["model"].tasks == [*TASKS]
    assert {"curves", "matrices", "summary"} <= set(names["comparison"].tables)
    assert len(names["found"].trials) == 8
    assert names["found"].importance["setting"].tolist() == [*SPACE]
    for path in ("four-five/config.json", "four-five.onnx", "digits-45.task", "model/model.json"):
        assert Path(path).exists()
