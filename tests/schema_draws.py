"""Random values from a JSON schema (draft 7)."""

from __future__ import annotations

import math
from random import Random
from typing import Any

Schema = dict[str, Any]


def draw(schema: Schema, definitions: Schema, rng: Random, extreme: bool = False) -> Any:
    """Return a random value that is valid under a schema.

    Args:
        schema: Schema of the value; `$ref` refers to `definitions`.
        definitions: Name -> schema.
        rng: Random number generator.
        extreme: Draw only the smallest and largest numbers, instead of numbers for a small run.
    """
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        usual = schema.get("default")
        return draw({"default": usual, **rng.choice(schema["anyOf"])}, definitions, rng, extreme)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = rng.choice(kinds)
    if kind == "null":
        return None
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        parts = schema["items"]
        if isinstance(parts, dict):
            parts = [parts] * rng.randint(schema.get("minItems", 0), schema.get("maxItems", 3))
        return [draw(part, definitions, rng, extreme) for part in parts]
    if kind in ("integer", "number"):
        return rng.choice(_numbers(schema, kind == "integer", rng, extreme))
    assert kind == "object", schema
    return {
        name: draw(part, definitions, rng, extreme)
        for name, part in schema.get("properties", {}).items()
        if rng.random() < 0.3
    }


def _numbers(schema: Schema, whole: bool, rng: Random, extreme: bool) -> list[float]:
    """Return numbers within the limits of a schema."""
    low: float = schema["minimum" if "minimum" in schema else "exclusiveMinimum"]
    high: float = schema["maximum" if "maximum" in schema else "exclusiveMaximum"]
    if whole:
        low += "exclusiveMinimum" in schema and "minimum" not in schema
        high -= "exclusiveMaximum" in schema and "maximum" not in schema
    else:
        low = low if "minimum" in schema else math.nextafter(low, math.inf)
        high = high if "maximum" in schema else math.nextafter(high, -math.inf)
    if extreme:
        return [low, high]
    default = schema.get("default")
    usual: float = default if isinstance(default, (int, float)) else 1
    numbers = [usual, 2 * usual, usual / 2, usual * (0.5 + rng.random())]
    numbers += [max(low, 0), max(low, 0) + 1]
    if not whole and high <= 1:
        numbers += [high, rng.uniform(low, high)]
    numbers = [int(number) if whole else float(number) for number in numbers]
    return [number for number in numbers if low <= number <= high]
