"""Find the norm layers of a backbone, and keep the running statistics of batch norms constant."""

from __future__ import annotations

from typing import Any, Self

from timm.layers import FilterResponseNormAct2d, RmsNorm, RmsNorm2d
from torch import nn

from workers.data.torch_internals import BatchNormBase
from workers.errors import UserError

# Classes of the norm layers that `norm_parameter_names` finds. Subclasses in timm include
# LayerNorm2d, GroupNormAct and BatchNormAct2d.
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
    """Mix-in for a norm with running statistics that keeps the norm in evaluation mode.

    Weight and bias can still be trained.
    """

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


_frozen_classes: dict[Any, Any] = {}  # class of a norm -> its subclass with `FrozenNorm`


def _get_frozen_class(kind: Any) -> Any:
    """Return a subclass of `kind` with `FrozenNorm`, created at the first call."""
    if kind not in _frozen_classes:
        _frozen_classes[kind] = type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {})
    return _frozen_classes[kind]


def find_norms_with_statistics(model: nn.Module) -> dict[str, Any]:
    """Return the norms with running statistics by name: batch norms and some norms of timm."""
    return {name: layer for name, layer in model.named_modules() if _has_statistics(layer)}


def _has_statistics(layer: nn.Module) -> bool:
    return any(name == "running_var" for name, _ in layer.named_buffers(recurse=False))


def freeze_statistics(model: nn.Module) -> None:
    """Keep every norm with running statistics in evaluation mode from now on.

    The class of each such norm is changed in place.

    Raises:
        UserError: If a batch norm has no running statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and module.running_var is None:
            raise UserError(
                f"the backbone's {name} is a {type(module).__name__} that normalises by the other "
                "images of a batch, so that answers would depend on them; choose a backbone whose "
                "batch norms have statistics, such as resnet18"
            )
    for module in find_norms_with_statistics(model).values():
        if not isinstance(module, FrozenNorm):
            module.__class__ = _get_frozen_class(type(module))
        module.eval()


def norm_parameter_names(backbone: Any) -> list[str]:
    """Return the names of the affine parameters of the norm layers in `KINDS`."""
    names = []
    for module_name, module in backbone.named_modules():
        if isinstance(module, KINDS):
            for name, _ in module.named_parameters(recurse=False):
                names.append(f"{module_name}.{name}")
    return names
