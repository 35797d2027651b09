"""Where masks and copies apply: the parameters of a backbone by name. A method gives other tensors
for some of them, and `torch.func.functional_call` runs the backbone with those: no module is
edited, any timm model will do."""

from __future__ import annotations

from torch import Tensor, nn


def weight_sites(backbone: nn.Module) -> dict[str, Tensor]:
    """Module name -> weight of every Linear and Conv2d, in order; together N_w entries. Biases,
    norms, class token and position embedding are not among them."""
    return {
        name: module.weight
        for name, module in backbone.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    }


class Copies(nn.Module):
    """A task's own trained copies of some parameters of the backbone, by parameter name."""

    def __init__(self, backbone: nn.Module, names: list[str]):
        super().__init__()
        parameters = dict(backbone.named_parameters())
        self.names = names
        copies = [nn.Parameter(parameters[name].detach().clone()) for name in names]
        self.values = nn.ParameterList(copies)

    def tensors(self) -> dict[str, Tensor]:
        """The copies by name."""
        return dict(zip(self.names, self.values, strict=True))
