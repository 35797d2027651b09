"""Replace parameters of a backbone by name, with masked weights or with copies.

A method provides other tensors for some parameters, and `torch.func.functional_call` runs the
backbone with these. No module is changed, so this works with any timm model.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn


def weight_sites(backbone: nn.Module, part: Literal["all", "ffn"] = "all") -> dict[str, Tensor]:
    """Return the weights of Linear and Conv2d layers by module name, in the order of modules.

    Biases, norms, class token and position embedding are not included.

    Args:
        backbone: The backbone.
        part: `all` layers, or those in the `ffn` of each block: modules that timm calls `mlp`.
    """
    return {
        name: module.weight
        for name, module in backbone.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        and (part == "all" or "mlp" in name.split("."))
    }


class Copies(nn.Module):
    """A task's own trained copies of some parameters of the backbone.

    Args:
        backbone: The backbone.
        names: Names of the parameters to copy.
    """

    def __init__(self, backbone: nn.Module, names: list[str]):
        super().__init__()
        parameters = dict(backbone.named_parameters())
        self.names = names
        copies = [nn.Parameter(parameters[name].detach().clone()) for name in names]
        self.values = nn.ParameterList(copies)

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies by name."""
        return dict(zip(self.names, self.values, strict=True))
