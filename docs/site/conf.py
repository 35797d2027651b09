"""The configuration of Sphinx for the documentation site; `docs/site/build.py` runs it."""

from __future__ import annotations

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads(
    (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]

project = "Accrete"
author = "The Accrete authors"
release = _PROJECT["version"]
html_title = f"Accrete {release}"

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 6
exclude_patterns = ["files"]

html_theme = "furo"
html_copy_source = False
html_static_path: list[str] = ["static"]
html_css_files = ["accrete.css"]
html_use_index = False
pygments_style = "tango"
highlight_language = "none"  # blocks without a language are output and commands
smartquotes = False  # `--set` stays what can be typed
