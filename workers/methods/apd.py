"""APD: each weight is a shared part, scaled per task and output feature, plus a sparse task part.

The weight of task t is sigma .* M_t + tau_t (.* multiplies entries): the shared part sigma, a scale
M_t = sigmoid(v_t) for each output feature, and the sparse part tau_t. Later tasks continue to train
sigma, and adjust the tau of earlier tasks to it. A star, as in sigma* and tau*, marks the value at
the start of the task in training.

Yoon, Kim, Yang, Hwang: Scalable and Order-robust Continual Learning with Additive Parameter
Decomposition, ICLR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, TrainSettings
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import cast_for_autocast
from workers.model.frozen import LAYERS
from workers.model.norms import norm_parameter_names
from workers.model.weights import Copies, weight_sites
from workers.storage.taskstate import Carried, TaskState, pack_mask, select_with_prefix, unpack_mask

MAX_KMEANS_ROUNDS = 100  # maximum number of k-means rounds; most runs converge far earlier
# Warn about a consolidation that replaces more than this share of a task's entries of tau.
REPLACED_SHARE_LIMIT = 0.5


class ApdSettings(MethodSettings):
    """Settings of `apd`."""

    lambda1: NonNegativeFloat = Field(
        4e-4,
        description="weight of the L1 penalty on tau; for `zeros: threshold` also the "
        "magnitude up to which an entry of tau is set to zero",
    )
    lambda2: PositiveFloat = Field(
        100.0,
        description="weight of the L2 penalty on changes of the effective weights of earlier tasks",
    )
    retro: Literal["train", "frozen_tau"] = Field(
        "train",
        description="tau of earlier tasks while sigma changes: `train`: follows sigma at its "
        "optimum, which is computed (the paper trains it); `frozen_tau`: fixed",
    )
    zeros: Literal["threshold", "proximal"] = Field(
        "threshold",
        description="how tau becomes sparse: `threshold`: entries of magnitude up to lambda1 are "
        "set to zero at the end of a task; `proximal`: entries stay at zero until the magnitude of "
        "their gradient exceeds lambda1, and stop at zero instead of changing sign",
    )
    tau_start: Literal["zero", "sigma"] = Field(
        "zero",
        description="initial value of tau: `zero`, or `sigma`: a copy of sigma, as in the "
        "released code",
    )
    v_start: float = Field(
        4.0, description="initial value of v; the scale of an output feature is M = sigmoid(v)"
    )
    copies: bool = Field(
        True, description="whether each task trains its own copies of norms and biases"
    )
    consolidate_every: NonNegativeInt = Field(
        5, description="K: consolidate tau of all tasks after every K-th task; 0: never"
    )
    clusters: Annotated[PositiveInt, ActiveIf("consolidate_every", but=(0,))] = Field(
        2,
        description="k0, number of clusters of tasks at the first consolidation; every later "
        "one has k0 more",
    )
    gap: Annotated[NonNegativeFloat, ActiveIf("consolidate_every", but=(0,))] = Field(
        0.1,
        description="entries of tau that differ little in a cluster become one value: if their "
        "maximum minus their minimum over its tasks is at most `gap` times the mean magnitude of "
        "the cluster's nonzero entries",
    )


@dataclass(frozen=True)
class Sparse:
    """The nonzero entries of a tensor, on the CPU.

    Attributes:
        values: Values (n,), in the order of the flat tensor.
        where: For kind `at` the int32 positions (n,) in the flat tensor, for kind `bits` one packed
            bit per entry of the tensor. The smaller form is used, which is `bits` if at least one
            entry in 32 is nonzero.
    """

    values: Tensor
    where: Tensor
    kind: Literal["at", "bits"]

    @classmethod
    def of(cls, tensor: Tensor) -> Sparse:
        """Return the sparse form of a dense tensor."""
        flat = tensor.detach().flatten()
        is_nonzero = flat != 0
        positions = is_nonzero.nonzero().squeeze(1)
        values = flat[positions].cpu()
        num_bytes_of_positions = 4 * len(positions)
        num_bytes_of_bits = (flat.numel() + 7) // 8
        if num_bytes_of_positions >= num_bytes_of_bits:
            return cls(values, pack_mask(is_nonzero), "bits")
        return cls(values, positions.to(torch.int32).cpu(), "at")

    def support(self, shape: tuple[int, ...]) -> Tensor:
        """Return a boolean mask of this shape: True where the tensor is not zero."""
        if self.kind == "bits":
            return unpack_mask(self.where, shape)
        is_nonzero = torch.zeros(math.prod(shape), dtype=torch.bool)
        is_nonzero[self.where.long()] = True
        return is_nonzero.view(shape)

    def dense(self, like: Tensor) -> Tensor:
        """Return the dense fp32 tensor, in the shape and on the device of `like`."""
        support = self.support(tuple(like.shape)).to(like.device)
        zeros = torch.zeros_like(like, dtype=torch.float32)
        return zeros.masked_scatter_(support, self.values.to(like.device))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return copies of the parts by name; the inverse of `iterate_sparse`."""
        return {
            f"{prefix}/values": self.values.clone(),
            f"{prefix}/{self.kind}": self.where.clone(),
        }


def iterate_sparse(tensors: dict[str, Tensor], kind: str) -> Iterator[tuple[str, str, Sparse]]:
    """Yield (owner, site, tensor) of each sparse tensor `KIND/OWNER/SITE` of a carried state.

    Args:
        tensors: Tensors of a carried state, by name.
        kind: `tau`, whose owners are tasks, or `shared`, whose owners are numbers of clusters.
    """
    for name, values in tensors.items():
        if name.startswith(f"{kind}/") and name.endswith("/values"):
            prefix = name.removesuffix("/values")
            owner, site = prefix.split("/", 1)[1].rsplit("/", 1)
            form: Literal["at", "bits"] = "at" if f"{prefix}/at" in tensors else "bits"
            yield owner, site, Sparse(values, tensors[f"{prefix}/{form}"], form)


@dataclass(frozen=True)
class SiteGroup:
    """The weights of n sites of the same shape (o, i), as stacks that are computed at once.

    The parameters are views of `sigma`, `v` and `tau`.

    Attributes:
        sites: The sites.
        start: sigma* (n, o, i).
        sigma: sigma (n, o, i).
        v: v of the task in training (n, o).
        tau: tau of the task in training (n, o, i).
        before: Earlier task -> tau* (n, o, i).
        rows: Earlier task -> M (n, o, 1).
        is_cast: Whether the layers use the weights in products only (`frozen.LAYERS`). Then the
            stack can be cast at once for autocast.
    """

    sites: list[str]
    start: Tensor
    sigma: Tensor
    v: Tensor
    tau: Tensor
    before: dict[str, Tensor]
    rows: dict[str, Tensor]
    is_cast: bool


class Apd(Method[ApdSettings]):
    """A chain: theta_t = sigma .* M_t + tau_t, with M_t = sigmoid(v_t) per output feature.

    This holds in the linear layers of a ViT's blocks, and in all linear layers and convolutions of
    another backbone. tau_t is sparse. Every task trains sigma, so the outputs on earlier tasks
    change. Two penalties in addition to the cross-entropy limit the change, where theta_i* is the
    weight of task i at the start of task t:

        lambda1 sum_{i<=t} |tau_i|_1 + lambda2 sum_{i<t} 1/2 |theta_i* - (sigma .* M_i + tau_i)|^2

    The state of a task contains the parts that later tasks do not change: v_t, copies of norms and
    biases, head. The chain carries the parts that later tasks change: sigma, and tau_i of each task
    as a sparse tensor.

    Differences from the reference code, and the reasons:
    - The tau of earlier tasks occur only in these two penalties. Therefore their optimum for a
      given sigma is known: soft(theta_i* - sigma .* M_i, lambda1 / lambda2), with the soft
      threshold soft(x, l) = sign(x) max(|x| - l, 0). It is computed (`retro: train`) instead of
      trained. The penalties become Huber's function of theta_i* - sigma .* M_i, with the same
      minimum. This takes one tensor per earlier task in memory instead of
      five (tau_i, its start, its gradient and two moments of Adam), its zeros are exact, and the
      gradient of each earlier task's penalty never exceeds lambda1. In one task theta_i moves by at
      most lambda1 / lambda2, and by lambda1 more if `zeros: threshold` cuts an entry.
    - v of earlier tasks is fixed, as the reference code intends but does not do.
    - Weight decay is the optimizer's, instead of an L2 term in the loss. It applies to v_t, tau_t
      and the head's weight, and at the first task also to sigma.
    - sigma starts at W / sigmoid(v_start), so that with `tau_start: zero` the first task starts
      from the backbone.
    - `zeros: proximal` keeps an entry of tau_t at zero until its gradient exceeds lambda1. An entry
      that would change its sign stops at zero. Therefore the trained tau equals the stored tau.
    - Consolidation shares an entry only if at least two tasks of the cluster have it; sharing an
      entry of one task would save nothing. Shared values are constant until the next
      consolidation. Until then, tasks train sigma, and the rest of each tau follows it.
    - `gap` is relative to the entries of tau. The absolute gap of the reference code (1e-2 for a
      LeNet) is several times the size of most entries that a ViT trains. It would replace all
      entries, even of unrelated tasks.
    """

    name = "apd"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "scales, norms, biases, head"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    revision = 3
    paper = (
        "Scalable and Order-robust Continual Learning with Additive Parameter Decomposition, "
        "ICLR 2020"
    )
    carries = ("sigma", "tau")
    penalty_terms: ClassVar[Mapping[str, str]] = {"anchor": "lambda2"}
    steps = (Step("train"), Step("consolidate", trains=False, measured=True))
    needs_states = True  # the v of earlier tasks
    may_forget = True
    Settings = ApdSettings
    per_task = frozenset(
        {
            "lambda1",
            "lambda2",
            "retro",
            "zeros",
            "tau_start",
            "v_start",
            "copies",
            "clusters",
            "gap",
        }
    )

    @classmethod
    def validate(
        cls, settings: ApdSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        if settings.retro != "frozen_tau" or train.optimizer != "sgd":
            return
        step_size = train.lr * settings.lambda2
        if step_size >= 2:
            raise UserError(
                "retro is 'frozen_tau' with train.optimizer 'sgd' and train.lr * lambda2 = "
                f"{step_size:g}: a step would overshoot the minimum of the penalty on sigma; keep "
                "the product below 2, or use adamw or retro 'train'"
            )

    @classmethod
    def steps_for(cls, settings: ApdSettings, position: int) -> tuple[Step, ...]:
        """Return the steps: every K-th task ends with a consolidation; a base task has no step."""
        if position < 0:
            return ()
        every = settings.consolidate_every
        if every and (position + 1) % every == 0:
            return cls.steps
        return cls.steps[:1]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step == "train":
            return frozenset({"clusters", "gap"})
        return frozenset()

    def __init__(self, backbone: Any, settings: ApdSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # Weights of a vision transformer's blocks, or all weights of another backbone. A
        # convolution is used as a matrix (o, i h w), with a row per output channel.
        self.sites: dict[str, Tensor] = {}
        for site, weight in weight_sites(backbone).items():
            if site.startswith("blocks.") or not isinstance(backbone, VisionTransformer):
                self.sites[site] = weight
        self.sigma: dict[str, Tensor] = {}  # by site; carried tensors, or parameters in training
        # task -> site -> tau as stored by the last stage, in stream order
        self.tau: dict[str, dict[str, Sparse]] = {}
        # site -> tasks of a cluster -> their shared values
        self.shared: dict[str, dict[tuple[str, ...], Sparse]] = {}
        # task -> tensors of its state: v as `SITE.v`, copies by parameter name
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.step = ""  # the step that trains; empty while consolidating and serving
        # task -> (nonzero entries of tau, entries that the consolidation replaced)
        self.replaced: dict[str, tuple[int, int]] = {}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        if context.step == "consolidate":
            self.begin_consolidation(context)
            return []
        groups = super().begin(context)
        self.step = context.step
        # If a state of this task is loaded, its v and copies would be used instead of the trained
        # ones, and the task would count as an earlier task.
        self.loaded.pop(context.task.name, None)
        self.tau.pop(context.task.name, None)
        is_first_task = not self.sigma
        self.start = self.compute_initial_sigma()
        self.create_groups()
        self.create_parameters()
        # With `zeros: proximal`: site -> the sign that each entry of tau may have after this step.
        # `after_backward` sets it, and `after_step` sets entries of another sign to zero.
        self.orthant: dict[str, Tensor] = {}
        sigma_decay = context.optim.weight_decay if is_first_task else 0.0
        return [
            *groups,
            {"name": "sigma", "params": list(self.sigma.values()), "weight_decay": sigma_decay},
            {"name": "v", "params": list(self.own_v.values())},
            {"name": "tau", "params": list(self.own_tau.values())},
            {"name": "copies", "params": list(self.own_copies.values), "weight_decay": 0.0},
        ]

    def begin_consolidation(self, context: StepContext) -> None:
        """Load the task's state, which `train` carried, and consolidate tau of all tasks."""
        assert context.carried is not None
        task = context.task
        tensors = context.carried.tensors
        state = TaskState(task.name, task.classes, self.name, self.backbone_digest)
        state.head = select_with_prefix(tensors, "own/head/")
        state.copies = select_with_prefix(tensors, "own/copies/")
        self.task = task
        self.load_task(state)
        self.consolidate()

    def compute_initial_sigma(self) -> dict[str, Tensor]:
        """Return sigma*, sigma at the start of this task, by site.

        This is the carried sigma; for the first task it is W / sigmoid(v_start).
        """
        if self.sigma:
            return {site: self.sigma[site].to(self.device) for site in self.sites}
        scale = torch.tensor(self.settings.v_start).sigmoid()
        return {site: weight.detach().flatten(1) / scale for site, weight in self.sites.items()}

    def create_groups(self) -> None:
        """Create the groups of sites, with sigma, v and tau at the start of this task.

        tau* and M of earlier tasks are constants while this task is trained. They are computed from
        the carried state and the tasks' states, so no checkpoint stores them.
        """
        sites_by_shape: dict[tuple[bool, torch.Size], list[str]] = {}
        for site, start in self.start.items():
            is_cast = type(self.backbone.get_submodule(site)) in LAYERS
            sites_by_shape.setdefault((is_cast, start.shape), []).append(site)
        self.groups: list[SiteGroup] = []
        self.before: dict[str, dict[str, Tensor]] = {task: {} for task in self.tau}
        self.rows: dict[str, dict[str, Tensor]] = {task: {} for task in self.tau}
        for (is_cast, _), sites in sites_by_shape.items():
            start = torch.stack([self.start[site] for site in sites])
            before: dict[str, Tensor] = {}
            rows: dict[str, Tensor] = {}
            for task, taus in self.tau.items():
                state = self.loaded[task]
                before[task] = torch.stack([taus[site].dense(self.start[site]) for site in sites])
                v = torch.stack([state[f"{site}.v"].to(self.device) for site in sites])
                rows[task] = v.sigmoid()[..., None]
                self.before[task] |= zip(sites, before[task].unbind(), strict=True)
                self.rows[task] |= zip(sites, rows[task].unbind(), strict=True)
            is_copied = self.settings.tau_start == "sigma"
            tau = start.clone() if is_copied else torch.zeros_like(start)
            v = start.new_full(start.shape[:2], self.settings.v_start)
            group = SiteGroup(sites, start, start.clone(), v, tau, before, rows, is_cast)
            self.groups.append(group)
            self.start |= zip(sites, start.unbind(), strict=True)
        order = [site for group in self.groups for site in group.sites]
        # For each site, in the order of `self.sites`: its index in the concatenated groups. The
        # penalties of the sites are summed in this order.
        self.site_order = torch.tensor([order.index(site) for site in self.sites]).to(self.device)

    def create_parameters(self) -> None:
        """Create the parameters of this task: sigma, v, tau, and copies of norms and biases."""
        created: dict[str, dict[str, nn.Parameter]] = {"sigma": {}, "v": {}, "tau": {}}
        for group in self.groups:
            stacks = {"sigma": group.sigma, "v": group.v, "tau": group.tau}
            for name, stack in stacks.items():
                parameters = [nn.Parameter(values) for values in stack.unbind()]
                created[name] |= zip(group.sites, parameters, strict=True)
        by_site = {name: {s: own[s] for s in self.sites} for name, own in created.items()}
        self.own_v, self.own_tau = by_site["v"], by_site["tau"]
        sigma = by_site["sigma"]
        has_copies = self.settings.copies
        names = find_copied_names(self.backbone, list(self.sites)) if has_copies else []
        self.own_copies = Copies(self.backbone, names)
        # A ParameterList registers them; a dict would not.
        self.parts = nn.ParameterList(
            [*sigma.values(), *self.own_v.values(), *self.own_tau.values()]
        )
        self.sigma = dict(sigma)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        sizes: list[Tensor] = []
        anchors: list[Tensor] = []
        for group in self.groups:
            parameters: list[Tensor] = []
            for own in (self.sigma, self.own_v, self.own_tau):
                parameters += [own[site] for site in group.sites]
            assert parameters[0].data_ptr() == group.sigma.data_ptr(), "parameters were moved"
            theta, size, anchor = Decomposed.apply(
                group.sigma, group.v, group.tau, *self.anchor(group), *parameters
            )
            if group.is_cast:
                theta = cast_for_autocast(theta)
            for site, weight in zip(group.sites, theta.unbind(), strict=True):
                weights[f"{site}.weight"] = weight.view_as(self.sites[site])
            sizes.append(size)
            anchors.append(anchor)
        self.penalties = {
            "sparsity": self.settings.lambda1 * torch.cat(sizes)[self.site_order].sum(),
            "anchor": torch.cat(anchors)[self.site_order].sum(),
        }
        return weights | self.own_copies.tensors()

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return CE + lambda1 |tau_t|_1 + the penalty of `anchor` on earlier tasks."""
        ce, terms = super().loss(batch, progress)  # calls `training_weights`: sets the penalties
        penalty_terms = {name: penalty.detach() for name, penalty in self.penalties.items()}
        return ce + sum(self.penalties.values()), terms | penalty_terms

    @torch.no_grad()
    def anchor(self, group: SiteGroup) -> tuple[Tensor, Tensor | None]:
        """Return the penalty on earlier tasks' weights at each site of a group, and its gradient.

        With d = sigma - sigma*, task i would need a = tau_i* - d .* M_i to keep theta_i*. Summed
        over entries and earlier tasks i, the penalty is:

        - `retro: train`: tau_i is soft(a, lambda1 / lambda2), which leaves lambda1 |tau_i| +
          lambda2 / 2 (a - tau_i)^2 = lambda2 (c a - c^2 / 2), with c = a clipped at lambda1 /
          lambda2;
        - `retro: frozen_tau`: lambda2 / 2 (d .* M_i)^2.

        Returns:
            The penalties (n,), and their gradients in sigma (n, o, i). Without earlier tasks the
            penalties are 0, and the gradient is None.
        """
        value = group.start.new_zeros(len(group.sites))
        if not group.rows:
            return value, None
        weight = self.settings.lambda2
        limit = self.settings.lambda1 / weight
        drift = torch.sub(group.sigma, group.start)
        if self.settings.retro == "frozen_tau":
            squares = torch.zeros_like(drift[..., :1])  # sum of M_i^2, (n, o, 1)
            for m in group.rows.values():
                squares = squares + m.square()
            gradient = drift * (weight * squares)
            return dot_each([(gradient, drift)])[0] / 2, gradient
        gradient = torch.zeros_like(drift)
        for old, m in group.rows.items():
            needed = torch.addcmul(group.before[old], drift, m, value=-1)
            clipped = needed.clamp(-limit, limit)
            dots = dot_each([(clipped, needed), (clipped, clipped)])
            value += dots[0] - dots[1] / 2
            gradient.addcmul_(clipped, m, value=-weight)
        return value * weight, gradient

    def after_backward(self) -> None:
        if self.settings.zeros != "proximal":
            return
        for site, tau in self.own_tau.items():
            assert tau.grad is not None
            is_zero = tau.detach() == 0
            shrunk = F.softshrink(tau.grad, self.settings.lambda1)
            torch.where(is_zero, shrunk, tau.grad, out=tau.grad)
            self.orthant[site] = torch.where(is_zero, -tau.grad, tau.detach()).sign()

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        for site, orthant in self.orthant.items():
            self.own_tau[site].masked_fill_(self.own_tau[site] * orthant <= 0, 0.0)

    @torch.no_grad()
    def restore_tau(self, task: str, site: str) -> Tensor:
        """Return tau of a task at a site, as it would be stored now.

        In training, tau of earlier tasks is computed for the current sigma (with `retro: train`),
        and small entries are cut (`with_zeros`).
        """
        if not self.step or (task != self.task_name and self.settings.retro == "frozen_tau"):
            return self.tau[task][site].dense(self.sites[site].flatten(1))
        if task == self.task_name:
            return self.with_zeros(self.own_tau[site].detach())
        needed = torch.addcmul(
            self.before[task][site],
            self.sigma[site] - self.start[site],
            self.rows[task][site],
            value=-1,
        )
        return self.with_zeros(F.softshrink(needed, self.settings.lambda1 / self.settings.lambda2))

    def with_zeros(self, tau: Tensor) -> Tensor:
        """Return tau. With `zeros: threshold`, entries up to lambda1 in magnitude are set to 0."""
        if self.settings.zeros != "threshold":
            return tau
        return tau.masked_fill(tau.abs() <= self.settings.lambda1, 0.0)

    @property
    def task_name(self) -> str | None:
        """Return the name of the task in training; None while the method only serves."""
        return None if self.task is None else self.task.name

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the current step.

        - `tau_zeros`, in both steps: the share of zeros in this task's tau.
        - `drift`, in `train` if there are earlier tasks: how far their weights moved in this task,
          relative to their norm.
        - `replaced`, in `consolidate`: the share of the nonzero entries of tau, over all tasks,
          that shared values replaced.
        """
        num_nonzero = 0
        num_entries = 0
        for site in self.sites:
            tau = self.restore_tau(str(self.task_name), site)
            num_nonzero += int(tau.count_nonzero())
            num_entries += tau.numel()
        metrics = {"tau_zeros": 1 - num_nonzero / num_entries}
        if not self.step:
            entries = sum(entries for entries, _ in self.replaced.values())
            replaced = sum(replaced for _, replaced in self.replaced.values())
            return metrics | {"replaced": replaced / max(1, entries)}
        moved = torch.zeros((), dtype=torch.float64)
        size = torch.zeros((), dtype=torch.float64)
        for old, site in product(self.before, self.sites):
            m = self.rows[old][site]
            theta_before = torch.addcmul(self.before[old][site], self.start[site], m)
            theta = torch.addcmul(self.restore_tau(old, site), self.sigma[site], m)
            moved += (theta - theta_before).square().sum().double().cpu()
            size += theta_before.square().sum().double().cpu()
        if self.before:
            metrics["drift"] = float((moved / size).sqrt())
        return metrics

    def warnings(self) -> list[str]:
        if not self.step:
            return self.warn_about_replaced_entries()
        if self.metrics()["tau_zeros"] == 1:
            return [
                f"task {self.task_name!r}: its tau is zero everywhere, so that it has only "
                "scales and copies of its own; lower lambda1, or train for more steps"
            ]
        return []

    def warn_about_replaced_entries(self) -> list[str]:
        """Warn if a consolidation replaced most entries of a task's tau."""
        shares = {
            task: replaced / max(1, entries) for task, (entries, replaced) in self.replaced.items()
        }
        most = max(shares, key=lambda task: shares[task], default="")
        if not most or shares[most] <= REPLACED_SHARE_LIMIT:
            return []
        dense = self.replaced[most][0] / sum(w.numel() for w in self.sites.values())
        return [
            f"task {self.task_name!r}: consolidation replaced {shares[most]:.0%} of the entries "
            f"of tau of task {most!r}, whose tau is {dense:.0%} dense, by values that it shares; "
            "where tasks have little in common this costs accuracy: lower gap, raise lambda1 for "
            "a sparser tau, or set consolidate_every to 0"
        ]

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the task's state and the carried state.

        Before a consolidation the carried state also contains the task's state, because the step
        `consolidate` stores that state again.
        """
        assert self.task is not None
        if not self.step:
            return self.state(copies=dict(self.loaded[self.task.name])), self.carried()
        for task in [*self.tau, self.task.name]:
            self.tau[task] = {site: Sparse.of(self.restore_tau(task, site)) for site in self.sites}
        state = self.state(copies={name: t.clone() for name, t in self.own_parts().items()})
        carried = self.carried()
        position = sum(task.role != "base" for task in self.stream) - 1
        if len(self.steps_for(self.settings, position)) > 1:
            carried.tensors |= {f"own/head/{name}": t.clone() for name, t in state.head.items()}
            carried.tensors |= {f"own/copies/{name}": t.clone() for name, t in state.copies.items()}
        return state, carried

    def own_parts(self) -> dict[str, Tensor]:
        """Return v and the copies of the current task, with the names of the state."""
        parts = {f"{site}.v": v for site, v in self.own_v.items()} | self.own_copies.tensors()
        return {name: t.detach() for name, t in parts.items()}

    def carried(self) -> Carried:
        """Return sigma, tau of all tasks and the shared values.

        Tensors are `sigma/SITE`, and as sparse tensors `tau/TASK/SITE` and `shared/NUMBER/SITE`.
        `meta` has the tasks in order, and the tasks of each cluster.
        """
        tensors = {f"sigma/{site}": t.detach().clone() for site, t in self.sigma.items()}
        for task, taus in self.tau.items():
            for site, tau in taus.items():
                tensors |= tau.named(f"tau/{task}/{site}")
        for site, clusters in self.shared.items():
            for number, values in enumerate(clusters.values()):
                tensors |= values.named(f"shared/{number}/{site}")
        members: dict[str, list[list[str]]] = {}  # site -> tasks of each cluster
        for site, clusters in self.shared.items():
            members[site] = [list(tasks) for tasks in clusters]
        return Carried(tensors, {"tasks": list(self.tau), "clusters": members})

    # ---- consolidation ---------------------------------------------------------------------------
    @torch.no_grad()
    def consolidate(self) -> None:
        """Replace similar entries of tau by values that a cluster of tasks shares.

        At each site, tasks with similar tau, including already shared values, form a cluster. An
        entry is shared if it is nonzero in at least two members, and its range in the cluster is at
        most `gap` times the mean magnitude of the cluster's nonzero entries. All members then take
        the midpoint of the range from one shared tensor, and their tau is zero there.
        """
        count = self.settings.clusters * (len(self.tau) // self.settings.consolidate_every)
        self.replaced = dict.fromkeys(self.tau, (0, 0))
        for site in self.sites:
            full = torch.stack(
                [
                    self.restore_tau(task, site) + self.restore_shared(task, site)
                    for task in self.tau
                ]
            )
            labels = cluster(full.flatten(1).double(), count)
            tasks = [*self.tau]
            self.shared[site] = {}
            for label in sorted(set(labels)):
                members = [i for i, task_label in enumerate(labels) if task_label == label]
                member_taus = full[members]  # (members, o, i)
                high = member_taus.amax(0)
                low = member_taus.amin(0)
                is_near = high - low <= self.settings.gap * compute_mean_magnitude(member_taus)
                is_shared = is_near & (member_taus.count_nonzero(0) > 1)
                if bool(is_shared.any()):
                    midpoints = torch.where(is_shared, (high + low) / 2, 0.0)
                    member_names = tuple(tasks[i] for i in members)
                    self.shared[site][member_names] = Sparse.of(midpoints)
                for i in members:
                    self.tau[tasks[i]][site] = Sparse.of(full[i].masked_fill(is_shared, 0.0))
                    entries, replaced = self.replaced[tasks[i]]
                    entries += int(full[i].count_nonzero())
                    replaced += int(full[i][is_shared].count_nonzero())
                    self.replaced[tasks[i]] = entries, replaced

    def restore_shared(self, task: str, site: str) -> Tensor:
        """Return the shared values of a task's cluster at a site; zeros without a cluster."""
        for tasks, values in self.shared.get(site, {}).items():
            if task in tasks:
                return values.dense(self.sites[site].flatten(1))
        return torch.zeros_like(self.sites[site].flatten(1))

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.step = ""
        self.sigma = select_with_prefix(carried.tensors, "sigma/")
        self.tau = {task: {} for task in carried.meta["tasks"]}
        for task, site, tau in iterate_sparse(carried.tensors, "tau"):
            self.tau[task][site] = tau
        shared = {
            (site, int(number)): values
            for number, site, values in iterate_sparse(carried.tensors, "shared")
        }
        self.shared = {}
        for site, clusters in carried.meta["clusters"].items():
            self.shared[site] = {}
            for number, tasks in enumerate(clusters):
                self.shared[site][tuple(tasks)] = shared[site, number]

    def load_task(self, state: TaskState) -> None:
        """Load v and the copies of a task. A base task has none: the plain backbone serves it."""
        super().load_task(state)
        sites = self.sites if state.copies else {}
        for site, weight in sites.items():
            shape = None
            if f"{site}.v" in state.copies:
                shape = tuple(state.copies[f"{site}.v"].shape)
            if shape != (len(weight),):
                raise UserError(
                    f"task {state.task!r}: its state has scales {site}.v of shape {shape}, this "
                    f"backbone has {len(weight)} output features there; use the backbone of its "
                    "run"
                )
        self.loaded[state.task] = dict(state.copies)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Return sigma .* M_i + tau_i with the current sigma and tau."""
        parts = self.loaded[task] if task in self.loaded else self.own_parts()
        if not parts:
            return {}
        device = self.device
        copies = {name: t.to(device) for name, t in parts.items() if not name.endswith(".v")}
        for site in self.sites:
            m = parts[f"{site}.v"].to(device).sigmoid()[:, None]
            added = self.restore_tau(task, site) + self.restore_shared(task, site)
            theta = torch.addcmul(added, self.sigma[site].to(device), m)
            copies[f"{site}.weight"] = theta.view_as(self.sites[site])
        return copies

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """Return masks of the nonzero entries of the task's own tau, by site."""
        masks: dict[str, Tensor] = {}
        for task, site, tau in iterate_sparse(carried.tensors, "tau"):
            if task == state.task:
                shape = tuple(carried.tensors[f"sigma/{site}"].shape)
                masks[site] = tau.support(shape)
        return masks


class Decomposed(torch.autograd.Function):
    """Autograd function: sigma (n, o, i), v (n, o), tau (n, o, i) -> (theta, |tau|_1, value).

    theta is sigma .* sigmoid(v) + tau. The L1 norms (n,) are those of each site. `value` (n,) is a
    penalty on sigma, and `gradient` its gradient in sigma (None: zero). The caller computes both.
    `value` is returned, and `backward` adds `gradient` times the incoming gradient of `value` to
    the gradient of sigma. One function does everything, because every pass over (n, o, i) costs
    about as much as the optimizer's step. The gradients go to the parameters, which are views of
    the stacks: n of sigma, then n of v and n of tau.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sigma: Tensor,
        v: Tensor,
        tau: Tensor,
        value: Tensor,
        gradient: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        m = v.sigmoid()[..., None]
        ctx.save_for_backward(sigma, m, tau, gradient)
        return torch.addcmul(tau, sigma, m), tau.abs().flatten(1).sum(1), value.clone()

    @staticmethod
    def backward(
        ctx: Any, grad_theta: Tensor, grad_size: Tensor, grad_value: Tensor
    ) -> tuple[Tensor | None, ...]:
        sigma, m, tau, gradient = ctx.saved_tensors
        if gradient is None:
            grad_sigma = grad_theta * m
        else:
            grad_sigma = torch.addcmul(gradient * grad_value[:, None, None], grad_theta, m)
        grad_m = torch.linalg.vecdot(grad_theta, sigma)
        grad_v = grad_m * (m * (1 - m)).squeeze(2)
        grad_tau = tau.sign().mul_(grad_size[:, None, None]).add_(grad_theta)
        return None, None, None, None, None, *grad_sigma, *grad_v, *grad_tau


def dot_each(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the dot products of the parts (o, i) of pairs of stacks (n, o, i), as (pairs, n).

    Each is a separate product, because a joint one would round in another order.
    """
    dots: list[Tensor] = []
    for a, b in pairs:
        dots += map(torch.dot, a.flatten(1).unbind(), b.flatten(1).unbind())
    return torch.stack(dots).view(len(pairs), -1)


def compute_mean_magnitude(values: Tensor) -> Tensor:
    """Return the mean magnitude of the nonzero entries, a scalar tensor; 0 without such entries."""
    return values.abs().sum() / values.count_nonzero().clamp(min=1)


def cluster(points: Tensor, count: int) -> list[int]:
    """Return the cluster of each of the points (n, d), by k-means.

    The first point is the first centre. Each further centre is the point farthest from the centres
    before it; of equally far points the first is taken. The same points always give the same
    clusters.
    """

    def distances(centres: Tensor) -> Tensor:
        return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")

    chosen = [0]
    while len(chosen) < min(count, len(points)):
        chosen.append(int(distances(points[chosen]).amin(1).argmax()))
    centres = points[chosen]
    labels = torch.full((len(points),), -1)
    for _ in range(MAX_KMEANS_ROUNDS):
        nearest = distances(centres).argmin(1).cpu()
        if torch.equal(nearest, labels):
            break
        labels = nearest
        means = []
        for index, centre in enumerate(centres):
            members = points[labels == index]
            means.append(members.mean(0) if len(members) else centre)
        centres = torch.stack(means)
    return labels.tolist()


def find_copied_names(backbone: nn.Module, sites: list[str]) -> list[str]:
    """Return the names of the parameters that each task copies: norms, and biases of `sites`."""
    parameters = dict(backbone.named_parameters())
    biases = [f"{site}.bias" for site in sites]
    return [*norm_parameter_names(backbone), *(name for name in biases if name in parameters)]
