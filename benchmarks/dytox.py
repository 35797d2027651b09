"""DyTox: its task attention for all tokens at once against the loop over tokens, ConViT's attention
with one table of positions against one for each image, herding by one product per pick against
trying every image.

`python -m benchmarks.dytox`; width 384, 12 heads, 32 px images in patches of 4, batch of 16, one
thread, about three minutes.
"""

from __future__ import annotations

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
DEMANDS = {
    10: 1.25,
    50: 2.2,
}  # tasks -> least ratio of a training step over the loop to one at once
GROWTH = 1.25  # most that a step with 50 tokens costs, relative to one with 1


class Looped(TokenNetwork):
    """The same network with the decoder called once per token, keys and values of [token; patches]
    made each time."""

    def embeddings(self, images: Tensor) -> Tensor:
        patches = self.encoder.forward_features(images)
        return torch.cat(
            [one_token(self.attention, head.token, patches) for head in self.each()], 1
        )

    def logits(self, e: Tensor) -> Tensor:
        return torch.cat([head(e[:, place]) for place, head in enumerate(self.each())], 1)


def one_token(block: TaskAttention, token: Tensor, patches: Tensor) -> Tensor:
    """(D,), (B, N, D) -> (B, 1, D)."""
    tokens = token.expand(len(patches), 1, -1)
    z = block.norm1(torch.cat([tokens, patches], 1))
    q, k, v = (
        layer(x).unflatten(2, (block.num_heads, -1)).transpose(1, 2)
        for layer, x in ((block.q, z[:, :1]), (block.k, z), (block.v, z))
    )
    e = tokens + block.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return e + block.mlp(block.norm2(e))


def networks(tasks: int) -> tuple[TokenNetwork, Looped]:
    torch.manual_seed(0)
    encoder = build(BackboneSettings(name="convit_local", img_size=32, weights="none"))
    heads = [TokenHead(384, CLASSES // tasks) for _ in range(tasks)]
    for head in heads:
        torch.nn.init.trunc_normal_(head.token, std=0.02)
    parts = (encoder, TaskAttention(384, 12), heads)
    return TokenNetwork(*parts), Looped(*parts)


def step(network: TokenNetwork, images: Tensor, labels: Tensor) -> Tensor:
    network.zero_grad(set_to_none=True)
    logits = network(images)
    F.binary_cross_entropy_with_logits(
        logits, F.one_hot(labels, logits.shape[1]).float()
    ).backward()
    return logits.detach()


def attention_per_image(layer: GatedAttention, x: Tensor) -> Tensor:
    """ConViT's own form: positions expanded over the batch before they are projected and
    normalised."""
    q, k = layer.qk(x).unflatten(2, (2, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    v = layer.v(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
    content = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    place = layer.pos_proj(layer.offsets.expand(len(x), -1, -1, -1)).permute(0, 3, 1, 2).softmax(-1)
    gate = layer.gate.sigmoid().view(1, -1, 1, 1)
    a = (1 - gate) * content + gate * place
    return layer.proj(((a / a.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))


def backward(function: Any, x: Tensor) -> None:
    function(x).square().mean().backward()


def naive_herding(features: Tensor, count: int) -> list[int]:
    """Each pick tries every unused image and measures the distance of the new mean."""
    unit = normalise(features)
    mean, chosen = unit.mean(0), list[int]()
    for _ in range(count):
        rest = [i for i in range(len(unit)) if i not in chosen]
        chosen.append(
            min(rest, key=lambda i: float((mean - unit[[*chosen, i]].mean(0)).square().sum()))
        )
    return chosen


def main() -> None:
    start()
    report = Report()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, CLASSES, (BATCH,))
    steps: dict[str, Any] = {}
    for tasks in (1, *DEMANDS):
        fast, slow = networks(tasks)
        report.equal(
            f"logits of {tasks} tasks, at once and one by one",
            step(fast, images, labels),
            step(slow, images, labels),
            1e-4,
        )
        steps |= {
            f"at once, {tasks}": partial(step, fast, images, labels),
            f"loop, {tasks}": partial(step, slow, images, labels),
        }
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

    encoder: Any = build(BackboneSettings(name="convit_local", img_size=32, weights="none"))
    layer, x = encoder.blocks[2].attn, torch.randn(BATCH, 64, 384)
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

    features = torch.randn(500, 384)
    none = torch.Generator()
    report.equal(
        "exemplars, fast and naive",
        torch.tensor(herding(features, 20, none)),
        torch.tensor(naive_herding(features, 20)),
        0,
    )
    timing = interleave(
        {
            "fast": partial(herding, features, 20, none),
            "naive": partial(naive_herding, features, 20),
        },
        rounds=3,
    )
    report.at_least(
        "herding 20 of 500 images, trying each / one product per pick",
        timing.ratio("naive", "fast"),
        10,
    )
    report.exit()


if __name__ == "__main__":
    main()
