"""Names of images in shards."""

from __future__ import annotations

import re

from pipeline.data.listing import nfc

MAX_KEY_PART = 255  # characters of a part of a key, as many as a file system gives a name


def key_part(text: str) -> str:
    """Return a name without dots, slashes and blanks, bounded, and of one Unicode form.

    WebDataset ends a key at the first dot.
    """
    return re.sub(r"[^\w\-]+", "_", nfc(text))[:MAX_KEY_PART] or "_"
