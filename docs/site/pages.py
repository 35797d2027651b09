"""Which pages the site has, in which order, and where links between them lead on it.

`docs/README.md` is the table of contents, for readers of the repository and for the site alike: a
section with a table of links for each part. A link to a source file from which a page is generated
leads to that page on the site, and to the source file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
CONTENTS = "docs/README.md"
METHOD_INDEX = "docs/methods.md"
# source file -> the page that is generated from it
GENERATED = {
    "pipeline/config/settings.py": "settings.md",
    "pipeline/cli/main.py": "commands.md",
    "pipeline/app/runs.py": "python.md",
}
# A page that Sphinx itself writes -> what ours of that name is called on the site.
RESERVED = {"search.md": "searching.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*(```|~~~)")


class Section(NamedTuple):
    """A part of the table of contents. sources: paths from the top of the repository, in order."""

    caption: str
    sources: tuple[str, ...]


class Link(NamedTuple):
    """A relative link. target: path from the top of the repository. fragment: with its `#`."""

    label: str
    target: str
    fragment: str


def text_of(source: str) -> str:
    """Return the text of a file of the repository."""
    return (REPOSITORY / source).read_text(encoding="utf-8")


def read_contents() -> list[Section]:
    """Return the parts of the table of contents, as `docs/README.md` lists them."""
    sections = []
    for part in text_of(CONTENTS).split("\n## ")[1:]:
        caption, _, body = part.partition("\n")
        sources = []
        for row in re.findall(r"^\| (.*?) \|", body, re.MULTILINE):
            sources += [link.target for link in links_of(row, CONTENTS)]
        sections.append(Section(caption, tuple(sources)))
    return sections


def page_of(source: str) -> str:
    """Return the path on the site of a committed page, or of the one generated from a source."""
    if source in GENERATED:
        return GENERATED[source]
    if source in (CONTENTS, "README.md"):
        return "index.md"
    path = source.removeprefix("docs/")
    folder, name = posixpath.split(path)
    if name == "README.md":
        return f"{folder}.md"
    return RESERVED.get(path, path)


def committed_pages() -> list[str]:
    """Return the committed pages that the site shows, the table of contents first."""
    sources = [CONTENTS]
    for section in read_contents():
        sources += [source for source in section.sources if source.endswith(".md")]
    return sources


def links_of(text: str, source: str) -> list[Link]:
    """Return the relative links of a page outside of blocks of code."""
    links: list[Link] = []

    def add(link: Link) -> None:
        links.append(link)

    replace_links(text, source, add)
    return links


def replace_links(text: str, source: str, replace: Callable[[Link], str | None]) -> str:
    """Return a page with every relative link outside of blocks of code replaced.

    source: where the page lies, which its links start from. replace: what is written in place of
    the target; None leaves the link as it is.
    """

    def replaced(match: re.Match[str]) -> str:
        label, address = match.groups()
        if "://" in address or address.startswith("#"):
            return match.group()
        path, mark, fragment = address.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        new = replace(Link(label, target, mark + fragment))
        return match.group() if new is None else f"[{label}]({new})"

    lines = []
    is_code = False
    for line in text.split("\n"):
        if FENCE.match(line):
            is_code = not is_code
        lines.append(line if is_code else LINK.sub(replaced, line))
    return "\n".join(lines)
