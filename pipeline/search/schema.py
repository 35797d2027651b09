"""Build the JSON schema of search files, for completion and validation in editors."""

from __future__ import annotations

from typing import Any

from pipeline.app.schema import DEFINITIONS, Schema, define, finished, model_schema
from pipeline.config.settings import StreamSettings
from pipeline.search.spec import SearchSettings


def search_schema() -> Schema:
    """Return the schema of `configs/search/NAME.yaml`."""
    schema = model_schema(SearchSettings)
    schema["title"] = "Accrete search"
    definitions: dict[str, Any] = schema[DEFINITIONS]
    define(definitions, StreamSettings)
    # `stream` of a search only changes the stream of the base config, so no key is required
    del definitions[StreamSettings.__name__]["required"]
    stream = schema["properties"]["stream"]
    stream["anyOf"] = [{"$ref": f"#/{DEFINITIONS}/{StreamSettings.__name__}"}, {"type": "null"}]
    return finished(schema)
