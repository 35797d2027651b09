"""`compare`: runs side by side, from the store alone, as a page, as CSV and as a short table."""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.errors import UserError
from workers.storage.artifact import exists, join, write_bytes

if TYPE_CHECKING:
    from pipeline.report.comparison import Comparison, Spread
    from pipeline.results.tables import RunTables

LONGEST = 120  # characters of a folder's name
PRINTED = ("average_accuracy", "forgetting", "bytes_per_task")


def compare(args: Namespace) -> int:
    """Writes the page and its tables, and prints a short table."""
    if len(args.run) < 2:
        raise UserError(f"compare: {args.run[0]!r} is one run; give two or more")
    from pipeline.yaml_files import absolute

    runs = [load_run(run, absolute(args.storage)) for run in args.run]
    names = [str(run.record["name"]) for run in runs]
    for index, run in enumerate(runs):
        if any(
            (run.record["name"], run.storage) == (other.record["name"], other.storage)
            for other in runs[:index]
        ):
            raise UserError(f"compare: run {names[index]!r} is named twice; name each run once")
    from pipeline.report import comparison, comparison_page, files

    found = comparison.compare_runs(runs)
    folder = join(runs[0].storage, "compare", folder_name(names))
    page = comparison_page.render_page(found).encode()
    for name, rows in found.tables().items():
        write_bytes(join(folder, f"{name}.csv"), files.as_csv(rows))
    write_bytes(join(folder, "compare.html"), page)
    if args.out:
        try:
            with open(args.out, "wb") as stream:
                stream.write(page)
        except OSError as error:
            raise UserError(
                f"--out {args.out!r} cannot be written ({error.strerror}); name a file in a "
                "folder that is there"
            ) from None
    print(
        f"{format_comparison(found)}\n\npage: {args.out or join(folder, 'compare.html')}\ntables: {folder}"
    )
    return 0


def load_run(run: str, storage: str) -> RunTables:
    """A run by its name in the storage, or by the path of its config, whose storage then counts.
    Raises UserError where there is no record of it."""
    from pipeline import config
    from pipeline.graph.store import Store
    from pipeline.results.tables import RunTables
    from pipeline.yaml_files import absolute

    name, place = run, storage
    if run.endswith((".yaml", ".yml")) or os.path.isfile(run):
        settings = config.load(run)
        name, place = settings.name, absolute(settings.storage)
    store = Store(place)
    record = store.record(name)
    if record is None:
        names = [other for other in store.run_names() if other != name]
        if exists(store.record_path(name)):
            raise UserError(
                f"compare: the record of run {name!r} in {place!r} is not as it was written; "
                "start the run again"
            )
        near = difflib.get_close_matches(name, names, 1)
        remedy = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are: {', '.join(names[:8])}"
            if names
            else "name its storage with --storage, or run it first"
        )
        raise UserError(f"compare: storage {place!r} has no record of a run {name!r}; {remedy}")
    return RunTables.load(place, record)


def folder_name(names: Sequence[str]) -> str:
    """`A~B`; cut where it is too long for a file system, and then told apart by a hash."""
    whole = "~".join(names)
    return (
        whole
        if len(whole) <= LONGEST
        else f"{whole[:LONGEST]}~{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    )


def format_comparison(found: Comparison) -> str:
    """The short table for a terminal: means over seeds, and the difference of the average accuracy
    from the first."""
    from pipeline.console import table_text
    from pipeline.report.comparison import NUMBERS

    body = []
    for e in found.entries:
        base = found.base(e)
        less = format_plain(e.against(base, "average_accuracy"), "rate", sign=True) if base else ""
        body.append(
            [
                e.name,
                str(len(e.group.runs)),
                *(format_plain(e.spread(name), NUMBERS[name][1]) for name in PRINTED),
                less,
            ]
        )
    head = ["run", "n", *(name.replace("_", " ") for name in PRINTED), "accuracy minus the first"]
    rows = found.setting_rows()
    tables = [table_text(head, body)]
    if rows:
        titles = [g.name for g in found.groups]
        tables.append(
            table_text(
                ["setting", *titles],
                [[row["name"], *(row[t][:40] for t in titles)] for row in rows],
            )
        )
    return "\n\n".join([*found.notes, *tables])


def format_plain(spread: Spread, kind: str, sign: bool = False) -> str:
    from pipeline.report.comparison_page import SOFT, format_spread

    return "-" if math.isnan(spread.mean) else format_spread(spread, kind, sign).replace(SOFT, "-")
