"""Tests of augmentation: its operations, and random draws that depend only on seed, epoch, step and
the position in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from pydantic import ValidationError

from workers.data import randaugment
from workers.data.augment import (
    Augment,
    Mix,
    crop,
    crop_by_gather,
    draw_boxes,
    erase,
    erase_by_gather,
    mix_by_blend,
    mix_into,
)
from workers.data.order import find_partner_positions
from workers.job import BackboneSettings, DataSettings
from workers.rng import StepRng

CPU = torch.device("cpu")
FULL = DataSettings(
    crop="pad", flip=0.5, randaugment=2, mixup=0.8, cutmix=1.0, erase=0.5, smoothing=0.1
)
CLASSES = 7


def backbone(side: int = 24, crop_pct: float = 1.0) -> BackboneSettings:
    return BackboneSettings(
        img_size=side, crop_pct=crop_pct, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3)
    )


def draw(
    size: int, rows: list[int] | None = None, seed: int = 1, epoch: int = 0, step: int = 0
) -> StepRng:
    return StepRng(
        seed, epoch, step, torch.tensor(list(range(size)) if rows is None else rows), size, CPU
    )


def pictures(n: int, side: int, seed: int = 0) -> torch.Tensor:
    """Return smooth coloured gradients with noise, uint8 (n, 3, side, side).

    Every operation changes such images.
    """
    noise = torch.Generator().manual_seed(seed)
    corners = torch.randint(40, 200, (n, 3, 3, 3), generator=noise).float()
    smooth = torch.nn.functional.interpolate(
        corners, size=(side, side), mode="bilinear", align_corners=True
    )
    return (smooth + 20 * torch.randn(smooth.shape, generator=noise)).clamp(0, 255).to(torch.uint8)


def plain(pixels: torch.Tensor, settings: BackboneSettings) -> torch.Tensor:
    """Normalise pixels by the textbook formula."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (settings.mean, settings.std))
    return (pixels.float() / 255 - mean) / std


def as_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pil(image: Image.Image) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def one_op(name: str, pixels: torch.Tensor, level: float) -> torch.Tensor:
    n = len(pixels)
    policy = randaugment.Policy(
        torch.full((n, 1), randaugment.OPS.index(name)), torch.full((n, 1), level)
    )
    return randaugment.apply(pixels, randaugment.schedule(policy), (128, 100, 80))


# ---- evaluation ----------------------------------------------------------------------------------
def test_evaluation_uses_normalised_centre_crop_for_any_settings() -> None:
    settings = backbone(24, 0.75)
    augment = Augment(FULL, settings, training=False)
    pixels = pictures(5, 32)
    assert augment.size_in == 32
    assert not augment.needs_partner
    images, targets = augment(pixels, torch.zeros(5, dtype=torch.long), CLASSES, draw(5))
    assert targets is None
    torch.testing.assert_close(images, plain(pixels[:, :, 4:28, 4:28], settings), atol=1e-5, rtol=0)
    alone, _ = augment(
        pixels[3:4], torch.zeros(1, dtype=torch.long), CLASSES, draw(9, [8], seed=5, epoch=3)
    )
    assert torch.equal(alone[0], images[3])


def test_training_images_without_augmentation_equal_evaluation_images() -> None:
    settings, pixels, labels = backbone(24, 0.9), pictures(4, 27), torch.arange(4)
    images, targets = Augment(DataSettings(), settings, True)(pixels, labels, CLASSES, draw(4))
    assert torch.equal(
        images, Augment(DataSettings(), settings, False)(pixels, labels, CLASSES, draw(4))[0]
    )
    assert targets is None


# ---- crop and flip -------------------------------------------------------------------------------
def test_crop_and_flip_match_pillow_for_each_image() -> None:
    pixels, side = pictures(16, 20), 13
    top, left = torch.randint(0, 8, (2, 16), generator=torch.Generator().manual_seed(3)).unbind(0)
    flip = torch.arange(16) % 2 == 0
    expected = []
    for image, y, x, mirrored in zip(
        pixels, top.tolist(), left.tolist(), flip.tolist(), strict=True
    ):
        cut = as_pil(image).crop((x, y, x + side, y + side))
        expected.append(from_pil(ImageOps.mirror(cut) if mirrored else cut))
    assert torch.equal(crop(pixels, top, left, flip, side), torch.stack(expected))
    assert torch.equal(crop_by_gather(pixels, top, left, flip, side), torch.stack(expected))


def random_boxes(count: int, side: int) -> torch.Tensor:
    """Return the corners of boxes, (count, 4). Every third box is empty."""
    low = torch.randint(0, side - 1, (count, 2))
    high = low + torch.randint(1, side, (count, 2))
    top, left = low.unbind(1)
    bottom, right = high.clamp(max=side).unbind(1)
    boxes = torch.stack((top, bottom, left, right), 1)
    boxes[::3] = 0
    return boxes


def test_erasing_gives_the_same_bits_with_and_without_a_loop() -> None:
    side = 9
    images = torch.randn(12, 3, side, side)
    noise = torch.randn(2 * 3 * side**2)
    starts = torch.randint(0, 3 * side**2, (12, 1))
    erased = torch.cat((random_boxes(12, side), starts), 1)
    expected = erase_by_gather(images.clone(), erased, noise)
    assert torch.equal(erase(images.clone(), erased, noise), expected)
    assert not torch.equal(expected, images)


def test_mixing_gives_the_same_bits_with_and_without_a_loop() -> None:
    side = 9
    images = torch.randn(14, 3, side, side)
    partners = torch.tensor([13, 12, *range(10)])
    boxes = random_boxes(12, side)
    is_cutmix = boxes.sum(1) > 0
    blend = torch.where(is_cutmix, 1.0, torch.rand(12))
    blend[3] = 1.0  # neither mixup nor cutmix
    mix = Mix(blend, boxes, blend)
    expected = mix_by_blend(images.clone(), partners, mix)
    mixed = mix_into(torch.empty(12, 3, side, side), images, partners, mix)
    assert torch.equal(mixed, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("crop_pct", [1.0, 0.75])
def test_pad_crop_shifts_up_to_an_eighth_and_fills_black(crop_pct: float) -> None:
    settings = backbone(24, crop_pct)
    augment = Augment(DataSettings(crop="pad"), settings, True)
    side_in, reach = augment.size_in, 3
    pixels = pictures(200, side_in).clamp(min=1)
    images, _ = augment(pixels, torch.zeros(200), None, draw(200))
    pad, margin = 8, (side_in - 24) // 2
    padded = torch.nn.functional.pad(pixels, (pad,) * 4)
    moves = set()
    for i, image in enumerate(images):
        offsets = []
        for y in range(-reach, reach + 1):
            for x in range(-reach, reach + 1):
                window = padded[i, :, pad + margin + y :, pad + margin + x :][:, :24, :24]
                if torch.allclose(image, plain(window, settings), atol=1e-5):
                    offsets.append((y, x))
        assert len(offsets) == 1
        moves.add(offsets[0])
    assert {y for y, _ in moves} == {x for _, x in moves} == set(range(-reach, reach + 1))


def test_boxes_respect_image_bounds_area_and_aspect_ratio() -> None:
    boxes = draw_boxes(draw(500), "crop", 100, (0.1, 0.6), (3 / 4, 4 / 3))
    assert boxes.fits.all()
    assert (boxes.top >= 0).all()
    assert (boxes.left >= 0).all()
    assert (boxes.top + boxes.height <= 100).all()
    assert (boxes.left + boxes.width <= 100).all()
    share = boxes.height * boxes.width / 100**2
    assert share.min() > 0.09
    assert share.max() < 0.61
    assert share.max() - share.min() > 0.4
    ratio = boxes.height / boxes.width
    assert ratio.min() > 0.72
    assert ratio.max() < 1.38


# ---- RandAugment ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", randaugment.OPS)
@pytest.mark.parametrize("level", [9.0, -9.0])
def test_every_operation_changes_pixels_but_not_shape_or_dtype(name: Any, level: float) -> None:
    pixels = pictures(3, 32)
    before = pixels.clone()
    out = one_op(name, pixels, level)
    assert out.shape == pixels.shape
    assert out.dtype == torch.uint8
    assert torch.equal(pixels, before)
    assert all((a != b).any() for a, b in zip(out, pixels, strict=True))


@pytest.mark.parametrize("factor", [0.19, 0.6, 1.0, 1.5, 1.81])
def test_enhancements_match_pillow(factor: float) -> None:
    pixels = pictures(6, 31)
    level = (factor - 1) / 0.9 * 10
    exact = {
        "color": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "brightness": ImageEnhance.Brightness,
        "sharpness": ImageEnhance.Sharpness,
    }
    for name, enhance in exact.items():
        expected = torch.stack(
            [from_pil(enhance(as_pil(image)).enhance(factor)) for image in pixels]
        )
        # the factor is computed from a float32 level, so values at a rounding limit may differ
        difference = (one_op(name, pixels, level).int() - expected.int()).abs()
        assert difference.max() <= 1, name
        assert (difference > 0).float().mean() < 0.01, name


def test_lookup_table_operations_match_pillow() -> None:
    grey = torch.full((1, 3, 31, 31), 77, dtype=torch.uint8)
    pixels = torch.cat((pictures(6, 31), grey, pictures(2, 31).clamp(100, 103)))
    exact: dict[str, Callable[[Image.Image], Image.Image]] = {
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "invert": ImageOps.invert,
        "posterize": partial(ImageOps.posterize, bits=1),
        "solarize": partial(ImageOps.solarize, threshold=26),
    }
    for name, operation in exact.items():
        expected = torch.stack([from_pil(operation(as_pil(image))) for image in pixels])
        assert torch.equal(one_op(name, pixels, 9.0), expected), name


@pytest.mark.parametrize("level", [0.0, 5.0, 9.0, 10.0, -10.0])
def test_posterize_keeps_at_least_one_bit(level: float) -> None:
    pixels = (
        torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16).contiguous()
    )
    assert len(one_op("posterize", pixels, level).unique()) >= 2


def test_translation_fills_border_with_fill_colour() -> None:
    out = one_op("translate_x", pictures(1, 40), 10 * 0.25 / 0.45)  # a quarter of the side
    fill = torch.tensor([128, 100, 80], dtype=torch.uint8).view(3, 1, 1)
    assert torch.equal(out[0, :, :, 30:], fill.expand(3, 40, 10))
    assert torch.equal(out[0, :, :, :30], pictures(1, 40)[0, :, :, 10:])


def test_geometric_operations_match_pillow_away_from_edges() -> None:
    # blurred to avoid aliasing
    image = torch.nn.functional.avg_pool2d(pictures(1, 56).float(), 9, 1, 4).to(torch.uint8)
    picture, bilinear = as_pil(image[0]), Image.Resampling.BILINEAR
    expected = {
        "rotate": picture.rotate(18, resample=bilinear),
        "shear_x": picture.transform(
            (56, 56), Image.Transform.AFFINE, (1, 0.18, 0, 0, 1, 0), bilinear
        ),
        "shear_y": picture.transform(
            (56, 56), Image.Transform.AFFINE, (1, 0, 0, 0.18, 1, 0), bilinear
        ),
    }
    for name, reference in expected.items():
        difference = one_op(name, image, 6.0)[0].int() - from_pil(reference).int()
        assert difference[:, 18:38, 18:38].abs().max() <= 2, name


def test_policy_uses_all_operations_with_probability_one_half() -> None:
    policy = randaugment.draw_policy(draw(4000), 2, 9.0)
    assert set(policy.ops.unique().tolist()) == set(range(-1, len(randaugment.OPS)))
    assert 0.47 < (policy.ops >= 0).float().mean() < 0.53
    assert 8.9 < policy.levels.abs().mean() < 9.1
    assert policy.levels.abs().max() <= 10
    assert 0.47 < (policy.levels > 0).float().mean() < 0.53


def test_batched_operations_equal_operations_on_each_image() -> None:
    """`apply` sorts the images by operation, but each image must get its own two operations."""
    pixels = pictures(60, 24)
    policy = randaugment.draw_policy(draw(60), 2, 9.0)
    together = randaugment.apply(pixels, randaugment.schedule(policy), (128, 100, 80))
    for row in range(60):
        alone = pixels[row : row + 1]
        for turn in range(2):
            op = int(policy.ops[row, turn])
            if op >= 0:
                alone = one_op(randaugment.OPS[op], alone, float(policy.levels[row, turn]))
        assert torch.equal(together[row], alone[0]), policy.ops[row]


# ---- erasing -------------------------------------------------------------------------------------
def test_erasing_replaces_a_box_of_allowed_size_by_unit_noise() -> None:
    settings, pixels = backbone(32), torch.zeros((300, 3, 32, 32), dtype=torch.uint8)
    images, _ = Augment(DataSettings(erase=0.5), settings, True)(
        pixels, torch.zeros(300), None, draw(300)
    )
    erased = (images != plain(pixels, settings)).all(1)
    hit = erased.flatten(1).any(1)
    assert 0.4 < hit.float().mean() < 0.6
    share = erased[hit].float().mean((1, 2))
    assert share.min() > 0.01
    assert share.max() < 0.36
    noise = images.permute(0, 2, 3, 1)[erased]
    assert abs(noise.mean()) < 0.05
    assert 0.95 < noise.std() < 1.05
    first, second = hit.nonzero().squeeze(1)[:2].tolist()
    assert not torch.equal(images[first], images[second])


# ---- mixing --------------------------------------------------------------------------------------
def flat(size: int, side: int) -> torch.Tensor:
    """Return images with one value per sample, so that a pixel identifies its sample."""
    return (
        (torch.arange(size, dtype=torch.uint8) * 8)
        .view(-1, 1, 1, 1)
        .expand(size, 3, side, side)
        .contiguous()
    )


def test_mixup_mixes_pixels_and_targets_with_the_same_weight() -> None:
    size, settings = 24, backbone(16)
    pixels, labels = flat(size, 16), torch.arange(size)
    images, targets = Augment(DataSettings(mixup=0.8), settings, True)(
        pixels, labels, size, draw(size)
    )
    assert targets is not None
    torch.testing.assert_close(targets.sum(1), torch.ones(size))
    clean, other = plain(pixels, settings), find_partner_positions(size, size)
    label_weight = targets[torch.arange(size), labels].view(-1, 1, 1, 1)
    label_weight[other == labels] = 1
    torch.testing.assert_close(
        images, label_weight * clean + (1 - label_weight) * clean[other], atol=1e-5, rtol=0
    )
    assert len(label_weight.unique()) > size // 2


def test_sample_without_partner_is_not_mixed() -> None:
    settings = backbone(16)
    rng = replace(draw(3), batch_size=4)  # positions 0 and 2 are partners, 1 is alone
    images, targets = Augment(DataSettings(mixup=0.8), settings, True)(
        flat(3, 16), torch.arange(3), 3, rng
    )
    assert targets is not None
    torch.testing.assert_close(targets[1], torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(images[1], plain(flat(3, 16), settings)[1])
    assert (targets[0, [0, 2]] > 0).all()


def test_mixed_and_smoothed_targets_have_the_worked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels 1 and 3 of four classes are partners; the own label has weight 0.3."""
    augment = Augment(DataSettings(mixup=0.8, smoothing=0.1), backbone(16), True)
    monkeypatch.setattr(
        augment,
        "_beta",
        lambda draw, tag, alpha: torch.full((draw.size,), 0.3 if tag == "mixup" else 1.0),
    )
    _, targets = augment(pictures(2, 16), torch.tensor([1, 3]), 4, draw(2))
    torch.testing.assert_close(
        targets, torch.tensor([[0.025, 0.295, 0.025, 0.655], [0.025, 0.655, 0.025, 0.295]])
    )


def test_cutmix_targets_equal_pixel_shares() -> None:
    size, settings = 24, backbone(16)
    pixels, labels = flat(size, 16), torch.arange(size)
    images, targets = Augment(DataSettings(cutmix=1.0), settings, True)(
        pixels, labels, size, draw(size)
    )
    assert targets is not None
    clean, other = plain(pixels, settings), find_partner_positions(size, size)
    own_pixels, other_pixels = (
        (images - clean[which]).abs().amax(1) < 1e-5 for which in (labels, other)
    )
    assert (own_pixels | other_pixels).all()
    strangers = other != labels
    torch.testing.assert_close(
        targets[torch.arange(size), labels][strangers], own_pixels.float().mean((1, 2))[strangers]
    )
    torch.testing.assert_close(targets.sum(1), torch.ones(size))
    assert (other_pixels & ~own_pixels).any()


def test_mixup_and_cutmix_each_apply_to_half_the_samples() -> None:
    augment = Augment(DataSettings(mixup=0.8, cutmix=1.0), backbone(16), True)
    mix = augment._plan_mix(draw(1000))
    blended, cut = mix.blend < 1, mix.boxes.any(1)
    assert 400 < int(blended.sum()) < 600
    assert 400 < int(cut.sum()) < 600
    assert not (blended & cut).any()


def test_smoothing_alone_gives_soft_targets_and_untouched_images() -> None:
    pixels, labels = pictures(3, 16), torch.tensor([0, 2, 3])
    images, targets = Augment(DataSettings(smoothing=0.1), backbone(16), True)(
        pixels, labels, 4, draw(3)
    )
    assert torch.equal(
        images, Augment(DataSettings(), backbone(16), True)(pixels, labels, 4, draw(3))[0]
    )
    assert targets is not None
    torch.testing.assert_close(targets[1], torch.tensor([0.025, 0.025, 0.925, 0.025]))


def test_a_batch_over_several_tasks_is_neither_mixed_nor_smoothed() -> None:
    pixels, labels = pictures(8, 24), torch.zeros(8, dtype=torch.long)
    images, targets = Augment(FULL, backbone(), True)(pixels, labels, None, draw(8))
    unmixed = FULL.model_copy(update={"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0})
    assert targets is None
    assert torch.equal(images, Augment(unmixed, backbone(), True)(pixels, labels, None, draw(8))[0])


# ---- randomness ----------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["none", "pad", "resized"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_make_the_batch_of_one_rank(how: str, ranks: int) -> None:
    settings = FULL.model_copy(update={"crop": how})
    augment = Augment(settings, backbone(24, 0.8), True)
    pixels, labels = pictures(21, augment.view.side), torch.arange(21) % CLASSES
    images, targets = augment(pixels, labels, CLASSES, draw(21))
    assert targets is not None
    partner = find_partner_positions(21, 21)
    for rank in range(ranks):
        rows = list(range(rank, 21, ranks))
        needed = augment.positions(draw(21, rows), CLASSES)
        assert needed[: len(rows)].tolist() == rows
        assert set(needed.tolist()) == {*rows, *partner[rows].tolist()}
        part, part_targets = augment(pixels[needed], labels[needed], CLASSES, draw(21, rows))
        assert torch.equal(part, images[rows])
        assert part_targets is not None
        assert torch.equal(part_targets, targets[rows])


def test_rank_requests_partners_of_its_samples() -> None:
    augment = Augment(DataSettings(mixup=1.0), backbone(), True)
    assert augment.needs_partner
    assert augment.positions(draw(8, [0, 1]), 4).tolist() == [0, 1, 4, 5]
    with pytest.raises(ValueError, match=r"expected \(4, 3, 24, 24\)"):
        augment(pictures(2, 24), torch.zeros(2, dtype=torch.long), 4, draw(8, [0, 1]))


@pytest.mark.parametrize("how", ["none", "pad", "resized"])
def test_augmentation_depends_only_on_seed_epoch_and_step(how: str) -> None:
    augment = Augment(FULL.model_copy(update={"crop": how}), backbone(), True)
    pixels, labels = pictures(12, 24), torch.arange(12) % CLASSES

    def images(seed: int = 1, epoch: int = 0, step: int = 0) -> torch.Tensor:
        return augment(pixels, labels, CLASSES, draw(12, seed=seed, epoch=epoch, step=step))[0]

    torch.manual_seed(1)
    first = images()
    torch.manual_seed(2)
    assert torch.equal(first, images())
    for other in ({"seed": 2}, {"epoch": 1}, {"step": 1}):
        assert not torch.equal(first, images(**other))


def test_all_augmentations_together_give_finite_images_and_valid_targets() -> None:
    augment = Augment(FULL.model_copy(update={"crop": "resized"}), backbone(), True)
    images, targets = augment(pictures(64, 24), torch.arange(64) % CLASSES, CLASSES, draw(64))
    assert targets is not None
    assert images.shape == (64, 3, 24, 24)
    assert images.dtype == torch.float32
    assert images.isfinite().all()
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    assert targets.min() > 0


@pytest.mark.parametrize("areas", [(0.8, 0.2), (0.0, 1.0), (0.06, 1.08)])
def test_invalid_crop_scale_is_refused(areas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="crop_scale"):
        DataSettings(crop="resized", crop_scale=areas)


def test_pixels_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        Augment(DataSettings(), backbone(24, 0.75), True)(
            pictures(1, 24), torch.zeros(1), None, draw(1)
        )
