"""Top-down feedback on a frozen ConvNeXt: the map that a first pass ends with is handed down from
stage to stage, and added to what the stages of a second one are given (TOAST).

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

SIDE = 224  # pixels of the image whose multiply-adds are counted; their share hardly depends on it


def upsample(x: Tensor, matrix: Tensor, stride: int) -> Tensor:
    """A transposed convolution without bias whose kernel is its stride k: each place becomes k x k
    places of its own. x: (B, C, H, W); matrix: (c k k, C), rows in the order (c, i, j) -> (B, c, k
    H, k W). With k = 1 it is a convolution of 1 x 1. Written as one whose channels are then spread,
    which gives the same bits each time; cuDNN's transposed convolutions need not."""
    return F.pixel_shuffle(F.conv2d(x, matrix[:, :, None, None]), stride)


class StageTopDown:
    """The two passes of a ConvNeXt whose stages start + 1 .. stop (counted from 1) are steered; as
    `TopDown` is used.

    Pass 1 ends behind stage `stop`, whose raw map x is fed back. Where that is the last stage,
    places are selected by the cosine of x behind the last norm, which the network itself applies
    behind its pooling; else by that of x. Pass 2 goes on from what pass 1 had in front of stage
    start + 1. The feedback path is linear and without bias:

        r_{L+1} = (s x) P,  r_l = W1_l r_{l+1},  td_l = W2_l r_l,  stage l is given x + td_l

    W1_l is a transposed convolution from the map behind the stage to the one in front of it, W2_l a
    convolution of 1 x 1. Of the chain only P is folded, into the topmost W1. One matrix per stage,
    as in a ViT, would make all finer maps at once out of the wide last one: 636 M multiply-adds for
    an image of 224 pixels in a ConvNeXt-T, against 318 M down the chain and 4.5 G in a pass.
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
        self.strides = [
            1 if isinstance(stage.downsample, nn.Identity) else stage.downsample[1].stride[0]
            for stage in self.steered
        ]
        behind = [info["num_chs"] for info in backbone.feature_info]
        self.widths = [*zip([behind[0], *behind], behind, strict=False)][
            self.start : self.stop
        ]  # (c, C) of each steered stage
        self.width: int = behind[self.stop - 1]  # of what is selected
        self.names = [
            (f"w1_{index}", f"w2_{index}") for index in range(self.start, self.stop)
        ]  # stages as timm counts them

    def __len__(self) -> int:
        return len(self.steered)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the feedback layers: W1 (c k k, C) and W2 (c, c) of each steered stage."""
        return {
            name: shape
            for names, (front, behind), k in zip(self.names, self.widths, self.strides, strict=True)
            for name, shape in zip(names, ((front * k * k, behind), (front, front)), strict=True)
        }

    def fresh(self) -> dict[str, Tensor]:
        """Feedback layers that hand down what is selected and add none of it yet: W1 repeats the
        first c of C channels at the k x k places that a place becomes, W2 is zero."""
        weight, layers = next(self.backbone.parameters()), dict[str, Tensor]()
        for (w1, w2), (front, behind), k in zip(self.names, self.widths, self.strides, strict=True):
            layers |= {
                w1: torch.eye(front, behind).repeat_interleave(k * k, 0).to(weight),
                w2: weight.new_zeros(front, front),
            }
        return layers

    def prior(self, generator: torch.Generator) -> Tensor:
        """A xi that places of any image look towards: the mean place of an image of noise, (C,)."""
        side = 2 * self.backbone.feature_info[-1]["reduction"]
        noise = torch.randn(1, 3, side, side, generator=generator)
        return self.compared(self.first_pass(noise.to(next(self.backbone.parameters())))[1]).mean(
            (0, 2, 3)
        )

    def folded(
        self, layers: Mapping[str, Tensor], transform: Tensor | None = None
    ) -> dict[str, Tensor]:
        """layers: as `shapes` has them; transform: P (C, C), None for the identity -> the same
        layers, P in the topmost W1."""
        if transform is None:
            return dict(layers)
        top = self.names[-1][0]
        with torch.autocast(transform.device.type, enabled=False):
            return {**layers, top: layers[top] @ transform.T}

    def first_pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images (b, 3, H, W) -> maps in front of the first steered stage and behind the last.
        Nothing in it is trained, so that it has a graph only for images that want a gradient, and
        it is the same for all tasks."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            x = entered = self.backbone.stem(images)
            for index, stage in enumerate(self.backbone.stages[: self.stop]):
                entered = x if index == self.start else entered
                x = stage(x)
            return entered, x

    def second_pass(
        self,
        entered: Tensor,
        seen: Tensor,
        feedback: Mapping[str, Tensor],
        stream: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """What `first_pass` gave -> features (b, D). feedback: `prior` xi, and what `folded` gave.
        stream: gets the maps that each steered stage is given and leaves."""
        x = entered
        stream = [] if stream is None else stream
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
        """s x. seen: x (B, C, H, W); prior xi: (C,)."""
        return seen * selection(self.compared(seen).movedim(1, -1), prior)[:, None]

    def compared(self, seen: Tensor) -> Tensor:
        """The map whose places are compared with xi: x (B, C, H, W), behind the last norm where it
        is that of the last stage."""
        if self.stop < len(self.backbone.stages):
            return seen
        # the identity, but where the norm is in front of the pooling
        x = self.backbone.norm_pre(seen)
        last_norm = getattr(self.backbone.head, "norm", nn.Identity())
        compared: Tensor = last_norm(x)
        return compared

    def handed_down(self, r: Tensor, feedback: Mapping[str, Tensor]) -> list[Tensor]:
        """r_{L+1} (B, C, H, W) -> td_l of each steered stage, of the shape of what it is given."""
        added: list[Tensor] = []
        for (w1, w2), stride in zip(reversed(self.names), reversed(self.strides), strict=True):
            r = upsample(r, feedback[w1], stride)
            added.insert(0, upsample(r, feedback[w2], 1))
        return added

    def first_layers(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that should undo a stage."""
        return {name: layers[name] for name, _ in self.names}

    def inversion(
        self, stream: Sequence[tuple[Tensor, Tensor]], layers: Mapping[str, Tensor]
    ) -> Tensor:
        """sum_l MSE(W1_l sg(out_l), sg(in_l)): each feedback layer should undo its stage. stream:
        maps that each steered stage was given and left."""
        errors = []
        for maps, (w1, _), stride in zip(stream, self.names, self.strides, strict=True):
            stage_input, stage_output = maps
            undone = upsample(stage_output.detach(), layers[w1], stride)
            errors.append(F.mse_loss(undone, stage_input.detach()))
        return torch.stack(errors).sum()

    def flops_share(self) -> float:
        """Work of both passes relative to one: the steered stages run twice, and each adds its two
        layers."""
        added = 0
        for index, (stage, (front, behind), k) in enumerate(
            zip(self.steered, self.widths, self.strides, strict=True), self.start
        ):
            side = SIDE // self.backbone.feature_info[index]["reduction"]
            added += multiply_adds(stage, front, k * side, k * side) + (k * side) ** 2 * front * (
                behind + front
            )
        return 1 + added / multiply_adds(self.backbone, 3, SIDE, SIDE)
