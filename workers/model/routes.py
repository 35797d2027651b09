"""CTR's knowledge-sharing module (see ctr_full.py), with hand-written backward passes.

Each task has capsules (N, C), one vector of C channels per token. The route of a task, relu(key
maxima + query), determines its gate and its similarity to the current task.

The autograd functions run fewer operators than the plain functions (`plain_*`), with bitwise equal
values and gradients. With `out`, an operator writes its result in the dtype or memory format that
the next operator needs. `torch.compile` gets the plain functions, because it fuses operators
itself.

Axes: B images, T tasks (the current task is the last), N tokens, C channels, R filters of each
kernel size K. Results for several kernel sizes are stacked in the order of the filters. Key filters
see the capsules of every task, query filters only those of the current task. Each of these B T + B
inputs (N, C) is a row; the rows of keys come first. In `backward`, `into_x` is the gradient with
respect to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.data.torch_internals import keep_gradient_above, ordinary_tensors

# In `squash`, |z|^2 is clamped to this minimum before the square root.
MIN_SQUARE = 1e-16


class Windows(NamedTuple):
    """Constant indices for gathering the windows of the maxima in `WindowMaxima`.

    Each attribute is flat, with an entry for each kernel size, row, filter and token of the window.

    Attributes:
        maximum: Index of the entry's maximum in the maxima (sizes, B T + B, R), flattened.
        offset: Index of the entry's token in the tokens (B, T, N), flattened, if its window starts
            at token 0. For another window, its start is added.
        part: Offset that converts the index of a token in (B, T, N) to its index in
            (sizes, B T + B, N), flattened, where each row of each kernel size has its own tokens.
    """

    maximum: Tensor
    offset: Tensor
    part: Tensor


@lru_cache(maxsize=4)
def list_windows(
    batch: int, tasks: int, tokens: int, filters: int, sizes: tuple[int, ...], device: torch.device
) -> Windows:
    """Return the indices for `filters` filters of each kernel size in `sizes`."""
    with ordinary_tensors():  # the cached tensors are also used in training
        images = torch.arange(batch * tasks, device=device)
        of_queries = images[tasks - 1 :: tasks]
        # First token of each row, (B T + B,): in (B, T, N), and in (B T + B, N).
        starts = torch.cat([images, of_queries]) * tokens
        separate_starts = torch.arange(len(starts), device=device) * tokens
        maxima = torch.arange(len(sizes) * len(starts) * filters, device=device)
        maximum, offset, part = [], [], []
        by_size = maxima.view(len(sizes), len(starts), filters, 1)
        for index, size in enumerate(sizes):
            shape = (len(starts), filters, size)
            window = starts[:, None, None] + torch.arange(size, device=device)
            shift = separate_starts - starts + index * len(starts) * tokens
            maximum.append(by_size[index].expand(shape).flatten())
            offset.append(window.expand(shape).flatten())
            part.append(shift[:, None, None].expand(shape).flatten())
        return Windows(torch.cat(maximum), torch.cat(offset), torch.cat(part))


class WindowMaxima(torch.autograd.Function):
    """See `find_maxima`."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, scoring: Sequence[Tensor], *filters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, tasks, tokens, _ = u.shape
        count = len(filters[0])
        images = batch * tasks
        rows = images + batch
        sizes = tuple(f.shape[1] for f in filters[::2])
        flat = u.flatten(0, 1)  # (B T, N, C)
        # first token of the window of each maximum
        starts = torch.empty(len(sizes), rows, count, dtype=torch.int64, device=u.device)
        for index, size in enumerate(sizes):
            key, query = (f.flatten(1) for f in scoring[2 * index : 2 * index + 2])  # (R, K C)
            windows = flat.unfold(1, size, 1).transpose(2, 3).flatten(2)  # (B T, N - K + 1, K C)
            of_queries = windows.unflatten(0, (batch, tasks))[:, -1]
            scores = u.new_empty(rows, count, windows.shape[1])
            key_scores, query_scores = scores.split([images, batch])
            torch.bmm(key.expand(images, -1, -1), windows.transpose(1, 2), out=key_scores)
            torch.bmm(query.expand(batch, -1, -1), of_queries.transpose(1, 2), out=query_scores)
            torch.max(scores, 2, out=(u.new_empty(rows, count), starts[index]))
        constants = list_windows(batch, tasks, tokens, count, sizes, u.device)
        positions = starts.flatten().index_select(0, constants.maximum).add_(constants.offset)
        winners = flat.flatten(0, 1).index_select(0, positions)  # tokens of the windows, (-1, C)
        maxima = torch.empty(starts.shape, dtype=torch.result_type(u, filters[0]), device=u.device)
        for index, won in enumerate(split_sizes(winners, sizes, rows, count)):
            products = torch.empty(won.shape, dtype=maxima.dtype, device=u.device)
            multiply_filters(won, filters[2 * index : 2 * index + 2], images, products)
            torch.sum(products, 2, out=maxima[index])
        ctx.save_for_backward(winners, positions, *filters)
        ctx.shape = u.shape
        return u, maxima[:, :images], maxima[:, images:]

    @staticmethod
    def backward(
        ctx: Any, into_u: Tensor, into_keys: Tensor, into_queries: Tensor
    ) -> tuple[Tensor | None, ...]:
        winners, positions, *filters = ctx.saved_tensors
        batch, tasks, tokens, channels = ctx.shape
        count = len(filters[0])
        images = batch * tasks
        rows = images + batch
        sizes = tuple(f.shape[1] for f in filters[::2])
        gradients = torch.cat([into_keys, into_queries], 1)[..., None]  # (sizes, rows, R, 1)
        into_filters: list[Tensor] = []
        into_winners = torch.empty_like(winners)
        by_size = split_sizes(into_winners, sizes, rows, count)
        for index, won in enumerate(split_sizes(winners, sizes, rows, count)):
            products = gradients[index] * won
            pair = filters[2 * index : 2 * index + 2]
            for part, f in zip(products.split([images, batch]), pair, strict=True):
                into_filters.append(part.sum(0).view_as(f))
            multiply_filters(gradients[index], pair, images, by_size[index])
        constants = list_windows(batch, tasks, tokens, count, sizes, winners.device)
        parts = winners.new_zeros(len(sizes) * rows * tokens, channels)
        parts.index_add_(0, positions + constants.part, into_winners)
        keys, queries = parts.view(len(sizes), rows, tokens, channels).split([images, batch], 1)
        # Sum in the order in which autograd adds gradients in `plain_maxima`, for equal rounding.
        *others, last = keys.unflatten(1, (batch, tasks)).unbind()
        total = into_u + last
        for part in reversed(others):
            total += part
        of_queries = total[:, -1]
        for part in reversed(queries.unbind()):
            of_queries += part
        return total, None, *into_filters


def split_sizes(winners: Tensor, sizes: tuple[int, ...], rows: int, filters: int) -> list[Tensor]:
    """Split the tokens at the entries of `Windows` into a view (rows, R, K C) per kernel size."""
    parts = winners.split([rows * filters * size for size in sizes])
    return [part.view(rows, filters, -1) for part in parts]


def multiply_filters(x: Tensor, pair: Sequence[Tensor], keys: int, out: Tensor) -> None:
    """Multiply the rows of keys in x by the key filters, and those of queries by the query filters.

    Args:
        x: Values (rows, R, K C) or (rows, R, 1).
        pair: Key and query filters, (R, K, C) each.
        keys: Number of rows of keys, which come first.
        out: Result (rows, R, K C).
    """
    for part, f, result in zip(
        x.split([keys, len(x) - keys]), pair, out.split([keys, len(x) - keys]), strict=True
    ):
        torch.mul(part, f.flatten(1), out=result)


def find_maxima(
    u: Tensor, filters: Sequence[Tensor], scoring: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum over tokens of the convolution of u with each filter.

    Key filters see each task, query filters only the current task. Only the window of a maximum
    gets a gradient. Therefore the maxima are located without autograd, and then only their windows
    are multiplied by the filters, with a gradient.

    Args:
        u: Capsules of all tokens (B, T, N, C).
        filters: Key and query filters of the first kernel size, then of the next, (R, K, C) each.
        scoring: The filters in the dtype of u, used to locate the maxima.

    Returns:
        u, which the caller must use from now on, because `backward` adds all gradients of u; maxima
        of keys (sizes, B T, R); maxima of queries (sizes, B, R).
    """
    if torch.compiler.is_compiling():
        return plain_maxima(u, filters, scoring)
    found: tuple[Tensor, Tensor, Tensor] = WindowMaxima.apply(u, scoring, *filters)
    return found


def plain_maxima(
    u: Tensor, filters: Sequence[Tensor], scoring: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `find_maxima`, one filter after the other."""
    pairs = [*zip(filters, scoring, strict=True)]
    queries = [find_maximum(u[:, -1], *pair) for pair in pairs[1::2]]
    keys = [find_maximum(u.flatten(0, 1), *pair) for pair in pairs[::2]]
    return u, torch.stack(keys), torch.stack(queries)


def find_maximum(u: Tensor, f: Tensor, scoring: Tensor) -> Tensor:
    """Return the maximum over tokens of filters f (R, K, C) on tokens u (b, N, C), as (b, R)."""
    batch, tokens, _ = u.shape
    count, size, channels = f.shape
    with torch.no_grad():
        windows = u.unfold(1, size, 1).transpose(2, 3).flatten(2)  # (b, N - K + 1, K C)
        scores = torch.bmm(scoring.flatten(1).expand(batch, -1, -1), windows.transpose(1, 2))
        window_starts = scores.max(2).indices  # (b, R), first token of the window of the maximum
        window_tokens = torch.arange(size, device=u.device)
        image_starts = tokens * torch.arange(batch, device=u.device)
        # (b, R, K), positions in u flattened over images and tokens
        positions = window_starts[:, :, None] + window_tokens + image_starts[:, None, None]
    winners = u.flatten(0, 1).index_select(0, positions.flatten())
    return (winners.view(batch, count, size * channels) * f.flatten(1)).sum(2)


class JoinKernels(torch.autograd.Function):
    """See `join_kernels`."""

    @staticmethod
    def forward(
        ctx: Any, maxima: Tensor, bias: Tensor, query: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        sizes, rows, filters = maxima.shape
        routes = torch.empty(rows, sizes, filters, dtype=dtype, device=maxima.device)
        by_size = routes.transpose(0, 1)
        if query is None:
            torch.add(maxima, bias[:, None], out=by_size)
        else:
            batch = len(query)
            biased = maxima + bias[:, None]
            of_images = by_size.unflatten(1, (batch, -1))  # (sizes, B, T, R)
            torch.add(biased.view(of_images.shape), query[:, None], out=of_images)
        routes.relu_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(routes)
        ctx.query = None if query is None else (query.dtype, len(query))
        ctx.dtype = maxima.dtype
        routes = routes.flatten(1)
        return routes, routes.view_as(routes)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> tuple[Tensor | None, ...]:
        (routes,) = ctx.saved_tensors
        rows, sizes, filters = routes.shape
        by_size = torch.empty(sizes, rows, filters, dtype=ctx.dtype, device=routes.device)
        by_size.copy_(first.view(routes.shape).transpose(0, 1))
        if second is not None:
            by_size += second.view(routes.shape).transpose(0, 1)
        keep_gradient_above(by_size, routes.transpose(0, 1), 0.0)
        into_query = None
        if ctx.query is not None:
            dtype, batch = ctx.query
            into_query = sum_backwards(by_size.to(dtype)).unflatten(0, (batch, -1)).sum(1)
        return by_size, by_size.sum(1), into_query, None


def sum_backwards(parts: Tensor) -> Tensor:
    """Return the sum over axis 0, added from the last entry to the first, as autograd does."""
    *others, total = parts.unbind()
    for part in reversed(others):
        total = total + part
    return total


def join_kernels(
    maxima: Tensor, bias: Tensor, dtype: torch.dtype, query: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return relu(maxima + bias + query), (rows, sizes R), as two equal tensors.

    If each is used once, `backward` gets both gradients and adds them in the dtype of the maxima.
    Autograd would add the gradients of a single result in `dtype`.

    Args:
        maxima: Maxima (sizes, rows, R), with B T or B rows.
        bias: Biases (sizes, R).
        dtype: Type of the result.
        query: Added to all rows of an image for each kernel size, (B, R). None: nothing is added.
    """
    if torch.compiler.is_compiling():
        return plain_join(maxima, bias, dtype, query)
    routes: tuple[Tensor, Tensor] = JoinKernels.apply(maxima, bias, query, dtype)
    return routes


def plain_join(
    maxima: Tensor, bias: Tensor, dtype: torch.dtype, query: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of `join_kernels`, one kernel size after the other."""
    biased = [maximum + own for maximum, own in zip(maxima.unbind(), bias.unbind(), strict=True)]
    if query is not None:
        added = query.repeat_interleave(maxima.shape[1] // query.shape[0], 0)
        biased = [maximum + added for maximum in biased]
    routes = torch.cat([maximum.relu() for maximum in biased], 1)
    return routes.to(dtype), routes.to(dtype)


class Squash(torch.autograd.Function):
    """See `squash`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        square = z.square().sum(-1, keepdim=True)
        root = square.clamp(min=MIN_SQUARE).sqrt()
        total = 1 + square
        factor = root / total
        ctx.save_for_backward(z, square, root, total, factor)
        shape = list(z.shape)
        shape[1], shape[2] = shape[2], shape[1]
        by_task = torch.empty(shape, dtype=factor.dtype, device=z.device)
        torch.mul(z, factor, out=by_task.transpose(1, 2))
        return by_task

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        z, square, root, total, factor = ctx.saved_tensors
        gradient = gradient.transpose(1, 2)
        into_factor = (gradient * z).sum(-1, keepdim=True)
        # The gradient with respect to |z|^2, times 2 because the gradient of |z|^2 is 2 z.
        twice_into_square = keep_gradient_above(into_factor / total / root, square, MIN_SQUARE)
        twice_into_square.sub_(into_factor * (factor / total), alpha=2)
        into_z: Tensor = (z * twice_into_square).to(z.dtype)
        return into_z.add_((gradient * factor).to(z.dtype))


def squash(z: Tensor) -> Tensor:
    """Return (|z|^2 / (1 + |z|^2)) z / |z|, |z| over the channels; the gradient at 0 is finite.

    Args:
        z: Capsules (B, N, T, channels).

    Returns:
        Capsules by task, (B, T, N, channels).
    """
    if torch.compiler.is_compiling():
        return plain_squash(z)
    squashed: Tensor = Squash.apply(z)
    return squashed


def plain_squash(z: Tensor) -> Tensor:
    """Return the result of `squash`."""
    square = z.square().sum(-1, keepdim=True)
    factor = square.clamp(min=MIN_SQUARE).sqrt() / (1 + square)
    return (z * factor).transpose(1, 2)


class MixCapsules(torch.autograd.Function):
    """See `mix_capsules`."""

    @staticmethod
    def forward(
        ctx: Any, similarity: Tensor, delta: Tensor, u: Tensor, dtype: torch.dtype
    ) -> Tensor:
        share = similarity * delta[:, :, None]
        ctx.save_for_backward(similarity, delta, u, share)
        return (share[:, :, None] * u).sum(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        similarity, delta, u, share = ctx.saved_tensors
        gradient = gradient.to(share.dtype)[:, None]
        into_share = (gradient * u).sum(2)
        into_u = torch.mul(gradient, share[:, :, None], out=torch.empty_like(u))
        into_similarity = torch.mul(into_share, delta[:, :, None], out=torch.empty_like(similarity))
        return into_similarity, (into_share * similarity).sum(2), into_u, None


def mix_capsules(similarity: Tensor, delta: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_t delta_t a_t .* u_t, (B, N, C).

    Args:
        similarity: Similarities a (B, T, C) of each task to the current task.
        delta: Gates (B, T).
        u: Capsules (B, T, N, C).
        dtype: Type of the result.
    """
    if torch.compiler.is_compiling():
        return plain_mix(similarity, delta, u, dtype)
    v: Tensor = MixCapsules.apply(similarity, delta, u, dtype)
    return v


def plain_mix(similarity: Tensor, delta: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result of `mix_capsules`."""
    share = similarity * delta[:, :, None]  # delta a: (B, T, C)
    return (share[:, :, None] * u).sum(1).to(dtype)
