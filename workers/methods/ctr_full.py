"""The full CTR: a knowledge-sharing module in front of the task-specific module (TSM) of `ctr`.

The knowledge-sharing module combines capsules of all tasks so far; gates select the capsules of
similar tasks.

Ke, Liu, Ma, Xu, Shu: Achieving Forgetting Prevention and Knowledge Transfer in Continual Learning,
NeurIPS 2021.

Axes: S sites (places of adapters, see `AdapterSites`), B images, N tokens, T tasks up to the
current one (which is the last), d width, J transfer capsules of P channels for each task (flattened
to J P channels), R filters of each kernel size K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.methods.adapter import compute_added_share
from workers.methods.base import OptimPlan, ParamGroup, Progress, Step, StepContext
from workers.methods.ctr import CtrSettings, CtrTsm
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import cast_for_autocast
from workers.model.masks import HardSample
from workers.model.routes import find_maxima, join_kernels, mix_capsules, squash
from workers.model.tokens import count_block_tokens
from workers.storage.taskstate import TaskState

# Kernel sizes of the routing filters, in tokens.
KERNELS = (3, 4, 5)
# J, transfer capsules per task.
TRANSFER = 3
# Names of the layers in `Capsules` that are linear; the others are filters over tokens.
LINEAR = ("p", "mix", "similar", "gate", "spread")
# Names of the tensors in `Capsules` with an axis of tasks.
PER_TASK = ("p", "p_bias", "transfer")


class CtrFullSettings(CtrSettings):
    """Settings of `ctr_full`."""

    max_tasks: PositiveInt = Field(
        10,
        description="largest number of tasks in the stream; each has its capsules from the "
        "start, so that a change of this number trains the stream again",
    )
    capsule: PositiveInt = Field(3, description="P, number of channels of a capsule")
    filters: PositiveInt = Field(
        100, description="R, number of routing filters of each kernel size (3, 4 and 5 tokens)"
    )


def capsules(x: Tensor, p: Tensor, p_bias: Tensor, transfer: Tensor) -> Tensor:
    """Return the transfer capsules u_c = W_c squash(F_c x) of each task c, (B, T, N, J P).

    Args:
        x: Tokens (B, N, d).
        p: Weights F (T, P, d).
        p_bias: Biases of F (T, P).
        transfer: Weights W (T, J P, P).
    """
    tasks, size, width = p.shape
    votes = F.linear(x, p.reshape(tasks * size, width), p_bias.reshape(-1))
    # squash over the P channels of a capsule; the released code squashes over tasks
    votes = squash(votes.unflatten(2, (tasks, size)))  # (B, T, N, P)
    return votes @ transfer.transpose(1, 2)


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
    query_bias: Tensor,
    key_bias: Tensor,
    noise: Tensor | None = None,
    **filters: Tensor,
) -> Tensor:
    """Return h = x + spread(v), v_j = sum over c <= t of delta_c a_c,j .* u_c,j, (B, N, d).

    v is the knowledge of the tasks so far about x. u_c,j is transfer capsule j of task c (see
    `capsules`), a_c its similarity to the current task t, and delta_c its gate, 0 or 1. a_c and the
    score of the gate are linear functions of the route of task c: relu(keys of task c + query of
    task t) for each kernel size.

    Args:
        x: Tokens (B, N, d).
        p: Weights F (T, P, d) of the capsules; see `capsules`.
        p_bias: Biases (T, P) of F.
        transfer: Weights W (T, J P, P) of the capsules.
        similar: Weights (J P, 3 R) of a.
        similar_bias: Biases (J P,) of a.
        gate: Weights (1, 3 R) of the score of the gate.
        gate_bias: Bias (1,) of the score.
        mix: Weights (R, 3 R) of the query, from the filters of all kernel sizes.
        mix_bias: Biases (R,) of the query.
        spread: Weights (d, J P) of `spread`.
        spread_bias: Biases (d,) of `spread`.
        query_bias: Biases (3, R) of the query filters, in the order of KERNELS.
        key_bias: Biases (3, R) of the key filters.
        noise: Logistic random numbers (B, T), in training: delta is sampled, with the gradient of a
            Gumbel softmax. None: delta is 1 if its score is positive.
        filters: `query{K}` and `key{K}` (R, K, J P) for each kernel size K; and, if autocast casts
            them for matrix products, the casts `query{K}_cast` and `key{K}_cast`.
    """
    u = capsules(x, p, p_bias, transfer)  # (B, T, N, J P)
    tasks = u.shape[1]
    names = [f"{kind}{k}" for k in KERNELS for kind in ("key", "query")]
    exact = [filters[name] for name in names]
    scoring = [filters.get(f"{name}_cast", filters[name]) for name in names]
    u, keys, queries = find_maxima(u, exact, scoring)
    query, _ = join_kernels(queries, query_bias, mix.dtype)  # (B, 3 R)
    # The maximum over tokens of relu(conv + query) is relu(maximum of conv + query), because the
    # query is the same for all tokens.
    query = F.linear(query, mix, mix_bias)
    # Two equal tensors, each of which is used once; `join_kernels` explains why.
    routes, same_routes = join_kernels(keys, key_bias, gate.dtype, query)  # (B T, 3 R)
    # (B, T), the difference of the two logits of a gate
    score = F.linear(routes.unflatten(0, (-1, tasks)), gate, gate_bias).squeeze(2)
    if noise is None:
        delta = (score > 0).float()
    else:
        delta = HardSample.apply(score, noise, 1.0)
    similarity = F.linear(same_routes.unflatten(0, (-1, tasks)), similar, similar_bias)
    v = mix_capsules(similarity, delta, u, spread.dtype)  # (B, N, J P)
    return x + F.linear(v, spread, spread_bias)


def capsule_bottleneck(
    x: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor, **shared: Tensor
) -> Tensor:
    """Return x + z2 with z1 = relu(fc1 h), z2 = relu(fc2 z1), h from `knowledge`; x: (B, N, d).

    The weights are masked already.
    """
    h = knowledge(x, **shared)
    z1 = F.linear(h, down, down_bias).relu()
    z2 = F.linear(z1, up, up_bias).relu()
    return x + z2


class Capsules(nn.Module):
    """The tensors of all knowledge-sharing modules, stacked over sites (S, ...).

    Here T is the largest number of tasks. The capsules of a task are computed from its own part of
    the tensors (S, T, ...) only; later tasks train them further. Weights are initialised like
    PyTorch's Linear and Conv1d, `transfer` with N(0, 1).
    """

    def __init__(self, sites: int, width: int, tasks: int, size: int, filters: int):
        super().__init__()
        self.sites = sites
        channels = TRANSFER * size
        routes = len(KERNELS) * filters
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
        """Register a weight of `shape` per site and its bias, by default one per output."""
        bias_shape = bias or shape[:1]
        for full_name, dims in ((name, shape), (f"{name}_bias", bias_shape)):
            start = torch.empty(self.sites, *dims).uniform_(-1, 1) / math.sqrt(inputs)
            self.register_parameter(full_name, nn.Parameter(start))

    def tensors(self, tasks: int) -> dict[str, Tensor]:
        """Return all tensors by name, with the capsules of only the first `tasks` tasks.

        Capsules of later tasks are not used and get no gradient.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            tensors[name] = parameter[:, :tasks] if name in PER_TASK else parameter
        return tensors

    @staticmethod
    def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of `knowledge` for all sites (S, ...), from the result of `tensors`.

        Operations that are the same at each site, such as the casts of autocast, run here once for
        all sites. Uniform random numbers `noise` become logistic ones.
        """
        stacked: dict[str, Tensor] = {}
        for name in LINEAR:
            for full_name in (name, f"{name}_bias"):
                stacked[full_name] = cast_for_autocast(tensors[full_name])
        stacked["transfer"] = cast_for_autocast(tensors["transfer"])
        for kind in ("query", "key"):
            stacked[f"{kind}_bias"] = torch.stack([tensors[f"{kind}{k}_bias"] for k in KERNELS], 1)
            for k in KERNELS:
                filters = tensors[f"{kind}{k}"]
                stacked[f"{kind}{k}"] = filters
                with torch.no_grad():
                    cast = cast_for_autocast(filters)
                if cast is not filters:
                    stacked[f"{kind}{k}_cast"] = cast
        if "noise" in tensors:
            noise = tensors["noise"]
            stacked["noise"] = torch.logit(noise, out=torch.empty(noise.shape, device=noise.device))
        return stacked

    def locks(self, tasks: int) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return locks of the capsules of later tasks, which weight decay must not change.

        Later tasks are those after the first `tasks`. A lock is True for entries that must not
        change. It has the shape (1, T, 1, ...) and broadcasts to its parameter.

        Returns:
            Name -> (parameter, lock).
        """
        is_later = torch.arange(self.transfer.shape[1], device=self.transfer.device) >= tasks
        locks = {}
        for name, parameter in self.named_parameters():
            if name in PER_TASK:
                further_axes = [1] * (parameter.ndim - 2)
                locks[name] = (parameter, is_later.view(1, -1, *further_axes))
        return locks


class CtrFull(CtrTsm[CtrFullSettings]):
    """CTR's TSM after a knowledge-sharing module: the bottleneck gets x + spread(v) instead of x.

    v is a sum over capsules of the tasks so far; a gate for each task includes or excludes its
    capsules (`knowledge`). The chain carries capsules and routing weights together with the
    adapters. All tasks train them, and only the adapters are protected, so later tasks can change
    the outputs on earlier tasks.

    Differences from the released code:
    - The code mixes up the axes of tasks and of channels in a capsule. Here squash runs over a
      capsule, in the code over tasks.
    - Gates draw noise only in training. The sparsity penalty of `ctr_tsm` is computed from the
      masks of the current task.
    - A gate has one logit, the difference of the pair in the code; its distribution is the same.
    - The largest number of tasks must be known in advance: `max_tasks`.
    """

    name = "ctr_full"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "bits, head"
    train_defaults = TrainDefaults(
        lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    carries = ("adapters", "capsules", "used")
    may_forget = True
    form: ClassVar[Callable[..., Tensor]] = staticmethod(capsule_bottleneck)
    Settings = CtrFullSettings

    @classmethod
    def steps_for(cls, settings: CtrFullSettings, position: int) -> tuple[Step, ...]:
        if position >= settings.max_tasks:
            raise UserError(
                f"method {cls.name!r} has capsules for max_tasks={settings.max_tasks} tasks, "
                "and the stream has more; raise max_tasks, which trains the stream again"
            )
        return super().steps_for(settings, position)

    def __init__(self, backbone: nn.Module, settings: CtrFullSettings, seed: int):
        super().__init__(backbone, settings, seed)
        tokens = count_block_tokens(backbone)
        if tokens < max(KERNELS):
            raise UserError(
                f"the backbone sees {tokens} tokens, and {self.name} routes by windows of up to "
                f"{max(KERNELS)}; choose a larger img_size or smaller patches"
            )
        self.capsules = Capsules(
            len(self.sites),
            self.sites.width,
            settings.max_tasks,
            settings.capsule,
            settings.filters,
        )
        self.shared["capsules"] = self.capsules
        # task -> index of its capsules, the number of tasks before it
        self.positions: dict[str, int] = {}

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.steps_for(self.settings, self.position)  # raises if no capsules are left
        self.positions[context.task.name] = self.position
        return groups

    def shared_groups(self, optim: OptimPlan) -> list[ParamGroup]:
        weights = []
        biases = []
        for name, parameter in self.capsules.named_parameters():
            if name.endswith("bias"):
                biases.append(parameter)
            else:
                weights.append(parameter)
        return [
            *super().shared_groups(optim),
            {"name": "capsules", "params": weights, "weight_decay": optim.weight_decay},
            {"name": "capsules.bias", "params": biases, "weight_decay": 0.0},
        ]

    def locks(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        return super().locks() | self.capsules.locks(self.position + 1)

    def stack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stacked = super().stack(tensors)
        return stacked | self.capsules.stack(tensors) if tensors else stacked

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        num_tasks = self.position + 1
        uniform = batch.draw.per_sample("ctr.gates", len(self.sites), num_tasks)  # (B, S, T)
        adapters = super().training_weights(batch, progress)
        noise = {"noise": uniform.transpose(0, 1)}
        return adapters | self.capsules.tensors(num_tasks) | noise

    def state(self, **parts: Any) -> TaskState:
        return super().state(**parts, meta={"position": self.position})

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        if state.masks:  # a base task has none: the plain backbone serves it
            self.positions[state.task] = state.meta["position"]

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        adapters = super().serving_weights(task)
        if not adapters:  # a base task
            return {}
        return adapters | self.capsules.tensors(self.positions[task] + 1)

    def flops_share(self, state: TaskState) -> float:
        tasks = state.meta["position"] + 1
        channels = self.capsules.transfer.shape[2]  # J P
        # weights applied to each token at one site
        projections = self.sites.width * (tasks * self.settings.capsule + channels)
        transfers = tasks * self.capsules.transfer[0, 0].numel()
        routing = (tasks + 1) * self.settings.filters * sum(KERNELS) * channels
        weights = len(self.sites) * (projections + transfers + routing)
        return super().flops_share(state) + compute_added_share(self.backbone, weights)
