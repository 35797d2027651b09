"""Markdown from plain text: escaped words, lists of terms, and the docstrings of the code."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

CODE_SPAN = re.compile(r"(`[^`\n]+`)")
SPECIAL = re.compile(r"([\\*_<>\[\]$|~^&#{}])")
CODE_INDENT = 4  # columns by which a docstring sets its examples and equations apart
BULLET = "- "
# A term of a docstring's list, such as `trains: ...` with its other lines indented.
ENTRY = re.compile(r"^[a-z_][\w, ]*: ")
# A section of a Google-style docstring, and an entry in it.
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):")
SECTION_ENTRY = re.compile(r"^\*{0,2}[A-Za-z_][\w., ]*: ")


class Term(NamedTuple):
    """An entry of a list of terms. text: what it means; facts: its type, default and range."""

    name: str
    facts: str
    text: str


def escape(text: str) -> str:
    """Return a text that Markdown shows as it stands; parts in backticks are left alone."""
    parts = CODE_SPAN.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = SPECIAL.sub(r"\\\1", parts[index])
    return "".join(parts)


def code(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; cells are Markdown."""
    cells = list(headings)
    lines = [f"| {' | '.join(cells)} |", f"|{'---|' * len(cells)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def term_list(terms: Iterable[Term]) -> str:
    """Return a list of terms, each with its facts and its text below it."""
    blocks = []
    for term in terms:
        facts = f"*{escape(term.facts)}*" if term.facts else ""
        paragraphs = [text for text in (facts, escape(term.text)) if text]
        body = "\n\n  ".join(paragraphs)
        blocks.append(f"`{term.name}`\n: {body}")
    return "\n\n".join(blocks)


def from_docstring(docstring: str) -> str:
    """Return a docstring as Markdown: its paragraphs, bullets, terms, and indented blocks."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        blocks += _blocks_of(paragraph.split("\n"))
    return "\n\n".join(_joined_code(blocks))


def _entries_of(lines: list[str]) -> list[str]:
    """Return the entries of a section, for example `Args`, as a list."""
    items: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1].append(line.strip())
        else:
            items.append([line.strip()])
    texts = [" ".join(item) for item in items]
    if not all(SECTION_ENTRY.match(text) for text in texts):
        return [escape(" ".join(texts))]
    bullets = []
    for text in texts:
        name, _, meaning = text.partition(": ")
        bullets.append(f"{BULLET}`{name}`: {escape(meaning)}")
    return ["\n".join(bullets)]


def _blocks_of(lines: list[str]) -> list[str]:
    """Return the blocks of one paragraph of a docstring."""
    if SECTION.fullmatch(lines[0]) and len(lines) > 1:
        body = textwrap.dedent("\n".join(lines[1:]))
        if lines[0] == "Example:":
            return [f"**{lines[0]}**", code(body)]
        return [f"**{lines[0]}**", *_entries_of(body.split("\n"))]
    if all(line.startswith(" " * CODE_INDENT) for line in lines):
        return [code("\n".join(line[CODE_INDENT:] for line in lines))]
    items: list[list[str]] = [[]]
    for line in lines:
        is_term = ENTRY.match(line) and _is_list_of_terms(lines)
        if line.startswith(BULLET) or is_term:
            items.append([])
        items[-1].append(line.strip())
    texts = [" ".join(item) for item in items if item]
    blocks = []
    bullets = []
    for text in texts:
        if text.startswith(BULLET):
            bullets.append(BULLET + escape(text.removeprefix(BULLET)))
        elif ENTRY.match(text) and _is_list_of_terms(lines):
            name, _, meaning = text.partition(": ")
            bullets.append(f"{BULLET}`{name}`: {escape(meaning)}")
        else:
            blocks.append(escape(text))
    if bullets:
        blocks.append("\n".join(bullets))
    return blocks


def _is_list_of_terms(lines: list[str]) -> bool:
    """Whether a paragraph lists arguments or fields: all lines are terms, or go on with one."""
    return all(ENTRY.match(line) or line.startswith("  ") for line in lines)


def _joined_code(blocks: list[str]) -> list[str]:
    """Return the blocks with neighbouring blocks of code as one."""
    joined: list[str] = []
    for block in blocks:
        is_code = block.startswith("```")
        if is_code and joined and joined[-1].startswith("```"):
            joined[-1] = joined[-1].removesuffix("```") + "\n" + block.split("\n", 1)[1]
        else:
            joined.append(block)
    return joined
