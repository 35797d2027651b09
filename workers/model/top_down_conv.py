"""Top-down feedback on a frozen ConvNeXt (TOAST): a first pass steers a second pass.

The last feature map of the first pass goes down from stage to stage. At each stage it is added to
the stage's input in the second pass.

Shi et al.: TOAST: Transfer Learning via Attention Steering, 2023. Axes: B images, C channels, H and
W of a map; a stage takes (B, c, k H, k W) to (B, C, H, W), k its stride.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.errors import UserError
from workers.model.compact import multiply_adds
from workers.model.top_down import selection

SIDE = 224  # side of the image for counting multiply-adds; their share hardly depends on it


def upsample(x: Tensor, matrix: Tensor, stride: int) -> Tensor:
    """Apply a transposed convolution without bias with a kernel equal to its stride k.

    It is a 1 x 1 convolution and a pixel shuffle, which always give the same bits; cuDNN's
    transposed convolutions may not.

    Args:
        x: Input (B, C, H, W).
        matrix: Weights (c k k, C), rows in the order (c, i, j).
        stride: The stride k.

    Returns:
        Output (B, c, k H, k W).
    """
    spread = F.conv2d(x, matrix[:, :, None, None])  # (B, c k k, H, W)
    return F.pixel_shuffle(spread, stride)


class StageTopDown:
    """The two passes of a ConvNeXt with steered stages start + 1 .. stop (counted from 1).

    It has the interface of `TopDown`. Pass 1 ends after stage `stop`; its raw map x is fed back.
    Positions are selected by the cosine of x and xi. If that stage is the last one, the last norm
    is first applied to x, which the network itself applies after its pooling. Pass 2 starts from
    the input of stage start + 1 in pass 1. The feedback path is linear and without bias:

        r_{L+1} = (s x) P,  r_l = W1_l r_{l+1},  td_l = W2_l r_l,  stage l is given x + td_l

    W1_l is a transposed convolution from the output map of the stage to its input map, W2_l a
    convolution of 1 x 1. Only P is folded, into the topmost W1. One matrix per stage, as for a ViT,
    would compute every finer map from the wide last one: 636 M multiply-adds for an image of 224
    pixels in a ConvNeXt-T. The chain has 318 M, and a pass 4.5 G.
    """

    def __init__(
        self, backbone: Any, start: int = 0, stop: int | None = None, value_bias: bool = False
    ):
        if value_bias:
            raise UserError(
                "td_value_bias is true, but the backbone is a ConvNeXt, which has no attention "
                "whose value bias could be added; leave it out"
            )
        self.backbone = backbone
        self.start = start
        self.stop = len(backbone.stages) if stop is None else stop
        self.steered = [*backbone.stages][self.start : self.stop]
        self.strides = [_get_stride(stage) for stage in self.steered]
        channels = [info["num_chs"] for info in backbone.feature_info]  # of each stage's output
        self.widths: list[tuple[int, int]] = []  # (c, C) of each steered stage
        # names of the layers W1 and W2 of each steered stage; stages are counted from 0, as in timm
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
        for (w1, w2), (front, behind), k in zip(self.names, self.widths, self.strides, strict=True):
            shapes[w1] = (front * k * k, behind)
            shapes[w2] = (front, front)
        return shapes

    def fresh(self) -> dict[str, Tensor]:
        """Return feedback layers that pass on the selected map and add nothing yet.

        W1 repeats the first c of C channels at each of k x k positions, W2 is zero.
        """
        weight = next(self.backbone.parameters())
        layers: dict[str, Tensor] = {}
        for (w1, w2), (front, behind), k in zip(self.names, self.widths, self.strides, strict=True):
            layers[w1] = torch.eye(front, behind).repeat_interleave(k * k, 0).to(weight)
            layers[w2] = weight.new_zeros(front, front)
        return layers

    def prior(self, generator: torch.Generator) -> Tensor:
        """Return an initial xi, (C,): the mean over the map of an image of noise."""
        side = 2 * self.backbone.feature_info[-1]["reduction"]
        noise = torch.randn(1, 3, side, side, generator=generator)
        _, seen = self.first_pass(noise.to(next(self.backbone.parameters())))
        return self.compared(seen).mean((0, 2, 3))

    def folded(
        self, layers: Mapping[str, Tensor], transform: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the layers, with the transform P (C, C) folded into the topmost W1.

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

        Nothing in this pass is trained. It has a graph only if the images need a gradient, and is
        the same for all tasks.

        Args:
            images: Images (b, 3, H, W).
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            x = self.backbone.stem(images)
            entered = x
            for index, stage in enumerate(self.backbone.stages[: self.stop]):
                if index == self.start:
                    entered = x
                x = stage(x)
            return entered, x

    def second_pass(
        self,
        entered: Tensor,
        seen: Tensor,
        feedback: Mapping[str, Tensor],
        stream: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return features (b, D) from the two results of `first_pass`.

        Args:
            entered: Input map of the first steered stage.
            seen: Output map of the last steered stage.
            feedback: `prior` xi, and the result of `folded`.
            stream: List to which the input and the output of each steered stage are appended.
        """
        x = entered
        if stream is None:
            stream = []
        feedback_maps = self.handed_down(self.selected(seen, feedback["prior"]), feedback)
        for stage, added in zip(self.steered, feedback_maps, strict=True):
            stage_input = x + added
            x = stage(stage_input)
            stream.append((stage_input, x))
        for stage in self.backbone.stages[self.stop :]:
            x = stage(x)
        features: Tensor = self.backbone.forward_head(self.backbone.norm_pre(x))
        return features

    def selected(self, seen: Tensor, prior: Tensor) -> Tensor:
        """Return s x. seen: x (B, C, H, W); prior xi: (C,)."""
        share = selection(self.compared(seen).movedim(1, -1), prior)  # s, (B, H, W)
        return seen * share[:, None]

    def compared(self, seen: Tensor) -> Tensor:
        """Return the map to compare with xi, (B, C, H, W).

        It is `seen`, after the last norm if it is the map of the last stage.
        """
        if self.stop < len(self.backbone.stages):
            return seen
        # the identity, but where the norm is in front of the pooling
        x = self.backbone.norm_pre(seen)
        last_norm = getattr(self.backbone.head, "norm", nn.Identity())
        compared: Tensor = last_norm(x)
        return compared

    def handed_down(self, r: Tensor, feedback: Mapping[str, Tensor]) -> list[Tensor]:
        """Return td_l of each steered stage in the shape of its input; `r` is (B, C, H, W)."""
        added: list[Tensor] = []
        for (w1, w2), stride in zip(reversed(self.names), reversed(self.strides), strict=True):
            r = upsample(r, feedback[w1], stride)
            added.insert(0, upsample(r, feedback[w2], 1))
        return added

    def first_layers(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layers W1, each of which should undo its stage."""
        return {name: layers[name] for name, _ in self.names}

    def inversion(
        self, stream: Sequence[tuple[Tensor, Tensor]], layers: Mapping[str, Tensor]
    ) -> Tensor:
        """Return sum_l MSE(W1_l sg(out_l), sg(in_l)): each feedback layer should invert its stage.

        Args:
            stream: Input and output of each steered stage.
            layers: The feedback layers.
        """
        errors = []
        for maps, (w1, _), stride in zip(stream, self.names, self.strides, strict=True):
            stage_input, stage_output = maps
            undone = upsample(stage_output.detach(), layers[w1], stride)
            errors.append(F.mse_loss(undone, stage_input.detach()))
        return torch.stack(errors).sum()

    def flops_share(self) -> float:
        """Return the multiply-adds of both passes relative to one.

        The steered stages run twice, and each adds its two layers.
        """
        added = 0
        for position, stage in enumerate(self.steered):
            front, behind = self.widths[position]
            reduction = self.backbone.feature_info[self.start + position]["reduction"]
            side = self.strides[position] * (SIDE // reduction)  # of the map in front of the stage
            feedback = side**2 * front * (behind + front)
            added += multiply_adds(stage, front, side, side) + feedback
        return 1 + added / multiply_adds(self.backbone, 3, SIDE, SIDE)


def _get_stride(stage: Any) -> int:
    if isinstance(stage.downsample, nn.Identity):
        return 1
    stride: int = stage.downsample[1].stride[0]
    return stride
