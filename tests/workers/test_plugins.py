"""Tests of plugins: which modules and packages are loaded, and what a file can require."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app.method_list import list_methods
from pipeline.config import settings
from pipeline.config.invocation import this_command
from pipeline.config.version import CHECKOUT
from workers import plugins
from workers.errors import UserError
from workers.methods import METHODS, registration
from workers.methods.base import Method
from workers.serving.bundle import Bundle
from workers.serving.model_file import sealed

SOURCE = '''
"""A method of somebody else."""
from workers.methods.base import Method


class Square(Method):
    """A head per task, with a penalty on large features."""

    name = "square"

    def loss(self, batch, progress):
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        return ce + 0.1 * features.square().mean(), {"ce": ce.detach()}
'''
REGISTERED = SOURCE.replace("import Method\n", "import Method\nimport pipeline\n").replace(
    "class Square", "@pipeline.register\nclass Square"
)
HOSTILE = "from pathlib import Path\nPath('was-run').touch()\n"

pytestmark = pytest.mark.usefixtures("clean_registry")


@pytest.fixture(autouse=True)
def _search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder without plugins, and undo the changes of `add_plugin`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(registration, "BROKEN", {})


def install(folder: Path, source: str, entries: str, package: str = "my_package") -> None:
    """Write an installed package with a module and entry points, and put it on the path."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{plugins.ENTRY_POINT_GROUP}]\n{entries}\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def config(**values: Any) -> dict[str, Any]:
    return {
        "name": "try",
        "stream": {"tasks": [{"card": "digits", "split": 5}]},
        "backbone": {"weights": "none", "img_size": 32},
        "methods": {"square": {}},
        "cluster": {"workers": 0},
        **values,
    }


# ---- installed packages --------------------------------------------------------------------------
def test_method_of_an_installed_package_is_found_by_entry_point(tmp_path: Path) -> None:
    install(tmp_path, SOURCE, "square = my_package:Square")
    registration.load_plugins()
    assert METHODS["square"].__module__ == "my_package"
    checked = settings.check(config(), "a config")
    assert checked.plugins == ("my_package",)
    assert settings.check(settings.dump(checked), "its record").plugins == ("my_package",)
    assert plugins.describe_package("my_package.inner") == {
        "package": "my_package",
        "version": "1.2",
    }


@pytest.mark.parametrize(
    ("source", "entries", "words"),
    [
        ("import no_such_thing", "square = my_package:Square", "No module named 'no_such_thing'"),
        ("1 / 0", "square = my_package:Square", "ZeroDivisionError"),
        (SOURCE, "square = my_package:Other", "AttributeError"),
        (SOURCE, "square = my_package", "is not a method; decorate a class"),
        (SOURCE, "cube = my_package:Square", "its class is named 'square'; give the entry point"),
    ],
)
def test_broken_package_fails_only_configs_that_use_it(
    source: str, entries: str, words: str, tmp_path: Path
) -> None:
    install(tmp_path, source, entries)
    registration.load_plugins()
    name = entries.partition(" ")[0]
    assert name not in METHODS
    assert "square" not in METHODS
    settings.check(config(methods={"linear": {}}), "a config")
    with pytest.raises(UserError, match=f"method '{name}', which does not exist; the package") as e:
        settings.check(config(methods={name: {}}), "a config")
    assert words in str(e.value)


def test_plugin_cannot_replace_a_built_in_method(tmp_path: Path) -> None:
    """The package's method is not used, and requests for `meat` show no error."""
    meat = METHODS["meat"]
    install(tmp_path, SOURCE.replace('"square"', '"meat"'), "meat = my_package:Square")
    registration.load_plugins()
    assert METHODS["meat"] is meat
    lines = list_methods().splitlines()
    (line,) = [line for line in lines if line.startswith("installed, but not usable: meat")]
    assert "which is a method of Accrete" in line


def test_misnamed_entry_point_does_not_replace_the_named_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    square, other = (type("Square", (Method,), {"name": "square"}) for _ in range(2))
    loaded = {"square": square, "cube": other}
    monkeypatch.setattr(registration, "load_installed", lambda: (loaded, {}))
    registration.load_plugins()
    assert METHODS["square"] is square
    assert "its class is named 'square'" in registration.BROKEN["cube"]


def test_printed_commands_include_the_plugin_option(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(REGISTERED)
    plugins.add_plugin("my_methods")
    assert this_command().endswith(" --plugin my_methods")


def test_method_name_of_two_packages_is_unusable(tmp_path: Path) -> None:
    install(tmp_path, SOURCE, "square = my_package:Square")
    install(tmp_path, SOURCE, "square = my_other:Square", "my_other")
    registration.load_plugins()
    assert "square" not in METHODS
    assert registration.describe_unknown("square").startswith("the package that defines it")
    assert "two packages define this entry point" in registration.BROKEN["square"]


# ---- modules -------------------------------------------------------------------------------------
def test_plugin_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(REGISTERED)
    plugins.add_plugin("my_methods")
    plugins.add_plugin("my_methods")
    assert os.environ[plugins.VARIABLE] == "my_methods"
    assert os.environ["PYTHONPATH"].endswith(str(tmp_path))
    registration.load_plugins()
    assert settings.check(config(), "a config").plugins == ("my_methods",)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("my_methods.py", "is not a valid module name; leave .py out: my_methods"),
        ("./inner/my_methods.py", "leave .py out: inner.my_methods"),
        ("a b", "give the name by which Python imports it"),
        ("os;import sys", "is not a valid module name"),
    ],
)
def test_invalid_plugin_module_name_is_refused(module: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plugins.add_plugin(module)
    assert not os.environ[plugins.VARIABLE]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, r"'my_methods' cannot be imported \(No module named .*; install its package, or"),
        ("def", r"'my_methods' cannot be imported \(SyntaxError: .*; fix the module"),
        ("import pipeline\npipeline.register(int)", "is not a method; decorate a class"),
    ],
)
def test_import_error_of_a_plugin_names_it(source: str | None, words: str, tmp_path: Path) -> None:
    if source is not None:
        (tmp_path / "my_methods.py").write_text(source)
    plugins.add_plugin("my_methods")
    with pytest.raises(UserError, match=words):
        registration.load_plugins()


# ---- files only require plugins ------------------------------------------------------------------
def test_a_config_loads_no_code(tmp_path: Path) -> None:
    """It loads neither the plugins that it requires, nor those that an extended file requires."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    sys.path.insert(0, str(tmp_path))
    base = config(plugins=["hostile"], methods={"linear": {}})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "run.yaml").write_text("extends: base.yaml\nname: other\n")
    for file in ("base.yaml", "run.yaml"):
        with pytest.raises(
            UserError, match=r"needs methods of 'hostile'.*accrete --plugin hostile COMMAND"
        ):
            settings.load(file)
    with pytest.raises(UserError, match="plugins"):
        settings.check(config(plugins=["hostile; import os"]), "a config")
    assert "hostile" not in sys.modules
    assert not (tmp_path / "was-run").exists()


def test_a_bundle_loads_no_code(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    sys.path.insert(0, str(tmp_path))
    body = sealed(
        {
            "method": "square",
            "plugins": ["hostile"],
            "settings": {},
            "backbone": {"name": "vit_tiny_patch16_224"},
        }
    )
    with pytest.raises(UserError, match=r"a model: it needs methods of 'hostile'.*if you trust"):
        Bundle(body, lambda name: b"", "a model").method()
    assert "hostile" not in sys.modules
    assert not (tmp_path / "was-run").exists()


# ---- commands ------------------------------------------------------------------------------------
def accrete(folder: Path, *argv: str, code: int = 0) -> str:
    """Run a command in a folder; return its output."""
    process = subprocess.run(
        [sys.executable, "-m", "pipeline", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), plugins.VARIABLE: ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_commands_support_the_method_of_a_plugin(workers: int, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(REGISTERED)
    body = {
        "extends": str(CHECKOUT / "configs" / "streams" / "digits.yaml"),
        "name": "mine",
        "methods": ["square"],
        "train": {"epochs": 1, "min_steps": 1},
        "cluster": {"workers": workers},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(body))
    stream = ["run.yaml"]
    assert "names method 'square'" in accrete(tmp_path, "run", *stream, code=2)
    with_plugin = ["--plugin", "my_methods"]
    assert "square" in accrete(tmp_path, *with_plugin, "methods")
    assert "average accuracy" in accrete(tmp_path, *with_plugin, "run", *stream)
    accrete(tmp_path, *with_plugin, "bundle", *stream, "--out", "model")
    images = [str(path) for path in (tmp_path / "storage").rglob("*.png")][:1]
    text = accrete(tmp_path, "predict", "model", *images, "--task", "digits-45", code=2)
    assert "needs methods of 'my_methods'" in text
    assert "--plugin my_methods" in text


@pytest.mark.slow
def test_search_supports_the_method_of_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(REGISTERED)
    search = {
        "name": "rates",
        "base": str(CHECKOUT / "configs" / "streams" / "digits.yaml"),
        "set": {"methods": "square", "train.min_steps": 1, "train.epochs": 1, "tracking": "off"},
        "space": {"methods.square.train.lr": {"dist": "choice", "values": [0.001, 0.01]}},
        "algorithm": "grid",
        "protocol": "first_k_tasks",
        "first_tasks": 1,
    }
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(search))
    text = accrete(tmp_path, "--plugin", "my_methods", "search", "search.yaml")
    assert "winner" in text
