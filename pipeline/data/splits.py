"""Splits of a data set and the words for them in paths and columns.

A *role* is the part of a data set that a word names. For example, `training`, `trn` and
`entrenamiento` have the role train. A *flag column* marks the images of one split with yes or no,
for example `is_train`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal, NamedTuple

from pipeline.data.labels import normalize_label
from pipeline.data.names import words
from workers.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
SplitKey = Literal["train", "val", "test", "ignore"]  # a key of `source.splits`
IGNORE: SplitKey = "ignore"  # files and values under this key are not read
SPLIT_KEYS: tuple[SplitKey, ...] = ("train", "val", "test", IGNORE)
Role = Literal["train", "val", "test", "held out"]  # held out: validation or test

ROLES: dict[Role, frozenset[str]] = {
    "train": words(
        """train training trn tr trainval learn learning fit entrenamiento treino treinamento
        entrainement apprentissage addestramento 训练"""
    ),
    "val": words("""val valid validation validate dev devel development tune tuning validacion
        validacao validierung validazione 验证"""),
    "test": words("""test testing tst te ts tests prueba pruebas teste testes prova 测试"""),
    "held out": frozenset(["eval", "evaluation", "holdout", "heldout"]),
}
# words that often name a class or a language instead
WEAK_WORDS = words("""tr te ts fit learn learning tune tuning dev devel development prova""")
# names of split columns after `normalize_word`
SPLIT_COLUMNS = words("""split splits set subset fold folds partition phase usage dataset group""")
UNSURE_COLUMNS = frozenset(("group", "dataset"))  # split columns only if their values name splits
SPLIT_NAMES = words("split splits set subset fold folds partition")  # as a part of a column name
# neutral words next to a split word: train_images, train_set, test-public
GENERIC = words("""set sets data dataset image images img imgs pic pics photo photos picture
    pictures file files folder dir list lists split part full small large public private final all
    new old original raw input version v only 集""")
TRUE_WORDS = frozenset(("1", "true", "yes", "y", "t"))
FALSE_WORDS = frozenset(("0", "false", "no", "n", "f"))
# A word in a name: `Train`, `train`, `TRAIN`, a number, two Chinese characters, or the Chinese word
# for set.
TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[\u4e00-\u9fff]{2}|集")


_GENERIC_ENDINGS = sorted(GENERIC, key=len, reverse=True)  # the longest first
MAX_WEAK_LETTERS = 2  # words up to this length take no generic ending: `trset` is not `tr` + `set`


class SplitUnclear(UserError):
    """The splits of a data set are ambiguous or unknown."""


class SplitWords(NamedTuple):
    """Words and the splits that they name.

    Attributes:
        splits: Split -> its words, in the order of SPLITS.
        unknown: Words that name no split.
    """

    splits: dict[Split, list[str]]
    unknown: list[str]


def parse_role(word: str) -> Role | None:
    """Return the role that a whole word names, or None.

    For example, `train`, `Training`, `train_set` and `trainimages` have the role train.
    """
    plain = normalize_word(word)
    for role, named in ROLES.items():
        if plain in named:
            return role
    for end in _GENERIC_ENDINGS:
        rest = plain.removesuffix(end)
        if rest != plain and len(rest) > MAX_WEAK_LETTERS:
            for role, named in ROLES.items():
                if rest in named:
                    return role
    return None


def is_weak(word: str) -> bool:
    """Return whether a split word often means something else, for example `dev` or `learning`."""
    return normalize_word(word) in WEAK_WORDS


def normalize_word(text: str) -> str:
    """Return a name in lower case, without accents, spaces, `_`, `.` and `-`."""
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.sub(r"[\s_.\-]+", "", text.lower())


def find_role(name: str) -> Role | None:
    """Return the role of a name or of the words in it, or None if there are several roles.

    For example, `train`, `seg_train` and `TrainImages` have the role train.
    """
    roles = {parse_role(token) for token in tokenize_name(name)} - {None}
    return parse_role(name) or (roles.pop() if len(roles) == 1 else None)


def tokenize_name(name: str) -> list[str]:
    """Split a name into words: `seg_trainImages-01` into seg, train, Images and 01."""
    return TOKEN.findall(name)


def find_split_word(name: str) -> tuple[int, int]:
    """Return the start and end of the first word in a name that names a role.

    Raises:
        ValueError: If no word names a role.
    """
    for token in TOKEN.finditer(name):
        if parse_role(token[0]):
            return token.span()
    raise ValueError(f"{name!r} names no split")


def is_generic_split_name(name: str) -> bool:
    """Return whether a name consists of a split word, generic words and numbers.

    An example is `train_images_2`.
    """
    if parse_role(name):
        return True
    rest = [token.lower() for token in tokenize_name(name) if parse_role(token) is None]
    return find_role(name) is not None and all(t in GENERIC or t.isdecimal() for t in rest)


def remove_split_words(name: str) -> str:
    """Return a name in lower case without its split words: `cat_train` -> `cat`."""
    return " ".join(token.lower() for token in tokenize_name(name) if parse_role(token) is None)


def parse_flag_column(column: str) -> Role | None:
    """Return the role of a flag column, for example `is_train`, or None for other columns."""
    plain = normalize_word(column)
    rests = [plain.removeprefix(start) for start in ("is", "in") if plain.startswith(start)]
    return find_role(column) or (parse_role(rests[0]) if rests else None)


def is_flag_name(column: str) -> bool:
    """Return whether a column name has only split words, generic words, numbers, `is` and `in`.

    An example is `is_test_image`, but not `pcr_test`.
    """
    plain = normalize_word(column)
    if any(parse_role(plain.removeprefix(start)) for start in ("", "is", "in")):
        return True
    tokens = [token.lower() for token in tokenize_name(column)]
    rest = [token for token in tokens if not parse_role(token) and token not in ("is", "in")]
    return all(token in GENERIC or token.isdecimal() for token in rest)


def is_yes(value: str | None) -> bool:
    """Return whether a flag value means yes: 1, 1.0, true, ..."""
    return str(normalize_label(value)).lower() in TRUE_WORDS


def is_no(value: str | None) -> bool:
    """Return whether a flag value means no: 0, 0.0, false, ... A blank is neither yes nor no."""
    return str(normalize_label(value)).lower() in FALSE_WORDS


def parse_flag_values(role: Role, values: Iterable[str]) -> SplitWords | None:
    """Map the values of a flag column to splits: yes to its own split, no to the other one.

    The split of a validation or held-out flag becomes test.

    Args:
        role: The role that the flag marks, from `parse_flag_column`.
        values: The values of the column.

    Returns:
        The values of each split, or None if a value is neither yes nor no.
    """
    split_of_no: Split = "test" if role == "train" else "train"
    split_of_yes: Split = "test" if role == "held out" else role
    splits: dict[Split, list[str]] = {}
    for value in sorted(values):
        if is_yes(value):
            splits.setdefault(split_of_yes, []).append(value)
        elif is_no(value):
            splits.setdefault(split_of_no, []).append(value)
        else:
            return None
    return SplitWords(_order_splits(splits), [])


def parse_split_words(names: Iterable[str], exact: bool = True) -> SplitWords:
    """Map words to train, validation and test.

    A word for held-out images (`eval`, `holdout`) means test if no other word does. Without any
    test word, validation images become the test images.

    Args:
        names: The words: values of a column, names of folders, or beginnings of file names.
        exact: Whether the whole name must be a split word. Otherwise one of the words is enough.

    Raises:
        SplitUnclear: If a held-out word can mean validation or test, or if `trainval` and `train`
            both occur.
    """
    by_role: dict[str, list[str]] = {}
    unknown: list[str] = []
    for word in sorted(set(names)):
        role = parse_role(word) if exact else find_role(word)
        if role is None:
            unknown.append(word)
        else:
            by_role.setdefault(role, []).append(word)
    both = [word for word in by_role.get("train", ()) if normalize_word(word) == "trainval"]
    if both and len(by_role["train"]) > 1:
        others = [word for word in by_role["train"] if word not in both]
        raise SplitUnclear(
            f"{both[0]!r} beside {others[0]!r} can be the same images again, together with those "
            "of validation"
        )
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


def _order_splits(splits: dict[Split, list[str]]) -> dict[Split, list[str]]:
    """Sort splits in the order of SPLITS; val becomes test if there is no test."""
    if "val" in splits and "test" not in splits:
        splits["test"] = splits.pop("val")
    return {split: splits[split] for split in SPLITS if split in splits}
