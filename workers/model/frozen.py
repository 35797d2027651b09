"""Cast frozen weights once for bf16 autocast, not in every forward pass.

Autocast caches the casts of trained weights within a step, but it casts frozen weights at each use.
In a frozen ViT these are a third of the operators of a training step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from workers.model.masked import GatedConv2d, GatedLinear

# Layers that use their weight and bias in one product only. A subclass that uses the weight
# elsewhere too, for example in a sum with a low-rank update, would compute other bits.
LAYERS = (nn.Linear, nn.Conv2d, GatedLinear, GatedConv2d)

M = TypeVar("M", bound=nn.Module)


class CastOnce:
    """The forward pass of a frozen layer, with bf16 copies of weight and bias under autocast.

    The bits are those of autocast. The plain forward pass runs outside autocast, with parameters
    that `torch.func.functional_call` puts in place of the layer's, and after the layer's parameters
    have been changed.

    Args:
        layer: A layer of a class in LAYERS.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.parameters = dict(layer._parameters)  # the bias can be None
        self.versions = [p._version for p in layer.parameters(recurse=False)]
        self.copies = {
            name: None if parameter is None else parameter.detach().to(torch.bfloat16)
            for name, parameter in self.parameters.items()
        }

    def __call__(self, x: Tensor) -> Any:
        layer = self.layer
        plain = type(layer).forward
        parameters = layer._parameters
        if not torch.is_autocast_enabled(x.device.type) or not self._is_current():
            return plain(layer, x)
        vars(layer)["_parameters"] = self.copies
        try:
            return plain(layer, x)
        finally:
            vars(layer)["_parameters"] = parameters

    def _is_current(self) -> bool:
        """Return whether the layer has the parameters of which the copies were made."""
        current = self.layer._parameters
        if any(current[name] is not parameter for name, parameter in self.parameters.items()):
            return False
        return self.versions == [p._version for p in current.values() if p is not None]


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
