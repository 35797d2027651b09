"""Render the Jinja2 templates of the files that `accrete launch` writes.

All variables of a template must be given. The templates pass each value of the user through the
filter `yaml`, which quotes the value if YAML requires quotes.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.config.yaml_files import dump_yaml
from workers.errors import UserError

FOLDER = Path(__file__).with_name("templates")


def render_file(file: str, /, **values: Any) -> str:
    """Render the template of a file.

    Args:
        file: Name of the file. Its template is `templates/FILE.j2`.
        values: Variables of the template.

    Returns:
        The text of the file, with a line break at its end.

    Raises:
        jinja2.UndefinedError: If the template uses a variable that `values` lacks.
    """
    return _ENVIRONMENT.get_template(f"{file}.j2").render(values)


def format_inline_yaml(value: Any) -> str:
    """Format plain values as YAML on one line, for use after `key: ` or `- `.

    Do not use the result inside a flow collection (`{...}`, `[...]`): YAML would misread a comma or
    a bracket in a string. Pass the whole collection instead.

    Raises:
        UserError: If a string contains a line break.

    Example:
        >>> format_inline_yaml({"cpu": "2", "memory": "8Gi"})
        "{cpu: '2', memory: 8Gi}"
    """
    text = dump_yaml(value, default_flow_style=True, width=1 << 20)
    text = text.removesuffix("...\n").removesuffix("\n")
    if len(text.splitlines()) > 1:
        raise UserError(f"{value!r} contains a line break; write it on one line")
    return text


def indent_lines(text: str, columns: int) -> str:
    """Indent all non-blank lines of a text."""
    return indent(text, " " * columns)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"yaml": format_inline_yaml, "indent": indent_lines}
