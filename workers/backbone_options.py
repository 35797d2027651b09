"""Which options of a backbone a settings file may name: plain values of bounded size, for arguments
of the model itself.

A config, a model folder or a record may come from a stranger. timm's factory takes more than a
model's own arguments: URLs and files to load weights from, folders to write to, classes and
functions to call. None of those may come from a file. This half of the check needs no timm;
`workers/model/signature.py` holds the names and types against the model's signature.
"""

from __future__ import annotations

import re
from typing import Any

MOST_BLOCKS = 200  # of all stages together; the deepest models of timm have some 60
LARGEST_NUMBER = 65_536  # of every other option: widths, heads, sides of patches
LONGEST_LIST = 16
BLOCK_COUNTS = frozenset({"depth", "depths", "layers"})
NAME = re.compile(r"[a-z][A-Za-z0-9_]{0,39}")
WORD = re.compile(r"[A-Za-z0-9_]{0,40}")
LOADING = re.compile(
    r"pretrained.*|checkpoint_path|cache_dir|features_only|feature_.*|out_indices|pruned|model_cfg|model_cls|kwargs_filter|variant|"
    r"scriptable|exportable|no_jit|device|dtype|block|block_args|.*_fn|embed_layer|mlp_layer|aa_layer"
)
ELSEWHERE = {
    "img_size": "backbone.img_size",
    "drop_path_rate": "backbone.drop_path",
    "num_classes": "the classes of a task",
}


def check_option(name: str, value: Any) -> None:
    """Raise a `ValueError` unless `name` may be set and `value` is plain: null, true, false, a
    number, a word, or a short list of those."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r:.60} is no name of an option")
    if LOADING.fullmatch(name):
        raise ValueError(
            f"{name!r} says how timm loads or makes a model, and not what it is; no settings "
            "file may do that"
        )
    if name in ELSEWHERE:
        raise ValueError(f"{name!r} is given by {ELSEWHERE[name]}")
    items = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > LONGEST_LIST:
        raise ValueError(f"{name!r} has {len(items)} values, and a list has at most {LONGEST_LIST}")
    largest = MOST_BLOCKS if name in BLOCK_COUNTS else LARGEST_NUMBER
    for item in items:
        _check_plain(name, item, largest)
    if (
        name in BLOCK_COUNTS
        and sum(item for item in items if isinstance(item, (int, float))) > MOST_BLOCKS
    ):
        raise ValueError(
            f"{name!r} is {value!r:.60}, and a backbone has at most {MOST_BLOCKS} blocks"
        )


def _check_plain(name: str, value: Any, largest: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if not WORD.fullmatch(value):
            raise ValueError(
                f"{name!r} is {value!r:.60}, and a word has letters, digits and '_', at most 40"
            )
    elif not isinstance(value, (int, float)):
        raise ValueError(
            f"{name!r} holds a {type(value).__name__}; it must be a number, a word, true, "
            "false, null, or a list of those"
        )
    elif not (abs(value) <= largest):  # NaN is none of them
        raise ValueError(f"{name!r} is {value!r:.60}, and it must be a number of at most {largest}")
