"""DyTox: one encoder and one decoder block for all tasks, and a token and a head for each task.

The decoder attends from a task's token to the patches. Thus each task gets its own features.

Douillard, Ramé, Couairon, Cord: DyTox: Transformers for Continual Learning with DYnamic TOken
eXpansion, CVPR 2022.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Neutral, Task
from workers.methods.base import BLOCK_VITS, ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.finetune import collect_tensors, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.convit import ConViT
from workers.model.distill import kd_kl
from workers.model.frozen import copy_frozen
from workers.model.heads import sum_old_targets
from workers.model.task_attention import TaskAttention, TokenHead, TokenHeads, TokenNetwork
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# Prefix of the names of the decoder's tensors in the carried state.
DECODER = "decoder/"


class DyToxSettings(RehearsalSettings):
    """Settings of `dytox`."""

    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "rebuffi",
        description="how exemplars are chosen: `herding`: iCaRL's Algorithm 4; `rebuffi`: "
        "herding as in iCaRL's released code; `closest`: nearest to the class mean; `random`: "
        "uniformly",
    )
    divergence: NonNegativeFloat = Field(
        0.1,
        description="weight of the divergence loss, which is that of an auxiliary classifier on "
        "the new task's embedding",
    )
    tau: PositiveFloat = Field(
        1.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )
    distillation: Annotated[bool, Neutral(True)] = Field(
        True,
        description="whether the network before the task is distilled; false: L is BCE and the "
        "divergence loss, as in the paper's ablation",
    )
    expand_tokens: Annotated[bool, Neutral(True)] = Field(
        True,
        description="whether each task has its own token; false: all tasks share the token of the "
        "first one, as in the paper's ablation, and differ in their heads",
    )
    drop_path: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="stochastic depth: drop rate of the decoder block's branches, drawn "
        "independently for each task token",
    )
    rho: NonNegativeFloat = Field(
        0.0,
        description="radius of adaptive sharpness-aware steps (ASAM), which DyTox++ adds in step "
        "`train` from the second task on; 0: off; 3 in the paper",
    )


class DyTox(Rehearsal[DyToxSettings]):
    """L = (1 - a) BCE + a KL + divergence * BCE_div.

    Here a is the number of old classes divided by that of all classes so far. The steps of a task:

    - `train` minimises L over the task's data and the exemplars. It trains the encoder, the
      decoder, and the task's token and head; older tokens and heads are frozen. BCE is over all
      classes. KL keeps the softmax over old classes near that of the network before the task.
      BCE_div is the loss of an auxiliary head on the task's token, with one class for all old
      classes.
    - `herd` selects exemplars by the concatenated embeddings of the tokens.
    - `finetune`, from the second task on, minimises BCE on the exemplars, with the same number of
      images for each class. The encoder is frozen; the decoder and all tokens and heads are
      trained.

    DyTox+ is this method with `data: {mixup: 0.8, smoothing: 0.1}`, DyTox++ is DyTox+ with `rho:
    3`.

    `convit_local` is the paper's encoder. On any other vision transformer the decoder, with an FFN
    of the encoder's width, replaces the last block, and the other blocks are the encoder. This is
    our addition, for pretrained encoders.

    Stored per task: its token and head after the task's own steps. The chain carries all other
    tensors in their latest state: encoder, decoder, and the tokens and heads of earlier tasks.

    Differences from the paper's code:

    - All ranks share one memory, selected with the evaluation transform. In the code each rank
      selects its own, with augmentation.
    - The fine-tuning set is shuffled and divided among the ranks, and the encoder is in evaluation
      mode. In the code the set is neither shuffled nor divided, and stochastic depth stays on.
    - Augmentation repeats images according to `data.repeats`, 3 in the paper's setting, in
      `finetune` too. The code does so only in `train`.
    - MixUp pairs images at random, with a factor for each image. The code pairs a batch with the
      reversed batch, with one factor.
    """

    name = "dytox"
    has_constant_step = True
    family = "expansion"
    keeps = "a token, a head"
    paper = "DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion, CVPR 2022"
    train_defaults = TrainDefaults(
        lr=3e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"lr": 3e-5, "scratch_lr": 1e-4, "warmup": 0.0, "floor": 1.0}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md; a tenth of the "
        "rate in the balanced step is the paper's",
    )
    steps = (Step("train"), Step("herd", trains=False), Step("finetune", later=True))
    needs_vit = True
    vits = BLOCK_VITS
    starts_as_backbone = False
    # Whether the encoder is frozen and in evaluation mode, as in `finetune`.
    encoder_rests = False
    Settings = DyToxSettings
    per_task = Rehearsal.per_task | {"divergence", "tau", "distillation", "drop_path", "rho"}
    later_settings = frozenset({"divergence", "tau", "distillation", "expand_tokens"})
    heads: TokenHeads

    @classmethod
    def check_backbone(
        cls, settings: DyToxSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        base = next((task.name for task in tasks if task.role == "base"), None)
        if base is not None:
            raise UserError(
                f"task {base!r} has role `base`, and {cls.name!r} trains its encoder on the "
                "stream itself, with a token for each task; leave "
                "the role out"
            )
        if not isinstance(backbone, ConViT) and len(backbone.blocks) < 2:  # type: ignore[arg-type]
            raise UserError(
                f"{cls.name!r} puts its decoder in the place of the backbone's last block, and "
                "there is no other; give it two blocks or more"
            )

    def __init__(self, backbone: Any, settings: DyToxSettings, seed: int):
        super().__init__(backbone, settings, seed)
        if not isinstance(backbone, ConViT):
            del backbone.blocks[-1]
            # No final norm, as in `ConViT`: the decoder normalises the patches.
            backbone.norm = nn.Identity()
        block = backbone.blocks[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "decoder"))
            self.decoder = TaskAttention(
                self.heads.width,
                block.attn.num_heads,
                block.mlp.fc2.in_features / self.heads.width,
                settings.drop_path,
            )
            for module in self.decoder.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
        self.heads = TokenHeads(self.heads.width)
        # In step `train`, from the second task on: (the network before the task,), a tuple so that
        # it is not a submodule; (None,) without distillation.
        self.before: Any = None
        self.auxiliary: TokenHead | None = None

    def sam_radius(self) -> float:
        """Return the radius of sharpness-aware steps: `rho` in `train` from the second task on."""
        return self.settings.rho if self.before else 0.0

    def network(self) -> TokenNetwork:
        """Return the network of encoder, decoder and all heads so far; it shares their tensors.

        The tasks are in the order of `class_slices`.
        """
        heads: Any = [self.heads[name] for name in self.class_slices()]
        return TokenNetwork(self.backbone, self.decoder, heads, not self.settings.expand_tokens)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        old = [name for name in self.class_slices() if name != context.task.name]
        if context.step == "train" and old:
            is_taught = self.settings.distillation
            self.before = (copy_frozen(self.network()) if is_taught else None,)
        # The parameter groups of `super` are replaced by those of `list_trained_modules`.
        super().begin(context)
        self.decoder.expect(len(self.class_slices()) if self.settings.expand_tokens else 1)
        self.encoder_rests = context.step == "finetune"
        groups: list[ParamGroup] = []
        for module in self.list_trained_modules(context.task):
            groups += weight_groups(module, context.optim)
        if not self.settings.expand_tokens:
            groups = self.share_token(groups)
        if self.before:
            self.auxiliary = self.create_auxiliary(context.task)
            # The auxiliary head is applied to the task's token, so its own token is not trained.
            for group in weight_groups(self.auxiliary, context.optim):
                params = [p for p in group["params"] if p is not self.auxiliary.token]
                groups.append({**group, "params": params})
        return groups

    def share_token(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        """Return groups in which the first task's token is the only one that is trained."""
        heads: Any = [self.heads[name] for name in self.class_slices()]
        tokens = {id(head.token) for head in heads}
        shared = []
        for group in groups:
            params = [p for p in group["params"] if id(p) not in tokens]
            shared.append({**group, "params": params})
        shared.append({"name": "token", "params": [heads[0].token], "weight_decay": 0.0})
        return shared

    def list_trained_modules(self, task: Task) -> list[nn.Module]:
        """Return the modules that this step trains, without the auxiliary head."""
        if self.encoder_rests:
            return [self.decoder, *(self.heads[name] for name in self.class_slices())]
        return [self.decoder, self.heads[task.name], self.backbone]

    def create_auxiliary(self, task: Task) -> TokenHead:
        """Return a head with one class for all old classes, and then the task's classes."""
        seed = derive_seed(self.seed, task.name)
        auxiliary: Any = TokenHeads(self.heads.width).add("auxiliary", 1 + task.num_classes, seed)
        assert isinstance(auxiliary, TokenHead)
        return auxiliary

    def train(self, mode: bool = True) -> DyTox:
        super().train(mode)
        if self.encoder_rests:
            self.backbone.eval()
        return self

    def features(self, images: Tensor) -> Tensor:
        """Return the concatenated embeddings (b, tasks D) of all tokens for images (b, 3, H, W)."""
        return self.network().embeddings(images).flatten(1)

    def all_logits(self, features: Tensor) -> Tensor:
        return self.network().logits(features.unflatten(1, (-1, self.heads.width)))

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        logits = self.all_logits(self.features(images))
        if task is None:
            return logits
        return logits[:, self.class_slices()[task]]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        e = self.features(batch.images)
        z = self.all_logits(e).float()
        y = self.global_targets(batch)
        clf = F.binary_cross_entropy_with_logits(z, y)
        if not self.before:
            return clf, {"bce": clf.detach()}
        assert self.auxiliary is not None
        assert self.task is not None
        num_old_classes = self.class_slices()[self.task.name].start
        auxiliary = self.auxiliary(e[:, -self.heads.width :]).float()
        div = F.binary_cross_entropy_with_logits(auxiliary, sum_old_targets(y, num_old_classes))
        if not self.settings.distillation:
            loss = clf + self.settings.divergence * div
            return loss, {"bce": clf.detach(), "div": div.detach()}
        with torch.no_grad():
            teacher_logits = self.before[0](batch.images)
        kd = kd_kl(z[:, :num_old_classes], teacher_logits, self.settings.tau)
        a = self.old_share
        loss = (1 - a) * clf + a * kd + self.settings.divergence * div
        return loss, {"bce": clf.detach(), "kd": kd.detach(), "div": div.detach()}

    # ---- state -----------------------------------------------------------------------------------
    def state(self, **parts: Any) -> TaskState:
        state = super().state(**parts)
        token = state.head.pop("token")
        if self.settings.expand_tokens or state.task == next(iter(self.class_slices())):
            state.tokens["token"] = token
        return state

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        tensors = dict(carried.tensors)
        for name, tensor in collect_tensors(self.decoder).items():
            tensors[DECODER + name] = tensor
        return state, Carried(tensors, carried.meta)

    def load_carried(self, carried: Carried) -> None:
        decoder = {}
        network = {}
        for name, tensor in carried.tensors.items():
            if name.startswith(DECODER):
                decoder[name.removeprefix(DECODER)] = tensor
            else:
                network[name] = tensor
        self.decoder.load_state_dict(decoder)
        super().load_carried(Carried(network, carried.meta))

    def load_task(self, state: TaskState) -> None:
        """Load the task's head together with its token, which a state stores separately."""
        tokens = state.tokens
        if not tokens and not self.settings.expand_tokens:  # only the first task stores the token
            tokens = {"token": torch.zeros(self.heads.width)}
        whole_head = TaskState(
            state.task,
            state.classes,
            state.method,
            state.backbone_digest,
            head=state.head | tokens,
            meta=state.meta,
        )
        super().load_task(whole_head)
