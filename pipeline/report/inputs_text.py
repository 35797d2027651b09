"""The text that `report` prints about the inputs of a model folder: the images it classified."""

from __future__ import annotations

from pipeline.config.text import table_text
from pipeline.results.input_days import InputReport, InputRow

HEADING = ["day", "model", "task", "inputs", "share", "picked", "confidence", "unsure"]
HEADING += ["distance", "far"]


def format_inputs(report: InputReport) -> str:
    """Return a table with one row per day, model and task, followed by findings and notes.

    `InputRow` explains the columns.
    """
    rows = [_format_row(row) for row in report.rows]
    table = [table_text(HEADING, rows, HEADING[:3])] if rows else []
    return "\n".join([*table, *report.findings, *report.notes])


def _format_row(row: InputRow) -> list[str]:
    far = distance = "-"
    if row.distance is not None:
        far = f"{_format_share(row.far / row.measured)} of {row.measured}"
        distance = f"{row.distance:.2f}"
    return [
        row.day,
        row.model[:8],
        row.task or "(none)",
        str(row.inputs),
        _format_share(row.share),
        _format_share(row.picked),
        f"{row.confidence:.2f}",
        _format_share(row.unsure),
        distance,
        far,
    ]


def _format_share(share: float) -> str:
    return f"{100 * share:.0f} %"
