"""Random paths: each path takes one bottleneck module from a bank after every block of a ViT.

The modules that any path has taken are summed.

Axes: S modules that a path adds, d width of the backbone, m units of a module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workers.model.adapters import AdapterSites, Bottlenecks

ModuleIndex = tuple[int, int]  # a block, and one of the modules in its bank


def random_path(blocks: int, modules: int, seed: int) -> list[ModuleIndex]:
    """Draw one of `modules` modules for each block, uniformly."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(modules, (blocks,), generator=generator)
    return list(enumerate(choices.tolist()))


class Path(Bottlenecks):
    """The modules up(gelu(down x)) that a path adds, stacked in the order of `indices`.

    It adds none where an earlier path has the same module.
    """

    def __init__(self, indices: list[ModuleIndex], width: int, bottleneck: int):
        super().__init__(len(indices), width, bottleneck)
        self.indices = indices

    @classmethod
    def restored(cls, indices: list[ModuleIndex], tensors: dict[str, Tensor]) -> Path:
        """A stored path; it is not trained any more."""
        _, bottleneck, width = tensors["down"].shape
        path = cls([(block, module) for block, module in indices], width, bottleneck)
        path.load_state_dict(tensors)
        return path.requires_grad_(False)

    def export(self) -> dict[str, Tensor]:
        """A copy of the tensors, to be stored."""
        return {name: t.detach().clone() for name, t in self.tensors().items()}


class PathNetwork(nn.Module):
    """A ViT with the shared modules of some paths.

    After each block x <- x + sum_j (W_up,j gelu(W_down,j x + b_j) + c_j), with j over the modules
    of the paths at that block.
    """

    def __init__(self, backbone: nn.Module, sites: AdapterSites, paths: Iterable[Path]):
        super().__init__()
        self.backbone = backbone
        self.sites = sites
        self.paths = nn.ModuleList(paths)

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 3, H, W) -> features (b, d)."""
        tensors = stack_paths(self.paths, len(self.sites))  # type: ignore[arg-type]
        with self.sites.using(tensors):
            features: Tensor = self.backbone(images)
        return features


def stack_paths(paths: Iterable[Path], blocks: int) -> dict[str, list[Tensor]]:
    """Return the modules of each block as one bottleneck with all their units.

    The result has one tensor per block by name. It is empty without paths.
    """
    parts: dict[str, list[list[Tensor]]] = {}
    for path in paths:
        for name, stacked in path.tensors().items():
            by_block = parts.setdefault(name, [[] for _ in range(blocks)])
            for (block, _), tensor in zip(path.indices, stacked.unbind(0), strict=True):
                by_block[block].append(tensor)
    joined: dict[str, list[Tensor]] = {}
    for name, by_block in parts.items():
        joined[name] = [_join(name, tensors) for tensors in by_block]
    return joined


def _join(name: str, tensors: list[Tensor]) -> Tensor:
    """One tensor of the joint bottleneck: units side by side, biases behind them summed."""
    if name == "up_bias":
        return torch.stack(tensors).sum(0)  # (d,)
    if name == "up":
        return torch.cat(tensors, 1)  # (d, units)
    return torch.cat(tensors)  # down: (units, d); down_bias: (units,)
