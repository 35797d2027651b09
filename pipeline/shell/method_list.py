"""The methods and their settings as text: type, range, default, meaning, and where numbers come
from."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config import load
from workers.errors import UserError, did_you_mean
from workers.job import TrainSettings

if TYPE_CHECKING:
    from workers.methods.base import Method

PAPERS = Path(__file__).resolve().parents[2] / "configs" / "methods"
SHORTEST_LINE = 60  # characters; a narrower terminal wraps lines itself
LONGEST_LINE = 100
INDENT = "    "
SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


class Column(NamedTuple):
    """A column of the list of methods."""

    heading: str
    cells: list[str]


def list_methods() -> str:
    """Return a line for each method: its name, family, scenarios, and what it keeps for a task."""
    from workers.methods import METHODS  # imports torch

    by_family = sorted(METHODS.items(), key=lambda item: (item[1].family, item[0]))
    columns = [
        Column("method", [name for name, _ in by_family]),
        Column("family", [method.family for _, method in by_family]),
        Column("scenarios", [", ".join(sorted(m.scenarios)) for _, m in by_family]),
        Column("forgets", [_forgets(method) for _, method in by_family]),
        Column("keeps for each task", [method.keeps for _, method in by_family]),
    ]
    widths = [max(len(cell) for cell in (c.heading, *c.cells)) for c in columns]
    lines = []
    for row in zip(*((c.heading, *c.cells) for c in columns), strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        "scenario `task`: the task of an image is given; `class`: one output space grows.",
        "Give a method's name to see its settings.",
    ]
    return "\n".join(lines)


def _forgets(method: type[Method[Any]]) -> str:
    return "yes" if method.may_forget else "no"


def describe_method(name: str) -> str:
    """Return what a method is, how it is trained by default, and its settings.

    Raise `UserError` when there is no such method.
    """
    from workers.methods import METHODS  # imports torch

    if name not in METHODS:
        hint = did_you_mean(name, METHODS, f"there are: {', '.join(sorted(METHODS))}")
        raise UserError(f"there is no method {name!r}; {hint}")
    method = METHODS[name]
    paper_config = PAPERS / f"{name}-paper.yaml"
    lines = [f"{name}: {method.family}; scenarios {', '.join(sorted(method.scenarios))}"]
    lines += _wrapped(f"keeps for each task: {method.keeps}")
    if method.paper:
        lines += _wrapped(f"paper: {method.paper}")
    lines += ["", "training where a config is silent (`train`, methods.NAME.train):"]
    for text in training_texts(method):
        lines += _wrapped(text)
    lines.append("")
    paper_settings = load(str(paper_config)).methods[name].settings
    fields = dict(fields_of(method.Settings))
    if fields:
        lines.append(f"settings, below methods.{name}; their defaults are ours, and where the")
        lines.append(f"paper has another value it stands beside: {paper_config.name}")
    else:
        lines.append(f"{name} has no settings of its own")
    for key, info in fields.items():
        lines += ["", f"{key}: {type_text(info)}", *_default_lines(key, info, paper_settings)]
        lines += _wrapped(info.description or "")
    return "\n".join(lines)


def training_texts(method: type[Method[Any]]) -> list[str]:
    """Return how each step is trained where a config is silent, and where the numbers come from."""
    defaults = method.train_defaults
    texts = []
    for step in method.steps:
        if not step.trains:
            continue
        train = TrainSettings.model_validate(defaults.of_step(step.name, from_scratch=False))
        rate = f"lr {train.lr:g}"
        scratch = defaults.of_step(step.name, from_scratch=True)["lr"]
        if scratch != train.lr:
            rate += f" (from random weights {scratch:g})"
        texts.append(
            f"{step.name}: {train.optimizer}, {rate}, weight decay {train.weight_decay:g}, "
            f"{train.epochs} epochs of batches of {train.batch_size}; a task of few images gets "
            f"{train.min_steps} steps, by batches down to {train.min_batch_size} and up to "
            f"{train.max_epochs} epochs"
        )
    return [*texts, f"source: {defaults.source}"]


def fields_of(settings: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the name in a config and the field of every setting."""
    for name, info in settings.model_fields.items():
        yield info.alias or name, info


def _default_lines(key: str, info: FieldInfo, paper_settings: dict[str, Any]) -> list[str]:
    default = info.get_default(call_default_factory=True)
    text = "required" if default is PydanticUndefined else f"default {value_text(default)}"
    bounds = bounds_of(info)
    if bounds:
        text += f"; {bounds}"
    if key in paper_settings and paper_settings[key] != default:
        text += f"; in the paper {value_text(paper_settings[key])}"
    return _wrapped(text)


def value_text(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def bounds_of(info: FieldInfo) -> str:
    """Return the range of a number, such as `> 0, <= 1`; empty where there is none."""
    bounds = []
    for mark in _marks(info.annotation, info.metadata):
        for kind, sign in SIGNS.items():
            if isinstance(mark, kind):
                bounds.append(f"{sign} {getattr(mark, kind.__name__.lower()):g}")
    return ", ".join(dict.fromkeys(bounds))


def _marks(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Yield the constraints of a field, also those inside of unions."""
    yield from metadata
    for mark in getattr(annotation, "__metadata__", ()):
        yield from getattr(mark, "metadata", None) or [mark]
    for argument in get_args(annotation):
        if not isinstance(argument, (str, int, float)):
            yield from _marks(argument, [])


def type_text(info: FieldInfo) -> str:
    """Return the type of a setting in words, its words if it has some to choose from."""
    return " or ".join(dict.fromkeys(_kinds(info.annotation)))


def _kinds(annotation: Any) -> Iterator[str]:
    names = {
        float: "number",
        int: "whole number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    origin = get_origin(annotation)
    if annotation in names:
        yield names[annotation]
    elif origin is Literal:
        for word in get_args(annotation):
            yield value_text(word)
    elif origin in (tuple, list):
        inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        kinds = dict.fromkeys(kind for argument in inner for kind in _kinds(argument))
        yield f"list of {' or '.join(kinds)}"
    elif origin is dict or isinstance(annotation, type):
        yield "mapping"
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(annotation.__origin__)
    else:
        for argument in get_args(annotation):
            yield from _kinds(argument)


def _wrapped(text: str) -> list[str]:
    """Return a text as indented lines that fit into the terminal."""
    columns = shutil.get_terminal_size((LONGEST_LINE, 24)).columns
    width = min(max(columns, SHORTEST_LINE), LONGEST_LINE)
    return textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT)
