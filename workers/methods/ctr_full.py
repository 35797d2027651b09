"""CTR whole: before the task-specific module, capsules of earlier tasks share what they know, gated
by how similar tasks are.

Ke, Liu, Ma, Xu, Shu: Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning,
NeurIPS 2021. Axes: S sites, B images, N tokens, T tasks up to the current one (which is the last),
d width, J x P transfer capsules, R filters of each kernel size. "Transfer capsules" are flattened
to J P channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.methods.adapter import added_share
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, StepContext
from workers.methods.ctr import CtrSettings, CtrTsm
from workers.model.masks import HardSample
from workers.model.vit import geometry
from workers.storage.taskstate import TaskState

KERNELS = (3, 4, 5)  # tokens that a routing filter sees
TRANSFER = 3  # J, transfer capsules per task
PER_TASK = ("p", "p_bias", "transfer")


class CtrFullSettings(CtrSettings):
    max_tasks: PositiveInt = Field(
        10, description="longest stream that there are capsules for; cannot be raised later"
    )
    capsule: PositiveInt = Field(3, description="P, size of a capsule")
    filters: PositiveInt = Field(100, description="R, routing filters of each kernel size")


def squash(z: Tensor) -> Tensor:
    """(|z|^2 / (1 + |z|^2)) z / |z| over the last axis; 0 stays 0, with a finite gradient."""
    square = z.square().sum(-1, keepdim=True)
    return z * (square.clamp(min=1e-16).sqrt() / (1 + square))


def strongest(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Maximum over positions of a convolution over tokens. u: (b, N, channels), weight: (R, K,
    channels) -> (b, R).

    Only the winning window has a gradient, so the search for it goes without one, and the winner is
    computed again."""
    (batch, tokens, _), (count, size, channels) = u.shape, weight.shape
    flat = weight.flatten(1)
    with torch.no_grad():
        windows = u.unfold(1, size, 1).transpose(2, 3).flatten(2)  # (b, N - K + 1, K channels)
        # (b, R)
        first = torch.bmm(flat.expand(batch, -1, -1), windows.transpose(1, 2)).max(2).indices
        at = (
            first[:, :, None]
            + torch.arange(size, device=u.device)
            + tokens * torch.arange(batch, device=u.device)[:, None, None]
        )
    winners = u.flatten(0, 1).index_select(0, at.flatten()).view(batch, count, size * channels)
    return (winners * flat).sum(2) + bias


def capsules(x: Tensor, p: Tensor, p_bias: Tensor, transfer: Tensor) -> Tensor:
    """Transfer capsules u_c = W_c squash(F_c x) of each task c. x: (B, N, d), p: (T, P, d),
    transfer: (T, J P, P) -> (B, T, N, J P)."""
    tasks, size, width = p.shape
    votes = F.linear(x, p.reshape(tasks * size, width), p_bias.reshape(-1))
    votes = squash(votes.unflatten(2, (tasks, size)))  # over the capsule, never over tasks
    return votes.transpose(1, 2) @ transfer.transpose(1, 2)


def knowledge(
    x: Tensor,
    p: Tensor,
    p_bias: Tensor,
    transfer: Tensor,
    similar: Tensor,
    similar_bias: Tensor,
    gate: Tensor,
    gate_bias: Tensor,
    mix: Tensor,
    mix_bias: Tensor,
    spread: Tensor,
    spread_bias: Tensor,
    noise: Tensor | None = None,
    **filters: Tensor,
) -> Tensor:
    """h = x + spread(v), v_j = sum over c <= t of delta_c a_c,j .* u_c,j: what the capsules of
    tasks so far say about x (B, N, d).

    noise: (B, T) uniform numbers, while training: delta is then sampled, with the gradient of a
    Gumbel softmax; else its mode."""
    u = capsules(x, p, p_bias, transfer)  # (B, T, N, J P)
    tasks = u.shape[1]
    query = torch.cat(
        [strongest(u[:, -1], filters[f"query{k}"], filters[f"query{k}_bias"]) for k in KERNELS], 1
    ).relu()
    asked = F.linear(query, mix, mix_bias).repeat_interleave(tasks, 0)  # (B T, R)
    # The maximum over tokens of relu(conv + asked) is relu(maximum of conv + asked): asked is the
    # same for all tokens.
    routes = torch.cat(
        [
            (strongest(u.flatten(0, 1), filters[f"key{k}"], filters[f"key{k}_bias"]) + asked).relu()
            for k in KERNELS
        ],
        1,
    )
    routes = routes.unflatten(0, (-1, tasks))  # (B, T, 3 R)
    # (B, T), the difference of the two logits of a gate
    score = F.linear(routes, gate, gate_bias).squeeze(2).float()
    delta = (score > 0).to(score.dtype) if noise is None else HardSample.apply(score, noise, 1.0)
    share = F.linear(routes, similar, similar_bias) * delta[:, :, None]  # delta a: (B, T, J P)
    v = (share[:, :, None] * u).sum(1)  # (B, N, J P)
    return x + F.linear(v, spread, spread_bias)


def capsule_bottleneck(
    x: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor, **shared: Tensor
) -> Tensor:
    """x + z2, where z1 = relu(fc1 h) sees what is known, h, and z2 = relu(fc2 z1); the masks are in
    the weights."""
    h = knowledge(x, **shared)
    return x + F.linear(F.linear(h, down, down_bias).relu_(), up, up_bias).relu_()


class Capsules(nn.Module):
    """The tensors of all knowledge-sharing modules, stacked over sites (S, ...), as PyTorch's
    Linear and Conv1d start; the capsules of each task (S, T, ...) are independent of each other's.
    transfer ~ N(0, 1)."""

    def __init__(self, sites: int, width: int, tasks: int, size: int, filters: int):
        super().__init__()
        self.sites, channels, routes = sites, TRANSFER * size, len(KERNELS) * filters
        self.layer("p", (tasks, size, width), width, bias=(tasks, size))
        self.transfer = nn.Parameter(torch.randn(sites, tasks, channels, size))
        for k in KERNELS:
            self.layer(f"query{k}", (filters, k, channels), channels * k)
            self.layer(f"key{k}", (filters, k, channels), channels * k)
        self.layer("mix", (filters, routes), routes)
        self.layer("similar", (channels, routes), routes)
        self.layer("gate", (1, routes), routes)
        self.layer("spread", (width, channels), channels)

    def layer(
        self, name: str, shape: tuple[int, ...], inputs: int, bias: tuple[int, ...] | None = None
    ) -> None:
        """A weight of `shape` per site, and its bias, by default one per output."""
        for full, dims in ((name, shape), (f"{name}_bias", bias or shape[:1])):
            self.register_parameter(
                full,
                nn.Parameter(torch.empty(self.sites, *dims).uniform_(-1, 1) / math.sqrt(inputs)),
            )

    def tensors(self, tasks: int) -> dict[str, Tensor]:
        """All tensors by name; of those per task only the first `tasks`: later ones take no part,
        and get no gradient."""
        return {
            name: t[:, :tasks] if name in PER_TASK else t for name, t in self.named_parameters()
        }

    def locks(self, tasks: int) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Capsules of tasks after the first `tasks`: decay must not move them before their task
        comes."""
        later = torch.arange(self.transfer.shape[1], device=self.transfer.device) >= tasks
        return {
            name: (t, later.view(1, -1, *[1] * (t.ndim - 2)))
            for name, t in self.named_parameters()
            if name in PER_TASK
        }


class CtrFull(CtrTsm[CtrFullSettings]):
    """CTR's TSM behind a knowledge-sharing module: h = x + v, where v sums the capsules of tasks so
    far that a gate lets through, and the bottleneck sees h. Tasks hand on capsules and routing
    beside the adapters; all of that is shared and not protected (only the TSM is), so later tasks
    can change the answers of earlier ones: for better, the paper hopes, or worse.

    Where it differs from the released code: a capsule's tasks and channels are not mixed up, squash
    runs over a capsule and not over tasks, gates draw noise in training only, and R is that of the
    task in training. One logit per gate, the difference of the pair: same law. The number of tasks
    must be known: `max_tasks`.
    """

    name = "ctr_full"
    carries = ("adapters", "capsules", "used")
    may_forget = True
    form: ClassVar[Callable[..., Tensor]] = staticmethod(capsule_bottleneck)
    Settings = CtrFullSettings

    @classmethod
    def steps_for(cls, settings: CtrFullSettings, position: int) -> tuple[Step, ...]:
        if position >= settings.max_tasks:
            raise UserError(
                f"method {cls.name!r} has capsules for max_tasks={settings.max_tasks} tasks, "
                "and the stream has more; raise max_tasks, "
                "which trains the stream anew"
            )
        return super().steps_for(settings, position)

    def __init__(self, backbone: nn.Module, settings: CtrFullSettings, seed: int):
        super().__init__(backbone, settings, seed)
        shape = geometry(backbone)
        tokens = shape["tokens"] + shape["prefix"]
        if tokens < max(KERNELS):
            raise UserError(
                f"the backbone sees {tokens} tokens, and {self.name} routes by windows of up to "
                f"{max(KERNELS)}; choose a larger img_size or "
                "smaller patches"
            )
        self.capsules = Capsules(
            len(self.sites),
            self.sites.width,
            settings.max_tasks,
            settings.capsule,
            settings.filters,
        )
        self.shared["capsules"] = self.capsules
        self.positions: dict[str, int] = {}  # task -> its place among the capsules

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.steps_for(self.settings, self.position)  # raises where there is no capsule left
        self.positions[context.task.name] = self.position
        return groups

    def shared_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        named = list(self.capsules.named_parameters())
        return [
            *super().shared_groups(optim),
            {
                "name": "capsules",
                "params": [p for n, p in named if not n.endswith("bias")],
                "weight_decay": optim.weight_decay,
            },
            {
                "name": "capsules.bias",
                "params": [p for n, p in named if n.endswith("bias")],
                "weight_decay": 0.0,
            },
        ]

    def locks(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        return super().locks() | self.capsules.locks(self.position + 1)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        # (B, S, T)
        uniform = batch.draw.per_sample("ctr.gates", len(self.sites), self.position + 1)
        return (
            super().training_weights(batch, progress)
            | self.capsules.tensors(self.position + 1)
            | {"noise": uniform.transpose(0, 1)}
        )

    def state(self, **parts: Any) -> TaskState:
        return super().state(**parts, meta={"position": self.position})

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        if state.masks:
            self.positions[state.task] = state.meta["position"]

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        adapters = super().serving_weights(task)
        return adapters | self.capsules.tensors(self.positions[task] + 1) if adapters else {}

    def flops_share(self, state: TaskState) -> float:
        tasks, channels = state.meta["position"] + 1, self.capsules.transfer.shape[2]
        each = tasks * self.capsules.transfer[0, 0].numel() + self.sites.width * (
            tasks * self.settings.capsule + channels
        )
        routing = (tasks + 1) * self.settings.filters * sum(KERNELS) * channels
        return super().flops_share(state) + added_share(
            self.backbone, len(self.sites) * (each + routing)
        )
