"""Write consecutive shards as one pattern in WebDataset's brace notation."""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"(\d+)(?=\D*$)")  # the last number in a path


def format_braces(urls: Iterable[str]) -> list[str]:
    """Merge consecutive URLs into brace patterns, for example `train-{000000..000007}.tar`.

    URLs are consecutive if they differ only in their last number, which increases by 1 and keeps
    its number of digits.
    Braces and backslashes in a URL are escaped as in bash and WebDataset.
    """
    # a run of URLs: text before the number, text after the number, numbers
    runs: list[tuple[str, str, list[str]]] = []
    for url in urls:
        escaped = re.sub(r"([{}\\])", r"\\\1", url)
        match = NUMBER.search(escaped)
        if match is None:
            runs.append((escaped, "", []))
            continue
        before, number, after = escaped[: match.start()], match[1], escaped[match.end() :]
        if runs and _continues_numbers(runs[-1], before, number, after):
            runs[-1][2].append(number)
        else:
            runs.append((before, after, [number]))
    return [_braced(before, after, numbers) for before, after, numbers in runs]


def _continues_numbers(
    run: tuple[str, str, list[str]], before: str, number: str, after: str
) -> bool:
    if run[:2] != (before, after) or not run[2]:
        return False
    expected = str(int(run[2][-1]) + 1).zfill(len(run[2][-1]))
    return number == expected and len(number) == len(run[2][0])


def _braced(before: str, after: str, numbers: list[str]) -> str:
    if len(numbers) < 2:
        return f"{before}{''.join(numbers)}{after}"
    return f"{before}{{{numbers[0]}..{numbers[-1]}}}{after}"
