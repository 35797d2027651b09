"""The task attention block of DyTox: each task's token asks the patches once; tokens of different
tasks never meet.

Douillard et al.: DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion, CVPR
2022. Axes: B images, T tasks, N patches, D width, H heads, d = D / H.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from workers.model.heads import Heads
from workers.model.noise import TokenDropPath


class TaskAttention(nn.Module):
    """TAB: tokens (T, D), patches (B, N, D) -> embeddings (B, T, D), one for each image and task.

    A token attends to itself and to the patches, which stay as they are. The original runs once per
    token over [token; patches]; here keys and values of the patches are made once for all tokens,
    with the same result.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, drop_path: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path1, self.drop_path2 = TokenDropPath(drop_path), TokenDropPath(drop_path)

    def expect(self, tokens: int) -> None:
        """How many tokens the next training steps have."""
        self.drop_path1.tokens = self.drop_path2.tokens = tokens

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        attended = self.attention(self.norm1(tokens), self.norm1(patches))
        e: Tensor = tokens + self.drop_path1(attended)
        update: Tensor = self.drop_path2(self.mlp(self.norm2(e)))
        return e + update

    def attention(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """softmax over the N + 1 keys [token itself, patches], of each token: (T, D), (B, N, D) ->
        (B, T, D)."""
        # (H, T, d)
        q, k, v = (
            layer(tokens).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            for layer in (self.q, self.k, self.v)
        )
        # (B, H, N, d)
        keys, values = (
            layer(patches).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        q = q * q.shape[-1] ** -0.5
        to_itself = (q * k).sum(-1, keepdim=True).expand(len(patches), -1, -1, -1)  # (B, H, T, 1)
        to_patches = q @ keys.transpose(-2, -1)  # (B, H, T, N)
        share = torch.cat([to_itself, to_patches], -1).softmax(-1)  # (B, H, T, 1 + N)
        out = share[..., :1] * v + share[..., 1:] @ values
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class TokenHead(nn.Linear):
    """What a task brings: its token (D,), and a classifier with a layer norm of its own: embeddings
    (..., D) -> logits (..., classes)."""

    def __init__(self, width: int, classes: int):
        super().__init__(width, classes)
        self.token = nn.Parameter(torch.empty(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, e: Tensor) -> Tensor:
        return super().forward(self.norm(e))


class TokenHeads(Heads):
    """A TokenHead by task name. A token is drawn from a truncated normal with std 0.02, the
    classifier starts as PyTorch's do."""

    def layer(self, classes: int) -> TokenHead:
        return TokenHead(self.width, classes)

    def start(self, layer: TokenHead, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(layer.token, std=0.02, generator=generator)
        for values in (layer.weight, layer.bias):
            nn.init.uniform_(values, -(self.width**-0.5), self.width**-0.5, generator=generator)


class TokenNetwork(nn.Module):
    """Encoder, task attention and the tokens and heads of some tasks, in order: images (b, 3, H, W)
    -> logits of all their classes."""

    def __init__(self, encoder: Any, attention: TaskAttention, heads: list[TokenHead]):
        super().__init__()
        self.encoder, self.attention, self.heads = encoder, attention, nn.ModuleList(heads)

    def embeddings(self, images: Tensor) -> Tensor:
        """(b, tasks, D)."""
        patches = self.encoder.forward_features(images)[:, self.encoder.num_prefix_tokens :]
        tokens = torch.stack([head.token for head in self.each()])  # (tasks, D)
        embeddings: Tensor = self.attention(tokens, patches)
        return embeddings

    def each(self) -> list[TokenHead]:
        return [*self.heads]

    def logits(self, e: Tensor) -> Tensor:
        """Embeddings (b, tasks, D) -> (b, classes of all tasks): one layer norm without weights,
        then all heads as one product, padded to the largest."""
        heads = self.each()
        norm_weights = torch.stack([head.norm.weight for head in heads])  # (tasks, D)
        norm_biases = torch.stack([head.norm.bias for head in heads])  # (tasks, D)
        e = F.layer_norm(e, e.shape[-1:], eps=heads[0].norm.eps)
        e = e * norm_weights + norm_biases
        # (tasks, most classes, D) and (tasks, most classes)
        weights = pad_sequence([head.weight for head in heads], batch_first=True)
        biases = pad_sequence([head.bias for head in heads], batch_first=True)
        padded = torch.einsum("btd,tkd->btk", e, weights) + biases
        sizes = torch.tensor([head.out_features for head in heads])
        real = (torch.arange(weights.shape[1]) < sizes[:, None]).flatten().nonzero().squeeze(1)
        logits: Tensor = padded.flatten(1)[:, real.to(padded.device)]
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.embeddings(images))
