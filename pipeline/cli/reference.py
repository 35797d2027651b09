"""The commands that document methods and the content of files: methods, schema."""

from __future__ import annotations

import argparse
import json

from pipeline.cli.arguments import AddCommand


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    methods_parser = add_command(
        "methods", methods, "list the methods, or the settings of one", config=False
    )
    methods_parser.add_argument(
        "method", nargs="?", default="", help="name of a method, to see its settings"
    )
    schema_parser = add_command(
        "schema",
        schema,
        "print the JSON schema of configs, cards or searches, by which an editor completes and "
        "checks them",
        config=False,
    )
    schema_parser.add_argument(
        "kind", nargs="?", choices=("config", "card", "search"), default="config"
    )


def methods(args: argparse.Namespace) -> int:
    """Print a line for each method, or the settings of one."""
    from pipeline.app import method_list  # imports pydantic and torch

    if args.method:
        print(method_list.describe_method(args.method))
    else:
        print(method_list.list_methods())
    return 0


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of configs, cards or searches."""
    from pipeline.app.schema import card_schema, config_schema
    from pipeline.search.schema import search_schema  # imports pydantic and torch

    schemas = {"config": config_schema, "card": card_schema, "search": search_schema}
    print(json.dumps(schemas[args.kind](), indent=2))
    return 0
