"""CTR's knowledge-sharing module in few operators: functions with a gradient that is written out.

Values and gradients have the bits of the plain expressions (`plain_*`). An operator with `out`
writes its result in the dtype or the memory format that the next operator needs. In compiled code
the plain expressions are used: compilers join operators by themselves.

Axes: B images, T tasks (the current task is the last), N tokens, C channels, R filters of each
kernel size K. Results for several kernel sizes are stacked in the order of the filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.data.torch_internals import keep_gradient_above

# Smallest |z|^2 with a gradient of |z| in `squash`.
MIN_SQUARE = 1e-16


class Windows(NamedTuple):
    """Indices of the tokens in the windows of all maxima, for `find_maxima`.

    The rows (kernel size, B T keys and B queries, R, token of the window) are flattened.

    Attributes:
        maximum: Index of the row's maximum, in all maxima flattened.
        offset: The row's token, for a window that starts at token 0; in all tokens flattened.
        part: Added to the row's token, this is an index into tokens that are separate for the keys
            and the queries of each kernel size.
    """

    maximum: Tensor
    offset: Tensor
    part: Tensor


@lru_cache(maxsize=4)
def list_windows(
    batch: int, tasks: int, tokens: int, filters: int, sizes: tuple[int, ...], device: torch.device
) -> Windows:
    """Return the constant indices for `find_maxima`."""
    with torch.inference_mode(False):  # the cached tensors are also used in training
        images = torch.arange(batch * tasks, device=device)
        of_queries = images[tasks - 1 :: tasks]
        starts = torch.cat([images, of_queries]) * tokens  # first token of the image of each row
        # The tokens of the keys of a kernel size are followed by those of its queries.
        places = torch.arange(len(starts), device=device) * tokens
        maxima = torch.arange(len(sizes) * len(starts) * filters, device=device)
        maximum, offset, part = [], [], []
        by_size = maxima.view(len(sizes), len(starts), filters, 1)
        for index, size in enumerate(sizes):
            shape = (len(starts), filters, size)
            own = starts[:, None, None] + torch.arange(size, device=device)
            moved = places - starts + index * len(starts) * tokens
            maximum.append(by_size[index].expand(shape).flatten())
            offset.append(own.expand(shape).flatten())
            part.append(moved[:, None, None].expand(shape).flatten())
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
        starts = torch.empty(len(sizes), rows, count, dtype=torch.int64, device=u.device)
        for index, size in enumerate(sizes):
            key, query = (f.flatten(1) for f in scoring[2 * index : 2 * index + 2])  # (R, K C)
            windows = flat.unfold(1, size, 1).transpose(2, 3).flatten(2)  # (B T, N - K + 1, K C)
            of_queries = windows.unflatten(0, (batch, tasks))[:, -1]
            scores = u.new_empty(rows, count, windows.shape[1])
            into_keys, into_queries = scores.split([images, batch])
            torch.bmm(key.expand(images, -1, -1), windows.transpose(1, 2), out=into_keys)
            torch.bmm(query.expand(batch, -1, -1), of_queries.transpose(1, 2), out=into_queries)
            torch.max(scores, 2, out=(u.new_empty(rows, count), starts[index]))
        constants = list_windows(batch, tasks, tokens, count, sizes, u.device)
        positions = starts.flatten().index_select(0, constants.maximum).add_(constants.offset)
        winners = flat.flatten(0, 1).index_select(0, positions)
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
        *others, last = keys.unflatten(1, (batch, tasks)).unbind()
        total = into_u + last
        for part in reversed(others):
            total += part
        of_queries = total[:, -1]
        for part in reversed(queries.unbind()):
            of_queries += part
        return total, None, *into_filters


def split_sizes(winners: Tensor, sizes: tuple[int, ...], rows: int, filters: int) -> list[Tensor]:
    """Split rows of `Windows` into a view (rows, R, K C) for each kernel size."""
    parts = winners.split([rows * filters * size for size in sizes])
    return [part.view(rows, filters, -1) for part in parts]


def multiply_filters(x: Tensor, pair: Sequence[Tensor], keys: int, out: Tensor) -> None:
    """Multiply the first rows of x by the key filters, and the others by the query filters.

    Args:
        x: Values (rows, R, K C) or (rows, R, 1).
        pair: Key and query filters, (R, K, C) each.
        keys: Number of rows of keys.
        out: Result (rows, R, K C).
    """
    for part, f, into in zip(
        x.split([keys, len(x) - keys]), pair, out.split([keys, len(x) - keys]), strict=True
    ):
        torch.mul(part, f.flatten(1), out=into)


def find_maxima(
    u: Tensor, filters: Sequence[Tensor], scoring: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the maximum over tokens of each filter: key filters on all tasks, query filters on one.

    The query filters see the current task. Only the window of a maximum has a gradient. Therefore
    the maxima are found without a gradient, and their windows are multiplied again with one.

    Args:
        u: Tokens (B, T, N, C).
        filters: Key and query filters of the first kernel size, then of the next, (R, K, C) each.
        scoring: The filters in the dtype of u, in which the maxima are found.

    Returns:
        u, through which all gradients of u must flow; maxima of keys (sizes, B T, R), and of
        queries (sizes, B, R).
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
        window_starts = scores.max(2).indices  # (b, R), a token of the image
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
    """Return the sum over the first axis, from the last to the first, with each sum rounded."""
    *others, total = parts.unbind()
    for part in reversed(others):
        total = total + part
    return total


def join_kernels(
    maxima: Tensor, bias: Tensor, dtype: torch.dtype, query: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return relu(maxima + bias + query) (rows, sizes R), twice, for two uses.

    Two results instead of one keep their gradients apart, which are then added in the dtype of the
    maxima.

    Args:
        maxima: Maxima (sizes, rows, R).
        bias: Biases (sizes, R).
        dtype: Type of the result.
        query: Added to the rows of each image, (B, R). None: nothing is added.
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
        # twice the gradient of |z|^2
        slope = keep_gradient_above(into_factor / total / root, square, MIN_SQUARE)
        slope.sub_(into_factor * (factor / total), alpha=2)
        into_z: Tensor = (z * slope).to(z.dtype)
        return into_z.add_((gradient * factor).to(z.dtype))


def squash(z: Tensor) -> Tensor:
    """Return (|z|^2 / (1 + |z|^2)) z / |z| over the channels; at 0 the gradient is finite.

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
    """Return the sum over tasks of delta a .* u, (B, N, C).

    Args:
        similarity: a (B, T, C).
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
