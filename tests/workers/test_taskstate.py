"""Tests of stored states: exact round trips, and the refusal of other data."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from workers.errors import UserError
from workers.storage.taskstate import (
    KINDS,
    Carried,
    TaskState,
    check_values,
    pack_mask,
    unpack_mask,
)

SHAPES = [(), (1,), (7,), (8,), (9,), (3, 5), (2, 3, 4), (0,), (64, 33)]


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.4


def state() -> TaskState:
    return TaskState(
        "birds",
        ("owl", "käuzchen", "1"),
        "meat",
        "d" * 64,
        masks={"tokens": mask(2, 5), "blocks.0.fc1": mask(7, 3)},
        tokens={"prompt": torch.randn(2, 4)},
        head={"weight": torch.randn(3, 4), "bias": torch.zeros(3)},
        copies={
            "norm": torch.randn(4).half(),
            "count": torch.tensor([3, 4]),
            "scalar": torch.tensor(2.5),
        },
        meta={"blocks": [0, 2], "settings": {"lambda": 0.9, "none": None}},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_any_shape_survive_packing(shape: tuple[int, ...]) -> None:
    bits = pack_mask(mask(*shape))
    assert bits.dtype == torch.uint8
    assert bits.shape == (-(-int(np.prod(shape)) // 8),)
    assert torch.equal(unpack_mask(bits, shape), mask(*shape))


def test_bit_order_is_that_of_numpy_packbits() -> None:
    assert pack_mask(
        torch.tensor([True, False, False, False, False, False, False, False, True])
    ).tolist() == [128, 128]


def test_state_round_trip_keeps_every_dtype_and_shape() -> None:
    one = state()
    two = TaskState.from_bytes(one.to_bytes())
    assert (two.task, two.classes, two.method, two.backbone_digest, two.meta) == (
        one.task,
        one.classes,
        one.method,
        one.backbone_digest,
        one.meta,
    )
    for kind in KINDS:
        a, b = getattr(one, kind), getattr(two, kind)
        assert a.keys() == b.keys()
        assert all(
            a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n])
            for n in a
        )
    assert two.to_bytes() == one.to_bytes()


def test_state_bytes_ignore_insertion_order() -> None:
    one, two = state(), state()
    two.tokens = one.tokens
    two.head, two.copies, two.masks, two.meta = (
        dict(reversed(d.items())) for d in (one.head, one.copies, one.masks, one.meta)
    )
    assert one.to_bytes() == two.to_bytes()


def test_views_and_strided_tensors_are_stored_by_value() -> None:
    one = state()
    one.copies = {
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "row": torch.arange(12.0).reshape(3, 4)[1],
        "expanded": torch.ones(1).expand(5),
        "trained": torch.nn.Parameter(torch.arange(12.0)),
    }
    two = TaskState.from_bytes(one.to_bytes())
    assert all(torch.equal(two.copies[n], t) for n, t in one.copies.items())
    assert one.sizes()["copies"] == two.sizes()["copies"] == 4 * (12 + 4 + 5 + 12)


def test_sizes_are_bytes_by_kind_with_masks_as_bits() -> None:
    assert state().sizes() == {"masks": 2 + 3, "tokens": 32, "head": 60, "copies": 8 + 16 + 4}
    assert TaskState("t", ("a",), "linear", "d").sizes() == dict.fromkeys(KINDS, 0)


def test_carried_state_survives_a_round_trip() -> None:
    one = Carried(
        {"w": torch.randn(3, 2), "seen": torch.tensor([True, False])},
        {"memory": [["key", 1, "task", 0]], "count": 3},
    )
    two = Carried.from_bytes(one.to_bytes())
    assert two.meta == one.meta
    assert all(torch.equal(one.tensors[n], two.tensors[n]) for n in one.tensors)
    assert Carried.from_bytes(Carried().to_bytes()) == Carried()


class Bomb:
    """An object that raises an error when it is unpickled, of a kind that no loader catches."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise KeyboardInterrupt('code from a file was run')",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"no state",
        b"\xff" * 100,
        state().to_bytes()[:-1],
        state().to_bytes()[:50],
        pickle.dumps(Bomb()),
        Carried({"w": torch.ones(1)}).to_bytes(),
        Carried().to_bytes(),
    ],
    ids=[
        "empty",
        "short",
        "text",
        "ones",
        "cut short",
        "cut in the header",
        "pickle",
        "carried",
        "carried nothing",
    ],
)
def test_invalid_task_state_is_refused_and_never_run(data: bytes) -> None:
    with pytest.raises(
        UserError, match=r"^state of 'birds': not .*; give a file that a finished stage wrote$"
    ) as caught:
        TaskState.from_bytes(data, "state of 'birds'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"no state", Carried({"w": torch.ones(9)}).to_bytes()[:-1], pickle.dumps(Bomb())]
)
def test_invalid_carried_state_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="not readable as safetensors"):
        Carried.from_bytes(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-320])
def test_non_finite_and_subnormal_values_are_refused(value: float) -> None:
    good = torch.zeros(3, dtype=torch.float64)
    check_values([good, torch.arange(3)], "here")
    with pytest.raises(UserError, match="here holds numbers that are not finite"):
        check_values([good, good + value], "here")
