"""What the comments at the top of a config say: what it is, its command, its expected numbers."""

from __future__ import annotations

from pathlib import Path


def header_of(path: Path) -> dict[str, str]:
    """Return what the keyed comments at the top of a config say, continued lines joined."""
    entries: dict[str, str] = {}
    key = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words = line[1:].split(maxsplit=1)
        if line.startswith("#     ") and key:
            entries[key] += " " + " ".join(words)
        elif len(words) > 1 and line.startswith(f"# {words[0]} "):
            key = words[0]
            entries[key] = words[1]
    return entries
