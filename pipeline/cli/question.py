"""Questions to a person at a terminal."""

from __future__ import annotations


def ask(question: str) -> str:
    """Return a person's answer in lower case; empty when the input is at its end."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""


def is_confirmed(question: str) -> bool:
    """Ask a question, and return whether the answer is yes."""
    return ask(f"{question} [y/N] ") in ("y", "yes")
