"""The page of what can be called from Python: signatures and docstrings of the public modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import pipeline
from docs.site.markdown import code, escape, from_docstring
from pipeline.app import runs as app
from pipeline.config import settings as config
from pipeline.results import metrics, tables
from workers.methods import base, protocols
from workers.serving import bundle, single_tasks, versions

MODULES: tuple[ModuleType, ...] = (
    pipeline,
    app,
    config,
    tables,
    metrics,
    bundle,
    single_tasks,
    versions,
    base,
    protocols,
)
EXAMPLE = """
import pipeline

results = pipeline.load("configs/demo.yaml", seed=1).run()
print(results.accuracy_matrix("meat"))
"""
INTRODUCTION = """What the command line does is there from Python: `import pipeline` works from any
folder once `make setup` has run. A mistake in the input raises `pipeline.UserError`, whose text is
one sentence. `pipeline` itself is the way in, and its names are stable: they are listed in
`pipeline.__all__`, and [by use](docs/notebook.md). The other modules are what it stands on, and the
contract of a method; a class of `pipeline` that one of them defines is described there."""


def python_page() -> str:
    """Return the page."""
    blocks = ["# Python", INTRODUCTION, code(EXAMPLE.strip(), "python")]
    for module in MODULES:
        blocks += [f"## `{module.__name__}`", from_docstring(module.__doc__ or "")]
        for name, value in _public_members(module):
            blocks += _member_blocks(name, value)
    return "\n\n".join(blocks) + "\n"


class Annotation(str):
    """An annotation as its file has it; `inspect` would quote it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function as its file has it."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=Annotation(parameter.annotation))
        parameters.append(parameter)
    returned = Annotation(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=returned)


def _public_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the documented functions and classes that a module defines, in its order.

    `pipeline` has those of `__all__`, without the ones that another module on this page defines.
    """
    members = vars(module)
    homes = {module.__name__}
    if module is pipeline:
        members = {name: getattr(pipeline, name) for name in pipeline.__all__}
        homes = {value.__module__ for value in members.values()}
        homes -= {other.__name__ for other in MODULES if other is not pipeline}
    for name, value in members.items():
        is_member = inspect.isfunction(value) or inspect.isclass(value)
        if not is_member or name.startswith("_") or value.__module__ not in homes:
            continue
        if value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__:
            yield name, value


def _member_blocks(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`"
    if inspect.isclass(value):
        yield from _class_blocks(name, value)
        return
    yield code(f"{name}{_signature_of(value)}", "python")
    yield from_docstring(value.__doc__ or "")


def _class_blocks(name: str, value: type[Any]) -> Iterator[str]:
    """Yield the docstring, fields, properties and public functions of a class."""
    if issubclass(value, BaseModel):
        yield from_docstring(value.__doc__ or "")
        yield "Its fields are among the [settings](pipeline/config/settings.py)."
        return
    if dataclasses.is_dataclass(value):
        fields = [f"    {field.name}: {field.type}" for field in dataclasses.fields(value)]
        yield code("\n".join([f"class {name}:", *fields]), "python")
    yield from_docstring(value.__doc__ or "")
    lines = []
    for member_name, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if isinstance(member, property):
            function = member.fget
        if member_name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        summary = " ".join(inspect.cleandoc(function.__doc__).split("\n\n")[0].split())
        signature = str(_signature_of(function))
        if isinstance(member, property):
            signature = f": {inspect.signature(function).return_annotation}"
        lines.append(f"- `{member_name}{signature}`: {escape(summary)}")
    if lines:
        yield "\n".join(lines)
