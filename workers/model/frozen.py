"""Cast frozen weights once for bf16 autocast, not in every forward pass.

Autocast caches the casts of trained weights within a step, but it casts frozen weights at each use.
In a frozen ViT, these casts are a third of the operators of a training step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from workers.model.masked import GatedConv2d, GatedLinear

# Layers that use their weight and bias in one product only. A subclass that uses the weight
# elsewhere too, for example in a sum with a low-rank update, would compute other values.
LAYERS = (nn.Linear, nn.Conv2d, GatedLinear, GatedConv2d)

M = TypeVar("M", bound=nn.Module)


class CastOnce:
    """The forward pass of a frozen layer, with bf16 copies of weight and bias under autocast.

    Results are bitwise equal to those of autocast. The copies are made in the first pass under bf16
    autocast, and again if a parameter was replaced or changed in place (but not through `.data`).
    The layer's ordinary forward pass runs instead if bf16 autocast is off, if tensors replace the
    parameters (`torch.func.functional_call`), or if a parameter needs a gradient.

    Args:
        layer: A layer of a class in LAYERS. This object does not keep it alive.
    """

    def __init__(self, layer: nn.Module):
        self._layer = weakref.ref(layer)
        self._sources: list[tuple[Tensor, int, int]] = []  # parameter, its version and address
        self._copies: dict[str, Tensor | None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CastOnce:
        """Return an object without copies for the copy of the layer."""
        return CastOnce(memo[id(self._layer())])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        assert layer is not None
        plain = type(layer).forward
        parameters = layer._parameters
        if not self._update(parameters):
            return plain(layer, *args, **kwargs)
        vars(layer)["_parameters"] = self._copies
        try:
            return plain(layer, *args, **kwargs)
        finally:
            vars(layer)["_parameters"] = parameters

    def _update(self, parameters: dict[str, Any]) -> bool:
        """Make the copies if they are missing or outdated. Return whether to use them."""
        tensors = [tensor for tensor in parameters.values() if tensor is not None]
        device = tensors[0].device.type
        if (
            not torch.is_autocast_enabled(device)
            or torch.get_autocast_dtype(device) != torch.bfloat16
            or any(not isinstance(t, nn.Parameter) or t.requires_grad for t in tensors)
        ):
            return False
        is_current = len(tensors) == len(self._sources) and all(
            tensor is source and tensor._version == version and tensor.data_ptr() == address
            for tensor, (source, version, address) in zip(tensors, self._sources, strict=True)
        )
        if not is_current:
            self._sources = [(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors]
            self._copies = {
                name: None if tensor is None else tensor.detach().to(torch.bfloat16)
                for name, tensor in parameters.items()
            }
        return True


@contextmanager
def cast_once(network: nn.Module) -> Iterator[None]:
    """Inside the context, frozen layers of a network cast their parameters only once.

    The copies take half of the memory of the frozen parameters.
    """
    layers = _replace_forward(network)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def copy_frozen(module: M) -> M:
    """Return a frozen copy of a module in evaluation mode, which casts its parameters once."""
    frozen = copy.deepcopy(module).eval().requires_grad_(False)
    _replace_forward(frozen)
    return frozen


def _replace_forward(network: nn.Module) -> list[nn.Module]:
    """Replace the forward pass of all frozen layers, and return these layers."""
    layers = []
    for layer in network.modules():
        is_frozen = not any(p.requires_grad for p in layer.parameters(recurse=False))
        if type(layer) in LAYERS and is_frozen and "forward" not in vars(layer):
            layer.forward = CastOnce(layer)
            layers.append(layer)
    return layers
