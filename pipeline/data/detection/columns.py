"""Find the label column and the split column of a table or a Parquet file.

A column is chosen by its name (for example `label` or `split`) or by its values, if there is only
one candidate. Otherwise an error asks the user to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.detection.data_set import Request, to_yaml
from pipeline.data.detection.words import LABEL_COLUMNS, NO_LABEL_COLUMNS, RANKS
from pipeline.data.labels import WHOLE, normalize_label
from pipeline.data.names import listed, quoted
from pipeline.data.splits import (
    SPLIT_COLUMNS,
    SPLIT_NAMES,
    SPLITS,
    UNSURE_COLUMNS,
    Role,
    SplitUnclear,
    SplitWords,
    find_role,
    is_flag_name,
    is_generic_split_name,
    is_no,
    is_weak,
    is_yes,
    normalize_word,
    parse_flag_column,
    parse_flag_values,
    parse_role,
    parse_split_words,
    tokenize_name,
)
from workers.errors import UserError

MAX_SPLIT_VALUES = 50  # distinct values of a split column, and of a label column of numbers
# A column with a split word in its name, like `test_group`, is not a split column if its values
# name no split and more than this number are distinct.
MAX_ROLE_VALUES = 5
MAX_VALUE_LENGTH = 60  # characters of a value that names a split
MAX_NAMED_COLUMNS = 12  # columns listed in an error
LABEL = "label"  # the usual name of the label column, and the setting that chooses it

Values = Mapping[str, Sequence[str | None]]  # column -> one value per row


class LabelUnclear(UserError):
    """The label column, or the label of an image, is ambiguous."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table or of Parquet files.

    Attributes:
        request: The user's request.
        where: Name of the table in errors.
        names: Names of all columns, in order.
        sample: Column -> its values in some rows of the table, or in the first rows of the first
            Parquet file, as text. Columns of images or arrays are excluded.
        distinct: Returns the distinct values of a column, or None if there are more than
            MAX_SPLIT_VALUES.
        find_row: Returns the number of a row with a given value in a column, or 0 if unknown.
    """

    request: Request
    where: str
    names: Sequence[str]
    sample: Values
    distinct: Callable[[str], set[str] | None]
    find_row: Callable[[str, str], int]

    def check(self, column: Any) -> str:
        """Return the name of a column that the user asked for.

        Raises:
            UserError: If no column has this name, or several do.
        """
        if self.names.count(column) > 1:
            raise UserError(
                f"{self.where} has {self.names.count(column)} columns called {quoted(column)}; "
                "rename all but one"
            )
        if column not in self.names:
            raise UserError(
                f"{self.where} has no column {column!r}; its columns are "
                f"{format_columns(self.names)}; name one of these"
            )
        return str(column)

    def ambiguous_error(self, kind: str, candidates: Sequence[str]) -> LabelUnclear:
        """Return the error that asks for the image column or the label column.

        Args:
            kind: `image` or `label`.
            candidates: Columns that may be meant, the likeliest first.
        """
        commands = [
            f"`{self.request.command(f'source.{kind}={to_yaml(name)}')}`" for name in candidates
        ]
        return LabelUnclear(
            f"{self.where} has the columns {format_columns(self.names)}, and which is the {kind} "
            f"is not clear: it can be {listed(candidates)}; name one, as in {commands[0]}"
        )


def format_columns(names: Iterable[str]) -> str:
    """Format column names for an error, for example `'file', 'label', ...`."""
    names = [*names]
    text = ", ".join(quoted(name) for name in names[:MAX_NAMED_COLUMNS])
    return f"{text}, ..." if len(names) > MAX_NAMED_COLUMNS else text


# ---- the label -----------------------------------------------------------------------------------
def find_label_column(
    columns: Columns, taken: Iterable[str], declared: Mapping[str, Sequence[str]] | None = None
) -> str | None:
    """Find the label column, for example `label` or `category`.

    Args:
        columns: Columns of the table.
        taken: Columns with another role, for example the image column.
        declared: Label column -> class names, if the file declares them (see `Schema.classes`).

    Returns:
        The name of the column, or None if no column can be the label.

    Raises:
        LabelUnclear: If several columns can be the label.
        UserError: If there is no column with the name that the user gave.
    """
    requested = columns.request.given.get("label")
    if requested is not None:
        return columns.check(requested)
    taken = {*taken}
    others = [name for name in columns.sample if name not in taken]
    named = [name for name in others if normalize_word(name) in LABEL_COLUMNS]
    if "x" in map(str.lower, columns.names):  # beside a column x, y is a coordinate in the image
        named = [name for name in named if name.lower() != "y"]
    exact = [name for name in named if normalize_word(name) == LABEL]
    declared = {name: classes for name, classes in (declared or {}).items() if name not in taken}
    usual = [name for name in declared if normalize_word(name) not in NO_LABEL_COLUMNS]
    declared = {name: declared[name] for name in usual or declared}
    if declared and not exact:
        # The declared column with the most classes is the candidate. Columns whose values follow
        # from it, for example a superclass, are no candidates.
        finest = max(declared, key=lambda name: len(declared[name]))
        coarser = [*declared, *named]
        named = [name for name in coarser if not _refines(columns.sample, finest, name)]
        named = [finest, *(name for name in named if name != finest)]
    likely = [name for name in others if _looks_like_labels(columns.sample[name], name)]
    # rivals: other columns that may be meant; unless they are equivalent, the user must choose
    if exact:
        rivals = [name for name in others if LABEL in tokenize_lower(name)]
    elif declared:
        rivals = []
    elif named:
        rivals = [name for name in likely if not _are_numbers(columns.sample[name])]
        # `category` and `y` are weak names for a label: they always have rivals. Other names have
        # rivals only if the table has taxonomic ranks, such as `species`.
        if not {normalize_word(name) for name in others} & RANKS:
            rivals = [name for name in rivals if normalize_word(named[0]) in ("category", "y")]
    else:
        rivals = likely or others
    candidates = _drop_equivalent(columns, dict.fromkeys([*rivals, *named, *exact]))
    if not candidates:
        return None
    if len(candidates) > 1:
        raise columns.ambiguous_error(LABEL, sort_label_columns(columns.sample, candidates))
    return columns.check(candidates[0])


def sort_label_columns(sample: Values, names: Iterable[str]) -> list[str]:
    """Sort columns by the likelihood that they are the label, likeliest first."""

    def priority(name: str) -> tuple[bool | int, ...]:
        word = normalize_word(name)
        # the finest taxonomic rank first, for example species before family
        num_distinct = len(set(sample[name])) if word in RANKS else 0
        return (
            word in NO_LABEL_COLUMNS,
            word != LABEL,
            word not in LABEL_COLUMNS,
            word not in RANKS,
            not _looks_like_labels(sample[name], name),
            -num_distinct,
        )

    return sorted(names, key=priority)


def note_label(columns: Columns, label: str, taken: Iterable[str]) -> list[str]:
    """Return a note about a label column without a usual name like `label`, or [].

    Args:
        columns: Columns of the table.
        label: The label column.
        taken: Columns with another role, for example the image column.
    """
    word = normalize_word(label)
    others = sort_label_columns(
        columns.sample, [name for name in columns.sample if name not in {label, *taken}]
    )
    if "label" in columns.request.given or word in LABEL_COLUMNS or label in taken:
        return []
    if not others and word not in NO_LABEL_COLUMNS:
        return []
    note = f"column {quoted(label)} was taken as the label"
    if not others:
        return [f"{note}, because there is no other; add a column `label` if it is not"]
    likeliest = sort_label_columns(columns.sample, others)[0]
    command = columns.request.command(f"source.label={to_yaml(likeliest)}")
    return [f"{note}, and {listed(others)} not; if another is meant, name it, as in `{command}`"]


def tokenize_lower(name: str) -> list[str]:
    """Split a name into words in lower case, for example `ImageFile` into `image` and `file`."""
    return [token.lower() for token in tokenize_name(name)]


def _looks_like_labels(texts: Sequence[str | None], name: str) -> bool:
    """Return whether values repeat like labels, and the name of the column allows a label.

    There must be at least two distinct values. If there are more, each must occur at least twice on
    average. Numbers must be whole, with at most MAX_SPLIT_VALUES distinct ones.
    """
    labels = [label for label in map(normalize_label, texts) if label is not None]
    distinct = set(labels)
    is_repeated = 2 <= len(distinct) <= max(len(labels) // 2, 2)
    if normalize_word(name) in NO_LABEL_COLUMNS or not is_repeated:
        return False
    if _are_numbers(texts):
        return len(distinct) <= MAX_SPLIT_VALUES and all(WHOLE.fullmatch(str(n)) for n in distinct)
    return True


def _are_numbers(texts: Sequence[str | None]) -> bool:
    labels = [str(label) for label in map(normalize_label, texts) if label is not None]
    return all(label.lstrip("+-").replace(".", "", 1).isdecimal() for label in labels)


def _drop_equivalent(columns: Columns, names: Iterable[str]) -> list[str]:
    """Keep one column of each group of equivalent columns; names are preferred to numbers."""
    kept: list[str] = []
    for name in names:
        twin = next((other for other in kept if _are_equivalent(columns.sample, name, other)), None)
        if twin is None:
            kept.append(name)
        elif _are_numbers(columns.sample[twin]) and not _are_numbers(columns.sample[name]):
            kept[kept.index(twin)] = name
    return kept


def _are_equivalent(sample: Values, first: str, second: str) -> bool:
    """Return whether the values of two columns map one to one, such as class ids and names."""
    return _refines(sample, first, second) and _refines(sample, second, first)


def _refines(sample: Values, fine: str, coarse: str) -> bool:
    """Return whether each value of column `fine` always occurs with the same value of `coarse`.

    A sample with a single pair of values shows nothing: the rows may be sorted by class.
    """
    pairs = {*zip(sample[fine], sample[coarse], strict=True)}
    return 1 < len(pairs) == len({value for value, _ in pairs})


# ---- the split -----------------------------------------------------------------------------------
def find_split_columns(
    columns: Columns, taken: Iterable[str]
) -> tuple[tuple[str, ...], SplitWords | None]:
    """Find the split column, or several flag columns (`is_train`, `is_test`).

    Args:
        columns: Columns of the table.
        taken: Columns with another role, for example the image column.

    Returns:
        The columns, and the values of each split; `((), None)` without a split column. Instead of
        values, there are flag columns if there are several, and none if the user gave `splits`.

    Raises:
        SplitUnclear: If several columns can be the split, or some values of the column are not a
            split.
    """
    settings = columns.request.given
    if "split" in settings:
        requested = settings["split"]
        if not requested:
            return (), None
        is_list = isinstance(requested, (list, tuple))
        names = tuple(map(columns.check, requested if is_list else [requested]))
        if "splits" in settings:
            _check_given_values(columns, names, settings["splits"])
            return names, SplitWords({}, [])
        return names, _parse_split_column(columns, names[0], columns.distinct(names[0]))
    taken = {*taken}
    words_by_column: dict[str, SplitWords] = {}
    flags: dict[str, Role] = {}
    for column in columns.sample:
        if column in taken or normalize_word(column) == LABEL:
            continue
        kind = classify_split_column(column)
        texts = {text for text in columns.sample[column] if text}
        if not kind and not _look_like_splits(texts):
            continue
        values = columns.distinct(column)
        if values is None:
            if kind == "column":  # raises the error: too many values for a split
                words_by_column[column] = _parse_split_column(columns, column, None)
            continue
        role = parse_flag_column(column)
        if kind == "role" and not any(map(find_role, values)):
            is_flag = bool(values) and all(is_yes(value) or is_no(value) for value in values)
            if role is not None and is_flag and is_flag_name(column):
                flags[column] = role
                continue
            if len(values) > MAX_ROLE_VALUES:
                continue
        if not any(values) and kind != "column":
            continue
        words_by_column[column] = _parse_split_column(columns, column, values)
    if flags:
        marked = tuple(flags)
        is_single = len(flags) == 1
        words = _parse_single_flag(columns, *flags.items()) if is_single else _parse_flags(flags)
        if not words_by_column:
            return marked, words
        words_by_column[marked[0]] = words
    if len(words_by_column) > 1:
        example = columns.request.command(f"source.split={to_yaml(next(iter(words_by_column)))}")
        raise SplitUnclear(
            f"{columns.where} has columns {listed(words_by_column)}, which all look like a split; "
            f"choose one, as in `{example}`"
        )
    for column, words in words_by_column.items():
        return (columns.check(column),), words
    return (), None


def _check_given_values(columns: Columns, names: Sequence[str], splits: Mapping[str, Any]) -> None:
    """Raise SplitUnclear if `splits` contains a value that does not occur in the split column."""
    values = columns.distinct(names[0]) if len(names) == 1 else None
    known = {normalize_label(value) for value in values or ()}
    known |= {str(label) for label in known}
    for split, parts in splits.items() if values is not None else ():
        for part in parts if isinstance(parts, (list, tuple)) else [parts]:
            if normalize_label(part) not in known:
                raise SplitUnclear(
                    f"{columns.where}: source.splits names {quoted(str(part))} for {split}, and no "
                    f"row has this value in column {quoted(names[0])}; its values are "
                    f"{listed(sorted(values or ()))}"
                )


def classify_split_column(column: str) -> str:
    """Classify the name of a column.

    Returns:
        `column` for names like `split` or `data_fold`, `role` for names with the word of a split,
        like `is_train`, and "" otherwise.
    """
    plain = normalize_word(column)
    if plain in SPLIT_COLUMNS - UNSURE_COLUMNS:
        return "column"
    tokens = tokenize_lower(column)
    if plain not in UNSURE_COLUMNS and any(token in SPLIT_NAMES for token in tokens):
        return "column"
    has_role = any(parse_role(token) and not is_weak(token) for token in [*tokens, plain])
    return "role" if has_role or (parse_flag_column(column) and not is_weak(column)) else ""


def _look_like_splits(texts: Iterable[str]) -> bool:
    """Return whether some values clearly name splits, for example `train` and `test`."""
    short = [text for text in texts if len(text) <= MAX_VALUE_LENGTH]
    roles = {find_role(text) for text in short if not is_weak(text)} - {None}
    return len(roles) > 1 or any(find_role(text) and is_generic_split_name(text) for text in short)


def _parse_split_column(columns: Columns, column: str, values: Iterable[str] | None) -> SplitWords:
    """Map the values of a split column to splits.

    Args:
        columns: Columns of the table.
        column: The split column.
        values: Its distinct values, or None if there are too many.

    Raises:
        SplitUnclear: If a value names no split, no value is train, or there are too many values.
    """
    known = sorted(values) if values is not None else []
    short = [value for value in known if len(value) <= MAX_VALUE_LENGTH]
    examples = ", ".join(to_yaml(value) for value in short[:MAX_ROLE_VALUES])
    example = columns.request.command(
        f"source.split={to_yaml(column)}",
        f"source.splits={{train: [{examples or '...'}], test: [...], ignore: [...]}}",
    )
    none = columns.request.command("source.split=null")
    remedy = (
        f"declare the meaning of its values, as in `{example}`, or that it is not a split: `{none}`"
    )
    try:
        words = parse_split_words(known)
        if words.unknown and all(map(find_role, known)):
            words = parse_split_words(known, exact=False)
    except SplitUnclear as error:
        raise SplitUnclear(
            f"{columns.where}: in column {quoted(column)}, {error}; {remedy}"
        ) from None
    if words.unknown or "train" not in words.splits:
        unread = ""
        if words.unknown and words.splits:
            row = columns.find_row(column, words.unknown[0])
            unread = f"; {quoted(words.unknown[0])}{f' (row {row})' if row else ''} is not one"
        raise SplitUnclear(
            f"{columns.where} has a column {quoted(column)}, which looks like a split and has the "
            f"values {listed(known) if known else 'many different values'}{unread}; {remedy}"
        )
    return words


def _parse_single_flag(columns: Columns, flag: tuple[str, Role]) -> SplitWords:
    """Map the values of one flag column to splits.

    Args:
        columns: Columns of the table.
        flag: The column and its role, for example `is_train` and train.

    Raises:
        SplitUnclear: If no row is train, or the role is val: `valid` can mean that the row is good.
    """
    column, role = flag
    values = columns.distinct(column) or set()
    words = parse_flag_values(role, values)
    if words is not None and "train" in words.splits and role != "val":
        return words
    problem = "no row belongs to train"
    if role == "val":
        problem = "a 1 can mean a validation image, or that the row is valid"
    texts = sorted(values)
    example = columns.request.command(
        f"source.split={to_yaml(column)}",
        f"source.splits={{train: [{to_yaml(texts[0])}], val: [{to_yaml(texts[-1])}]}}",
    )
    raise SplitUnclear(
        f"{columns.where}: column {quoted(column)} looks like a split, and {problem}; say what its "
        f"values mean, as in `{example}`, or that it is not a split: "
        f"`{columns.request.command('source.split=null')}`"
    )


def _parse_flags(flags: Mapping[str, Role]) -> SplitWords:
    """Map several flag columns (`is_train`, `is_test`) to the splits that they mark."""
    roles = parse_split_words(flags.values())
    splits = {
        split: [flag for flag, role in flags.items() if role in words]
        for split, words in roles.splits.items()
    }
    return SplitWords({split: splits[split] for split in SPLITS if split in splits}, [])
