"""Tests of reused memory: it is never reused while something refers to it."""

from __future__ import annotations

import pytest
import torch

from workers.data import arena as arenas
from workers.data import memory
from workers.data.arena import Arena
from workers.data.memory import MAX_FREE, TensorPool, split_parts


def test_arena_arrays_do_not_overlap_until_it_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena()
    for _ in range(3):
        one, other = arena.take(10), arena.take(20)
        one[:] = 1
        other[:] = 2
        assert (one.sum(), other.sum(), one.shape, other.shape) == (10, 40, (10,), (20,))
        address = one.ctypes.data
        arena.clear()
    assert arena.take(10).ctypes.data == address  # the arena keeps its grown buffer
    arena.clear()
    monkeypatch.setattr(arenas, "ARENA_BYTES", 40)
    arena.take(41)
    arena.clear()
    assert arena.take(10).ctypes.data == address


def test_pool_reuses_only_unreferenced_memory() -> None:
    pool = TensorPool()
    one = pool.empty((4, 3), torch.float32)
    other = pool.empty((4, 3), torch.float32)
    address = one.data_ptr()
    assert other.data_ptr() != address
    part = one[1:].view(-1)
    del one
    assert pool.empty((4, 3), torch.float32).data_ptr() != address  # `part` still refers to it
    del part
    assert pool.empty((2, 2), torch.float32).data_ptr() == address
    assert pool.empty((400,), torch.float32).shape == (400,)


def test_pool_does_not_reuse_memory_that_autograd_needs() -> None:
    pool = TensorPool()
    weight = torch.ones(3, requires_grad=True)
    image = pool.empty((3,), torch.float32).fill_(2.0)
    loss = (image * weight).sum()
    del image
    pool.empty((3,), torch.float32).fill_(9.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_pool_keeps_a_limited_number_of_free_buffers() -> None:
    pool = TensorPool()
    tensors = [pool.empty((8,), torch.uint8) for _ in range(3 * MAX_FREE)]
    tensors.clear()
    assert len(pool._free) == MAX_FREE


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 5), (3, 3)])
def test_split_parts_cover_all_rows_in_order(
    monkeypatch: pytest.MonkeyPatch, start: int, stop: int
) -> None:
    batch = torch.arange(7).view(7, 1, 1)
    for values in (1, 2, 100):
        monkeypatch.setattr(memory, "PART_VALUES", values)
        rows = [row for part in split_parts(batch, start, stop) for row in batch[part].flatten()]
        assert rows == list(range(start, stop))
