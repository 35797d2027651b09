"""Jinja2 templates of the HTML pages. A page extends `base.html` and is a self-contained file.

All values are escaped, except those of type `markupsafe.Markup`. This package imports no other
package of the pipeline.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def make_environment() -> Environment:
    """Return the one environment of all templates. Other packages add their filters to it."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def render(template: str, **values: Any) -> str:
    """Render a template of this folder with the variables `values`."""
    return make_environment().get_template(template).render(values)
