"""Adapters: small trained layers after or parallel to modules of a frozen backbone.

Forward hooks insert them into any timm ViT with plain blocks; its modules do not change. A *form*
is the function that an adapter computes, for example `houlsby` or `parallel`; its keyword arguments
are the adapter's tensors. All adapters of a task are stacked: each kind of weight is one tensor
with the sites as its first axis.

Axes: S sites (the places of adapters, in the order of blocks), B images, N tokens, d width of the
backbone, m width of the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.errors import UserError

# Modules of a block that a Houlsby adapter follows: attention (with its projection) and the FFN.
# The adapter comes before the residual addition.
HOULSBY = ("attn", "mlp")
# Names of tensors that forms use only as weights and biases of linear layers. Under autocast,
# `AdapterSites.using` casts them.
LINEAR = frozenset({"down", "down_bias", "up", "up_bias", "a", "b"})
PARALLEL_SCALE = 0.1  # factor of AdaptFormer's parallel branch


def houlsby(x: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """Compute a(x) = x + W_up gelu(W_down x + b_down) + b_up.

    Args:
        x: Tokens (B, N, d).
        down: W_down, (m, d).
        down_bias: b_down, (m,).
        up: W_up, (d, m).
        up_bias: b_up, (d,).
    """
    return x + F.linear(F.gelu(F.linear(x, down, down_bias)), up, up_bias)


def parallel(
    out: Tensor,
    x: Tensor,
    down: Tensor,
    down_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute AdaptFormer: out + 0.1 (W_up (kept .* relu(W_down x + b_down)) + b_up).

    Args:
        out: Residual stream after the FFN's residual addition, (B, N, d).
        x: Residual stream before the FFN and its norm, (B, N, d).
        down: W_down, (m, d).
        down_bias: b_down, (m,).
        up: W_up, (d, m).
        up_bias: b_up, (d,).
        kept: Factors of the hidden units for dropout, (B, N, m). None: no dropout.
    """
    hidden = F.relu(F.linear(x, down, down_bias))
    return out + PARALLEL_SCALE * F.linear(hidden if kept is None else hidden * kept, up, up_bias)


class Bottlenecks(nn.Module):
    """The trained tensors of S adapters, stacked.

    Down-projections are initialised like PyTorch's Linear, but with zero bias. Up-projections are
    drawn from a normal distribution with standard deviation `up_std`. With the default 0 they are
    zero, and each adapter adds zero at first. The down-projections must then not be zero, because
    neither projection would get a gradient.

    Args:
        sites: Number of adapters S.
        width: Width d of the backbone.
        bottleneck: Width m of the bottleneck.
        up_std: Standard deviation of the initial up-projections.
        device: Device of the tensors.
    """

    def __init__(
        self,
        sites: int,
        width: int,
        bottleneck: int,
        up_std: float = 0.0,
        device: torch.device | None = None,
    ):
        super().__init__()
        shape = (sites, bottleneck, width)
        # (S, m, d)
        self.down = nn.Parameter(
            torch.empty(shape, device=device).uniform_(-1, 1) / math.sqrt(width)
        )
        self.down_bias = nn.Parameter(torch.zeros(shape[:2], device=device))  # (S, m)
        # (S, d, m)
        self.up = nn.Parameter(torch.randn(sites, width, bottleneck, device=device) * up_std)
        self.up_bias = nn.Parameter(torch.zeros(sites, width, device=device))  # (S, d)

    def tensors(self) -> dict[str, Tensor]:
        """Return the stacked tensors by name."""
        return dict(self.named_parameters())

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameter groups, without weight decay on biases."""
        return [
            {"name": "adapters", "params": [self.down, self.up], "weight_decay": weight_decay},
            {
                "name": "adapters.bias",
                "params": [self.down_bias, self.up_bias],
                "weight_decay": 0.0,
            },
        ]


def cast_for_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor to the autocast dtype. Outside autocast, return the tensor itself.

    This casts a stack of weights at once. Autocast would cast the weight of each layer separately.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


class SwitchedForm:
    """A function x -> form(x, **tensors) in a backbone. While `tensors` is None, it returns x.

    The object stays in the backbone for the backbone's lifetime, and only `tensors` changes. The
    guards of `torch.compile` check `tensors`, so compiled code respects the change. In a deep copy
    of the backbone `tensors` is None, so the copy computes the plain backbone.
    """

    def __init__(self, form: Callable[..., Tensor]):
        self.form = form
        self.tensors: dict[str, Tensor] | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return form(x, **tensors), or x if `tensors` is None."""
        if self.tensors is None:
            return x
        return self.form(x, **self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> SwitchedForm:
        return type(self)(self.form)


class Hook(SwitchedForm):
    """Forward hook that replaces the output of a module with `form(output, **tensors)`."""

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self.tensors is None:
            return None
        return self.form(output, **self.tensors)


class KeywordHook(SwitchedForm):
    """Forward pre-hook that replaces the keyword argument `name` of a module.

    The new value is `form(argument, **tensors)`. An argument that is None stays None.
    """

    def __init__(self, form: Callable[..., Tensor], name: str):
        super().__init__(form)
        self.name = name

    def __call__(
        self, module: nn.Module, inputs: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        argument = keywords.get(self.name)
        if self.tensors is None or argument is None:
            return None
        return inputs, keywords | {self.name: self.form(argument, **self.tensors)}

    def __deepcopy__(self, memo: dict[int, Any]) -> KeywordHook:
        return type(self)(self.form, self.name)


class BesideHook(Hook):
    """Hook whose form also gets the input of a module: `form(output, input, **tensors)`.

    Input and output can belong to different modules. `note` must be registered as a forward
    pre-hook of the module whose input is used.
    """

    input: Tensor | None = None

    def note(self, module: nn.Module, inputs: Any) -> None:
        """Store the input of the module, as a forward pre-hook."""
        self.input = None if self.tensors is None else inputs[0]

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        noted_input = self.input
        self.input = None
        if self.tensors is None:
            return None
        return self.form(output, noted_input, **self.tensors)


class AdapterSites:
    """The sites of a backbone at which adapters of one form are inserted.

    Args:
        backbone: A timm ViT.
        form: Function that computes an adapter from the output x (B, N, d) of the module at the
            site. It is called as form(x, **tensors of the site), or with `beside` as form(x, input,
            **tensors of the site).
        positions: Names of modules of a block. An adapter follows each of these modules; the empty
            name is the block itself.
        beside: Name of the module of a block whose input the form gets. None: the form gets no
            input.

    Raises:
        UserError: If a block lacks one of the modules.
    """

    def __init__(
        self,
        backbone: Any,
        form: Callable[..., Tensor],
        positions: tuple[str, ...] = HOULSBY,
        beside: str | None = None,
    ):
        self.width: int = backbone.embed_dim
        self.hooks: list[Hook] = []
        for index, block in enumerate(backbone.blocks):
            modules = dict(block.named_modules())
            needed = positions if beside is None else (*positions, beside)
            missing = [name for name in needed if name not in modules]
            if missing:
                raise UserError(
                    f"block {index} of the backbone has no module {missing[0]!r}, which the "
                    "adapters need; choose a ViT with plain blocks such as "
                    "vit_tiny_patch16_224 or deit_small_patch16_224"
                )
            for position in positions:
                hook = Hook(form) if beside is None else BesideHook(form)
                modules[position].register_forward_hook(hook)
                if isinstance(hook, BesideHook):
                    modules[beside].register_forward_pre_hook(hook.note)
                self.hooks.append(hook)

    def __len__(self) -> int:
        return len(self.hooks)

    @contextmanager
    def using(self, stacked: Mapping[str, Tensor | Sequence[Tensor]]) -> Iterator[None]:
        """Apply adapters inside the context. Gradients flow to their tensors.

        Args:
            stacked: Tensors by name. Each is stacked (S, ...), or a sequence with one tensor per
                site if the sizes of the adapters differ; sequences are not cast for autocast.
                Empty: no adapters.
        """
        by_site: dict[str, Sequence[Tensor]] = {}
        for name, tensor in stacked.items():
            if isinstance(tensor, Tensor):
                tensor = cast_for_autocast(tensor) if name in LINEAR else tensor
                by_site[name] = tensor.unbind(0)
            else:
                by_site[name] = tensor
        try:
            for site, hook in enumerate(self.hooks):
                hook.tensors = None
                if by_site:
                    hook.tensors = {name: tensors[site] for name, tensors in by_site.items()}
            yield
        finally:
            for hook in self.hooks:
                hook.tensors = None
