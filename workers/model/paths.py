"""Random paths of RPS-Net: after every block of a ViT there is a bank of bottleneck modules.

A path selects one module from each bank. At each block, the outputs of all modules that some path
has selected are added to the residual stream.

Rajasegaran, Hayat, Khan, Khan, Shao: Random Path Selection for Continual Learning, NeurIPS 2019.
Axes: b images, d width of the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workers.model.adapters import AdapterSites, Bottlenecks

ModuleIndex = tuple[int, int]  # index of a block, and index of a module in the bank of this block


def draw_random_path(blocks: int, modules: int, seed: int) -> list[ModuleIndex]:
    """Draw a path: one module for each block, uniformly.

    Args:
        blocks: Number of blocks.
        modules: Number of modules in a bank.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(modules, (blocks,), generator=generator)
    return list(enumerate(choices.tolist()))


class Path(Bottlenecks):
    """The modules up(gelu(down x)) that a path adds, stacked in the order of `indices`.

    A module that an earlier path has already added is not part of this path.
    """

    def __init__(self, indices: list[ModuleIndex], width: int, bottleneck: int):
        super().__init__(len(indices), width, bottleneck)
        self.indices = indices

    @classmethod
    def restored(cls, indices: list[ModuleIndex], tensors: dict[str, Tensor]) -> Path:
        """Return a stored path, frozen."""
        _, bottleneck, width = tensors["down"].shape
        path = cls([(block, module) for block, module in indices], width, bottleneck)
        path.load_state_dict(tensors)
        return path.requires_grad_(False)

    def export(self) -> dict[str, Tensor]:
        """Return a copy of the tensors for storage."""
        return {name: t.detach().clone() for name, t in self.tensors().items()}


class PathNetwork(nn.Module):
    """A ViT with the modules of some paths.

    After each block: x <- x + sum_j (W_up,j gelu(W_down,j x + b_j) + c_j), with j over the modules
    of all these paths at the block.
    """

    def __init__(self, backbone: nn.Module, sites: AdapterSites, paths: Iterable[Path]):
        super().__init__()
        self.backbone = backbone
        self.sites = sites
        self.paths = nn.ModuleList(paths)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (b, d) of images (b, 3, H, W)."""
        tensors = stack_paths(self.paths, len(self.sites))  # type: ignore[arg-type]
        with self.sites.using(tensors):
            features: Tensor = self.backbone(images)
        return features


def stack_paths(paths: Iterable[Path], blocks: int) -> dict[str, list[Tensor]]:
    """Join the modules of all paths at a block into one bottleneck with all their units.

    Returns:
        A list with one tensor per block, by name of the tensor. Empty without paths.
    """
    parts: dict[str, list[list[Tensor]]] = {}
    for path in paths:
        for name, stacked in path.tensors().items():
            by_block = parts.setdefault(name, [[] for _ in range(blocks)])
            for (block, _), tensor in zip(path.indices, stacked.unbind(0), strict=True):
                by_block[block].append(tensor)
    joined: dict[str, list[Tensor]] = {}
    for name, by_block in parts.items():
        joined[name] = [_join_bottlenecks(name, tensors) for tensors in by_block]
    return joined


def _join_bottlenecks(name: str, tensors: list[Tensor]) -> Tensor:
    """Return a tensor of the joint bottleneck: units are concatenated, output biases are summed."""
    if name == "up_bias":
        return torch.stack(tensors).sum(0)  # (d,)
    if name == "up":
        return torch.cat(tensors, 1)  # (d, units)
    return torch.cat(tensors)  # down: (units, d); down_bias: (units,)
