"""Describe the methods and their settings as text, for `accrete methods` and `pipeline.methods`.

The text of a setting has its type, range, default and meaning, and the value of the paper if it
differs from the default.
"""

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

from pipeline.config.settings import load
from pipeline.config.text import table_text
from pipeline.config.yaml_files import METHODS as METHOD_FILES
from pipeline.results.tables import Row
from workers.errors import UserError
from workers.job import TrainSettings

if TYPE_CHECKING:
    from workers.methods.base import Method

SHORTEST_LINE = 60  # characters; a narrower terminal wraps the lines itself
LONGEST_LINE = 100  # characters
INDENT = "    "
SCENARIOS = ("task", "class", "domain")
OLD_IMAGES = ("none", "exemplars", "all")  # images of earlier tasks that are read, fewest first
TRAINED = ("nothing", "modules", "backbone")  # trained parts of the network, smallest first
# titles of the groups in the list of methods
TASK_NEEDED = "the task of an image must be given"
TASK_NOT_NEEDED = {  # key: an item of OLD_IMAGES
    "none": "without the task of an image, and without images of earlier tasks",
    "exemplars": "without the task of an image, with some images of earlier tasks",
    "all": "without the task of an image, with all images of earlier tasks",
}
# constraint -> sign; the limit of a constraint is in an attribute named like the class: `Ge.ge`
SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


class Setting(NamedTuple):
    """A setting of a method.

    Attributes:
        name: Name in a config.
        kind: Type of the values as text, for example `whole number or null`.
        default: Default value as text. None if the setting is required.
        bounds: Range of a number, for example `> 0, <= 1`; empty without limits.
        paper: Value of the method's paper if it differs from the default, else None.
        meaning: Description of the setting.
    """

    name: str
    kind: str
    default: str | None
    bounds: str
    paper: str | None
    meaning: str


def method_rows() -> list[Row]:
    """Return a row for each method.

    The rows are sorted by whether the task of an image must be given (last), the images of earlier
    tasks that the method reads (fewest first), the part of the network that it trains (smallest
    first), and the name. `removal` is `exact` if a task can be removed without training other tasks
    again.
    """
    from workers.methods import METHODS  # imports torch
    from workers.serving.single_tasks import trains_shared

    rows: list[Row] = []
    for name, method in METHODS.items():
        rows.append(
            {
                "method": name,
                "family": method.family,
                "scenarios": "/".join(sorted(method.scenarios)),
                "old images": _find_old_images(method),
                "trains": _find_trained_part(method),
                "removal": "trains again" if trains_shared(method) else "exact",
                "forgets": method.may_forget,
                "keeps for each task": method.keeps,
            }
        )

    def order(row: Row) -> tuple[Any, ...]:
        images, part = OLD_IMAGES.index(row["old images"]), TRAINED.index(row["trains"])
        return row["scenarios"] == "task", images, part, row["method"]

    return sorted(rows, key=order)


def _find_old_images(method: type[Method[Any]]) -> str:
    """Return which images of earlier tasks are read to train a task: an item of OLD_IMAGES."""
    if method.trains_on == "seen":
        return "all"
    return "exemplars" if method.reads == "seen" else "none"


def _find_trained_part(method: type[Method[Any]]) -> str:
    """Return the part of the network that is trained by gradients: an item of TRAINED."""
    if not method.has_training():
        return "nothing"
    return "modules" if method.freezes_backbone else "backbone"


def list_methods() -> str:
    """Return a text with a line for each method, grouped by requirements."""
    from workers.methods.registration import BROKEN  # imports torch

    groups: dict[str, list[list[str]]] = {}
    for row in method_rows():
        scenarios = str(row["scenarios"])
        group = TASK_NEEDED if scenarios == "task" else TASK_NOT_NEEDED[row["old images"]]
        letters = " ".join(name[0].upper() for name in SCENARIOS if name in scenarios)
        groups.setdefault(group, []).append(
            [
                row["method"],
                letters,
                row["trains"],
                row["removal"],
                "yes" if row["forgets"] else "no",
                row["keeps for each task"],
            ]
        )
    heading = ["method", "scenarios", "trains", "removal", "forgets", "keeps for each task"]
    rows = [row for group in groups.values() for row in group]
    lines = [line.rstrip() for line in table_text(heading, rows, left=heading).splitlines()]
    text = lines[: len(lines) - len(rows)]
    position = len(text)
    for title, group_rows in groups.items():
        text += ["", f"{title}:", *lines[position : position + len(group_rows)]]
        position += len(group_rows)
    return "\n".join(
        [
            *text,
            "",
            "scenarios: T (task): the task is given; C (class): one output space grows;",
            "D (domain): the same classes in each task, which is not given.",
            "trains: small modules and heads, the whole backbone, or nothing by gradients.",
            "removal of a task: exact, or later tasks must train again.",
            "Give a method's name to see its settings.",
            *(f"installed, but not usable: {name} ({reason})" for name, reason in BROKEN.items()),
        ]
    )


def describe_method(name: str) -> str:
    """Describe a method: its family and paper, its default training, and its settings.

    Raises:
        UserError: If no such method exists.
    """
    from workers.methods import METHODS  # imports torch

    settings = list_settings(name)
    method = METHODS[name]
    lines = [f"{name}: {method.family}; scenarios {', '.join(sorted(method.scenarios))}"]
    lines += _wrap_text(f"keeps for each task: {method.keeps}")
    if method.paper:
        lines += _wrap_text(f"paper: {method.paper}")
    lines += ["", "default training settings (`train`, methods.NAME.train):"]
    for text in describe_train_defaults(method):
        lines += _wrap_text(text)
    lines.append("")
    if settings:
        lines.append(f"settings, below methods.{name}; if the paper has another value than the")
        lines.append(f"default, it is given too (from {find_paper_config(name).name})")
    else:
        lines.append(f"{name} has no settings of its own")
    for setting in settings:
        lines += ["", f"{setting.name}: {setting.kind}", *_format_default(setting)]
        lines += _wrap_text(setting.meaning)
    return "\n".join(lines)


def find_paper_config(method: str) -> Path:
    """Return the path of the config with the settings of a method's paper."""
    return METHOD_FILES / f"{method}.yaml"


def list_settings(name: str) -> list[Setting]:
    """Return the settings of a method.

    Raises:
        UserError: If no such method exists.
    """
    from workers.methods import METHODS  # imports torch
    from workers.methods.registration import describe_unknown

    if name not in METHODS:
        raise UserError(f"there is no method {name!r}; {describe_unknown(name)}")
    path = find_paper_config(name)
    in_paper: dict[str, Any] = {}
    if path.exists():  # an external method has no such file
        in_paper = load(str(path)).methods[name].settings
    settings = []
    for key, info in list_fields(METHODS[name].Settings):
        value = info.get_default(call_default_factory=True)
        default = None
        if value is not PydanticUndefined:
            default = format_yaml_value(value)
        paper = None
        if key in in_paper and in_paper[key] != value:
            paper = format_yaml_value(in_paper[key])
        meaning = info.description or ""
        settings.append(
            Setting(key, describe_setting_type(info), default, format_bounds(info), paper, meaning)
        )
    return settings


def describe_train_defaults(method: type[Method[Any]]) -> list[str]:
    """Describe the default training of each step that trains, and the source of the values."""
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


def list_fields(settings: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the name in a config and the pydantic field of each setting."""
    for name, info in settings.model_fields.items():
        yield info.alias or name, info


def _format_default(setting: Setting) -> list[str]:
    text = "required"
    if setting.default is not None:
        text = f"default {setting.default}"
    if setting.bounds:
        text += f"; {setting.bounds}"
    if setting.paper is not None:
        text += f"; in the paper {setting.paper}"
    return _wrap_text(text)


def format_yaml_value(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_yaml_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def format_bounds(info: FieldInfo) -> str:
    """Return the range of a number, for example `> 0, <= 1`, or "" without limits."""
    bounds = []
    for mark in _find_constraints(info.annotation, info.metadata):
        for kind, sign in SIGNS.items():
            if isinstance(mark, kind):
                bounds.append(f"{sign} {getattr(mark, kind.__name__.lower()):g}")
    return ", ".join(dict.fromkeys(bounds))


def _find_constraints(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Yield the constraints of a field, including constraints on members of a union.

    A member `Annotated[int, Field(ge=0)]` has a `FieldInfo` that holds the constraint, in its own
    `metadata`.
    """
    yield from metadata
    for mark in getattr(annotation, "__metadata__", ()):
        yield from getattr(mark, "metadata", None) or [mark]
    for argument in get_args(annotation):
        if not isinstance(argument, (str, int, float)):
            yield from _find_constraints(argument, [])


def describe_setting_type(info: FieldInfo) -> str:
    """Describe the type of a setting: a word such as `number`, or the values of a `Literal`."""
    return " or ".join(dict.fromkeys(_find_type_names(info.annotation)))


def _find_type_names(annotation: Any) -> Iterator[str]:
    """Yield a word for each type in an annotation, or the values of a `Literal`."""
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
            yield format_yaml_value(word)
    elif origin in (tuple, list):
        inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        kinds = dict.fromkeys(kind for argument in inner for kind in _find_type_names(argument))
        yield f"list of {' or '.join(kinds)}"
    elif origin is dict or isinstance(annotation, type):
        yield "mapping"
    elif hasattr(annotation, "__metadata__"):
        yield from _find_type_names(annotation.__origin__)
    else:
        for argument in get_args(annotation):
            yield from _find_type_names(argument)


def _wrap_text(text: str) -> list[str]:
    """Wrap a text into indented lines that fit into the terminal."""
    columns = shutil.get_terminal_size((LONGEST_LINE, 24)).columns
    width = min(max(columns, SHORTEST_LINE), LONGEST_LINE)
    return textwrap.wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
    )
