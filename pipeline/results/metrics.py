"""Metrics of a run. Each metric is an entry of METRICS, which all tables, pages and records read.

For a stream of T tasks, R[t, i] is the accuracy on task i after stage t, the training on task t;
its shape is (T, T). It is given as counts `correct` and `total` of this shape, or as rates with the
default `total=1`, which gives all tasks the same weight. Entries above the diagonal belong to tasks
not learned yet, and no function here reads them. Forward transfer (GEM) needs R[j-1, j], which is
measured separately, in scenario `domain` with the setting `stream.measure_next`.

An entry is missing if `correct` is NaN, or `total` is NaN or not positive. A metric that needs a
missing entry is NaN, never a mean over fewer entries. `over_time` returns each metric after each
stage, so an unfinished run has its metrics so far. Inputs are not modified.

Example:
    >>> METRICS["forgetting"]([[0.9, 0.0], [0.7, 0.8]])
    0.20000000000000007

To add a metric, write its formula and add one `Metric` to `_ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workers.errors import UserError

NAN = float("nan")
Array = NDArray[np.float64]
Place = Literal[
    # This entry is not a place. It marks the metrics that are also computed as `top5_...` and
    # `task_aware_...` in the scenarios `class` and `domain` (see `tables.EXTRA_COUNTS`).
    "variants",
    "draws",  # bootstrap intervals
    "report",
    "bars",  # figure that compares the methods of a report
    "console",
    "comparison",  # comparison of runs: page and files
    "comparison_text",  # comparison of runs in the terminal
    "replicas_text",  # comparison of the methods of replicas in the terminal
    "mlflow",
    "mlflow_replicas",  # mean and standard deviation over replicas, in MLflow
    "search_tests",  # test results of the best trial of a search
]


class Accuracies(NamedTuple):
    """One or several accuracy matrices.

    Attributes:
        correct: Numbers of correct predictions (..., T, T); NaN if missing.
        total: Numbers of test images (..., T, T); NaN if missing.
        rates: `correct / total`, (..., T, T); NaN if missing.
    """

    correct: Array
    total: Array
    rates: Array

    def until(self, t: int) -> Accuracies:
        """Return the leading matrices up to stage `t`, (..., t + 1, t + 1)."""
        return Accuracies(*(values[..., : t + 1, : t + 1] for values in self))


@dataclass(frozen=True)
class Metric:
    r"""A metric of a method in a run, with everything that other modules need to show it.

    Attributes:
        name: Name in tables, files, MLflow and Python.
        meaning: Explanation on the pages and in the documentation, as a phrase.
        unit: `rate`, `bytes`, `times` or `count`, see `report.html_parts.format_value`.
        better: The function `max` or `min`, which returns the best of several values. None: no
            value is better than another.
        shown_in: Places that show the metric.
        function: Formula, (..., T, T) -> (...). None for a metric that is not computed from the
            accuracy matrix but is a column of `RunTables.summary`.
        formula: Formula as text, for the documentation.
        also_called: Names of the same formula in papers and libraries.
        heading: Heading of the column in the report; empty: `title`. "\n" breaks the line.
        plain_heading: Heading in plain text; empty: `title`.
    """

    name: str
    meaning: str
    unit: str
    better: Callable[..., float] | None
    shown_in: tuple[Place, ...]
    function: Callable[[Accuracies], Array] | None = None
    formula: str = ""
    also_called: str = ""
    heading: str = ""
    plain_heading: str = ""

    @property
    def title(self) -> str:
        """The name in words, such as `bytes per task`."""
        return self.name.replace("_", " ")

    def __call__(self, correct: ArrayLike, total: ArrayLike = 1) -> float:
        """Compute the metric of one accuracy matrix. See `measure` for the arguments."""
        return self._value(measure(correct, total))

    def _value(self, accuracies: Accuracies) -> float:
        if self.function is None:
            raise TypeError(f"{self.name} is not a function of an accuracy matrix")
        return float(self.function(accuracies)) if accuracies.rates.size else NAN


def measure(correct: ArrayLike, total: ArrayLike = 1) -> Accuracies:
    """Build one accuracy matrix, in which missing entries are NaN.

    Args:
        correct: Numbers of correct predictions (T, T), or rates if `total` is 1.
        total: Numbers of test images, in any shape that broadcasts to (T, T).

    Raises:
        UserError: If the matrix is not square or the shapes do not fit.
    """
    hits = np.array(correct, float)
    if hits.size == 0:
        hits = hits.reshape(0, 0)
    if hits.ndim != 2 or hits.shape[0] != hits.shape[1]:
        raise UserError(
            f"an accuracy matrix has shape {hits.shape}; "
            "it must be square, stages x tasks, NaN where not measured"
        )
    try:
        counts = np.array(np.broadcast_to(np.asarray(total, float), hits.shape))
    except ValueError:
        raise UserError(
            f"`total` has shape {np.shape(total)}, `correct` has {hits.shape}; "
            "give both for the same entries"
        ) from None
    missing = np.isnan(hits) | ~(counts > 0)
    hits[missing] = NAN
    counts[missing] = NAN
    rates = np.full(hits.shape, NAN)
    np.divide(hits, counts, out=rates, where=counts > 0)
    return Accuracies(hits, counts, rates)


# ---- formulas, (..., T, T) -> (...) --------------------------------------------------------------
def average_accuracy(a: Accuracies) -> Array:
    """Compute mean_i R[T-1, i]; every task has the same weight (macro average)."""
    means: Array = a.rates[..., -1, :].mean(-1)
    return means


def pooled_accuracies(a: Accuracies) -> Array:
    """Compute acc_t, (..., T): accuracy after stage t on the test images of tasks 0..t together."""
    is_learned = np.tril(np.ones(a.rates.shape[-2:], bool))
    hits: Array = np.where(is_learned, a.correct, 0).sum(-1)
    counts: Array = np.where(is_learned, a.total, 0).sum(-1)
    return hits / counts


def average_incremental_accuracy(a: Accuracies) -> Array:
    """Compute mean_t acc_t, including the first task."""
    means: Array = pooled_accuracies(a).mean(-1)
    return means


def last_accuracy(a: Accuracies) -> Array:
    """Compute acc_{T-1}: each task is weighted by its number of test images (micro average)."""
    return pooled_accuracies(a)[..., -1]


def forgetting(a: Accuracies) -> Array:
    """Compute 1/(T-1) sum_{j<T-1} (max_{l=j..T-2} R[l, j] - R[T-1, j]); 0 for one task."""
    r = a.rates
    if r.shape[-1] < 2:
        return _zero_if_measured(r)
    losses = [r[..., j:-1, j].max(-1) - r[..., -1, j] for j in range(r.shape[-1] - 1)]
    means: Array = np.stack(losses, -1).mean(-1)
    return means


def forgetting_first(a: Accuracies) -> Array:
    """Compute 1/(T-1) sum_{j<T-1} (R[j, j] - R[T-1, j]); 0 for one task."""
    r = a.rates
    if r.shape[-1] < 2:
        return _zero_if_measured(r)
    losses = _diagonal(r) - r[..., -1, :]
    means: Array = losses[..., :-1].mean(-1)
    return means


def backward_transfer(a: Accuracies) -> Array:
    """Compute 1/(T-1) sum_{j<T-1} (R[T-1, j] - R[j, j]); 0 for one task."""
    return 0.0 - forgetting_first(a)


def backward_transfer_all_pairs(a: Accuracies) -> Array:
    """Compute 2/(T(T-1)) sum_{i>j} (R[i, j] - R[j, j]); 0 for one task.

    This metric averages over all later stages; `backward_transfer` uses only the last stage.
    """
    r = a.rates
    if r.shape[-1] < 2:
        return _zero_if_measured(r)
    later, earlier = np.tril_indices(r.shape[-1], -1)
    changes = r - _diagonal(r)[..., None, :]
    means: Array = changes[..., later, earlier].mean(-1)
    return means


def learning_accuracy(a: Accuracies) -> Array:
    """Compute mean_j R[j, j] (plasticity)."""
    means: Array = _diagonal(a.rates).mean(-1)
    return means


def lower_triangle_accuracy(a: Accuracies) -> Array:
    """Compute 2/(T(T+1)) sum_{i>=j} R[i, j]."""
    later, earlier = np.tril_indices(a.rates.shape[-1])
    means: Array = a.rates[..., later, earlier].mean(-1)
    return means


def average_over_time(a: Accuracies) -> Array:
    """Compute mean_t mean_{i<=t} R[t, i]: the area under the curve of average accuracy."""
    count = a.rates.shape[-1]
    is_learned = np.tril(np.ones((count, count), bool))
    sums: Array = np.where(is_learned, a.rates, 0).sum(-1)
    means: Array = (sums / np.arange(1, count + 1)).mean(-1)
    return means


def positive_backward_transfer(a: Accuracies) -> Array:
    """Compute max(BWT, 0), with the BWT of all pairs."""
    return np.maximum(backward_transfer_all_pairs(a), 0)


def remembering(a: Accuracies) -> Array:
    """Compute 1 - |min(BWT, 0)|, with the BWT of all pairs."""
    return 1 + np.minimum(backward_transfer_all_pairs(a), 0)


def forgetting_continuum_pre_2022_05(a: Accuracies) -> Array:
    """Compute 1/(T-1) sum_{j<T-2} (max_{l=j..T-3} R[l, j] - R[T-1, j]); 0 for T < 3.

    The library continuum used this formula before May 2022. It ignores task T-2 and stage T-2, but
    still divides by T-1. Use it only to compare with the paper of DyTox.
    """
    r = a.rates
    count = r.shape[-1]
    if count < 3:
        return np.zeros(r.shape[:-2])
    drops = [r[..., j : count - 2, j].max(-1) - r[..., -1, j] for j in range(count - 2)]
    means: Array = sum(drops[1:], drops[0]) / (count - 1)
    return means


def _diagonal(r: Array) -> Array:
    diagonals: Array = np.diagonal(r, axis1=-2, axis2=-1)
    return diagonals


def _zero_if_measured(r: Array) -> Array:
    """Return 0 for matrices of one measured task; NaN if the task is missing."""
    return np.where(np.isnan(r[..., 0, 0]), NAN, 0.0)


# ---- the registry --------------------------------------------------------------------------------
# places of the two headline metrics, average accuracy and forgetting
_HEADLINE: tuple[Place, ...] = (
    "draws",
    "report",
    "bars",
    "console",
    "comparison",
    "comparison_text",
    "replicas_text",
    "mlflow",
    "mlflow_replicas",
    "search_tests",
)
_ENTRIES = (
    Metric(
        "average_accuracy",
        "mean accuracy over the tasks, after the last one",
        "rate",
        max,
        ("variants", *_HEADLINE),
        average_accuracy,
        "mean over i of R[T-1, i], every task counts the same",
        "ACC, AA",
        heading="average\naccuracy",
    ),
    Metric(
        "chance",
        "mean accuracy of guessing over the same tasks",
        "rate",
        None,
        ("report", "console"),
    ),
    Metric(
        "micro_average_accuracy",
        "accuracy on the test images of all tasks together, after the last task",
        "rate",
        max,
        ("mlflow",),
        last_accuracy,
        "`average_accuracy`, with each task weighted by its number of test images",
    ),
    Metric(
        "last_accuracy",
        "accuracy on the test images of all tasks together, after the last task",
        "rate",
        max,
        ("variants", "report", "mlflow"),
        last_accuracy,
        "accuracy over the pooled test images of all tasks after the last stage; equals "
        "`micro_average_accuracy`",
        '"Last" of CIL papers',
        heading="last\naccuracy",
    ),
    Metric(
        "average_incremental_accuracy",
        "accuracy on all test images so far, averaged over the tasks of the stream",
        "rate",
        max,
        (
            "variants",
            "draws",
            "report",
            "bars",
            "comparison",
            "replicas_text",
            "mlflow",
            "mlflow_replicas",
        ),
        average_incremental_accuracy,
        "mean over t of the pooled accuracy on tasks 0 to t after stage t, the first task included",
        '"Avg" of iCaRL, DyTox, PILOT',
        heading="average\nincremental",
    ),
    Metric(
        "top5_last_accuracy",
        "last accuracy when the right class is among the five best",
        "rate",
        max,
        ("report",),
        heading="top-5\nlast",
    ),
    Metric(
        "task_aware_average_accuracy",
        "mean accuracy over all tasks when the model chooses among the task's own outputs",
        "rate",
        max,
        ("report",),
        heading="average,\ntask given",
    ),
    Metric(
        "forgetting",
        "mean drop of accuracy on earlier tasks from their best to the end",
        "rate",
        min,
        _HEADLINE,
        forgetting,
        "1/(T-1) sum over j < T-1 of (max over l = j..T-2 of R[l, j]) - R[T-1, j]",
        "FM of Chaudhry et al. 2018",
    ),
    Metric(
        "forgetting_first",
        "mean drop of accuracy on earlier tasks from when they were learned to the end",
        "rate",
        min,
        (),
        forgetting_first,
        "1/(T-1) sum over j < T-1 of R[j, j] - R[T-1, j]",
    ),
    Metric(
        "backward_transfer",
        "mean change of accuracy on earlier tasks from when they were learned to the end",
        "rate",
        max,
        ("mlflow",),
        backward_transfer,
        "minus `forgetting_first`",
        "BWT of GEM (Lopez-Paz and Ranzato 2017)",
    ),
    Metric(
        "backward_transfer_all_pairs",
        "mean change of accuracy on earlier tasks, over all pairs of an earlier and a later task",
        "rate",
        max,
        (),
        backward_transfer_all_pairs,
        "2/(T(T-1)) sum over i > j of R[i, j] - R[j, j]",
        "BWT of Díaz-Rodríguez et al. 2018, and of continuum since May 2022",
    ),
    Metric(
        "learning_accuracy",
        "mean accuracy on each task just after it was learned",
        "rate",
        max,
        ("draws", "comparison", "mlflow"),
        learning_accuracy,
        "mean over j of R[j, j], each task just after it was learned",
        "plasticity",
    ),
    Metric(
        "lower_triangle_accuracy",
        "mean accuracy on the tasks so far, over all pairs of a stage and a task",
        "rate",
        max,
        (),
        lower_triangle_accuracy,
        "2/(T(T+1)) sum over i >= j of R[i, j]",
        "A of Díaz-Rodríguez et al. 2018, accuracy of continuum",
    ),
    Metric(
        "average_over_time",
        "average accuracy over the tasks so far, averaged over the stages",
        "rate",
        max,
        (),
        average_over_time,
        "mean over t of (mean over i <= t of R[t, i]), every task counts the same",
        "area under the curve of average accuracy; AIA where it is not pooled",
    ),
    Metric(
        "positive_backward_transfer",
        "backward transfer over all pairs, or 0 if it is negative",
        "rate",
        max,
        (),
        positive_backward_transfer,
        "max(`backward_transfer_all_pairs`, 0)",
        "BWT+ of Díaz-Rodríguez et al. 2018, positive_backward_transfer of continuum",
    ),
    Metric(
        "remembering",
        "1 minus the loss of accuracy over all pairs of an earlier and a later task",
        "rate",
        max,
        (),
        remembering,
        "1 - abs(min(`backward_transfer_all_pairs`, 0))",
        "REM of Díaz-Rodríguez et al. 2018, remembering of continuum",
    ),
    Metric(
        "balanced_accuracy",
        "mean over all classes of the accuracy on the images of a class, after the last task",
        "rate",
        max,
        ("report",),
        formula="mean over the classes of all tasks of correct / total of the images of a class, "
        "after the last stage",
        also_called="macro recall",
        heading="balanced\naccuracy",
    ),
    Metric(
        "intransigence",
        "accuracy of joint training on each task when it is learned, minus that of the method",
        "rate",
        min,
        ("report",),
        formula="mean over j of J[j, j] - R[j, j], where J is the matrix of the method `joint` of "
        "the same run",
        also_called="intransigence of Chaudhry et al. 2018",
        heading="intransigence",
    ),
    Metric(
        "next_task_accuracy",
        "mean accuracy on each task just before it is learned",
        "rate",
        max,
        ("report",),
        formula="mean over j >= 1 of R[j-1, j], in scenario `domain` with `stream.measure_next`",
        heading="next\ntask accuracy",
    ),
    Metric(
        "forward_transfer",
        "mean accuracy on each task just before it is learned, minus that of guessing",
        "rate",
        max,
        ("report",),
        formula="mean over j >= 1 of R[j-1, j] - 1 / number of classes",
        also_called="FWT of GEM (Lopez-Paz and Ranzato 2017), which subtracts the accuracy of an "
        "untrained network",
        heading="forward\ntransfer",
    ),
    Metric(
        "forgetting_continuum_pre_2022_05",
        "forgetting by the formula of continuum before May 2022",
        "rate",
        min,
        (),
        forgetting_continuum_pre_2022_05,
        "1/(T-1) sum over j < T-2 of (max over l = j..T-3 of R[l, j]) - R[T-1, j]",
        "the figure in DyTox's paper",
    ),
    Metric(
        "bytes_per_task",
        "masks, tokens, head and copies of one task, on average",
        "bytes",
        None,
        (
            "report",
            "console",
            "comparison",
            "comparison_text",
            "replicas_text",
            "search_tests",
        ),
        heading="bytes\nper task",
    ),
    Metric(
        "carried_bytes",
        "state that the last task would carry to a next one",
        "bytes",
        None,
        ("report",),
        heading="carried\nbytes",
    ),
    Metric(
        "total_bytes",
        "all bytes stored at the end, with the backbone",
        "bytes",
        min,
        ("comparison",),
    ),
    Metric(
        "growth",
        "all stored bytes divided by those of the backbone",
        "times",
        min,
        ("report", "console", "comparison"),
        plain_heading="all bytes / backbone",
    ),
    Metric(
        "trained_parameters",
        "parameters that the optimizer trains for one task, at most",
        "count",
        None,
        ("report", "console", "comparison"),
        heading="trained\nparameters",
    ),
    Metric(
        "flops_share",
        "FLOPs of one image with masks applied, relative to the plain backbone",
        "rate",
        None,
        ("report",),
        heading="FLOPs per\nimage",
    ),
)
METRICS = {metric.name: metric for metric in _ENTRIES}


def metrics_for(place: Place) -> list[Metric]:
    """Return the metrics shown in a place, in the order of METRICS."""
    return [metric for metric in METRICS.values() if place in metric.shown_in]


def matrix_metrics() -> list[Metric]:
    """Return the metrics that are functions of an accuracy matrix."""
    return [metric for metric in METRICS.values() if metric.function is not None]


def all_metrics(correct: ArrayLike, total: ArrayLike = 1) -> dict[str, float]:
    """Compute all metrics of one accuracy matrix, as name -> value. See `measure`."""
    return _all_values(measure(correct, total))


def over_time(correct: ArrayLike, total: ArrayLike = 1) -> list[dict[str, float]]:
    """Compute `all_metrics` after each stage t, from the leading (t + 1) x (t + 1) matrix."""
    accuracies = measure(correct, total)
    return [_all_values(accuracies.until(t)) for t in range(len(accuracies.rates))]


def _all_values(accuracies: Accuracies) -> dict[str, float]:
    return {metric.name: metric._value(accuracies) for metric in matrix_metrics()}


def order_disparity(accuracies: ArrayLike) -> Array:
    """Compute the range (max - min) of each task's final accuracy over several task orders.

    APD (Yoon et al. 2020) reports the maximum and the mean of this range as order robustness.

    Args:
        accuracies: R[T-1] of streams of the same tasks in different orders, (orders, T). A column
            is a task, not a position in the stream.

    Returns:
        One value per task, (T,).

    Raises:
        UserError: If the array does not have two dimensions, or has no rows.
    """
    r: Array = np.asarray(accuracies, np.float64)
    if r.ndim != 2 or not len(r):
        raise UserError(
            f"order_disparity: accuracies have shape {r.shape}; "
            "give a row for each order with a column for each task"
        )
    highest: Array = r.max(0)
    lowest: Array = r.min(0)
    return highest - lowest
