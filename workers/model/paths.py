"""Random paths: of a bank of bottlenecks behind every block of a ViT each path takes one; those
that any path has taken are summed.

Axes: S modules that a path adds, d width of the backbone, m units of a module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workers.model.adapters import AdapterSites, Bottlenecks

ModuleIndex = tuple[int, int]  # a block, and one of the modules in its bank


def random_path(blocks: int, modules: int, seed: int) -> list[ModuleIndex]:
    """One module of each block's bank of so many, each as likely as any other."""
    return list(
        enumerate(
            torch.randint(
                modules, (blocks,), generator=torch.Generator().manual_seed(seed)
            ).tolist()
        )
    )


class Path(Bottlenecks):
    """The modules up(gelu(down x)) that a path adds at `places`, stacked. Where a path drew what an
    earlier one has, it adds nothing."""

    def __init__(self, places: list[ModuleIndex], width: int, bottleneck: int):
        super().__init__(len(places), width, bottleneck)
        self.places = places

    @classmethod
    def restored(cls, places: list[ModuleIndex], tensors: dict[str, Tensor]) -> Path:
        _, bottleneck, width = tensors["down"].shape
        path = cls([(block, module) for block, module in places], width, bottleneck)
        path.load_state_dict(tensors)
        return path.requires_grad_(False)

    def export(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.tensors().items()}


class PathNetwork(nn.Module):
    """A ViT with the modules of some paths, all of which it shares: behind each block x <- x +
    sum_j (W_up,j gelu(W_down,j x + b_j) + c_j), j over the modules that the paths have there."""

    def __init__(self, backbone: nn.Module, sites: AdapterSites, paths: Iterable[Path]):
        super().__init__()
        self.backbone, self.sites, self.paths = backbone, sites, nn.ModuleList(paths)

    def forward(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> features (b, d)."""
        with self.sites.using(stack_paths(self.paths, len(self.sites))):  # type: ignore[arg-type]
            return self.backbone(images)


def stack_paths(paths: Iterable[Path], blocks: int) -> dict[str, list[Tensor]]:
    """The modules at each block as one bottleneck that has the units of all: name -> a tensor for
    each block. Nothing where no path is."""
    parts: dict[str, list[list[Tensor]]] = {}
    for path in paths:
        for name, stacked in path.tensors().items():
            at = parts.setdefault(name, [[] for _ in range(blocks)])
            for (block, _), tensor in zip(path.places, stacked.unbind(0), strict=True):
                at[block].append(tensor)
    joined = {
        "down": torch.cat,
        "down_bias": torch.cat,
        "up": lambda found: torch.cat(found, 1),
        "up_bias": lambda found: torch.stack(found).sum(0),
    }
    return {name: [joined[name](found) for found in at] for name, at in parts.items()}
