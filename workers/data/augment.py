"""Augmentation: turn batches of decoded uint8 images into model inputs, on the device.

A pixel source (`workers/data/sources.py`) decodes images and gives their pixels in the form of
`Augment.view`. `Augment.plan` draws the random decisions for a batch, and `Augment.__call__`
applies them.

The order is crop, flip, RandAugment, normalise, erase, mix. Every decision (crop, operation,
mixing weight) is drawn on the CPU for the whole global batch from (seed, epoch, step), and each
rank uses the rows of its own samples. Therefore decisions do not depend on the number of ranks or
the device, and need not wait for it. Only the noise of erased boxes is drawn on the device.

Letters in shapes: b samples of this rank, k samples with their mixing partners (see `Plan`), S side
of the square pixels, s side of the model's input, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data import randaugment
from workers.data.crops import CropDraws, View
from workers.data.image_maker import Normalisation
from workers.data.memory import TensorPool
from workers.data.order import Ints, find_partner_positions
from workers.data.upload import to_device
from workers.job import BackboneSettings, DataSettings
from workers.rng import StepRng, derive_seed

CPU = torch.device("cpu")
ATTEMPTS = 10  # random boxes per image; if none fits, the image is not erased
LONGEST_SIDE = 3  # default of `data.longest_side`, as a multiple of the side of the input
NOISE_IMAGES = 2  # amount of noise that a step draws for erasing, as a number of images
ERASE_AREA, ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


def crop(pixels: Tensor, top: Tensor, left: Tensor, flip: Tensor, side: int) -> Tensor:
    """Crop and then flip images.

    Args:
        pixels: Images (b, C, S, S).
        top: First row of each crop, (b,).
        left: First column of each crop, (b,).
        flip: Whether each crop is mirrored, (b,).
        side: Side of the crops.

    Returns:
        Crops (b, C, side, side).
    """
    if pixels.device.type == "cpu":  # a loop over slices is 2 to 4 times faster than the gather
        source = pixels.numpy()
        out = np.empty((*pixels.shape[:2], side, side), np.uint8)
        boxes = zip(source, top.tolist(), left.tolist(), flip.tolist(), strict=True)
        for i, (image, y, x, is_flipped) in enumerate(boxes):
            window = image[:, y : y + side, x : x + side]  # (C, side, side)
            if is_flipped:
                window = window[:, :, ::-1]
            out[i] = window
        return torch.from_numpy(out)
    return crop_by_gather(pixels, top, left, flip, side)


def crop_by_gather(pixels: Tensor, top: Tensor, left: Tensor, flip: Tensor, side: int) -> Tensor:
    """Do the same as `crop` with one gather. On a GPU, a loop would launch a kernel per image."""
    # a view (b, C, S-side+1, S-side+1, side, side)
    windows = pixels.unfold(2, side, 1).unfold(3, side, 1)
    rows = torch.arange(len(pixels), device=pixels.device)
    out = windows[rows, :, top, left]  # (b, C, side, side)
    return torch.where(flip.view(-1, 1, 1, 1), out.flip(-1), out)


@dataclass(frozen=True)
class Boxes:
    """Rectangles in pixels, one per sample, all tensors (b,) on the CPU.

    `fits` is False if no attempt fitted into the image.
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    fits: Tensor

    def corners(self) -> Tensor:
        """Return top, bottom, left and right of each box, (b, 4)."""
        edges = (self.top, self.top + self.height, self.left, self.left + self.width)
        return torch.stack(edges, 1)

    def of(self, rows: Tensor) -> Boxes:
        """Return the boxes of some samples."""
        return Boxes(
            self.top[rows], self.left[rows], self.height[rows], self.width[rows], self.fits[rows]
        )


def draw_boxes(
    draw: StepRng, tag: str, side: int, area: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Draw a box inside a square of `side` pixels for each sample of the global batch.

    The box is the first of ATTEMPTS random boxes that fits, or the whole square if none fits.

    Args:
        draw: Random numbers of the step.
        tag: Purpose of the boxes; another tag gives other random numbers.
        side: Side of the square in pixels.
        area: Range of the share of the square that a random box covers. The share is uniform.
        ratio: Range of height / width. The logarithm of height / width is uniform.
    """
    u = torch.rand(
        (draw.size, ATTEMPTS, 2), generator=draw.generator(f"{tag}.box", CPU), dtype=torch.float64
    )
    pixels = (area[0] + (area[1] - area[0]) * u[..., 0]) * side * side
    low, high = math.log(ratio[0]), math.log(ratio[1])
    tall = torch.exp(low + (high - low) * u[..., 1])
    heights = (pixels * tall).sqrt().round().long()  # (size, ATTEMPTS)
    widths = (pixels / tall).sqrt().round().long()
    attempts_fit = (heights <= side) & (widths <= side) & (heights > 0) & (widths > 0)
    first = attempts_fit.int().argmax(1, keepdim=True)  # (size, 1)
    fits = attempts_fit.gather(1, first).squeeze(1)
    height = torch.where(fits, heights.gather(1, first).squeeze(1), side)
    width = torch.where(fits, widths.gather(1, first).squeeze(1), side)
    corner = torch.rand(
        (draw.size, 2), generator=draw.generator(f"{tag}.corner", CPU), dtype=torch.float64
    )
    top = (corner[:, 0] * (side - height + 1)).long()
    left = (corner[:, 1] * (side - width + 1)).long()
    return Boxes(top, left, height, width, fits)


def inside(corners: Tensor, side: int) -> Tensor:
    """Return a mask of the pixels in boxes.

    Args:
        corners: Top, bottom, left and right of each box, (b, 4).
        side: Side of the mask.

    Returns:
        Float mask (b, 1, side, side): 1 inside the box, else 0.
    """
    top, bottom, left, right = corners.unsqueeze(-1).unbind(1)  # (b, 1) each
    line = torch.arange(side, device=corners.device)
    rows = ((line >= top) & (line < bottom)).float()  # (b, side)
    columns = ((line >= left) & (line < right)).float()
    return (rows.unsqueeze(2) * columns.unsqueeze(1)).unsqueeze(1)


def blend_into(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Return images * (1 - share) + others * share, with shapes that broadcast to (b, C, s, s).

    `images` and `others` are overwritten. With a share of 0 or 1, the result is bit-identical to
    `images` or `others`.
    """
    return images.mul_(1 - share).add_(others.mul_(share))


@dataclass(frozen=True)
class Mix:
    """Mixing of samples with their partners.

    Attributes:
        blend: Weight of the sample's pixels in mixup, (b,); 1 for cutmix.
        boxes: Top, bottom, left and right of the partner's box in cutmix, (b, 4); empty for mixup.
        share: Weight of the sample's label in the target, (b,).
    """

    blend: Tensor
    boxes: Tensor
    share: Tensor

    def of(self, rows: Tensor) -> Mix:
        """Return the mixing of some samples."""
        return Mix(self.blend[rows], self.boxes[rows], self.share[rows])


def erase(images: Tensor, erased: Tensor, noise: Tensor) -> Tensor:
    """Fill the boxes of images with noise, in place.

    Args:
        images: Images (k, 3, s, s).
        erased: Boxes and starts of the noise, (k, 5); see `Plan`.
        noise: Noise (m,), with a window for each image.

    Returns:
        The images.
    """
    if images.device.type != "cpu":
        return erase_by_gather(images, erased, noise)
    pixels = images.numpy()
    values = noise.numpy()
    for image, (top, bottom, left, right, start) in zip(pixels, erased.tolist(), strict=True):
        if top < bottom:
            window = values[start : start + image.size].reshape(image.shape)
            image[:, top:bottom, left:right] = window[:, top:bottom, left:right]
    return images


def erase_by_gather(images: Tensor, erased: Tensor, noise: Tensor) -> Tensor:
    """Do the same as `erase`, without a loop over images and without waiting for the device."""
    windows = noise.unfold(0, images[0].numel(), 1)
    patches = windows.index_select(0, erased[:, 4]).view_as(images)
    return blend_into(images, patches, inside(erased[:, :4], images.shape[-1]))


def mix_into(mixed: Tensor, images: Tensor, partners: Tensor, mix: Mix) -> Tensor:
    """Mix images with their partners into `mixed`, on a CPU.

    Args:
        mixed: Output (b, 3, s, s).
        images: Images (k, 3, s, s).
        partners: For each of the first b images, its partner's index in `images`, (b,).
        mix: Weights and boxes.

    Returns:
        `mixed`.
    """
    pixels = images.numpy()
    outputs = mixed.numpy()
    partner_weights = 1 - mix.blend  # weights of the partner's pixels in mixup
    image_weights = 1 - partner_weights
    scaled = np.empty_like(pixels[0])
    for i, (top, bottom, left, right) in enumerate(mix.boxes.tolist()):
        partner = pixels[int(partners[i])]
        np.multiply(pixels[i], image_weights[i].numpy(), out=outputs[i])
        if partner_weights[i]:
            np.multiply(partner, partner_weights[i].numpy(), out=scaled)
            outputs[i] += scaled
        outputs[i, :, top:bottom, left:right] = partner[:, top:bottom, left:right]
    return mixed


def mix_by_blend(images: Tensor, partners: Tensor, mix: Mix) -> Tensor:
    """Do the same as `mix_into`, without a loop over images and without waiting for the device.

    `images` is overwritten.
    """
    others = images.index_select(0, partners)
    in_box = inside(mix.boxes, images.shape[-1])
    blend = mix.blend.view(-1, 1, 1, 1)
    return blend_into(images[: len(partners)], others, 1 - blend * (1 - in_box))


@dataclass(frozen=True)
class Plan:
    """Random numbers that turn the pixels of k samples into the images of b samples.

    The k samples are the b samples, followed by the partners with which they are mixed and which
    are not among the b samples. The numbers are drawn on the host, and are copied to the device in
    one transfer.

    Attributes:
        positions: Positions in the global batch, the b samples first, (k,), on the CPU.
        windows: Top and left of the crop, and whether it is mirrored, (k, 3). None if all crops are
            central and not mirrored, or if the pixel source cuts them.
        schedule: Schedule of RandAugment, or None.
        erased: Top, bottom, left and right of the erased box, and start of the noise, (k, 5). None
            without erasing.
        partners: Index of each sample's partner among the k samples, (b,). None without mixing.
        mix: Mixing of the b samples, or None.
    """

    positions: Tensor
    windows: Tensor | None = None
    schedule: randaugment.Schedule | None = None
    erased: Tensor | None = None
    partners: Tensor | None = None
    mix: Mix | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors for the device."""
        optional = (self.windows, self.erased, self.partners)
        tensors = [tensor for tensor in optional if tensor is not None]
        if self.mix is not None:
            tensors += [self.mix.blend, self.mix.boxes, self.mix.share]
        if self.schedule is not None:
            tensors += self.schedule.tensors()
        return tensors

    def with_tensors(self, tensors: list[Tensor]) -> Plan:
        """Return the plan with its tensors replaced by copies, in the order of `tensors()`."""
        copies = iter(tensors)
        return Plan(
            positions=self.positions,
            windows=None if self.windows is None else next(copies),
            erased=None if self.erased is None else next(copies),
            partners=None if self.partners is None else next(copies),
            mix=None if self.mix is None else Mix(next(copies), next(copies), next(copies)),
            schedule=self.schedule and self.schedule.with_tensors(list(copies)),
        )


class Augment:
    """Turn pixels into model inputs and labels into targets, according to `DataSettings`.

    Augmentation is random only in training.
    """

    def __init__(self, data: DataSettings, backbone: BackboneSettings, training: bool):
        self.data = data
        self.training = training
        self.side = backbone.img_size
        self.interpolation = backbone.interpolation
        self.size_in = round(backbone.img_size / backbone.crop_pct)  # side before the centre crop
        self.view = self._view()
        # Mean colour, for pixels that RandAugment takes from outside the image.
        self.fill = tuple(min(255, round(255 * m)) for m in backbone.mean)
        # One attribute for both tensors: a thread must not see one on the device, one on the CPU.
        self.normalisation = Normalisation.from_statistics(backbone.mean, backbone.std)
        self.pool = TensorPool()  # memory of batches on the CPU

    @property
    def needs_partner(self) -> bool:
        """Whether samples are mixed in pairs."""
        return self.training and bool(self.data.mixup or self.data.cutmix)

    def _view(self) -> View:
        """Return the form in which the source gives pixels.

        In training with `crop: resized` it gives crops of the side of the model's input, otherwise
        central squares of side `size_in`.
        """
        if not (self.training and self.data.crop == "resized"):
            return View(self.size_in, interpolation=self.interpolation)
        return View(self.side, self.data.longest_side or LONGEST_SIDE * self.side)

    def draw_crops(self, rng: StepRng, positions: Ints) -> CropDraws | None:
        """Draw the crops of a step's samples. Return None if the source gives central squares.

        Args:
            rng: Random numbers of the step.
            positions: Positions of the samples in the global batch, (k,).
        """
        if self.view.longest_side is None:
            return None
        return CropDraws.draw(
            rng, torch.from_numpy(positions), self.data.crop_scale, self.data.flip
        )

    @property
    def only_crops(self) -> bool:
        """Whether training pixels are only cropped and flipped before they are normalised.

        A source crops and flips by itself, so in this case it can give normalised float32 pixels.
        """
        return self.training and self.data.crop == "resized" and not self.data.randaugment

    @property
    def is_deterministic(self) -> bool:
        """Whether an image gives the same input in every epoch, and in evaluation."""
        if not self.training:
            return True
        data = self.data
        is_random = data.flip or data.randaugment or data.erase or self.needs_partner
        return data.crop == "none" and not is_random

    def __call__(
        self,
        pixels: Tensor,
        labels: Tensor,
        num_classes: int | None,
        rng: StepRng,
        plan: Plan | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Augment a batch.

        Args:
            pixels: uint8 (k, 3, S, S) in the form of `view`, at the positions of `plan`. If
                `only_crops` is true, they can also be float32 and normalised.
            labels: Labels (k,).
            num_classes: Number K of outputs. None if several tasks in the batch have no common
                output space: then images are not mixed, and labels are not smoothed.
            rng: Random numbers of the step.
            plan: Plan with tensors on the device. Default: a new plan.

        Returns:
            Images float32 (b, 3, s, s), and soft targets (b, K). The targets are None if the labels
            are sufficient.
        """
        if plan is None:
            plan = self.plan(rng, num_classes)
            plan = plan.with_tensors(to_device(plan.tensors(), pixels.device))
        shape = (len(plan.positions), 3, self.view.side, self.view.side)
        if pixels.shape != shape:
            raise ValueError(f"pixels: shape {tuple(pixels.shape)}, expected {shape}")
        if not self.training:
            return self.normalise(self._centre(pixels)), None
        images = self._images(pixels, plan, rng)
        targets = self.targets(labels[: len(images)], num_classes)
        if targets is not None and plan.mix is not None and plan.partners is not None:
            share = plan.mix.share.unsqueeze(1)  # (b, 1)
            partner_targets = self._targets(labels[plan.partners], targets.shape[1])
            targets = share * targets + (1 - share) * partner_targets
        return images, targets

    def targets(self, labels: Tensor, num_classes: int | None) -> Tensor | None:
        """Return soft targets (b, K) before mixing, or None if the labels (b,) are sufficient.

        Labels are sufficient without mixing and smoothing, or without a common output space.
        """
        is_soft = self.training and (self.needs_partner or self.data.smoothing)
        if not is_soft or num_classes is None:
            return None
        return self._targets(labels, num_classes)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 (b, 3, s, s) to float32, normalised with the backbone's statistics."""
        normalisation = self._move_normalisation(pixels.device)
        if pixels.device.type != "cpu":
            return pixels.float().mul_(normalisation.scale).add_(normalisation.shift)
        images = self.pool.empty(pixels.shape, torch.float32)
        normalisation.apply(pixels, images)
        return images

    def _move_normalisation(self, device: torch.device) -> Normalisation:
        """Return the normalisation on a device, and keep the copy. Several threads call this."""
        normalisation = self.normalisation
        if normalisation.scale.device != device:
            normalisation = Normalisation(
                normalisation.scale.to(device), normalisation.shift.to(device)
            )
            self.normalisation = normalisation
        return normalisation

    # ---- random numbers, drawn on the host -------------------------------------------------------
    def positions(self, rng: StepRng, num_classes: int | None) -> Tensor:
        """Return the positions (k,) of a rank's samples, then of partners that are not among them.

        Args:
            rng: Random numbers of the step.
            num_classes: See `__call__`.
        """
        samples = rng.positions
        if not self._mixes(num_classes):
            return samples
        partners = find_partner_positions(rng.batch_size or rng.size, rng.size)[samples]
        missing = partners[~torch.isin(partners, samples)].unique()
        return torch.cat((samples, missing))

    def plan(self, rng: StepRng, num_classes: int | None) -> Plan:
        """Draw the random numbers of a rank's samples and partners, on the CPU.

        A partner gets the same augmentation as the sample at its position in the global batch.
        """
        positions = self.positions(rng, num_classes)
        if not self.training:
            return Plan(positions)
        partners = None
        mix = None
        if self._mixes(num_classes):
            index_of = torch.empty(rng.size, dtype=torch.int64)
            index_of[positions] = torch.arange(len(positions))
            all_partners = find_partner_positions(rng.batch_size or rng.size, rng.size)
            partners = index_of[all_partners[rng.positions]]
            mix = self._plan_mix(rng).of(rng.positions)
        schedule = None
        if self.data.randaugment:
            policy = randaugment.draw_policy(rng, self.data.randaugment, self.data.magnitude)
            schedule = randaugment.schedule(policy.of(positions))
        return Plan(
            positions,
            self._plan_windows(rng, positions),
            schedule,
            self._plan_erasing(rng)[positions] if self.data.erase else None,
            partners,
            mix,
        )

    def _mixes(self, num_classes: int | None) -> bool:
        return self.needs_partner and num_classes is not None

    def _plan_windows(self, rng: StepRng, positions: Tensor) -> Tensor | None:
        """Draw `Plan.windows`. The corners refer to the image after `_padding` was added."""
        data = self.data
        if data.crop == "resized" or (data.crop == "none" and not data.flip):
            return None
        flip = torch.rand(rng.size, generator=rng.generator("flip", CPU))[positions] < data.flip
        margin = (self.size_in - self.side) // 2
        corners = torch.full((len(positions), 2), margin)
        if data.crop == "pad":
            reach = self.side // 8
            shift = torch.rand((rng.size, 2), generator=rng.generator("crop", CPU))[positions]
            corners += self._padding - reach + (shift * (2 * reach + 1)).long()
        return torch.cat((corners, flip.unsqueeze(1)), 1)

    @property
    def _padding(self) -> int:
        """Width in pixels of the black border that `crop: pad` adds around an image."""
        if self.data.crop != "pad":
            return 0
        return max(0, self.side // 8 - (self.size_in - self.side) // 2)

    def _plan_erasing(self, draw: StepRng) -> Tensor:
        """Draw random erasing: a box with N(0, 1) noise, as in timm's pixel mode.

        Source: Zhong et al. 2020 (arXiv 1708.04896). The box of a sample without erasing is empty.

        Returns:
            `Plan.erased` for the whole global batch, (size, 5).
        """
        chance = torch.rand(draw.size, generator=draw.generator("erase", CPU))
        boxes = draw_boxes(draw, "erase", self.side, ERASE_AREA, ERASE_RATIO)
        corners = boxes.corners()
        is_erased = (chance < self.data.erase) & boxes.fits
        start = torch.rand(
            draw.size, generator=draw.generator("erase.place", CPU), dtype=torch.float64
        )
        start = (start * (NOISE_IMAGES - 1) * 3 * self.side**2).long()
        return torch.cat((corners * is_erased.unsqueeze(1), start.unsqueeze(1)), 1)

    # ---- pixels to images ------------------------------------------------------------------------
    def _images(self, pixels: Tensor, plan: Plan, draw: StepRng) -> Tensor:
        """Make images float32 (b, 3, s, s) from pixels (k, 3, S, S)."""
        pixels = self._crop(pixels, plan.windows)
        if plan.schedule is not None:
            pixels = randaugment.apply(pixels, plan.schedule, self.fill)
        images = pixels if pixels.is_floating_point() else self.normalise(pixels)
        if plan.erased is not None:
            images = erase(images, plan.erased, self._noise(draw, pixels.device))
        if plan.mix is None or plan.partners is None:
            return images
        if images.device.type == "cpu":
            mixed = self.pool.empty((len(plan.partners), *images.shape[1:]), torch.float32)
            return mix_into(mixed, images, plan.partners, plan.mix)
        return mix_by_blend(images, plan.partners, plan.mix)

    def _noise(self, draw: StepRng, device: torch.device) -> Tensor:
        """Draw N(0, 1) noise, the same on all ranks: a vector of NOISE_IMAGES * 3 * s * s numbers.

        Each sample uses a window of this vector. If each sample had its own noise, each rank would
        have to draw the noise of the whole global batch.
        """
        size = NOISE_IMAGES * 3 * self.side**2
        return torch.randn(size, generator=draw.generator("erase.noise", device), device=device)

    def _centre(self, pixels: Tensor) -> Tensor:
        start = (self.size_in - self.side) // 2
        return pixels[:, :, start : start + self.side, start : start + self.side]

    def _crop(self, pixels: Tensor, windows: Tensor | None) -> Tensor:
        """Crop and flip pixels: (k, 3, S, S) -> (k, 3, s, s)."""
        if self.data.crop == "resized":
            return pixels  # the source has cropped and flipped them
        if windows is None:
            return self._centre(pixels)
        if self._padding:
            pixels = F.pad(pixels, (self._padding,) * 4)
        top, left, flip = windows.unbind(1)
        return crop(pixels, top, left, flip.bool(), self.side)

    def _targets(self, labels: Tensor, num_classes: int) -> Tensor:
        smoothing = self.data.smoothing
        return F.one_hot(labels.long(), num_classes) * (1 - smoothing) + smoothing / num_classes

    def _plan_mix(self, draw: StepRng) -> Mix:
        """Draw mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) for the global batch.

        If both are on, each sample uses mixup or cutmix, with probability 0.5 each. Each sample has
        its own weight or box. timm by default draws one weight or one box per batch.
        """
        size = draw.size
        side = self.side
        data = self.data
        blend = self._beta(draw, "mixup", data.mixup)
        uncut = self._beta(draw, "cutmix", data.cutmix)
        if data.mixup and data.cutmix:
            is_cutmix = torch.rand(size, generator=draw.generator("mix", CPU)) < 0.5
        else:
            is_cutmix = torch.full((size,), bool(data.cutmix))
        # `uncut` is the share of the area that the sample keeps. The box has height and width
        # 2 * half before it is clipped to the image; `area_left` is the share after clipping.
        half = (side * (1 - uncut).sqrt()).long() // 2
        centre = torch.rand((size, 2), generator=draw.generator("cutmix.centre", CPU)) * side
        centre = centre.long()  # (size, 2): y, x
        low = (centre - half[:, None]).clamp(min=0)
        high = (centre + half[:, None]).clamp(max=side)
        boxes = torch.stack((low[:, 0], high[:, 0], low[:, 1], high[:, 1]), 1)
        boxes = boxes * is_cutmix[:, None]
        area_left = 1 - (high - low).prod(1) / side**2
        return Mix(
            blend=torch.where(is_cutmix, 1.0, blend),
            boxes=boxes,
            share=torch.where(is_cutmix, area_left, blend),
        )

    @staticmethod
    def _beta(draw: StepRng, tag: str, alpha: float) -> Tensor:
        """Draw (size,) numbers from Beta(alpha, alpha). Return ones if alpha is 0."""
        if not alpha:
            return torch.ones(draw.size)
        generator = np.random.default_rng(derive_seed(draw.seed, draw.epoch, draw.step, tag))
        return torch.from_numpy(generator.beta(alpha, alpha, draw.size)).float()
