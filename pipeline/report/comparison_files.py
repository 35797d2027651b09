"""Compare runs of a store and results files: as a page, as CSV, and as text. See `compare`.

Modules that import matplotlib or torch are imported inside functions, so that mistakes in the
input are reported before the slow imports.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.errors import UserError
from workers.storage.artifact import READ_ONLY, join, write_bytes

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.report.comparison import Comparison, Spread
    from pipeline.results.tables import RunTables

MAX_CHARACTERS = 120  # maximum length of a folder name, before a hash is added
# name of a run, path of a config, path of a results file, or loaded results
RunSource = str | Sequence["RunTables"]


@dataclass(frozen=True)
class ComparisonResult:
    """The comparison of several runs.

    Attributes:
        page: Path or URI of the page; empty if the page could not be written.
        folder: Folder of the page and its tables (CSV); empty if the page could not be written.
        comparison: The compared runs.
        html: The page.
    """

    page: str
    folder: str
    comparison: Comparison = field(repr=False)
    html: bytes = field(repr=False)

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table, without empty tables.

        The names are `summary`, `differences` (from the first run), `matrices`, `curves`,
        `settings` (that differ), `provenance` and `stages` (that several runs use).
        """
        from pipeline.results.data_frame import data_frame

        return {name: data_frame(rows) for name, rows in self.comparison.tables().items()}

    @property
    def notes(self) -> list[str]:
        """Sentences about the compared tasks, omitted tasks and unfinished runs."""
        return self.comparison.notes


def compare(
    sources: Sequence[RunSource], storage: str, must_write: bool = True
) -> ComparisonResult:
    """Compare runs, and write the page and its tables into the storage of the first run.

    If no source is a run of a storage, `storage` is used for the page.

    Args:
        sources: The runs.
        storage: Storage of runs given by name.
        must_write: Whether a read-only storage is an error. If False, `page` and `folder` of the
            result are empty for a read-only storage.

    Raises:
        UserError: If there are fewer than two runs, if a run cannot be read or is given twice, if
            the runs have no task in common, or if the page must be written but the storage is
            read-only.
    """
    from pipeline.config.yaml_files import absolute

    storage = absolute(storage)
    runs: list[RunTables] = []
    for source in sources:
        if isinstance(source, str):
            source = load_runs(source, storage)
        runs += source
    names = _check_distinct(runs)
    if len(runs) < 2:
        count = "no run is named"
        if names:
            count = f"{names[0]!r} is one run"
        raise UserError(f"compare: {count}; give two or more")
    name_tasks(runs)
    from pipeline.report import comparison_page, files
    from pipeline.report.comparison import compare_runs

    comparison = compare_runs(runs)
    storages = [run.storage for run in runs if not run.source]
    storages.append(storage)
    folder = join(storages[0], "compare", make_folder_name(names))
    page = comparison_page.render_comparison_page(comparison).encode()
    page_path = join(folder, "compare.html")
    try:
        for name, rows in comparison.tables().items():
            write_bytes(join(folder, f"{name}.csv"), files.as_csv(rows))
        write_bytes(page_path, page)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        if must_write:
            raise UserError(
                f"storage {storages[0]!r} may only be read here ({error.strerror or error}), "
                "and the page belongs into it; write the page to another file with --out FILE"
            ) from None
        folder = page_path = ""
    return ComparisonResult(page_path, folder, comparison, page)


def _check_distinct(runs: Sequence[RunTables]) -> list[str]:
    """Return the names of the runs. Raise `UserError` if a run is given twice."""
    seen = set()
    for run in runs:
        name = run.record["name"]
        if (name, run.storage) in seen:
            raise UserError(f"compare: run {name!r} is named twice; name each run once")
        seen.add((name, run.storage))
    return [str(run.record["name"]) for run in runs]


def load_runs(run: str, storage: str) -> list[RunTables]:
    """Load the results of a run, or of the replicas if it has several seeds or class orders.

    Args:
        run: Name of a run in `storage`, path of a config, or path of a results file.
        storage: Storage of the run. For a config, the storage in the config is used instead.

    Raises:
        UserError: If the run has no record, or the results file cannot be used.
    """
    from pipeline.results.results_file import is_results_file, read_results

    if is_results_file(run):
        return [*read_results(run)]
    from pipeline.graph.store import Store
    from pipeline.results.runs import find_record, resolve_run
    from pipeline.results.tables import RunTables

    name, folder = resolve_run(run, storage)
    store = Store(folder)
    records = store.records(find_record(store, name))
    return [*RunTables.load_all(folder, records).values()]


def name_tasks(runs: Sequence[RunTables]) -> None:
    """Name the tasks of imported matrices that have no task names, in place.

    They get the names of the first run with task names, in its order. If no run has task names,
    nothing changes.

    Raises:
        UserError: If the numbers of tasks differ.
    """
    from pipeline.results.imported import ImportedTables

    nameless = []
    named: list[RunTables] = []
    for run in runs:
        if isinstance(run, ImportedTables) and not run.has_task_names:
            nameless.append(run)
        else:
            named.append(run)
    if not named:
        return
    tasks = named[0].tasks(named[0].labels[0])
    first = named[0].record["name"]
    for run in nameless:
        count = len(run.record["tasks"])
        if count != len(tasks):
            raise UserError(
                f"{run.source}: it has {count} tasks without names, and {first!r} has "
                f"{len(tasks)}; write a CSV with the names of its tasks in the header"
            )
        run.rename_tasks(tasks, {task: named[0].task(task)["classes"] for task in tasks})
        run.notes.append(
            f"The tasks of {run.record['name']} have no names, and are taken for those of {first} "
            "in order."
        )


def make_folder_name(names: Sequence[str]) -> str:
    """Return a folder name such as `A~B`. A long name is cut, and a hash is added."""
    full_name = "~".join(names)
    if len(full_name) <= MAX_CHARACTERS:
        return full_name
    digest = hashlib.sha256(full_name.encode()).hexdigest()
    return f"{full_name[:MAX_CHARACTERS]}~{digest[:8]}"


def format_comparison(comparison: Comparison) -> str:
    """Return the comparison as text for the terminal.

    The text has the notes, a table of means and differences of accuracy, and the settings that
    differ.
    """
    from pipeline.config.text import table_text
    from pipeline.results.metrics import metrics_for

    metrics = metrics_for("comparison_text")
    body = []
    for entry in comparison.entries:
        cells = [entry.name, str(len(entry.group.runs))]
        cells += [format_plain(entry.spread(metric.name), metric.unit) for metric in metrics]
        base = comparison.base(entry)
        difference = ""
        if base is not None:
            spread = entry.difference(base, "average_accuracy")
            difference = format_plain(spread, "rate", is_difference=True)
        body.append([*cells, difference])
    heading = ["run", "n", *(metric.title for metric in metrics)]
    tables = [table_text([*heading, "accuracy minus the first"], body)]
    setting_rows = comparison.setting_rows()
    if setting_rows:
        titles = [title for title in setting_rows[0] if title != "name"]
        lines = []
        for row in setting_rows:
            cells = [row["name"]]
            cells += [row[title][:40] for title in titles]
            lines.append(cells)
        tables.append(table_text(["setting", *titles], lines))
    return "\n\n".join([*comparison.notes, *tables])


def format_plain(spread: Spread, kind: str, is_difference: bool = False) -> str:
    """Return a spread as plain text, or `-` if it has no value. See `format_spread` for `kind`."""
    from pipeline.report.html_parts import format_spread

    return "-" if math.isnan(spread.mean) else format_spread(spread, kind, is_difference)
