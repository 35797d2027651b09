"""Values that were measured with the shipped configs, in `configs/measured.csv`.

A measurement contains the results of one method of a run: its accuracy matrix as counts, its sizes,
and its provenance. The tables of the documents are generated from the measurements:
`rewrite_tables` replaces the lines between `<!-- measured: CONFIG columns=... -->` and
`<!-- end -->`. `accrete measure` records measurements and generates the tables.

A revision is a number in the code that is increased if results change. A measurement is outdated
if the revisions in the code are different now.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.text import format_bytes, format_seconds
from pipeline.results import metrics
from pipeline.results.tables import RunTables
from workers.errors import UserError

BLOCK = re.compile(
    r"(<!-- measured: (?P<spec>[^\n]*?) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL
)
EXPECTED = re.compile(
    r"^(# expected +)(?:average accuracy|not measured yet).*\n(?:#    +.*\n)*", re.MULTILINE
)
OUTDATED = "outdated"
COLUMNS = ("tasks", "average", "last", "incremental", "forgetting", "bytes", "growth", "CPU")
# Name of a method -> (revisions of the code that all methods use, as text; its own revision).
Revisions = Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class Measurement:
    """The measured values of one method of one run.

    Attributes:
        config: Path of the config from `configs`, without `.yaml`.
        overrides: Settings that differ from the config, as for `--set`, separated by spaces.
        label: Label of the method.
        method: Name of the method.
        replica: Name of the class order of the run; "" if the config does not set `orders`.
        seed: Seed of the run.
        revisions: Revisions of the code that all methods use, such as `training 6, decoding 2`.
        method_revision: Revision of the method.
        commit: Git commit of the code.
        date: Day on which the last stage was computed.
        device: Device on which the last stage was computed.
        cpu_seconds: CPU time of the method's own stages: the time of rank 0, times the number of
            ranks. Stages that methods share, such as features, are left out.
        bytes_per_task: Average size of the state of a task in bytes.
        carried_bytes: Size of the state that the last task carries to a next task, in bytes.
        growth: All stored bytes divided by those of the backbone.
        trained_parameters: Largest number of parameters that are trained for a task.
        tasks: Names of the tasks, separated by spaces.
        matrix: Lower triangle of the accuracy matrix: rows separated by `;`, entries
            `CORRECT/TOTAL` separated by spaces.
    """

    config: str
    overrides: str
    label: str
    method: str
    replica: str
    seed: int
    revisions: str
    method_revision: int
    commit: str
    date: str
    device: str
    cpu_seconds: float
    bytes_per_task: float
    carried_bytes: float
    growth: float
    trained_parameters: int
    tasks: str
    matrix: str

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Identity of the measurement. A newer one with the same key replaces an older one."""
        return self.config, self.overrides, self.label, self.replica, self.seed

    @property
    def counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Numbers of correct predictions and of test images, (T, T) each; NaN if not learned."""
        rows = [row.split() for row in self.matrix.split(";")]
        correct = np.full((len(rows), len(rows)), np.nan)
        total = correct.copy()
        for t, row in enumerate(rows):
            for i, entry in enumerate(row):
                correct[t, i], total[t, i] = map(int, entry.split("/"))
        return correct, total

    @property
    def values(self) -> dict[str, float]:
        """Name -> value of all metrics that follow from the matrix."""
        return metrics.all_metrics(*self.counts)


def format_matrix(correct: NDArray[np.float64], total: NDArray[np.float64]) -> str:
    """Return the lower triangle of an accuracy matrix of counts as text."""
    return "; ".join(
        " ".join(f"{int(correct[t, i])}/{int(total[t, i])}" for i in range(t + 1))
        for t in range(len(correct))
    )


# ---- measuring -----------------------------------------------------------------------------------
def make_measurements(
    config: str, overrides: str, replica: str, tables: RunTables, current: Revisions
) -> list[Measurement]:
    """Return the measurements of a finished run.

    Args:
        config: See `Measurement`.
        overrides: See `Measurement`.
        replica: See `Measurement`.
        tables: Results of the run.
        current: See `rewrite_tables`.

    Raises:
        UserError: If a method has not finished all tasks.
    """
    measurements = []
    for row in tables.summary(with_classes=False):
        label = str(row["label"])
        matrix = tables.matrix(label)
        if matrix.finished < len(matrix.tasks):
            raise UserError(f"method {label!r} of run {tables.record['name']!r} is not finished")
        manifests = [
            artifact.manifest
            for stage_id, artifact in tables.artifacts.items()
            if stage_id.startswith(f"{label}/")
        ]
        newest = max(manifests, key=lambda manifest: str(manifest["provenance"]["created"]))
        seconds = sum((one.get("cpu_s") or 0) * (one.get("workers") or 1) for one in manifests)
        measurements.append(
            Measurement(
                config=config,
                overrides=overrides,
                label=label,
                method=str(row["method"]),
                replica=replica,
                seed=int(tables.record["config"]["seed"]),
                revisions=current[str(row["method"])][0],
                method_revision=current[str(row["method"])][1],
                commit=str(newest["provenance"]["git_commit"]),
                date=str(newest["provenance"]["created"])[:10],
                device=str(newest["provenance"]["device"]),
                cpu_seconds=round(seconds, 1),
                bytes_per_task=_whole_or_nan(row["bytes_per_task"]),
                carried_bytes=_whole_or_nan(row["carried_bytes"]),
                growth=round(float(row["growth"] or math.nan), 4),
                trained_parameters=int(row["trained_parameters"] or 0),
                tasks=" ".join(matrix.tasks),
                matrix=format_matrix(matrix.correct, matrix.total),
            )
        )
    return measurements


def _whole_or_nan(value: float | None) -> float:
    """Round a number of bytes to a whole number; NaN if it is unknown."""
    return math.nan if value is None or math.isnan(value) else round(value)


# ---- file ----------------------------------------------------------------------------------------
def read_measurements(path: Path) -> list[Measurement]:
    """Read the file of measurements; [] if it does not exist."""
    if not path.exists():
        return []
    types: dict[str, Any] = dict.fromkeys(("seed", "trained_parameters", "method_revision"), int)
    types |= dict.fromkeys(("cpu_seconds", "bytes_per_task", "carried_bytes", "growth"), float)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Measurement(**{name: types.get(name, str)(text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def format_measurements(measurements: Iterable[Measurement]) -> str:
    """Return the content of the file of measurements, sorted. Of equal keys, the last one stays."""
    by_key = {measurement.key: measurement for measurement in measurements}
    sink = io.StringIO()
    writer = csv.DictWriter(
        sink, [field.name for field in fields(Measurement)], lineterminator="\n"
    )
    writer.writeheader()
    for key in sorted(by_key):
        row = asdict(by_key[key])
        writer.writerow({name: _format_value(value) for name, value in row.items()})
    return sink.getvalue()


def _format_value(value: Any) -> str:
    """Return a value of a measurement as text. Whole numbers have no fraction."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


# ---- headers of configs --------------------------------------------------------------------------
def rewrite_header(
    config: str, text: str, measurements: Sequence[Measurement], current: Revisions
) -> str:
    """Return a config with the measured values in its header.

    The config of a method (in `configs/methods`) has a line for each stream: `# STREAM  average
    accuracy ...`. Any other config has the values in the entry `# expected`. This entry is kept if
    it has other text, for example the name of a document.

    Args:
        config: Path of the config from `configs`, without `.yaml`.
        text: The content of the config file.
        measurements: All measurements.
        current: See `rewrite_tables`.
    """
    folder, _, name = config.rpartition("/")
    if folder != "methods":
        own = [one for one in measurements if (one.config, one.overrides) == (config, "")]
        sentence = _describe_methods(own, current)
        return EXPECTED.sub(lambda match: match[1] + sentence + "\n", text) if own else text
    streams: dict[str, list[Measurement]] = {}
    for one in sorted(measurements, key=lambda one: one.key):
        if one.config.startswith("streams/") and one.label == name and not one.overrides:
            streams.setdefault(one.config.removeprefix("streams/"), []).append(one)
    for stream, ones in streams.items():
        line = f"# {stream}  {_describe_seeds(ones, current)}\n"
        entry = re.compile(rf"^# {re.escape(stream)}  .*\n(?:#    +.*\n)*", re.MULTILINE)
        end_of_header = re.compile("^(?!#)", re.MULTILINE)
        match = entry.search(text) or end_of_header.search(text)
        if match is not None:
            text = text[: match.start()] + line + text[match.end() :]
    return text


def _describe_seeds(measurements: Sequence[Measurement], current: Revisions) -> str:
    """Return the average accuracy with each seed, and forgetting and CPU time of the first seed."""
    first = measurements[0]
    averages = ", ".join(f"{100 * one.values['average_accuracy']:.1f}" for one in measurements)
    seeds = ", ".join(str(one.seed) for one in measurements)
    noun = "seed" if len(measurements) == 1 else "seeds"
    note = "" if is_current(first, current) else f" ({OUTDATED}: {first.revisions})"
    return (
        f"average accuracy {averages} with {noun} {seeds}; forgetting "
        f"{100 * first.values['forgetting']:z.1f}; {format_seconds(first.cpu_seconds)} of CPU{note}"
    )


def _describe_methods(measurements: Sequence[Measurement], current: Revisions) -> str:
    """Return the average accuracy of each method with the first seed, the best one first."""
    firsts = {one.label: one for one in sorted(measurements, key=lambda one: one.key, reverse=True)}
    parts = []
    for label, one in sorted(firsts.items(), key=lambda item: -item[1].values["average_accuracy"]):
        part = f"{label} {100 * one.values['average_accuracy']:.1f}"
        notes = [f"forgetting {100 * one.values['forgetting']:.1f}"]
        if not abs(one.values["forgetting"]) >= 0.0005:
            notes = []
        notes += [] if is_current(one, current) else [OUTDATED]
        parts.append(f"{part} ({', '.join(notes)})" if notes else part)
    return f"average accuracy {', '.join(parts)}"


# ---- tables of documents -------------------------------------------------------------------------
@dataclass(frozen=True)
class TableSpec:
    """Selection of measurements and columns for a table of a document.

    Attributes:
        config: See `Measurement`.
        columns: Columns, of COLUMNS.
        overrides: See `Measurement`.
        labels: Labels of the methods; empty: all.
    """

    config: str
    columns: tuple[str, ...]
    overrides: str = ""
    labels: tuple[str, ...] = ()


def parse_spec(text: str) -> TableSpec:
    """Parse `CONFIG columns=A,B [methods=X,Y] [overrides=KEY=VALUE...]`.

    Raises:
        UserError: If the text has another form.
    """
    config, _, rest = text.partition(" ")
    options = re.fullmatch(
        r"columns=(?P<columns>\S+)(?: methods=(?P<methods>\S+))?(?: overrides=(?P<overrides>.+))?",
        rest,
    )
    columns = tuple(options["columns"].split(",")) if options else ()
    unknown = sorted(set(columns) - set(COLUMNS))
    if options is None or unknown:
        raise UserError(
            f"`measured: {text}` is not CONFIG columns=A,B [methods=X,Y] [overrides=KEY=VALUE]; "
            f"columns are {', '.join(COLUMNS)}"
        )
    labels = tuple(options["methods"].split(",")) if options["methods"] else ()
    return TableSpec(config, columns, options["overrides"] or "", labels)


def rewrite_tables(text: str, measurements: Sequence[Measurement], current: Revisions) -> str:
    """Return a document with all tables of measurements generated again.

    Args:
        text: The document.
        measurements: All measurements.
        current: Name of a method -> its revisions in the code. Measurements of other revisions are
            marked as outdated.
    """
    return BLOCK.sub(
        lambda match: (
            match[1] + format_table(parse_spec(match["spec"]), measurements, current) + match[4]
        ),
        text,
    )


def format_table(spec: TableSpec, measurements: Sequence[Measurement], current: Revisions) -> str:
    """Return a table in Markdown, best average first, with a line that says how it was measured.

    With several seeds, the average accuracy has a value for each seed. The other cells are values
    of the first seed.

    Args:
        spec: Measurements and columns of the table.
        measurements: All measurements.
        current: See `rewrite_tables`.

    Raises:
        UserError: If no measurement fits the spec.
    """
    by_label: dict[str, list[Measurement]] = {}
    for one in sorted(measurements, key=lambda one: one.key):
        is_wanted = not spec.labels or one.label in spec.labels
        if (one.config, one.overrides) == (spec.config, spec.overrides) and is_wanted:
            by_label.setdefault(one.label, []).append(one)
    if not by_label:
        raise UserError(f"nothing is measured for a table of {spec.config} {spec.overrides}")
    ordered = sorted(by_label, key=lambda label: -by_label[label][0].values["average_accuracy"])
    heading = ["method"]
    for column in spec.columns:
        heading += by_label[ordered[0]][0].tasks.split() if column == "tasks" else [column]
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for label in ordered:
        cells = [f"`{label}`"]
        if not is_current(by_label[label][0], current):
            cells[0] += f" ({OUTDATED})"
        for column in spec.columns:
            cells += _make_cells(column, by_label[label])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _describe_origin(spec, [one for ones in by_label.values() for one in ones])]
    return "\n".join(lines) + "\n"


def is_current(measurement: Measurement, current: Revisions) -> bool:
    """Return whether the code still has the revisions of a measurement. See `rewrite_tables`."""
    own = measurement.revisions, measurement.method_revision
    return current.get(measurement.method) == own


def _make_cells(column: str, measurements: Sequence[Measurement]) -> list[str]:
    """Return the cells of a column for the measurements of one method, by seed."""
    first = measurements[0]
    values = first.values
    if column == "tasks":
        correct, total = first.counts
        return [f"{rate:.1f}" for rate in 100 * correct[-1] / total[-1]]
    if column == "average":
        return [", ".join(f"{100 * one.values['average_accuracy']:.1f}" for one in measurements)]
    if column == "bytes":
        text = format_bytes(first.bytes_per_task)
        return [
            f"{text} + {format_bytes(first.carried_bytes)} carried" if first.carried_bytes else text
        ]
    if column == "growth":
        return [f"{first.growth:.2f}"]
    if column == "CPU":
        return [format_seconds(first.cpu_seconds)]
    names = {
        "last": "last_accuracy",
        "incremental": "average_incremental_accuracy",
        "forgetting": "forgetting",
    }
    return [f"{100 * values[names[column]]:z.1f}"]


def _describe_origin(spec: TableSpec, measurements: Sequence[Measurement]) -> str:
    """Return a sentence with the command, seeds, revisions, devices and days of measurements."""
    command = f"accrete measure configs/{spec.config}.yaml"
    if spec.overrides:
        command += "".join(f" --set {text}" for text in spec.overrides.split())
    seeds = sorted({one.seed for one in measurements})
    revisions = sorted({one.revisions for one in measurements})
    devices = sorted({one.device for one in measurements})
    days = sorted({one.date for one in measurements})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"`{command}`: seed {', '.join(map(str, seeds))}; {'; '.join(revisions)}; "
        f"{', '.join(devices)}; {span}."
    )
