"""Tests of DyTox's encoder and task attention: they equal their equations written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.job import BackboneSettings
from workers.model import vit
from workers.model.convit import ConViT, GatedAttention, offsets
from workers.model.noise import TokenDropPath, draw_paths
from workers.model.task_attention import TaskAttention
from workers.rng import StepRng

CIFAR = {"img_size": 32, "patch_size": 4}
SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 6,
}


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def shaken(module: nn.Module) -> Any:
    torch.manual_seed(3)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.double().eval()


# ---- gated positional self-attention -------------------------------------------------------------
def written_out(layer: GatedAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and attention of ConViT's own form: a position table for each image, a mix
    of content and position, and rows divided by their sums."""
    b, n, width = x.shape
    side, heads = math.isqrt(n), layer.num_heads
    r = torch.tensor(
        [
            [
                [
                    j % side - i % side,
                    j // side - i // side,
                    (j % side - i % side) ** 2 + (j // side - i // side) ** 2,
                ]
                for j in range(n)
            ]
            for i in range(n)
        ],
        dtype=x.dtype,
    )
    q, k = (part.view(b, n, heads, -1).transpose(1, 2) for part in layer.qk(x).split(width, 2))
    v = layer.v(x).view(b, n, heads, -1).transpose(1, 2)
    content = (q @ k.transpose(2, 3) / math.sqrt(width / heads)).softmax(-1)
    position_scores = layer.pos_proj(r.expand(b, -1, -1, -1)).permute(0, 3, 1, 2).softmax(-1)
    g = torch.sigmoid(layer.gate)[None, :, None, None]
    a = (1 - g) * content + g * position_scores
    a = a / a.sum(-1, keepdim=True)
    return layer.proj((a @ v).transpose(1, 2).reshape(b, n, width)), a


def test_gated_attention_matches_reference_values_and_gradients() -> None:
    encoder: Any = ConViT(**SMALL)
    layer = shaken(encoder.blocks[1].attn)
    x = torch.randn(3, 16, 48, dtype=torch.float64, requires_grad=True)
    want, a = written_out(layer, x)
    output = layer(x)
    assert torch.allclose(output, want, atol=1e-12)
    assert torch.allclose(a.sum(-1), torch.ones(3, 6, 16, dtype=torch.float64))
    noise = torch.randn_like(output)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((output * noise).sum(), [x, *layer.parameters()]),
        torch.autograd.grad((want * noise).sum(), [x, *layer.parameters()]),
        strict=True,
    ):
        assert torch.allclose(gradient, expected_gradient, atol=1e-10)


def test_offsets_hold_column_row_and_squared_distance() -> None:
    r = offsets(3)
    assert r[0, 5].tolist() == [2, 1, 5]
    assert r[5, 0].tolist() == [-2, -1, 5]
    assert r[4, 4].tolist() == [0, 0, 0]


def test_convit_starts_as_three_by_three_convolution() -> None:
    model = ConViT(**CIFAR)
    for block in model.blocks:
        attn: Any = block.attn
        assert torch.equal(attn.v.weight, torch.eye(384))
        assert attn.gate.tolist() == [1.0] * 12
        assert {tuple(row) for row in attn.pos_proj.weight[:9].tolist()} == {
            (2.0 * x, 2.0 * y, -1.0) for x in (-1, 0, 1) for y in (-1, 0, 1)
        }
        assert attn.pos_proj.weight[:9].tolist()[5] == [2.0, 0.0, -1.0], "columns must come first"
        assert attn.pos_proj.weight[9:].abs().max() < 0.11, (
            "other heads start like any linear layer"
        )
        position_scores = attn.pos_proj(attn.offsets).permute(2, 0, 1).softmax(-1)
        assert position_scores[5, 27].argmax() == 28, "head 5 attends to the patch to the right"


def test_convit_blocks_depend_on_patch_order() -> None:
    """Permuting patches together with their position embeddings changes the output, unlike with
    plain attention (T11)."""
    model = shaken(ConViT(**SMALL))
    x, order = (
        torch.randn(2, 16, 48, dtype=torch.float64),
        torch.randperm(16, generator=torch.Generator().manual_seed(1)),
    )
    assert not torch.allclose(model.blocks(x[:, order]), model.blocks(x)[:, order])


@pytest.mark.parametrize(
    ("options", "patch_embed", "positions"),
    [(CIFAR, 18_816, 24_576), ({"img_size": 224, "patch_size": 16}, 295_296, 75_264)],
)
def test_convit_parameter_counts_equal_the_papers(
    options: dict[str, int], patch_embed: int, positions: int
) -> None:
    with torch.device("meta"):
        model = ConViT(**options)
    assert [parameters(block) for block in model.blocks] == [1_773_372] * 5
    assert parameters(model.patch_embed) == patch_embed
    assert model.pos_embed is not None
    assert model.pos_embed.numel() == positions
    assert parameters(model) == 8_866_860 + patch_embed + positions
    assert parameters(TaskAttention(384, 12)) == 1_773_312


def test_stochastic_depth_counts_the_decoder_as_sixth_block() -> None:
    model: Any = vit.build(
        BackboneSettings(name="convit_local", img_size=32, weights="none", drop_path=0.1)
    )
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks] == pytest.approx(
        [0, 0.02, 0.04, 0.06, 0.08]
    )


def test_convit_supports_the_backbone_interface() -> None:
    settings = BackboneSettings(
        name="convit_local",
        img_size=16,
        weights="none",
        options={k: v for k, v in SMALL.items() if k != "img_size"},
    )
    torch.manual_seed(0)
    model: Any = vit.build(settings)
    images = torch.randn(2, 3, 16, 16)
    assert torch.allclose(model(images), model.forward_features(images).mean(1), atol=1e-6)
    copy = vit.build(settings)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(images), model(images))
    assert vit.compute_digest(copy) == vit.compute_digest(model)
    vit.outline(settings)


# ---- task attention ------------------------------------------------------------------------------
def one_at_a_time(block: TaskAttention, token: Tensor, patches: Tensor) -> Tensor:
    """Return the paper's form: one token before the patches, with keys and values of token and
    patches. Shapes: (D,), (B, N, D) -> (B, D)."""
    b, heads = len(patches), block.num_heads
    z = block.norm1(torch.cat([token.expand(b, 1, -1), patches], 1))
    q = block.q(z[:, :1]).view(b, 1, heads, -1).transpose(1, 2)
    k, v = (layer(z).view(b, z.shape[1], heads, -1).transpose(1, 2) for layer in (block.k, block.v))
    o = (
        ((q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1) @ v)
        .transpose(1, 2)
        .reshape(b, 1, -1)
    )
    e: Tensor = token + block.proj(o)
    embedding: Tensor = (e + block.mlp(block.norm2(e)))[:, 0]
    return embedding


def test_batched_task_attention_matches_token_loop_in_values_and_gradients() -> None:
    block = shaken(TaskAttention(48, 6))
    tokens, patches = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 48), (3, 16, 48))
    )
    want = torch.stack([one_at_a_time(block, token, patches) for token in tokens], 1)
    output = block(tokens, patches)
    assert torch.allclose(output, want, atol=1e-12)
    noise = torch.randn_like(output)
    inputs = [tokens, patches, *block.parameters()]
    for gradient, expected_gradient in zip(
        torch.autograd.grad((output * noise).sum(), inputs),
        torch.autograd.grad((want * noise).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(gradient, expected_gradient, atol=1e-10)


def test_task_attention_output_is_independent_of_other_task_tokens() -> None:
    block = shaken(TaskAttention(48, 6))
    tokens, patches = (
        torch.randn(4, 48, dtype=torch.float64),
        torch.randn(2, 16, 48, dtype=torch.float64),
    )
    before = block(tokens, patches)
    tokens[2] += 1
    after = block(tokens, patches)
    assert torch.equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])
    assert not torch.allclose(before[:, 2], after[:, 2])


def test_task_attention_is_invariant_to_patch_order() -> None:
    block = shaken(TaskAttention(48, 6))
    tokens, patches = (
        torch.randn(4, 48, dtype=torch.float64),
        torch.randn(2, 16, 48, dtype=torch.float64),
    )
    assert torch.allclose(block(tokens, patches.flip(1)), block(tokens, patches), atol=1e-12)


def test_token_drop_is_independent_of_batch_share() -> None:
    block = TaskAttention(48, 6, drop_path=0.5)
    block.train()
    block.expect(3)
    rows = torch.arange(64)
    draw_paths(block, StepRng(1, 0, 0, rows, 64, torch.device("cpu")))
    first, second = (path.uniform for path in (block.drop_path1, block.drop_path2))
    assert first is not None
    assert second is not None
    assert first.shape == (64, 3)
    assert len({tuple(row) for row in (first.T >= 0.5).tolist()}) == 3
    assert not torch.equal(first, second)
    dropped = block.drop_path1(torch.ones(64, 3, 48))
    assert torch.equal(dropped, ((first >= 0.5) * 2.0)[..., None].expand(-1, -1, 48))
    draw_paths(block, StepRng(1, 0, 0, rows[1::2], 64, torch.device("cpu")))
    assert isinstance(block.drop_path1, TokenDropPath)
    assert block.drop_path1.uniform is not None
    assert torch.equal(block.drop_path1.uniform, first[1::2])
