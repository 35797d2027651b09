"""Puts the script `accrete` and a path file into an environment: `make setup` runs this.

The checkout is not added to the module search path: its folder `datasets/` would then answer to
`import datasets`, the name of a package of Hugging Face's. A path file imports a finder instead,
which knows `pipeline` and `workers` alone. Whatever lies on the search path is found before, such
as another checkout that is the current folder; for the script `accrete` this checkout comes first.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from workers.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = "accrete"
FINDER = "accrete_checkout"  # module in site-packages
LONGEST_SHEBANG = 127  # bytes that every kernel reads of a script's first line
FINDER_TEXT = '''"""Finds `pipeline` and `workers` of a checkout; written by `make setup`."""

import os
import sys

CHECKOUT = {checkout!r}
PACKAGES = ("pipeline", "workers")


class CheckoutFinder:
    """Knows the two packages of the checkout, and nothing else that lies there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is not None or name not in PACKAGES:
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [CHECKOUT])


def take_precedence():
    """Find the packages here first, in this process and in those that it starts."""
    os.environ["ACCRETE_CHECKOUT"] = CHECKOUT
    sys.meta_path.insert(0, CheckoutFinder)


if os.environ.get("ACCRETE_CHECKOUT") == CHECKOUT:
    sys.meta_path.insert(0, CheckoutFinder)
else:
    sys.meta_path.append(CheckoutFinder)
'''
SCRIPT_TEXT = '''{first_line}
"""The command line of Accrete; written by `make setup`."""

import sys

import accrete_checkout

accrete_checkout.take_precedence()

from pipeline.cli import main  # noqa: E402

sys.exit(main())
'''


class Installed(NamedTuple):
    """The files that were written into an environment."""

    script: Path
    finder: Path
    path_file: Path


def install(prefix: str | os.PathLike[str], checkout: Path = CHECKOUT) -> Installed:
    """Write the script and the path file of a checkout into a virtual environment.

    prefix: the folder of the environment, made with this version of Python. Raise `UserError` when
    there is none, or when it holds the script of another checkout.
    """
    prefix = Path(os.path.abspath(prefix))
    python = prefix / "bin" / "python"
    paths = {"base": str(prefix), "platbase": str(prefix)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    if not python.exists() or not site_packages.is_dir():
        raise UserError(
            f"{prefix} is no virtual environment of Python {sysconfig.get_python_version()}; "
            "make one with `make setup`"
        )
    files = Installed(
        prefix / "bin" / SCRIPT, site_packages / f"{FINDER}.py", site_packages / f"{FINDER}.pth"
    )
    other = _checkout_of(files.finder)
    if other is not None and other != checkout and (other / "pipeline").is_dir():
        raise UserError(
            f"{files.script} runs the checkout {other}; give this one an environment of its own, "
            f"or remove {files.finder} first"
        )
    _write(files.finder, FINDER_TEXT.format(checkout=str(checkout)))
    _write(files.path_file, f"import {FINDER}\n")
    script = SCRIPT_TEXT.format(first_line=first_line(str(python)))
    _write(files.script, script, executable=True)
    return files


def first_line(python: str) -> str:
    """Return the line by which a script is run by an interpreter.

    The kernel takes neither a long path nor one with a space; then a shell starts the interpreter,
    and Python reads the same lines as a text.
    """
    shebang = f"#!{python}"
    if " " not in python and len(os.fsencode(shebang)) <= LONGEST_SHEBANG:
        return shebang
    return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''"


def _checkout_of(finder: Path) -> Path | None:
    """Return the checkout that an installed finder knows; None where there is no finder."""
    try:
        lines = finder.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        if line.startswith("CHECKOUT = "):
            return Path(line.partition(" = ")[2].strip("'\""))
    return None


def _write(path: Path, text: str, executable: bool = False) -> None:
    """Replace a file as a whole: processes that start meanwhile read it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(temporary, 0o755 if executable else 0o644)
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
    """Install into an environment, by default the one of this interpreter."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.shell.installation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "prefix", nargs="?", default=sys.prefix, help="folder of the environment (default: its own)"
    )
    args = parser.parse_args(argv)
    try:
        files = install(args.prefix)
    except UserError as error:
        print(f"accrete: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"accrete: {error.filename} cannot be written ({error.strerror}); "
            "mend its permissions and run the same command again",
            file=sys.stderr,
        )
        return 2
    print(f"{files.script} runs {CHECKOUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
