"""Select the images of a source to write, with their key, split and order.

`select_rows` does this for ingest. `check_listed` makes the same checks before images are read.

The code works on columns; rows of Python objects are created only for listed images.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.text import format_count
from pipeline.data.cards import Card
from pipeline.data.digests import compute_key_digests, sort_by_digest
from pipeline.data.listing import describe_left_out
from pipeline.data.names import listed, nfc
from pipeline.data.packs import LEFT_OUT, read_raw_digest
from pipeline.data.splits import SPLITS, Split
from workers.data.held_out import find_held_out
from workers.errors import UserError

NAMED_IMAGES = 3  # images that an error lists
DARK_TOP = 16383  # 16-bit images without a value above this (of 65535) are too dark
MAX_LEAKS = 0.01  # share of the images of a split that may be copies of train images
SLASH = pa.scalar("/", pa.large_string())
LIMIT_REASON = "left out: its class has per_class images"  # the limit `per_class` on the card
_NAMES = ("key", "split", "class", "reason", "kept", "source")
REJECTED_CSV = "rejected.csv"  # file of an ingest stage
# The rows of rejected.csv. kept: "yes" for an image that is listed but also written.
REJECTED = pa.schema([(name, pa.large_string()) for name in _NAMES])

# the classes with images in each split, for `check_class_images`
CLASSES = pa.schema([(name, pa.large_string()) for name in ("split", "label")])


class Selection(NamedTuple):
    """The result of the selection.

    Attributes:
        rows: Rows of the images to write, sorted by split, class, sha256 and key.
        rejected: Rows of rejected.csv, with the columns of REJECTED.
        notes: Notes about the images for the user.
    """

    rows: pa.Table
    rejected: pa.Table
    notes: list[str]


def divide_left_out(card: Card, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Divide the rows of a source by `without_classes` and `without_images` of its card.

    Images that the card excludes by their digest are found only here, after they were read.

    Args:
        card: Card of the source.
        rows: Rows with the columns of `packs.ROWS`.

    Returns:
        The rows that the card includes, and those that it excludes.
    """
    if not card.without_classes and not card.without_images:
        return rows, rows.slice(0, 0)
    named = card.images_left_out()
    is_named = [read_raw_digest(raw) in named for raw in rows["raw"].to_pylist()]
    is_marked = pc.fill_null(pc.equal(rows["problem"], LEFT_OUT), False)
    is_left_out = pc.or_(is_marked, pa.array(is_named, pa.bool_()))
    return rows.filter(pc.invert(is_left_out)), rows.filter(is_left_out)


def select_rows(card: Card, rows: pa.Table) -> Selection:
    """Return the rows to write with their complete keys, and the rows of rejected.csv.

    Args:
        card: Card of the source.
        rows: Rows with the columns of `packs.ROWS`, except `raw` and `stamp`.

    Raises:
        UserError: If no images exist, or if `check_bad_fraction`, `check_class_images`,
            `check_pixel_values` or `check_leaks` fails.
    """
    _require_rows(card, len(rows))
    has_problem = pc.is_valid(rows["problem"])
    problems = rows.filter(has_problem)
    check_bad_fraction(card, len(rows) - len(problems), problems)
    usable = rows
    if len(problems):
        usable = rows.filter(pc.invert(has_problem))
    selected = _with_keys(card, usable)
    duplicates, duplicate_rows = find_duplicates(card, selected)
    without_key = problems.set_column(
        _find_column(problems, "key"), "key", _repeated("", len(problems))
    )
    rejected = [_rejected(without_key), duplicate_rows]
    if card.duplicates == "drop":
        selected = selected.filter(pa.array(~duplicates))
    if card.per_class:
        is_surplus = find_surplus(card.per_class.by_split(), selected)
        surplus = selected.filter(pa.array(is_surplus))
        rejected.append(_rejected(surplus, LIMIT_REASON))
        selected = selected.filter(pa.array(~is_surplus))
    check_class_images(card, problems, selected)
    notes = [*check_pixel_values(card, selected), *_in_two_classes(selected)]
    check_leaks(card, selected)
    selected = _sort_by_shard(selected.drop_columns(["blank", "top"]))
    return Selection(selected, _sorted_rejected(pa.concat_tables(rejected)), notes)


def check_listed(
    card: Card, counts: Mapping[tuple[str, str], int], problems: pa.Table
) -> dict[str, int]:
    """Check a listing before images are read. Return the maximum number of images in each split.

    Args:
        card: Card of the source.
        counts: Number of images without a problem, by split and class.
        problems: Split, name and problem of all other files.

    Raises:
        UserError: If `select_rows` would raise it regardless of the content of the images.
    """
    _require_rows(card, sum(counts.values()) + len(problems))
    check_bad_fraction(card, sum(counts.values()), problems)
    has_test = any(split == "test" for split, _ in counts)
    selected: Counter[tuple[str, str]] = Counter()
    for (split, name), size in counts.items():
        # the most images that test can gain, and the fewest that train loses
        num_test = num_train = 0
        if card.test_fraction and not has_test and split == "train":
            num_test = num_train = num_held_out(size, card.test_fraction)
            if card.hold_out == "threshold":  # the held-out images are only known after reading
                num_test, num_train = size, 0
        selected[split, name] += size - num_train
        selected["test", name] += num_test
    limits = {str(s): n for s, n in card.per_class.by_split().items()} if card.per_class else {}
    totals = {"train": 0, "test": 0}
    rows: list[dict[str, str]] = []
    for (split, name), size in selected.items():
        size = min(size, limits.get(split, size))
        totals[split] = totals.get(split, 0) + size
        if size:
            rows.append({"split": split, "label": name})
    check_class_images(card, problems, pa.Table.from_pylist(rows, CLASSES))
    return totals


def _require_rows(card: Card, num_rows: int) -> None:
    if not num_rows:
        raise UserError(
            f"card {card.name!r}: its source holds no images below source.splits "
            f"({dict(card.source.splits)}); fix the splits, or the path of the source"
        )


# ---- keys and order ------------------------------------------------------------------------------
def _with_keys(card: Card, rows: pa.Table) -> pa.Table:
    """Return the rows with their keys `split/class/stem`, sorted by split and digest of the key.

    Keys are unique and do not depend on other classes. If the source has no test images and the
    card has a `test_fraction`, test images are held out of train.
    """
    rows = _make_keys_unique(rows)
    if card.test_fraction and not pc.any(pc.equal(rows["split"], "test")).as_py():
        is_train = _split_numbers(rows) == 0
        is_test = np.zeros(len(rows), bool)
        train = rows.filter(pa.array(is_train))
        if card.hold_out == "threshold":
            below = find_held_out(train["sha256"], card.test_fraction, "test")
            is_test[is_train] = below.to_numpy(zero_copy_only=False)
        else:
            is_test[is_train] = _held_out(train, card.test_fraction)
        split = pc.if_else(pa.array(is_test), "test", rows["split"]).cast(pa.large_string())
        rows = rows.set_column(_find_column(rows, "split"), "split", split)
    keys = pc.binary_join_element_wise(rows["split"], rows["key"], SLASH)
    rows = rows.set_column(_find_column(rows, "key"), "key", keys)
    order = sort_by_digest(compute_key_digests(rows["key"]), _split_numbers(rows))
    return rows.take(pa.array(order)).combine_chunks()


def _sort_by_shard(rows: pa.Table) -> pa.Table:
    """Sort rows in the order of shards, so that an epoch reads a class in few long ranges."""
    names = ("label", "sha256", "key")
    rows = rows.append_column("number", pa.array(_split_numbers(rows)))
    ordered = rows.sort_by([(name, "ascending") for name in ("number", *names)])
    return ordered.drop_columns("number").combine_chunks()


def _make_keys_unique(rows: pa.Table) -> pa.Table:
    """Append a hash of the image's name to each key that occurs more than once in a split.

    If names are equal, too (two archives in different folders may have the same name), the second
    and later images also get a number.
    """
    codes = _codes(pc.binary_join_element_wise(rows["split"], rows["key"], SLASH))
    is_repeated = _counts(codes)[codes] > 1
    if not is_repeated.any():
        return rows
    repeated = rows.select(["split", "key", "name"]).filter(pa.array(is_repeated))
    numbers: Counter[tuple[str, str]] = Counter()
    keys: list[str] = []
    for split, key, name in _tuples(repeated):
        digest = hashlib.sha256(nfc(name).encode()).hexdigest()
        key = f"{key}-{digest[:12]}"
        numbers[split, key] += 1
        number = numbers[split, key]
        if number > 1:
            key = f"{key}-{number}"
        keys.append(key)
    mask = pa.array(is_repeated)
    column = rows["key"].combine_chunks()
    unique = pc.replace_with_mask(column, mask, pa.array(keys, pa.large_string()))
    return rows.set_column(_find_column(rows, "key"), "key", unique)


def _held_out(rows: pa.Table, fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the held-out rows: in each class, the keys with the lowest sha256.

    The rule is that of `workers.data.held_out.hold_out`: of n images, round(fraction * n) are held
    out, at least one if n >= 2, and never all. Exact copies count as one image with the key of the
    lowest sha256, and stay together.
    """
    contents = _codes(rows["sha256"])
    is_first = np.zeros(len(rows), bool)
    order = sort_by_digest(compute_key_digests(rows["key"]), contents)
    is_first[order] = _ranks_in_groups(contents[order]) == 0
    chosen = np.zeros(len(rows), bool)
    chosen[is_first] = _lowest(rows.filter(pa.array(is_first)), fraction)
    is_held_out: NDArray[np.bool_] = np.isin(contents, contents[chosen])
    return is_held_out


def _lowest(rows: pa.Table, fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the given share of rows in each class, with the lowest sha256 of keys."""
    classes = _codes(rows["label"])
    sizes = _counts(classes)
    order = sort_by_digest(compute_key_digests(rows["key"]), classes)
    ranks = _ranks_in_groups(classes[order])
    shares = [num_held_out(size, fraction) for size in sizes.tolist()]
    is_held_out = np.zeros(len(classes), bool)
    is_held_out[order] = ranks < np.array(shares, np.int64)[classes[order]]
    return is_held_out


def num_held_out(size: int, fraction: float) -> int:
    """Return how many of `size` images of a class are held out, never all of them.

    The result is at least one if `size` >= 2 and `fraction` > 0.
    """
    least = 1 if fraction > 0 else 0
    return min(max(round(fraction * size), least), size - 1)


# ---- copies and surplus images -------------------------------------------------------------------
def find_duplicates(card: Card, rows: pa.Table) -> tuple[NDArray[np.bool_], pa.Table]:
    """Find exact copies: images with the same sha256 of the stored bytes.

    The first image by key is not a copy.

    Returns:
        A mask of the copies of images in the same split, and rows of rejected.csv. These also list
        copies of images in another split.
    """
    contents = _codes(rows["sha256"])
    candidates = np.flatnonzero(_counts(contents)[contents] > 1)
    order = pc.sort_indices(
        pa.table(
            {
                "split": _split_numbers(rows)[candidates],
                "key": rows["key"].take(pa.array(candidates)),
            }
        ),
        sort_keys=[("split", "ascending"), ("key", "ascending")],
    )
    candidates = candidates[order.to_numpy()]
    ordered = rows.take(pa.array(candidates))
    splits = ordered["split"].to_pylist()
    keys = ordered["key"].to_pylist()
    # split -> integer of the content (`_codes`) -> key of the first image
    first_keys: dict[str, dict[int, str]] = {split: {} for split in SPLITS}
    duplicates = np.zeros(len(rows), bool)
    listed: list[int] = []
    reasons: list[str] = []
    kept: list[str] = []
    for index, content in enumerate(contents[candidates].tolist()):
        first_key = first_keys[splits[index]].get(content)
        others = [split for split in SPLITS if content in first_keys[split]]
        if first_key is not None:
            listed.append(index)
            reasons.append(f"duplicate: of {first_key}")
            kept.append("no" if card.duplicates == "drop" else "yes")
            duplicates[candidates[index]] = True
        elif others:  # rows are in the order of SPLITS, so these splits come before
            listed.append(index)
            reasons.append(f"in {others[0]} too: {first_keys[others[0]][content]}")
            kept.append("yes")
        first_keys[splits[index]].setdefault(content, keys[index])
    table = _rejected(ordered.take(pa.array(listed, pa.int64())))
    for name, values in (("reason", reasons), ("kept", kept)):
        column = pa.array(values, pa.large_string())
        table = table.set_column(_find_column(table, name), name, column)
    return duplicates, table


def find_surplus(limits: Mapping[Split, int], rows: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of surplus rows: all but the first `limits[split]` rows of each class.

    A split without a limit has no surplus.
    """
    splits = _split_numbers(rows)
    groups = len(SPLITS) * _codes(rows["label"]) + splits
    order = np.argsort(groups, kind="stable")
    ranks = np.empty(len(rows), np.int64)
    ranks[order] = _ranks_in_groups(groups[order])
    allowed = np.array([limits.get(split, len(rows)) for split in SPLITS], np.int64)
    is_surplus: NDArray[np.bool_] = ranks >= allowed[splits]
    return is_surplus


def check_pixel_values(card: Card, rows: pa.Table) -> list[str]:
    """Check the pixel values of images. Return a note about images with one colour.

    Args:
        card: Card of the source.
        rows: Rows of the written images, with the columns `blank` and `top`.

    Raises:
        UserError: If most images of a class became one colour although their values differ, or if
            all 16-bit images use only a small part of their range, so that they would be dark.
    """
    top = pc.max(rows["top"]).as_py()
    if top is not None and card.source.range is None and top <= DARK_TOP:
        num_deep = len(rows) - rows["top"].null_count
        # for the advice: the largest value of the smallest bit depth that holds `top`
        white = 2 ** max(math.ceil(math.log2(top + 1)), 8) - 1
        raise UserError(
            f"card {card.name!r}: {num_deep} images have 16 bits, which declare a range of 0 to "
            f"65535, and no value is above {top:.0f}, so that they would be dark; say source.range "
            f"on the card: the values of black and white, as in [0, {white}], or [0, 65535] if "
            "they are meant so (images in colours: convert them to 8 bits)"
        )
    is_blank = pc.fill_null(pc.not_equal(rows["blank"], ""), False)
    has_become = pc.fill_null(pc.equal(rows["blank"], "became"), False)
    sizes = Counter(rows["label"].to_pylist())
    for label, number in Counter(rows["label"].filter(has_become).to_pylist()).most_common():
        if number * 2 > sizes[label]:
            name = rows["name"].filter(has_become).to_pylist()[0]
            raise UserError(
                f"card {card.name!r}: {number} of {sizes[label]} images of class {label!r:.80} "
                f"become one colour, such as {name}: they are transparent and are laid on white, "
                "or their values are a small part of their range; convert them to images without "
                "an alpha channel, or say source.range on the card"
            )
    num_blank = pc.sum(is_blank).as_py() or 0
    if not num_blank:
        return []
    blank_sizes = Counter(rows["label"].filter(is_blank).to_pylist())
    mostly = [label for label, number in blank_sizes.items() if number * 2 > sizes[label]]
    classes = f", most of those of {listed(sorted(mostly))}" if mostly else ""
    return [f"{format_count(num_blank, 'image')} of one colour{classes}"]


def _in_two_classes(rows: pa.Table) -> list[str]:
    """Return a note about images with exact copies in other classes, if there are any."""
    contents = _codes(rows["sha256"])
    labels = _codes(rows["label"])
    one_label = np.zeros(len(rows), np.int64)
    one_label[contents] = labels  # label of some image with each content
    is_twice = np.zeros(len(rows), bool)
    is_twice[contents[one_label[contents] != labels]] = True
    if not is_twice.any():
        return []
    example = rows["name"].filter(pa.array(is_twice[contents])).slice(0, 2).to_pylist()
    return [
        f"{format_count(int(is_twice.sum()), 'image')} with copies in another class, such as "
        f"{' and '.join(example)}"
    ]


def check_leaks(card: Card, rows: pa.Table) -> None:
    """Raise `UserError` if too many val or test images are exact copies of train images.

    Args:
        card: The card; `leaks: allow` allows them.
        rows: Rows of the written images.
    """
    if card.leaks == "allow":
        return
    contents = _codes(rows["sha256"])
    for split in SPLITS[1:]:
        _check_leaks(card, rows, split, contents)


def _check_leaks(card: Card, rows: pa.Table, split: Split, contents: NDArray[np.int64]) -> None:
    """Check one split. `contents`: an integer for each row, the same for equal images."""
    is_test = _split_numbers(rows) == SPLITS.index(split)
    is_leak = is_test & np.isin(contents, contents[_split_numbers(rows) == 0])
    if is_leak.sum() <= MAX_LEAKS * is_test.sum():
        return
    examples = "; ".join(rows["name"].filter(pa.array(is_leak)).slice(0, NAMED_IMAGES).to_pylist())
    raise UserError(
        f"card {card.name!r}: {is_leak.sum()} of {is_test.sum()} {split} images are exact copies "
        f"of train images ({examples}), so that accuracy would be measured on images that were "
        "trained on; remove the copies, fix source.splits, or say `leaks: allow` on the card if "
        "they are meant"
    )


# ---- listing -------------------------------------------------------------------------------------
def _rejected(rows: pa.Table, reason: str | None = None) -> pa.Table:
    """Build rows of rejected.csv for images that are not kept.

    Args:
        rows: Rows with the columns of `packs.ROWS`.
        reason: The reason for all rows. None: the problem of each row.
    """
    reasons = rows["problem"]
    if reason is not None:
        reasons = _repeated(reason, len(rows))
    columns = (
        rows["key"],
        rows["split"],
        pc.fill_null(rows["label"], ""),
        reasons,
        _repeated("no", len(rows)),
        rows["name"],
    )
    return pa.table([column.cast(pa.large_string()) for column in columns], names=_NAMES)


def _sorted_rejected(rejected: pa.Table) -> pa.Table:
    """Sort rows of rejected.csv by split, source and reason. The order is stable."""
    keys = {
        "split": pa.array(_split_numbers(rejected)),
        "source": rejected["source"],
        "reason": rejected["reason"],
        "row": pa.array(np.arange(len(rejected))),
    }
    order = pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys])
    return rejected.take(order)


def rejected_rows(rejected: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of rejected.csv."""
    return _tuples(rejected)


def count_reasons(rejected: pa.Table) -> dict[str, int]:
    """Count images by the text of their reason before the first colon, for example `corrupt`."""
    counts: Counter[str] = Counter()
    for entry in rejected["reason"].value_counts().to_pylist():
        counts[entry["values"].split(":")[0]] += entry["counts"]
    return dict(sorted(counts.items()))


# ---- checks --------------------------------------------------------------------------------------
def check_bad_fraction(card: Card, num_usable: int, problems: pa.Table) -> None:
    """Raise `UserError` if more images are corrupt or unlabelled than the card allows.

    Args:
        card: The card.
        num_usable: Number of images without a problem.
        problems: Name and problem of all other files. Hidden files and files that are not images
            are not counted.
    """
    is_bad = pc.invert(pc.match_substring_regex(problems["problem"], "^(other file|hidden)"))
    num_bad = pc.sum(is_bad).as_py() or 0
    num_images = num_usable + num_bad
    if num_bad <= card.max_bad_fraction * num_images:
        return
    bad = problems.select(["name", "problem"]).filter(is_bad).slice(0, NAMED_IMAGES)
    examples = "; ".join(f"{name} ({problem})" for name, problem in _tuples(bad))
    more = "; ..." if num_bad > NAMED_IMAGES else ""
    raise UserError(
        f"card {card.name!r}: {num_bad} of {num_images} images are corrupt or unlabelled, "
        f"and max_bad_fraction allows a share of {card.max_bad_fraction}: {examples}{more}; fix "
        "or remove them, or raise max_bad_fraction on the card if they are meant to be left out"
    )


def check_class_images(card: Card, problems: pa.Table, selected: pa.Table) -> None:
    """Raise `UserError` if a class has no train images, or no class has test images.

    A card without a train split needs no train images, and a card without labels no test images.

    Args:
        card: The card.
        problems: Split, name and problem of unused files.
        selected: Split and label of used images.
    """
    checked: tuple[Split, ...] = ("train", "test")
    for split in checked:
        labels = selected["label"].filter(pc.equal(selected["split"], split))
        missing = sorted(set(card.order()) - set(labels.unique().to_pylist()))
        if split == "train":
            # a card without a train split is only for testing
            is_complete = not missing or "train" not in card.source.splits
        else:  # one class with test images is enough
            is_complete = card.source.label is None or len(missing) < len(card.order())
        if not is_complete:
            raise _missing_images(card, problems, split, missing)


def _missing_images(card: Card, problems: pa.Table, split: Split, missing: list[str]) -> UserError:
    problem = "there are no test images"
    if split == "train":
        problem = f"class {missing[0]!r} has no train images"
    of_split = problems.filter(pc.equal(problems["split"], split))
    left_out: list[tuple[str, str]] = []
    for name, row_problem in _tuples(of_split.select(["name", "problem"])):
        if not row_problem.startswith("unlabelled"):
            left_out.append((name, row_problem))
    return UserError(
        f"card {card.name!r}: {problem} in {card.source.path or card.source.name}"
        f"{describe_left_out(left_out)}; add them, fix `classes` and source.splits of the card, "
        "or set test_fraction to hold some out"
    )


# ---- columns -------------------------------------------------------------------------------------
def _find_column(table: pa.Table, name: str) -> int:
    index: int = table.schema.get_field_index(name)
    return index


def _tuples(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=1 << 14):
        yield from zip(*[column.to_pylist() for column in batch.columns], strict=True)


def _repeated(text: str, count: int) -> pa.Array:
    return pa.array([text], pa.large_string()).take(pa.array(np.zeros(count, np.int64)))


def _split_numbers(rows: pa.Table) -> NDArray[np.int8]:
    """Return the index of each row's split in SPLITS."""
    numbers = pc.index_in(rows["split"], pa.array(SPLITS, pa.large_string()))
    places: NDArray[np.int8] = numbers.to_numpy().astype(np.int8)
    return places


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return an integer for each value of a column without nulls, the same for equal values."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    codes: NDArray[np.int64] = column.dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes


def _counts(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of rows with each code, at the index of the code."""
    counts: NDArray[np.int64] = np.bincount(codes)
    return counts


def _ranks_in_groups(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each row in its group. The rows of a group must be consecutive."""
    rows = np.arange(len(groups))
    is_first = np.ones(len(groups), bool)
    is_first[1:] = groups[1:] != groups[:-1]
    firsts = np.maximum.accumulate(np.where(is_first, rows, 0))
    ranks: NDArray[np.int64] = rows - firsts
    return ranks
