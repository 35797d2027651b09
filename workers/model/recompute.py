"""Activation checkpointing: the backward pass computes the activations of a block again.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# The modules of a block and the objects of their hooks, each with its attributes.
BlockState = list[tuple[Any, dict[str, Any]]]


class Recomputing(nn.Module):
    """Mixin of a block that keeps only its input, not its activations, for the backward pass."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        compute = super().forward
        if not torch.is_grad_enabled():
            return compute(*inputs, **named)
        state = copy_state(self)
        has_run = False

        def compute_with_state(*inputs: Any, **named: Any) -> Any:
            nonlocal has_run
            # The forward pass must not use `restored`, because that would undo the attributes that
            # hooks of the block set.
            if not has_run:
                has_run = True
                return compute(*inputs, **named)
            with restored(state):
                return compute(*inputs, **named)

        return checkpoint(compute_with_state, *inputs, use_reentrant=False, **named)


def recompute_blocks(blocks: list[nn.Module]) -> None:
    """Change the class of blocks in place, to one that computes its activations again."""
    for block in blocks:
        if not isinstance(block, Recomputing):
            block.__class__ = _get_recomputing_class(type(block))


_classes: dict[Any, Any] = {}  # class of a block -> its subclass with `Recomputing`


def _get_recomputing_class(kind: Any) -> Any:
    if kind not in _classes:
        _classes[kind] = type(f"Recomputing{kind.__name__}", (Recomputing, kind), {})
    return _classes[kind]


def copy_state(block: nn.Module) -> BlockState:
    """Return the attributes of all modules of a block, and of the objects that are their hooks.

    The recomputation in the backward pass needs this copy: by then, the method has removed the
    weights, masks and hook tensors of the forward pass.
    """
    state: BlockState = []
    for module in block.modules():
        attributes = dict(module.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            attributes[name] = dict(attributes[name])
        state.append((module, attributes))
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", hook)  # of a bound method
            if isinstance(owner, (FunctionType, nn.Module)):
                continue
            if hasattr(owner, "__dict__"):
                state.append((owner, dict(owner.__dict__)))
    return state


@contextmanager
def restored(state: BlockState) -> Iterator[None]:
    """Give modules and hooks the attributes of `copy_state`, inside the context."""
    current = [owner.__dict__ for owner, _ in state]
    try:
        for owner, attributes in state:
            object.__setattr__(owner, "__dict__", attributes)
        yield
    finally:
        for (owner, _), attributes in zip(state, current, strict=True):
            object.__setattr__(owner, "__dict__", attributes)
