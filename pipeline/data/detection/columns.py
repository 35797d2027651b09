"""What the columns of a table, or of a Parquet file, mean: which is the label, which is the split.

A column is taken if its name or its values say so and no other one could be meant. Else the person
is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.detection.data_set import Request, yaml_text
from pipeline.data.detection.words import LABEL_COLUMNS, NO_LABEL_COLUMNS, RANKS
from pipeline.data.labels import WHOLE, label_of
from pipeline.data.names import listed, quoted
from pipeline.data.splits import (
    SPLIT_COLUMNS,
    SPLIT_NAMES,
    SPLITS,
    UNSURE_COLUMNS,
    Role,
    SplitUnclear,
    SplitWords,
    flag_role,
    flag_words,
    is_no,
    is_weak,
    is_yes,
    plain_word,
    read_words,
    rest_is_generic,
    role_in,
    role_of,
    tokens_of,
)
from workers.errors import UserError

MOST_VALUES = 50  # of a column of splits
MOST_FEW = 5  # values of a column whose name has a word of a split, and no value has
MOST_VALUE = 60  # characters of a value that names a split
MOST_NAMED = 12  # columns that a sentence lists
LABEL = "label"

Values = Mapping[str, Sequence[str | None]]  # of rows, by column


class LabelUnclear(UserError):
    """There are images, and which column is the label, or which label counts, is not clear."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table or of Parquet files.

    Attributes:
        request: What the person asked.
        where: What to call the table in errors.
        names: Of all columns, in order.
        sample: Values of some rows from all over the table, as text, by column; columns of images
            or arrays are not in it.
        distinct: Returns the different values of a column; None if they are more than MOST_VALUES.
        row_with: Returns the number of a row with some value in a column; 0 if it is not known.
    """

    request: Request
    where: str
    names: Sequence[str]
    sample: Values
    distinct: Callable[[str], set[str] | None]
    row_with: Callable[[str, str], int]

    def check(self, column: Any) -> str:
        """Return a column that a person named.

        Raises:
            UserError: If there is none, or two are called so.
        """
        if self.names.count(column) > 1:
            raise UserError(
                f"{self.where} has {self.names.count(column)} columns called {quoted(column)}; "
                "rename all but one"
            )
        if column not in self.names:
            raise UserError(
                f"{self.where} has no column {column!r}; its columns are "
                f"{listed_columns(self.names)}; name one of these"
            )
        return str(column)

    def unclear(self, kind: str, candidates: Sequence[str]) -> LabelUnclear:
        """Return the error that asks for the column of the image, or of the label."""
        commands = [
            f"`{self.request.command(f'source.{kind}={yaml_text(name)}')}`" for name in candidates
        ]
        return LabelUnclear(
            f"{self.where} has the columns {listed_columns(self.names)}, and which is the {kind} "
            f"is not clear: it can be {listed(candidates)}; say it, as in {commands[-1]}"
        )


def listed_columns(names: Iterable[str]) -> str:
    """Return the names of columns for a sentence."""
    names = [*names]
    text = ", ".join(quoted(name) for name in names[:MOST_NAMED])
    return f"{text}, ..." if len(names) > MOST_NAMED else text


# ---- the label -----------------------------------------------------------------------------------
def label_column(
    columns: Columns, taken: Iterable[str], declared: Mapping[str, Sequence[str]] | None = None
) -> str | None:
    """Return the column of the label; None if no column can be it.

    Args:
        columns: Of the table.
        taken: The columns that are something else.
        declared: Classes that the file declares, by column.

    Raises:
        LabelUnclear: If it can be several.
    """
    asked = columns.request.given.get("label")
    if asked is not None:
        return columns.check(asked)
    taken = {*taken}
    others = [name for name in columns.sample if name not in taken]
    named = [name for name in others if plain_word(name) in LABEL_COLUMNS]
    if "x" in map(str.lower, columns.names):  # y is then a place in the image
        named = [name for name in named if name.lower() != "y"]
    exact = [name for name in named if plain_word(name) == LABEL]
    if declared and not exact:
        most = max(map(len, declared.values()))
        named = [name for name, classes in declared.items() if len(classes) == most] or named
    likely = [name for name in others if _is_like_labels(columns.sample[name], name)]
    if exact:
        rivals = [name for name in others if LABEL in tokens_in_lower_case(name)]
    elif declared:
        rivals = []
    elif named:
        rivals = [name for name in likely if not _are_numbers(columns.sample[name])]
        if not {plain_word(name) for name in others} & RANKS:
            rivals = [name for name in rivals if plain_word(named[0]) in ("category", "y")]
    else:
        rivals = likely or others
    candidates = _different(columns, dict.fromkeys([*rivals, *named, *exact]))
    if not candidates:
        return None
    if len(candidates) > 1:
        raise columns.unclear(LABEL, candidates)
    return columns.check(candidates[0])


def tokens_in_lower_case(name: str) -> list[str]:
    """Return the words of a name in lower case."""
    return [token.lower() for token in tokens_of(name)]


def _is_like_labels(texts: Sequence[str | None], name: str) -> bool:
    """Whether values repeat as labels do, and the column is not called by something else."""
    labels = [label for label in map(label_of, texts) if label is not None]
    distinct = set(labels)
    if plain_word(name) in NO_LABEL_COLUMNS or not 2 <= len(distinct) <= max(len(labels) // 2, 2):
        return False
    are_numbers = _are_numbers(texts)
    if are_numbers:
        return len(distinct) <= MOST_VALUES and all(WHOLE.fullmatch(str(n)) for n in distinct)
    return True


def _are_numbers(texts: Sequence[str | None]) -> bool:
    labels = [str(label) for label in map(label_of, texts) if label is not None]
    return all(label.lstrip("+-").replace(".", "", 1).isdecimal() for label in labels)


def _different(columns: Columns, names: Iterable[str]) -> list[str]:
    """Return columns that do not say the same; of those that do, the one of names."""
    kept: list[str] = []
    for name in names:
        same = next((other for other in kept if _say_the_same(columns.sample, name, other)), None)
        if same is None:
            kept.append(name)
        elif _are_numbers(columns.sample[same]) and not _are_numbers(columns.sample[name]):
            kept[kept.index(same)] = name
    return kept


def _say_the_same(sample: Values, first: str, second: str) -> bool:
    """Whether each value of a column stands beside one value of another, and the reverse."""
    pairs = {*zip(sample[first], sample[second], strict=True)}
    return len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})


# ---- the split -----------------------------------------------------------------------------------
def split_columns(
    columns: Columns, taken: Iterable[str]
) -> tuple[tuple[str, ...], SplitWords | None]:
    """Return the columns of the split, and what their values mean; none without such a column.

    Raises:
        SplitUnclear: If a column that looks like a split is not understood for every row.
    """
    settings = columns.request.given
    if "split" in settings:
        asked = settings["split"]
        names = [*asked] if isinstance(asked, (list, tuple)) else [asked] if asked else []
        columns_found = tuple(columns.check(name) for name in names)
        if "splits" in settings or not columns_found:
            return columns_found, SplitWords({}, []) if columns_found else None
        values = columns.distinct(columns_found[0])
        return columns_found, _understood(columns, columns_found[0], values)
    taken = {*taken}
    found_words: dict[str, SplitWords] = {}
    flags: dict[str, Role] = {}
    for column in columns.sample:
        if column in taken or plain_word(column) == LABEL:
            continue
        says = says_a_split(column)
        texts = {text for text in columns.sample[column] if text}
        if not says and not _say_splits(texts):
            continue
        values = columns.distinct(column)
        if values is None:
            if says == "column":
                found_words[column] = _understood(columns, column, None)
            continue
        role = flag_role(column)
        if says == "role" and not any(map(role_in, values)):
            if role is not None and all(is_yes(value) or is_no(value) for value in values):
                flags[column] = role
                continue
            if len(values) > MOST_FEW:
                continue
        if not any(values) and says != "column":
            continue
        found_words[column] = _understood(columns, column, values)
    if flags:
        marked = tuple(flags)
        words = _of_one_flag(columns, *flags.items()) if len(flags) == 1 else _of_flags(flags)
        if not found_words:
            return marked, words
        found_words[marked[0]] = words
    if len(found_words) > 1:
        example = columns.request.command(f"source.split={yaml_text(next(iter(found_words)))}")
        raise SplitUnclear(
            f"{columns.where} has columns {listed(found_words)} that say a split; say which, as in "
            f"`{example}`"
        )
    for column, words in found_words.items():
        return (columns.check(column),), words
    return (), None


def says_a_split(column: str) -> str:
    """Return `column` if a column is called as a split, `role` if a word of one is in its name."""
    plain = plain_word(column)
    if plain in SPLIT_COLUMNS - UNSURE_COLUMNS:
        return "column"
    tokens = tokens_in_lower_case(column)
    if plain not in UNSURE_COLUMNS and any(token in SPLIT_NAMES for token in tokens):
        return "column"
    has_role = any(role_of(token) and not is_weak(token) for token in [*tokens, plain])
    return "role" if has_role or (flag_role(column) and not is_weak(column)) else ""


def _say_splits(texts: Iterable[str]) -> bool:
    """Whether values are words for splits, one at least without a doubt."""
    short = [text for text in texts if len(text) <= MOST_VALUE]
    roles = {role_in(text) for text in short if not is_weak(text)} - {None}
    return len(roles) > 1 or any(role_in(text) and rest_is_generic(text) for text in short)


def _understood(columns: Columns, column: str, values: Iterable[str] | None) -> SplitWords:
    """Return what the values of a column of splits mean.

    Raises:
        SplitUnclear: If one of them says no split, or none is train.
    """
    known = sorted(values) if values is not None else []
    short = [value for value in known if len(value) <= MOST_VALUE]
    shown = ", ".join(yaml_text(value) for value in short[:MOST_FEW])
    example = columns.request.command(
        f"source.split={yaml_text(column)}",
        f"source.splits={{train: [{shown or '...'}], test: [...], ignore: [...]}}",
    )
    none = columns.request.command("source.split=null")
    remedy = f"say what they mean, as in `{example}`, or that it is no split: `{none}`"
    try:
        words = read_words(known)
        if words.unknown and all(map(role_in, known)):
            words = read_words(known, exact=False)
    except SplitUnclear as error:
        raise SplitUnclear(
            f"{columns.where}: in column {quoted(column)}, {error}; {remedy}"
        ) from None
    if words.unknown or "train" not in words.splits:
        unread = ""
        if words.unknown and words.splits:
            row = columns.row_with(column, words.unknown[0])
            unread = f"; {quoted(words.unknown[0])}{f' (row {row})' if row else ''} is not one"
        raise SplitUnclear(
            f"{columns.where} has a column {quoted(column)}, which looks like a split and has the "
            f"values {listed(known) if known else 'many different values'}{unread}; {remedy}"
        )
    return words


def _of_one_flag(columns: Columns, flag: tuple[str, Role]) -> SplitWords:
    """Return what a column such as `is_train` means."""
    column, role = flag
    values = columns.distinct(column) or set()
    words = flag_words(role, values)
    if words is not None and "train" in words.splits and role != "val":
        return words
    problem = "no row is of train"
    if role == "val":
        problem = "a 1 can mean a validation image, or a row without a fault"
    texts = sorted(values)
    example = columns.request.command(
        f"source.split={yaml_text(column)}",
        f"source.splits={{train: [{yaml_text(texts[0])}], val: [{yaml_text(texts[-1])}]}}",
    )
    raise SplitUnclear(
        f"{columns.where}: column {quoted(column)} looks like a split, and {problem}; say what its "
        f"values mean, as in `{example}`, or that it is no split: "
        f"`{columns.request.command('source.split=null')}`"
    )


def _of_flags(flags: Mapping[str, Role]) -> SplitWords:
    """Return what columns such as `is_train` and `is_test` mean: each stands for its own split."""
    roles = read_words(flags.values())
    splits = {
        split: [flag for flag, role in flags.items() if role in words]
        for split, words in roles.splits.items()
    }
    return SplitWords({split: splits[split] for split in SPLITS if split in splits}, [])
