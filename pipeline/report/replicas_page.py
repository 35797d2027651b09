"""The report of a run with several seeds or class orders: a self-contained page and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.graph.run_record import RunRecord
from pipeline.report import comparison_page, files, paper
from pipeline.report.html_parts import render_markup
from pipeline.report.replicas import compare_replicas
from pipeline.report.table_section import render_table_of_tasks
from pipeline.results.tables import RunTables, merge_warnings


def build_replicas_report(
    record: RunRecord,
    tables: Mapping[str, RunTables],
    failures: Mapping[str, str] | None = None,
    gpu_use: Sequence[str] = (),
) -> dict[str, bytes]:
    """Build all files of the report.

    Args:
        record: The record of the run.
        tables: Name of a replica -> its results.
        failures: Id of a failed stage -> reason.
        gpu_use: Sentences on the utilisation of each GPU; empty without GPUs.

    Returns:
        File name -> content.
    """
    comparison = compare_replicas(str(record["name"]), tables)
    curves = comparison_page.curves_picture(comparison)
    matrices = comparison_page.matrix_pictures(comparison)
    values: dict[str, dict[str, None]] = {}
    for run in tables.values():
        for name, some in run.environment().items():
            values.setdefault(name, {}).update(dict.fromkeys(some))
    has_several = len(comparison.entries) > 1
    page = render_markup(
        "replicas.html",
        title=record["name"],
        config=record["config"],
        created=record.get("created", ""),
        labels=[entry.label for entry in comparison.entries],
        names=list(comparison.groups[0].runs),
        runs=[run.record["name"] for run in comparison.runs],
        failed=failures or {},
        warned=merge_warnings(tables),
        table_of_tasks=render_table_of_tasks(comparison),
        differences=paper.difference_html_rows(comparison) if has_several else [],
        budget_heading=["method", *(title for title, _ in paper.BUDGET_COLUMNS.values())],
        budgets=paper.budget_html_rows(comparison),
        curves=curves,
        matrices=matrices,
        gpu_sentences=gpu_use,
        environment=[(name, ", ".join(some)) for name, some in values.items()],
        **comparison_page.make_summary_values(comparison),
    )
    report = {picture.name: picture.png for picture in (curves, *matrices)}
    report["report.html"] = page.encode()
    return report | paper.paper_files(comparison) | files.csv_and_parquet(comparison.tables())
