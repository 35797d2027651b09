"""Check the options of a backbone against the signature of the timm model.

An option must be an argument of the model, its value must have the right type (a size must also be
positive), and the name of a layer must be known to timm.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

import timm
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from timm.layers import get_act_layer, get_norm_layer
from timm.models.vision_transformer import ATTN_LAYERS
from torch import nn

from workers.errors import UserError, did_you_mean

STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
# options that name a layer -> timm's look-up function, and examples for messages
LAYERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "act_layer": (get_act_layer, "gelu or relu"),
    "norm_layer": (get_norm_layer, "layernorm or groupnorm1"),
    "embed_norm_layer": (get_norm_layer, "layernorm or rmsnorm"),
    "attn_layer": (ATTN_LAYERS.__getitem__, ", ".join(name for name in ATTN_LAYERS if name)),
}


class Argument(NamedTuple):
    """An argument of a model.

    Attributes:
        hint: Its type annotation.
        default: Its default value, or `inspect.Parameter.empty` without one.
    """

    hint: Any
    default: Any


def find_model_class(name: str) -> type[nn.Module]:
    """Return the class of the model `name` in timm's registry.

    To find the class, the model is built on the meta device, without memory for its weights.
    """
    with torch.device("meta"):
        return type(timm.create_model(name, num_classes=0))


@functools.lru_cache(maxsize=64)
def list_arguments(name: str) -> Mapping[str, Argument]:
    """Return the arguments of timm's model `name`.

    If a constructor has **kwargs, the arguments of the base class are included.
    """
    arguments: dict[str, Argument] = {}
    for owner in find_model_class(name).__mro__:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        hints = get_type_hints(constructor)
        parameters = inspect.signature(constructor).parameters.values()
        for parameter in parameters:
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and parameter.name in hints:
                argument = Argument(hints[parameter.name], parameter.default)
                arguments.setdefault(parameter.name, argument)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return arguments


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that every option is an argument of timm's model `name`, with a valid value.

    Raises:
        UserError: If an option is not accepted.
    """
    arguments = list_arguments(name)
    for option, value in options.items():
        if option not in arguments:
            remedy = did_you_mean(option, arguments, "leave it out")
            raise UserError(
                f"backbone.options.{option} is {value!r:.60}, and {name!r} has no such option; "
                f"{remedy}"
            )
        problem = _problem(option, value, arguments[option])
        if problem:
            raise UserError(f"backbone.options.{option} is {value!r:.60}: {problem}; change it")


def _problem(option: str, value: Any, argument: Argument) -> str:
    """Return the reason why a value does not fit an argument, or an empty string if it fits."""
    if value is None:
        return ""  # timm drops the option, so the model uses its default
    if option in LAYERS:
        return _layer_problem(option, value)
    plain = tuple(value) if isinstance(value, list) else value
    try:
        TypeAdapter(argument.hint, config=STRICT).validate_python(plain)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        return message[0].lower() + message[1:]
    is_size = argument.default is inspect.Parameter.empty or _is_positive(argument.default)
    if is_size and not _is_positive(plain):
        return "it must be greater than 0"
    return ""


def _layer_problem(option: str, value: Any) -> str:
    """Return the reason why a value is not the name of a timm layer; empty if it is a name."""
    look_up, examples = LAYERS[option]
    try:
        known = isinstance(value, str) and look_up(value) is not None
    except KeyError:
        known = False
    return "" if known else f"it must be a layer that timm has by name, such as {examples}"


def _is_positive(value: Any) -> bool:
    """Return whether a value is a positive number, or a non-empty list of positive numbers.

    Booleans do not count as numbers.
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_positive(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
