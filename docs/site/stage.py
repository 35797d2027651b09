"""Writes the source of the site into a folder: committed pages, and those made from the code."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Iterable
from pathlib import Path

from docs.site.commands_page import commands_page
from docs.site.method_page import method_page, methods_by_source
from docs.site.pages import (
    CONTENTS,
    GENERATED,
    METHOD_INDEX,
    REPOSITORY,
    Link,
    committed_pages,
    page_of,
    read_contents,
    replace_links,
    text_of,
)
from docs.site.python_page import python_page
from docs.site.settings_page import settings_page
from workers.errors import UserError
from workers.methods import METHODS

FILES = "files"  # folder of the files that pages link to and that are not pages


def stage(folder: Path) -> list[str]:
    """Write every page below a folder, and the files that they link to; return the pages' paths.

    Raise UserError where a page links to a file that does not exist.
    """
    pages = {page_of(source): _committed_page(source, folder) for source in committed_pages()}
    writers = {"settings.md": settings_page, "commands.md": commands_page, "python.md": python_page}
    for page in GENERATED.values():
        pages[page] = _with_links(writers[page](), "top.md", page, folder)
    for name in METHODS:
        page = _method_page(name)
        pages[page] = _with_links(method_page(name), "top.md", page, folder)
    for page, text in pages.items():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return list(pages)


def _method_page(name: str) -> str:
    return f"methods/{name}.md"


def _committed_page(source: str, folder: Path) -> str:
    """Return a committed page as the site has it, with the pages below it in the navigation."""
    text = _with_links(text_of(source), source, page_of(source), folder)
    if source == CONTENTS:
        for section in read_contents():
            text += _toctree(section.caption, map(page_of, section.sources))
    if source == METHOD_INDEX:
        text += _toctree("", [_method_page(name) for name in sorted(METHODS)])
    return text


def _toctree(caption: str, pages: Iterable[str]) -> str:
    options = [":hidden:"]
    if caption:
        options.append(f":caption: {caption}")
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def _with_links(text: str, source: str, page: str, folder: Path) -> str:
    """Return a page whose links lead to pages of the site, or to files copied beside them."""
    committed = set(committed_pages())
    by_source = methods_by_source()

    def replace(link: Link) -> str:
        target = _target_of(link, source, committed, by_source)
        if not target:
            target = posixpath.join(FILES, link.target)
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / link.target, folder / target)
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + link.fragment

    return replace_links(text, source, replace)


def _target_of(
    link: Link, source: str, committed: set[str], by_source: dict[str, list[str]]
) -> str:
    """Return the page of the site that a link leads to; empty for a file that is not a page."""
    if link.target in by_source:
        names = by_source[link.target]
        label = link.label.strip("`")
        return _method_page(label if label in names else names[0])
    if link.target in GENERATED or link.target in committed or link.target == "README.md":
        return page_of(link.target)
    if not (REPOSITORY / link.target).is_file():
        raise UserError(
            f"{source} links to {link.target}, which is not a file of this repository; "
            "name a file, or drop the link"
        )
    return ""
