"""Compare MEAT's compact inference, which removes masked tokens and neurons, with plain timm and
with the dense masked forward pass.

Command: `python -m benchmarks.meat_inference`. It takes about half a minute, with DeiT-Ti at 224
px, token and neuron masks in all 12 blocks, a batch of 8 and one thread. Weights and masks are
random, which does not change the amount of work.
"""

from __future__ import annotations

import copy
from functools import partial

import timm
import torch
from torch import Tensor, nn

from benchmarks.harness import Report, interleave, start
from workers.job import BackboneSettings
from workers.methods.meat import Meat, MeatSettings
from workers.model.vit import build
from workers.storage.taskstate import TaskState

# Keep ratio of tokens and neurons -> minimum ratio of the times of plain timm / compact.
DEMANDS = {0.5: 1.3, 0.8: 1.1}
# The same at keep ratio 0.5 with one token mask for all blocks: the first block drops the tokens.
SHARED_DEMAND = 2.0
BATCH = 8


def random_mask(generator: torch.Generator, *shape: int, keep: float) -> Tensor:
    """Return a boolean mask with exactly round(keep * last axis) ones in each row."""
    scores = torch.rand(shape, generator=generator)
    return scores.argsort(-1).argsort(-1) < round(keep * shape[-1])


def meat(settings: BackboneSettings, keep: float, shared: bool) -> Meat:
    """Return MEAT with one task `t` and random masks."""
    generator = torch.Generator().manual_seed(0)
    method = Meat(build(settings), MeatSettings(ffn_masks="neuron"), seed=0)
    masks = {
        name: random_mask(generator, *shape, keep=keep)
        for name, shape in method.mask_shapes().items()
    }
    if shared:
        masks["tokens"] = masks["tokens"][:1].expand_as(masks["tokens"])
    head = nn.Linear(method.heads.width, 100).state_dict()
    method.load_task(
        TaskState(
            "t",
            tuple(map(str, range(100))),
            "meat",
            method.backbone_digest,
            masks=masks,
            head=head,
            meta=method.sites.meta,
        )
    )
    return method.eval()


@torch.no_grad()
def main() -> None:
    """Compare logits, then times, for three kinds of masks."""
    start()
    torch.manual_seed(0)
    settings = BackboneSettings(name="deit_tiny_patch16_224")
    report = Report()
    images = torch.randn(BATCH, 3, 224, 224)
    plain = timm.create_model(settings.name, num_classes=100).eval()
    for keep, shared in ((0.5, False), (0.8, False), (0.5, True)):
        method = meat(settings, keep, shared)
        pruned = copy.deepcopy(method).compact("t")
        label = f"keep {keep}"
        demand = DEMANDS[keep]
        if shared:
            label += ", one token mask for all blocks"
            demand = SHARED_DEMAND
        report.equal(
            f"{label}, logits of compact and dense",
            pruned(images),
            method.logits(images, "t"),
            1e-5,
        )
        timing = interleave(
            {
                "plain": partial(plain, images),
                "compact": partial(pruned, images),
                "dense": partial(method.logits, images, "t"),
            }
        )
        report.at_least(
            f"{label}, compact against plain timm",
            timing.ratio("plain", "compact"),
            demand,
        )
        report.note(
            f"{label}, compact against dense masks",
            f"{timing.ratio('dense', 'compact'):.2f}x, "
            f"{timing.median('compact') * 1000:.0f} ms per batch",
        )
    report.exit()


if __name__ == "__main__":
    main()
