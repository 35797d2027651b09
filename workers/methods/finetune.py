"""Sequential fine-tuning: all weights are trained on each task in turn, and nothing is protected.

The network forgets. Its accuracy is the usual lower bound for continual learning.
"""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.methods.base import Method, MethodSettings, OptimPlan, ParamGroup, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState


class FineTune(ClassIncremental[MethodSettings]):
    """Trains the backbone and the task's head. Old heads stay unchanged while the backbone changes.

    In scenario `class` the old heads are trained too: their outputs compete with the new outputs,
    but no sample belongs to an old class. In scenario `domain` all tasks train one head.
    """

    name = "finetune"
    has_constant_step = True
    family = "baseline"
    keeps = "a head"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    carries = ("weights",)
    freezes_backbone = False
    may_forget = True
    scenarios = frozenset({"task", "class", "domain"})
    shares_head = True

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        return super().begin(context) + weight_groups(self.backbone, context.optim)

    def finish(self) -> tuple[TaskState, Carried]:
        if self.scenario != "task":
            return self.state(), Carried(save_network(self, self.head_names()))
        return self.state(), Carried(collect_tensors(self.backbone))

    def load_carried(self, carried: Carried) -> None:
        if self.scenario != "task":
            restore_network(self, carried.tensors)
        elif carried.tensors:
            self.backbone.load_state_dict(carried.tensors)


def weight_groups(module: nn.Module, optim: OptimPlan) -> list[ParamGroup]:
    """Return the parameters of a module in two groups, with and without weight decay, like DeiT.

    Biases, norms, class token and position embedding have no weight decay. Neither have other
    parameters that timm exempts (Swin's relative positions), except in a `VisionTransformer`.
    """
    decayed = []
    exempt = []
    own_names: set[str] = set()
    exempted_by_timm: Any = getattr(module, "no_weight_decay", None)
    if exempted_by_timm is not None and not isinstance(module, VisionTransformer):
        own_names.update(exempted_by_timm())
    for name, parameter in module.named_parameters():
        is_token = name in ("cls_token", "pos_embed")
        is_own = name in own_names or name.rpartition(".")[2] in own_names
        if parameter.ndim > 1 and not is_token and not is_own:
            decayed.append(parameter)
        else:
            exempt.append(parameter)
    return [
        {"name": "backbone", "params": decayed, "weight_decay": optim.weight_decay},
        {"name": "backbone.exempt", "params": exempt, "weight_decay": 0.0},
    ]


def collect_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def save_network(method: Method, tasks: list[str]) -> dict[str, Tensor]:
    """Return copies of the backbone's tensors and of the heads of `tasks`.

    Their names are `backbone/NAME` and `heads/TASK/NAME`.
    """
    tensors = {}
    for name, tensor in collect_tensors(method.backbone).items():
        tensors[f"backbone/{name}"] = tensor
    return tensors | save_heads(method, tasks)


def save_heads(method: Method, tasks: list[str]) -> dict[str, Tensor]:
    """Return copies of the heads of `tasks`, named `heads/TASK/NAME`."""
    tensors = {}
    for task in tasks:
        for name, tensor in method.heads.export(task).items():
            tensors[f"heads/{task}/{name}"] = tensor
    return tensors


def restore_network(method: Method, tensors: dict[str, Tensor]) -> None:
    """Load the result of `save_network` or `save_heads`; other parameters stay unchanged."""
    backbone = {}
    heads: dict[str, dict[str, Tensor]] = {}  # tensors of each task's head
    for name, tensor in tensors.items():
        owner, rest = name.split("/", 1)
        if owner == "backbone":
            backbone[rest] = tensor
        else:
            task, head_name = rest.rsplit("/", 1)
            heads.setdefault(task, {})[head_name] = tensor
    if backbone:
        method.backbone.load_state_dict(backbone)
    for task, head in heads.items():
        method.heads.restore(task, head)
