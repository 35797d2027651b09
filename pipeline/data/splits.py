"""Splits of a data set, and the words that people use for them."""

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
Part = Literal["train", "val", "test", "ignore"]  # a key of `source.splits`
IGNORE: Part = "ignore"  # what it names is not read
PARTS: tuple[Part, ...] = ("train", "val", "test", IGNORE)
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
# Words that are as likely the name of a class or a language.
WEAK_WORDS = words("""tr te ts fit learn learning tune tuning dev devel development prova""")
SPLIT_COLUMNS = words("""split splits set subset fold folds partition phase usage dataset group""")
UNSURE_COLUMNS = frozenset(("group", "dataset"))  # splits only if their values say so
SPLIT_NAMES = words("split splits set subset fold folds partition")  # as a part of a column's name
# what may stand beside the word of a split and says nothing: train_images, 1_train, test-public
GENERIC = words("""set sets data dataset image images img imgs pic pics photo photos picture
    pictures file files folder dir list lists split part full small large public private final all
    new old original raw input version v only 集""")
TRUE_WORDS = frozenset(("1", "true", "yes", "y", "t"))
FALSE_WORDS = frozenset(("0", "false", "no", "n", "f"))
TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[\u4e00-\u9fff]{2}|集")


_GENERIC_ENDINGS = sorted(GENERIC, key=len, reverse=True)
MAX_WEAK_LETTERS = 2  # letters of a word that may not have such an end


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


def parse_role(word: str) -> Role | None:
    """Return which part of a data set a word names; None if it names none.

    For example `train` for `train`, `Training`, `train_set` and `trainimages`.
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
    """Whether a word for a split is as likely something else."""
    return normalize_word(word) in WEAK_WORDS


def normalize_word(text: str) -> str:
    """Return a name in lower case, without accents and the signs between its words."""
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.sub(r"[\s_.\-]+", "", text.lower())


def find_role(name: str) -> Role | None:
    """Return the part of a data set that a name, or the only such word in it, names.

    For example `train` for `train`, `seg_train` and `TrainImages`.
    """
    roles = {parse_role(token) for token in tokenize_name(name)} - {None}
    return parse_role(name) or (roles.pop() if len(roles) == 1 else None)


def tokenize_name(name: str) -> list[str]:
    """Return the words of a name: `seg_trainImages-01` has seg, train, Images and 01."""
    return TOKEN.findall(name)


def is_generic_split_name(name: str) -> bool:
    """Whether a name holds a word for a split, and else words that say nothing and numbers."""
    if parse_role(name):
        return True
    rest = [token.lower() for token in tokenize_name(name) if parse_role(token) is None]
    return find_role(name) is not None and all(t in GENERIC or t.isdecimal() for t in rest)


def remove_split_words(name: str) -> str:
    """Return a name without the words that name a split."""
    return " ".join(token.lower() for token in tokenize_name(name) if parse_role(token) is None)


def parse_flag_column(column: str) -> Role | None:
    """Return the part that a column such as `is_train` marks; None if it is no such column."""
    plain = normalize_word(column)
    return find_role(column) or next(
        (
            parse_role(plain.removeprefix(start))
            for start in ("is", "in")
            if plain.startswith(start)
        ),
        None,
    )


def is_yes(value: str | None) -> bool:
    """Whether a value of a flag means yes: 1, 1.0, true, ..."""
    return str(normalize_label(value)).lower() in TRUE_WORDS


def is_no(value: str | None) -> bool:
    """Whether a value of a flag means no: 0, 0.0, false, ...; a blank means neither."""
    return str(normalize_label(value)).lower() in FALSE_WORDS


def parse_flag_values(role: Role, values: Iterable[str]) -> SplitWords | None:
    """Return what the values of a flag mean: 1 its own part, 0 the other.

    Args:
        role: The part that the flag marks, as `parse_flag_column` returns it.
        values: The values of the column.

    Returns:
        None if a value is neither yes nor no.
    """
    other: Split = "test" if role == "train" else "train"
    own: Split = "test" if role == "held out" else role
    splits: dict[Split, list[str]] = {}
    for value in sorted(values):
        if is_yes(value):
            splits.setdefault(own, []).append(value)
        elif is_no(value):
            splits.setdefault(other, []).append(value)
        else:
            return None
    return SplitWords(_order_splits(splits), [])


def parse_split_words(names: Iterable[str], exact: bool = True) -> SplitWords:
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
        role = parse_role(word) if exact else find_role(word)
        if role is None:
            unknown.append(word)
        else:
            by_role.setdefault(role, []).append(word)
    both = [word for word in by_role.get("train", ()) if normalize_word(word) == "trainval"]
    if both and len(by_role["train"]) > 1:
        others = [word for word in by_role["train"] if word not in both]
        raise SplitUnclear(
            f"{both[0]!r} beside {others[0]!r} can be the same images once more, with those of "
            "validation"
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
    if "val" in splits and "test" not in splits:
        splits["test"] = splits.pop("val")
    return {split: splits[split] for split in SPLITS if split in splits}
