"""Stochastic depth with random numbers of `StepRng`, which are equal for any number of ranks."""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from workers.rng import StepRng


class DrawnDropPath(DropPath):
    """timm's DropPath, with random numbers that `draw_paths` draws before the forward pass.

    Attributes:
        uniform: Uniform numbers in [0, 1) of the step: (b,), one per sample, or (b, ...) if parts
            of a sample are dropped separately. None (before the first step): nothing is dropped.
    """

    uniform: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Set the branch to zero for dropped samples, and divide it by 1 - drop_prob for others."""
        if self.uniform is None or not self.training or self.drop_prob == 0:
            return x
        assert len(self.uniform) == len(x), "stochastic depth was drawn for another batch"
        scale = (self.uniform >= self.drop_prob).to(x.dtype) / (1 - self.drop_prob)
        broadcast = scale.shape + (1,) * (x.ndim - scale.ndim)
        return x * scale.view(broadcast)


class TokenDropPath(DrawnDropPath):
    """Stochastic depth for branches (b, tokens, D) that drops each token independently."""

    tokens: int = 1  # number of tokens for which the next `draw_paths` draws numbers


def replace_drop_paths(model: nn.Module) -> None:
    """Turn every DropPath of a model into a `DrawnDropPath`, in place."""
    for module in model.modules():
        if type(module) is DropPath:
            module.__class__ = DrawnDropPath


def draw_paths(model: nn.Module, draw: StepRng) -> None:
    """Draw the samples that each `DrawnDropPath` of `model` drops in the next forward pass."""
    drop_paths = [m for m in model.modules() if isinstance(m, DrawnDropPath)]
    of_samples = []
    for index, path in enumerate(drop_paths):
        if isinstance(path, TokenDropPath):
            path.uniform = draw.per_sample(f"drop_path of tokens {index}", path.tokens)
        else:
            of_samples.append(path)
    if of_samples:
        uniform = draw.per_sample("drop_path", len(of_samples))  # (b, paths)
        for path, column in zip(of_samples, uniform.unbind(1), strict=True):
            path.uniform = column
