"""TOAST: a frozen ViT or ConvNeXt looks twice, and what matters to the task in its first look
steers the second.

Shi, Gai, Darrell, Wang: TOAST: Transfer Learning via Attention Steering, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
)
from workers.model.top_down import TopDown
from workers.model.top_down_conv import StageTopDown
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState


class ToastSettings(MethodSettings):
    feedback_from: PositiveInt | None = Field(
        None,
        description="block, or stage of a ConvNeXt, (from 1) behind which tokens are selected; "
        "null: the last. "
        "Fewer: early feedback",
    )
    feedback_to: NonNegativeInt = Field(
        0,
        description="the blocks or stages up to this one are not steered; more than 0: late "
        "feedback",
    )
    train_P: bool = Field(
        True,
        description="train the channel transform P; false as in the released code of full TOAST: "
        "it stays the identity",
    )
    td_value_bias: bool = Field(
        False,
        description="add the value bias a second time, as the released code does; not on a "
        "ConvNeXt",
    )
    pretune: bool = Field(
        True,
        description="tune what tasks start from on images without labels, or on the base task, "
        "where the stream has such",
    )
    variational: NonNegativeFloat = Field(
        0.1,
        description="lambda_v, weight in `pretune`, beside the cross-entropy, of the loss that "
        "asks feedback layers to "
        "undo their blocks; the published value for a ConvNeXt is 0.01",
    )


S = TypeVar("S", bound=ToastSettings, default=Any)


class Toast(Method[S]):
    """A star: tokens of a first pass are scaled by s_n = clamp(cos(x_n, xi), 0, 1), go through P
    and from block to block down a chain of linear feedback layers (W1_l, W2_l), and are added to
    the values of a second pass. Stored per task: xi, P, the feedback layers and a head. A base task
    goes through `pretune`: cross-entropy + lambda_v sum_l MSE(W1_l sg(out_l), sg(in_l)), from whose
    feedback layers and prior every task starts, and by which the base task is answered. Images
    without labels do so too, by the second term alone.

    Where it differs from the paper and its code:
    - The value bias is not added twice, so that P = 0 is the backbone itself to the last bit
      (`td_value_bias` for the code's way). P is trained, as the paper counts it (`train_P`). Weight
      decay acts on P and the feedback layers, not on xi: its length has no meaning.
    - The backbone is in evaluation mode in both passes: no stochastic depth. Heads start as those
      of all methods.
    - Feedback from a block below the last takes its raw output, as the paper's language models do;
      there is no norm for it in a ViT.
    - In `pretune` the cross-entropy is that of the second pass; that of the first would train
      nothing but the head.
    - Before any tuning a task starts as the backbone, and feedback reaches every block: W1 = I, W2
      = 0, and xi is the mean token of an image of noise, which tokens of any image look towards.
      The code's random numbers (std 0.02) fade on their way down, and disturb the backbone until
      they are tuned.
    - On a ConvNeXt the map behind the last stage is fed back raw, and selected by its cosine behind
      the last norm. From stage to stage W1_l is a transposed convolution whose kernel is the
      stage's stride, W2_l one of 1 x 1; what comes down is added to what the stage is given, and
      W1_l should undo the stage on just that. W1 starts by repeating the channels that there are
      room for.
    """

    name = "toast"
    paper = "TOAST: Transfer Learning via Attention Steering, 2023"
    revision = 2
    steps = (Step("pretune"), Step("train"))
    starts_from = ("pretune",)
    needs_vit = True  # or a ConvNeXt: see `check_backbone`
    Settings = ToastSettings

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        convolutional = isinstance(backbone, ConvNeXt)
        if not convolutional and not isinstance(backbone, VisionTransformer):
            raise UserError(
                f"{cls.name!r} works on the blocks of a vision transformer or the stages of a "
                "ConvNeXt, and the backbone is a "
                f"{type(backbone).__name__}; choose another method, or a backbone such as "
                "vit_tiny_patch16_224 or convnext_tiny"
            )
        unit, depth = (
            ("stage", len(backbone.stages)) if convolutional else ("block", len(backbone.blocks))
        )
        top = settings.feedback_from or depth
        if not settings.feedback_to < top <= depth:
            raise UserError(
                f"feedback goes from {unit} {top} down to {unit} {settings.feedback_to}, and "
                f"the backbone has {depth}; keep "
                f"0 <= feedback_to < feedback_from <= {depth}"
            )
        top_down_of(backbone, settings)

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        return cls.steps[1:] if position >= 0 else cls.steps[:1] if settings.pretune else ()

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset(
            {"pretune", "train_P"} if step == "pretune" else {"pretune", "variational"}
        )

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.top_down = top_down_of(backbone, settings)
        self.width = self.top_down.width
        self.own = nn.ParameterDict()  # of the task in training
        self.loaded: dict[
            str, dict[str, Tensor] | None
        ] = {}  # task -> what it has of its own; None: it is answered by the backbone
        self.step = ""

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Feedback layers that every task starts from, and once something is trained the prior:
        those of `pretune`, else fresh ones."""
        return self.top_down.fresh()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parts of the feedback layers that a task trains and stores."""
        return self.top_down.shapes()

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.step, device = context.step, self.device
        self.start = {name: t.to(device) for name, t in self.start.items()}
        if "prior" not in self.start:
            self.start["prior"] = self.top_down.prior(
                torch.Generator().manual_seed(derive_seed(self.seed, "toast"))
            )
        own = dict(self.start) if context.step == "pretune" else self.beginning(context.task)
        if context.task.role == "unlabelled":
            own, groups = self.top_down.first_layers(own), []
        if context.step != "pretune" and self.settings.train_P:
            own["transform"] = torch.eye(self.width)
        self.own = nn.ParameterDict(
            {name: nn.Parameter(t.to(device, copy=True)) for name, t in own.items()}
        )
        return groups + [
            {
                "name": name,
                "params": [p],
                "weight_decay": context.optim.weight_decay if name != "prior" else 0.0,
            }
            for name, p in self.own.items()
        ]

    def beginning(self, task: Task) -> dict[str, Tensor]:
        """What is trained, beside P and the head, as it starts."""
        return dict(self.start)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.in_effect(dict(self.own.items()))

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.step != "pretune":
            return super().loss(batch, progress)
        assert self.task is not None
        self.active_task, self.weight_overrides = None, self.training_weights(batch, progress)
        stream: list[Any] = []
        labelled = self.task.role != "unlabelled"
        with torch.set_grad_enabled(labelled):  # what layers should undo is detached
            features = self.top_down.second_pass(
                *self.top_down.first_pass(batch.images), self.weight_overrides, stream
            )
        inversion = self.top_down.inversion(stream, dict(self.own.items()))
        if not labelled:
            return inversion, {"variational": inversion.detach()}
        ce = self.classification_loss(features, batch)
        return ce + self.settings.variational * inversion, {
            "ce": ce.detach(),
            "variational": inversion.detach(),
        }

    def finish(self) -> tuple[TaskState, Carried]:
        """After `pretune` what is tuned is what all start from, and not the base task's own."""
        own = {name: p.detach().clone() for name, p in self.own.items()}
        if self.step == "pretune":
            return self.state(), Carried({**self.start, **own})
        return self.state(tokens={"prior": own.pop("prior")}, copies=own), Carried()

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.start = dict(carried.tensors)

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        found: dict[str, tuple[int, ...]] = {
            name: tuple(t.shape) for name, t in state.copies.items()
        }
        wanted = {
            **self.shapes(),
            **({"transform": (self.width, self.width)} if self.settings.train_P else {}),
        }
        if found and found != wanted:
            raise UserError(
                f"task {state.task!r}: its state has feedback {found}, these settings have "
                f"{wanted}; use the backbone and the method's settings "
                "of its run"
            )
        self.loaded[state.task] = (
            None if state.method == "base" else {**state.tokens, **state.copies}
        )

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        own = self.loaded[task] if task in self.loaded else dict(self.own.items())
        return {} if own is None else self.in_effect(own)

    def in_effect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the second pass needs of a task: its prior and its feedback, folded."""
        device = self.device
        tensors = {name: t.to(device) for name, t in {**self.start, **own}.items()}
        return {
            "prior": tensors["prior"],
            **self.top_down.folded(self.layers(tensors), tensors.get("transform")),
        }

    def layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The feedback layers, each with a matrix in its last two axes."""
        return {name: tensors[name] for name in self.top_down.shapes()}

    def features(self, images: Tensor) -> Tensor:
        return (
            self.top_down.second_pass(*self.top_down.first_pass(images), self.weight_overrides)
            if self.weight_overrides
            else self.backbone(images)
        )

    def grouped_logits(
        self, images: Tensor, rows: Mapping[str, Tensor | slice]
    ) -> dict[str, Tensor]:
        """With one first pass for all."""
        entered, seen = self.top_down.first_pass(images)
        found = dict[str, Tensor]()
        for task, mine in rows.items():
            self.activate_task(task)
            features = (
                self.top_down.second_pass(entered[mine], seen[mine], self.weight_overrides)
                if self.weight_overrides
                else self.backbone(images[mine])
            )
            found[task] = self.heads[task](features)
        return found

    def logits_of(self, images: Tensor, tasks: Iterable[str]) -> dict[str, Tensor]:
        """What `logits` gives for each of these tasks, with one first pass for all."""
        return self.grouped_logits(images, dict.fromkeys(tasks, slice(None)))

    def flops_share(self, state: TaskState) -> float:
        return self.top_down.flops_share()


def top_down_of(backbone: Any, settings: ToastSettings) -> TopDown | StageTopDown:
    form = StageTopDown if isinstance(backbone, ConvNeXt) else TopDown
    return form(backbone, settings.feedback_to, settings.feedback_from, settings.td_value_bias)


class ToastLiteSettings(ToastSettings):
    rank: PositiveInt = Field(4, description="r of the low-rank part of each feedback layer")
    alpha: PositiveFloat = Field(1.0, description="that part is scaled by alpha / r")


class ToastLite(Toast[ToastLiteSettings]):
    """TOAST whose feedback layers are shared: a task trains W + alpha / r B A beside xi and P, with
    B = 0 at the start. `pretune` trains W1 and W2 themselves, as in TOAST. Stored per task: xi, P,
    the low-rank parts and a head.
    """

    name = "toast_lite"
    Settings = ToastLiteSettings

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return super().ignored_settings(step) | (
            frozenset({"rank", "alpha"}) if step == "pretune" else frozenset()
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A is `down` (..., r, in), B is `up` (..., out, r)."""
        rank, layers = self.settings.rank, self.top_down.shapes()
        return {
            f"{name}_{part}": shape
            for name, (*stacked, out, into) in layers.items()
            for part, shape in (("down", (*stacked, rank, into)), ("up", (*stacked, out, rank)))
        }

    def beginning(self, task: Task) -> dict[str, Tensor]:
        """A is uniform in +-1/sqrt(in), B is zero."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "toast_lite", task.name))
        parts = {
            name: torch.zeros(shape)
            if name.endswith("up")
            else (2 * torch.rand(shape, generator=generator) - 1) * shape[-1] ** -0.5
            for name, shape in self.shapes().items()
        }
        return {"prior": self.start["prior"], **parts}

    def layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base task has none but the shared ones."""
        scale = self.settings.alpha / self.settings.rank
        return {
            name: layer + scale * tensors[f"{name}_up"] @ tensors[f"{name}_down"]
            if f"{name}_up" in tensors
            else layer
            for name, layer in super().layers(tensors).items()
        }
