"""The section of a report with the table of methods and tasks, and the files for papers."""

from __future__ import annotations

from markupsafe import Markup

from pipeline.report import paper
from pipeline.report.comparison import Comparison
from pipeline.report.html_parts import render_markup

PAPER_FILES = (
    "table.tex",
    "table.md",
    "budget.tex",
    "average_accuracy.pdf",
    "average_accuracy.svg",
    "forgetting.pdf",
    "forgetting.svg",
)


def render_table_of_tasks(comparison: Comparison) -> Markup:
    """Render the table of methods and tasks, with the names of the files for papers."""
    table = paper.accuracy_table(comparison)
    return render_markup(
        "table_of_tasks.html",
        # the sentence about replicas; the template contains the other sentences
        caption=paper.format_caption(comparison)[1],
        has_intervals=bool(comparison.draws),
        heading=["method", *table.heading],
        rows=paper.html_rows(table),
        fairness=comparison.fairness_notes(),
        files=PAPER_FILES,
    )
