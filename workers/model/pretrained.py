"""Pretrained models of timm and the Hugging Face hub: architecture, input settings and weights.

Weights are converted to the names and shapes of the backbone.
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

import workers.model.convit  # noqa: F401 (registers its model in timm)
from workers.errors import UserError, describe_error
from workers.job import Interpolation
from workers.model.signature import find_model_class
from workers.model.t2t import T2TVit
from workers.storage import hub

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # files of a timm model on the hub


def check_name(name: str) -> str:
    """Check the name of a timm model, NAME or NAME.TAG, and return its architecture NAME.

    Raises:
        UserError: If timm has no such model, or no weights with this tag.
    """
    architecture, _, tag = name.partition(".")
    # without a filter, timm would sort the names of all models
    if architecture not in timm.list_models(architecture):
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
    """Return the input settings of timm's model NAME or NAME.TAG, as in `find_input`.

    The result is empty if timm has no configuration for the model.
    """
    check_name(name)
    config = get_pretrained_cfg(name, allow_unregistered=True)
    return {} if config is None else find_input(config.to_dict())


def find_input(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `BackboneSettings` that are set in a model's `pretrained_cfg`.

    These are `img_size`, `mean`, `std`, `crop_pct` and `interpolation`; missing values are left
    out.
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
        # three models in timm have 1.15, and `BackboneSettings` allows at most 1
        values["crop_pct"] = min(1.0, float(crop_pct))
    if config.get("interpolation") in get_args(Interpolation):
        values["interpolation"] = config["interpolation"]
    return values


# ---- weights -------------------------------------------------------------------------------------
# possible names of the function in a timm module that renames and resamples published weights
FILTERS = (
    "checkpoint_filter_fn",
    "_filter_fn",
    "pretrained_filter_fn",
    "_filter_torchvision_pretrained",
    "checkpoint_filter_fn_classifier",
)
# names of classifiers, for models whose `pretrained_cfg` does not name them
CLASSIFIERS = ("head", "fc", "classifier")
# `from_hub` creates these models in their own size; `convert_weights` adapts the weights
PLAIN_KINDS = (
    VisionTransformer,
    ResNet,
    ConvNeXt,
)


def find_filter(name: str) -> Callable[..., dict[str, Tensor]] | None:
    """Return timm's function that converts published weights of a model.

    None: timm uses the published weights without a conversion.
    """
    module = sys.modules[timm.models.model_entrypoint(name.partition(".")[0]).__module__]
    for function in FILTERS:
        if hasattr(module, function):
            read: Callable[..., dict[str, Tensor]] = getattr(module, function)
            return read
    return None


def convert_weights(
    tensors: dict[str, Tensor], model: Any, name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Convert published weights to the names and shapes of `model`.

    Args:
        tensors: The published weights by name.
        model: The backbone, without a classifier.
        name: NAME or NAME.TAG of the model.

    Returns:
        The weights without the classifier, and the weights of the classifier.
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
    """Return the names of the classifier layers of a timm model."""
    if isinstance(model, (VisionTransformer, ResNet)):
        return ("head", "head_dist", "fc")
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    names = config.get("classifier")
    if not names:
        return CLASSIFIERS
    return (names,) if isinstance(names, str) else tuple(names)


def from_hub(name: str, img_size: int) -> dict[str, Tensor]:
    """Return timm's pretrained weights of NAME or NAME.TAG, including the classifier.

    If only timm can resample the weights of a model, the model is created with `img_size`, so that
    timm resamples them.

    Raises:
        UserError: If the weights cannot be downloaded or loaded.
    """
    sized: dict[str, Any] = {}
    try:
        with hub.offline_if_unreachable():
            kind = find_model_class(name.partition(".")[0])
            takes_size = "img_size" in inspect.signature(kind).parameters
            if takes_size and not issubclass(kind, PLAIN_KINDS):
                sized["img_size"] = img_size
            weights: dict[str, Tensor] = timm.create_model(
                name, pretrained=True, **sized
            ).state_dict()
            return weights
    except Exception as error:  # the hub's client raises many classes of exceptions
        reason = describe_error(error, only_first_line=True)
        raise UserError(
            f"backbone.weights is 'hub', and the weights of {name!r} cannot be had from it "
            f"({reason}); fetch them on a machine with a "
            "network and give the .safetensors file, or choose another backbone.name"
        ) from None
