"""The report of a run of several seeds or class orders: one self-contained page and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pipeline.graph.run_record import RunRecord
from pipeline.report import comparison_page, files, paper
from pipeline.report.comparison import Comparison
from pipeline.report.html_parts import (
    format_yaml,
    plural,
    render_document,
    render_facts,
    render_failures,
    render_gpu_use,
    render_links,
    render_picture,
    render_pictures,
    render_warnings,
)
from pipeline.report.replicas import comparison_of
from pipeline.report.table_section import render_table_of_tasks
from pipeline.results.tables import RunTables, merge_warnings

LINKS = (
    ("table", "Methods and tasks"),
    ("summary", "Summary"),
    ("differences", "Differences"),
    ("budget", "Budgets"),
    ("curves", "Over the tasks"),
    ("matrices", "Matrices"),
    ("stages", "Shared stages"),
    ("settings", "Settings"),
)


def build(
    record: RunRecord,
    tables: Mapping[str, RunTables],
    failures: Mapping[str, str] | None = None,
    gpu_use: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return all files of the report by name.

    Args:
        record: The record of the run.
        tables: Name of a replica -> its results.
        failures: Id of a stage that failed -> why.
        gpu_use: Sentences on how busy each GPU was; empty without GPUs.
    """
    comparison = comparison_of(str(record["name"]), tables)
    pictures = [
        comparison_page.curves_picture(comparison),
        *comparison_page.matrix_pictures(comparison),
    ]
    report = {picture.name: picture.png for picture in pictures}
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    sections = [render_head(record, comparison), render_failures(failures or {})]
    sections.append(render_warnings(merge_warnings(tables)))
    if notes:
        sections.append(f'<div class="note"><ul>{notes}</ul></div>')
    sections += [render_table_of_tasks(comparison), comparison_page.render_summary(comparison)]
    sections += [render_differences(comparison), render_budgets(comparison)]
    sections.append('<h2 id="curves">Over the tasks</h2>')
    sections.append(render_picture(pictures[0]))
    sections.append('<h2 id="matrices">Accuracy matrices</h2>')
    sections.append(render_pictures(pictures[1:]))
    sections.append(comparison_page.render_stages(comparison))
    sections.append(render_gpu_use(gpu_use))
    sections.append(render_settings(record, tables))
    page = render_document(escape(str(record["name"])), sections)
    report["report.html"] = page.encode()
    return report | paper.paper_files(comparison) | files.csv_and_parquet(comparison.tables())


def render_head(record: RunRecord, comparison: Comparison) -> str:
    """Return title, introduction and links."""
    names = list(comparison.groups[0].runs)
    runs = [str(run.record["name"]) for run in comparison.runs]
    labels = [entry.label for entry in comparison.entries]
    scenario = comparison.runs[0].scenario
    return (
        f"<h1>{escape(str(record['name']))}</h1>"
        f"<div class=soft>{len(labels)} method{plural(len(labels))} · {len(names)} replicas "
        f"({escape(', '.join(names))}) · {len(comparison.tasks)} tasks · scenario "
        f"{escape(scenario)} · started {escape(str(record.get('created', '')))}</div>"
        f"<p style='margin-top:14px'>The same methods ({escape(', '.join(labels))}) learn the same "
        f"tasks ({escape(', '.join(comparison.tasks))}) once in each replica. A number is a mean "
        "over the replicas, and the number after ± their sample standard deviation. Each replica "
        f"is a run of its own as well ({escape(', '.join(runs))}): it has masks, training curves "
        "and sizes in a report of its own when its seed is run alone, at no cost.</p>"
        f"{render_links(LINKS)}"
    )


def render_differences(comparison: Comparison) -> str:
    """Return what each method lacks to the most accurate one."""
    if len(comparison.entries) < 2:
        return ""
    return (
        '<h2 id="differences">Differences</h2><p>Each method minus the one of the highest average '
        "accuracy, in pairs: the same replicas and the same test images. It is beyond the noise "
        "where both intervals exclude 0; each comparison stands for itself, so of twenty between "
        f"equal methods one may be.</p>{paper.differences_html(comparison)}"
    )


def render_budgets(comparison: Comparison) -> str:
    """Return what each method was given."""
    return (
        '<h2 id="budget">Budgets</h2><p>What each method was given in a replica, on average, '
        "without the backbone that all share: epochs of a task, images that its training read, "
        "seconds of training times the ranks that it ran on, and the bytes that it stores at the "
        "end, with the backbone. Methods are fairly compared where these are alike.</p>"
        f"{paper.budgets_html(comparison)}"
    )


def render_settings(record: RunRecord, tables: Mapping[str, RunTables]) -> str:
    """Return the config of the run, and commit, device and package versions of its stages."""
    values: dict[str, dict[str, None]] = {}
    for run in tables.values():
        for name, some in run.environment().items():
            values.setdefault(name, {}).update(dict.fromkeys(some))
    facts = [(name, ", ".join(some)) for name, some in values.items()]
    return (
        '<h2 id="settings">Settings and environment</h2><p>The complete config. Save it as a file '
        f"to run it again.</p><pre><code>{format_yaml(record['config'])}</code></pre>"
        f"<p>Environment of the stages:</p>{render_facts(facts)}"
    )
