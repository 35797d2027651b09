"""Tests of the JSON schemas for editors: shipped files are valid, and mistakes are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.app.schema import build_card_schema, build_config_schema
from pipeline.cli import main
from pipeline.config.settings import load
from pipeline.config.yaml_files import read_yaml
from pipeline.search.schema import search_schema

REPOSITORY = Path(__file__).parents[2]
CONFIGS = [
    *sorted((REPOSITORY / "configs").glob("*.yaml")),
    *sorted((REPOSITORY / "configs" / "methods").glob("*.yaml")),
    *sorted((REPOSITORY / "configs" / "streams").glob("*.yaml")),
]
SEARCHES = sorted((REPOSITORY / "configs" / "search").glob("*.yaml"))
CARDS = sorted((REPOSITORY / "datasets").glob("*/card.yaml"))
SCHEMAS = {"config": build_config_schema, "card": build_card_schema, "search": search_schema}


@pytest.fixture(scope="module")
def validators() -> dict[str, jsonschema.Draft7Validator]:
    made = {}
    for kind, make_schema in SCHEMAS.items():
        schema = make_schema()
        jsonschema.Draft7Validator.check_schema(schema)
        made[kind] = jsonschema.Draft7Validator(schema)
    return made


def first_error(validator: jsonschema.Draft7Validator, body: Any) -> str:
    error = jsonschema.exceptions.best_match(validator.iter_errors(body))
    return error.message if error else ""


def body_of(path: Path) -> Any:
    return json.loads(json.dumps(read_yaml(path, "a file")))


@pytest.mark.parametrize(("kind", "title"), [("card", "card"), ("config", "config")])
def test_schemas_have_titles(kind: str, title: str) -> None:
    assert SCHEMAS[kind]()["title"] == f"Accrete {title}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path: Path, validators: Any) -> None:
    assert first_error(validators["config"], body_of(path)) == ""


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.parent.name)
def test_every_shipped_card_is_valid(path: Path, validators: Any) -> None:
    assert first_error(validators["card"], body_of(path)) == ""


@pytest.mark.parametrize("path", SEARCHES, ids=lambda p: p.stem)
def test_every_shipped_search_is_valid(path: Path, validators: Any) -> None:
    assert first_error(validators["search"], body_of(path)) == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"algoritm": "tpe"}, "algoritm"),
        ({"algorithm": "grid search"}, "grid search"),
        ({"space": {"train.lr": {"dist": "normal"}}}, "normal"),
        ({"space": {"train.lr": {"dist": "uniform", "low": 0}}}, "high"),
        ({"space": {"train.lr": {"dist": "loguniform", "low": 0, "high": 1}}}, "0"),
        ({"budget": {"trails": 3}}, "trails"),
        ({"stream": {"taks": []}}, "taks"),
    ],
)
def test_schema_rejects_mistake_in_search(body: Any, words: str, validators: Any) -> None:
    errors = list(validators["search"].iter_errors(body))
    assert errors, "the schema accepts the mistake"
    assert any(words in str(error) for error in errors)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"trian": {}}, "trian"),
        ({"train": {"lr": -1}}, "-1"),
        ({"train": {"optimizer": "adam"}}, "adam"),
        ({"backbone": {"img_size": "big"}}, "big"),
        ({"stream": {"tasks": [{"card": "digits", "rolle": "base"}]}}, "rolle"),
        ({"methods": {"meat": {"lamda": 0.5}}}, "lamda"),
        ({"methods": {"meat": {"lambda": 2}}}, "2"),
        ({"methods": {"soft": {"method": "meat", "lambda": 2}}}, "2"),
        ({"methods": {"soft": {"lambda": 0.5}}}, "method"),
        ({"methods": {"meat": {"method": "linear", "lambda": 0.5}}}, "lambda"),
        ({"methods": {"meat": {"steps": {"prune": {}}}}}, "prune"),
        ({"methods": {"meat": {"tasks": {"a": {"ffn_masks": "off"}}}}}, "ffn_masks"),
        ({"extends": 3}, "3"),
    ],
)
def test_schema_rejects_mistake_in_config(body: Any, words: str, validators: Any) -> None:
    errors = list(validators["config"].iter_errors(body))
    assert errors, "the schema accepts the mistake"
    assert any(words in str(error) for error in errors)


@pytest.mark.parametrize(
    "body",
    [
        {"methods": {"meat": None, "soft": {"method": "meat", "lambda": 0.5, "mask_lr": "auto"}}},
        {"methods": {"meat": {"tasks": {"a": {"lambda": 0.5, "train": {"lr": 1e-3}}}}}},
        {"tracking": "off"},
        {"tracking": {"uri": "x"}},
        {"extends": ["a.yaml", "b.yaml"]},
    ],
)
def test_schema_accepts_valid_config_forms(body: Any, validators: Any) -> None:
    assert first_error(validators["config"], body) == ""


def test_schema_rejects_mistake_in_card(validators: Any) -> None:
    body = body_of(REPOSITORY / "datasets" / "digits" / "card.yaml")
    mistakes: list[dict[str, Any]] = [
        {"clases": []},
        {"source": {"format": "zip"}},
        {"classes": "from_folder"},
    ]
    for changes in mistakes:
        assert first_error(validators["card"], body | changes)


def test_schema_describes_keys_and_methods_for_editors() -> None:
    schema = build_config_schema()
    lambda_schema = schema["definitions"]["meat"]["properties"]["lambda"]
    assert "KEPT" in lambda_schema["description"]
    methods = schema["properties"]["methods"]["anyOf"][0]
    assert "PNAS" in methods["properties"]["ewc"]["description"]


def test_schema_command_prints_schemas_and_config_comment_may_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema"]) == 0
    (tmp_path / "config.schema.json").write_text(capsys.readouterr().out)
    assert json.loads((tmp_path / "config.schema.json").read_text()) == build_config_schema()
    assert main(["schema", "card"]) == 0
    assert json.loads(capsys.readouterr().out) == build_card_schema()
    assert main(["schema", "search"]) == 0
    assert json.loads(capsys.readouterr().out) == search_schema()
    config = tmp_path / "mine.yaml"
    config.write_text(
        "# yaml-language-server: $schema=config.schema.json\n"
        "name: mine\nstream: {tasks: [{card: digits}]}\nmethods: {linear: }\n"
    )
    assert load(str(config)).name == "mine"
