"""TOAST: a frozen ViT or ConvNeXt runs twice; the first pass steers the second.

Features of the first pass that matter for the task are fed back.

Shi, Gai, Darrell, Wang: TOAST: Transfer Learning via Attention Steering, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from timm.models.convnext import ConvNeXt
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.errors import UserError
from workers.job import ActiveIf, Neutral, Task
from workers.methods.base import (
    BLOCK_VITS,
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    Step,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.top_down import TopDown
from workers.model.top_down_conv import StageTopDown
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# Maximum size of the first pass over all images of a split that a training stage keeps.
MAX_FIRST_PASS_BYTES = 1 << 30


START_DEVIATION = 0.02  # standard deviation of feedback layers with `start: random`


class ToastSettings(MethodSettings):
    """Settings of `toast`."""

    feedback_from: PositiveInt | None = Field(
        None,
        description="number, from 1, of the block (ConvNeXt: stage) whose output tokens are "
        "selected for feedback; null: the last; smaller values: early feedback",
    )
    feedback_to: NonNegativeInt = Field(
        0,
        description="number of blocks (ConvNeXt: stages) at the input that get no feedback; "
        "above 0: late feedback",
    )
    start: Annotated[Literal["identity", "random"], Neutral("identity")] = Field(
        "identity",
        description="feedback layers before any tuning: `identity`: W1 = I and W2 = 0, so that "
        "there is no feedback yet; `random`: normal numbers with standard deviation 0.02, as in "
        "the released code, which steer the second pass from the first step on",
    )
    select_tokens: Annotated[bool, Neutral(True)] = Field(
        True,
        description="whether output tokens are weighted by their similarity to xi before they are "
        "fed back; false: all tokens are fed back as they are, and there is no xi",
    )
    train_P: bool = Field(
        True,
        description="whether to train the channel transform P; false: P stays the identity, "
        "as in the released code of full TOAST",
    )
    td_value_bias: bool = Field(
        False,
        description="whether to add the bias of values twice, as the released code does; not "
        "for a ConvNeXt",
    )
    pretune: bool = Field(
        True,
        description="whether to tune the initial feedback layers and prior on unlabelled "
        "images or on the base task, if the stream has them",
    )
    variational: Annotated[NonNegativeFloat, ActiveIf("pretune", (True,))] = Field(
        0.1,
        description="lambda_v, weight in step `pretune` of the loss by which feedback layers "
        "learn to invert their blocks; 0.01 in the paper for a ConvNeXt",
    )


S = TypeVar("S", bound=ToastSettings, default=Any)


class Toast(Method[S]):
    """A star: tokens of a first pass steer a second pass through linear feedback layers.

    The output tokens x_n of the first pass are scaled by s_n = clamp(cos(x_n, xi), 0, 1), with a
    trained prior xi, and multiplied by P. Linear feedback layers (W1_l, W2_l) pass them down from
    block to block, and they are added to the attention values of the second pass (equations:
    `TopDown`). Stored per task: xi, P, the feedback layers and a head.

    A base task goes through `pretune`: cross-entropy + lambda_v sum_l MSE(W1_l sg(out_l),
    sg(in_l)), with in_l and out_l before and after block l; sg stops the gradient. Every task
    starts from the resulting feedback layers and prior, which also serve the base task. A task of
    role `unlabelled` has the same step, with the second term only.

    Without augmentation the first pass over an image is the same in every epoch. A stage computes
    it once per image and keeps the tokens that the second pass needs, if those of all images fit
    into MAX_FIRST_PASS_BYTES: 8 N D bytes for an image with N tokens of width D (`precompute`).

    Differences from the paper and its code:
    - The value bias is not added twice, so that with P = 0 the features equal the backbone's bit
      for bit (`td_value_bias` selects the code's way). P is trained, which agrees with the paper's
      count of parameters (`train_P`). Weight decay acts on P and the feedback layers, not on xi,
      because its length has no effect.
    - The backbone is in evaluation mode in both passes: no stochastic depth. Heads start like those
      of all methods.
    - Feedback from a block below the last takes its raw output, like in the paper's language
      models; a ViT has no norm for it.
    - In `pretune` the cross-entropy is that of the second pass; the cross-entropy of the first pass
      would train only the head.
    - Before any tuning W1 = I and W2 = 0, so a task starts as the backbone, and feedback can reach
      every block. xi is the mean token of a noise image, which has a positive cosine with tokens of
      any image. The code starts from random numbers (std 0.02; `start: random`), which fade on
      their way down, and disturb the backbone until they are tuned.
    - In ViTs whose value biases are separate parameters, these are added after the product with the
      fused weight, which only changes the rounding.
    - On a ConvNeXt the map after the last stage is fed back raw, and selected by its cosine after
      the last norm. From stage to stage W1_l is a transposed convolution with the stage's stride as
      kernel, W2_l is 1 x 1; the feedback is added to the input of the stage, and W1_l should invert
      the stage on this input. W1 starts by copying the first channels of the map to all positions
      of the kernel.
    """

    name = "toast"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "feedback layers, prior, head"
    paper = "TOAST: Transfer Learning via Attention Steering, 2023"
    train_defaults = TrainDefaults(
        lr=3e-3,
        optimizer="sgd",
        weight_decay=1e-4,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    revision = 3
    steps = (Step("pretune"), Step("train"))
    starts_from = ("pretune",)
    needs_vit = True  # or a ConvNeXt: see `check_backbone`
    vits = BLOCK_VITS
    Settings = ToastSettings

    @classmethod
    def check_backbone(cls, settings: S, backbone: Any, tasks: tuple[Task, ...] = ()) -> None:
        convolutional = isinstance(backbone, ConvNeXt)
        if not convolutional and not isinstance(backbone, cls.vits):
            raise UserError(
                f"{cls.name!r} works on the blocks of a vision transformer or the stages of a "
                "ConvNeXt, and the backbone is a "
                f"{type(backbone).__name__}; choose another method, or a backbone such as "
                "vit_tiny_patch16_224, eva02_tiny_patch14_224 or convnext_tiny"
            )
        if convolutional:
            unit = "stage"
            depth = len(backbone.stages)
        else:
            unit = "block"
            depth = len(backbone.blocks)
        top = settings.feedback_from or depth
        if not settings.feedback_to < top <= depth:
            raise UserError(
                f"feedback is sent from {unit} {top} down to {unit} {settings.feedback_to}, and "
                f"the backbone has {depth}; keep "
                f"0 <= feedback_to < feedback_from <= {depth}"
            )
        make_top_down(backbone, settings)
        named = sorted({"pretune", "variational"} & settings.model_fields_set)
        if settings.pretune and named and all(task.role == "task" for task in tasks):
            raise UserError(
                f"{named[0]} is {getattr(settings, named[0])}, and has no effect in a stream "
                "without a task of role base or unlabelled; add one, or leave it out"
            )

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        pretune, train = cls.steps
        if position >= 0:
            return (train,)
        return (pretune,) if settings.pretune else ()

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        if step == "pretune":
            return frozenset({"pretune", "train_P"})
        return frozenset({"pretune", "variational"})

    def __init__(self, backbone: Any, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.top_down = make_top_down(backbone, settings)
        self.width = self.top_down.width
        self.own = nn.ParameterDict()  # tensors of the task in training
        # task -> its prior, P and feedback layers; None: the backbone itself serves it
        self.loaded: dict[str, dict[str, Tensor] | None] = {}
        self.step = ""

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Tensors from which every task starts: the result of `pretune`, or new feedback layers.

        `begin` adds the prior if it is missing. `load_carried` replaces all tensors.
        """
        if self.settings.start == "identity":
            return self.top_down.fresh()
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "toast feedback"))
        return {
            name: (START_DEVIATION * torch.randn(tensor.shape, generator=generator)).to(tensor)
            for name, tensor in self.top_down.fresh().items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the feedback tensors that a task trains and stores, by name."""
        return self.top_down.shapes()

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.step = context.step
        device = self.device
        self.start = {name: t.to(device) for name, t in self.start.items()}
        if self.settings.select_tokens and "prior" not in self.start:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "toast"))
            self.start["prior"] = self.top_down.prior(generator)
        if context.step == "pretune":
            tensors = dict(self.start)
        else:
            tensors = self.beginning(context.task)
        if context.task.role == "unlabelled":
            tensors = self.top_down.first_layers(tensors)
            groups = []
        if context.step != "pretune" and self.settings.train_P:
            tensors["transform"] = torch.eye(self.width)
        parameters = {name: nn.Parameter(t.to(device, copy=True)) for name, t in tensors.items()}
        self.own = nn.ParameterDict(parameters)  # `ParameterDict` sorts by name
        for name, parameter in self.own.items():
            weight_decay = 0.0 if name == "prior" else context.optim.weight_decay
            groups.append({"name": name, "params": [parameter], "weight_decay": weight_decay})
        return groups

    def beginning(self, task: Task) -> dict[str, Tensor]:
        """Return the initial values of a task's trained tensors except P and the head, by name."""
        return dict(self.start)

    def precompute(self, feed: Feed) -> None:
        """Let the feed cache the first pass over its images; see `PrecomputesFeatures`."""

        def extract(images: Tensor) -> Tensor:
            return self.top_down.pack(*self.top_down.first_pass(images))

        feed.cache_features(extract, MAX_FIRST_PASS_BYTES)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.in_effect(dict(self.own.items()))

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.step != "pretune":
            return super().loss(batch, progress)
        assert self.task is not None
        self.active_task = None
        self.weight_overrides = self.training_weights(batch, progress)
        stream: list[Any] = []
        is_labelled = self.task.role != "unlabelled"
        with torch.set_grad_enabled(
            is_labelled
        ):  # without labels only `inversion` has a gradient, and it detaches `stream`
            entered, seen = self.first_pass(batch.images)
            features = self.top_down.second_pass(entered, seen, self.weight_overrides, stream)
        inversion = self.top_down.inversion(stream, dict(self.own.items()))
        if not is_labelled:
            return inversion, {"variational": inversion.detach()}
        ce = self.classification_loss(features, batch)
        return ce + self.settings.variational * inversion, {
            "ce": ce.detach(),
            "variational": inversion.detach(),
        }

    def finish(self) -> tuple[TaskState, Carried]:
        """Return the states. After `pretune` the tensors are only in the carried state."""
        copies = {name: p.detach().clone() for name, p in self.own.items()}
        if self.step == "pretune":
            return self.state(), Carried({**self.start, **copies})
        tokens = {"prior": copies.pop("prior")} if self.settings.select_tokens else {}
        return self.state(tokens=tokens, copies=copies), Carried()

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.start = dict(carried.tensors)

    def load_task(self, state: TaskState) -> None:
        super().load_task(state)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, t in state.copies.items():
            shapes[name] = tuple(t.shape)
        expected_shapes = dict(self.shapes())
        if self.settings.train_P:
            expected_shapes["transform"] = (self.width, self.width)
        if shapes and shapes != expected_shapes:
            raise UserError(
                f"task {state.task!r}: its state has feedback {shapes}, these settings have "
                f"{expected_shapes}; use the backbone and the method's settings of its run"
            )
        self.loaded[state.task] = None
        if state.method != "base":
            self.loaded[state.task] = {**state.tokens, **state.copies}

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return self.in_effect(dict(self.own.items()))
        tensors = self.loaded[task]
        return {} if tensors is None else self.in_effect(tensors)

    def in_effect(self, task_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a task for the second pass: prior and folded feedback layers.

        Tensors that the task lacks are those of `start`.
        """
        device = self.device
        tensors = {name: t.to(device) for name, t in {**self.start, **task_tensors}.items()}
        folded = self.top_down.folded(self.layers(tensors), tensors.get("transform"))
        if self.settings.select_tokens:
            folded["prior"] = tensors["prior"]
        return folded

    def layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the feedback layers, each with a matrix in its last two axes."""
        return {name: tensors[name] for name in self.top_down.shapes()}

    def features(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W), or of cached rows (b, F)."""
        if not self.weight_overrides:
            return self.backbone(images)  # type: ignore[no-any-return]
        entered, seen = self.first_pass(images)
        return self.top_down.second_pass(entered, seen, self.weight_overrides)

    def first_pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return both results of `TopDown.first_pass` for images, or from cached rows (b, F)."""
        if images.ndim == 2:
            return self.top_down.unpack(images)
        return self.top_down.first_pass(images)

    def grouped_logits(
        self, images: Tensor, rows: Mapping[str, Tensor | slice]
    ) -> dict[str, Tensor]:
        """Return task -> logits on its rows, with one first pass for all; see `SharesForward`."""
        entered, seen = self.top_down.first_pass(images)
        logits: dict[str, Tensor] = {}
        for task, index in rows.items():
            self.activate_task(task)
            if self.weight_overrides:
                weights = self.weight_overrides
                features = self.top_down.second_pass(entered[index], seen[index], weights)
            else:
                features = self.backbone(images[index])
            logits[task] = self.heads[task](features)
        return logits

    def flops_share(self, state: TaskState) -> float:
        return self.top_down.flops_share()


def make_top_down(backbone: Any, settings: ToastSettings) -> TopDown | StageTopDown:
    """Return the two passes over a ViT or a ConvNeXt, with the feedback between them."""
    form = StageTopDown if isinstance(backbone, ConvNeXt) else TopDown
    return form(backbone, settings.feedback_to, settings.feedback_from, settings.td_value_bias)


class ToastLiteSettings(ToastSettings):
    """Settings of `toast_lite`."""

    rank: PositiveInt = Field(4, description="r, rank of the update of each feedback layer")
    alpha: PositiveFloat = Field(
        1.0, description="factor of an update, which is scaled by alpha / r"
    )


class ToastLite(Toast[ToastLiteSettings]):
    """TOAST with shared feedback layers: a task trains W + alpha / r B A in addition to xi and P.

    B is 0 at the start. `pretune` trains W1 and W2, as in TOAST. Stored per task: xi, P, the
    low-rank parts and a head.
    """

    name = "toast_lite"
    has_constant_step = True
    family = "parameter-efficient"
    keeps = "low-rank feedback, prior, head"
    train_defaults = TrainDefaults(
        lr=3e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    Settings = ToastLiteSettings

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        ignored = super().ignored_settings(step)
        return ignored | {"rank", "alpha"} if step == "pretune" else ignored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A, `down` (..., r, in), and of B, `up` (..., out, r)."""
        rank = self.settings.rank
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (*stacked, out, into) in self.top_down.shapes().items():
            shapes[f"{name}_down"] = (*stacked, rank, into)
            shapes[f"{name}_up"] = (*stacked, out, rank)
        return shapes

    def beginning(self, task: Task) -> dict[str, Tensor]:
        """Return the initial values: A is uniform in +-1/sqrt(in), B is zero."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "toast_lite", task.name))
        tensors = {name: t for name, t in self.start.items() if name == "prior"}
        for name, shape in self.shapes().items():
            if name.endswith("up"):
                tensors[name] = torch.zeros(shape)
            else:
                uniform = 2 * torch.rand(shape, generator=generator) - 1
                tensors[name] = uniform * shape[-1] ** -0.5
        return tensors

    def layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shared layers, plus the low-rank parts; a base task has no such parts."""
        scale = self.settings.alpha / self.settings.rank
        layers = super().layers(tensors)
        for name, layer in layers.items():
            if f"{name}_up" in tensors:
                up = tensors[f"{name}_up"]  # (..., out, r)
                down = tensors[f"{name}_down"]  # (..., r, in)
                layers[name] = layer + scale * up @ down
        return layers
