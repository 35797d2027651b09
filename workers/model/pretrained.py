"""What timm and the hub say of a pretrained model: its architecture, and the inputs it was trained
on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import timm
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

import workers.model.convit
import workers.model.t2t  # noqa: F401 (both enter timm's registry)
from workers.errors import UserError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # of a timm model on the hub


def check_name(name: str) -> str:
    """Return the architecture of NAME or NAME.TAG.

    Raise `UserError` when timm has no such model, or no weights with this tag.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models():
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
    """Return the input of timm's model NAME or NAME.TAG, see `input_of`.

    It is empty where timm has no configuration of the model.
    """
    check_name(name)
    config = get_pretrained_cfg(name, allow_unregistered=True)
    return {} if config is None else input_of(config.to_dict())


def input_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `BackboneSettings` that a model's `pretrained_cfg` gives.

    They are `img_size`, `mean`, `std` and `crop_pct`, as far as it has them.
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
    return values
