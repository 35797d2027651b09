"""Tests of the wheel in a separate environment: contents, commands, training, external methods."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from PIL import Image

from pipeline.config.version import CHECKOUT

BUILT_FROM = ("pipeline", "workers", "configs", "datasets")
DATASETS = """
from importlib.util import find_spec
spec = find_spec("datasets")
print(spec and spec.submodule_search_locations)
"""
ORIGIN = "import pipeline, workers; print(pipeline.__file__); print(workers.__file__)"
IN_PYTHON = """
import pipeline
run = pipeline.load("configs/streams/digits.yaml", methods="linear", tracking="off")
print(len(run.plan()), "stages")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of this checkout, because a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source / name)
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    pip("wheel", *options, str(source))
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with our requirements and the wheel."""
    prefix = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(prefix, symlinks=True)
    (site_packages,) = prefix.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "packages.pth").write_text("\n".join(packages))
    pip("--python", str(prefix / "bin" / "python"), "install", "-q", "--no-deps", "--no-index",
        str(wheel))  # fmt: skip
    return prefix


def pip(*arguments: str) -> None:
    """Run the pip of the test environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=900)


def run(environment: Path, folder: Path, *argv: str, code: int = 0, **variables: str) -> str:
    """Run a program of an environment in a folder, and return its output."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ACCRETE"))}
    process = subprocess.run(
        [environment / "bin" / argv[0], *argv[1:]],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout + process.stderr


def write_decoys(folder: Path) -> None:
    """Write packages with the same names as ours, which must not be imported."""
    for name in ("pipeline", "workers"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('a decoy')")


def test_the_wheel_has_packages_configs_and_cards(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    places = {"pipeline": "pipeline", "workers": "workers", "configs": "pipeline/configs",
              "datasets": "pipeline/cards"}  # fmt: skip
    for folder, place in places.items():
        files = [p for p in (CHECKOUT / folder).rglob("*") if p.is_file()]
        tracked = [p for p in files if "__pycache__" not in p.parts]
        missing = {f"{place}/{p.relative_to(CHECKOUT / folder)}" for p in tracked} - names
        assert not missing
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if "dist-info" not in top} == {"pipeline", "workers"}


@pytest.mark.slow
def test_the_wheel_runs_in_any_folder_and_knows_shipped_configs(
    environment: Path, tmp_path: Path
) -> None:
    write_decoys(tmp_path)
    assert "accrete 0." in run(environment, tmp_path, "accrete", "--version")
    text = run(environment, tmp_path, "accrete", "plan", "missing.yaml", code=2)
    assert text.startswith("accrete: config 'missing.yaml' does not exist")
    text = run(environment, tmp_path, "accrete", "plan", "configs/demo.yaml")
    assert "stages: 0 up to date" in text
    assert "meat/digits-45/train" in text


@pytest.mark.slow
def test_only_the_two_packages_can_be_imported(environment: Path, tmp_path: Path) -> None:
    """`import datasets` imports the package of Hugging Face, or fails."""
    origins = run(environment, tmp_path, "python", "-c", ORIGIN).split("\n")
    assert all("environment" in origin for origin in origins if origin)
    assert str(CHECKOUT) not in run(environment, tmp_path, "python", "-c", DATASETS)
    text = run(environment, tmp_path, "python", "-m", "pipeline", "--help")
    assert text.startswith("usage: python -m pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_wheel_trains_on_digits(workers: int, environment: Path, tmp_path: Path) -> None:
    assert "stages" in run(environment, tmp_path, "python", "-c", IN_PYTHON)
    write_decoys(tmp_path)
    options = ["--method", "linear", "--set", "train.epochs=1", "--set", "train.min_steps=1"]
    options += ["--set", f"cluster.workers={workers}"]
    text = run(environment, tmp_path, "accrete", "run", "configs/streams/digits.yaml", *options)
    assert "average accuracy" in text
    assert (tmp_path / "storage" / "runs").is_dir()


@pytest.mark.slow
def test_a_package_with_a_method_works_beside_the_wheel(environment: Path, tmp_path: Path) -> None:
    """The package's test passes, and run, search, bundle and predict know its method."""
    text = run(environment, tmp_path, "accrete", "methods", "square", code=2)
    assert "there is no method 'square'" in text
    run(environment, tmp_path, "accrete", "methods", "new", "square")
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index"]
    python = str(environment / "bin" / "python")
    pip("--python", python, "install", *options, str(tmp_path / "square"))
    text = run(environment, tmp_path / "square", "python", "-m", "pytest", "-q")
    assert " passed" in text
    assert "failed" not in text
    config = {
        "name": "mine",
        "stream": {"tasks": [{"card": "digits", "split": 5}]},
        "backbone": {"weights": "none", "img_size": 32},
        "methods": ["square"],
        "train": {"epochs": 1, "min_steps": 1},
        "cluster": {"workers": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    search = {
        "name": "rates",
        "base": "run.yaml",
        "space": {"methods.square.weight": {"dist": "choice", "values": [0.01, 0.1]}},
        "algorithm": "grid",
        "protocol": "first_k_tasks",
        "first_tasks": 1,
    }
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(search))
    assert "average accuracy" in run(environment, tmp_path, "accrete", "run", "run.yaml")
    assert "winner" in run(environment, tmp_path, "accrete", "search", "search.yaml")
    run(environment, tmp_path, "accrete", "bundle", "run.yaml", "--out", "model")
    image = tmp_path / "image.png"
    Image.new("L", (8, 8)).save(image)
    arguments = ["model", str(image), "--task", "digits-1"]
    assert "digits-1" in run(environment, tmp_path, "accrete", "predict", *arguments)


def test_environment_of_make_setup_runs_this_checkout(tmp_path: Path) -> None:
    script = Path(sys.prefix) / "bin" / "accrete"
    if not script.exists() or (CHECKOUT / ".venv").is_symlink():
        pytest.skip("this environment was not made by `make setup` of this checkout")
    text = run(Path(sys.prefix), tmp_path, "accrete", "--version")
    assert text.strip().endswith(f"from {CHECKOUT}")
    assert str(CHECKOUT) not in run(Path(sys.prefix), tmp_path, "python", "-c", DATASETS)
