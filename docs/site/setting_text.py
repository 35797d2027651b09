"""Settings as Markdown: type, default, range and meaning of every field of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.site.markdown import Term, term_list
from pipeline.app.method_list import (
    describe_setting_type,
    format_bounds,
    format_yaml_value,
    list_fields,
)


def settings_list(model: type[BaseModel], paper: Mapping[str, Any] | None = None) -> str:
    """Return the fields of a model as a list of terms.

    paper: setting -> its value in the method's paper, which is shown where it is another one.
    """
    terms = []
    for key, info in list_fields(model):
        facts = facts_of(info)
        if paper and key in paper and paper[key] != default_of(info):
            facts += f"; in the paper {format_yaml_value(paper[key])}"
        terms.append(Term(key, facts, info.description or ""))
    return term_list(terms)


def default_of(info: FieldInfo) -> Any:
    """Return the default of a setting, `PydanticUndefined` where it has none."""
    return info.get_default(call_default_factory=True)


def facts_of(info: FieldInfo) -> str:
    """Return type, default and range of a setting in one line."""
    default = default_of(info)
    if default is PydanticUndefined:
        facts = [describe_setting_type(info), "required"]
    elif isinstance(default, BaseModel) or default == {}:
        facts = [describe_setting_type(info)]
    else:
        facts = [describe_setting_type(info), f"default {format_yaml_value(default)}"]
    bounds = format_bounds(info)
    if bounds:
        facts.append(bounds)
    return "; ".join(facts)
