"""Top-down feedback on a frozen ConvNeXt (TOAST): a first pass steers a second pass.

The steered stages run twice. The output map of the first pass is propagated back through two small
linear layers per stage, and the result is added to the input of each stage in the second pass.

Shi et al.: TOAST: Transfer Learning via Attention Steering, 2023. Axes: B images, D width of the
features, C channels, H and W of a map; a stage of stride k maps (B, c, k H, k W) to (B, C, H, W).
Stages are counted from 0, as in timm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.errors import UserError
from workers.model.compact import count_multiply_adds
from workers.model.top_down import selection

SIDE = 224  # side of images in pixels for `flops_share`, which hardly depends on it


def upsample(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Apply a transposed convolution without bias; the kernel size equals the stride k.

    It is computed as a 1 x 1 convolution and a pixel shuffle, which are deterministic; cuDNN's
    transposed convolution may not be.

    Args:
        x: Input (B, C, H, W).
        weight: Weights (c k k, C), rows in the order (c, i, j).
        stride: The stride k.

    Returns:
        Output (B, c, k H, k W).
    """
    spread = F.conv2d(x, weight[:, :, None, None])  # (B, c k k, H, W)
    return F.pixel_shuffle(spread, stride)


class StageTopDown:
    """The two passes of a ConvNeXt; the steered stages are `backbone.stages[start:stop]`.

    It has the methods of `TopDown` (top_down.py). Pass 1 ends after stage stop - 1; its output map
    z is fed back. Each position of z has the weight s = clamp(cos(z, xi), 0, 1), where xi (`prior`)
    is a learned vector (C,). If the last stage of the network is steered, the norm of the head is
    applied to z before the cosine. Pass 2 starts from the input of stage `start` in pass 1. The
    feedback path is linear and without bias, for l = stop - 1, ..., start:

        r_stop = (s z) P,  r_l = W1_l r_{l+1},  td_l = W2_l r_l

    In pass 2, the input of stage l is the output of stage l - 1 plus td_l. W1_l is a transposed
    convolution from the output map of the stage to its input map, W2_l a 1 x 1 convolution, and P
    (C, C) a learned transform.

    `folded` multiplies P into the topmost W1. The other layers stay separate. If they were merged
    into one matrix per stage, as for a ViT, every finer map would be computed from the wide last
    map. This would cost 636 M instead of 318 M multiply-adds for an image of 224 pixels in
    ConvNeXt-T (a pass has 4.5 G).
    """

    def __init__(
        self, backbone: Any, start: int = 0, stop: int | None = None, value_bias: bool = False
    ):
        if value_bias:
            raise UserError(
                "td_value_bias is true, but the backbone is a ConvNeXt, which has no attention and "
                "no value bias; remove the setting"
            )
        self.backbone = backbone
        self.start = start
        self.stop = len(backbone.stages) if stop is None else stop
        self.steered = [*backbone.stages][self.start : self.stop]
        self.strides = [_get_stride(stage) for stage in self.steered]
        channels = [info["num_chs"] for info in backbone.feature_info]  # C of all stages
        self.widths: list[tuple[int, int]] = []  # (c, C) of each steered stage
        # names of W1 and W2 of each steered stage
        self.names: list[tuple[str, str]] = []
        for index in range(self.start, self.stop):
            self.widths.append((channels[max(index - 1, 0)], channels[index]))
            self.names.append((f"w1_{index}", f"w2_{index}"))
        self.width: int = channels[self.stop - 1]  # width of the map for the selection

    def __len__(self) -> int:
        return len(self.steered)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layers W1 (c k k, C) and W2 (c, c) of each steered stage."""
        shapes: dict[str, tuple[int, ...]] = {}
        for (w1, w2), (c_in, c_out), k in zip(self.names, self.widths, self.strides, strict=True):
            shapes[w1] = (c_in * k * k, c_out)
            shapes[w2] = (c_in, c_in)
        return shapes

    def fresh(self) -> dict[str, Tensor]:
        """Return initial feedback layers, with which the second pass equals the first.

        W1 copies the first c of C channels to all k x k positions; W2 is zero.
        """
        weight = next(self.backbone.parameters())
        layers: dict[str, Tensor] = {}
        for (w1, w2), (c_in, c_out), k in zip(self.names, self.widths, self.strides, strict=True):
            layers[w1] = torch.eye(c_in, c_out).repeat_interleave(k * k, 0).to(weight)
            layers[w2] = weight.new_zeros(c_in, c_in)
        return layers

    def prior(self, generator: torch.Generator) -> Tensor:
        """Return an initial xi, (C,): the mean over the positions of a noise image's last map."""
        side = 2 * self.backbone.feature_info[-1]["reduction"]
        noise = torch.randn(1, 3, side, side, generator=generator)
        _, last_map = self.first_pass(noise.to(next(self.backbone.parameters())))
        return self.normalise_for_cosine(last_map).mean((0, 2, 3))

    def folded(
        self, layers: Mapping[str, Tensor], transform: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the layers, with the transform P (C, C) multiplied into the topmost W1.

        Args:
            layers: Layers as in `shapes`.
            transform: P. None: the identity.
        """
        if transform is None:
            return dict(layers)
        top = self.names[-1][0]
        with torch.autocast(transform.device.type, enabled=False):
            return {**layers, top: layers[top] @ transform.T}

    def first_pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input map of the first steered stage and the output map of the last.

        No parameter gets a gradient; an autograd graph is built only if `images` requires one. The
        pass is the same for all tasks.

        Args:
            images: Images (B, 3, H, W).
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            x = self.backbone.stem(images)
            first_input = x
            for index, stage in enumerate(self.backbone.stages[: self.stop]):
                if index == self.start:
                    first_input = x
                x = stage(x)
            return first_input, x

    def pack(self, first_input: Tensor, last_map: Tensor) -> Tensor:
        """Return the two results of `first_pass` as one row per image, with channels last."""
        return torch.cat([t.movedim(1, -1).flatten(1) for t in (first_input, last_map)], 1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two results of `first_pass` from the rows of `pack`.

        The maps are square. Their channels are last in memory, as in the outputs of a ConvNeXt.
        """
        c_in = self.widths[0][0]
        scale = math.prod(self.strides)  # side of the first map, divided by that of the last
        side = math.isqrt(rows.shape[1] // (c_in * scale**2 + self.width))
        first, last = rows.split([c_in * (scale * side) ** 2, self.width * side**2], 1)
        first_input = first.unflatten(1, (scale * side, scale * side, c_in)).movedim(-1, 1)
        last_map = last.unflatten(1, (side, side, self.width)).movedim(-1, 1)
        return first_input, last_map

    def second_pass(
        self,
        first_input: Tensor,
        last_map: Tensor,
        feedback: Mapping[str, Tensor],
        stage_maps: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return features (B, D) from the two results of `first_pass`.

        Args:
            first_input: Input map of the first steered stage.
            last_map: Output map z of the last steered stage.
            feedback: The result of `folded`, and `prior` xi; without it all positions are fed back.
            stage_maps: If given, the input and the output of each steered stage are appended.
        """
        x = first_input
        if stage_maps is None:
            stage_maps = []
        r = last_map
        if "prior" in feedback:
            r = self.select_positions(last_map, feedback["prior"])
        feedback_maps = self.propagate_feedback(r, feedback)
        for stage, feedback_map in zip(self.steered, feedback_maps, strict=True):
            stage_input = x + feedback_map
            x = stage(stage_input)
            stage_maps.append((stage_input, x))
        for stage in self.backbone.stages[self.stop :]:
            x = stage(x)
        features: Tensor = self.backbone.forward_head(self.backbone.norm_pre(x))
        return features

    def select_positions(self, last_map: Tensor, prior: Tensor) -> Tensor:
        """Return s z, (B, C, H, W).

        Args:
            last_map: z, (B, C, H, W).
            prior: xi, (C,).
        """
        compared = self.normalise_for_cosine(last_map).movedim(1, -1)  # (B, H, W, C)
        weights = selection(compared, prior)  # s, (B, H, W)
        return last_map * weights[:, None]

    def normalise_for_cosine(self, last_map: Tensor) -> Tensor:
        """Return the map to compare with xi, (B, C, H, W).

        It is `last_map`, after the norm of the head if it is the map of the last stage.
        """
        if self.stop < len(self.backbone.stages):
            return last_map
        # `norm_pre` is the identity unless the norm comes before the pooling
        x = self.backbone.norm_pre(last_map)
        last_norm = getattr(self.backbone.head, "norm", nn.Identity())
        normalised: Tensor = last_norm(x)
        return normalised

    def propagate_feedback(self, r: Tensor, feedback: Mapping[str, Tensor]) -> list[Tensor]:
        """Return td_l of each steered stage, with the shape of the stage's input.

        Args:
            r: The selected map s z, (B, C, H, W).
            feedback: The result of `folded`.
        """
        feedback_maps: list[Tensor] = []
        for (w1, w2), stride in zip(reversed(self.names), reversed(self.strides), strict=True):
            r = upsample(r, feedback[w1], stride)
            feedback_maps.insert(0, upsample(r, feedback[w2], 1))
        return feedback_maps

    def first_layers(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer W1 of each stage, which `inversion` trains to invert the stage."""
        return {name: layers[name] for name, _ in self.names}

    def inversion(
        self, stage_maps: Sequence[tuple[Tensor, Tensor]], layers: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the variational loss, which trains each W1 to invert its stage.

        It is sum_l MSE(W1_l sg(out_l), sg(in_l)); sg stops the gradient.

        Args:
            stage_maps: Input and output of each steered stage.
            layers: The feedback layers.
        """
        errors = []
        for maps, (w1, _), stride in zip(stage_maps, self.names, self.strides, strict=True):
            stage_input, stage_output = maps
            undone = upsample(stage_output.detach(), layers[w1], stride)
            errors.append(F.mse_loss(undone, stage_input.detach()))
        return torch.stack(errors).sum()

    def flops_share(self) -> float:
        """Return the multiply-adds of both passes, relative to a single pass.

        The steered stages run twice, and each adds its two layers.
        """
        extra_operations = 0
        for position, stage in enumerate(self.steered):
            c_in, c_out = self.widths[position]
            reduction = self.backbone.feature_info[self.start + position]["reduction"]
            side = self.strides[position] * (SIDE // reduction)  # side of the stage's input map
            feedback = side**2 * c_in * (c_out + c_in)
            extra_operations += count_multiply_adds(stage, c_in, side, side) + feedback
        return 1 + extra_operations / count_multiply_adds(self.backbone, 3, SIDE, SIDE)


def _get_stride(stage: Any) -> int:
    if isinstance(stage.downsample, nn.Identity):
        return 1
    stride: int = stage.downsample[1].stride[0]
    return stride
