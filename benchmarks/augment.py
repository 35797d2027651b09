"""Compare augmentation after the crop with torchvision's v2 transforms.

Command: `python -m benchmarks.augment`. It takes about a minute and uses batches of generated
images on the CPU, with one thread.

Both sides flip, apply RandAugment with two operations, normalise, erase, and mix (mixup and
cutmix). They draw different random numbers, so only the shapes of the results are compared;
`tests/workers/test_augment.py` compares the operations with Pillow's. torchvision processes Pillow
images one by one, as in a usual data loader. The feed's augmentation processes a decoded batch.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.harness import Report, interleave, start
from workers.data.augment import Augment
from workers.job import BackboneSettings, DataSettings
from workers.rng import StepRng

CLASSES = 10
SIZES = {32: 128, 128: 64, 224: 64}  # side -> batch
DEMANDS = {32: 3.0, 128: 1.5, 224: 1.2}  # CPU time of torchvision / ours
RECIPE = DataSettings(crop="none", flip=0.5, randaugment=2, mixup=0.8, cutmix=1.0, erase=0.25)
ROUNDS = 5


def pictures(side: int, batch: int) -> Tensor:
    """Return smooth images, uint8 (batch, 3, side, side)."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand((batch, 3, 8, 8), generator=generator)
    smooth = torch.nn.functional.interpolate(rough, size=(side, side), mode="bilinear")
    return smooth.mul(255).to(torch.uint8)


class Ours:
    """The augmentation of the feed. Each call uses the random numbers of the next step."""

    def __init__(self, pixels: Tensor, labels: Tensor, backbone: BackboneSettings):
        self.pixels = pixels
        self.labels = labels
        self.augment = Augment(RECIPE, backbone, training=True)
        self.steps = count()

    def batch(self) -> Tensor:
        """Return augmented images (batch, 3, side, side)."""
        size = len(self.pixels)
        rng = StepRng(0, 0, next(self.steps), torch.arange(size), size, torch.device("cpu"))
        images, _ = self.augment(self.pixels, self.labels, CLASSES, rng)
        return images


class Torchvision:
    """The same recipe with torchvision's v2 transforms."""

    def __init__(self, pixels: Tensor, labels: Tensor, backbone: BackboneSettings):
        self.images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
        self.labels = labels
        self.transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(RECIPE.flip),
                v2.RandAugment(RECIPE.randaugment, int(RECIPE.magnitude)),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(backbone.mean, backbone.std),
                v2.RandomErasing(RECIPE.erase, value="random"),
            ]
        )
        mixup = v2.MixUp(alpha=RECIPE.mixup, num_classes=CLASSES)
        cutmix = v2.CutMix(alpha=RECIPE.cutmix, num_classes=CLASSES)
        self.mix = v2.RandomChoice([mixup, cutmix])

    def batch(self) -> Tensor:
        """Return augmented images (batch, 3, side, side)."""
        images = torch.stack([self.transform(image) for image in self.images])
        mixed: Tensor = self.mix(images, self.labels)[0]
        return mixed


def several(side: Ours | Torchvision, batches: int = 4) -> None:
    """Compute `batches` batches."""
    for _ in range(batches):
        side.batch()


def main() -> None:
    """Compare both at each image size in SIZES."""
    start()
    report = Report()
    for side, size in SIZES.items():
        pixels = pictures(side, size)
        labels = torch.arange(size) % CLASSES
        backbone = BackboneSettings(
            img_size=side, crop_pct=1.0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3)
        )
        ours = Ours(pixels, labels, backbone)
        theirs = Torchvision(pixels, labels, backbone)
        assert ours.batch().shape == theirs.batch().shape
        variants = {"ours": partial(several, ours), "torchvision": partial(several, theirs)}
        timing = interleave(variants, ROUNDS)
        ratio = timing.ratio("torchvision", "ours")
        report.at_least(f"{side} px, torchvision v2 / ours", ratio, DEMANDS[side])
        for name in variants:
            microseconds = timing.median(name) / (4 * size) * 1e6
            report.note(f"{side} px, {name}, of CPU per image", f"{microseconds:,.0f} us")
    report.exit()


if __name__ == "__main__":
    main()
