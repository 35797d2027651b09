"""Write and read the results of a run as one JSON file, to exchange them with other people.

`accrete report --json` writes the file, `accrete compare` reads it, and `docs/formats.md` describes
it. The file may be untrusted: its size is limited, its fields are checked, and values that can be
computed from the counts are not read.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from pipeline.config.settings import ELSEWHERE, NAME, checked
from pipeline.graph.run_record import TaskRecord
from pipeline.results.imported import (
    MAX_CELLS,
    MAX_TASKS,
    ImportedMethod,
    ImportedTables,
    imported_record,
)
from pipeline.results.matrix_files import matrix_from_csv, matrix_from_lists
from pipeline.results.tables import Matrix, Row, RunTables
from workers.errors import UserError
from workers.job import Frozen
from workers.storage.artifact import compute_sha256
from workers.storage.regular_file import read_regular, write_named_file
from workers.storage.secrets import redact_texts

FORMAT = "accrete-results"
VERSION = 1
SUFFIXES = (".json", ".csv")
MAX_BYTES = 1 << 24  # maximum size of a file
MAX_DEPTH = 20  # maximum nesting depth of `runs`
MAX_SETTINGS = 10_000  # approximate maximum number of settings of a run
MAX_RUNS = 64
MAX_METHODS = 64
WRITE = "write it again with `accrete report CONFIG --json FILE`"

Count = Annotated[int, Field(ge=0, le=10**15)]
Rate = Annotated[float, Field(ge=0, le=1)]
# 1 to 200 characters; \pC are control and other invisible characters
Text = Annotated[str, Field(pattern=r"^[^\pC]{1,200}$")]
Cells = Annotated[list[list[Count | None]], Field(max_length=MAX_TASKS)]


class Strict(Frozen):
    """Base class for the parts of a file: strict types, no unknown keys."""

    model_config = ConfigDict(strict=True)


class ResultTaskBody(Strict):
    """A task of the stream. `chance` is written for people; it is not read."""

    name: Text
    classes: list[Text] = Field(default_factory=list)
    role: Literal["task", "base"] = "task"
    images_sha256: Text | None = None
    shares: dict[Text, Rate] | None = None
    chance: Any = None


class SizesBody(Strict):
    """Stored bytes after a task.

    `states` are the bytes of all tasks so far by kind, `task_bytes` are the bytes of this task.
    """

    after: Text
    backbone: Count = 0
    states: dict[Text, Count] = Field(default_factory=dict, max_length=16)
    carried: Count = 0
    task_bytes: Count = 0
    trained_parameters: Count | None = None
    flops_share: float | None = None


class MethodBody(Strict):
    """The results of a method: counts, or only accuracies.

    `metrics` and `chance` are written for people; they are not read.
    """

    label: Text
    method: Text
    tasks: Annotated[list[Text], Field(min_length=1, max_length=MAX_TASKS)]
    correct: Cells | None = None
    total: Cells | None = None
    accuracy: Annotated[list[list[Rate | None]], Field(max_length=MAX_TASKS)] | None = None
    metrics: Any = None
    chance: Any = None
    sizes: list[SizesBody] = Field(default_factory=list, max_length=MAX_TASKS)


class RunBody(Strict):
    """A run, or one replica of a run.

    `stages` (stage id -> key) is written for people; it is not read.
    """

    name: Annotated[str, Field(pattern=NAME, max_length=200)]
    seed: Annotated[int, Field(ge=0)] | Text = "unknown"
    created: Annotated[str, Field(pattern=r"^[^\pC]{0,40}$")] = ""
    scenario: Literal["task", "class", "domain"] = "task"
    config: dict[str, Any] = Field(default_factory=dict)
    versions: dict[Text, list[Text]] = Field(default_factory=dict, max_length=100)
    tasks: Annotated[list[ResultTaskBody], Field(min_length=1, max_length=MAX_TASKS)]
    methods: Annotated[list[MethodBody], Field(min_length=1, max_length=MAX_METHODS)]
    stages: Any = None


class ResultFileBody(Strict):
    """The whole file. `sha256` is optional: the digest of the other fields."""

    format: str
    version: int
    runs: Annotated[list[RunBody], Field(min_length=1, max_length=MAX_RUNS)]
    sha256: str | None = None


# ---- writing -------------------------------------------------------------------------------------
def encode_results(runs: Sequence[RunTables]) -> bytes:
    """Return the content of the file with the results of a run, or of all its replicas."""
    body = {"format": FORMAT, "version": VERSION, "runs": [_run_body(run) for run in runs]}
    # the values that a reader parses, so that the reader computes the same digest
    plain = json.loads(json.dumps(body, default=str))
    text = json.dumps({**plain, "sha256": compute_sha256(plain)}, indent=1, allow_nan=False)
    return text.encode()


def write_results(name: str, path: str, runs: Sequence[RunTables]) -> None:
    """Write the file with the results of runs.

    Args:
        name: Name of the path argument in error messages.
        path: Path of the file.
        runs: The runs.

    Raises:
        UserError: If the file cannot be written.
    """
    write_named_file(name, path, encode_results(runs))


def _run_body(run: RunTables) -> dict[str, Any]:
    config = {name: value for name, value in run.record["config"].items() if name not in ELSEWHERE}
    digests = run.image_digests()
    tasks = []
    for task in run.record["tasks"]:
        entry = {
            "name": task["name"],
            "classes": list(task["classes"]),
            "role": task["role"],
            "chance": 1 / max(len(task["classes"]), 1),
        }
        if "shares" in task:
            entry["shares"] = task["shares"]
        if task["name"] in digests:
            entry["images_sha256"] = digests[task["name"]]
        tasks.append(entry)
    return {
        "name": run.record["name"],
        "seed": config.get("seed", 0),
        "created": str(run.record.get("created", "")),
        "scenario": run.scenario,
        "config": redact_texts(config),
        "versions": redact_texts(run.environment()),
        "tasks": tasks,
        "methods": [_method_body(run, label) for label in run.labels],
        "stages": {stage["id"]: stage["key"] for stage in run.record["stages"]},
    }


def _method_body(run: RunTables, label: str) -> dict[str, Any]:
    matrix = run.matrix(label)
    body = {
        "label": label,
        "method": run.method(label),
        "tasks": list(matrix.tasks),
        **_list_cells(matrix),
        "accuracy": to_nested_lists(matrix.rates),
        "chance": to_nested_lists(matrix.chance),
        "sizes": [_sizes_body(row) for row in run.sizes(label)],
    }
    finals = matrix.final.items()
    body["metrics"] = {name: None if math.isnan(value) else value for name, value in finals}
    return body


def _list_cells(matrix: Matrix) -> dict[str, Any]:
    """Return the counts of a matrix; an empty dict if the matrix has only accuracies."""
    known = matrix.correct[~np.isnan(matrix.correct)]
    if (known % 1).any():
        return {}
    return {
        "correct": to_nested_lists(matrix.correct, is_count=True),
        "total": to_nested_lists(matrix.total, is_count=True),
    }


def to_nested_lists(
    values: NDArray[np.float64], is_count: bool = False
) -> list[list[float | None]]:
    """Return a matrix (T, T) as lists. NaN and entries above the diagonal become None.

    Args:
        values: The matrix.
        is_count: Whether to convert the values to int.
    """
    rows = []
    for t, row in enumerate(values.tolist()):
        cells: list[float | None] = []
        for i, value in enumerate(row):
            if i > t or math.isnan(value):
                cells.append(None)
            else:
                cells.append(int(value) if is_count else value)
        rows.append(cells)
    return rows


# Columns of `RunTables.sizes` that are in the file by name, and columns that are not in the file.
# All other columns are the bytes of a kind of state.
SIZE_COLUMNS = ("after", "backbone", "carried", "task_bytes", "trained_parameters", "flops_share")
OTHER_COLUMNS = ("label", "after_index", "role", "total", "growth")


def _sizes_body(row: Row) -> dict[str, Any]:
    body = {name: row[name] for name in SIZE_COLUMNS}
    kinds = [name for name in row if name not in (*SIZE_COLUMNS, *OTHER_COLUMNS)]
    body["states"] = {kind: row[kind] for kind in kinds}
    return body


# ---- reading -------------------------------------------------------------------------------------
def is_results_file(run: str) -> bool:
    """Return whether an argument has the suffix of a results file."""
    return run.lower().endswith(SUFFIXES)


def read_results(path: str) -> list[ImportedTables]:
    """Read the runs of a file: results as JSON, or one accuracy matrix as CSV or JSON.

    Raises:
        UserError: If the file cannot be read, or does not follow `docs/formats.md`.
    """
    if "://" in path:
        raise UserError(f"{path}: files of results are only read from disk; copy it first")
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            reason = "it does not exist"
        raise UserError(
            f"{path}: the file of results cannot be read ({reason}); name a JSON or CSV file of "
            f"at most {MAX_BYTES >> 20} MiB"
        ) from None
    if path.lower().endswith(".csv"):
        return [matrix_from_csv(path, data)]
    body = _parse(path, data)
    if isinstance(body, list):
        return [matrix_from_lists(path, body)]
    return _parse_runs(path, body)


def _parse(path: str, data: bytes) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        raise UserError(f"{path}: it holds {name}, which is not JSON; write null")

    try:
        return json.loads(data, parse_constant=refuse_constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: it cannot be read as JSON ({reason:.100}); {WRITE}") from None


def _parse_runs(path: str, body: Any) -> list[ImportedTables]:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(
            f"{path}: it holds no results (its `format` is not {FORMAT!r}), and is not a list of "
            f"lists; {WRITE}"
        )
    if body.get("version") != VERSION:
        raise UserError(
            f"{path}: its version is {body.get('version')!r:.40}, this program reads {VERSION}; "
            f"{WRITE}"
        )
    _check_settings(path, body.get("runs"))
    file = checked(ResultFileBody, body, "", path)
    if file.sha256 is not None and file.sha256 != compute_sha256(body):
        raise UserError(
            f"{path}: it was changed after it was written (its sha256 differs); get it again, or "
            "leave `sha256` out"
        )
    cells = sum(len(method.tasks) ** 2 for run in file.runs for method in run.methods)
    if cells > MAX_CELLS:
        raise UserError(
            f"{path}: its matrices have {cells} cells, more than {MAX_CELLS}; leave methods out"
        )
    return [_make_tables(path, run) for run in file.runs]


def _check_settings(path: str, runs: Any) -> None:
    """Raise `UserError` if the runs are nested too deeply or have too many settings."""
    level = [runs]
    depth = 0
    while level:
        depth += 1
        nested: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                nested += value.values()
            elif isinstance(value, list):
                nested += value
        level = nested
        if depth > MAX_DEPTH:
            raise UserError(f"{path}: it is nested more than {MAX_DEPTH} deep; {WRITE}")
    for run in runs if isinstance(runs, list) else ():
        text = json.dumps(run.get("config")) if isinstance(run, Mapping) else ""
        if text.count(",") > MAX_SETTINGS:
            raise UserError(f"{path}: it has more than {MAX_SETTINGS} settings; leave `config` out")


def _make_tables(path: str, run: RunBody) -> ImportedTables:
    config = {name: value for name, value in run.config.items() if name not in ELSEWHERE}
    record = imported_record(run.name, config | {"seed": run.seed}, run.created)
    names = [task.name for task in run.tasks]
    labels = [method.label for method in run.methods]
    for kind, values in (("task", names), ("method", labels)):
        twice = {value for value in values if values.count(value) > 1}
        if twice:
            raise UserError(f"{path}: {kind} {min(twice)!r:.80} is there twice; name each once")
    record["tasks"] = []
    for t in run.tasks:
        task: TaskRecord = {
            "name": t.name,
            "card": "",
            "role": t.role,
            "classes": t.classes,
            "data": "",
        }
        if t.shares is not None:
            task["shares"] = {**t.shares}
        record["tasks"].append(task)
    roles = {task.name: task.role for task in run.tasks}
    methods = {method.label: _make_method(path, method, roles) for method in run.methods}
    digests = {t.name: t.images_sha256 for t in run.tasks if t.images_sha256}
    return ImportedTables(
        path,
        record,
        {},
        methods=methods,
        stream_scenario=run.scenario,
        versions=run.versions,
        digests=digests,
    )


def _make_method(path: str, body: MethodBody, roles: Mapping[str, str]) -> ImportedMethod:
    """Check and return the results of a method.

    Args:
        path: Path of the file, for messages.
        body: The part of the file about the method.
        roles: Task -> role, in stream order.
    """
    where = f"{path}: method {body.label!r}"
    in_order = [name for name in roles if name in body.tasks]
    if in_order != body.tasks:
        raise UserError(
            f"{where} has tasks {', '.join(body.tasks)!r:.80}, which are not tasks of the stream "
            f"in its order; {WRITE}"
        )
    size = len(body.tasks)
    if body.correct is not None and body.total is not None:
        correct = _make_array(where, body.correct, size)
        total = _make_array(where, body.total, size)
    elif body.accuracy is not None:
        correct = _make_array(where, body.accuracy, size)
        total = np.where(np.isnan(correct), np.nan, 1.0)
    else:
        raise UserError(f"{where} has neither `correct` and `total` nor `accuracy`; {WRITE}")
    is_same = np.isnan(correct) == np.isnan(total)
    if not is_same.all() or (correct > total).any() or (total == 0).any():
        raise UserError(
            f"{where} has more correct images than images, or one count without the other; {WRITE}"
        )
    sizes = [_sizes_row(where, body, row, roles) for row in body.sizes]
    sizes.sort(key=lambda row: int(row["after_index"]))
    return ImportedMethod(body.method, tuple(body.tasks), correct, total, sizes)


def _make_array(
    where: str, rows: Sequence[Sequence[float | None]], size: int
) -> NDArray[np.float64]:
    """Return a matrix (T, T). Null and entries above the diagonal become NaN."""
    if len(rows) != size or any(len(row) != size for row in rows):
        raise UserError(f"{where}: a matrix is not of {size} x {size}, one row per task; {WRITE}")
    values = np.array(rows, np.float64)  # null becomes NaN
    values[~np.tril(np.ones(values.shape, bool))] = np.nan
    return values


def _sizes_row(where: str, method: MethodBody, body: SizesBody, roles: Mapping[str, str]) -> Row:
    """Return a row like those of `RunTables.sizes`. Total and growth are computed."""
    if body.after not in method.tasks:
        raise UserError(f"{where}: sizes are of {body.after!r:.80}, no task of it; {WRITE}")
    total = body.backbone + sum(body.states.values()) + body.carried
    growth = total / body.backbone if body.backbone else None
    return {
        **body.states,
        "label": method.label,
        "after_index": method.tasks.index(body.after),
        "after": body.after,
        "role": roles[body.after],
        "backbone": body.backbone,
        "carried": body.carried,
        "total": total,
        "growth": growth,
        "task_bytes": body.task_bytes,
        "trained_parameters": body.trained_parameters,
        "flops_share": body.flops_share,
    }
