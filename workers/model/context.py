"""Context Broadcasting: add the mean of all tokens (uniform attention) to every token of a ViT.

Forward hooks insert it into the blocks of an existing backbone. In this module, "context" means a
module for Context Broadcasting or a uniform attention head.

Hyeon-Woo, Yu-Ji, Heo, Han, Oh, Oh: Scratching Visual Transformer's Back with Uniform Attention,
ICCV 2023. Axes: B images, N tokens (prefix tokens first), D width, H heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import ContextSettings, key_inputs

PLAIN = "a plain ViT such as vit_tiny_patch16_224 or deit_small_patch16_224"
HEADS = ("replace", "parallel", "compensate")  # kinds with uniform heads in attention
# place of the other kinds -> changed parts of a block
PARTS = {"end": ("mlp",), "front": ("mlp",), "attention": ("attn",), "both": ("attn", "mlp")}


class Context(nn.Module):
    """CB(X)_i = (x_i + c) / 2 with c = mean_j x_j over all tokens including the class token.

    The module has no parameters, and maps (B, N, D) to the same shape.

    Args:
        pool: Definition of c. `mean`: the mean over tokens; `max`: the maximum over tokens in each
            channel; `class`: the class token.
    """

    def __init__(self, pool: str):
        super().__init__()
        self.pool = pool

    def pooled(self, x: Tensor) -> Tensor:
        """Return c, (B, 1, D)."""
        if self.pool == "class":
            return x[:, :1]
        if self.pool == "max":
            return x.amax(1, keepdim=True)
        return x.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.pooled(x)) / 2


class ScaledContext(Context):
    """CB_S(X)_i = a x_i + Lambda * c with a learned Lambda (D,), elementwise.

    With a = Lambda = 1/2 this is CB; with a = 1 and Lambda = 0 the output is the input. The formula
    of the paper was not available to us; a = 1 is our interpretation. By default Lambda starts at
    0, so weights that were trained without this module give the same outputs until Lambda changes.

    Args:
        pool: Definition of c, see `Context`.
        width: D.
        own: a, the factor of the token itself.
        start: Initial value of Lambda.
    """

    def __init__(self, pool: str, width: int, own: float, start: float):
        super().__init__(pool)
        self.own = own
        self.scale = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.own * x + self.scale * self.pooled(x)


class Excitation(Context):
    """Squeeze and excitation of tokens: x_i * sigmoid(W2 relu(W1 c + b1) + b2), elementwise.

    Hu, Shen, Sun: Squeeze-and-Excitation Networks, CVPR 2018, with the mean over tokens in place of
    the mean over pixels. Unlike CB it only scales channels, the same for every token.

    Args:
        pool: Definition of c, see `Context`.
        width: D.
        reduction: W1 maps D to D / reduction channels (rounded down, at least 1).
    """

    def __init__(self, pool: str, width: int, reduction: int):
        super().__init__(pool)
        squeezed = max(1, width // reduction)
        self.fc1 = nn.Linear(width, squeezed)
        self.fc2 = nn.Linear(squeezed, width)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.fc2(self.fc1(self.pooled(x)).relu()).sigmoid()  # (B, 1, D)
        return x * gate


class UniformHead(nn.Module):
    """A head with uniform attention: W_o mean_j W_v x_j, the same for every token.

    (B, N, D) -> (B, 1, D). The mean commutes with W_v, so only the mean token is projected. Both
    weights are initialised like timm's linear layers.
    """

    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.v = nn.Linear(width, head_width, bias=False)
        self.proj = nn.Linear(head_width, width, bias=False)
        for linear in (self.v, self.proj):
            nn.init.trunc_normal_(linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        value = self.v(x.mean(1, keepdim=True))  # (B, 1, d)
        projected: Tensor = self.proj(value)
        return projected


# Forward hooks. All blocks get the same hooks, and an attribute of the module enables a hook:
# torch.compile compiles a block again if its hooks differ. So the compiled code of one block also
# serves the other blocks with equal attributes.
def _behind(module: Any, inputs: Any, output: Tensor) -> Tensor:
    mixed: Tensor = module.context(output)
    return mixed


def _in_front(module: Any, inputs: Any) -> Tensor:
    mixed: Tensor = module.front(inputs[0])
    return mixed


def _beside(module: Any, inputs: Any, output: Tensor) -> Tensor:
    if module.uniform is None:
        return output
    uniform: Tensor = module.uniform(inputs[0])
    return output + uniform


def _first_uniform(module: Any, inputs: Any, queries: Tensor) -> Tensor:
    """Return queries (B, H, N, d), with 0 for the queries of the first head.

    The softmax of this head is then uniform over all unmasked keys.
    """
    if not module.first_uniform:
        return queries
    return torch.cat([torch.zeros_like(queries[:, :1]), queries[:, 1:]], 1)


def insert_context(backbone: nn.Module, settings: ContextSettings) -> None:
    """Insert context into the chosen blocks, with hooks that stay for the backbone's lifetime.

    Existing parameters keep their names and values. `settings.kind` selects what is inserted:

    - `cb`, `cbs`, `se`: a module in the branch that `settings.place` selects: at the end of the MLP
      or of attention (or of both), before layer scale, stochastic depth and the residual addition;
      or in front of the MLP, after its norm. CB (unless `pool` is `max`) commutes with affine
      operations on single tokens. Therefore the middle of the MLP after the activation would be the
      same function as its end at four times the cost, and before the activation that of its front.
    - `replace`: the first attention head attends uniformly to all tokens. Its queries and keys stay
      among the parameters, but nothing depends on them.
    - `parallel`: attention gets an additional uniform head.
    - `compensate`: both `replace` and `parallel`. The new head has as many weights as the queries
      and keys of the replaced head. This is our interpretation of the paper's comparison at equal
      size.

    Args:
        backbone: The backbone.
        settings: Settings of the context.

    Raises:
        UserError: If the architecture does not support the settings.
    """
    at = f"backbone.context.kind is {settings.kind!r}, and"
    if not isinstance(backbone, VisionTransformer):
        raise UserError(
            f"{at} the backbone is a {type(backbone).__name__}, which has no tokens; leave "
            f"backbone.context out, or choose {PLAIN}"
        )
    depth = len(backbone.blocks)
    chosen = range(depth) if settings.blocks == "all" else settings.blocks
    if any(block >= depth for block in chosen):
        raise UserError(
            f"backbone.context.blocks is {list(chosen)}, but the backbone has blocks 0 to "
            f"{depth - 1}; name some of those, or `all`"
        )
    if settings.pool == "class" and not backbone.has_class_token:
        raise UserError(
            "backbone.context.pool is 'class', and the backbone has no class token; use `mean` "
            "or `max`"
        )
    in_heads = settings.kind in HEADS
    part_names = ("attn",) if in_heads else PARTS[settings.place]
    for index, block in enumerate(backbone.blocks):
        for part_name in part_names:
            part = getattr(block, part_name, None)
            if part is None or (in_heads and not isinstance(part, Attention)):
                raise UserError(
                    f"{at} block {index} of the backbone has a {type(part).__name__} in its place; "
                    f"choose {PLAIN}"
                )
            _add_to_part(part, settings, index in chosen, backbone.embed_dim)
    backbone.broadcasts = settings  # type: ignore[assignment]


def _add_to_part(part: Any, settings: ContextSettings, chosen: bool, width: int) -> None:
    """Add context and hooks to the MLP or the attention of one block.

    Args:
        part: The MLP or the attention.
        settings: Settings of the context.
        chosen: Whether the block has context. Other blocks get the hooks only.
        width: Width D of the backbone.
    """
    if settings.kind not in HEADS:
        module = _make_context(settings, width) if chosen else nn.Identity()
        if settings.place == "front":
            part.front = module
            part.register_forward_pre_hook(_in_front)
        else:
            part.context = module
            part.register_forward_hook(_behind)
    if settings.kind in ("replace", "compensate"):
        part.q_norm.first_uniform = chosen
        part.q_norm.register_forward_hook(_first_uniform)
    if settings.kind in ("parallel", "compensate"):
        part.uniform = UniformHead(width, part.head_dim) if chosen else None
        part.register_forward_hook(_beside)


def _make_context(settings: ContextSettings, width: int) -> Context:
    if settings.kind == "cb":
        return Context(settings.pool)
    if settings.kind == "se":
        return Excitation(settings.pool, width, settings.reduction)
    return ScaledContext(settings.pool, width, settings.own, settings.start)


def encode_settings(backbone: nn.Module) -> bytes:
    """Return the context settings as JSON, for the backbone's digest; empty without context.

    Settings with their neutral value are omitted, so digests in stored states stay valid.
    """
    settings: ContextSettings | None = getattr(backbone, "broadcasts", None)
    if settings is None:
        return b""
    return settings.model_dump_json(include=set(key_inputs(settings))).encode()


def context_modules(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield context modules and uniform heads of a backbone, by name."""
    for name, module in backbone.named_modules():
        if isinstance(module, (Context, UniformHead)):
            yield name, module


def context_parameter_names(backbone: nn.Module) -> list[str]:
    """Return the names of the parameters of context. Published weights lack these parameters."""
    names: list[str] = []
    for prefix, module in context_modules(backbone):
        names += [f"{prefix}.{name}" for name, _ in module.named_parameters()]
    return names


def mixes_all_tokens(block: nn.Module) -> bool:
    """Return whether a block contains Context Broadcasting.

    In this case the block must compute all tokens, because an output token can depend on the
    outputs of a branch at other tokens.
    """
    return any(isinstance(module, Context) for module in block.modules())


def find_context(part: nn.Module, name: str = "context") -> nn.Module:
    """Return the context of the MLP or the attention of a block, or an `Identity` without it.

    Args:
        part: The MLP or the attention.
        name: `context` (behind the part) or `front` (in front of it).
    """
    module = getattr(part, name, None)
    return module if isinstance(module, Context) else nn.Identity()


def count_uniform_multiply_adds(backbone: nn.Module) -> int:
    """Count the multiply-adds of additional uniform heads for one image.

    The count does not depend on the number of tokens, because only the mean token is projected.
    """
    heads = [m for _, m in context_modules(backbone) if isinstance(m, UniformHead)]
    return sum(parameter.numel() for head in heads for parameter in head.parameters())
