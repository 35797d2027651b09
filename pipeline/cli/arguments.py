"""Types of arguments of the command line."""

from __future__ import annotations

import argparse
import math


def parse_amount(text: str, noun: str) -> float:
    """Parse a finite number of at least 0.

    Args:
        text: The argument.
        noun: Meaning of the number in the error, for example `number of gigabytes`.

    Raises:
        argparse.ArgumentTypeError: If the text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a {noun}; give a finite number of at least 0, as in 20"
        )
    return number
