"""Stochastic depth that is drawn per sample, and therefore equal for any number of ranks."""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from workers.rng import StepRng


class DrawnDropPath(DropPath):
    """timm's DropPath, with samples that `draw_paths` selects before the forward pass.

    Before the first step nothing is dropped.

    Attributes:
        uniform: [0, 1) numbers of the step, (b,), one per sample, or (b, ...) for parts of a
            sample.
    """

    uniform: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Set the branch of dropped samples to zero, and divide the others by 1 - drop_prob."""
        if self.uniform is None or not self.training or self.drop_prob == 0:
            return x
        assert len(self.uniform) == len(x), "stochastic depth was drawn for another batch"
        scale = (self.uniform >= self.drop_prob).to(x.dtype) / (1 - self.drop_prob)
        broadcast = scale.shape + (1,) * (x.ndim - scale.ndim)
        return x * scale.view(broadcast)


class TokenDropPath(DrawnDropPath):
    """Stochastic depth for branches (b, tokens, D) that drops each token independently."""

    tokens: int = 1  # how many there are from the next draw on


def replace_drop_paths(model: nn.Module) -> None:
    """Turn every DropPath of a model into a `DrawnDropPath`, in place."""
    for module in model.modules():
        if type(module) is DropPath:
            module.__class__ = DrawnDropPath


def draw_paths(model: nn.Module, draw: StepRng) -> None:
    """Draw which samples each DropPath of `model` drops in the next forward."""
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
