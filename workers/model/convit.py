"""DyTox's encoder: timm's VisionTransformer with gated positional self-attention from ConViT.

The model is registered in timm.

d'Ascoli et al.: ConViT, ICML 2021; Douillard et al.: DyTox, CVPR 2022. Axes: B images, H heads, N
patches, D width, d = D / H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F


class GatedAttention(nn.Module):
    """Gated positional self-attention: (B, N, D) -> (B, N, D).

    The attention weights are A = (1 - g) softmax(q k^T / sqrt(d)) + g P. For head h,
    P = softmax_j(u_h . r_ij + b_h) and g_h = sigmoid(gate_h). P, (H, N, N), does not depend on the
    image, so it is computed once per forward pass. The content part uses fused attention. The rows
    of both parts sum to 1, so the mixture is not normalised again. Other arguments that timm passes
    (`of_timm`) are ignored.
    """

    # (N, N, 3): r_ij = (dx, dy, dx^2 + dy^2) from patch i to patch j; `ConViT` sets this buffer,
    # because it knows the grid
    offsets: Tensor

    def __init__(self, dim: int, num_heads: int, **of_timm: Any):
        super().__init__()
        self.num_heads = num_heads
        self.qk = nn.Linear(dim, 2 * dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.pos_proj = nn.Linear(3, num_heads)
        self.gate = nn.Parameter(torch.ones(num_heads))

    def start_local(self) -> None:
        """Initialise the layer like a convolution.

        The layer for values becomes the identity. The position attention of each of the first
        floor(sqrt(H))^2 heads is centred on one position t of a square kernel around the patch. Its
        score is 2 t . r - |r|^2 for the offset r = (dx, dy), the first two entries of r_ij. This
        equals -|r - t|^2 up to a constant.
        """
        side = math.isqrt(self.num_heads)
        with torch.no_grad():
            nn.init.eye_(self.v.weight)
            for head in range(side * side):
                to_x, to_y = head % side - (side - 1) // 2, head // side - (side - 1) // 2
                self.pos_proj.weight[head] = torch.tensor([2.0 * to_x, 2.0 * to_y, -1.0])

    def split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, 2 D) -> queries and keys, (B, H, N, d) each."""
        q, k = qk.unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k

    def positions(self) -> Tensor:
        """Return P, (H, N, N)."""
        scores: Tensor = self.pos_proj(self.offsets)  # (N, N, H)
        return scores.permute(2, 0, 1).softmax(-1)

    def forward(self, x: Tensor, **of_timm: Any) -> Tensor:
        q, k = self.split(self.qk(x))
        v = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        gate = self.gate.sigmoid().view(-1, 1, 1)
        by_content = F.scaled_dot_product_attention(q, k, v)  # (B, H, N, d)
        by_position = self.positions().to(v.dtype) @ v  # (B, H, N, d)
        mixed = (1 - gate) * by_content + gate * by_position
        projected: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return projected


def offsets(side: int) -> Tensor:
    """Return r_ij of `GatedAttention` for a grid of side x side patches, (N, N, 3)."""
    patch = torch.arange(side * side)
    x = patch % side
    y = patch // side
    dx = x[None, :] - x[:, None]
    dy = y[None, :] - y[:, None]
    return torch.stack([dx, dy, dx * dx + dy * dy], 2).float()


class ConViT(VisionTransformer):
    """A ConViT that has only blocks with `GatedAttention`, no class token and no final norm.

    The features are the mean over patches. Difference from the original ConViT: the two global
    blocks are missing. In DyTox, the task attention (task_attention.py) attends globally to the
    patches instead. The rate of stochastic depth rises over the blocks as if the task attention
    were one more block.
    """

    def __init__(
        self,
        img_size: int = 32,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 0,
        embed_dim: int = 384,
        depth: int = 5,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__(
            img_size,
            patch_size,
            in_chans,
            num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=False,
            class_token=False,
            global_pool="avg",
            final_norm=False,
            norm_layer=nn.LayerNorm,
            attn_layer=GatedAttention,
            drop_path_rate=drop_path_rate * (depth - 1) / depth,
        )
        height, width = self.patch_embed.grid_size
        if height != width:
            raise ValueError(
                "this model needs a square grid of patches, and img_size gives "
                f"{height} x {width} patches; give a square img_size"
            )
        for module in self.modules():
            if isinstance(module, GatedAttention):
                module.start_local()
                module.register_buffer("offsets", offsets(height), persistent=False)


@register_model
def convit_local(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    **options: Any,
) -> ConViT:
    """Build DyTox's encoder: width 384, 5 blocks with 12 heads, 8.9M parameters in its blocks.

    The name says `local` because the model lacks ConViT's two global blocks. timm passes the first
    four arguments to every model.
    """
    if pretrained:
        raise ValueError("DyTox's encoder is trained from scratch; its authors publish no weights")
    return ConViT(**options)
