"""Questions to the user at a terminal."""

from __future__ import annotations


def ask(question: str) -> str:
    """Ask a question, and return the answer in lower case, or "" at the end of the input."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""


def is_confirmed(question: str) -> bool:
    """Ask a question, and return whether the answer is yes."""
    return ask(f"{question} [y/N] ") in ("y", "yes")
