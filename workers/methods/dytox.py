"""DyTox: one encoder and one decoder block for all tasks; a task brings a token, which asks for its
own view of the patches, and a head.

Douillard, Ramé, Couairon, Cord: DyTox: Transformers for Continual Learning with DYnamic TOken
eXpansion, CVPR 2022.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.finetune import weight_groups
from workers.model.convit import ConViT
from workers.model.distill import kd_kl
from workers.model.heads import sum_old_targets
from workers.model.task_attention import TaskAttention, TokenHead, TokenHeads, TokenNetwork
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

DECODER = "decoder/"  # of the names of carried tensors


class DyToxSettings(RehearsalSettings):
    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "rebuffi", description="which images become exemplars"
    )
    divergence: NonNegativeFloat = Field(0.1, description="weight of the divergence loss")
    tau: PositiveFloat = Field(
        1.0, description="temperature of both softmaxes in the distillation loss"
    )
    drop_path: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="stochastic depth of the decoder block, of each token on its own",
    )
    rho: NonNegativeFloat = Field(
        0.0,
        description="DyTox++: radius of adaptive sharpness-aware steps from the second task on; 0: "
        "none, the paper has 3",
    )


class DyTox(Rehearsal[DyToxSettings]):
    """`train`: L = (1 - a) BCE + a KL + divergence * BCE_div over the task's data and the
    exemplars, a = O_t / A_t; the encoder, the decoder and the task's own token and head learn,
    older ones stay. BCE is over all classes, KL holds the softmax of old classes to what it was
    before the task, and BCE_div is of an auxiliary head on the task's token that tells its classes
    apart and from all old ones. `herd` chooses exemplars by the tokens' embeddings, one after the
    other. `finetune`, from the second task on: BCE on the exemplars alone, as many of each class;
    the encoder rests, decoder, tokens and heads learn, older ones too.

    DyTox+ is this with `data: {mixup: 0.8, smoothing: 0.1}`, DyTox++ that with `rho: 3`.

    On any vision transformer but `convit_local` the encoder is all its blocks but the last, in
    whose place the decoder stands: that is ours, and the way to a pretrained encoder. Stored per
    task: token and head as the task's own steps left them; the chain carries the rest as it is by
    now.

    Where it differs from the paper's code: one memory for all ranks, chosen under the evaluation
    transform (there each rank has one of its own, chosen under augmentation). The fine-tuning set
    is shuffled and shared by the ranks, and the encoder is in evaluation mode (there is no order,
    no sharing, and stochastic depth stays on). Augmentation repeats images where `data.repeats`
    says so, 3 in the paper's setting, and then while fine-tuning too (there in `train` alone).
    MixUp pairs images at random with a factor for each image (there a batch with itself reversed,
    and one factor for all).
    """

    name = "dytox"
    paper = "DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion, CVPR 2022"
    steps = (Step("train"), Step("herd", trains=False), Step("finetune", later=True))
    needs_vit = True
    starts_as_backbone = False
    encoder_rests = False  # in evaluation mode while the decoder is trained
    Settings = DyToxSettings
    per_task = Rehearsal.per_task | {"divergence", "tau", "drop_path", "rho"}
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
            backbone.norm = nn.Identity()
        block = backbone.blocks[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "decoder"))
            self.decoder = TaskAttention(
                self.heads.width,
                block.attn.num_heads,
                block.mlp.fc1.out_features / self.heads.width,
                settings.drop_path,
            )
            for module in self.decoder.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
        self.heads = TokenHeads(self.heads.width)
        # in a tuple, so that it is no part of this module: the network before the task
        self.before: Any = None
        self.auxiliary: TokenHead | None = None

    def sharpness(self) -> float:
        return self.settings.rho if self.before else 0.0

    def network(self) -> TokenNetwork:
        """What there is by now, tasks in the order of `class_slices`; shares all tensors."""
        heads = [self.heads[name] for name in self.class_slices()]
        return TokenNetwork(self.backbone, self.decoder, heads)  # type: ignore[arg-type]

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        old = [name for name in self.class_slices() if name != context.task.name]
        if context.step == "train" and old:
            self.before = (copy.deepcopy(self.network()).eval().requires_grad_(False),)
        super().begin(context)
        self.decoder.expect(len(self.class_slices()))
        self.encoder_rests = context.step == "finetune"
        learning: list[nn.Module] = [
            self.decoder,
            *(
                self.heads[name]
                for name in (self.class_slices() if self.encoder_rests else [context.task.name])
            ),
        ]
        if not self.encoder_rests:
            learning.append(self.backbone)
        if self.before:
            self.auxiliary = TokenHeads(self.heads.width).add(
                "auxiliary", 1 + context.task.num_classes, derive_seed(self.seed, context.task.name)
            )  # type: ignore[assignment]
            learning.append(self.auxiliary)  # type: ignore[arg-type]
        groups = [group for module in learning for group in weight_groups(module, context.optim)]
        return [
            {
                **group,
                "params": [
                    p
                    for p in group["params"]
                    if self.auxiliary is None or p is not self.auxiliary.token
                ],
            }
            for group in groups
        ]

    def train(self, mode: bool = True) -> DyTox:
        super().train(mode)
        if self.encoder_rests:
            self.backbone.eval()
        return self

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W) -> embeddings of all tokens, one after the other (b, tasks D)."""
        return self.network().embeddings(images).flatten(1)

    def all_logits(self, features: Tensor) -> Tensor:
        return self.network().logits(features.unflatten(1, (-1, self.heads.width)))

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        logits = self.all_logits(self.features(images))
        return logits if task is None else logits[:, self.class_slices()[task]]

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        e = self.features(batch.images)
        z, y = self.all_logits(e).float(), self.global_targets(batch)
        clf = F.binary_cross_entropy_with_logits(z, y)
        if not self.before:
            return clf, {"bce": clf.detach()}
        assert self.auxiliary is not None
        with torch.no_grad():
            taught = self.before[0](batch.images)
        old, a = taught.shape[1], self.old_share
        kd = kd_kl(z[:, :old], taught, self.settings.tau)
        auxiliary = self.auxiliary(e[:, -self.heads.width :]).float()
        div = F.binary_cross_entropy_with_logits(auxiliary, sum_old_targets(y, old))
        return (1 - a) * clf + a * kd + self.settings.divergence * div, {
            "bce": clf.detach(),
            "kd": kd.detach(),
            "div": div.detach(),
        }

    # ---- what is kept ----------------------------------------------------------------------------
    def state(self, **parts: Any) -> TaskState:
        state = super().state(**parts)
        state.tokens["token"] = state.head.pop("token")
        return state

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        return state, Carried(
            carried.tensors
            | {DECODER + name: t.detach().clone() for name, t in self.decoder.state_dict().items()},
            carried.meta,
        )

    def load_carried(self, carried: Carried) -> None:
        decoder = {
            name.removeprefix(DECODER): t
            for name, t in carried.tensors.items()
            if name.startswith(DECODER)
        }
        self.decoder.load_state_dict(decoder)
        super().load_carried(
            Carried(
                {name: t for name, t in carried.tensors.items() if not name.startswith(DECODER)},
                carried.meta,
            )
        )

    def load_task(self, state: TaskState) -> None:
        super().load_task(
            TaskState(
                state.task,
                state.classes,
                state.method,
                state.backbone_digest,
                head=state.head | state.tokens,
                meta=state.meta,
            )
        )
