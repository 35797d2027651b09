"""Top-down feedback on a frozen ViT (TOAST): tokens of a first pass steer a second pass.

Forward hooks add the feedback to the values in the attention of the second pass.

Shi et al.: TOAST: Transfer Learning via Attention Steering, 2023. Axes: B images, N tokens (class
token first), D width, S steered blocks (the lowest first), A width of a block's values (D in most
ViTs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from workers.errors import UserError
from workers.model.adapters import Hook
from workers.model.compact import count_multiply_adds, flops, plan_blocks
from workers.model.masked import BlockMasks
from workers.model.tokens import (
    call_value_layer,
    count_block_tokens,
    enter_blocks,
    find_value_layer,
    get_value_weight,
    make_block_arguments,
    value_bias,
)
from workers.model.vit import geometry


def selection(x: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of each token, s_n = clamp(cos(x_n, xi), 0, 1): (..., D) -> (...).

    Args:
        x: Tokens x_n.
        prior: xi, (D,).
    """
    return (F.normalize(x, dim=-1) @ F.normalize(prior, dim=0)).clamp(0, 1)


def select_tokens(x: Tensor, prior: Tensor) -> Tensor:
    """Return s_n x_n, see `selection`, for tokens x (B, N, D) and the prior xi (D,)."""
    return x * selection(x, prior)[..., None]


def add_to_values(qkv: Tensor, added: Tensor) -> Tensor:
    """Add `added` (B, N, A) in place to the values, which are the last A columns of `qkv`.

    `qkv` is (B, N, 3 A), or (B, N, A) if the values have a separate layer.
    """
    qkv[..., -added.shape[-1] :] += added
    return qkv


def variational(stream: Sequence[Tensor], w1: Tensor) -> Tensor:
    """Return the variational loss, which trains each feedback layer W1 to invert its block.

    It is sum_l MSE(W1_l sg(out_l), sg(in_l)); sg stops the gradient.

    Args:
        stream: S + 1 tensors (B, N, D), before the lowest steered block and after each.
        w1: Feedback layers (S, D, D).
    """
    errors = []
    for index, layer in enumerate(w1):
        undone = F.linear(stream[index + 1].detach(), layer)
        errors.append(F.mse_loss(undone, stream[index].detach()))
    return torch.stack(errors).sum()


class TopDown:
    """The two passes of a ViT; the steered blocks are start + 1, ..., stop, counted from 1.

    Pass 1 ends after block L = `stop`. Its output tokens x are weighted: s_n = clamp(cos(x_n, xi),
    0, 1), where xi (`prior`) is a learned vector (D,). If block L is the last block, x are the
    tokens after the final norm. Pass 2 starts from the input of block start + 1 in pass 1. The
    feedback path is linear and without bias. It changes the values v_l of block l in pass 2, for
    l = L, ..., start + 1:

        r_{L+1} = (s x) P,  r_l = W1_l r_{l+1},  td_l = W2_l r_l,  v_l += W_v td_l

    P (D, D) is a channel transform, and W_v (A, D) the value projection of a block. Therefore the
    path is one matrix per block, v_l += M_l (s x) with M_l = W_v W2_l W1_l ... W1_L P^T, and one
    matrix product gives the feedback of all blocks. Training computes M_l too: a batch has many
    more tokens than D, so products of (D, D) matrices cost little.

    Args:
        backbone: A timm ViT.
        start: Number of blocks below the steered blocks.
        stop: Last steered block, counted from 1. None: the last block of the ViT.
        value_bias: Add the value bias of each steered block a second time in pass 2, as TOAST's
            released code does.

    Raises:
        UserError: If a steered block has no value layer, or the widths of their values differ.
    """

    def __init__(
        self, backbone: Any, start: int = 0, stop: int | None = None, value_bias: bool = False
    ):
        self.backbone = backbone
        self.start = start
        self.stop = len(backbone.blocks) if stop is None else stop
        self.value_bias = value_bias
        self.width: int = backbone.embed_dim  # width of the selected tokens
        self.steered = [*backbone.blocks][self.start : self.stop]
        self.hooks = [Hook(add_to_values) for _ in self.steered]
        for index, block in enumerate(self.steered, self.start):
            attn = getattr(block, "attn", None)
            layer = find_value_layer(attn)
            if layer is None:
                raise UserError(
                    f"block {index} of the backbone has no 'attn.qkv' whose values could be "
                    "steered; choose a ViT with plain blocks such as "
                    "vit_tiny_patch16_224 or deit_small_patch16_224"
                )
            call_value_layer(attn)
            layer.register_forward_hook(self.hooks[index - self.start])
        widths = {len(get_value_weight(block.attn)) for block in self.steered}
        if len(widths) > 1:
            raise UserError(
                f"the values of the steered blocks are of widths {sorted(widths)}, and feedback is "
                "one product for all of them; choose a backbone with equal blocks such as "
                "vit_tiny_patch16_224 or vit_small_patch16_dinov3"
            )

    def __len__(self) -> int:
        return len(self.steered)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes (S, D, D) of the feedback layers, all steered blocks stacked."""
        shape = (len(self), self.width, self.width)
        return {"w1": shape, "w2": shape}

    def fresh(self) -> dict[str, Tensor]:
        """Return initial feedback layers, W1 = I and W2 = 0, so that M_l = 0 for every block."""
        weight = next(self.backbone.parameters())
        w1 = torch.eye(self.width).to(weight).repeat(len(self), 1, 1)
        return {"w1": w1, "w2": torch.zeros_like(w1)}

    def prior(self, generator: torch.Generator) -> Tensor:
        """Return an initial xi, (D,): the mean of the output tokens for a noise image."""
        noise = torch.randn(1, 3, *self.backbone.patch_embed.img_size, generator=generator)
        _, seen = self.first_pass(noise.to(next(self.backbone.parameters())))  # (1, N, D)
        return seen.mean((0, 1))

    def folded(
        self, layers: Mapping[str, Tensor], transform: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Multiply the feedback layers into `matrix` (S A, D), the concatenation of all M_l.

        Args:
            layers: Layers as in `shapes`.
            transform: P (D, D). None: the identity.

        Returns:
            `matrix`, and with `value_bias` also `bias` (S A,), the value bias that is added a
            second time.
        """
        w1, w2 = layers["w1"], layers["w2"]
        with torch.autocast(w1.device.type, enabled=False):  # a product of many matrices needs fp32
            chains: list[Tensor] = []  # W1_l ... W1_L P^T of each steered block
            chain = None if transform is None else transform.T
            for layer in reversed(w1.unbind()):
                chain = layer if chain is None else layer @ chain
                chains.insert(0, chain)
            # W_v: (S, A, D)
            values = torch.stack([get_value_weight(block.attn) for block in self.steered])
            matrix = (values @ w2 @ torch.stack(chains)).flatten(0, 1)
        biases = [value_bias(block.attn) for block in self.steered]
        stated = [bias for bias in biases if bias is not None]
        if not self.value_bias or not stated:
            return {"matrix": matrix}
        return {"matrix": matrix, "bias": torch.cat(stated)}

    def first_pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens before the first steered block, and the source tokens of the feedback.

        Both are (B, N, D). The backbone is frozen: an autograd graph is built only if `images`
        requires a gradient. The pass is the same for all tasks.

        Args:
            images: Images (B, 3, H, W).
        """
        vit = self.backbone
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            x = enter_blocks(vit, images)
            arguments = make_block_arguments(vit)
            entered = x
            for index, block in enumerate(vit.blocks[: self.stop]):
                if index == self.start:
                    entered = x
                x = block(x, **arguments[index])
            if self.stop == len(vit.blocks):
                x = vit.norm(x)
            return entered, x

    def pack(self, entered: Tensor, seen: Tensor) -> Tensor:
        """Return the two results of `first_pass` as one row per image, (B, 2 N D)."""
        return torch.stack([entered, seen], 1).flatten(1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two results of `first_pass` from the rows of `pack`."""
        entered, seen = rows.unflatten(1, (2, -1, self.width)).unbind(1)
        return entered, seen

    def second_pass(
        self,
        entered: Tensor,
        seen: Tensor,
        feedback: Mapping[str, Tensor],
        stream: list[Tensor] | None = None,
    ) -> Tensor:
        """Return features (B, D) from the two results of `first_pass`.

        Args:
            entered: Tokens before the first steered block.
            seen: Source tokens of the feedback.
            feedback: The result of `folded`, and the entry `prior` (xi) if tokens are weighted.
            stream: If given, the tokens before the first steered block and after each steered block
                are appended.
        """
        selected = seen  # (B, N, D)
        if "prior" in feedback:
            selected = select_tokens(seen, feedback["prior"])
        added = F.linear(selected, feedback["matrix"], feedback.get("bias"))  # (B, N, S A)
        x = entered
        if stream is None:
            stream = []
        stream.append(x)
        arguments = make_block_arguments(self.backbone)
        with self.adding(added.chunk(len(self), -1)):
            for index, block in enumerate(self.steered, self.start):
                x = block(x, **arguments[index])
                stream.append(x)
        for index, block in enumerate(self.backbone.blocks[self.stop :], self.stop):
            x = block(x, **arguments[index])
        features: Tensor = self.backbone.forward_head(self.backbone.norm(x))
        return features

    def first_layers(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layers W1, which `inversion` trains to invert their blocks."""
        return {"w1": layers["w1"]}

    def inversion(self, stream: Sequence[Tensor], layers: Mapping[str, Tensor]) -> Tensor:
        """Return the variational loss (see `variational`).

        Args:
            stream: Tokens that `second_pass` appended.
            layers: The feedback layers.
        """
        return variational(stream, layers["w1"])

    def flops_share(self) -> float:
        """Return the multiply-adds of both passes, relative to a single pass.

        The steered blocks run twice, and each adds one matrix product.
        """
        if not isinstance(self.backbone, VisionTransformer):
            return self.measured_share()
        shape = geometry(self.backbone)
        tokens: int = shape["tokens"] + shape["prefix"]
        block: int = self.width * (4 * self.width + 2 * shape["hidden"] + 2 * tokens)
        unmasked = [BlockMasks() for _ in range(shape["depth"])]
        one_pass = flops(self.backbone, plan_blocks(self.backbone, unmasked))
        added = tokens * len(self) * (block + self.width * self.width)
        return 1 + added / one_pass

    def measured_share(self) -> float:
        """Return `flops_share`, with the multiply-adds counted by `count_multiply_adds`."""
        vit = self.backbone
        tokens = count_block_tokens(vit)
        added = 0
        for block in self.steered:
            added += count_multiply_adds(block, tokens, self.width)
            added += tokens * get_value_weight(block.attn).numel()
        return 1 + added / count_multiply_adds(vit, 3, *vit.patch_embed.img_size)

    @contextmanager
    def adding(self, added: Sequence[Tensor]) -> Iterator[None]:
        """Add a tensor (B, N, A) to the values of each steered block inside the context."""
        try:
            for hook, tensor in zip(self.hooks, added, strict=True):
                hook.tensors = {"added": tensor}
            yield
        finally:
            for hook in self.hooks:
                hook.tensors = None
