"""Splits of a data set, and the words that people use for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from pipeline.data.names import words
from workers.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
Part = Literal["train", "val", "test", "ignore"]  # a key of `source.splits`
IGNORE: Part = "ignore"  # what it names is not read
PARTS: tuple[Part, ...] = ("train", "val", "test", IGNORE)
Role = Literal["train", "val", "test", "held out"]  # held out: validation or test

ROLES: dict[Role, frozenset[str]] = {
    "train": words(
        """train training trn tr trainset traindata trainval learn learning learnset fit"""
    ),
    "val": words("""val valid validation validate dev devel development tune tuning valset
        valdata"""),
    "test": frozenset(["test", "testing", "tst", "te", "testset", "testdata"]),
    "held out": frozenset(["eval", "evaluation", "evalset", "holdout", "heldout"]),
}
# Words that are as likely the name of a class or a language.
WEAK_WORDS = words("""tr te fit learn learning tune tuning dev devel development""")
SPLIT_COLUMNS = words("""split splits set subset fold folds partition phase usage dataset group""")
UNSURE_COLUMNS = frozenset(("group", "dataset"))  # splits only if their values say so
TRUE_WORDS = frozenset(("1", "true", "yes", "y", "t"))
FALSE_WORDS = frozenset(("0", "false", "no", "n", "f"))
TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")


class SplitUnclear(UserError):
    """The splits of a data set can be read in several ways, or not at all."""


class SplitWords(NamedTuple):
    """Words and the splits that they name.

    Attributes:
        splits: The words of each split, in the order of SPLITS.
        unknown: Words that name no split.
    """

    splits: dict[Split, list[str]]
    unknown: list[str]


def role_of(word: str) -> Role | None:
    """Return which part of a data set a word names; None if it names none."""
    plain = plain_word(word)
    return next((role for role, named in ROLES.items() if plain in named), None)


def plain_word(text: str) -> str:
    """Return a name in lower case, without the signs between its words."""
    return re.sub(r"[\s_.\-]+", "", text.lower())


def role_in(name: str) -> Role | None:
    """Return the part of a data set that a name, or the only such word in it, names.

    For example `train` for `train`, `seg_train` and `TrainImages`.
    """
    roles = {role_of(token) for token in tokens_of(name)} - {None}
    return role_of(name) or (roles.pop() if len(roles) == 1 else None)


def tokens_of(name: str) -> list[str]:
    """Return the words of a name: `seg_trainImages-01` has seg, train, Images and 01."""
    return TOKEN.findall(name)


def rest_of(name: str) -> str:
    """Return a name without the words that name a split."""
    return " ".join(token.lower() for token in tokens_of(name) if role_of(token) is None)


def flag_role(column: str) -> Role | None:
    """Return the part that a column such as `is_train` marks; None if it is no such column."""
    return role_of(re.sub(r"^(is|in)[\s_.\-]*", "", column.lower()))


def flag_words(role: Role, values: Iterable[str]) -> SplitWords | None:
    """Return what the values of a flag mean: 1 its own part, 0 the other.

    Args:
        role: The part that the flag marks, as `flag_role` returns it.
        values: The values of the column.

    Returns:
        None if a value is neither yes nor no.
    """
    other: Split = "test" if role == "train" else "train"
    own: Split = "test" if role == "held out" else role
    splits: dict[Split, list[str]] = {}
    for value in sorted(values):
        if value.lower() in TRUE_WORDS:
            splits.setdefault(own, []).append(value)
        elif value.lower() in FALSE_WORDS:
            splits.setdefault(other, []).append(value)
        else:
            return None
    return SplitWords(_ordered(splits), [])


def read_words(names: Iterable[str], exact: bool = True) -> SplitWords:
    """Return which words name train, validation and test.

    A word for held-out images (`eval`, `holdout`) means what the others leave: test if there is no
    test, validation if there is a test and no validation is named. Validation images serve as test
    if nothing else does.

    Args:
        names: Values of a column, names of folders, or beginnings of file names.
        exact: Whether the whole name must be such a word; else one of its words is enough.

    Raises:
        SplitUnclear: If a word can be validation or test.
    """
    by_role: dict[str, list[str]] = {}
    unknown: list[str] = []
    for word in sorted(set(names)):
        role = role_of(word) if exact else role_in(word)
        if role is None:
            unknown.append(word)
        else:
            by_role.setdefault(role, []).append(word)
    held_out = by_role.pop("held out", [])
    if held_out and "test" in by_role:
        raise SplitUnclear(
            f"{held_out[0]!r} beside {by_role['test'][0]!r} can be validation images or more test "
            "images"
        )
    if held_out:
        by_role["test"] = held_out
    if "val" in by_role and "test" not in by_role:
        by_role["test"] = by_role.pop("val")
    splits: dict[Split, list[str]] = {split: by_role[split] for split in SPLITS if split in by_role}
    return SplitWords(splits, unknown)


def _ordered(splits: dict[Split, list[str]]) -> dict[Split, list[str]]:
    if "val" in splits and "test" not in splits:
        splits["test"] = splits.pop("val")
    return {split: splits[split] for split in SPLITS if split in splits}
