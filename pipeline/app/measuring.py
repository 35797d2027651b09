"""Record results of shipped configs, and update the tables of documents and headers of configs.

See `results.measured` for the file of measurements and the form of a table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.app import runs as app
from pipeline.app.screen import OpenScreen
from pipeline.config.yaml_files import CONFIGS, IS_CHECKOUT, find_config, parse_override
from pipeline.graph.build import shared_revisions
from pipeline.results.measured import (
    Revisions,
    format_measurements,
    make_measurements,
    read_measurements,
    rewrite_header,
    rewrite_tables,
)
from pipeline.results.tables import RunTables
from workers.errors import UserError
from workers.methods import METHODS

MEASURED = CONFIGS / "measured.csv"
# Settings that are not among the recorded overrides: they do not change what is computed, or (seeds
# and class orders) have columns of their own in MEASURED.
NOT_RECORDED = ("name", "storage", "tracking", "cluster", "seed", "seeds", "orders")


def current_revisions() -> Revisions:
    """Return the revisions of each method in this code."""
    shared = ", ".join(f"{name} {number}" for name, number in shared_revisions().items())
    return {name: (shared, method.revision) for name, method in METHODS.items()}


def list_documents() -> list[Path]:
    """Return the documents of this checkout that can have tables of measurements."""
    top = CONFIGS.parent
    return [top / "README.md", *sorted((top / "docs").glob("*.md")), *sorted(CONFIGS.glob("*.md"))]


def list_configs() -> list[Path]:
    """Return the configs of this checkout that can have measured figures in their headers."""
    return sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "methods").glob("*.yaml")])


def measure(
    config: str, overrides: Sequence[str], open_screen: OpenScreen, command: str
) -> list[Path]:
    """Run the missing stages of a shipped config, record its results, and update the documents.

    Args:
        config: Path of the config, below `configs`.
        overrides: Overrides in the form of `--set`.
        open_screen: Creates the screen that shows the run.
        command: Command that resumes after an interruption, for messages.

    Returns:
        The files that changed.

    Raises:
        UserError: If this is no checkout, the config is not below `configs`, or a stage fails.
    """
    check_checkout()
    name = name_config(find_config(config))
    run = app.prepare(config, overrides, to_run=True, allow_replicas=True)
    result = app.execute(run, open_screen, command, command)
    return record(name, overrides, result.replicas or {"": result.tables})


def record(config: str, overrides: Sequence[str], results: Mapping[str, RunTables]) -> list[Path]:
    """Add the results of a run to the measurements, and update the documents.

    Args:
        config: Path of the config relative to `configs`, without `.yaml`.
        overrides: Overrides of the run in the form of `--set`.
        results: Name of a replica -> its results. For a run without replicas, the name is "".

    Returns:
        The files that changed.
    """
    measurements = read_measurements(MEASURED)
    current = current_revisions()
    for replica, tables in results.items():
        # names of replicas are ORDER, seed-N or ORDER-seed-N
        order = re.sub(r"(^|-)seed-\d+$", "", replica)
        measurements += make_measurements(
            config, select_overrides(overrides), order, tables, current
        )
    changed = _write(MEASURED, format_measurements(measurements))
    return changed + write_documents()


def select_overrides(overrides: Sequence[str]) -> str:
    """Return the overrides that change what is computed, sorted and separated by spaces.

    A list of names in `methods` is left out too, because it only selects methods of the config.
    """
    kept = []
    for override in overrides:
        path, value = parse_override(override)
        selects_methods = path == "methods" and isinstance(value, list)
        if path.split(".")[0] not in NOT_RECORDED and not selects_methods:
            kept.append(override.replace(" ", ""))
    return " ".join(sorted(kept))


def write_documents() -> list[Path]:
    """Update the tables of all documents and the headers of all configs; return changed files."""
    check_checkout()
    measurements = read_measurements(MEASURED)
    current = current_revisions()
    changed = []
    for path in list_documents():
        text = rewrite_tables(path.read_text(encoding="utf-8"), measurements, current)
        changed += _write(path, text)
    for path in list_configs():
        text = rewrite_header(
            name_config(path), path.read_text(encoding="utf-8"), measurements, current
        )
        changed += _write(path, text)
    return changed


def check_checkout() -> None:
    """Raise UserError if this code is not in a checkout, which has the documents."""
    if not IS_CHECKOUT:
        raise UserError(
            "`accrete measure` writes the tables of a checkout's documents, and this is an "
            "installed package; `accrete report CONFIG --json FILE` writes the results of a run"
        )


def name_config(path: Path) -> str:
    """Return the path of a config relative to `configs`, without `.yaml`."""
    absolute = Path(os.path.abspath(path))
    if not absolute.is_relative_to(CONFIGS):
        raise UserError(f"{path} is not in {CONFIGS}; only shipped configs are recorded")
    return absolute.relative_to(CONFIGS).with_suffix("").as_posix()


def _write(path: Path, text: str) -> list[Path]:
    """Write a file if its content changes. Return [path] if it did, else []."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return [path]
