"""Tables of papers, in `configs/papers/NAME.yaml`: which runs compute them, and the paper's values.

A table has up to three scales. `paper` is the table on the paper's data. `real` and `small` compute
the same rows on smaller data, to see whether the order of the methods is the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from pydantic import Field

from pipeline.config.settings import Name, checked
from pipeline.config.yaml_files import CONFIGS, format_override, read_yaml
from workers.errors import UserError, did_you_mean
from workers.job import Frozen

PAPERS = CONFIGS / "papers"
Scale = Literal["paper", "real", "small"]
MAX_ENTRIES = 100  # of rows, columns, parts and runs in a file
TASK = "task:"  # prefix of the value of a column with the accuracy on one task


class TableRun(Frozen):
    """A config that computes rows of a table."""

    config: str = Field(description="path of the config, from the folder of the table's file")
    methods: tuple[Name, ...] = Field(
        (), description="methods by name, as with `--method`; default: those of the config"
    )
    set: tuple[str, ...] = Field((), description="overrides, as with `--set`")


class TableScale(Frozen):
    """The runs and columns of a table at one scale."""

    about: str = Field(description="what is computed, and the data that it needs")
    runs: dict[Name, TableRun] = Field(min_length=1, max_length=MAX_ENTRIES, description="by name")
    columns: dict[str, str] = Field(
        min_length=1,
        max_length=MAX_ENTRIES,
        description="heading -> name of a metric, or `task:NAME` for the accuracy on a task after "
        "the last one",
    )
    parts: dict[str, tuple[str, ...]] = Field(
        {"": ()},
        min_length=1,
        max_length=MAX_ENTRIES,
        description="title -> overrides; each part has all rows and columns, such as a table for "
        "each of several backbones",
    )

    def find_runs(self, row: TableRow) -> list[str]:
        """Return the names of the runs that may compute a row; one for a valid table.

        It is the run that the row names, if this scale has it; else the run that lists the row's
        method; else the run that lists no methods, and so takes those of its config.
        """
        if row.run in self.runs:
            return [row.run]
        listed = [name for name, run in self.runs.items() if row.method in run.methods]
        return listed or [name for name, run in self.runs.items() if not run.methods]


class TableRow(Frozen):
    """A row of a table."""

    method: Name = Field(description="label of the method in the run")
    run: Name | None = Field(
        None, description="name of the run, for a method that is in no run or several of a scale"
    )
    minus: str = Field("", description="name of another row, whose values are subtracted")
    paper: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="part -> column -> value in the paper, for the parts and columns of scale "
        "`paper`; in %",
    )


class PaperTable(Frozen):
    """A table of a paper."""

    title: str
    source: str = Field(description="authors, title, year")
    differs: str = Field("", description="how the computation differs from the paper's")
    rows: dict[str, TableRow] = Field(min_length=1, max_length=MAX_ENTRIES)
    scales: dict[Scale, TableScale] = Field(min_length=1)


class PartRun(NamedTuple):
    """A run for one part of a table.

    Attributes:
        part: Title of the part.
        run: Name of the run in the table's file.
        config: Path of the config.
        overrides: Overrides in the form of `--set`, including `name=...` of the run.
    """

    part: str
    run: str
    config: Path
    overrides: list[str]


def as_scale(text: str) -> Scale:
    """Convert a text to a scale.

    Raises:
        UserError: If there is no such scale.
    """
    for scale in get_args(Scale):
        if text == scale:
            return cast(Scale, scale)
    raise UserError(f"there is no scale {text!r:.40}; it is one of {', '.join(get_args(Scale))}")


def list_paper_tables() -> list[str]:
    """Return the names of all tables that come with Accrete."""
    return sorted(path.stem for path in PAPERS.glob("*.yaml"))


def find_paper_table(name: str) -> Path:
    """Return the file of a table. A path is returned unchecked.

    Args:
        name: Name of a table that comes with Accrete, or path of a .yaml or .yml file.

    Raises:
        UserError: If there is no table of this name.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    known = list_paper_tables()
    if name not in known:
        hint = did_you_mean(name, known, f"there are: {', '.join(known)}")
        raise UserError(f"there is no table {name!r:.60}; {hint}; or give the path of a file")
    return PAPERS / f"{name}.yaml"


def read_paper_table(file: Path) -> PaperTable:
    """Read the file of a table.

    Raises:
        UserError: If the file cannot be read, or its parts contradict each other.
    """
    table = checked(PaperTable, read_yaml(file, "a table of a paper"), "", str(file))
    for problem in _find_problems(table):
        raise UserError(f"{file}: {problem}")
    return table


def _find_problems(table: PaperTable) -> Iterator[str]:
    """Yield a sentence for each contradiction in a table."""
    for name, row in table.rows.items():
        for scale_name, scale in table.scales.items():
            runs = scale.find_runs(row)
            if len(runs) != 1:
                yield (
                    f"rows.{name} needs one run of scale {scale_name}, and {len(runs)} fit; name "
                    f"one in rows.{name}.run: {', '.join(scale.runs)}"
                )
        if row.minus and (row.minus not in table.rows or table.rows[row.minus].minus):
            yield (
                f"rows.{name}.minus is {row.minus!r}, which is not a row, or subtracts another row "
                "itself"
            )
        known = table.scales.get("paper")
        for part, columns in row.paper.items():
            if known is None or part not in known.parts:
                yield f"rows.{name}.paper has {part!r}, which is not a part of scale `paper`"
            elif columns.keys() - known.columns.keys():
                wrong = sorted(columns.keys() - known.columns.keys())
                yield f"rows.{name}.paper.{part} has no column of scale `paper`: {', '.join(wrong)}"


def list_runs(file: Path, table: PaperTable, scale_name: Scale) -> list[PartRun]:
    """Return all runs of a table at a scale.

    Args:
        file: File of the table. The names of its runs begin with its name.
        table: The table.
        scale_name: Name of a scale in the table.

    Raises:
        UserError: If two runs would have the same name.
    """
    scale = table.scales[scale_name]
    runs = []
    for (part, overrides), (name, run) in itertools.product(
        scale.parts.items(), scale.runs.items()
    ):
        words = [file.stem, scale_name, part, name if len(scale.runs) > 1 else ""]
        words = [re.sub("[^a-z0-9]+", "-", word.lower()).strip("-") for word in words]
        texts = [format_override("methods", [*run.methods])] if run.methods else []
        texts += [*run.set, *overrides, f"name={'-'.join(filter(None, words))}"]
        runs.append(PartRun(part, name, file.parent / run.config, texts))
    names = [run.overrides[-1] for run in runs]
    if len(set(names)) < len(names):
        raise UserError(
            f"{file}: scales.{scale_name} has parts or runs with the same name but for capitals "
            "and punctuation; rename one"
        )
    return runs
