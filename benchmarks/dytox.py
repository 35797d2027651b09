"""Compare three parts of DyTox with straightforward implementations.

- Task attention: all task tokens at once, against a loop over tokens.
- ConViT's attention: one table of relative positions, against a table per image.
- Herding: one matrix-vector product per selected image, against trying every image.

Command: `python -m benchmarks.dytox`. It takes about three minutes, with width 384, 12 heads,
images of 32 px in patches of 4 px, a batch of 16 and one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Report, interleave, start
from workers.job import BackboneSettings
from workers.model.convit import GatedAttention
from workers.model.exemplars import herding, normalise
from workers.model.task_attention import TaskAttention, TokenHead, TokenNetwork
from workers.model.vit import build

BATCH, CLASSES = 16, 100
# Number of tasks -> minimum ratio of the time of a training step: loop / all tokens at once.
DEMANDS = {10: 1.25, 50: 2.2}
GROWTH = 1.25  # maximum cost of a step with 50 tokens, relative to a step with 1


class Looped(TokenNetwork):
    """The same network with a decoder that runs once per token.

    Each run computes the keys and values of [token; patches] again.
    """

    def embeddings(self, images: Tensor) -> Tensor:
        patches = self.encoder.forward_features(images)
        tokens = [one_token(self.attention, head.token, patches) for head in self.each()]
        return torch.cat(tokens, 1)

    def logits(self, e: Tensor) -> Tensor:
        logits = [head(e[:, index]) for index, head in enumerate(self.each())]
        return torch.cat(logits, 1)


def one_token(block: TaskAttention, token: Tensor, patches: Tensor) -> Tensor:
    """Return the embedding of one task: (D,), (B, N, D) -> (B, 1, D)."""
    tokens = token.expand(len(patches), 1, -1)
    z = block.norm1(torch.cat([tokens, patches], 1))
    q = split_heads(block.q(z[:, :1]), block.num_heads)
    k = split_heads(block.k(z), block.num_heads)
    v = split_heads(block.v(z), block.num_heads)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    e = tokens + block.proj(mixed)
    embedding: Tensor = e + block.mlp(block.norm2(e))
    return embedding


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, D) -> (B, heads, N, D / heads)."""
    by_head: Tensor = x.unflatten(2, (heads, -1)).transpose(1, 2)
    return by_head


def build_networks(tasks: int) -> tuple[TokenNetwork, Looped]:
    """Return the network for `tasks` tasks in both forms, which share their parameters."""
    torch.manual_seed(0)
    encoder = build(BackboneSettings(name="convit_local", img_size=32, weights="none"))
    heads = [TokenHead(384, CLASSES // tasks) for _ in range(tasks)]
    for head in heads:
        torch.nn.init.trunc_normal_(head.token, std=0.02)
    parts = (encoder, TaskAttention(384, 12), heads)
    return TokenNetwork(*parts), Looped(*parts)


def step(network: TokenNetwork, images: Tensor, labels: Tensor) -> Tensor:
    """Run one step forward and backward; return the logits, (B, classes)."""
    network.zero_grad(set_to_none=True)
    logits: Tensor = network(images)
    targets = F.one_hot(labels, logits.shape[1]).float()
    F.binary_cross_entropy_with_logits(logits, targets).backward()
    return logits.detach()


def attention_per_image(layer: GatedAttention, x: Tensor) -> Tensor:
    """Return ConViT's attention as its authors compute it: (B, N, D) -> (B, N, D).

    Positions are expanded over the batch before they are projected and normalised.
    """
    q, k = layer.qk(x).unflatten(2, (2, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    v = split_heads(layer.v(x), layer.num_heads)
    content = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)  # (B, H, N, N)
    offsets = layer.offsets.expand(len(x), -1, -1, -1)  # (B, N, N, 3)
    positions = layer.pos_proj(offsets).permute(0, 3, 1, 2).softmax(-1)  # (B, H, N, N)
    gate = layer.gate.sigmoid().view(1, -1, 1, 1)
    attention = (1 - gate) * content + gate * positions
    attention = attention / attention.sum(-1, keepdim=True)
    projected: Tensor = layer.proj((attention @ v).transpose(1, 2).flatten(2))
    return projected


def backward(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Run a function forward and backward."""
    function(x).square().mean().backward()


def naive_herding(features: Tensor, count: int) -> list[int]:
    """Return the rows that herding selects from features, (images, D).

    Each selection tries every unused image and computes the distance of the new mean.
    """
    unit = normalise(features)
    mean = unit.mean(0)
    chosen: list[int] = []

    def distance(candidate: int) -> float:
        new_mean = unit[[*chosen, candidate]].mean(0)
        return float((mean - new_mean).square().sum())

    for _ in range(count):
        rest = [i for i in range(len(unit)) if i not in chosen]
        chosen.append(min(rest, key=distance))
    return chosen


def compare_token_attention(report: Report) -> None:
    """Compare training steps that process all tokens at once with steps that loop over tokens."""
    images = torch.randn(BATCH, 3, 32, 32)
    labels = torch.randint(0, CLASSES, (BATCH,))
    steps: dict[str, Any] = {}
    for tasks in (1, *DEMANDS):
        fast, slow = build_networks(tasks)
        report.equal(
            f"logits of {tasks} tasks, at once and one by one",
            step(fast, images, labels),
            step(slow, images, labels),
            1e-4,
        )
        steps[f"at once, {tasks}"] = partial(step, fast, images, labels)
        steps[f"loop, {tasks}"] = partial(step, slow, images, labels)
    timing = interleave(steps, rounds=5)
    for tasks, demand in DEMANDS.items():
        report.at_least(
            f"training step with {tasks} tasks, loop over tokens / all at once",
            timing.ratio(f"loop, {tasks}", f"at once, {tasks}"),
            demand,
        )
    report.note("with 1 task", f"{timing.ratio('loop, 1', 'at once, 1'):.2f}x")
    report.at_most(
        "training step at once, 50 tasks / 1 task",
        timing.ratio("at once, 50", "at once, 1"),
        GROWTH,
    )


def compare_gated_attention(report: Report) -> None:
    """Compare ConViT's attention with one table of positions and with a table per image."""
    encoder: Any = build(BackboneSettings(name="convit_local", img_size=32, weights="none"))
    layer: GatedAttention = encoder.blocks[2].attn
    x = torch.randn(BATCH, 64, 384)
    report.equal(
        "gated attention, one table and one per image",
        layer(x).detach(),
        attention_per_image(layer, x).detach(),
        1e-5,
    )
    timing = interleave(
        {
            "one": partial(backward, layer, x),
            "per image": partial(backward, partial(attention_per_image, layer), x),
        },
        rounds=9,
    )
    report.at_least(
        "gated attention with gradients, a table per image / one table",
        timing.ratio("per image", "one"),
        1.0,
    )


def compare_herding(report: Report) -> None:
    """Compare herding by one product per selected image with trying every image."""
    features = torch.randn(500, 384)
    generator = torch.Generator()
    report.equal(
        "exemplars, fast and naive",
        torch.tensor(herding(features, 20, generator)),
        torch.tensor(naive_herding(features, 20)),
        0,
    )
    timing = interleave(
        {
            "fast": partial(herding, features, 20, generator),
            "naive": partial(naive_herding, features, 20),
        },
        rounds=3,
    )
    report.at_least(
        "herding 20 of 500 images, trying each / one product per pick",
        timing.ratio("naive", "fast"),
        10,
    )


def main() -> None:
    """Compare the results and then the times of the three parts."""
    start()
    report = Report()
    compare_token_attention(report)
    compare_gated_attention(report)
    compare_herding(report)
    report.exit()


if __name__ == "__main__":
    main()
