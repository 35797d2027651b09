"""RandAugment on a batch of uint8 images, without a loop over images.

It is timm's `rand-m<magnitude>-mstd0.5-inc1`.

Cubuk et al. 2020 (arXiv 1909.13719) in the form that DeiT, MEAT and DyTox train with: each of n
operations is one of 15, drawn with replacement, applied with probability 0.5 at a strength drawn
from N(magnitude, 0.5). Instead of one function per image, three families each take all their images
at once: lookup tables, affine maps, and blends with a degenerate image. Tables and blends are
Pillow's. Two deviations from timm: posterize keeps at least 1 bit (timm asks for 0 at high
magnitude, which Pillow 13 refuses), and affine maps are bilinear (timm: bilinear or bicubic, by
chance).

Shapes: b images of a global batch, n of them under one operation; levels are (n,), signed, in [-10,
10].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.rng import StepRng

PROBABILITY = 0.5
STRENGTH_STD = 0.5
STRONGEST = 10.0


@dataclass(frozen=True)
class Policy:
    """The operations on each sample of the global batch.

    ops: (size, n) indices into OPS, -1 for no operation. levels: (size, n) signed strengths. Both
    are on the CPU, so that grouping never waits for the device.
    """

    ops: Tensor
    levels: Tensor

    def of(self, rows: Tensor) -> Policy:
        """Return the policy of some samples of the batch."""
        return replace(self, ops=self.ops[rows], levels=self.levels[rows])


def plan(draw: StepRng, n: int, magnitude: float) -> Policy:
    """Draw the policy of the whole global batch, n operations per image."""
    cpu = torch.device("cpu")
    uniform = torch.rand((draw.size, n, 3), generator=draw.generator("randaugment", cpu))
    choice, chance, sign = uniform.unbind(-1)  # (size, n) each
    spread = torch.randn((draw.size, n), generator=draw.generator("randaugment.level", cpu))
    strength = (magnitude + STRENGTH_STD * spread).clamp(0, STRONGEST)
    op = (choice * len(OPS)).long()
    ops = torch.where(chance < PROBABILITY, op, -1)
    return Policy(ops, strength * torch.where(sign < 0.5, -1.0, 1.0))


def apply(pixels: Tensor, policy: Policy, fill: tuple[int, ...]) -> Tensor:
    """Apply a policy to pixels, uint8 (b, 3, S, S); the shape and type stay.

    fill: the colour outside the image, which affine maps may bring in.
    """
    out = pixels.clone()
    for ops, levels in zip(policy.ops.unbind(1), policy.levels.unbind(1), strict=True):
        for family, operations in FAMILIES.items():
            rows: list[Tensor] = []
            params: list[Tensor] = []
            for name, params_of in operations.items():
                group = (ops == OPS.index(name)).nonzero().squeeze(1)  # images under this operation
                if len(group):
                    rows.append(group)
                    params.append(params_of(out[group.to(out.device)], levels[group]))
            if rows:
                index = torch.cat(rows).to(out.device)
                out[index] = family(out[index], torch.cat(params).to(out.device), fill)
    return out


# ---- lookup tables: operations that map each value of a channel to another -----------------------
def _look_up(pixels: Tensor, tables: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Map each value of a channel by a table. tables: uint8 (n, 3, 256)."""
    values = pixels.flatten(2).long()  # (n, 3, S S)
    return tables.gather(2, values).view_as(pixels)


def _table(values: Tensor) -> Tensor:
    """values (n or 1, 1 or 3, 256) of any type -> uint8 (n, 3, 256).

    They are truncated and clipped as Pillow does.
    """
    return values.clamp(0, 255).to(torch.uint8).expand(-1, 3, -1)


def _values(pixels: Tensor) -> Tensor:
    """Return all values of a channel, (256,)."""
    return torch.arange(256, device=pixels.device)


def _per_image(level: Tensor, pixels: Tensor) -> Tensor:
    """Return a number per image in the shape of a table: (n,) -> (n, 1, 1)."""
    return level.to(pixels.device)[:, None, None]


def _autocontrast(pixels: Tensor, level: Tensor) -> Tensor:
    flat = pixels.flatten(2)
    low = flat.amin(2, keepdim=True).double()  # (n, 3, 1)
    high = flat.amax(2, keepdim=True).double()
    values = _values(pixels)
    # `255.0 / tensor` would multiply by a rounded reciprocal
    scale = torch.full_like(high, 255.0) / (high - low)
    stretched = (values * scale + -low * scale).nan_to_num(0.0)
    return _table(torch.where(high > low, stretched, values.double()))


def _equalize(pixels: Tensor, level: Tensor) -> Tensor:
    flat = pixels.flatten(2).long()
    counts = flat.new_zeros((*flat.shape[:2], 256))  # histograms, (n, 3, 256)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))  # of the largest value, (n, 3, 1)
    step = (flat.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    return _table(torch.where(step > 0, table, _values(pixels)))


def _invert(pixels: Tensor, level: Tensor) -> Tensor:
    return _table((255 - _values(pixels)).expand(len(pixels), 1, -1))


def _posterize(pixels: Tensor, level: Tensor) -> Tensor:
    bits = (4 - (level.abs() / STRONGEST * 4).long()).clamp(min=1)
    bit_mask = 256 - 2 ** (8 - bits)
    return _table(_values(pixels) & _per_image(bit_mask, pixels))


def _solarize(pixels: Tensor, level: Tensor) -> Tensor:
    values = _values(pixels)
    threshold = 256 - (level.abs() / STRONGEST * 256).long()
    threshold = _per_image(threshold, pixels)
    return _table(torch.where(values < threshold, values, 255 - values))


def _solarize_add(pixels: Tensor, level: Tensor) -> Tensor:
    values = _values(pixels)
    amount = (level.abs() / STRONGEST * 110).long()
    amount = _per_image(amount, pixels)
    return _table(torch.where(values < 128, values + amount, values))


def _contrast(pixels: Tensor, level: Tensor) -> Tensor:
    count = pixels[0, 0].numel()
    total = _grey(pixels).long().sum((1, 2, 3))  # (n,)
    mean = (2 * total + count) // (2 * count)  # rounded, as Pillow does
    mean = mean[:, None, None]
    factor = _per_image(_factor(level), pixels)
    return _table(mean + (_values(pixels) - mean) * factor)


def _brightness(pixels: Tensor, level: Tensor) -> Tensor:
    factor = _per_image(_factor(level), pixels)
    return _table(_values(pixels) * factor)


# ---- blends with a degenerate image --------------------------------------------------------------
def _factor(level: Tensor) -> Tensor:
    """Return the weight of the image, 0.1 to 1.9, in timm's `increasing` form.

    1 is the image itself, 0 the degenerate one; above 1 the difference is exaggerated.
    """
    return (1 + 0.9 * level / STRONGEST).clamp(min=0.1)


def _blend(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Blend with a degenerate image. params: (n, 2), the factor, and 0 for grey or 1 for smooth."""
    factor = params[:, 0].view(-1, 1, 1, 1)
    is_smooth = params[:, 1].view(-1, 1, 1, 1) > 0
    degenerate = torch.where(is_smooth, _smooth(pixels), _grey(pixels)).float()
    blended = degenerate + factor * (pixels.float() - degenerate)
    return blended.clamp_(0, 255).to(torch.uint8)


def _color(pixels: Tensor, level: Tensor) -> Tensor:
    return torch.stack((_factor(level), torch.zeros_like(level)), 1)


def _sharpness(pixels: Tensor, level: Tensor) -> Tensor:
    return torch.stack((_factor(level), torch.ones_like(level)), 1)


def _grey(pixels: Tensor) -> Tensor:
    """Return the luma (n, 1, S, S) in Pillow's fixed-point form."""
    red, green, blue = pixels.int().unbind(1)
    weighted = red * 19595 + green * 38470 + blue * 7471
    return ((weighted + 0x8000) >> 16).unsqueeze(1)


def _smooth(pixels: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH, exactly, in integers: a 3x3 box with weight 5 in the middle.

    The outermost pixels stay.
    """
    image = pixels.int()
    rows = image[:, :, :-2] + image[:, :, 1:-1] + image[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    total = box + 4 * image[:, :, 1:-1, 1:-1]
    smooth = image.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26
    return smooth


# ---- affine maps ---------------------------------------------------------------------------------
def _warp(pixels: Tensor, theta: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Apply affine maps. theta: (n, 2, 3) from output to input coordinates, both in [-1, 1].

    Pixels from outside the image have the colour `fill`.
    """
    colour = torch.tensor(fill, dtype=torch.float32, device=pixels.device).view(3, 1, 1)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(
        pixels.float() - colour, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return (moved + colour).round_().clamp_(0, 255).to(torch.uint8)


def _theta(rows: list[list[float]]) -> Tensor:
    """Return affine maps (n, 2, 3) from their six numbers each."""
    return torch.tensor(rows, dtype=torch.float32).view(-1, 2, 3)


def _rotate(pixels: Tensor, level: Tensor) -> Tensor:
    # Scalar cosines: the vectorised one may round differently in a batch of another size.
    rows = []
    for strength in level.tolist():
        angle = math.radians(30.0 * strength / STRONGEST)
        cos = math.cos(angle)
        sin = math.sin(angle)
        rows.append([cos, -sin, 0, sin, cos, 0])
    return _theta(rows)


def _shear_x(pixels: Tensor, level: Tensor) -> Tensor:
    shears = (0.3 * level / STRONGEST).tolist()
    return _theta([[1, s, s, 0, 1, 0] for s in shears])  # about the top edge


def _shear_y(pixels: Tensor, level: Tensor) -> Tensor:
    shears = (0.3 * level / STRONGEST).tolist()
    return _theta([[1, 0, 0, s, 1, s] for s in shears])  # about the left edge


def _translate_x(pixels: Tensor, level: Tensor) -> Tensor:
    shifts = (0.45 * level / STRONGEST).tolist()
    return _theta([[1, 0, 2 * s, 0, 1, 0] for s in shifts])


def _translate_y(pixels: Tensor, level: Tensor) -> Tensor:
    shifts = (0.45 * level / STRONGEST).tolist()
    return _theta([[1, 0, 0, 0, 1, 2 * s] for s in shifts])


# (pixels (n, 3, S, S), parameters of the operation for each image, fill) -> pixels
Family = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
# (pixels (n, 3, S, S), levels (n,)) -> parameters for its family
Operation = Callable[[Tensor, Tensor], Tensor]
FAMILIES: dict[Family, dict[str, Operation]] = {
    _look_up: {
        "autocontrast": _autocontrast,
        "equalize": _equalize,
        "invert": _invert,
        "posterize": _posterize,
        "solarize": _solarize,
        "solarize_add": _solarize_add,
        "contrast": _contrast,
        "brightness": _brightness,
    },
    _blend: {"color": _color, "sharpness": _sharpness},
    _warp: {
        "rotate": _rotate,
        "shear_x": _shear_x,
        "shear_y": _shear_y,
        "translate_x": _translate_x,
        "translate_y": _translate_y,
    },
}
OPS = tuple(name for names in FAMILIES.values() for name in names)
