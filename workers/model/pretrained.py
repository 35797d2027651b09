"""Information of timm and the hub about a pretrained model.

It is the architecture, the inputs of the training, and its weights with the names of the backbone.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

import timm
from timm.models import convnext, get_arch_pretrained_cfgs, get_pretrained_cfg, vision_transformer
from timm.models.convnext import ConvNeXt
from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import workers.model.convit  # noqa: F401 (enters timm's registry)
from workers.errors import UserError, describe_error
from workers.job import Interpolation
from workers.model.signature import model_class
from workers.model.t2t import T2TVit
from workers.storage import hub

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # of a timm model on the hub


def check_name(name: str) -> str:
    """Return the architecture of NAME or NAME.TAG.

    Raises:
        UserError: If timm has no such model, or no weights with this tag.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models(architecture):  # all would be sorted first
        close = difflib.get_close_matches(architecture, timm.list_models(), 3)
        raise UserError(
            f"backbone.name is {name!r}, which timm does not have; some it has: "
            f"{', '.join(close or ['vit_tiny_patch16_224'])}"
        )
    tags = [name.partition(".")[2] for name in get_arch_pretrained_cfgs(architecture)]
    if tag and tag not in tags:
        raise UserError(
            f"backbone.name is {name!r}, and timm has no weights of {architecture!r} with the tag "
            f"{tag!r}; its tags are: {', '.join(filter(None, tags)) or 'none'}"
        )
    return architecture


def own_input(name: str) -> dict[str, Any]:
    """Return the input of timm's model NAME or NAME.TAG, see `find_input`.

    It is empty where timm has no configuration of the model.
    """
    check_name(name)
    config = get_pretrained_cfg(name, allow_unregistered=True)
    return {} if config is None else find_input(config.to_dict())


def find_input(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `BackboneSettings` that a model's `pretrained_cfg` gives.

    They are `img_size`, `mean`, `std`, `crop_pct` and `interpolation`, as far as it has them.
    """
    values: dict[str, Any] = {}
    size = config.get("input_size")
    if isinstance(size, (list, tuple)) and size:
        values["img_size"] = size[-1]
    for name in ("mean", "std", "crop_pct"):
        if config.get(name) is not None:
            values[name] = config[name]
    crop_pct = values.get("crop_pct")
    if isinstance(crop_pct, (int, float)):
        values["crop_pct"] = min(1.0, float(crop_pct))  # three models of timm have 1.15
    if config.get("interpolation") in get_args(Interpolation):
        values["interpolation"] = config["interpolation"]
    return values


# ---- weights -------------------------------------------------------------------------------------
# Name of timm's function that renames and resamples published weights, in a model's module.
FILTERS = (
    "checkpoint_filter_fn",
    "_filter_fn",
    "pretrained_filter_fn",
    "_filter_torchvision_pretrained",
    "checkpoint_filter_fn_classifier",
)
CLASSIFIERS = ("head", "fc", "classifier")  # of models that do not name theirs
PLAIN_KINDS = (
    VisionTransformer,
    ResNet,
    ConvNeXt,
)  # models with weights that are resampled when they load


def find_filter(name: str) -> Callable[..., dict[str, Tensor]] | None:
    """Return the function by which timm reads published weights of a model; None: as they are."""
    module = sys.modules[timm.models.model_entrypoint(name.partition(".")[0]).__module__]
    for function in FILTERS:
        if hasattr(module, function):
            read: Callable[..., dict[str, Tensor]] = getattr(module, function)
            return read
    return None


def fit(
    tensors: dict[str, Tensor], model: Any, name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Convert published weights to the names and shapes of `model`.

    Args:
        tensors: The weights.
        model: The model.
        name: NAME or NAME.TAG of the model.

    Returns:
        The weights, and the classifier that was left out.
    """
    if isinstance(model, T2TVit):
        tensors = model.released(tensors)
    if isinstance(model, VisionTransformer):
        tensors = vision_transformer.checkpoint_filter_fn(tensors, model)
    elif isinstance(model, ConvNeXt):
        tensors = convnext.checkpoint_filter_fn(tensors, model)
    elif not isinstance(model, ResNet):
        read = find_filter(name)
        if read is not None:
            takes_model = len(inspect.signature(read).parameters) > 1
            tensors = read(tensors, model) if takes_model else read(tensors)
    own_names = model.state_dict().keys()
    prefixes = tuple(f"{name}." for name in list_classifiers(model))
    classifier: dict[str, Tensor] = {}
    fitting: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        is_classifier = key.startswith(prefixes) and key not in own_names
        (classifier if is_classifier else fitting)[key] = tensor
    return fitting, classifier


def list_classifiers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that timm's model classifies with."""
    if isinstance(model, (VisionTransformer, ResNet)):
        return ("head", "head_dist", "fc")
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    names = config.get("classifier")
    if not names:
        return CLASSIFIERS
    return (names,) if isinstance(names, str) else tuple(names)


def from_hub(name: str, img_size: int) -> dict[str, Tensor]:
    """Return timm's pretrained weights of NAME or NAME.TAG, including the classifier.

    A model that timm must resample to `img_size` is created in that size.
    """
    sized: dict[str, Any] = {}
    try:
        with hub.offline_if_unreachable():
            kind = model_class(name.partition(".")[0])
            takes_size = "img_size" in inspect.signature(kind).parameters
            if takes_size and not issubclass(kind, PLAIN_KINDS):
                sized["img_size"] = img_size
            weights: dict[str, Tensor] = timm.create_model(
                name, pretrained=True, **sized
            ).state_dict()
            return weights
    except Exception as error:  # the hub's client raises many kinds
        reason = describe_error(error, only_first_line=True)
        raise UserError(
            f"backbone.weights is 'hub', and the weights of {name!r} cannot be had from it "
            f"({reason}); fetch them on a machine with a "
            "network and give the .safetensors file, or choose another backbone.name"
        ) from None
