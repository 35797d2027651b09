"""Resolve the backbone settings of a config.

A config may leave out settings such as `img_size`. Their values come from timm's configuration of
the model, or from the config.json of a model on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.settings import BackboneChoice, Config, checked
from pipeline.graph.store import Store
from pipeline.graph.weights import HubModel, find_weights_digest, hub_model, weights_path
from workers.errors import UserError
from workers.job import BackboneSettings, check_option
from workers.model import pretrained, vit
from workers.storage.hub import pinned

DEFAULT_NAME = "vit_tiny_patch16_224"
# `model_args` of a hub model that do not become `options`; `img_size` is a setting of its own
OTHER_ARGUMENTS = ("num_classes", "img_size", "drop_path_rate", "pretrained", "in_chans")
# settings that take their default from the model
MODEL_DEFAULTS = ("img_size", "mean", "std", "crop_pct", "interpolation")


class Backbone(NamedTuple):
    """A backbone that workers can build.

    Attributes:
        settings: The complete settings, as in a job. `weights` of a hub model names its commit.
        outline: The model on device `meta`, without weights. It is shared: copy it before a change.
        weights: Digest of the weights, or `none` or `hub`, for the keys of stages.
    """

    settings: BackboneSettings
    outline: Any
    weights: str


def resolve_backbone(config: Config, store: Store, may_connect: bool) -> Backbone:
    """Return the backbone of a config.

    Args:
        config: The config.
        store: Caches hub models and digests.
        may_connect: Allow requests to the Hugging Face hub if the config names a hub model.

    Raises:
        UserError: If no such backbone exists, or its weights cannot be used.
    """
    choice = config.backbone
    model = hub_model(config, store, may_connect)
    if model is None:
        name = choice.name or DEFAULT_NAME
        settings = _complete(choice, name, choice.options, pretrained.own_input(name))
        settings = settings.model_copy(update={"weights": weights_path(config)})
        outline = vit.shared_outline(settings)
        digest = find_weights_digest(config, store, vit.most_bytes(outline))
        return Backbone(settings, outline, digest)
    settings = _read_hub_settings(choice, model)
    return Backbone(settings, vit.shared_outline(settings), model.digest)


def _read_hub_settings(choice: BackboneChoice, model: HubModel) -> BackboneSettings:
    """Return the settings of a hub model. Settings of the config take precedence.

    Only the name of the architecture, plain arguments and input settings are read from config.json.

    Raises:
        UserError: If config.json names another architecture than the config, or has arguments that
            are not allowed.
    """
    where = f"backbone.weights is {choice.weights!r}, and its config.json"
    architecture = model.body["architecture"].partition(".")[0]
    if choice.name and choice.name.partition(".")[0] != architecture:
        raise UserError(
            f"{where} names the architecture {architecture!r:.80}, but backbone.name is "
            f"{choice.name!r}; leave backbone.name out"
        )
    arguments = model.body.get("model_args") or {}
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where} has `model_args` that are not a mapping; choose another model")
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in OTHER_ARGUMENTS:
            continue
        try:
            check_option(str(name), value)
        except ValueError as error:
            raise UserError(f"{where} gives `model_args`: {error}; choose another model") from None
        options[str(name)] = value
    own_config = model.body.get("pretrained_cfg", model.body)
    own_input = pretrained.find_input(own_config) if isinstance(own_config, Mapping) else {}
    if isinstance(arguments.get("img_size"), int):
        own_input["img_size"] = arguments["img_size"]
    settings = _complete(choice, architecture, {**options, **choice.options}, own_input)
    weights = pinned(choice.weights, model.commit)
    return settings.model_copy(update={"weights": weights})


def _complete(
    choice: BackboneChoice, name: str, options: Mapping[str, Any], own_input: Mapping[str, Any]
) -> BackboneSettings:
    """Return the settings in a config, completed by those of the model.

    Args:
        choice: The settings in the config.
        name: Name of the timm model.
        options: Arguments of the timm model.
        own_input: Input settings of the model, for example `img_size`: defaults of the settings in
            MODEL_DEFAULTS.
    """
    values = choice.model_dump(exclude={*MODEL_DEFAULTS, "name", "options"})
    values |= {"name": name, "options": dict(options)}
    for key in MODEL_DEFAULTS:
        value = getattr(choice, key)
        if value is not None:
            values[key] = value
        elif key in own_input:
            values[key] = own_input[key]
    return checked(BackboneSettings, values, "backbone")
