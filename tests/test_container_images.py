"""Tests of the images of configs/cluster/Dockerfile: pinned, not root, without test tools.

The tests parse the Dockerfile; they build nothing.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from pipeline.config import version

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKERFILE = REPOSITORY / "configs" / "cluster" / "Dockerfile"
PINNED = dict(
    line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
)
TARGETS = ("cpu", "gpu")
TEST_TOOLS = {"pytest", "pytest-timeout", "pytest-xdist", "mypy", "ruff", "moto", "pip-audit"}


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, with continuation lines joined."""

    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parsed = []
    for line in joined.splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            parsed.append(Instruction(name, " ".join(rest.split())))
    return parsed


def stages(text: str) -> dict[str, list[Instruction]]:
    """Return stage name -> instructions, starting with the base stage's."""
    by_name: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for instruction in instructions(text):
        if instruction.name == "FROM":
            image, _, name = instruction.text.partition(" AS ")
            current = [*by_name.get(image, [instruction])]
            by_name[name] = current
        else:
            current.append(instruction)
    return by_name


STAGES = stages(DOCKERFILE.read_text())


def texts(target: str, name: str) -> list[str]:
    """Return the texts of all instructions of a target that have this name."""
    return [instruction.text for instruction in STAGES[target] if instruction.name == name]


def installed_closure(names: list[str]) -> set[str]:
    """Return the packages of requirements and their dependencies, as installed here."""
    closure: set[str] = set()
    waiting = [(Requirement(name).name, Requirement(name).extras) for name in names]
    while waiting:
        name, extras = waiting.pop()
        plain = name.lower().replace("_", "-")
        if plain in closure and not extras:
            continue
        closure.add(plain)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in (extras or {""})]
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate(each) for each in environments):
                continue
            needed = requirement.name.lower().replace("_", "-")
            if needed not in closure:
                waiting.append((requirement.name, requirement.extras))
    return closure


def test_images_use_pinned_ray_and_a_supported_python() -> None:
    assert set(TARGETS) <= STAGES.keys()
    least = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    for target in TARGETS:
        (image,) = texts(target, "FROM")
        base = re.fullmatch(
            rf"rayproject/ray:{re.escape(PINNED['ray'])}-py3(\d+)-cpu AS \w+", image
        )
        assert base, f"{image} is not the pinned one"
        assert int(base[1]) >= int(least.rpartition(".")[2])


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_numeric_user_without_root_access(target: str) -> None:
    """Kubernetes can check `runAsNonRoot` only if the image's user is a number."""
    user = texts(target, "USER")[-1]
    assert user.isdigit()
    assert int(user) > 0
    assert "rm -f /usr/bin/sudo" in texts(target, "RUN"), "Ray's user could become root with sudo"


@pytest.mark.parametrize("target", TARGETS)
def test_image_installs_pinned_versions_without_caches(target: str) -> None:
    for line in texts(target, "RUN"):
        if "pip install" in line:
            assert "--no-cache-dir" in line
            assert re.search(r"-c \S*constraints\.txt", line)
            assert not re.search(r"-r \S*constraints", line), (
                "constraints.txt also lists test tools"
            )
        if "apt-get" in line:
            assert line.startswith("apt-get update &&"), "an outdated package list would be used"
            assert "apt-get install -y --no-install-recommends" in line
            assert line.endswith("rm -rf /var/lib/apt/lists/*")
    assert sum("pip install" in line for line in texts(target, "RUN")) == 1
    assert not texts(target, "ADD")
    assert not any(re.search(r"(?i)token|secret|passw|key", line) for line in texts(target, "ENV"))
    assert all(path.startswith("/") for path in texts(target, "WORKDIR"))


def test_only_gpu_image_has_a_c_compiler() -> None:
    """Triton needs a C compiler when a kernel first runs."""
    compilers = {}
    for target in TARGETS:
        compilers[target] = any(
            {"gcc", "libc6-dev"} <= {*shlex.split(line)} for line in texts(target, "RUN")
        )
    assert compilers == {"cpu": False, "gpu": True}
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in texts("gpu", "ENV")


@pytest.mark.parametrize("target", TARGETS)
def test_copied_paths_exist_and_are_sent_to_builder(target: str) -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored, "unlisted files must be ignored: environments and results take gigabytes"
    copied = []
    for line in texts(target, "COPY"):
        copied += [word for word in line.split() if not word.startswith("--")][:-1]
    assert {"pipeline", "workers", "datasets", "configs"} <= {*copied}
    for path in copied:
        assert (REPOSITORY / path).exists(), path
        assert any(path == each or fnmatch(path, f"{each}/*") for each in sent), path
    assert {path.partition("/")[0] for path in copied} == {*sent}


@pytest.mark.parametrize("target", TARGETS)
def test_copied_files_suffice_to_find_version_and_commit(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has neither git nor the rest of the checkout."""
    for line in texts(target, "COPY"):
        *sources, goal = [word for word in line.split() if not word.startswith("--")]
        if goal.startswith("/"):
            continue
        for source in sources:
            (tmp_path / goal).mkdir(exist_ok=True)
            (tmp_path / goal / (source if goal == "./" else "")).touch()
    for name in ("pyproject.toml", "constraints.txt"):
        assert (tmp_path / name).is_file(), f"the code reads {name}"
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    assert version.get_version(tmp_path).commit == ""
    monkeypatch.setenv("ACCRETE_COMMIT", "1234-dirty")
    assert version.get_version(tmp_path).commit == "1234-dirty"
    assert "COMMIT" in texts(target, "ARG")
    assert "ACCRETE_COMMIT=$COMMIT" in texts(target, "ENV")


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the project, including these extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [*extras]
    found: list[str] = [*project["dependencies"]]
    while names:
        for text in project["optional-dependencies"][names.pop()]:
            requirement = Requirement(text)
            if requirement.name == "accrete":  # an extra that includes others
                names += requirement.extras
            else:
                found.append(text)
    return found


def test_runtime_requirements_install_no_test_tools() -> None:
    closure = installed_closure(requirements("all"))
    assert {"torch", "ray", "mlflow", "optuna", "psutil", "boto3"} <= closure
    assert not closure & TEST_TOOLS
    assert installed_closure(requirements("all", "dev")) >= TEST_TOOLS, "`make setup` installs them"
