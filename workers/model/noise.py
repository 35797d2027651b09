"""Stochastic depth whose draws belong to samples, so that they are the same for any number of
ranks."""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from workers.rng import StepRng


class DrawnDropPath(DropPath):
    """timm's DropPath, except that who is dropped is decided before the forward (see `draw_paths`)
    and not inside it.

    uniform: [0, 1) numbers (b,) of the step, one per sample, or (b, ...) for parts of one. Before
    the first step nothing is dropped.
    """

    uniform: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) -> the same; a dropped sample's branch is zero, the others' grows by 1 / (1 -
        drop_prob)."""
        if self.uniform is None or not self.training or self.drop_prob == 0:
            return x
        assert len(self.uniform) == len(x), "stochastic depth was drawn for another batch"
        kept = (self.uniform >= self.drop_prob).to(x.dtype) / (1 - self.drop_prob)
        return x * kept.view(*kept.shape, *[1] * (x.ndim - kept.ndim))


class TokenDropPath(DrawnDropPath):
    """For a branch (b, tokens, D) whose tokens know nothing of each other: each is dropped on its
    own."""

    tokens: int = 1  # how many there are from the next draw on


def replace_drop_paths(model: nn.Module) -> None:
    """Gives every DropPath of a model the class above, in place."""
    for module in model.modules():
        if type(module) is DropPath:
            module.__class__ = DrawnDropPath


def draw_paths(model: nn.Module, draw: StepRng) -> None:
    """Before the forward of a step: who is dropped, for each DropPath of `model` in order."""
    found = [m for m in model.modules() if isinstance(m, DrawnDropPath)]
    for place, path in enumerate(found):
        if isinstance(path, TokenDropPath):
            path.uniform = draw.per_sample(f"drop_path of tokens {place}", path.tokens)
    paths = [path for path in found if not isinstance(path, TokenDropPath)]
    if paths:
        for path, uniform in zip(
            paths, draw.per_sample("drop_path", len(paths)).unbind(1), strict=True
        ):
            path.uniform = uniform
