"""T2T-ViT: timm's VisionTransformer with a tokens-to-token module instead of a patch embedding.

The model is registered in timm.

Yuan et al.: Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet, ICCV 2021.
Axes: B images, N tokens, D width of the `Performer`, M random features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

STRIDE = 16  # stride of the three soft splits together, in pixels
MODULE = "patch_embed."  # prefix of the tokens-to-token module in timm; see `T2TVit.released`


class Performer(nn.Module):
    """One head of attention with random features, then an MLP: (B, N, inputs) -> (B, N, D).

    The cost is linear in N. The matrix exp(q k^T) of softmax attention is estimated by phi(q)
    phi(k)^T with the random features phi(x) = exp(w x - |x|^2 / 2) / sqrt(M). The projections w,
    (M, D), are drawn once. They are a buffer: they are never trained, but are part of the
    backbone's weights and digest. The residual connection around attention adds the values and not
    the inputs, because the widths of inputs and outputs differ. The paper's dropout of 0.1 is left
    out, because it would be drawn separately on each rank.

    Args:
        inputs: Width of the inputs.
        width: D.
        ratio: M / D.
    """

    w: Tensor

    def __init__(self, inputs: int, width: int, ratio: float = 0.5):
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.kqv = nn.Linear(inputs, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        features = int(width * ratio)
        self.register_buffer(
            "w", nn.init.orthogonal_(torch.empty(features, width)) * math.sqrt(features)
        )

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        x = v + self.proj(self.attention(q.float(), k.float(), v.float()).to(v.dtype))
        update: Tensor = self.mlp(self.norm2(x))
        return x + update

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of queries, keys and values, (B, N, D) each, as (B, N, D).

        The computation is in fp32 even under autocast, because exponentials of bf16 scores would be
        inaccurate.
        """
        device = "cpu" if q.is_meta else q.device.type  # autocast does not know `meta`
        with torch.autocast(device, enabled=False):
            q, k = self.phi(q), self.phi(k)  # (B, N, M)
            values = k.transpose(1, 2) @ v  # (B, M, D)
            total = q @ k.sum(1).unsqueeze(-1)  # (B, N, 1)
            return (q @ values) / (total + 1e-8)

    def phi(self, x: Tensor) -> Tensor:
        """Return the random features of queries or keys: (B, N, D) -> (B, N, M)."""
        return (x @ self.w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(self.w))


class TokensToToken(nn.Module):
    """Replacement of timm's PatchEmbed: (B, C, H, W) -> (B, (H / 16) (W / 16), embed_dim).

    Three soft splits cut their input into overlapping windows of 7, 3 and 3 pixels, with strides of
    4, 2 and 2. The first input is the image. A `Performer` follows each of the first two splits;
    its output is the input of the next split. The windows of the last split are projected. Other
    arguments that timm passes (`of_timm`) are ignored.
    """

    def __init__(
        self,
        img_size: int = 224,
        in_chans: int = 3,
        embed_dim: int = 256,
        token_dim: int = 64,
        **of_timm: Any,
    ):
        super().__init__()
        if img_size % STRIDE:
            raise ValueError(
                f"img_size must be a multiple of {STRIDE}, the stride of its three soft splits"
            )
        self.img_size, self.patch_size = (img_size, img_size), (STRIDE, STRIDE)
        self.grid_size = (img_size // STRIDE, img_size // STRIDE)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.attention1 = Performer(in_chans * 7 * 7, token_dim)
        self.attention2 = Performer(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        x = self.attention1(windows(images, 7, 4, 2))  # (B, HW / 16, token_dim)
        # (B, HW / 64, token_dim)
        x = self.attention2(windows(arrange_as_image(x, height // 4, width // 4), 3, 2, 1))
        tokens: Tensor = self.project(
            windows(arrange_as_image(x, height // 8, width // 8), 3, 2, 1)
        )
        return tokens


def windows(images: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Cut images into overlapping windows: (B, C, H, W) -> (B, HW / stride^2, C size^2).

    Args:
        images: Images.
        size: Side of a window in pixels.
        stride: Distance between windows in pixels.
        padding: Number of zeros added at each edge.
    """
    return F.unfold(images, size, stride=stride, padding=padding).transpose(1, 2)


def arrange_as_image(tokens: Tensor, height: int, width: int) -> Tensor:
    """Arrange tokens as an image: (B, H W, C) -> (B, C, H, W)."""
    image: Tensor = tokens.transpose(1, 2).unflatten(2, (height, width))
    return image


def sinusoids(positions: int, width: int) -> Tensor:
    """Return sinusoidal position embeddings, (1, positions, width).

    Channel i is a sine if i is even, and a cosine if i is odd. The argument of both is position /
    10000^(2 floor(i / 2) / width).
    """
    channel = torch.arange(width)
    periods = 10000.0 ** (2 * (channel // 2).double() / width)  # (width,)
    angles = torch.arange(positions)[:, None] / periods
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).float()[None]


class Times(nn.Module):
    """x -> factor * x."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class T2TVit(VisionTransformer):
    """A small T2T-ViT, which the paper calls lite (T2T-ViT-7, -10 and -12).

    It has no qkv bias, an MLP of twice the width, and fixed sinusoidal position embeddings. The
    released weights were trained with attention scores divided by the square root of the width of
    all heads together. timm divides by the square root of the width of one head, so queries are
    also multiplied by heads^-1/2. With 4 heads this factor is 1/2, which causes no rounding.
    """

    def __init__(
        self,
        img_size: int = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 256,
        depth: int = 12,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__(
            img_size,
            STRIDE,
            in_chans,
            num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=False,
            drop_path_rate=drop_path_rate,
            norm_layer=nn.LayerNorm,
            embed_layer=TokensToToken,
        )
        for module in self.modules():
            if isinstance(module, Attention):  # timm applies q_norm to the queries
                module.q_norm = Times(num_heads**-0.5)
        del self.pos_embed  # replaced by a buffer, because it must not be trained
        self.register_buffer("pos_embed", sinusoids(1 + self.patch_embed.num_patches, embed_dim))

    @staticmethod
    def released(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the released weights with timm's parameter names."""
        named = {name.removeprefix("module."): t for name, t in tensors.items()}
        return {
            MODULE + name.removeprefix("tokens_to_token.")
            if name.startswith("tokens_to_token.")
            else name: t
            for name, t in named.items()
        }


@register_model
def t2t_vit_12(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    **options: Any,
) -> T2TVit:
    """Build T2T-ViT-12: width 256, 12 blocks with 4 heads, 6.9M parameters.

    timm passes the first four arguments to every model.
    """
    if pretrained:
        raise ValueError("T2T-ViT is not on timm's hub: its authors publish files of their own")
    return T2TVit(**options)
