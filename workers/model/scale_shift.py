"""SSF: a trained scale and shift per channel after the patch embedding, linear layers and norms.

Lian, Zhou, Feng, Wang: Scaling & Shifting Your Features: A New Baseline for Efficient Model Tuning,
NeurIPS 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.model.adapters import AdapterSites, Hook

START_STD = 0.02  # standard deviation of the initial scales (mean 1) and shifts (mean 0)


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale .* x + shift, for x (..., d), scale (d,) and shift (d,)."""
    return x * scale + shift


class ScaleShiftSites(AdapterSites):
    """The layers of a ViT with scaled and shifted outputs. Forward hooks change the outputs.

    The layers are the patch embedding, every linear layer and every layer norm, including the final
    norm.

    Attributes:
        widths: Number of channels of each layer.
    """

    def __init__(self, vit: Any):
        self.width: int = vit.embed_dim
        self.hooks: list[Hook] = []
        self.widths: list[int] = []
        for name, module in vit.named_modules():
            if name == "patch_embed":
                self._add(module, self.width)
            elif isinstance(module, nn.Linear):
                self._add(module, module.out_features)
            elif isinstance(module, nn.LayerNorm):
                self._add(module, module.normalized_shape[-1])

    def _add(self, module: nn.Module, width: int) -> None:
        hook = Hook(scale_shift)
        module.register_forward_hook(hook)
        self.hooks.append(hook)
        self.widths.append(width)

    def initial(self) -> dict[str, Tensor]:
        """Return initial scales and shifts of all layers, each concatenated to (sum of widths,)."""
        noise = START_STD * torch.randn(2, sum(self.widths))
        return {"scale": 1 + noise[0], "shift": noise[1].clone()}

    def split(self, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        """Return the scales and shifts of each layer, for `using`."""
        return {name: tensor.split(self.widths) for name, tensor in tensors.items()}
