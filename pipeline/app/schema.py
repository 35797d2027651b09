"""JSON schemas of configs and cards, for completion and checks in editors.

They follow draft 7 of JSON Schema, which editors support. No top-level key is required, and in
configs no key of `stream`, because a file can extend other files. Rules beyond the type of a value
are checked when the file is read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pipeline.config.settings import ClusterSettings, Config, MethodEntry, StreamSettings
from pipeline.data.cards import Card
from workers.job import DataSettings, TrainSettings

DRAFT = "http://json-schema.org/draft-07/schema#"
DEFINITIONS = "definitions"
Schema = dict[str, Any]


def build_card_schema() -> Schema:
    """Return the schema of `datasets/NAME/card.yaml`."""
    schema = model_schema(Card)
    listed = schema["properties"]["classes"]
    words = {"const": "from_source", "description": "the classes found in the source, sorted"}
    schema["properties"]["classes"] = {
        "description": listed.pop("description", ""),
        "anyOf": [listed, words],
    }
    return finished(schema) | {"title": "Accrete card"}


def build_config_schema() -> Schema:
    """Return the schema of a config, with the settings of every method."""
    schema = model_schema(Config)
    definitions: dict[str, Any] = schema[DEFINITIONS]
    del definitions[MethodEntry.__name__]  # replaced by a schema for each method
    del definitions[StreamSettings.__name__]["required"]  # an extended file can have these keys
    for model in (TrainSettings, DataSettings, ClusterSettings):
        define(definitions, model)
    properties = schema["properties"]
    properties["extends"] = {
        "description": "one or more files whose settings this file starts from",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    properties["tracking"] = {
        "anyOf": [{"type": ["boolean", "string"]}, properties["tracking"]],
        "description": "how the run is recorded in MLflow; `off`: not at all",
    }
    names = {"type": "string"}
    methods = _methods_schema(definitions)
    properties["methods"] = {
        "description": methods.pop("description"),
        "anyOf": [methods, names, {"type": "array", "items": names, "minItems": 1}],
    }
    properties["recommended"] = {
        "description": "in configs/methods/NAME.yaml: settings of the method for streams, by the "
        "name of a file in configs/streams",
        "type": "object",
        "additionalProperties": {"type": "object"},
    }
    properties["search"] = {
        "description": "in configs/methods/NAME.yaml: a search of the method's settings, as in a "
        "search file; keys of `space` are relative to `methods.NAME`, for example `train.lr`",
        "type": "object",
    }
    return finished(schema) | {"title": "Accrete config"}


def _methods_schema(definitions: Schema) -> Schema:
    """Return the schema of `methods`, a mapping from labels to settings of methods.

    The label of an entry is the name of the method, unless the entry names the method in `method`.
    The schemas of the methods are added to `definitions`.
    """
    from workers.methods import METHODS  # imports torch

    properties: Schema = {}
    references = {name: f"#/{DEFINITIONS}/{name}" for name in METHODS}
    for name, method in METHODS.items():
        definitions[name] = _method_schema(definitions, name)
        summary = f"{method.family}. {method.paper}".strip()
        reference = {"$ref": references[name]}
        properties[name] = {"description": summary, "anyOf": [reference, _other_method(name)]}
    definitions["labelled method"] = _select_schema_by_key("method", references)
    return {
        "description": "label -> a method and its settings; or names of methods, which take the "
        "settings that are recommended for the stream",
        "type": "object",
        "minProperties": 1,
        "properties": properties,
        "additionalProperties": {"$ref": f"#/{DEFINITIONS}/labelled method"},
    }


def _other_method(name: str) -> Schema:
    """Return the schema of an entry with the name of one method as label, but another `method`."""
    another = {"type": "object", "required": ["method"]}
    same = {"properties": {"method": {"const": name}}}
    return {"allOf": [another, {"not": same}, {"$ref": f"#/{DEFINITIONS}/labelled method"}]}


def _method_schema(definitions: Schema, name: str) -> Schema:
    """Return the schema of an entry of `methods`.

    It has the settings of this method, and the settings that all methods have. The schemas of
    nested settings are added to `definitions`.
    """
    from workers.methods import METHODS  # imports torch

    method = METHODS[name]
    train = {"$ref": f"#/{DEFINITIONS}/{TrainSettings.__name__}"}
    data = {"$ref": f"#/{DEFINITIONS}/{DataSettings.__name__}"}
    own = model_schema(method.Settings)
    for definition, body in own.pop(DEFINITIONS, {}).items():
        definitions[definition] = body
    step_names = [step.name for step in method.steps]
    steps = _object(dict.fromkeys(step_names, train))
    own_of_task = {key: own["properties"][key] for key in sorted(method.per_task)}
    task = _object({"train": train, "steps": steps, **own_of_task})
    shared = {
        "method": {"const": name, "description": "the method, if the label is not its name"},
        "train": train,
        "data": data,
        "steps": {**steps, "description": "training settings of one step; they override `train`"},
        "tasks": {
            "description": "settings of one task, by name of the task",
            "type": "object",
            "additionalProperties": task,
        },
    }
    return _object(own["properties"] | shared)


def _object(properties: Mapping[str, Any]) -> Schema:
    """Return the schema of a mapping that accepts only these keys."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def model_schema(model: type[BaseModel]) -> Schema:
    """Return pydantic's schema of a model. Keys have their names in files (aliases)."""
    template = f"#/{DEFINITIONS}/{{model}}"
    schema = model.model_json_schema(by_alias=True, ref_template=template)
    schema[DEFINITIONS] = schema.pop("$defs", {})
    return schema


def define(definitions: Schema, model: type[BaseModel]) -> None:
    """Add the schemas of a model and its nested models to the definitions."""
    body = model_schema(model)
    definitions.update(body.pop(DEFINITIONS))
    definitions[model.__name__] = body


def finished(schema: Schema) -> Schema:
    """Convert a schema to draft 7, without required top-level keys; any mapping may be null."""
    finished: Schema = {"$schema": DRAFT, **_as_draft_7(copy.deepcopy(schema))}
    del finished["required"]
    return finished


def _as_draft_7(value: Any) -> Any:
    """Convert tuples and unions to the form of draft 7, and remove pydantic's titles.

    A mapping can be null in a file: null removes the value of an extended file.
    """
    if isinstance(value, list):
        return [_as_draft_7(item) for item in value]
    if not isinstance(value, dict):
        return value
    body = {key: _as_draft_7(item) for key, item in value.items()}
    if "discriminator" in body:
        discriminator = body["discriminator"]
        body = _select_schema_by_key(discriminator["propertyName"], discriminator["mapping"])
    if "prefixItems" in body:
        body["items"] = body.pop("prefixItems")
    if isinstance(body.get("title"), str) and "type" in body:
        del body["title"]
    if body.get("type") == "object":
        body["type"] = ["object", "null"]
    return body


def _select_schema_by_key(key: str, references: Mapping[str, str]) -> Schema:
    """Return the schema of a mapping in which the value of a key selects the schema.

    The schema uses conditions, so that an editor shows only the keys of the selected kind.

    Args:
        key: The key.
        references: Location of the schema, by value of the key.
    """
    conditions = []
    for kind, reference in references.items():
        is_named = {"properties": {key: {"const": kind}}, "required": [key]}
        conditions.append({"if": is_named, "then": {"$ref": reference}})
    return {
        "type": "object",
        "required": [key],
        "properties": {key: {"enum": list(references)}},
        "allOf": conditions,
    }
