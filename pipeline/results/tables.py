"""The results of a run as tables: matrices, metrics over time, sizes, histories, confusions.

`RunTables.load` reads a run. Its methods return lists of rows, or a `Matrix`. Everything is read
from stage results in the store, never from a live run, so a report can be built again at any time.
An unfinished run has the results so far.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.selection import LIMIT_REASON, REJECTED_CSV
from pipeline.graph.run_record import RunRecord, StageRecord
from pipeline.results import metrics
from pipeline.results.chance import LearnedTask
from pipeline.results.training import (
    StageInfo,
    StepTraining,
    TrainingBudget,
    group_steps,
    sum_budget,
)
from workers.errors import UserError
from workers.storage.artifact import Artifact, Manifest, join
from workers.storage.parquet import read_table

if TYPE_CHECKING:
    from workers.storage.taskstate import Carried, TaskState

Row = dict[str, Any]
# Additional counts, which are measured if the task of an image is not given: name -> field of an
# evaluation row. `top5`: the true class is among the five largest logits. `task_aware`: the
# prediction is correct if the model chooses among the outputs of the task only.
EXTRA_COUNTS = {"top5": "correct_top5", "task_aware": "correct_task_aware"}
TOP_CLASSES = 5  # number of guesses that count for the top-5 accuracy
# columns of `RunTables.sizes` that are not numbers of bytes
NOT_BYTES = ("label", "after_index", "after", "role", "growth", "trained_parameters", "flops_share")
STATE_KINDS = ("masks", "tokens", "head", "copies")  # parts of a `TaskState`


class PickCounts(NamedTuple):
    """How often images of a task were assigned to each candidate by task inference.

    Attributes:
        counts: Number of images, (tasks, candidates).
        tasks: True tasks (rows).
        candidates: Names of the candidates (columns).
    """

    counts: NDArray[np.int64]
    tasks: list[str]
    candidates: list[str]


@dataclass(frozen=True)
class Matrix:
    """The accuracy matrix R of one method.

    A row is the state after learning a task, a column is the tested task.

    Attributes:
        label: Label of the method.
        tasks: Names of the T tasks, in stream order.
        correct: Numbers of correct predictions (T, T), or accuracies; NaN if missing.
        total: Numbers of test images (T, T), or 1 for accuracies; NaN if missing.
        source: Origin of each entry (T, T). `measured`; `follows`: equal to the diagonal and not
            measured again, because the method cannot change its predictions on earlier tasks;
            `missing`: not finished yet; `ahead`: the task is not learned yet.
        extra: Name -> matrix with other counts of the same predictions. Their metrics have names
            such as `NAME_average_accuracy`.
        chance: Accuracy of guessing (T, T); NaN above the diagonal.
    """

    label: str
    tasks: tuple[str, ...]
    correct: NDArray[np.float64]
    total: NDArray[np.float64]
    source: NDArray[np.str_]
    extra: Mapping[str, Matrix] = field(default_factory=dict)
    chance: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def chance_so_far(self) -> list[float]:
        """Mean accuracy of guessing over the tasks so far, after each task."""
        return [float(row[: t + 1].mean()) for t, row in enumerate(self.chance)]

    @property
    def test_images(self) -> list[int | None]:
        """Number of test images of each task; None for an unmeasured task."""
        return [_whole(float(np.fmax.reduce(column))) for column in self.total.T]

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """Accuracies (T, T); NaN if missing."""
        return metrics.measure(self.correct, self.total).rates

    @cached_property
    def over_time(self) -> list[dict[str, float]]:
        """Name -> value of all metrics, after each task."""
        rows = metrics.over_time(self.correct, self.total)
        for prefix, matrix in self.extra.items():
            for row, values in zip(rows, matrix.over_time, strict=True):
                for metric in metrics.metrics_for("variants"):
                    row[f"{prefix}_{metric.name}"] = values[metric.name]
        return rows

    @property
    def finished(self) -> int:
        """Number of leading rows without missing entries."""
        for t, row in enumerate(self.source):
            if "missing" in row[: t + 1]:
                return t
        return len(self.source)

    @property
    def final(self) -> dict[str, float]:
        """Metrics after the last complete row; empty if no row is complete."""
        if not self.finished:
            return {}
        return self.over_time[self.finished - 1]


@dataclass
class RunTables:
    """The stored results of a run.

    Attributes:
        storage: Folder or URI of the storage.
        record: The record of the run (run.json).
        artifacts: Stage id -> artifact of all finished stages.
        problems: Sentences about files that cannot be read.
        notes: Sentences that a reader needs to compare these results with others.
    """

    storage: str
    record: RunRecord
    artifacts: dict[str, Artifact]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _classes: dict[str, list[Row]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        storage: str,
        record: RunRecord,
        known: Mapping[str, Manifest] | None = None,
    ) -> RunTables:
        """Read the manifests of all finished stages.

        Args:
            storage: Folder or URI of the storage.
            record: The record of the run.
            known: Stage id -> known manifest, which is therefore not read.
        """
        root = join(storage, "stages")
        known = known or {}
        artifacts = {}
        for stage in record["stages"]:
            stage_id = stage["id"]
            if stage_id in known:
                artifacts[stage_id] = Artifact(root, stage["key"], known[stage_id])
                continue
            artifact = Artifact.open(root, stage["key"])
            if artifact is not None:
                artifacts[stage_id] = artifact
        return cls(storage, record, artifacts)

    @classmethod
    def load_all(cls, storage: str, records: Mapping[str, RunRecord]) -> dict[str, RunTables]:
        """Call `load` for several records, such as the replicas of a run. The names are kept."""
        return {name: cls.load(storage, record) for name, record in records.items()}

    # ---- stages, methods and tasks ---------------------------------------------------------------
    @property
    def source(self) -> str:
        """Path of the file that contains the results; empty for results in a store."""
        return ""

    @property
    def root(self) -> str:
        """Folder of all stage results."""
        return join(self.storage, "stages")

    @property
    def labels(self) -> list[str]:
        """Labels of all methods, in order."""
        return list(dict.fromkeys(s["label"] for s in self.record["stages"] if s["label"]))

    @property
    def scenario(self) -> str:
        """`task`, `class` or `domain`."""
        return str(self.record["config"].get("stream", {}).get("scenario", "task"))

    def method(self, label: str) -> str:
        """Return the name of the method that `label` configures."""
        for stage in self.record["stages"]:
            if stage["label"] == label:
                return str(stage["method"] or label)
        return label

    def tasks(self, label: str) -> list[str]:
        """Return the tasks on which the method is evaluated, in stream order."""
        evaluated = set()
        for stage in self.record["stages"]:
            if stage["label"] == label and stage["step"] == "evaluate":
                evaluated.add(stage["task"])
        return [task["name"] for task in self.record["tasks"] if task["name"] in evaluated]

    def task(self, name: str) -> Mapping[str, Any]:
        """Return the record of a task."""
        task: Mapping[str, Any] = next(t for t in self.record["tasks"] if t["name"] == name)
        return task

    def stages(self, label: str, task: str) -> list[StageRecord]:
        """Return the stages in which a method learns `task`, in order, without `evaluate`.

        The base task is the task on which the backbone was trained. If a method does not train on
        the base task, the result for that task is the backbone stage.
        """
        learning = []
        backbone = []
        for stage in self.record["stages"]:
            if stage["label"] == label and stage["task"] == task and stage["step"] != "evaluate":
                learning.append(stage)
            elif stage["step"] == "backbone":
                backbone.append(stage)
        if not learning and self.task(task)["role"] == "base":
            return backbone
        return learning

    def result(self, label: str, task: str) -> dict[str, Any] | None:
        """Return the result of `evaluate` after learning `task`; None if it is not finished.

        Its key `rewrites` tells whether learning a task can change predictions on earlier tasks.
        See `evaluation_rows` for the keys `rows` and `canary`.
        """
        artifact = self.artifacts.get(f"{label}/{task}/evaluate")
        if artifact is None:
            return None
        result: dict[str, Any] = artifact.manifest["result"]
        return result

    def state_stage(self, label: str, task: str) -> Artifact | None:
        """Return the stage with the `task.safetensors` that `task` is served with.

        This is the stage that `evaluate` depends on. The result is None if it is not finished.
        """
        evaluate_id = f"{label}/{task}/evaluate"
        parents: Sequence[str] = ()
        for stage in self.record["stages"]:
            if stage["id"] == evaluate_id:
                parents = stage["parents"]
        for stage in reversed(self.stages(label, task)):
            artifact = self.artifacts.get(stage["id"])
            if artifact is None or stage["id"] not in parents:
                continue
            if "task.safetensors" in artifact.manifest["files"]:
                return artifact
        return None

    # ---- files of stages -------------------------------------------------------------------------
    def read(self, artifact: Artifact | None, name: str) -> bytes | None:
        """Return the content of a file of a stage; None if it is missing or damaged.

        For a damaged file, a sentence is added to `problems`.
        """
        if artifact is None or name not in artifact.manifest["files"]:
            return None
        try:
            return artifact.read(name)
        except (UserError, OSError) as error:
            self.add_problem(str(error))
            return None

    def add_problem(self, sentence: str) -> None:
        """Add a sentence to `problems`, unless the sentence is there already."""
        if sentence not in self.problems:
            self.problems.append(sentence)

    def table(self, artifact: Artifact | None, name: str) -> pa.Table | None:
        """Return a Parquet file of a stage as a table; None if it is missing or damaged."""
        data = self.read(artifact, name)
        if data is None:
            return None
        return read_table(data)

    def history(self, stage_id: str) -> list[Row]:
        """Return the history of a stage with one row per epoch; empty without a history."""
        table = self.table(self.artifacts.get(stage_id), "history.parquet")
        if table is None:
            return []
        rows: list[Row] = table.to_pylist()
        return rows

    def state(self, label: str, task: str) -> TaskState | None:
        """Return the state of a task; None if it is missing or damaged."""
        from workers.storage.taskstate import TaskState  # start-up time: imports torch

        data = self.read(self.state_stage(label, task), "task.safetensors")
        if data is None:
            return None
        try:
            return TaskState.from_bytes(data, f"task state of {label}/{task}")
        except UserError as error:
            self.add_problem(str(error))
            return None

    def carried(self, label: str, task: str) -> Carried:
        """Return the state that a method carries from `task` to the next task.

        The result is empty if the state is missing or damaged.
        """
        from workers.storage.taskstate import Carried  # start-up time: imports torch

        data = self.read(self.state_stage(label, task), "carried.safetensors")
        if data is None:
            return Carried()
        try:
            return Carried.from_bytes(data, f"carried state of {label}/{task}")
        except UserError as error:
            self.add_problem(str(error))
            return Carried()

    # ---- accuracy and sizes ----------------------------------------------------------------------
    def matrix(self, label: str, correct: str = "correct") -> Matrix:
        """Return the accuracy matrix of one method.

        Args:
            label: Label of the method.
            correct: Field of an evaluation row with the number of correct predictions: `correct`,
                or a value of EXTRA_COUNTS. All entries are missing if `evaluate` did not write the
                field.
        """
        tasks = self.tasks(label)
        size = len(tasks)
        hits = np.full((size, size), np.nan)
        totals = np.full((size, size), np.nan)
        is_learned = np.tril(np.ones((size, size), bool))
        source = np.where(is_learned, "missing", "ahead").astype("U8")
        for t, after in enumerate(tasks):
            is_measured = False
            for row in self.evaluation_rows(label, after):
                if row["task"] in tasks and row.get(correct) is not None:
                    i = tasks.index(row["task"])
                    hits[t, i] = row[correct]
                    totals[t, i] = row["total"]
                    source[t, i] = "measured"
                    is_measured = True
            result = self.result(label, after)
            if is_measured and result is not None and not result["rewrites"]:
                # No later task can change the predictions on earlier tasks.
                for i in range(t):
                    if source[t, i] == "missing" and source[i, i] == "measured":
                        hits[t, i] = hits[i, i]
                        totals[t, i] = totals[i, i]
                        source[t, i] = "follows"
        extra = {}
        if self.scenario != "task" and correct == "correct":
            extra = {name: self.matrix(label, count) for name, count in EXTRA_COUNTS.items()}
        chance = self._chance(tasks, correct)
        return Matrix(label, tuple(tasks), hits, totals, source, extra, chance)

    def _chance(self, tasks: Sequence[str], correct: str) -> NDArray[np.float64]:
        """Return the accuracy of guessing (T, T); NaN above the diagonal.

        In scenario `class` the classes of all tasks so far compete, unless the task is given. For
        the top-5 accuracy there are TOP_CLASSES guesses.

        Args:
            tasks: Tasks in stream order.
            correct: See `matrix`.
        """
        sizes = np.array([len(self.task(name)["classes"]) for name in tasks], float)
        competing = np.tile(sizes, (len(tasks), 1))
        if self.scenario == "class" and correct != EXTRA_COUNTS["task_aware"]:
            competing = np.tile(np.cumsum(sizes)[:, None], (1, len(tasks)))
        guesses = TOP_CLASSES if correct == EXTRA_COUNTS["top5"] else 1
        chance = np.minimum(guesses / competing, 1.0)
        is_learned = np.tril(np.ones(chance.shape, bool))
        return np.where(is_learned, chance, np.nan)

    def learned_tasks(self, label: str) -> list[LearnedTask]:
        """Return the test result of each task right after the method learned the task."""
        matrix = self.matrix(label)
        config = self.record["config"]
        own = (config.get("methods") or {}).get(label) or {}
        has_rate = "lr" in (config.get("train") or {}) or "lr" in (own.get("train") or {})
        entries = (config.get("stream") or {}).get("tasks") or []
        has_pretrained = any(
            isinstance(entry, dict) and entry.get("role") == "pretrained" for entry in entries
        )
        learned = []
        for t, task in enumerate(matrix.tasks):
            if matrix.source[t, t] != "measured":
                continue
            artifact = self.artifacts.get(f"{label}/{task}/train")
            length = (artifact.manifest.get("length") if artifact else None) or {}
            sizes = self._task_sizes(label, task)
            steps = [stage["step"] for stage in self.stages(label, task)]
            learned.append(
                LearnedTask(
                    label,
                    self.method(label),
                    task,
                    int(matrix.correct[t, t]),
                    int(matrix.total[t, t]),
                    round(1 / matrix.chance[t, t]),
                    has_rate,
                    length.get("steps", 0),
                    # unknown without stages or sizes, as in imported results: assume training
                    is_trained=not steps or sizes is None or bool(sizes.trained_parameters),
                    # the method uses the classifier in the backbone's weights
                    is_pretrained=has_pretrained and steps == ["backbone"],
                )
            )
        return learned

    def sizes(self, label: str) -> list[Row]:
        """Return one row per finished task: stored bytes, growth, and the cost of the task.

        A method that trains its tasks in a chain and changes the backbone carries a copy of the
        backbone. This copy counts as `carried`, in addition to the shared backbone. A method whose
        tasks all start from the base task (a star) keeps the state that the base task carries.
        """
        backbone_bytes = 0
        if "backbone" in self.artifacts:
            backbone_bytes = int(self.artifacts["backbone"].manifest.get("bytes", 0))
        sums = dict.fromkeys(STATE_KINDS, 0)
        carried_bytes = 0
        rows = []
        for index, task in enumerate(self.tasks(label)):
            task_sizes = self._task_sizes(label, task)
            if task_sizes is None:
                continue
            for kind, count in task_sizes.bytes_by_kind.items():
                sums[kind] = sums.get(kind, 0) + count
            # the latest carried state replaces the one before
            carried_bytes = task_sizes.carried_bytes or carried_bytes
            total = backbone_bytes + sum(sums.values()) + carried_bytes
            growth = total / backbone_bytes if backbone_bytes else None
            rows.append(
                {
                    "label": label,
                    "after_index": index,
                    "after": task,
                    "role": self.task(task)["role"],
                    "backbone": backbone_bytes,
                    **sums,
                    "carried": carried_bytes,
                    "total": total,
                    "growth": growth,
                    "task_bytes": sum(task_sizes.bytes_by_kind.values()),
                    "trained_parameters": task_sizes.trained_parameters,
                    "flops_share": task_sizes.flops_share,
                }
            )
        return rows

    def _task_sizes(self, label: str, task: str) -> TaskSizes | None:
        """Return the sizes of one task; None if its state is not finished."""
        serving = self.state_stage(label, task)
        if serving is None:
            return None
        sizes = serving.manifest.get("sizes")
        if sizes is None:
            state = self.state(label, task)
            sizes = state.sizes() if state else {}
        stages = self.stages(label, task)
        # Stages with a later stage of the same task. That stage uses the state that they carry, so
        # it does not count as carried to the next task.
        inner_ids: set[str] = set()
        for stage in stages:
            inner_ids.update(stage["parents"])
        carried_bytes = 0
        trained_parameters = 0
        for stage in stages:
            artifact = self.artifacts.get(stage["id"])
            if artifact is None:
                continue
            trained = artifact.manifest.get("trained_parameters") or 0
            trained_parameters = max(trained_parameters, trained)
            if stage["id"] not in inner_ids:
                carried_bytes = max(carried_bytes, artifact.manifest.get("carried_bytes") or 0)
        return TaskSizes(
            sizes, carried_bytes, serving.manifest.get("flops_share"), trained_parameters or None
        )

    def budget(self, label: str) -> TrainingBudget:
        """Return the training budget of a method, without the shared backbone stage.

        Stages that compute features for the method are included, although other methods may share
        them.
        """
        manifests: list[Manifest | None] = []
        trained: dict[str, None] = {}
        shared: dict[str, None] = {}
        for stage in self.record["stages"]:
            if stage["label"] != label or stage["step"] == "evaluate":
                continue
            artifact = self.artifacts.get(stage["id"])
            manifests.append(None if artifact is None else artifact.manifest)
            trained[stage["task"] or ""] = None
            shared |= dict.fromkeys(p for p in stage["parents"] if p.startswith("features/"))
        for stage_id in shared:
            artifact = self.artifacts.get(stage_id)
            manifests.append(None if artifact is None else artifact.manifest)
        sizes = self.sizes(label)
        return sum_budget(manifests, len(trained), sizes[-1]["total"] if sizes else math.nan)

    def summary(self, with_classes: bool = True) -> list[Row]:
        """Return one row per method: metrics after its last finished task, sizes, and cost.

        The column `answers` tells whether logits changed, see `logits_verdict`.

        Args:
            with_classes: Add `balanced_accuracy`, which reads the predictions of all tasks.
        """
        return [self.summary_row(label, with_classes) for label in self.labels]

    def summary_row(self, label: str, with_classes: bool = True) -> Row:
        """Return the row of `summary` for one method."""
        matrix = self.matrix(label)
        sizes = self.sizes(label)
        last_sizes = sizes[-1] if sizes else {}
        task_sizes = [row for row in sizes if row["role"] != "base"]
        trained = [row["trained_parameters"] or 0 for row in task_sizes]
        wall_s: float = 0
        for stage_id, artifact in self.artifacts.items():
            if stage_id.startswith(f"{label}/"):
                wall_s += artifact.manifest.get("wall_s") or 0
        return {
            "label": label,
            "method": self.method(label),
            "tasks_finished": matrix.finished,
            "tasks": len(matrix.tasks),
            **(matrix.final or metrics.all_metrics([])),
            "chance": matrix.chance_so_far[matrix.finished - 1] if matrix.finished else math.nan,
            "test_images": sum(count or 0 for count in matrix.test_images),
            "bytes_per_task": _average_known([row["task_bytes"] for row in task_sizes]),
            "carried_bytes": last_sizes.get("carried", math.nan),
            "total_bytes": last_sizes.get("total", math.nan),
            "growth": last_sizes.get("growth"),
            "trained_parameters": max(trained, default=0) or None,
            "flops_share": _average_known([row["flops_share"] for row in task_sizes]),
            "answers": self.logits_verdict(label),
            "wall_s": wall_s,
            **self._further_metrics(label, matrix, with_classes),
        }

    def _further_metrics(self, label: str, matrix: Matrix, with_classes: bool) -> dict[str, float]:
        """Return the metrics that cannot be computed from the accuracy matrix of the method alone.

        A metric is left out or NaN if the values that it needs were not measured.
        """
        values = {}
        by_class: dict[tuple[str, str], list[Row]] = {}
        for row in self.class_rows(label) if with_classes else ():
            task = "" if self.scenario == "domain" else row["task"]
            by_class.setdefault((task, row["class"]), []).append(row)
        if by_class:
            rates = [
                sum(row["correct"] for row in rows) / sum(row["total"] for row in rows)
                for rows in by_class.values()
            ]
            values["balanced_accuracy"] = float(np.mean(rates))
        joint = [other for other in self.labels if self.method(other) == "joint"]
        if len(joint) == 1 and joint[0] != label:
            differences = np.diag(self.matrix(joint[0]).rates) - np.diag(matrix.rates)
            values["intransigence"] = float(differences[: matrix.finished].mean())
        measured = [self._next_row(label, after) for after in matrix.tasks]
        following = [row for row in measured if row is not None]
        if following and len(following) == len(matrix.tasks) - 1:
            rate = float(np.mean([row["correct"] / row["total"] for row in following]))
            guesses = [1 / len(self.task(row["task"])["classes"]) for row in following]
            values["next_task_accuracy"] = rate
            values["forward_transfer"] = rate - float(np.mean(guesses))
        return values

    def _next_row(self, label: str, after: str) -> Row | None:
        """Return the counts on the next task after learning `after`, if they were measured."""
        return (self.result(label, after) or {}).get("next")

    def class_rows(self, label: str) -> list[Row]:
        """Return a row for each class of each task: correct predictions and test images at the end.

        The predictions are counted after the last finished task. Tasks whose predictions cannot be
        read are left out. The rows are cached.
        """
        if label not in self._classes:
            self._classes[label] = self._read_classes(label)
        return self._classes[label]

    def _read_classes(self, label: str) -> list[Row]:
        """Read the predictions of a method, and return the rows of `class_rows`."""
        finished = [name for name in self.tasks(label) if self.result(label, name) is not None]
        if not finished:
            return []
        last = finished[-1]
        rewrites = bool((self.result(label, last) or {})["rewrites"])
        rows = []
        for after in [last] if rewrites else finished:
            artifact = self.artifacts.get(f"{label}/{after}/evaluate")
            table = self.table(artifact, "predictions.parquet")
            for task in finished if rewrites else [after]:
                rows += self._count_classes(label, task, table)
        return rows

    def _count_classes(self, label: str, task: str, table: pa.Table | None) -> list[Row]:
        """Return the rows of `class_rows` for one task.

        In scenario `class`, labels in the table are indices into the classes of all tasks so far.

        Args:
            label: Label of the method.
            task: Name of the task.
            table: The predictions; None if they cannot be read.
        """
        if table is None:
            return []
        own = table.filter(pc.equal(table["task"], task))
        names = list(self.task(task)["classes"])
        first = 0
        if self.scenario == "class":
            order = self.tasks(label)
            earlier = order[: order.index(task)]
            first = sum(len(self.task(name)["classes"]) for name in earlier)
        labels = own["label"].to_numpy() - first
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
            return []
        is_correct = own["label"].to_numpy() == own["prediction"].to_numpy()
        correct = np.bincount(labels, is_correct, len(names))
        total = np.bincount(labels, minlength=len(names))
        return [
            {
                "label": label,
                "task": task,
                "class": name,
                "correct": int(correct[index]),
                "total": int(total[index]),
                "accuracy": float(correct[index] / total[index]),
            }
            for index, name in enumerate(names)
            if total[index]
        ]

    # ---- evaluations -----------------------------------------------------------------------------
    def evaluation_rows(self, label: str, after: str) -> list[Row]:
        """Return the evaluation rows measured after learning `after`.

        If this can change predictions on earlier tasks (`rewrites` in `result`), these are all
        entries in a row of the matrix. Otherwise, these are the new task and its canary: the
        previous task, which is measured again as a check.
        """
        result = self.result(label, after)
        if result is None:
            return []
        rows = list(result["rows"])
        if result.get("canary"):
            rows.append(result["canary"])
        return rows

    def logits_rows(self, label: str) -> list[Row]:
        """Return one row per task: number of measurements, and whether their logits were equal.

        The sha256 of logits is only compared between measurements on the same kind of device with
        the same number of threads, because other measurements sum in a different order. If no two
        measurements of a task are comparable, `logits_equal` is None.
        """
        digests: dict[str, dict[str, list[str]]] = {}  # task -> device -> sha256 of logits
        for after in self.tasks(label):
            device = self._device_of_evaluation(label, after)
            for row in self.evaluation_rows(label, after):
                by_device = digests.setdefault(row["task"], {})
                by_device.setdefault(device, []).append(row.get("logits_sha256") or "")
        rows = []
        for task, by_device in digests.items():
            logits_equal = None
            for hashes in by_device.values():
                if len(hashes) > 1 and all(hashes):
                    logits_equal = logits_equal is not False and len(set(hashes)) == 1
            rows.append(
                {
                    "label": label,
                    "task": task,
                    "measured": sum(map(len, by_device.values())),
                    "distinct_logits": max(len(set(hashes)) for hashes in by_device.values()),
                    "logits_equal": logits_equal,
                }
            )
        return rows

    def _device_of_evaluation(self, label: str, after: str) -> str:
        """Return device and number of threads, which can change the last bits of logits."""
        artifact = self.artifacts.get(f"{label}/{after}/evaluate")
        provenance: Mapping[str, Any] = {}
        if artifact is not None:
            provenance = artifact.manifest.get("provenance") or {}
        return f"{provenance.get('device')} {provenance.get('threads')}"

    def logits_verdict(self, label: str) -> str:
        """Return whether the logits of tasks stayed the same in repeated measurements.

        Returns:
            `identical`, `changed`, or `not measured again` without comparable measurements.
        """
        verdicts = {row["logits_equal"] for row in self.logits_rows(label)} - {None}
        if not verdicts:
            return "not measured again"
        return "changed" if False in verdicts else "identical"

    def picks(self, label: str) -> list[Row]:
        """Return how well a method infers the task; empty for methods that do not infer the task.

        There is one row for each learned task and each task tested after it, with the number and
        the share of the images assigned to the right task, and the mean confidence of right and of
        wrong assignments.
        """
        rows = []
        for index, after in enumerate(self.tasks(label)):
            for row in self.evaluation_rows(label, after):
                if "picks" not in row:
                    continue
                picks = row["picks"]
                share_right = math.nan
                if row["total"]:
                    share_right = picks["right"] / row["total"]
                rows.append(
                    {
                        "label": label,
                        "after_index": index,
                        "after": after,
                        "task": row["task"],
                        "images": row["total"],
                        "right": picks["right"],
                        "share_right": share_right,
                        "confidence_right": picks["confidence_right"],
                        "confidence_wrong": picks["confidence_wrong"],
                    }
                )
        return rows

    def pick_counts(self, label: str, after: str | None = None) -> PickCounts | None:
        """Return how often images of each task were assigned to each candidate task.

        Args:
            label: Label of the method.
            after: The last learned task; None for the last finished task.

        Returns:
            The counts, or None if the method does not infer the task.
        """
        last_rows: list[Row] = []
        for task in self.tasks(label):
            if after in (None, task):
                rows = [row for row in self.evaluation_rows(label, task) if "picks" in row]
                last_rows = rows or last_rows
        if not last_rows:
            return None
        return PickCounts(
            np.array([row["picks"]["picked"] for row in last_rows]),
            [row["task"] for row in last_rows],
            last_rows[0]["picks"]["candidates"],
        )

    def confusion(
        self, label: str, after: str, task: str
    ) -> tuple[NDArray[np.int64], list[str]] | None:
        """Return the confusion matrix on `task` after learning `after`.

        Returns:
            Counts (true class, predicted class) and the class names. None if the
            predictions are missing or do not match the classes.
        """
        table = self.table(self.artifacts.get(f"{label}/{after}/evaluate"), "predictions.parquet")
        if table is None:
            return None
        rows = table.filter(pc.equal(table["task"], task))
        if not len(rows):
            return None
        labels = rows["label"].to_numpy()
        predictions = rows["prediction"].to_numpy()
        highest = max(labels.max(), predictions.max())
        names = list(self.task(task)["classes"])
        # Larger labels occur if labels are indices into the classes of all tasks so far.
        if highest >= len(names):
            order = self.tasks(label)
            names = []
            for learned in order[: order.index(after) + 1]:
                names += self.task(learned)["classes"]
        if highest >= len(names):
            return None
        counts = np.zeros((len(names), len(names)), np.int64)
        np.add.at(counts, (labels, predictions), 1)
        return counts, names

    # ---- the run as a whole ----------------------------------------------------------------------
    def stage_rows(self) -> list[Row]:
        """Return one row per stage: state, wall time, bytes and device.

        The report stage is built from these rows, so it counts as done if all other stages are
        done.
        """
        rows = []
        for stage in self.record["stages"]:
            row: Row = {
                "stage": stage["id"],
                "step": stage["step"],
                "label": stage["label"],
                "task": stage["task"],
                "key": stage["key"],
                "state": "pending",
                "wall_s": None,
                "bytes": None,
                "device": None,
            }
            artifact = self.artifacts.get(stage["id"])
            if artifact is not None:
                manifest = artifact.manifest
                row["state"] = "done"
                row["wall_s"] = manifest.get("wall_s")
                row["bytes"] = sum(file["bytes"] for file in manifest["files"].values())
                row["device"] = (manifest.get("provenance") or {}).get("device")
            rows.append(row)
        others = [row for row in rows if row["step"] != "report"]
        if all(row["state"] == "done" for row in others):
            for row in rows:
                row["state"] = "done"
        return rows

    def training(self) -> list[StepTraining]:
        """Return the training settings of each step, and the lengths of the finished stages."""
        steps = []
        for stage in self.record["stages"]:
            artifact = self.artifacts.get(stage["id"])
            length = artifact.manifest.get("length") if artifact else None
            label = stage["label"] or stage["step"]
            task = stage["task"] or ""
            steps.append(StageInfo(label, stage["step"], task, stage["inputs"], length))
        return group_steps(steps)

    def warnings(self) -> list[Row]:
        """Return one row per warning, with the number of stages that have the warning.

        The order is: omitted images, tasks that do not exceed chance, warnings of stages, and
        `problems`.
        """
        rows: list[Row] = []
        for stage in self.record["stages"]:
            left_out = self._left_out(stage["id"]) if stage["step"] == "ingest" else ""
            if left_out:
                rows.append({"stage": stage["id"], "stages": 1, "warning": left_out})
        for label in self.labels:
            for learned in self.learned_tasks(label):
                at_chance = learned.sentence()
                stage_id = f"{label}/{learned.task}/evaluate"
                if at_chance:
                    rows.append({"stage": stage_id, "stages": 1, "warning": at_chance})
        stage_ids: dict[str, list[str]] = {}
        for stage_id, artifact in self.artifacts.items():
            for sentence in artifact.manifest.get("warnings") or []:
                stage_ids.setdefault(str(sentence), []).append(stage_id)
        for sentence, ids in stage_ids.items():
            rows.append({"stage": ids[0], "stages": len(ids), "warning": sentence})
        rows += [{"stage": "report", "stages": 1, "warning": text} for text in self.problems]
        return rows

    def image_digests(self) -> dict[str, str]:
        """Return task -> digest of the images, for the tasks whose data are ingested."""
        contents = {artifact.key: artifact.manifest.get("content") for artifact in self.ingested()}
        digests = {}
        for task in self.record["tasks"]:
            content = contents.get(str(task.get("data", "")))
            if content:
                digests[task["name"]] = str(content)
        return digests

    def _left_out(self, stage_id: str) -> str:
        """Return a sentence on the images that an ingest stage omitted, or "".

        Images that were omitted because of the limit `per_class` are not mentioned.
        """
        artifact = self.artifacts.get(stage_id)
        data = self.read(artifact, REJECTED_CSV)
        if artifact is None or data is None:
            return ""
        lines = csv.DictReader(data.decode().splitlines())
        reasons = Counter(
            line["reason"].split(":")[0]
            for line in lines
            if line["kept"] == "no" and line["reason"] != LIMIT_REASON
        )
        if not reasons:
            return ""
        number = reasons.total()
        parts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return (
            f"{number} image{'' if number == 1 else 's'} of the source left out ({parts}); "
            f"{artifact.uri(REJECTED_CSV)} lists them"
        )

    def ingested(self) -> list[Artifact]:
        """Return the results of the finished ingest stages."""
        stages = [stage for stage in self.record["stages"] if stage["step"] == "ingest"]
        return [self.artifacts[s["id"]] for s in stages if s["id"] in self.artifacts]

    def environment(self) -> dict[str, list[str]]:
        """Return commit, seed, device and package versions, with all distinct values of each."""
        provenances = [self.record.get("provenance") or {}]
        provenances += [a.manifest.get("provenance") or {} for a in self.artifacts.values()]
        values: dict[str, list[str]] = {}
        for provenance in provenances:
            facts = {}
            for name in ("git_commit", "seed", "device"):
                if provenance.get(name) is not None:
                    facts[name] = provenance[name]
            facts |= provenance.get("packages") or {}
            for name, value in facts.items():
                known = values.setdefault(name, [])
                if str(value) not in known:
                    known.append(str(value))
        return values

    def tables(self) -> dict[str, list[Row]]:
        """Return name -> rows of all tables that have rows, in long format."""
        tables: dict[str, list[Row]] = {
            "summary": self.summary(),
            "matrix": [],
            "averages": [],
            "sizes": [],
            "histories": [],
            "logits": [],
            "picks": [],
            "classes": [],
            "stages": self.stage_rows(),
        }
        for label in self.labels:
            matrix = self.matrix(label)
            tables["matrix"] += matrix_rows(matrix)
            tables["averages"] += average_rows(matrix)
            tables["sizes"] += self.sizes(label)
            tables["logits"] += self.logits_rows(label)
            tables["picks"] += self.picks(label)
            tables["classes"] += self.class_rows(label)
        for stage in self.record["stages"]:
            if stage["step"] not in ("ingest", "evaluate", "report"):
                columns = {
                    "stage": stage["id"],
                    "label": stage["label"],
                    "task": stage["task"],
                    "step": stage["step"],
                }
                tables["histories"] += [columns | row for row in self.history(stage["id"])]
        # The warnings come last, because reading the tables above may add to `problems`.
        tables["warnings"] = self.warnings()
        return {name: rows for name, rows in tables.items() if rows}


class TaskSizes(NamedTuple):
    """Bytes that one task adds to the stored state, and the cost of the task."""

    bytes_by_kind: Mapping[str, int]
    carried_bytes: int
    flops_share: float | None
    trained_parameters: int | None


def matrix_rows(matrix: Matrix) -> list[Row]:
    """Return a matrix in long format: one row per entry, without tasks not learned yet."""
    rows = []
    for t, i in np.ndindex(matrix.source.shape):
        if matrix.source[t, i] == "ahead":
            continue
        rows.append(
            {
                "label": matrix.label,
                "after_index": t,
                "after": matrix.tasks[t],
                "task_index": i,
                "task": matrix.tasks[i],
                "correct": _whole(float(matrix.correct[t, i])),
                "total": _whole(float(matrix.total[t, i])),
                "rate": float(matrix.rates[t, i]),
                "chance": float(matrix.chance[t, i]) if matrix.chance.size else math.nan,
                "source": str(matrix.source[t, i]),
            }
        )
    return rows


def average_rows(matrix: Matrix) -> list[Row]:
    """Return one row per finished task, with all metrics over the tasks so far."""
    rows = []
    for t in range(matrix.finished):
        columns = {"label": matrix.label, "after_index": t, "after": matrix.tasks[t]}
        rows.append(columns | matrix.over_time[t])
    return rows


def _whole(value: float) -> int | None:
    """Return a count as an int; None if it is NaN."""
    if math.isnan(value):
        return None
    return int(value)


def _average_known(values: Sequence[float | None]) -> float:
    """Return the mean of the known values; NaN if all are unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return math.nan
    return sum(known) / len(known)


def merge_warnings(replicas: Mapping[str, RunTables]) -> list[Row]:
    """Merge the warnings of all replicas of a run into one list (see `RunTables.warnings`).

    If only some replicas have a warning, their names are added to the stage of the warning.

    Args:
        replicas: Name of a replica, such as `seed-0` -> its results.
    """
    names: dict[tuple[str, str], list[str]] = {}
    rows: dict[tuple[str, str], Row] = {}
    for name, tables in replicas.items():
        for row in tables.warnings():
            key = (row["warning"], row["stage"])
            names.setdefault(key, []).append(name)
            rows.setdefault(key, row)
    merged = []
    for key, row in rows.items():
        stage = row["stage"]
        if len(names[key]) < len(replicas):
            stage += f" of {', '.join(names[key])}"
        merged.append({**row, "stage": stage})
    return merged
