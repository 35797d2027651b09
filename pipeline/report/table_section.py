"""The section of a report with the table of methods and tasks, and what a paper takes of it."""

from __future__ import annotations

from html import escape

from pipeline.report import paper
from pipeline.report.comparison import Comparison

PAPER_FILES = (
    "table.tex",
    "table.md",
    "budget.tex",
    "average_accuracy.pdf",
    "average_accuracy.svg",
    "forgetting.pdf",
    "forgetting.svg",
)


def render_table_of_tasks(comparison: Comparison) -> str:
    """Return the table of methods and tasks, and where it stands for a paper."""
    caption = paper.caption_of(comparison)[1]
    ranges = ""
    if comparison.draws:
        ranges = (
            " Ranges are 95 % intervals of the mean, by a percentile bootstrap over test images "
            "and seeds. Bold is best beyond the noise, which one seed says nothing of."
        )
    names = [f"<code>{name}</code>" for name in PAPER_FILES]
    return (
        '<h2 id="table">Methods and tasks</h2><p>Accuracy in % on each task after the last one. '
        f"{escape(caption)}{ranges}</p>"
        f"{paper.as_html(paper.accuracy_table(comparison))}"
        f"<p>For a paper, in the folder of this page: {', '.join(names)}; <code>table.csv</code> "
        "and <code>table.parquet</code> have the same numbers.</p>"
    )
