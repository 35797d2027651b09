"""Random paths of RPS-Net: after every block of a ViT there is a bank of bottleneck modules.

A path selects one module from each bank. At each block, the outputs of all modules that some path
has selected are added to the residual stream.

Rajasegaran, Hayat, Khan, Khan, Shao: Random Path Selection for Continual Learning, NeurIPS 2019.
Axes: b images, d width of the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.adapters import AdapterSites, Bottlenecks, cast_for_autocast

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
        with self.sites.using(stack_paths(self.paths, len(self.sites))):  # type: ignore[arg-type]
            features: Tensor = self.backbone(images)
        return features


def stack_paths(paths: Iterable[Path], blocks: int) -> dict[str, list[Tensor]]:
    """Join the modules of all paths at a block into one bottleneck with all their units.

    To save operators, the modules of all blocks that use the same paths are joined and cast for
    autocast together.

    Returns:
        A list with one tensor per block, by name of the tensor. Empty without paths.
    """
    paths = list(paths)
    if not paths:
        return {}
    # modules[block][number]: position of the block's module in path `number`; None: no module
    modules: list[list[int | None]] = [[None] * len(paths) for _ in range(blocks)]
    for number, path in enumerate(paths):
        for position, (block, _) in enumerate(path.indices):
            modules[block][number] = position
    groups: dict[tuple[int, ...], list[int]] = {}  # paths -> blocks that use them
    for block, positions in enumerate(modules):
        own = tuple(number for number, position in enumerate(positions) if position is not None)
        groups.setdefault(own, []).append(block)
    joined: dict[str, list[Tensor]] = {}
    for name in paths[0].tensors():
        by_block: dict[int, Tensor] = {}
        for own, group in groups.items():
            parts: list[Tensor] = []
            for number in own:
                positions = [modules[block][number] for block in group]
                parts.append(_select(paths[number].tensors()[name], positions))
            bottlenecks = cast_for_autocast(_join_bottlenecks(name, parts))
            by_block |= zip(group, bottlenecks.unbind(), strict=True)
        joined[name] = [by_block[block] for block in range(blocks)]
    return joined


def _select(stacked: Tensor, positions: list[Any]) -> Tensor:
    """Return the modules of a path at some positions, stacked."""
    if positions == [*range(len(stacked))]:
        return stacked
    modules = stacked.unbind()
    return torch.stack([modules[position] for position in positions])


def _join_bottlenecks(name: str, parts: list[Tensor]) -> Tensor:
    """Join the modules (blocks, ...) of several paths: units are concatenated, biases are summed.

    Args:
        name: `down` (blocks, units, d), `down_bias` (blocks, units), `up` (blocks, d, units), or
            `up_bias` (blocks, d), which is summed.
        parts: The tensors of each path.
    """
    if len(parts) == 1:
        return parts[0]
    if name == "up_bias":
        return torch.stack(parts).sum(0)
    return torch.cat(parts, 2 if name == "up" else 1)
