"""Continual-learning metrics as pure functions of one accuracy matrix; each formula has one name.

R[t, i] is the accuracy on task i after stage t, shape (T, T). It is passed as integer counts
`correct` and `total` of that shape, or as rates with `total` left at 1; all tasks then count the
same. Entries above the diagonal are tasks not learned yet; no metric reads them. Forward transfer
(GEM) is left out: a future task has no head, and no outputs in scenario `class`, so nothing can be
measured on it.

An entry is missing when `correct` is NaN, or `total` is NaN or not positive. A metric that needs a
missing entry is NaN, never a mean over fewer entries. `over_time` returns each metric after each
stage, so an unfinished run has its metrics so far. Inputs are never changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workers.errors import UserError

NAN = float("nan")


def rates(correct: ArrayLike, total: ArrayLike = 1) -> NDArray[np.float64]:
    """Return correct / total, shape (T, T), NaN where missing.

    Raise UserError when the shape is not square.
    """
    hits, counts = _counts(correct, total)
    shares = np.full(hits.shape, NAN)
    np.divide(hits, counts, out=shares, where=counts > 0)
    return shares


def average_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_i R[T-1, i], every task counts the same (macro). Also called ACC or AA."""
    r = rates(correct, total)
    if not len(r):
        return NAN
    return float(average_accuracies(r))


def micro_average_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """R[T-1, i] averaged with each task weighed by its number of test images."""
    return last_accuracy(correct, total)


def pooled_accuracies(correct: ArrayLike, total: ArrayLike = 1) -> NDArray[np.float64]:
    """acc_t, shape (T,): accuracy after stage t over the pooled test images of tasks 0..t."""
    hits, counts = _counts(correct, total)
    is_learned = np.tril(np.ones(hits.shape, bool))
    learned_hits: NDArray[np.float64] = np.where(is_learned, hits, 0).sum(1)
    learned_counts: NDArray[np.float64] = np.where(is_learned, counts, 0).sum(1)
    return learned_hits / learned_counts


def average_incremental_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_t acc_t, the first task included: iCaRL's and DyTox's "Avg"."""
    pooled = pooled_accuracies(correct, total)
    if not len(pooled):
        return NAN
    return float(pooled.mean())


def last_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """acc_{T-1}: pooled accuracy over all tasks after the last stage."""
    pooled = pooled_accuracies(correct, total)
    if not len(pooled):
        return NAN
    return float(pooled[-1])


def forgetting(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (max_{l=j..T-2} R[l, j] - R[T-1, j]); 0 for one task.

    This is the forgetting of Chaudhry et al. 2018, and the default.
    """
    r = rates(correct, total)
    if len(r) < 2:
        return _zero_if_measured(r)
    return float(forgettings(r))


def forgetting_first(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (R[j, j] - R[T-1, j]); 0 for one task. Equals -backward_transfer."""
    return _lost(rates(correct, total), lambda r, j: r[j, j])


def backward_transfer(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-1} (R[T-1, j] - R[j, j]); 0 for one task (GEM)."""
    return 0.0 - forgetting_first(correct, total)


def backward_transfer_all_pairs(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """2/(T(T-1)) sum_{i>j} (R[i, j] - R[j, j]); 0 for one task.

    It averages over every later task, not over the last one alone (continuum since May 2022).
    """
    r = rates(correct, total)
    if len(r) < 2:
        return _zero_if_measured(r)
    changes = r - np.diagonal(r)
    is_later = np.tril_indices(len(r), -1)
    return float(changes[is_later].mean())


def learning_accuracy(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """mean_j R[j, j]: accuracy on each task just after it was learned (plasticity)."""
    r = rates(correct, total)
    if not len(r):
        return NAN
    return float(learning_accuracies(r))


def forgetting_continuum_pre_2022_05(correct: ArrayLike, total: ArrayLike = 1) -> float:
    """1/(T-1) sum_{j<T-2} (max_{l=j..T-3} R[l, j] - R[T-1, j]), as `continuum` before May 2022.

    It leaves out task T-2 and the model after it, but still divides by T-1. Use it only to compare
    with the paper of DyTox.
    """
    r = rates(correct, total)
    count = len(r)
    if count == 0:
        return NAN
    if count < 3:
        return 0.0
    drops = [r[j : count - 2, j].max() - r[-1, j] for j in range(count - 2)]
    return float(sum(drops) / (count - 1))


def order_disparity(accuracies: ArrayLike) -> NDArray[np.float64]:
    """Return max - min over orders of each task's final accuracy, shape (T,).

    APD reports its max and mean as order robustness. accuracies: R[T-1] of streams of the same
    tasks in different orders, (orders, T); a column is a task, not a position in the stream.
    Raise UserError for any other shape.
    """
    r: NDArray[np.float64] = np.asarray(accuracies, np.float64)
    if r.ndim != 2 or not len(r):
        raise UserError(
            f"order_disparity: accuracies have shape {r.shape}; "
            "give a row for each order with a column for each task"
        )
    highest: NDArray[np.float64] = r.max(0)
    lowest: NDArray[np.float64] = r.min(0)
    return highest - lowest


METRIC_FUNCTIONS: tuple[Callable[..., float], ...] = (
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
METRICS = {function.__name__: function for function in METRIC_FUNCTIONS}


def all_metrics(correct: ArrayLike, total: ArrayLike = 1) -> dict[str, float]:
    """Return every metric by name."""
    return {name: metric(correct, total) for name, metric in METRICS.items()}


def over_time(correct: ArrayLike, total: ArrayLike = 1) -> list[dict[str, float]]:
    """`all_metrics` after each stage t = 0..T-1: those of the leading (t+1) x (t+1) matrix."""
    hits, counts = _counts(correct, total)
    rows = []
    for stages in range(1, len(hits) + 1):
        leading = slice(stages)
        rows.append(all_metrics(hits[leading, leading], counts[leading, leading]))
    return rows


# ---- of many matrices at once --------------------------------------------------------------------
def average_accuracies(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `average_accuracy` of each matrix of rates, (..., T, T) -> (...)."""
    means: NDArray[np.float64] = r[..., -1, :].mean(-1)
    return means


def learning_accuracies(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `learning_accuracy` of each matrix of rates, (..., T, T) -> (...)."""
    means: NDArray[np.float64] = np.diagonal(r, axis1=-2, axis2=-1).mean(-1)
    return means


def forgettings(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `forgetting` of each matrix of rates, (..., T, T) -> (...)."""
    if r.shape[-1] < 2:
        return np.zeros(r.shape[:-2])
    losses = [r[..., j:-1, j].max(-1) - r[..., -1, j] for j in range(r.shape[-1] - 1)]
    means: NDArray[np.float64] = np.stack(losses, -1).mean(-1)
    return means


def average_incremental_accuracies(
    r: NDArray[np.float64], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return `average_incremental_accuracy` of each matrix of rates, (..., T, T) -> (...).

    total (T,): test images of each task.
    """
    learned = np.tril(np.ones(r.shape[-2:]))
    hits = (np.where(learned > 0, r, 0.0) * total).sum(-1)
    pooled = hits / (learned * total).sum(-1)
    means: NDArray[np.float64] = pooled.mean(-1)
    return means


def _counts(
    correct: ArrayLike, total: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both as new float arrays (T, T), with NaN where an entry is missing in either."""
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
    return hits, counts


def _lost(r: NDArray[np.float64], best: Callable[[NDArray[np.float64], int], float]) -> float:
    """Return the mean over all tasks but the last of `best(r, task)` - final accuracy."""
    if len(r) < 2:
        return _zero_if_measured(r)
    earlier_tasks = range(len(r) - 1)
    losses = [best(r, j) - r[-1, j] for j in earlier_tasks]
    return float(np.mean(losses))


def _zero_if_measured(r: NDArray[np.float64]) -> float:
    """Return 0 for the matrix of one measured task, NaN when the matrix is empty or missing."""
    if r.size == 0 or np.isnan(r).any():
        return NAN
    return 0.0
