"""Tests of `register`: the classes that it accepts, the digest of their code, and workers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, StageJob, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Method, MethodSettings
from workers.methods.code_digest import code_digest
from workers.methods.registration import (
    explain_not_importable,
    get_code_digest,
    load_method,
    register,
)

SOURCE = '''
"""A module of somebody."""
import functools
import math

from torch import nn
from workers.methods.base import Method, MethodSettings

SCALE = 2.0
NAMES = {"b", "a", "c"}
loss = 5  # what the class has as an attribute alone


def double(value):
    """Return twice the value."""
    return SCALE * value


class Base(Method):
    def loss(self, batch, progress):
        loss, terms = super().loss(batch, progress)
        return double(loss), terms


class MySettings(MethodSettings):
    rank: int = 4


class Outside(Base):
    name = "outside"
    Settings = MySettings
    carries = ("weights",)

    @property
    def share(self):
        return [name for name in NAMES if name != "a"]

    @classmethod
    def steps_for(cls, settings, position):
        return sorted(cls.steps, key=lambda step: math.sqrt(step.position))
'''


pytestmark = pytest.mark.usefixtures("clean_registry")


def class_from(source: str = SOURCE, module: str = "__main__") -> Any:
    """Return the class `Outside` of a module with this source."""
    namespace = ModuleType(module)
    exec(compile(dedent(source), "a file", "exec", dont_inherit=True), namespace.__dict__)
    return namespace.__dict__["Outside"]


# ---- the registry --------------------------------------------------------------------------------
def test_a_class_is_registered_and_replaced() -> None:
    first = class_from()
    assert register(first) is first
    assert METHODS["outside"] is first
    second = register(class_from())
    assert METHODS["outside"] is second


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, r"Outside\.name is None, and a config names the method by it"),
        ({"name": "a b"}, r"Outside\.name is 'a b', and a config names"),
        ({"name": "meat"}, r"Outside\.name is 'meat', which is a method of Accrete; give"),
        ({"name": "outside", "Settings": dict}, r"Outside\.Settings is <class 'dict'>; make it"),
    ],
)
def test_class_with_invalid_name_or_settings_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        register(type("Outside", (Method,), body))
    assert "outside" not in METHODS


def test_class_that_is_no_method_is_refused() -> None:
    with pytest.raises(UserError, match="is not a method; decorate a class"):
        register(dict)  # type: ignore[type-var]


# ---- the code digest -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return double(loss)", "return 2 * double(loss)"),
        ("return SCALE * value", "return value"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ('"b", "a", "c"', '"b", "a"'),
        ('name != "a"', 'name != "b"'),
        ("math.sqrt(step", "math.exp(step"),
        ('("weights",)', '("masks",)'),
        ("class Outside(Base)", "class Outside(Method)"),
        ("    rank: int = 4", "    rank: int = 4\n\n    def check(self):\n        return 1"),
    ],
)
def test_a_change_of_the_code_changes_the_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert code_digest(class_from(SOURCE.replace(old, new))) != code_digest(class_from())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# what", "# whatever"),
        ("Return twice", "Return two times"),
        ("loss = 5", "loss = 6"),
        ("SCALE = 2.0", "\n\nother = 1\nSCALE = 2.0"),
        ('"b", "a", "c"', '"c", "b", "a"'),
    ],
)
def test_unused_code_does_not_change_the_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert code_digest(class_from(SOURCE.replace(old, new))) == code_digest(class_from())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("[[1], 2]", "[[1, 2]]"),
        ("{'a': {'b': 1}, 'c': 2}", "{'a': {'b': 1, 'c': 2}}"),
        # the text of a large array shows only a few values
        ("torch.zeros(2000)", "torch.eye(2000)[1000]"),
        ("torch.zeros(4)", "torch.zeros(2, 2).reshape(4).to(torch.int32)"),
        ("numpy.zeros(2000)", "numpy.eye(2000)[1000]"),
        ("numpy.array(['a', None])", "numpy.array(['b', None])"),
    ],
)
def test_values_that_look_alike_have_different_digests(one: str, two: str) -> None:
    digests = set()
    for value in (one, two):
        source = SOURCE.replace("import math", "import math\nimport numpy\nimport torch")
        source = source.replace('name = "outside"', f'name = "outside"\n    value = {value}')
        digests.add(code_digest(class_from(source)))
        assert digests == {*digests, code_digest(class_from(source))}
    assert len(digests) == 2


def test_objects_of_the_module_are_in_the_digest() -> None:
    """Their `repr` shows neither the values nor, without its address, the function."""
    digests = []
    for rate in (0.1, 0.1, 0.2):
        source = SOURCE.replace("class Base(", "class Config:\n    pass\n\n\nclass Base(")
        value = f"CONFIG.rate = {rate}\nTABLE = {{double: 2}}\n\n\nclass Outside("
        source = source.replace("class Outside(", f"CONFIG = Config()\n{value}")
        source = source.replace("return [name", "return [CONFIG.rate, TABLE] + [name")
        digests.append(code_digest(class_from(source)))
    assert digests[0] == digests[1] != digests[2]


def test_special_methods_are_in_the_digest() -> None:
    digests = {code_digest(class_from())}
    for body in ("super().__new__(cls)", "object.__new__(cls)"):
        method = f"    def __new__(cls, *args):\n        return {body}\n\n    @property"
        digests.add(code_digest(class_from(SOURCE.replace("    @property", method))))
    for name in ("a", "b"):
        method = f"    def __init_subclass__(cls):\n        cls.{name} = 1\n\n    @property"
        digests.add(code_digest(class_from(SOURCE.replace("    @property", method))))
    assert len(digests) == 5


def test_digest_is_equal_in_notebook_and_module() -> None:
    assert code_digest(class_from(module="my_methods")) == code_digest(class_from())


def test_functions_of_external_modules_are_in_the_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SOURCE.replace("import math", "import math\nimport my_helpers")
    source = source.replace("SCALE * value", "my_helpers.scale(value)")
    digests = []
    for scale in (2, 3):
        helpers = ModuleType("my_helpers")
        exec(f"def scale(value):\n    return {scale} * value", helpers.__dict__)
        monkeypatch.setitem(sys.modules, "my_helpers", helpers)
        digests.append(code_digest(class_from(source)))
    assert digests[0] != digests[1]


def test_a_method_of_this_project_has_no_digest() -> None:
    assert get_code_digest("meat") == ""


# ---- other processes -----------------------------------------------------------------------------
JOB = StageJob(
    "outside/a/train",
    "key",
    "train",
    "root",
    "outside",
    {},
    BackboneSettings(),
    DataSettings(),
    TrainSettings(),
    "task",
    0,
    None,
    (),
    method_module="my_methods",
)
REGISTERS = "\nfrom workers.methods.registration import register\nregister(Outside)\n"


def test_worker_imports_method_module_and_reloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "my_methods.py"
    for scale in ("2.0", "3.0"):
        source = SOURCE.replace("SCALE = 2.0", f"SCALE = {scale}")
        file.write_text(source + REGISTERS)
        code = code_digest(class_from(source))
        assert load_method(replace(JOB, method_code=code)).__module__ == "my_methods"
        assert get_code_digest("outside") == code
        assert explain_not_importable("outside") == ""
    with pytest.raises(UserError, match="my_methods differs between this process and the one"):
        load_method(replace(JOB, method_code="0" * 16))
    missing = replace(JOB, method_module="no_such_module", method_code="0" * 16)
    with pytest.raises(UserError, match="no_such_module, which a worker cannot import"):
        load_method(missing)


def test_class_that_workers_cannot_import_is_explained() -> None:
    class Local(Method[MethodSettings]):
        name = "local"

    register(class_from())
    register(Local)
    assert explain_not_importable("outside") == "its class is defined in a notebook or script"
    assert explain_not_importable("local") == "its class is defined inside a function"
    register(class_from(module="never_imported"))
    assert "never_imported is not a module that Python imported" in explain_not_importable(
        "outside"
    )
    assert explain_not_importable("meat") == ""
