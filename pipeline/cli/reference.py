"""The commands that document methods and file formats: methods, schema."""

from __future__ import annotations

import argparse
import json

from pipeline.app.method_package import write_method_package
from pipeline.cli.arguments import AddCommand
from workers.errors import UserError


def add_commands(add_command: AddCommand) -> None:
    """Add the commands of this module to the command line."""
    methods_parser = add_command(
        "methods",
        methods,
        "list the methods, or the settings of one, or write a package with a new one",
        config=False,
    )
    methods_parser.add_argument(
        "method",
        nargs="?",
        default="",
        help="name of a method, to see its settings; `new` writes a package",
    )
    methods_parser.add_argument("name", nargs="?", default="", help="name of the new method")
    methods_parser.add_argument(
        "--out", default="", metavar="FOLDER", help="folder of the package (default: NAME)"
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
    """Print a line for each method, or the settings of one, or write a package with a new one."""
    from pipeline.app import method_list  # imports pydantic; its functions import torch

    if args.method == "new":
        if not args.name:
            raise UserError("`methods new` writes a method; give its name: `methods new NAME`")
        for path in write_method_package(args.name, args.out):
            print(path)
    elif args.name or args.out:
        raise UserError("only `methods new NAME` takes a second name, or --out; leave it out")
    elif args.method:
        print(method_list.describe_method(args.method))
    else:
        print(method_list.list_methods())
    return 0


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of configs, cards or searches."""
    from pipeline.app.schema import build_card_schema, build_config_schema
    from pipeline.search.schema import search_schema  # imports pydantic and torch

    schemas = {"config": build_config_schema, "card": build_card_schema, "search": search_schema}
    print(json.dumps(schemas[args.kind](), indent=2))
    return 0
