"""Builds the site: `python -m docs.site.build [FOLDER]`, by default into `build/docs`.

It opens no connection. A warning of Sphinx, such as a link that leads nowhere, is an error.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from docs.site.pages import REPOSITORY
from docs.site.stage import stage
from workers.errors import UserError

CONFIGURATION = Path(__file__).resolve().parent
DEFAULT = REPOSITORY / "build" / "docs"


def build(folder: Path) -> Path:
    """Build the site below a folder, and return its first page.

    Raise UserError where Sphinx is not installed, or where it warned of something.
    """
    if importlib.util.find_spec("sphinx") is None:
        raise UserError("Sphinx is not installed in this environment; run `make docs`")
    from sphinx.cmd.build import main as sphinx_build  # not installed by `make setup`

    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    stage(source)
    html = folder / "html"
    options = ["-q", "-W", "--keep-going", "-n", "-E", "-b", "html", "-c", str(CONFIGURATION)]
    doctrees = folder / "doctrees"
    if sphinx_build([*options, "-d", str(doctrees), str(source), str(html)]):
        raise UserError(
            f"Sphinx warned of the pages in {source} (above); fix their sources in docs/"
        )
    return html / "index.html"


def main(arguments: list[str]) -> int:
    """Build the site, and print where its first page is. Return the exit code."""
    folder = Path(arguments[0]).resolve() if arguments else DEFAULT
    try:
        print(f"Documentation: {build(folder)}")
    except UserError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
