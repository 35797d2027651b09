"""From decoded uint8 images to what the model eats: crop, flip, RandAugment, normalise, erase, mix;
batched, on device.

Every decision (where to crop, which operation, whom to mix with) is a value, drawn on the CPU for
the whole global batch from (seed, epoch, step), of which a rank takes its own rows. So a sample
meets the same augmentation for any number of ranks, on any device, and small decisions never make
the host wait for the accelerator.

Letters: b samples of this rank, S side of the cached square image, s side of the model's input, K
classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data import randaugment
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings
from workers.rng import StepRng, derive_seed

CPU = torch.device("cpu")
# boxes tried before a random resized crop takes the whole image, or erasing leaves it alone
ATTEMPTS = 10
ERASE_AREA, ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
CROP_RATIO = (3 / 4, 4 / 3)


def partner_positions(draw: StepRng) -> Tensor:
    """(size,) on the CPU, a permutation: the position in the global batch of the one that each
    sample is mixed with."""
    return torch.randperm(draw.size, generator=draw.generator("partner", CPU))


def crop(pixels: Tensor, top: Tensor, left: Tensor, flip: Tensor, side: int) -> Tensor:
    """pixels (b, C, S, S), corners (b,) and flips (b,) on the CPU -> (b, C, side, side); flips come
    after the crop."""
    if pixels.device.type == "cpu":  # a loop over slices: 2 to 4 times faster than the gather below
        source, out = pixels.numpy(), np.empty((*pixels.shape[:2], side, side), np.uint8)
        for i, (y, x, mirrored) in enumerate(
            zip(top.tolist(), left.tolist(), flip.tolist(), strict=True)
        ):
            window = source[i, :, y : y + side, x : x + side]
            out[i] = window[:, :, ::-1] if mirrored else window
        return torch.from_numpy(out)
    return crop_by_gather(pixels, top, left, flip, side)


def crop_by_gather(pixels: Tensor, top: Tensor, left: Tensor, flip: Tensor, side: int) -> Tensor:
    """`crop` by one gather, for devices where a loop over images would cost a kernel each."""
    # a view (b, C, S-side+1, S-side+1, side, side)
    windows = pixels.unfold(2, side, 1).unfold(3, side, 1)
    rows, top, left, flip = (
        t.to(pixels.device) for t in (torch.arange(len(pixels)), top, left, flip)
    )
    out = windows[rows, :, top, left]
    return torch.where(flip.view(-1, 1, 1, 1), out.flip(-1), out)


@dataclass(frozen=True)
class Boxes:
    """Rectangles in pixels, one per sample, all (b,) on the CPU. `found` is False where no attempt
    fitted."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    found: Tensor

    def of(self, rows: Tensor) -> Boxes:
        return Boxes(*(t[rows] for t in (self.top, self.left, self.height, self.width, self.found)))


def draw_boxes(
    draw: StepRng, tag: str, side: int, area: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """For each sample of the global batch the first of ATTEMPTS boxes that fits a square of the
    given side: its share of the area is uniform, its height / width uniform in the logarithm."""
    u = torch.rand(
        (draw.size, ATTEMPTS, 2), generator=draw.generator(f"{tag}.box", CPU), dtype=torch.float64
    )
    share = (area[0] + (area[1] - area[0]) * u[..., 0]) * side * side
    tall = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u[..., 1])
    height, width = (share * tall).sqrt().round().long(), (share / tall).sqrt().round().long()
    fits = (height <= side) & (width <= side) & (height > 0) & (width > 0)
    first = fits.int().argmax(1, keepdim=True)
    height, width, found = (t.gather(1, first).squeeze(1) for t in (height, width, fits))
    height, width = torch.where(found, height, side), torch.where(found, width, side)
    corner = torch.rand(
        (draw.size, 2), generator=draw.generator(f"{tag}.corner", CPU), dtype=torch.float64
    )
    top, left = (
        (corner[:, i] * (side - extent + 1)).long() for i, extent in enumerate((height, width))
    )
    return Boxes(top, left, height, width, found)


@dataclass(frozen=True)
class Mix:
    """What remains of a sample: `blend` (b,) is its weight in mixup, 1 under cutmix; `boxes` (b, 4)
    the top, bottom, left and right of what is cut from the partner, empty under mixup; `share` (b,)
    its weight in the target."""

    blend: Tensor
    boxes: Tensor
    share: Tensor

    def of(self, rows: Tensor) -> Mix:
        return Mix(self.blend[rows], self.boxes[rows], self.share[rows])


class Augment:
    """Turns pixels into model inputs and labels into targets, as `DataSettings` says; random only
    while training."""

    def __init__(self, data: DataSettings, backbone: BackboneSettings, training: bool):
        low, high = data.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(
                f"data.crop_scale: {list(data.crop_scale)} is no range of areas; "
                "give [low, high] with 0 < low <= high <= 1"
            )
        self.data, self.training, self.side = data, training, backbone.img_size
        self.size_in = round(backbone.img_size / backbone.crop_pct)
        self.fill = tuple(min(255, round(255 * m)) for m in backbone.mean)
        # (v / 255 - mean) / std as one product and one sum
        self.scale = torch.tensor([1 / (255 * s) for s in backbone.std]).view(3, 1, 1)
        self.shift = torch.tensor(
            [-m / s for m, s in zip(backbone.mean, backbone.std, strict=True)]
        ).view(3, 1, 1)

    @property
    def needs_partner(self) -> bool:
        return self.training and bool(self.data.mixup or self.data.cutmix)

    @property
    def repeats_itself(self) -> bool:
        """Whether an image is the same whenever it comes: the one that is measured."""
        data = self.data
        return not self.training or (
            data.crop == "none"
            and not (data.flip or data.randaugment or data.erase or self.needs_partner)
        )

    def __call__(
        self,
        pixels: Tensor,
        labels: Tensor,
        num_classes: int | None,
        draw: StepRng,
        partner_pixels: Tensor | None = None,
        partner_labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """pixels uint8 (b, 3, S, S), labels (b,) -> images float32 (b, 3, s, s), targets (b, K) or
        None if labels do.

        `partner_pixels`, `partner_labels`: the samples at
        `partner_positions(draw)[draw.positions]`. They are needed only where another rank holds a
        partner; a single rank has all of them. With num_classes None (a batch over several tasks
        without a common output space) samples are neither mixed nor smoothed.
        """
        if pixels.shape[1:] != (3, self.size_in, self.size_in):
            raise ValueError(
                f"pixels: shape {tuple(pixels.shape)}, expected (b, 3, {self.size_in}, "
                f"{self.size_in})"
            )
        if not self.training:
            return self.normalise(self._centre(pixels)), None
        images, targets = self._augment(pixels, draw), self.targets(labels, num_classes)
        if targets is not None and num_classes is not None and self.needs_partner:
            others, other_labels = self._partners(
                images, labels, draw, partner_pixels, partner_labels
            )
            mix = self._plan_mix(draw).of(draw.positions.cpu())
            images = self._mix(images, others, mix)
            share = mix.share.to(targets).unsqueeze(1)
            targets = share * targets + (1 - share) * self._targets(other_labels, num_classes)
        return images, targets

    def targets(self, labels: Tensor, num_classes: int | None) -> Tensor | None:
        """(b,) -> (b, K), or None where labels do; those of samples that are not mixed, or not
        yet."""
        soft = self.training and (self.needs_partner or self.data.smoothing)
        return self._targets(labels, num_classes) if soft and num_classes is not None else None

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (b, 3, s, s) -> float32, zero mean and unit deviation under the backbone's
        statistics."""
        if self.scale.device != pixels.device:
            self.scale, self.shift = self.scale.to(pixels.device), self.shift.to(pixels.device)
        return pixels.float().mul_(self.scale).add_(self.shift)

    # ---- one sample ------------------------------------------------------------------------------
    def _augment(self, pixels: Tensor, draw: StepRng) -> Tensor:
        """All that happens to a sample alone; partners meet it too, under their own rows."""
        rows = draw.positions.cpu()
        pixels = self._crop(pixels, draw, rows)
        if self.data.randaugment:
            policy = randaugment.plan(draw, self.data.randaugment, self.data.magnitude)
            pixels = randaugment.apply(pixels, policy.of(rows), self.fill)
        images = self.normalise(pixels)
        return self._erase(images, draw, rows) if self.data.erase else images

    def _centre(self, pixels: Tensor) -> Tensor:
        start = (self.size_in - self.side) // 2
        return pixels[:, :, start : start + self.side, start : start + self.side]

    def _crop(self, pixels: Tensor, draw: StepRng, rows: Tensor) -> Tensor:
        """uint8 (b, 3, S, S) -> (b, 3, s, s), cropped and flipped."""
        flip = torch.rand(draw.size, generator=draw.generator("flip", CPU))[rows] < self.data.flip
        if self.data.crop == "resized":
            boxes = draw_boxes(draw, "crop", self.size_in, self.data.crop_scale, CROP_RATIO)
            return self._resized(pixels, boxes.of(rows), flip)
        if self.data.crop == "none":
            if not self.data.flip:
                return self._centre(pixels)
            start = torch.full((len(rows),), (self.size_in - self.side) // 2)
            return crop(pixels, start, start, flip, self.side)
        reach, margin = self.side // 8, (self.size_in - self.side) // 2
        # black, and only where the cached image has no pixels of its own
        pad = max(0, reach - margin)
        shift = torch.rand((draw.size, 2), generator=draw.generator("crop", CPU))[rows]
        top, left = (margin + pad - reach + (shift * (2 * reach + 1)).long()).unbind(1)
        return crop(F.pad(pixels, (pad,) * 4), top, left, flip, self.side)

    def _resized(self, pixels: Tensor, boxes: Boxes, flip: Tensor) -> Tensor:
        """Each box, resized to s x s: bilinear, without antialiasing."""
        full = self.size_in
        zoom_y, zoom_x = boxes.height / full, boxes.width / full
        move_y, move_x = (
            (2 * boxes.top + boxes.height) / full - 1,
            (2 * boxes.left + boxes.width) / full - 1,
        )
        zoom_x = torch.where(flip, -zoom_x, zoom_x)
        zero = torch.zeros_like(zoom_x)
        theta = (
            torch.stack((zoom_x, zero, move_x, zero, zoom_y, move_y), 1)
            .view(-1, 2, 3)
            .to(pixels.device)
        )
        grid = F.affine_grid(theta, [len(pixels), 3, self.side, self.side], align_corners=False)
        images = F.grid_sample(
            pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
        )
        return images.round_().clamp_(0, 255).to(torch.uint8)

    def _erase(self, images: Tensor, draw: StepRng, rows: Tensor) -> Tensor:
        """Random erasing (Zhong et al. 2020, arXiv 1708.04896), pixel mode of timm: N(0, 1) in a
        box, in place.

        The noise is cut from one field per step, at a place of the sample's own: a field costs four
        images, noise for the whole global batch on each rank would cost the batch.
        """
        chosen = (
            torch.rand(draw.size, generator=draw.generator("erase", CPU))[rows] < self.data.erase
        )
        boxes = draw_boxes(draw, "erase", self.side, ERASE_AREA, ERASE_RATIO).of(rows)
        places = torch.rand((draw.size, 2), generator=draw.generator("erase.place", CPU))[rows]
        places = (places * (self.side + 1)).long()
        hit = (chosen & boxes.found).nonzero().squeeze(1)
        if not len(hit):
            return images
        span, noise = 2 * self.side, draw.generator("erase.noise", images.device)
        field = torch.randn((3, span, span), generator=noise, device=images.device)
        for i in hit.tolist():
            top, left, high, wide = (
                int(t[i]) for t in (boxes.top, boxes.left, boxes.height, boxes.width)
            )
            y, x = places[i].tolist()
            images[i, :, top : top + high, left : left + wide] = field[
                :, y : y + high, x : x + wide
            ]
        return images

    # ---- pairs of samples ------------------------------------------------------------------------
    def _partners(
        self,
        images: Tensor,
        labels: Tensor,
        draw: StepRng,
        pixels: Tensor | None,
        pixel_labels: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Each sample's partner, augmented as it is where it is a sample itself."""
        rows = draw.positions.cpu()
        partner = partner_positions(draw)[rows]
        place = torch.full((draw.size,), -1)
        place[rows] = torch.arange(len(rows))
        own = place[partner]
        if (own >= 0).all():
            own = own.to(images.device)
            return images[own], labels[own]
        if pixels is None or pixel_labels is None:
            raise ValueError(
                "mixing needs partner_pixels and partner_labels where a rank holds a part of "
                "the batch"
            )
        return self._augment(pixels, replace(draw, positions=partner)), pixel_labels

    def _targets(self, labels: Tensor, num_classes: int) -> Tensor:
        smoothing = self.data.smoothing
        return F.one_hot(labels.long(), num_classes) * (1 - smoothing) + smoothing / num_classes

    def _plan_mix(self, draw: StepRng) -> Mix:
        """Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of the global batch, half of the
        samples each where both are on. timm by default draws one weight and one box per batch; here
        each sample has its own."""
        size, side, data = draw.size, self.side, self.data
        blend, cut = (
            self._beta(draw, tag, alpha)
            for tag, alpha in (("mixup", data.mixup), ("cutmix", data.cutmix))
        )
        if data.mixup and data.cutmix:
            cuts = torch.rand(size, generator=draw.generator("mix", CPU)) < 0.5
        else:
            cuts = torch.full((size,), bool(data.cutmix))
        half = (
            side * (1 - cut).sqrt()
        ).long() // 2  # the box is 2 * half wide before the image's edge clips it
        centre = (
            torch.rand((size, 2), generator=draw.generator("cutmix.centre", CPU)) * side
        ).long()
        low, high = (centre - half[:, None]).clamp(min=0), (centre + half[:, None]).clamp(max=side)
        boxes = torch.stack((low[:, 0], high[:, 0], low[:, 1], high[:, 1]), 1) * cuts[:, None]
        kept = 1 - (high - low).prod(1) / side**2
        return Mix(torch.where(cuts, 1.0, blend), boxes, torch.where(cuts, kept, blend))

    @staticmethod
    def _beta(draw: StepRng, tag: str, alpha: float) -> Tensor:
        """(size,) numbers from Beta(alpha, alpha); ones where alpha is 0."""
        if not alpha:
            return torch.ones(draw.size)
        numbers = np.random.default_rng(derive_seed(draw.seed, draw.epoch, draw.step, tag)).beta(
            alpha, alpha, draw.size
        )
        return torch.from_numpy(numbers).float()

    @staticmethod
    def _mix(images: Tensor, others: Tensor, mix: Mix) -> Tensor:
        blend = mix.blend.to(images.device).view(-1, 1, 1, 1)
        mixed = images * blend + others * (1 - blend)
        for i, (top, bottom, left, right) in enumerate(mix.boxes.tolist()):
            if bottom > top and right > left:
                mixed[i, :, top:bottom, left:right] = others[i, :, top:bottom, left:right]
        return mixed
