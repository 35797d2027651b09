"""RandAugment on a batch of uint8 images, without a loop over images or waiting for the device.

This is timm's `rand-m<magnitude>-mstd0.5-inc1`: Cubuk et al. 2020 (arXiv 1909.13719) in the form
that DeiT, MEAT and DyTox use. An image gets a fixed number of operations. Each is one of 15, drawn
with replacement, and is applied with probability 0.5. Its strength is drawn from a normal
distribution with mean `magnitude` and standard deviation 0.5, and clipped to [0, 10].

The host sorts the images by operation. Therefore each operation gets a slice of the batch, whose
length is known before the device has computed anything. Lookup tables and blends give the same
values as Pillow. There are two deviations from timm. Posterize keeps at least 1 bit; timm asks for
0 bits at strength 10, which Pillow 13 refuses. Affine maps are bilinear; timm draws bilinear or
bicubic.

Shapes: b images of a rank; `size` images of the global batch; S side of an image in pixels; in
`Policy` and `draw_policy` n operations per image; in the functions of operations n images that get
the operation. There, levels are signed strengths (n,) in [-10, 10], and params are the parameters
(n, 6) of the operation for each image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.memory import split_parts
from workers.rng import StepRng

PROBABILITY = 0.5
STRENGTH_STD = 0.5
STRONGEST = 10.0
NUM_PARAMS = 6


@dataclass(frozen=True)
class Policy:
    """The operations on each sample of the global batch.

    The tensors are on the CPU, so that sorting the images does not wait for the device.

    Attributes:
        ops: Indices into OPS, -1 for no operation, (size, n).
        levels: Signed strengths, (size, n).
    """

    ops: Tensor
    levels: Tensor

    def of(self, rows: Tensor) -> Policy:
        """Return the policy of some samples of the batch."""
        return Policy(self.ops[rows], self.levels[rows])


class OperationGroup(NamedTuple):
    """Images `start` to `stop` - 1 of a sorted batch, which get the same function `apply`."""

    apply: Apply
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """One operation on each image, with images sorted into groups.

    Attributes:
        order: Previous position of each image of the sorted batch, (b,).
        params: Parameters of the operation on each image of the sorted batch, (b, 6).
        groups: The groups of images that get an operation.
    """

    order: Tensor
    params: Tensor
    groups: tuple[OperationGroup, ...]


@dataclass(frozen=True)
class Schedule:
    """A policy with images sorted by operation, once for each of the n operations.

    Attributes:
        rounds: The rounds, in the order in which they are applied.
        restored: Position of each image in the sorted batch of the last round, (b,).
    """

    rounds: tuple[Round, ...]
    restored: Tensor

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are copied to the device."""
        tensors = [self.restored]
        for turn in self.rounds:
            tensors += [turn.order, turn.params]
        return tensors

    def with_tensors(self, tensors: list[Tensor]) -> Schedule:
        """Return the schedule with its tensors replaced by copies, in the order of `tensors()`."""
        restored, *rest = tensors
        rounds = []
        for turn, order, params in zip(self.rounds, rest[::2], rest[1::2], strict=True):
            rounds.append(replace(turn, order=order, params=params))
        return Schedule(tuple(rounds), restored)


def draw_policy(draw: StepRng, n: int, magnitude: float) -> Policy:
    """Draw the policy of the whole global batch, n operations per image."""
    cpu = torch.device("cpu")
    uniform = torch.rand((draw.size, n, 3), generator=draw.generator("randaugment", cpu))
    choice, chance, sign = uniform.unbind(-1)  # (size, n) each
    spread = torch.randn((draw.size, n), generator=draw.generator("randaugment.level", cpu))
    strength = (magnitude + STRENGTH_STD * spread).clamp(0, STRONGEST)
    op = (choice * len(OPS)).long()
    ops = torch.where(chance < PROBABILITY, op, -1)
    return Policy(ops, strength * torch.where(sign < 0.5, -1.0, 1.0))


def schedule(policy: Policy) -> Schedule:
    """Sort the images of a policy by their operations."""
    slots = torch.arange(len(policy.ops))  # current position of each image
    rounds = []
    for ops, levels in zip(policy.ops.unbind(1), policy.levels.unbind(1), strict=True):
        sorted_images = ops.argsort(stable=True)
        params = _params(ops[sorted_images], levels[sorted_images])
        rounds.append(Round(slots[sorted_images], params, _groups(ops)))
        slots = sorted_images.argsort()
    return Schedule(tuple(rounds), slots)


def _params(ops: Tensor, levels: Tensor) -> Tensor:
    """Return the parameters (b, 6) of operations (b,) at signed levels (b,)."""
    params = torch.zeros((len(ops), NUM_PARAMS))
    for index, operation in enumerate(OPERATIONS.values()):
        if operation.params_of is not None:
            is_chosen = ops == index
            numbers = operation.params_of(levels[is_chosen])  # (images, up to 6)
            params[is_chosen] = F.pad(numbers, (0, NUM_PARAMS - numbers.shape[1]))
    return params


def _groups(ops: Tensor) -> tuple[OperationGroup, ...]:
    """Return the groups of the sorted batch, given the operations (b,) of the images in any order.

    Adjacent entries of OPERATIONS with the same function form one group.
    """
    counts = (ops + 1).bincount(minlength=len(OPS) + 1).tolist()
    start = counts[0]  # images without an operation come first
    groups: list[OperationGroup] = []
    for operation, count in zip(OPERATIONS.values(), counts[1:], strict=True):
        stop = start + count
        if groups and groups[-1].apply is operation.apply:
            groups[-1] = groups[-1]._replace(stop=stop)
        elif count:
            groups.append(OperationGroup(operation.apply, start, stop))
        start = stop
    return tuple(groups)


def apply(pixels: Tensor, turns: Schedule, fill: tuple[int, ...]) -> Tensor:
    """Apply a schedule on the device of `pixels`. Return uint8 (b, 3, S, S).

    Args:
        pixels: uint8 (b, 3, S, S).
        turns: The schedule.
        fill: Colour of pixels that an affine map takes from outside the image.
    """
    for turn in turns.rounds:
        pixels = pixels.index_select(0, turn.order)
        for group in turn.groups:
            for rows in split_parts(pixels, group.start, group.stop):
                part = pixels[rows]
                part.copy_(group.apply(part, turn.params[rows], fill))
    return pixels.index_select(0, turns.restored)


# ---- lookup tables: operations that map each value of a channel to another -----------------------
def _make_lookup(table_of: Callable[[Tensor], Tensor]) -> Apply:
    """Return an operation that maps values with the tables `table_of(pixels)`, (n, 3, 256)."""

    def apply(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
        tables = table_of(pixels)
        starts = torch.arange(0, tables.numel(), 256, device=pixels.device).int()  # of each table
        indices = pixels + starts.view(-1, 3, 1, 1)
        return tables.view(-1).index_select(0, indices.view(-1)).view_as(pixels)

    return apply


def _table(values: Tensor, pixels: Tensor) -> Tensor:
    """Convert values to tables: (n or 1, 1 or 3, 256) of any dtype -> uint8 (n, 3, 256).

    Values are clipped and truncated as in Pillow.
    """
    table = values.clamp(0, 255).to(torch.uint8)
    return table.expand(len(pixels), 3, -1).contiguous()


def _list_channel_values(pixels: Tensor) -> Tensor:
    """Return all possible values of a channel, (256,)."""
    return torch.arange(256, device=pixels.device)


def _autocontrast(pixels: Tensor) -> Tensor:
    flat = pixels.flatten(2)
    low = flat.amin(2, keepdim=True).double()  # (n, 3, 1)
    high = flat.amax(2, keepdim=True).double()
    values = _list_channel_values(pixels)
    # `255.0 / tensor` would multiply by a rounded reciprocal
    scale = torch.full_like(high, 255.0) / (high - low)
    stretched = (values * scale + -low * scale).nan_to_num(0.0)
    return _table(torch.where(high > low, stretched, values.double()), pixels)


def _equalize(pixels: Tensor) -> Tensor:
    flat = pixels.flatten(2).long()
    ones = torch.ones((), dtype=torch.int32, device=pixels.device).expand_as(flat)
    counts = torch.zeros((len(pixels), 3, 256), dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, flat, ones)  # histograms
    last = counts.gather(2, flat.amax(2, keepdim=True))  # count of the largest value, (n, 3, 1)
    step = (flat.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    return _table(torch.where(step > 0, table, _list_channel_values(pixels)), pixels)


# ---- arithmetic on bytes: several times faster on a CPU than tables or comparisons ---------------
def _invert(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    return 255 - pixels


def _posterize(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    bit_mask = params[:, 0].to(torch.uint8).view(-1, 1, 1, 1)
    return pixels & bit_mask


def _solarize(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    threshold = params[:, 0].to(torch.int16).view(-1, 1, 1, 1)  # up to 256
    below = (threshold - 1) - pixels.to(torch.int16)  # negative if the pixel >= threshold
    is_inverted = (below >> 15).to(torch.uint8)  # 255 where negative, else 0
    return pixels ^ is_inverted


def _solarize_add(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    amount = params[:, 0].to(torch.uint8).view(-1, 1, 1, 1)  # up to 110, so that no sum overflows
    is_bright = pixels >> 7  # 1 if the pixel >= 128, else 0
    return pixels + (1 - is_bright) * amount


def _bit_mask(level: Tensor) -> Tensor:
    """Return the mask (n, 1) of the bits that posterize keeps: 4 at level 0, at least 1."""
    bits = (4 - (level.abs() / STRONGEST * 4).long()).clamp(min=1)
    return (256 - 2 ** (8 - bits)).float().unsqueeze(1)


def _threshold(level: Tensor) -> Tensor:
    """Return the smallest value (n, 1) that solarize inverts: 256 at level 0, 0 at level 10."""
    return (256 - (level.abs() / STRONGEST * 256).long()).float().unsqueeze(1)


def _amount(level: Tensor) -> Tensor:
    """Return the amount (n, 1) that solarize_add adds: 0 at level 0, 110 at level 10."""
    return (level.abs() / STRONGEST * 110).long().float().unsqueeze(1)


# ---- blends with a degenerate image --------------------------------------------------------------
def _factor(level: Tensor) -> Tensor:
    """Return the weight of the image (n, 1), 0.1 to 1.9, in timm's `increasing` form.

    With weight 1 the result is the image, with 0 the degenerate image. A weight above 1 increases
    the difference from the degenerate image.
    """
    return (1 + 0.9 * level / STRONGEST).clamp(min=0.1).unsqueeze(1)


def _make_blend(degenerate_of: Callable[[Tensor], Tensor]) -> Apply:
    """Return an operation that blends an image with a degenerate image, `degenerate_of(image)`."""

    def apply(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
        image = pixels.float()
        factor = params[:, 0].view(-1, 1, 1, 1)
        degenerate = degenerate_of(image)
        blended = (image - degenerate).mul_(factor).add_(degenerate)
        return _bytes(blended.clamp_(0, 255))

    return apply


def _bytes(values: Tensor) -> Tensor:
    """Truncate values in [0, 256) to uint8. The conversion through int16 is five times faster."""
    return values.to(torch.int16).to(torch.uint8)


def _grey(image: Tensor) -> Tensor:
    """Return the luma (n, 1, S, S) by Pillow's fixed-point formula, which is exact in fp32."""
    red, green, blue = image.split(1, 1)
    weighted = (red * 19595).add_(green * 38470).add_(blue * 7471)
    luma: Tensor = weighted.add_(0x8000).mul_(2**-16)
    return luma.floor_()


def _mean_grey(image: Tensor) -> Tensor:
    """Return the mean luma (n, 1, 1, 1), rounded as Pillow does."""
    count = image[0, 0].numel()
    total = _grey(image).sum((1, 2, 3), dtype=torch.float64, keepdim=True)
    mean: Tensor = (2 * total + count) / (2 * count)
    return mean.floor().float()


def _black(image: Tensor) -> Tensor:
    return image.new_zeros(())


def _smooth(image: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH, exactly: a 3x3 mean in which the middle has weight 5, others 1.

    The pixels at the edge do not change. The integers and the floor of the division are exact in
    fp32.
    """
    rows = image[:, :, :-2] + image[:, :, 1:-1] + image[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    total = box.add_(image[:, :, 1:-1, 1:-1], alpha=4)
    smooth = image.clone()
    smooth[:, :, 1:-1, 1:-1] = total.mul_(2).add_(13).div_(26).floor_()
    return smooth


# ---- affine maps ---------------------------------------------------------------------------------
def _warp(pixels: Tensor, params: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Apply affine maps.

    Each row of `params` is a flattened (2, 3) matrix. It maps output coordinates to input
    coordinates; both are in [-1, 1] inside the image. Pixels from outside the image have the colour
    `fill`.
    """
    side = pixels.shape[-1]
    x_x, x_y, x_0, y_x, y_y, y_0 = params.view(-1, NUM_PARAMS, 1, 1).unbind(1)  # (n, 1, 1) each
    centres = torch.arange(1 - side, side, 2, device=pixels.device) / side
    across = centres.view(1, 1, -1)
    down = centres.view(1, -1, 1)
    grid = torch.empty((len(pixels), side, side, 2), device=pixels.device)
    torch.add(x_x * across, x_y * down + x_0, out=grid[..., 0])
    torch.add(y_x * across, y_y * down + y_0, out=grid[..., 1])
    image = pixels.float()
    for channel, value in enumerate(fill):  # `grid_sample` uses zero outside the image
        image[:, channel] -= value
    moved = F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    for channel, value in enumerate(fill):
        moved[:, channel] += value
    return _bytes(moved.round_())


def _make_affine_maps(rows: list[list[float]]) -> Tensor:
    """Return affine maps (n, 6)."""
    return torch.tensor(rows, dtype=torch.float32).view(-1, NUM_PARAMS)


def _rotation(level: Tensor) -> Tensor:
    # `math.cos` per image, because a vectorised cosine can round differently at another batch size
    rows = []
    for strength in level.tolist():
        angle = math.radians(30.0 * strength / STRONGEST)
        cos = math.cos(angle)
        sin = math.sin(angle)
        rows.append([cos, -sin, 0, sin, cos, 0])
    return _make_affine_maps(rows)


def _shear_x(level: Tensor) -> Tensor:
    shears = (0.3 * level / STRONGEST).tolist()
    return _make_affine_maps([[1, s, s, 0, 1, 0] for s in shears])  # the top edge stays in place


def _shear_y(level: Tensor) -> Tensor:
    shears = (0.3 * level / STRONGEST).tolist()
    return _make_affine_maps([[1, 0, 0, s, 1, s] for s in shears])  # the left edge stays in place


def _translation_x(level: Tensor) -> Tensor:
    shifts = (0.45 * level / STRONGEST).tolist()  # as a share of the side, which is 2 long
    return _make_affine_maps([[1, 0, 2 * s, 0, 1, 0] for s in shifts])


def _translation_y(level: Tensor) -> Tensor:
    shifts = (0.45 * level / STRONGEST).tolist()
    return _make_affine_maps([[1, 0, 0, 0, 1, 2 * s] for s in shifts])


# function of an operation: (pixels (n, 3, S, S), params (n, 6), fill) -> pixels
Apply = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]


class Operation(NamedTuple):
    """An operation of RandAugment.

    Attributes:
        apply: The function of the operation.
        params_of: Function from levels (n,) to parameters (n, up to 6). None: no parameters.
    """

    apply: Apply
    params_of: Callable[[Tensor], Tensor] | None = None


OPERATIONS = {
    "autocontrast": Operation(_make_lookup(_autocontrast)),
    "equalize": Operation(_make_lookup(_equalize)),
    "invert": Operation(_invert),
    "posterize": Operation(_posterize, _bit_mask),
    "solarize": Operation(_solarize, _threshold),
    "solarize_add": Operation(_solarize_add, _amount),
    "contrast": Operation(_make_blend(_mean_grey), _factor),
    "brightness": Operation(_make_blend(_black), _factor),
    "color": Operation(_make_blend(_grey), _factor),
    "sharpness": Operation(_make_blend(_smooth), _factor),
    "rotate": Operation(_warp, _rotation),
    "shear_x": Operation(_warp, _shear_x),
    "shear_y": Operation(_warp, _shear_y),
    "translate_x": Operation(_warp, _translation_x),
    "translate_y": Operation(_warp, _translation_y),
}
OPS = tuple(OPERATIONS)
