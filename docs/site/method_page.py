"""A page for each method: what it does, its settings, its configs, figures and deviations."""

from __future__ import annotations

import inspect
from typing import Any

from docs.site.config_header import header_of
from docs.site.figures import RESULTS, anchor_of, figures_of
from docs.site.markdown import escape, from_docstring, table
from docs.site.pages import LINK, REPOSITORY, text_of
from docs.site.setting_text import settings_list
from pipeline.app.method_list import describe_train_defaults
from pipeline.config.settings import load
from pipeline.config.yaml_files import read_recommended, read_search
from workers.methods import METHODS
from workers.methods.base import Method

FOLDER = "configs/methods"
BACKBONES = "docs/backbones.md"
NOT_MEASURED = "not measured yet"


def source_of(name: str) -> str:
    """Return the file of a method, from the top of the repository."""
    return METHODS[name].__module__.replace(".", "/") + ".py"


def methods_by_source() -> dict[str, list[str]]:
    """Return source file -> names of the methods in it; some files hold two."""
    by_source: dict[str, list[str]] = {}
    for name in METHODS:
        by_source.setdefault(source_of(name), []).append(name)
    return by_source


def method_page(name: str) -> str:
    """Return the page of a method; its links start from the top of the repository."""
    method = METHODS[name]
    sections = {
        "Idea": _idea(method),
        "Settings": _settings(name),
        "Training where a config is silent": _training(method),
        "Configs": _configs(name),
        "Measured": _measured(name),
        "Deviations": _deviations(name),
    }
    blocks = [f"# `{name}`", _facts(method)]
    for title, body in sections.items():
        blocks += [f"## {title}", body]
    return "\n\n".join(blocks) + "\n"


def _facts(method: type[Method[Any]]) -> str:
    shape = "nothing: its tasks form a star and train in parallel"
    if method.carries:
        shape = f"{', '.join(method.carries)}: its tasks form a chain"
    rows = [
        ("family", method.family),
        ("scenarios", ", ".join(f"`{scenario}`" for scenario in sorted(method.scenarios))),
        ("steps of a task", ", ".join(f"`{step.name}`" for step in method.steps)),
        ("kept for each task", escape(method.keeps)),
        ("carried to the next task", escape(shape)),
        ("earlier answers", "may change" if method.may_forget else "stay the same, bit for bit"),
        ("backbones", _backbones(method.name)),
        ("paper", escape(method.paper) or "none"),
        ("source", f"`{source_of(method.name)}`"),
    ]
    return table(("", ""), rows)


def _backbones(name: str) -> str:
    """Return the families of backbones that a method takes by default, as their page lists them."""
    lines = [line for line in text_of(BACKBONES).splitlines() if line.startswith("|")]
    families = [cell.strip() for cell in lines[0].strip("|").split("|")]
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == f"`{name}`":
            taken = [f for f, cell in zip(families, cells, strict=True) if cell == "yes"]
            return f"{', '.join(taken)}; [more]({BACKBONES})"
    return f"see [the table]({BACKBONES})"


def _idea(method: type[Method[Any]]) -> str:
    """Return the docstrings of the method's module and class."""
    module = inspect.getmodule(method)
    texts = [module.__doc__ if module else "", method.__doc__]
    return "\n\n".join(from_docstring(text) for text in texts if text)


def _settings(name: str) -> str:
    settings = METHODS[name].Settings
    if not settings.model_fields:
        return f"`{name}` has no settings of its own."
    paper = load(str(REPOSITORY / FOLDER / f"{name}.yaml")).methods[name].settings
    blocks = [f"They stand below `methods.{name}` of a config."]
    docstring = settings.__dict__.get("__doc__")
    if docstring:
        blocks.append(from_docstring(docstring))
    return "\n\n".join([*blocks, settings_list(settings, paper)])


def _training(method: type[Method[Any]]) -> str:
    return "\n".join(f"- {escape(text)}" for text in describe_train_defaults(method))


def _configs(name: str) -> str:
    path = f"{FOLDER}/{name}.yaml"
    header = header_of(REPOSITORY / path)
    command = f"`accrete run {path}`"
    rows = [(f"[the paper's]({path})", command, header.get("expected", NOT_MEASURED))]
    for stream in read_recommended(name):
        file = f"configs/streams/{stream}.yaml"
        command = f"`accrete run {file} --method {name}`"
        rows.append((f"[{stream}]({file})", command, header.get(stream, NOT_MEASURED)))
    cells = [[_in_cell(link), _in_cell(c), _in_cell(escape(text))] for link, c, text in rows]
    listed = table(("stream", "command", "expected"), cells)
    searched = _searched(name)
    if searched:
        listed += f"\n\n`accrete search CONFIG --method {name}` searches {searched}."
    return listed


def _searched(name: str) -> str:
    """Return the settings that the search of a method varies; empty if it has none."""
    keys = read_search(name).get("space", {})
    return ", ".join(f"`{key.removeprefix(f'methods.{name}.')}`" for key in keys)


def _measured(name: str) -> str:
    blocks = []
    for figures in figures_of(name):
        link = f"[{figures.section}]({RESULTS}#{anchor_of(figures.section)})"
        rows = [[LINK.sub(r"\1", cell) for cell in row] for row in figures.rows]
        blocks += [f"{link}:", table(figures.headings, rows)]
    if not blocks:
        return f"Not measured yet. [What was measured]({RESULTS}) has all figures."
    blocks.append("Commands, seeds, revisions and what the figures mean stand behind these links.")
    return "\n\n".join(blocks)


def _deviations(name: str) -> str:
    """Return what the configs say of where they differ from the paper."""
    path = f"{FOLDER}/{name}.yaml"
    differs = header_of(REPOSITORY / path).get("differs")
    return f"[{path}]({path}): {escape(differs)}" if differs else "None is known."


def _in_cell(text: str) -> str:
    """Return Markdown without what would end a cell of a table."""
    return text.replace("\\|", "|").replace("|", "\\|")
