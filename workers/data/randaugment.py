"""RandAugment on a batch of uint8 images: timm's `rand-m<magnitude>-mstd0.5-inc1`, without a loop
over images.

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

PROBABILITY, STRENGTH_STD, STRONGEST = 0.5, 0.5, 10.0


@dataclass(frozen=True)
class Policy:
    """What happens to each sample of the global batch. ops: (size, n) positions in OPS, -1 where
    nothing happens. levels: (size, n) signed strengths. Both on the CPU, so that grouping never
    waits for the device."""

    ops: Tensor
    levels: Tensor

    def of(self, rows: Tensor) -> Policy:
        return replace(self, ops=self.ops[rows], levels=self.levels[rows])


def plan(draw: StepRng, n: int, magnitude: float) -> Policy:
    """The policy of the whole global batch: n operations per image."""
    cpu = torch.device("cpu")
    choice, chance, sign = torch.rand(
        (draw.size, n, 3), generator=draw.generator("randaugment", cpu)
    ).unbind(-1)
    spread = torch.randn((draw.size, n), generator=draw.generator("randaugment.level", cpu))
    strength = magnitude + STRENGTH_STD * spread
    ops = torch.where(chance < PROBABILITY, (choice * len(OPS)).long(), -1)
    return Policy(ops, strength.clamp(0, STRONGEST) * torch.where(sign < 0.5, -1.0, 1.0))


def apply(pixels: Tensor, policy: Policy, fill: tuple[int, ...]) -> Tensor:
    """pixels uint8 (b, 3, S, S) -> the same shape and type. fill: colour that affine maps bring in
    from outside."""
    out = pixels.clone()
    for ops, levels in zip(policy.ops.unbind(1), policy.levels.unbind(1), strict=True):
        for family, names in FAMILIES.items():
            rows, params = [], []
            for name in names:
                group = (ops == OPS.index(name)).nonzero().squeeze(1)
                if len(group):
                    rows.append(group)
                    params.append(names[name](out[group.to(out.device)], levels[group]))
            if rows:
                index = torch.cat(rows).to(out.device)
                out[index] = family(out[index], torch.cat(params).to(out.device), fill)
    return out


# ---- lookup tables: operations that map each value of a channel to another -----------------------
def _look_up(pixels: Tensor, tables: Tensor, fill: tuple[int, ...]) -> Tensor:
    """tables: uint8 (n, 3, 256)."""
    return tables.gather(2, pixels.flatten(2).long()).view_as(pixels)


def _table(values: Tensor) -> Tensor:
    """values (n or 1, 1 or 3, 256), any type, truncated and clipped as Pillow does -> uint8 (n, 3,
    256)."""
    return values.clamp(0, 255).to(torch.uint8).expand(-1, 3, -1)


def _values(pixels: Tensor) -> Tensor:
    return torch.arange(256, device=pixels.device)


def _per_image(level: Tensor, pixels: Tensor) -> Tensor:
    return level.to(pixels.device)[:, None, None]


def _autocontrast(pixels: Tensor, level: Tensor) -> Tensor:
    flat = pixels.flatten(2)
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    # `255.0 / tensor` would multiply by a rounded reciprocal
    scale = torch.full_like(high, 255.0) / (high - low)
    stretched = (_values(pixels) * scale + -low * scale).nan_to_num(0.0)
    return _table(torch.where(high > low, stretched, _values(pixels).double()))


def _equalize(pixels: Tensor, level: Tensor) -> Tensor:
    flat = pixels.flatten(2).long()
    counts = flat.new_zeros((*flat.shape[:2], 256)).scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    return _table(torch.where(step > 0, table, _values(pixels)))


def _invert(pixels: Tensor, level: Tensor) -> Tensor:
    return _table((255 - _values(pixels)).expand(len(pixels), 1, -1))


def _posterize(pixels: Tensor, level: Tensor) -> Tensor:
    bits = (4 - (level.abs() / STRONGEST * 4).long()).clamp(min=1)
    return _table(_values(pixels) & _per_image(256 - 2 ** (8 - bits), pixels))


def _solarize(pixels: Tensor, level: Tensor) -> Tensor:
    values, threshold = (
        _values(pixels),
        _per_image(256 - (level.abs() / STRONGEST * 256).long(), pixels),
    )
    return _table(torch.where(values < threshold, values, 255 - values))


def _solarize_add(pixels: Tensor, level: Tensor) -> Tensor:
    values, amount = _values(pixels), _per_image((level.abs() / STRONGEST * 110).long(), pixels)
    return _table(torch.where(values < 128, values + amount, values))


def _contrast(pixels: Tensor, level: Tensor) -> Tensor:
    count = pixels[0, 0].numel()
    # rounded, as Pillow does
    mean = (2 * _grey(pixels).long().sum((1, 2, 3)) + count) // (2 * count)
    mean = mean[:, None, None]
    return _table(mean + (_values(pixels) - mean) * _per_image(_factor(level), pixels))


def _brightness(pixels: Tensor, level: Tensor) -> Tensor:
    return _table(_values(pixels) * _per_image(_factor(level), pixels))


# ---- blends with a degenerate image --------------------------------------------------------------
def _factor(level: Tensor) -> Tensor:
    """1 is the image itself, 0 the degenerate one, above 1 exaggerates. timm's `increasing` form,
    0.1 to 1.9."""
    return (1 + 0.9 * level / STRONGEST).clamp(min=0.1)


def _blend(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    """params: (n, 2), the factor and which degenerate image: 0 grey, 1 smooth."""
    factor, smooth = params[:, 0].view(-1, 1, 1, 1), params[:, 1].view(-1, 1, 1, 1)
    degenerate = torch.where(smooth > 0, _smooth(pixels), _grey(pixels)).float()
    return (degenerate + factor * (pixels.float() - degenerate)).clamp_(0, 255).to(torch.uint8)


def _color(pixels: Tensor, level: Tensor) -> Tensor:
    return torch.stack((_factor(level), torch.zeros_like(level)), 1)


def _sharpness(pixels: Tensor, level: Tensor) -> Tensor:
    return torch.stack((_factor(level), torch.ones_like(level)), 1)


def _grey(pixels: Tensor) -> Tensor:
    """Luma (n, 1, S, S) in Pillow's fixed-point form."""
    red, green, blue = pixels.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).unsqueeze(1)


def _smooth(pixels: Tensor) -> Tensor:
    """Pillow's SMOOTH: a 3x3 box with weight 5 in the middle; the outermost pixels stay. Exact: in
    integers."""
    out = pixels.int()
    rows = out[:, :, :-2] + out[:, :, 1:-1] + out[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * out[:, :, 1:-1, 1:-1]
    smooth = out.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26
    return smooth


# ---- affine maps ---------------------------------------------------------------------------------
def _warp(pixels: Tensor, theta: Tensor, fill: tuple[int, ...]) -> Tensor:
    """theta: (n, 2, 3) from output to input coordinates, both in [-1, 1]. Outside the image there
    is `fill`."""
    colour = torch.tensor(fill, dtype=torch.float32, device=pixels.device).view(3, 1, 1)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(
        pixels.float() - colour, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return (moved + colour).round_().clamp_(0, 255).to(torch.uint8)


def _theta(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(-1, 2, 3)


def _rotate(pixels: Tensor, level: Tensor) -> Tensor:
    # Scalar cosines: the vectorised one may round differently in a batch of another size.
    angles = [math.radians(30.0 * v / STRONGEST) for v in level.tolist()]
    return _theta([[math.cos(a), -math.sin(a), 0, math.sin(a), math.cos(a), 0] for a in angles])


def _shear_x(pixels: Tensor, level: Tensor) -> Tensor:
    # about the top edge
    return _theta([[1, s, s, 0, 1, 0] for s in (0.3 * level / STRONGEST).tolist()])


def _shear_y(pixels: Tensor, level: Tensor) -> Tensor:
    # about the left edge
    return _theta([[1, 0, 0, s, 1, s] for s in (0.3 * level / STRONGEST).tolist()])


def _translate_x(pixels: Tensor, level: Tensor) -> Tensor:
    return _theta([[1, 0, 2 * s, 0, 1, 0] for s in (0.45 * level / STRONGEST).tolist()])


def _translate_y(pixels: Tensor, level: Tensor) -> Tensor:
    return _theta([[1, 0, 0, 0, 1, 2 * s] for s in (0.45 * level / STRONGEST).tolist()])


# family -> {operation: (its pixels (n, 3, S, S), its levels (n,)) -> what the family needs to apply
# it}
FAMILIES: dict[
    Callable[[Tensor, Tensor, tuple[int, ...]], Tensor],
    dict[str, Callable[[Tensor, Tensor], Tensor]],
] = {
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
