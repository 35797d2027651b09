"""The task attention block of DyTox: each task has a token, which attends to the patches.

Tokens of different tasks do not attend to each other.

Douillard et al.: DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion, CVPR
2022. Axes: B images, T tasks, N patches, D width, H heads, d = D / H.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from workers.data import torch_internals
from workers.model.heads import Heads
from workers.model.noise import TokenDropPath


class TaskAttention(nn.Module):
    """DyTox's task attention block (TAB): tokens (T, D), patches (B, N, D) -> embeddings (B, T, D).

    The result has one embedding for each image and task. A token attends to itself and to the
    patches; patches are not updated. The original block runs once per token over [token; patches].
    Here the keys and values of the patches are computed once for all tokens, with the same result.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, drop_path: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path1 = TokenDropPath(drop_path)
        self.drop_path2 = TokenDropPath(drop_path)

    def expect(self, tokens: int) -> None:
        """Set the number of task tokens for stochastic depth in the next training steps."""
        self.drop_path1.tokens = tokens
        self.drop_path2.tokens = tokens

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        attended = self.attention(self.norm1(tokens), self.norm1(patches))
        embeddings: Tensor = tokens + self.drop_path1(attended)
        update: Tensor = self.drop_path2(self.mlp(self.norm2(embeddings)))
        return embeddings + update

    def attention(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """Attend with each token to the N + 1 keys [token itself, patches].

        Args:
            tokens: Task tokens (T, D).
            patches: Patches (B, N, D).

        Returns:
            Outputs (B, T, D).
        """
        q = self._split_heads(self.q(tokens))  # (H, T, d)
        k = self._split_heads(self.k(tokens))
        v = self._split_heads(self.v(tokens))
        patch_keys = self._split_heads(self.k(patches))  # (B, H, N, d)
        patch_values = self._split_heads(self.v(patches))
        q = q * q.shape[-1] ** -0.5
        own_scores = (q * k).sum(-1, keepdim=True)  # (H, T, 1)
        own_scores = own_scores.expand(patches.shape[0], -1, -1, -1)  # (B, H, T, 1)
        patch_scores = q @ patch_keys.transpose(-2, -1)  # (B, H, T, N)
        shares = torch.cat([own_scores, patch_scores], -1).softmax(-1)  # (B, H, T, 1 + N)
        attended = shares[..., :1] * v + shares[..., 1:] @ patch_values  # (B, H, T, d)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split the width into heads: (..., N, D) -> (..., H, N, d)."""
        per_head: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return per_head.transpose(-3, -2)


class TokenHead(nn.Linear):
    """The token (D,) of a task and its classifier: embeddings (..., D) -> logits (..., classes).

    The classifier consists of a layer norm and a linear layer.
    """

    def __init__(self, width: int, classes: int):
        super().__init__(width, classes)
        self.token = nn.Parameter(torch.empty(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, e: Tensor) -> Tensor:
        return super().forward(self.norm(e))


class TokenHeads(Heads):
    """A `TokenHead` for each task.

    Tokens are drawn from a truncated normal distribution with std 0.02. The linear layers are
    initialised like `nn.Linear`.
    """

    def layer(self, classes: int) -> TokenHead:
        return TokenHead(self.width, classes)

    def start(self, layer: TokenHead, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(layer.token, std=0.02, generator=generator)
        bound = self.width**-0.5
        for values in (layer.weight, layer.bias):
            nn.init.uniform_(values, -bound, bound, generator=generator)


@lru_cache(maxsize=64)
def find_class_columns(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the indices of the columns that are not padding, for the logits of all tasks.

    The logits of each task are padded to the largest number of classes and concatenated. The result
    is cached, because the host must wait for each copy of the indices to the device.

    Args:
        sizes: Number of classes of each task.
        device: Device of the result.
    """
    with torch_internals.ordinary_tensors():  # training cannot use inference tensors
        is_class = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]  # (T, max classes)
        return is_class.flatten().nonzero().squeeze(1).to(device)


class TokenNetwork(nn.Module):
    """A network for one or more tasks: images (B, 3, height, width) -> logits of all classes.

    It consists of the encoder, the task attention, and a `TokenHead` for each task.

    Args:
        encoder: The encoder.
        attention: The task attention.
        heads: The tokens and classifiers, in task order.
        shares_token: Whether all tasks use the first token.
    """

    def __init__(
        self,
        encoder: Any,
        attention: TaskAttention,
        heads: list[TokenHead],
        shares_token: bool = False,
    ):
        super().__init__()
        self.shares_token = shares_token
        self.encoder = encoder
        self.attention = attention
        self.heads = nn.ModuleList(heads)

    def embeddings(self, images: Tensor) -> Tensor:
        """Return the embeddings of images, (B, T, D), or (B, 1, D) if `shares_token`."""
        encoded = self.encoder.forward_features(images)  # (B, prefix + N, D)
        patches = encoded[:, self.encoder.num_prefix_tokens :]
        heads = self.each()[:1] if self.shares_token else self.each()
        tokens = torch.stack([head.token for head in heads])  # (T or 1, D)
        embeddings: Tensor = self.attention(tokens, patches)
        return embeddings

    def each(self) -> list[TokenHead]:
        """Return the heads in task order."""
        return [*self.heads]

    def logits(self, e: Tensor) -> Tensor:
        """Return the logits (B, classes of all tasks) of embeddings (B, T or 1, D).

        The layer norms of all tasks are computed with one normalisation, and the classifiers of all
        tasks with one matrix product, padded to the largest number of classes.
        """
        heads = self.each()
        norm_weights = torch.stack([head.norm.weight for head in heads])  # (T, D)
        norm_biases = torch.stack([head.norm.bias for head in heads])  # (T, D)
        e = F.layer_norm(e, e.shape[-1:], eps=heads[0].norm.eps)
        e = e * norm_weights + norm_biases
        # (T, max classes, D) and (T, max classes)
        weights = pad_sequence([head.weight for head in heads], batch_first=True)
        biases = pad_sequence([head.bias for head in heads], batch_first=True)
        padded = torch.einsum("btd,tkd->btk", e, weights) + biases
        sizes = tuple(head.out_features for head in heads)
        logits: Tensor = padded.flatten(1)[:, find_class_columns(sizes, padded.device)]
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.embeddings(images))
