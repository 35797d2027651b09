"""Every number of a run, read from its stage results: matrices, metrics over time, sizes,
histories, confusions.

A run that is not finished gives what is there. Nothing here is computed from a live run, so a
report can be made anew from the store alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.results import metrics
from workers.errors import UserError
from workers.storage.artifact import Artifact, Manifest, join
from workers.storage.taskstate import Carried, TaskState

Row = dict[str, Any]
AVERAGES = ("average_accuracy", "average_incremental_accuracy", "last_accuracy")
EXTRA_COUNTS = {
    "top5": "correct_top5",
    "task_aware": "correct_task_aware",
}  # in scenario `class`: right among the first five; the task given
STATE_KINDS = ("masks", "tokens", "head", "copies")


@dataclass(frozen=True)
class Matrix:
    """R of one method: integer counts, NaN where there are none; both (T, T), rows = after task,
    columns = on task.

    source (T, T): `measured`; `follows` (equals the diagonal, because the method cannot change an
    earlier task's answers, so it was not measured again); `missing` (not finished yet); `ahead` (a
    task that was not learned yet). extra: other counts of the same answers, by name; their
    averages stand among the metrics as `NAME_average_accuracy` and so on.
    """

    label: str
    tasks: tuple[str, ...]
    correct: NDArray[np.float64]
    total: NDArray[np.float64]
    source: NDArray[np.str_]
    extra: Mapping[str, Matrix] = field(default_factory=dict)

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        return metrics.rates(self.correct, self.total)

    @cached_property
    def over_time(self) -> list[dict[str, float]]:
        rows = metrics.over_time(self.correct, self.total)
        for prefix, other in self.extra.items():
            rows = [
                row | {f"{prefix}_{name}": values[name] for name in AVERAGES}
                for row, values in zip(rows, other.over_time, strict=True)
            ]
        return rows

    @property
    def finished(self) -> int:
        """How many leading rows are complete."""
        whole = [not np.isin(row[: t + 1], ("missing",)).any() for t, row in enumerate(self.source)]
        return whole.index(False) if False in whole else len(whole)

    @property
    def final(self) -> dict[str, float]:
        """The metrics after the last complete row; empty before the first one."""
        return self.over_time[self.finished - 1] if self.finished else {}


@dataclass
class RunTables:
    """What the store holds of the run that `record` (its run.json) describes.

    artifacts: finished stages by id. problems: sentences on what could not be read.
    """

    storage: str
    record: Mapping[str, Any]
    artifacts: dict[str, Artifact]
    problems: list[str] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        storage: str,
        record: Mapping[str, Any],
        known: Mapping[str, Manifest] | None = None,
    ) -> RunTables:
        """Reads the manifests of all stages; those in `known` (by stage id) are taken as they
        are."""
        root, found = join(storage, "stages"), {}
        for stage in record["stages"]:
            if known and stage["id"] in known:
                found[stage["id"]] = Artifact(root, stage["key"], known[stage["id"]])
            elif (artifact := Artifact.open(root, stage["key"])) is not None:
                found[stage["id"]] = artifact
        return cls(storage, record, found)

    # ---- who is who ------------------------------------------------------------------------------
    @property
    def root(self) -> str:
        return join(self.storage, "stages")

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(s["label"] for s in self.record["stages"] if s["label"]))

    @property
    def scenario(self) -> str:
        return self.record["config"].get("stream", {}).get("scenario", "task")

    def method(self, label: str) -> str:
        return next(
            (s["method"] or label for s in self.record["stages"] if s["label"] == label), label
        )

    def tasks(self, label: str) -> list[str]:
        """Tasks that this method is measured on, in stream order."""
        judged = {
            s["task"]
            for s in self.record["stages"]
            if s["label"] == label and s["step"] == "evaluate"
        }
        return [t["name"] for t in self.record["tasks"] if t["name"] in judged]

    def task(self, name: str) -> Mapping[str, Any]:
        return next(t for t in self.record["tasks"] if t["name"] == name)

    def stages(self, label: str, task: str) -> list[Mapping[str, Any]]:
        """The stages that learned `task`, in order, without `evaluate`; for a base task that the
        method leaves as it is, the backbone stage."""
        own = [
            s
            for s in self.record["stages"]
            if s["label"] == label and s["task"] == task and s["step"] != "evaluate"
        ]
        return own or [
            s
            for s in self.record["stages"]
            if s["step"] == "backbone" and self.task(task)["role"] == "base"
        ]

    def result(self, label: str, task: str) -> dict[str, Any] | None:
        found = self.artifacts.get(f"{label}/{task}/evaluate")
        return found.manifest["result"] if found else None

    def state_stage(self, label: str, task: str) -> Artifact | None:
        """The finished stage whose `task.safetensors` is what serves `task`: the one `evaluate`
        waits for."""
        judge: Mapping[str, Any] = next(
            (s for s in self.record["stages"] if s["id"] == f"{label}/{task}/evaluate"), {}
        )
        for stage in reversed(self.stages(label, task)):
            found = self.artifacts.get(stage["id"])
            if (
                found
                and stage["id"] in judge.get("parents", ())
                and "task.safetensors" in found.manifest["files"]
            ):
                return found
        return None

    # ---- files of stages -------------------------------------------------------------------------
    def read(self, artifact: Artifact | None, name: str) -> bytes | None:
        """A file of a stage; None, with a sentence among the problems, where it is absent or
        damaged."""
        if artifact is None or name not in artifact.manifest["files"]:
            return None
        try:
            return artifact.read(name)
        except (UserError, OSError) as error:
            self.add_problem(str(error))
            return None

    def add_problem(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems.append(sentence)

    def table(self, artifact: Artifact | None, name: str) -> pa.Table | None:
        data = self.read(artifact, name)
        return None if data is None else pq.read_table(io.BytesIO(data))

    def history(self, stage_id: str) -> list[Row]:
        """One row per epoch, in the columns of the stage's own history."""
        table = self.table(self.artifacts.get(stage_id), "history.parquet")
        return [] if table is None else table.to_pylist()

    def state(self, label: str, task: str) -> TaskState | None:
        data = self.read(self.state_stage(label, task), "task.safetensors")
        try:
            return (
                None
                if data is None
                else TaskState.from_bytes(data, f"task state of {label}/{task}")
            )
        except UserError as error:
            self.add_problem(str(error))
            return None

    def carried(self, label: str, task: str) -> Carried:
        """What the step that left the task's state handed on; empty where that cannot be read."""
        data = self.read(self.state_stage(label, task), "carried.safetensors")
        try:
            return (
                Carried()
                if data is None
                else Carried.from_bytes(data, f"carried state of {label}/{task}")
            )
        except UserError as error:
            self.add_problem(str(error))
            return Carried()

    # ---- numbers ---------------------------------------------------------------------------------
    def matrix(self, label: str, correct: str = "correct") -> Matrix:
        """R of one method. correct: which count of a result row; `correct_task_aware` gives the
        second matrix of scenario `class` (logits masked to the task's classes), all missing where
        `evaluate` did not write it."""
        tasks = self.tasks(label)
        size = len(tasks)
        hits, totals = np.full((size, size), np.nan), np.full((size, size), np.nan)
        source = np.where(np.tril(np.ones((size, size), bool)), "missing", "ahead").astype("U8")
        for t, after in enumerate(tasks):
            rows = [
                r
                for r in self.evaluation_rows(label, after)
                if r["task"] in tasks and r.get(correct) is not None
            ]
            for row in rows:
                i = tasks.index(row["task"])
                hits[t, i], totals[t, i], source[t, i] = row[correct], row["total"], "measured"
            if (
                rows and not (self.result(label, after) or {})["rewrites"]
            ):  # nothing can change the answers on other tasks
                for i in range(t):
                    if source[t, i] == "missing" and source[i, i] == "measured":
                        hits[t, i], totals[t, i], source[t, i] = hits[i, i], totals[i, i], "follows"
        beside = (
            {name: self.matrix(label, count) for name, count in EXTRA_COUNTS.items()}
            if self.scenario == "class" and correct == "correct"
            else {}
        )
        return Matrix(label, tuple(tasks), hits, totals, source, beside)

    def sizes(self, label: str) -> list[Row]:
        """After each finished task: bytes of everything that has to be kept, the growth ratio, and
        what the task cost.

        A chain that retrains the backbone carries a changed copy of it; that copy is counted under
        `carried`, beside the backbone that all methods share. What a base task hands to every task
        of a star stays there.
        """
        base = self.artifacts.get("backbone")
        shared = int(base.manifest.get("bytes", 0)) if base else 0
        rows, sums, carried = [], dict.fromkeys(STATE_KINDS, 0), 0
        for index, task in enumerate(self.tasks(label)):
            own = self._own_sizes(label, task)
            if own is None:
                continue
            for kind, count in own["sizes"].items():
                sums[kind] = sums.get(kind, 0) + count
            carried = own["carried"] or carried
            total = shared + sum(sums.values()) + carried
            rows.append(
                {
                    "label": label,
                    "after_index": index,
                    "after": task,
                    "role": self.task(task)["role"],
                    "backbone": shared,
                    **sums,
                    "carried": carried,
                    "total": total,
                    "growth": total / shared if shared else None,
                    "task_bytes": sum(own["sizes"].values()),
                    "trained_parameters": own["trained"],
                    "flops_share": own["flops"],
                }
            )
        return rows

    def _own_sizes(self, label: str, task: str) -> Row | None:
        serving = self.state_stage(label, task)
        if serving is None:
            return None
        manifest = serving.manifest
        if "sizes" in manifest:
            sizes = manifest["sizes"]
        else:
            state = self.state(label, task)
            sizes = state.sizes() if state else {}
        ids = [s["id"] for s in self.stages(label, task)]
        inner = {p for s in self.stages(label, task) for p in s["parents"]}
        ends = [self.artifacts[i].manifest for i in ids if i not in inner and i in self.artifacts]
        steps = [self.artifacts[i].manifest for i in ids if i in self.artifacts]
        return {
            "sizes": sizes,
            "carried": max((m.get("carried_bytes") or 0 for m in ends), default=0),
            "flops": manifest.get("flops_share"),
            "trained": max((m.get("trained_parameters") or 0 for m in steps), default=0) or None,
        }

    def summary(self) -> list[Row]:
        """One row per method: its metrics after the last complete row, its sizes, and what its
        logits say."""
        rows = []
        for label in self.labels:
            matrix, sizes = self.matrix(label), self.sizes(label)
            tasks, last = [r for r in sizes if r["role"] != "base"], (sizes or [{}])[-1]
            rows.append(
                {
                    "label": label,
                    "method": self.method(label),
                    "tasks_finished": matrix.finished,
                    "tasks": len(matrix.tasks),
                    **(matrix.final or dict.fromkeys(metrics.METRICS, math.nan)),
                    "bytes_per_task": sum(r["task_bytes"] for r in tasks) / len(tasks)
                    if tasks
                    else math.nan,
                    "carried_bytes": last.get("carried", math.nan),
                    "total_bytes": last.get("total", math.nan),
                    "growth": last.get("growth"),
                    "trained_parameters": max(
                        (r["trained_parameters"] or 0 for r in tasks), default=0
                    )
                    or None,
                    "flops_share": _mean([r["flops_share"] for r in tasks]),
                    "answers": self.logits_verdict(label),
                    "wall_s": sum(
                        a.manifest.get("wall_s") or 0
                        for i, a in self.artifacts.items()
                        if i.startswith(f"{label}/")
                    ),
                }
            )
        return rows

    def logits_rows(self, label: str) -> list[Row]:
        """Per task: how often it was measured, and whether its logits had the same sha256 each
        time. Only what was measured on one kind of device with one number of threads is compared:
        others sum in another order."""
        seen: dict[str, dict[str, list[str]]] = {}
        for after in self.tasks(label):
            for row in self.evaluation_rows(label, after):
                places = seen.setdefault(row["task"], {})
                places.setdefault(self._place(label, after), []).append(
                    row.get("logits_sha256") or ""
                )
        found = []
        for task, places in seen.items():
            again = [hashes for hashes in places.values() if len(hashes) > 1 and all(hashes)]
            found.append(
                {
                    "label": label,
                    "task": task,
                    "measured": sum(map(len, places.values())),
                    "distinct_logits": max(len(set(hashes)) for hashes in places.values()),
                    "logits_equal": all(len(set(hashes)) == 1 for hashes in again)
                    if again
                    else None,
                }
            )
        return found

    def _place(self, label: str, after: str) -> str:
        """What decides the last bits of what was measured after learning `after`."""
        artifact = self.artifacts.get(f"{label}/{after}/evaluate")
        provenance = artifact.manifest.get("provenance") or {} if artifact else {}
        return f"{provenance.get('device')} {provenance.get('threads')}"

    def evaluation_rows(self, label: str, after: str) -> list[Row]:
        """What was measured after learning `after`: the row of the matrix, or of a star the new
        task and its canary, the task before, which is measured again beside the new one."""
        result = self.result(label, after) or {"rows": []}
        return [*result["rows"], *([result["canary"]] if result.get("canary") else [])]

    def picks(self, label: str) -> list[Row]:
        """Of a method that finds out by itself what an image belongs to: after each task, for each
        task measured then, how many images it judged right, and how sure it was of right and of
        wrong ones on average. Of other methods nothing."""
        found = []
        for index, after in enumerate(self.tasks(label)):
            for row in (r for r in self.evaluation_rows(label, after) if "picks" in r):
                picks = row["picks"]
                found.append(
                    {
                        "label": label,
                        "after_index": index,
                        "after": after,
                        "task": row["task"],
                        "images": row["total"],
                        "right": picks["right"],
                        "share_right": picks["right"] / row["total"] if row["total"] else math.nan,
                        "confidence_right": picks["confidence_right"],
                        "confidence_wrong": picks["confidence_wrong"],
                    }
                )
        return found

    def pick_counts(
        self, label: str, after: str | None = None
    ) -> tuple[NDArray[np.int64], list[str], list[str]] | None:
        """Counts (task, candidate) of what images were taken for after learning `after`, by default
        the last finished task; names of both axes."""
        stages = [
            t
            for t in self.tasks(label)
            if any("picks" in r for r in self.evaluation_rows(label, t)) and after in (None, t)
        ]
        rows = (
            [r for r in self.evaluation_rows(label, stages[-1]) if "picks" in r] if stages else []
        )
        if not rows:
            return None
        return (
            np.array([r["picks"]["picked"] for r in rows]),
            [r["task"] for r in rows],
            rows[0]["picks"]["candidates"],
        )

    def logits_verdict(self, label: str) -> str:
        """`identical` or `changed` where earlier tasks were measured again, else `not measured
        again`."""
        said = [r["logits_equal"] for r in self.logits_rows(label) if r["logits_equal"] is not None]
        return "not measured again" if not said else "identical" if all(said) else "changed"

    def confusion(
        self, label: str, after: str, task: str
    ) -> tuple[NDArray[np.int64], list[str]] | None:
        """Counts (true, predicted) on `task` after learning `after`, and the class names of both
        axes."""
        table = self.table(self.artifacts.get(f"{label}/{after}/evaluate"), "predictions.parquet")
        if table is None:
            return None
        rows = table.filter(pc.equal(table["task"], task))
        if not len(rows):
            return None
        names = list(self.task(task)["classes"])
        truth, guess = rows["label"].to_numpy(), rows["prediction"].to_numpy()
        if max(truth.max(), guess.max()) >= len(
            names
        ):  # positions in the output space of all tasks learned so far
            order = self.tasks(label)
            names = [c for t in order[: order.index(after) + 1] for c in self.task(t)["classes"]]
        if max(truth.max(), guess.max()) >= len(names):
            return None
        counts = np.zeros((len(names), len(names)), np.int64)
        np.add.at(counts, (truth, guess), 1)
        return counts, names

    # ---- the run as a whole ----------------------------------------------------------------------
    def stage_rows(self) -> list[Row]:
        rows = []
        for stage in self.record["stages"]:
            manifest = (
                self.artifacts[stage["id"]].manifest if stage["id"] in self.artifacts else None
            )
            rows.append(
                {
                    "stage": stage["id"],
                    "step": stage["step"],
                    "label": stage["label"],
                    "task": stage["task"],
                    "key": stage["key"],
                    "state": "done" if manifest else "pending",
                    "wall_s": manifest.get("wall_s") if manifest else None,
                    "bytes": sum(f["bytes"] for f in manifest["files"].values())
                    if manifest
                    else None,
                    "device": (manifest.get("provenance") or {}).get("device")
                    if manifest
                    else None,
                }
            )
        return rows

    def warnings(self) -> list[Row]:
        """Sentences of the stages, equal ones once with the number of stages that said them, then
        what could not be read."""
        said: dict[str, list[str]] = {}
        for stage_id, artifact in self.artifacts.items():
            for sentence in artifact.manifest.get("warnings") or []:
                said.setdefault(str(sentence), []).append(stage_id)
        rows = [
            {"stage": stages[0], "stages": len(stages), "warning": sentence}
            for sentence, stages in said.items()
        ]
        return rows + [{"stage": "report", "stages": 1, "warning": p} for p in self.problems]

    def environment(self) -> dict[str, list[str]]:
        """What the stages ran on: each name with all values met, in order."""
        found: dict[str, list[str]] = {}
        for body in [
            self.record.get("provenance") or {},
            *(a.manifest.get("provenance") or {} for a in self.artifacts.values()),
        ]:
            flat = {
                name: body[name]
                for name in ("git_commit", "seed", "device")
                if body.get(name) is not None
            } | (body.get("packages") or {})
            for name, value in flat.items():
                if str(value) not in found.setdefault(name, []):
                    found[name].append(str(value))
        return found

    def tables(self) -> dict[str, list[Row]]:
        """All tables by name, in long format; empty ones left out."""
        matrices = [self.matrix(label) for label in self.labels]
        entries = [entry for m in matrices for entry in matrix_rows(m)]
        averages = [
            {"label": m.label, "after_index": t, "after": m.tasks[t], **m.over_time[t]}
            for m in matrices
            for t in range(m.finished)
        ]
        histories = [
            {"stage": s["id"], "label": s["label"], "task": s["task"], "step": s["step"], **row}
            for s in self.record["stages"]
            if s["step"] not in ("ingest", "evaluate", "report")
            for row in self.history(s["id"])
        ]
        found = {
            "summary": self.summary(),
            "matrix": entries,
            "averages": averages,
            "sizes": [r for lb in self.labels for r in self.sizes(lb)],
            "histories": histories,
            "logits": [r for lb in self.labels for r in self.logits_rows(lb)],
            "picks": [r for lb in self.labels for r in self.picks(lb)],
            "stages": self.stage_rows(),
            "warnings": self.warnings(),
        }
        return {name: rows for name, rows in found.items() if rows}


def matrix_rows(matrix: Matrix) -> list[Row]:
    """A matrix in long format, one row per entry; entries of tasks not learned yet only where they
    were measured."""
    return [
        {
            "label": matrix.label,
            "after_index": t,
            "after": matrix.tasks[t],
            "task_index": i,
            "task": matrix.tasks[i],
            "correct": _whole(matrix.correct[t, i]),
            "total": _whole(matrix.total[t, i]),
            "rate": float(matrix.rates[t, i]),
            "source": str(matrix.source[t, i]),
        }
        for t in range(len(matrix.tasks))
        for i in range(len(matrix.tasks))
        if matrix.source[t, i] != "ahead"
    ]


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _mean(values: list[Any]) -> float:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else math.nan
