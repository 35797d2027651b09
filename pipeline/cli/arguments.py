"""Arguments that several commands share, and functions that parse argument values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

DATA_HELP = (
    "a folder of class folders, with or without train and test, of Parquet files or WebDataset "
    "tars, a CSV file, hf://datasets/NAME, torchvision:NAME; several are a task each"
)
CONFIG_OR_DATA = {
    "nargs": "+",
    "metavar": "config|PATH",
    "help": "a config, e.g. configs/demo.yaml, or images, for which one is written: " + DATA_HELP,
}  # options of `add_argument` for a command that takes a config or data
AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[dhm])")
AGE_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0}  # seconds per unit

# Function that adds one command: (name, function, help text, config=True, ...) -> its parser. It is
# `add_command` in `main.parser`; the further keywords are options of the argument `config`.
AddCommand = Callable[..., argparse.ArgumentParser]


def parse_amount(text: str, noun: str) -> float:
    """Parse a finite number of at least 0.

    Args:
        text: The argument.
        noun: Meaning of the number in the error, for example `number of gigabytes`.

    Raises:
        argparse.ArgumentTypeError: If the text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a {noun}; give a finite number of at least 0, as in 20"
        )
    return number


def parse_age(text: str) -> float:
    """Parse an age in days, hours or minutes (`30d`, `12h`, `90m`) into seconds.

    Raises:
        argparse.ArgumentTypeError: If the text is not an age.
    """
    match = AGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not an age; give a number with d, h or m behind it, as in 30d"
        )
    return float(match["number"]) * AGE_UNITS[match["unit"]]


def parse_gigabytes(text: str) -> float:
    """Parse a finite number of gigabytes of at least 0."""
    return parse_amount(text, "number of gigabytes")


def parse_storage(text: str) -> str:
    """Return the path or URI of a storage unchanged; an empty text is an error."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "an empty text names no storage; give the folder that holds the runs"
        )
    return text


def add_storage_option(sub: argparse.ArgumentParser, text: str) -> None:
    """Add `--storage`, the storage of runs, with `text` as its help."""
    sub.add_argument(
        "--storage",
        type=parse_storage,
        default="storage",
        help=f"{text} (default: storage)",
    )


def add_config_arguments(sub: argparse.ArgumentParser, **config_options: Any) -> None:
    """Add the argument `config` and the option `--set`.

    Args:
        sub: Parser of the command.
        **config_options: Options of `add_argument` for `config`.
    """
    options = {"help": "path of a config, e.g. configs/demo.yaml", **config_options}
    sub.add_argument("config", **options)
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a setting, e.g. --set train.epochs=3; a run that computes something else "
        "than its file says is a run of its own, NAME-train.epochs-3, unless --set name=NAME "
        "says otherwise",
    )


def add_method_option(sub: argparse.ArgumentParser) -> None:
    """Add `--method`, which names the methods of a run."""
    sub.add_argument(
        "--method",
        action=AddMethod,
        metavar="NAME",
        help="a method that learns the stream of the config, with the settings that "
        "configs/methods/NAME.yaml recommends for it (search: with the ranges there); may be "
        "repeated. It replaces the methods of the config; a stream without methods becomes the run "
        "STREAM-NAME",
    )


class AddMethod(argparse.Action):
    """Action of `--method NAME`: puts the method into the first override, `methods=[...]`.

    The override comes before those of `--set`, so that `--set` can change settings of the method.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names = [*getattr(namespace, "method_names", []), values]
        # from the second method on, the first override is the one of the earlier methods
        rest = [*namespace.overrides][bool(len(names) > 1) :]
        namespace.method_names = names
        namespace.overrides = [f"methods=[{', '.join(names)}]", *rest]
