"""RPS-Net: every few tasks, a random path through banks of parallel modules is added and trained.

A path has one module of each bank. The modules of earlier paths are frozen.

Rajasegaran, Hayat, Khan, Khan, Shao: Random Path Selection for Continual Learning, NeurIPS 2019. A
reconstruction: the paper's banks are convolutional layers of the authors' own network, and no
implementation for ViTs was published.
"""

from __future__ import annotations

import copy
import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Neutral, TrainSettings
from workers.methods.adapter import compute_added_share
from workers.methods.base import BLOCK_VITS, ParamGroup, Progress, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.finetune import collect_tensors, save_heads, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.adapters import AdapterSites, houlsby
from workers.model.distill import Teacher, kd_ce
from workers.model.heads import Heads
from workers.model.paths import ModuleIndex, Path, PathNetwork, draw_random_path
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

PATH, TRUNK = "path/", "trunk/"  # prefixes of tensor names in the carried and stored states


class RpsnetSettings(RehearsalSettings):
    """Settings of `rpsnet`."""

    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "random",
        description="how exemplars are chosen: `herding`: iCaRL's Algorithm 4; `rebuffi`: "
        "herding as in iCaRL's released code; `closest`: nearest to the class mean; `random`: "
        "uniformly",
    )
    modules: PositiveInt = Field(
        8,
        description="M, number of parallel modules in the bank of each block; a path has one "
        "of each bank",
    )
    width: PositiveInt = Field(24, description="m, number of hidden units of a module")
    every: PositiveInt = Field(
        2, description="J, number of tasks that train a path before the next one is drawn"
    )
    candidates: PositiveInt = Field(
        2,
        description="number of paths that are drawn and trained in parallel; the one with the "
        "lowest loss is kept; 8 in the paper",
    )
    path_lr: Annotated[PositiveFloat | None, Neutral(None)] = Field(
        None,
        description="learning rate of modules and heads beside a frozen trunk; null: `train.lr`, "
        "the rate of the trunk, at which they learn slowly if the trunk is pretrained",
    )
    phi: NonNegativeFloat = Field(
        2.5,
        description="factor of the distillation weight, which is phi (t - J) after t earlier "
        "tasks, and 1 while t <= J; a base task counts as an earlier task",
    )
    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )


class Rival(nn.Module):
    """A candidate: a path, and the heads that are trained with it."""

    def __init__(self, path: Path, heads: Heads):
        super().__init__()
        self.path, self.heads = path, heads


class Rpsnet(Rehearsal[RpsnetSettings]):
    """A reconstruction: a ViT, the trunk, with a bank of M bottlenecks after each block.

    The outputs of the modules of all paths so far are added to the residual stream (`PathNetwork`),
    in training and in serving. Every J = `every` tasks a path is drawn, with one module of each
    bank, and is trained during these tasks. Modules of earlier paths stay active and are frozen,
    even if the new path includes them. The trunk, pretrained or not, is trained with the first path
    and then frozen. If the stream has a base task, on which the backbone was trained, the trunk is
    frozen from the start. Heads are always trained.

    L = CE over all classes + w KD_ce(tau) over the old classes, with the network before the task as
    teacher. w = 1 for t <= J earlier tasks (including a base task), then `phi` (t - J). From the
    second path on, `candidates` paths are drawn. Each trains as if it were alone, with its own
    heads, on the same batches: the sum of their losses is minimised. After the first task of the
    path, the candidate with the lowest L is kept. For this, L is measured with the evaluation
    transform, on the task's held-out images, or on all training data if there are none. During
    training, validation uses the first candidate.

    Stored: a path of at most B (2 d m + d + m) floats, for B blocks of width d and modules of m
    units, in the state of the last task that trained it. If the trunk was trained with the first
    path, it is stored with this path. Until then both are carried from task to task.

    Differences from the paper: modules are parallel to a trunk, while in the paper they are the
    network. The official script selects candidates by test accuracy; this code reads no test image.
    There are 2 candidates by default, instead of 8, because each is trained separately; the first
    path has only one, because all paths are equivalent before any module is frozen. The head grows,
    while the paper's has 1000 outputs from the start, and its loss uses those of the classes so
    far. With `train.clip` the gradients of all candidates are clipped together.
    """

    name = "rpsnet"
    has_constant_step = True
    family = "expansion"
    keeps = "a path of modules"
    paper = "Random Path Selection for Continual Learning, NeurIPS 2019"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    carries = ("weights", "heads", "paths", "memory")
    needs_vit = True
    vits = BLOCK_VITS
    Settings = RpsnetSettings
    per_task = Rehearsal.per_task | {"candidates", "path_lr", "phi", "tau"}
    step = ""
    trunk_learns = False

    @classmethod
    def validate(
        cls, settings: RpsnetSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        if train.keep == "best" and settings.candidates > 1:
            raise UserError(
                f"train.keep is 'best' and candidates is {settings.candidates}, but the epoch is "
                "selected by the accuracy of the first candidate only; set train.keep=last, or "
                "candidates to 1"
            )

    def __init__(self, backbone: nn.Module, settings: RpsnetSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.sites = AdapterSites(backbone, houlsby, ("",))
        # Frozen paths, by the index in `heads` of the last task that trained the path.
        self.frozen = nn.ModuleDict()
        self.path: Path | None = None  # the path in training
        # The candidates. Checkpoints contain the name of this attribute: do not rename it.
        self.rivals = nn.ModuleList()
        self.losses: list[float] = []  # L of each candidate, set by `choose_candidate`

    # ---- the network -----------------------------------------------------------------------------
    def build_network(self, path: Path | None) -> PathNetwork:
        """Return the trunk with the modules of all frozen paths and of `path`."""
        paths = [*self.frozen.values()]
        if path is not None:
            paths.append(path)
        return PathNetwork(self.backbone, self.sites, paths)  # type: ignore[arg-type]

    def features(self, images: Tensor) -> Tensor:
        return self.build_network(self.path)(images)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Rpsnet:
        super().train(mode)
        if not self.trunk_learns:
            self.backbone.eval()
        return self

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.trunk_learns = not self.frozen and all(t.role != "base" for t in self.stream)
        super().begin(context)
        if context.step != "train":
            return []
        if self.old:
            self.teacher = Teacher(
                self.build_network(self.path), {name: self.heads[name] for name in self.old}
            )
        if self.path is None:
            count = self.settings.candidates if self.frozen else 1
            self.path = self.draw_path(0)
            self.rivals = nn.ModuleList([Rival(self.path, self.heads)])
            for candidate in range(1, count):
                self.rivals.append(Rival(self.draw_path(candidate), copy.deepcopy(self.heads)))
        else:
            self.rivals = nn.ModuleList([Rival(self.path, self.heads)])
        groups = weight_groups(self.backbone, context.optim) if self.trunk_learns else []
        for rival in self.rivals:
            assert isinstance(rival, Rival)
            groups += weight_groups(rival.heads, context.optim)
            groups += rival.path.groups(context.optim.weight_decay)
        if self.settings.path_lr is not None and not self.trunk_learns:
            for group in groups:
                group["lr"] = self.settings.path_lr
        return groups

    def draw_path(self, candidate: int) -> Path:
        """Draw a new path. It contains only modules that are in no frozen path.

        The path depends only on the seed, the frozen paths and the number of the candidate.
        """
        seed = derive_seed(self.seed, "path", len(self.frozen), candidate)
        taken: set[ModuleIndex] = set()
        frozen_paths: list[Any] = list(self.frozen.values())
        for path in frozen_paths:
            taken.update(path.indices)
        drawn = draw_random_path(len(self.sites), self.settings.modules, seed)
        indices = [index for index in drawn if index not in taken]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Path(indices, self.sites.width, self.settings.width)

    @property
    def kd_weight(self) -> float:
        """The weight w of the distillation loss at this task."""
        excess = len(self.old) - self.settings.every
        if excess <= 0:
            return 1.0
        return self.settings.phi * excess

    def compute_terms(
        self, rival: Any, images: Tensor, target: Tensor, teacher_logits: Tensor | None
    ) -> Tensor:
        """Return (CE, KD) of a candidate, (2,).

        Args:
            rival: The candidate.
            images: Images (b, 3, H, W).
            target: Labels (b,) or soft targets (b, classes).
            teacher_logits: (b, old classes). None: no teacher, and KD is 0.
        """
        features = self.build_network(rival.path)(images)
        logits = torch.cat([rival.heads[name](features) for name in self.class_slices()], 1).float()
        ce = F.cross_entropy(logits, target)
        if teacher_logits is None:
            kd = ce.new_zeros(())
        else:
            kd = kd_ce(logits[:, : teacher_logits.shape[1]], teacher_logits, self.settings.tau)
        return torch.stack([ce, kd])

    def compute_candidate_terms(self, images: Tensor, target: Tensor) -> Tensor:
        """Return (CE, KD) of each candidate, (candidates, 2)."""
        teacher_logits = None if self.teacher is None else self.teacher.joined(images)
        terms = [self.compute_terms(rival, images, target, teacher_logits) for rival in self.rivals]
        return torch.stack(terms)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum over candidates of L = CE + w KD, and the means of CE and KD."""
        target = self.global_labels(batch) if batch.targets is None else self.global_targets(batch)
        ce, kd = self.compute_candidate_terms(batch.images, target).unbind(1)
        means = {"ce": ce.detach().mean()}
        if self.teacher is not None:
            means["kd"] = kd.detach().mean()
        return (ce + self.kd_weight * kd).sum(), means

    @torch.no_grad()
    def choose_candidate(self) -> None:
        """Keep the candidate with the lowest L; in a tie, the first.

        Every rank measures a part of the images. The losses are gathered, so all ranks choose the
        same candidate.
        """
        self.eval()
        split = "val" if self.context.data.has_validation else "train"
        feed = self.context.data.feed(split)
        slices = self.class_slices()
        # position of the first class of each task among all classes so far
        first_class = torch.tensor([slices[task.name].start for task in feed.tasks])
        rank_losses: list[list[float]] = []  # a row per batch, a column per candidate
        for batch in feed.evaluate():
            target = batch.labels + first_class.to(batch.labels.device)[batch.tasks]
            ce, kd = self.compute_candidate_terms(batch.images, target).double().unbind(1)
            rank_losses.append(((ce + self.kd_weight * kd) * len(batch)).tolist())
        batch_losses: list[list[float]] = []
        for losses_of_rank in feed.group.gather(rank_losses):
            batch_losses += losses_of_rank
        # fsum is exact, so the order of ranks and batches does not matter.
        totals = [math.fsum(losses) for losses in zip(*batch_losses, strict=True)]
        self.losses = [total / feed.num_samples for total in totals]
        best: Any = self.rivals[self.losses.index(min(self.losses))]
        self.path = best.path
        self.heads = best.heads

    def warnings(self) -> list[str]:
        if self.step != "train" or self.path is None or self.path.indices:
            return []
        return [
            "the path adds no module, because all modules that it drew are in earlier paths; only "
            f"heads were trained; raise `modules` above {self.settings.modules}"
        ]

    # ---- state -----------------------------------------------------------------------------------
    def finish(self) -> tuple[TaskState, Carried]:
        if len(self.rivals) > 1:
            self.choose_candidate()
        self.rivals = nn.ModuleList()
        state, carried = super().finish()
        if self.losses:
            state.meta["losses"] = self.losses
        if self.path is None:
            return state, carried
        tensors = self.path.export()
        if self.trunk_learns:
            for name, t in collect_tensors(self.backbone).items():
                tensors[TRUNK + name] = t
        if self.ends and self.is_last_task_of_path():
            state.copies = tensors
            state.meta["path"] = self.path.indices
            return state, carried
        carried_path = {PATH + name: t for name, t in tensors.items()}
        meta = carried.meta | {"path": self.path.indices}
        return state, Carried(carried.tensors | carried_path, meta)

    def network_tensors(self, heads: list[str]) -> dict[str, Tensor]:
        return save_heads(self, heads)

    def is_last_task_of_path(self) -> bool:
        """Return whether this task is the last that trains the path: every J-th task."""
        assert self.task is not None
        names = [task.name for task in self.stream if task.role != "base"]
        return (names.index(self.task.name) + 1) % self.settings.every == 0

    def load_carried(self, carried: Carried) -> None:
        path_tensors: dict[str, Tensor] = {}
        other_tensors: dict[str, Tensor] = {}
        for name, t in carried.tensors.items():
            if name.startswith(PATH):
                path_tensors[name.removeprefix(PATH)] = t
            else:
                other_tensors[name] = t
        super().load_carried(Carried(other_tensors, carried.meta))
        self.path = None
        if path_tensors:
            self.path = self.restore_path(carried.meta["path"], path_tensors)

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        if state.copies:
            index = self.heads.names.index(state.task)
            self.frozen[str(index)] = self.restore_path(state.meta["path"], state.copies)

    def restore_path(self, indices: list[ModuleIndex], tensors: dict[str, Tensor]) -> Path:
        """Return a path from the tensors that `finish` stored.

        If the tensors include the trunk, the trunk is loaded into the backbone.
        """
        trunk: dict[str, Tensor] = {}
        modules: dict[str, Tensor] = {}
        for name, t in tensors.items():
            if name.startswith(TRUNK):
                trunk[name.removeprefix(TRUNK)] = t
            else:
                modules[name] = t
        if trunk:
            self.backbone.load_state_dict(trunk)
        return Path.restored(indices, modules).to(self.device)

    def flops_share(self, state: TaskState) -> float:
        paths: list[Any] = list(self.frozen.values())
        if self.path is not None:
            paths.append(self.path)
        weights = sum(2 * path.down.numel() for path in paths)  # `up` has the size of `down`
        return 1 + compute_added_share(self.backbone, weights)
