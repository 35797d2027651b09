"""Norm layers by kind, and batch norms with constant statistics."""

from __future__ import annotations

from typing import Any, Self

from timm.layers import FilterResponseNormAct2d, RmsNorm, RmsNorm2d
from torch import nn

from workers.data.torch_internals import BatchNormBase
from workers.errors import UserError

# Subclasses of timm among them: LayerNorm2d, GroupNormAct, BatchNormAct2d, ...
KINDS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    BatchNormBase,
    RmsNorm,
    RmsNorm2d,
    FilterResponseNormAct2d,
)


class FrozenNorm(nn.Module):
    """Mix-in for a norm with running statistics: always in evaluation mode.

    Weight and bias can be trained.
    """

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


_frozen_classes: dict[Any, Any] = {}  # class of norm -> the same, always in evaluation mode


def _frozen(kind: Any) -> Any:
    """Return a class of norm that is always in evaluation mode."""
    if kind not in _frozen_classes:
        _frozen_classes[kind] = type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {})
    return _frozen_classes[kind]


def layers_with_statistics(model: nn.Module) -> dict[str, Any]:
    """Return the norms with running statistics by name: batch norms, and some that timm has."""
    return {name: layer for name, layer in model.named_modules() if _has_statistics(layer)}


def _has_statistics(layer: nn.Module) -> bool:
    return any(name == "running_var" for name, _ in layer.named_buffers(recurse=False))


def freeze_statistics(model: nn.Module) -> None:
    """Make every norm with running statistics one that stays in evaluation mode, in place."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and module.running_var is None:
            raise UserError(
                f"the backbone's {name} is a {type(module).__name__} that normalises by the other "
                "images of a batch, so that answers would depend on them; choose a backbone whose "
                "batch norms have statistics, such as resnet18"
            )
    for module in layers_with_statistics(model).values():
        if not isinstance(module, FrozenNorm):
            module.__class__ = _frozen(type(module))
        module.eval()


def norm_names(backbone: Any) -> list[str]:
    """Return the names of the affine parameters of all norm layers."""
    names = []
    for module_name, module in backbone.named_modules():
        if isinstance(module, KINDS):
            for name, _ in module.named_parameters(recurse=False):
                names.append(f"{module_name}.{name}")
    return names
