"""The field's metrics as pure functions of one accuracy matrix; each formula has one name.

R[t, i] is the accuracy on task i after stage t, T x T, given as integer counts `correct` and
`total` of the same shape (or as rates, with `total` left at 1: all tasks then count the same).
Entries above the diagonal are tasks not seen yet, and no metric looks at them. Forward transfer
(GEM) is left out: a task that is still to come has no head of its own, and in scenario `class` no
outputs, so that there is nothing that could be measured on it.

Missing entries (`correct` is NaN, or `total` is NaN or not positive) follow one rule: a metric that
needs a missing entry is NaN, never a mean over fewer entries. `over_time` gives each metric after
each stage, so that a run of which only the first rows exist still has its numbers so far. Inputs
are never changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workers.errors import UserError

NAN = float("nan")


def rates(correct: ArrayLike, total: ArrayLike = 1) -> NDArray[np.float64]:
    """correct / total, shape (T, T), NaN where missing. Raises UserError where the shape is not
    square."""
    hits, counts = _counts(correct, total)
    return np.divide(hits, counts, out=np.full(hits.shape, NAN), where=counts > 0)


def average_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_i R[T-1, i], every task counts the same (macro). Also called ACC or AA."""
    r = rates(correct, total)
    return float(r[-1].mean()) if len(r) else NAN


def micro_average_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """R[T-1, i] averaged with each task weighed by its number of test images."""
    return last_accuracy(correct, total)


def pooled_accuracies(correct: ArrayLike, total: ArrayLike = 1) -> NDArray[np.float64]:
    """acc_t, shape (T,): accuracy after stage t over the pooled test images of tasks 0..t."""
    hits, counts = _counts(correct, total)
    seen = np.tril(np.ones(hits.shape, bool))
    return np.where(seen, hits, 0).sum(1) / np.where(seen, counts, 0).sum(1)


def average_incremental_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_t acc_t, the first task included: iCaRL's and DyTox's "Avg"."""
    pooled = pooled_accuracies(correct, total)
    return float(pooled.mean()) if len(pooled) else NAN


def last_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """acc_{T-1}: pooled accuracy over all tasks after the last stage."""
    pooled = pooled_accuracies(correct, total)
    return float(pooled[-1]) if len(pooled) else NAN


def forgetting(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (max_{l=j..T-2} R[l, j] - R[T-1, j]); 0 for one task (Chaudhry et al.
    2018, the default)."""
    return _lost(rates(correct, total), lambda r, j: r[j:-1, j].max())


def forgetting_first(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (R[j, j] - R[T-1, j]); 0 for one task. Equals minus
    `backward_transfer`."""
    return _lost(rates(correct, total), lambda r, j: r[j, j])


def backward_transfer(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (R[T-1, j] - R[j, j]); 0 for one task (GEM)."""
    return 0.0 - forgetting_first(correct, total)


def backward_transfer_all_pairs(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """2/(T(T-1)) sum_{i>j} (R[i, j] - R[j, j]); 0 for one task: after every later task, not after
    the last one alone (continuum since May 2022)."""
    r = rates(correct, total)
    if len(r) < 2:
        return 0.0 if r.size and not np.isnan(r).any() else NAN
    return float((r - np.diagonal(r))[np.tril_indices(len(r), -1)].mean())


def learning_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_j R[j, j]: how well each task was learned when it was new (plasticity)."""
    r = rates(correct, total)
    return float(np.diagonal(r).mean()) if len(r) else NAN


def forgetting_continuum_pre_2022_05(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-2} (max_{l=j..T-3} R[l, j] - R[T-1, j]): what `continuum` computed before
    May 2022.

    It leaves out task T-2 and the model after it while still dividing by T-1; only for comparing
    with DyTox's paper.
    """
    r = rates(correct, total)
    count = len(r)
    if count < 3:
        return 0.0 if count else NAN
    return float(sum(r[j : count - 2, j].max() - r[-1, j] for j in range(count - 2)) / (count - 1))


def order_disparity(accuracies: ArrayLike) -> NDArray[np.float64]:
    """max - min over orders of what each task ends with, shape (T,): APD's order robustness, of
    which max and mean are reported. accuracies: R[T-1] of streams of the same tasks in different
    orders, (orders, T), columns by task and not by place."""
    r = np.asarray(accuracies, float)
    if r.ndim != 2 or not len(r):
        raise UserError(
            f"order_disparity: accuracies have shape {r.shape}; give a row for each order with "
            "a column for each task"
        )
    return r.max(0) - r.min(0)


METRICS: dict[str, Callable[..., float]] = {
    f.__name__: f
    for f in (
        average_accuracy,
        micro_average_accuracy,
        average_incremental_accuracy,
        last_accuracy,
        forgetting,
        forgetting_first,
        backward_transfer,
        backward_transfer_all_pairs,
        learning_accuracy,
        forgetting_continuum_pre_2022_05,
    )
}


def all_metrics(correct: ArrayLike, total: ArrayLike = 1) -> dict[str, float]:
    """Every metric by name."""
    return {name: metric(correct, total) for name, metric in METRICS.items()}


def over_time(correct: ArrayLike, total: ArrayLike = 1) -> list[dict[str, float]]:
    """`all_metrics` after each stage t = 0..T-1: those of the leading (t+1) x (t+1) matrix."""
    hits, counts = _counts(correct, total)
    return [all_metrics(hits[:n, :n], counts[:n, :n]) for n in range(1, len(hits) + 1)]


def _counts(
    correct: ArrayLike, total: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both as new float arrays (T, T), NaN where either says that the entry is missing."""
    hits = np.array(correct, float)
    if hits.size == 0:
        hits = hits.reshape(0, 0)
    if hits.ndim != 2 or hits.shape[0] != hits.shape[1]:
        raise UserError(
            f"an accuracy matrix has shape {hits.shape}; it must be square, stages x tasks, NaN "
            "where not measured"
        )
    try:
        counts = np.array(np.broadcast_to(np.asarray(total, float), hits.shape))
    except ValueError:
        raise UserError(
            f"`total` has shape {np.shape(total)}, `correct` has {hits.shape}; give both for "
            "the same entries"
        ) from None
    missing = np.isnan(hits) | ~(counts > 0)
    hits[missing] = counts[missing] = NAN
    return hits, counts


def _lost(r: NDArray[np.float64], best: Callable[[NDArray[np.float64], int], float]) -> float:
    """Mean over all tasks but the last of (what it once had - what it has at the end)."""
    if len(r) < 2:
        return 0.0 if r.size and not np.isnan(r).any() else NAN
    return float(np.mean([best(r, j) - r[-1, j] for j in range(len(r) - 1)]))
