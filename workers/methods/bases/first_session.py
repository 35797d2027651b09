"""First-session adaptation: the features are adapted to the first task and then frozen.

Zhou, Cai, Ye, Zhan, Liu: Revisiting Class-Incremental Learning with Pre-Trained Models:
Generalizability and Adaptivity are All You Need, IJCV 2024 (arXiv 2303.07338). McDonnell, Gong,
Parvaneh, Abbasnejad, van den Hengel: RanPAC, NeurIPS 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, Neutral, Task
from workers.methods.adapter import compute_added_share, draw_dropout, find_adapter_sites
from workers.methods.base import (
    BLOCK_VITS,
    EXAMPLES,
    MethodSettings,
    OptimPlan,
    ParamGroup,
    Progress,
    Step,
    StepContext,
)
from workers.methods.bases.statistics import ClassStatistics
from workers.methods.finetune import weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.methods.vpt import compute_prompted_share
from workers.model.adapters import Bottlenecks
from workers.model.cosine import CosineHeads
from workers.model.prompts import PromptSites, draw_initial_prompts
from workers.model.scale_shift import ScaleShiftSites
from workers.storage.taskstate import Carried, TaskState, select_with_prefix

ADAPT, ADAPTATION = "adapt", "adaptation"  # the step, and the prefix of its carried tensors
Variant = Literal["finetune", "vpt-shallow", "vpt-deep", "adapter", "ssf"]
# Variant -> the classes of backbones that it supports. `finetune` supports all backbones.
VITS: dict[str, tuple[type[nn.Module], ...]] = {
    "adapter": BLOCK_VITS,
    "vpt-shallow": BLOCK_VITS,
    "vpt-deep": BLOCK_VITS,
    "ssf": (VisionTransformer,),
}
# Training settings of APER and RanPAC on CIFAR-100.
FIRST_SESSION_TRAINING = TrainDefaults(
    lr=1e-2,
    optimizer="sgd",
    weight_decay=5e-4,
    warmup=0.0,
    floor=0.0,
    epochs=20,
    batch_size=48,
    source="released code of APER and RanPAC on CIFAR-100",
)


class FirstSessionSettings(MethodSettings):
    """Settings of the first session."""

    first_session: Annotated[Literal["none"] | Variant, Neutral("none")] = Field(
        "none",
        description="tensors that the first task trains and all tasks use: `none`; `finetune`: a "
        "copy of all weights; `vpt-shallow`, `vpt-deep`: prompts of the first block, or of every "
        "block; `adapter`: AdaptFormer's adapters; `ssf`: a scale and a shift after each layer",
    )
    adapter_width: Annotated[PositiveInt, Neutral(64), ActiveIf("first_session", ("adapter",))] = (
        Field(64, description="for `adapter`: m, number of hidden units of an adapter")
    )
    adapter_dropout: Annotated[float, Neutral(0.1), ActiveIf("first_session", ("adapter",))] = (
        Field(
            0.1, ge=0, lt=1, description="for `adapter`: dropout rate of hidden units in training"
        )
    )
    prompts: Annotated[
        PositiveInt, Neutral(5), ActiveIf("first_session", ("vpt-shallow", "vpt-deep"))
    ] = Field(5, description="for `vpt-shallow` and `vpt-deep`: p, prompt tokens that a block gets")
    head_scale: Annotated[PositiveFloat, Neutral(1.0), ActiveIf("first_session", but=("none",))] = (
        Field(
            1.0,
            description="initial factor of the cosines in the loss of the first session; 1 in the "
            "released code, which lets the loss fall only little; 16 or more lets it fall",
        )
    )


S = TypeVar("S", bound=FirstSessionSettings, default=Any)


class FirstSession(ClassStatistics[S]):
    """Class statistics of features that the first task of the stream may adapt.

    The step `adapt` of the first task trains an `Adaptation` with a temporary cosine head. Later
    steps and tasks carry the adaptation unchanged. Therefore the order of the tasks after the first
    one has no effect. With `first_session: none` there is no such step, and the features are those
    of the backbone.
    """

    steps: ClassVar[tuple[Step, ...]] = (Step(ADAPT), Step("statistics", trains=False))
    starts_as_backbone = False

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        if settings.first_session == "none":
            return ClassStatistics.steps
        return cls.steps if position == 0 else cls.steps[1:]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """Return the settings that a step does not read.

        `adapt` does not read the settings of the classifier. Later steps do not read the settings
        of the training.
        """
        if step == ADAPT:
            shared = FirstSessionSettings.model_fields.keys()
            return frozenset(cls.Settings.model_fields.keys() - shared)
        return frozenset({"adapter_dropout", "head_scale"})

    @classmethod
    def unused_train_settings(cls, settings: S) -> Mapping[str, str]:
        if settings.first_session != "none":
            return {}
        return super().unused_train_settings(settings)

    @classmethod
    def check_backbone(cls, settings: S, backbone: nn.Module, tasks: tuple[Task, ...] = ()) -> None:
        super().check_backbone(settings, backbone, tasks)
        kind = settings.first_session
        base = next((task.name for task in tasks if task.role == "base"), None)
        if base is not None and kind != "none":
            raise UserError(
                f"{cls.name!r} has first_session {kind!r}, which adapts a pretrained backbone, and "
                f"this stream trains the backbone on its base task {base!r}; give the task the "
                "role `task` and the backbone pretrained weights (backbone.weights), or choose a "
                "method without a first session (simplecil, ranpac with first_session none)"
            )
        if kind in VITS and not isinstance(backbone, VITS[kind]):
            examples = ", ".join(EXAMPLES[vit] for vit in VITS[kind])
            raise UserError(
                f"first_session is {kind!r}, which works on the blocks of a vision transformer, "
                f"and the backbone is a {type(backbone).__name__}; set first_session to finetune, "
                f"or choose a backbone such as {examples}"
            )
        if kind == "adapter":
            find_adapter_sites(backbone, "adaptformer")
        elif kind.startswith("vpt"):
            PromptSites(backbone, "deep")

    def __init__(self, backbone: nn.Module, settings: S, seed: int):
        super().__init__(backbone, settings, seed)
        self.adaptation = create_adaptation(backbone, settings)
        self.is_adapting = False

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        self.is_adapting = context.step == ADAPT
        if not self.is_adapting:
            return super().begin(context)
        assert self.adaptation is not None
        width: int = self.backbone.num_features  # type: ignore[assignment]
        self.heads = CosineHeads(width, scale=self.settings.head_scale).to(self.device)
        super().begin(context)
        head = self.heads[context.task.name]
        return [
            {"name": "head", "params": [head.weight], "weight_decay": context.optim.weight_decay},
            {"name": "head.scale", "params": [self.heads.scale], "weight_decay": 0.0},
            *self.adaptation.groups(context.optim),
        ]

    def read_statistics(self, context: StepContext) -> None:
        if not self.is_adapting:
            super().read_statistics(context)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return the factors of dropout, which replace no parameter; `features` applies them."""
        assert self.adaptation is not None
        return self.adaptation.draw(self.backbone, batch)

    def features(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W), adapted if there is an adaptation."""
        if self.adaptation is None:
            return self.backbone(images)  # type: ignore[no-any-return]
        drawn = self.weight_overrides if self.training else {}
        return self.adaptation(self.backbone, images, drawn)  # type: ignore[no-any-return]

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(self.carried_tensors())

    def carried_tensors(self) -> dict[str, Tensor]:
        """Return copies of the adaptation's tensors, by name."""
        if self.adaptation is None:
            return {}
        tensors = self.adaptation.state_dict()
        return {f"{ADAPTATION}/{name}": t.detach().clone() for name, t in tensors.items()}

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        tensors = select_with_prefix(carried.tensors, f"{ADAPTATION}/")
        expected = {} if self.adaptation is None else self.adaptation.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected_shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        if shapes != expected_shapes:
            differing = sorted({name for name, _ in shapes.items() ^ expected_shapes.items()})
            raise UserError(
                f"the carried state does not match first_session {self.settings.first_session!r} "
                f"on this backbone (tensors: {', '.join(differing[:3])}); use the backbone and the "
                "method's settings of its run"
            )
        if self.adaptation is not None:
            self.adaptation.load_state_dict(tensors)

    def flops_share(self, state: TaskState) -> float:
        return 1.0 if self.adaptation is None else self.adaptation.flops_share(self.backbone)


# ---- variants ------------------------------------------------------------------------------------
class Adaptation(nn.Module):
    """Trained tensors that change the features of a frozen backbone."""

    def groups(self, optim: OptimPlan) -> list[ParamGroup]:
        """Return the parameter groups."""
        return [{"name": ADAPTATION, "params": list(self.parameters()), "weight_decay": 0.0}]

    def draw(self, backbone: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Draw the random tensors of a training step, by name."""
        return {}

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """Return the adapted features (b, d) of images (b, 3, H, W).

        Args:
            backbone: The frozen backbone for which this was created.
            images: The images.
            drawn: Result of `draw` in training, else {}.
        """
        raise NotImplementedError

    def flops_share(self, backbone: nn.Module) -> float:
        """Return the FLOPs of adapted features, divided by those of the backbone's features."""
        return 1.0


def create_adaptation(backbone: nn.Module, settings: FirstSessionSettings) -> Adaptation | None:
    """Return a new adaptation, which may add hooks to the backbone; None for `none`."""
    kind = settings.first_session
    if kind == "none":
        return None
    if kind == "finetune":
        return FineTuned(backbone)
    if kind == "adapter":
        return Adapters(backbone, settings.adapter_width, settings.adapter_dropout)
    if kind == "ssf":
        return ScalesAndShifts(backbone)
    return Prompts(backbone, settings.prompts, is_deep=kind == "vpt-deep")


class FineTuned(Adaptation):
    """A copy of the backbone with all weights trained."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.network = copy.deepcopy(backbone)

    def groups(self, optim: OptimPlan) -> list[ParamGroup]:
        return weight_groups(self.network, optim)

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        return self.network(images)  # type: ignore[no-any-return]


class Adapters(Adaptation):
    """AdaptFormer's adapters, one in each block, parallel to the FFN."""

    def __init__(self, backbone: nn.Module, width: int, dropout: float):
        super().__init__()
        self.sites = find_adapter_sites(backbone, "adaptformer")
        self.width = width
        self.dropout = dropout
        self.bottlenecks = Bottlenecks(len(self.sites), self.sites.width, width)

    def groups(self, optim: OptimPlan) -> list[ParamGroup]:
        return self.bottlenecks.groups(optim.weight_decay)

    def draw(self, backbone: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return draw_dropout(backbone, batch, len(self.sites), self.width, self.dropout)

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        with self.sites.using(self.bottlenecks.tensors() | drawn):
            return backbone(images)  # type: ignore[no-any-return]

    def flops_share(self, backbone: nn.Module) -> float:
        return 1 + compute_added_share(backbone, 2 * self.bottlenecks.down.numel())


class Prompts(Adaptation):
    """Prompts of the first block, or of every block.

    They are initialised as in VPT's paper. In the released code of APER all prompts start at zero.
    Equal prompts get equal gradients, so there they stay equal, like one prompt counted p times.
    """

    def __init__(self, backbone: nn.Module, count: int, is_deep: bool):
        super().__init__()
        self.sites = PromptSites(backbone, "deep" if is_deep else "shallow")
        self.prompts = nn.Parameter(draw_initial_prompts(len(self.sites), count, backbone))

    def groups(self, optim: OptimPlan) -> list[ParamGroup]:
        return [{"name": "prompts", "params": [self.prompts], "weight_decay": optim.weight_decay}]

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        with self.sites.using(self.prompts):
            return backbone(images)  # type: ignore[no-any-return]

    def flops_share(self, backbone: nn.Module) -> float:
        return compute_prompted_share(backbone, self.sites, self.prompts.shape[1])


class ScalesAndShifts(Adaptation):
    """SSF: scales and shifts. They have no weight decay, which would pull the scales to 0."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.sites = ScaleShiftSites(backbone)
        self.values = nn.ParameterDict(self.sites.initial())

    def forward(self, backbone: nn.Module, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        with self.sites.using(self.sites.split(dict(self.values.items()))):
            return backbone(images)  # type: ignore[no-any-return]
