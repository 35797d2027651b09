"""YAML files as plain values: safe, strict and bounded; what a file extends, what `--set` changes,
what `${NAME}` stands for.

A word means what the core schema of YAML 1.2 says: true and false alone are booleans, so that `no`,
`on` and `off` are text; 010 is ten and 0o10 is eight; 1e-3 is a number; 1:30, 1_000 and 2024-01-01
are text. A setting that is a number or a switch also takes a text that can only mean one: 1_000 is
a thousand, `yes` is true.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from workers.errors import UserError
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

# of a file: characters, values with each alias counted in full, nesting
MOST_TEXT, MOST_VALUES, MOST_LEVELS = (
    16 << 20,
    200_000,
    50,
)
MOST_FILES = 100  # that a config consists of, each counted as often as it is extended
TAG = "tag:yaml.org,2002:"
CORE = {  # the words of each kind of value, and what they may begin with
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


class _Loader(yaml.SafeLoader):
    """Safe YAML of plain values alone, in which a key that stands twice is an error. A file may
    come from a stranger: what it says once and means a billion times by aliases, or nests without
    end, is refused before it is made."""

    def __init__(self, text: str):
        super().__init__(text)
        self.values, self.levels, self.sizes = 0, 0, dict[str, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        alias, name, before = (
            isinstance(event, yaml.AliasEvent),
            getattr(event, "anchor", None),
            self.values,
        )
        place: Any = event.start_mark
        if alias and name in self.anchors and name not in self.sizes:
            raise yaml.MarkedYAMLError(
                problem=f"alias {name!r:.80} stands inside what it stands for", problem_mark=place
            )
        self.values += self.sizes.get(name or "", 1) if alias else 1
        self.levels += 1
        if self.values > MOST_VALUES or self.levels > MOST_LEVELS:
            said = (
                f"more than {MOST_VALUES} values, each alias counted in full"
                if self.values > MOST_VALUES
                else f"more than {MOST_LEVELS} levels"
            )
            raise yaml.MarkedYAMLError(problem=said, problem_mark=place)
        node = super().compose_node(parent, index)
        self.levels -= 1
        if name and not alias:
            self.sizes[name] = self.values - before
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != TAG + "merge":
                key = self.construct_object(key_node)
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key_node.value!r} stands twice",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if "\0" in text or (
            not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
        ):
            raise yaml.MarkedYAMLError(
                problem=f"text {text!r:.80} has a character that no file can be named with",
                problem_mark=node.start_mark,
            )
        return text

    def construct_core(self, node: Any) -> Any:
        """A null, a boolean or a number, also where a tag asks for it."""
        kind, text = node.tag.removeprefix(TAG), self.construct_scalar(node)
        if not re.fullmatch(CORE[kind][0], text):
            raise yaml.MarkedYAMLError(
                problem=f"{text!r:.80} is no {kind}", problem_mark=node.start_mark
            )
        if kind == "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return text.lower() == "true" if kind == "bool" else None


class _Dumper(yaml.SafeDumper):
    """Writes in quotes what either version of YAML would read as something else than text."""


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    TAG + "str": yaml.SafeLoader.yaml_constructors[TAG + "str"],
    TAG + "seq": yaml.SafeLoader.yaml_constructors[TAG + "seq"],
    TAG + "map": yaml.SafeLoader.yaml_constructors[TAG + "map"],
    None: yaml.SafeLoader.yaml_constructors[None],
}
for _kind, (_words, _first) in CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            TAG + _kind,
            re.compile(rf"(?:{_words})\Z"),
            [*_first, *([""] if _kind == "null" else [])],
        )
    if _kind != "merge":
        _Loader.add_constructor(TAG + _kind, _Loader.construct_core)


def read_yaml(file: Path, kind: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError where it is none."""
    try:
        text = read_regular(file, 4 * MOST_TEXT).decode()
        if len(text) > MOST_TEXT:
            raise UserError(
                f"{file}: longer than {MOST_TEXT} characters, too long for {kind}; mend the file"
            )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UserError(
            f"{file}: not readable as text ({reason}); give the path of a .yaml file"
        ) from None
    body = parse_yaml(text, str(file))
    if not isinstance(body, dict):
        raise UserError(
            f"{file}: {kind} is a mapping of keys to values, this is {body!r:.40}; mend the file"
        )
    refuse_secrets(body, f"{file}: ")
    return body


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a subclass of SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UserError(
            f"{where}{place}: not readable as YAML ({reason}); mend its brackets, quotes or "
            "indentation"
        ) from None
    except (
        ValueError,
        TypeError,
    ) as error:  # a date in month 13, a number of thousands of digits, `!!set` on a list
        raise UserError(
            f"{where}: not readable as YAML ({error}); write the value in quotes, or mend it"
        ) from None


def dump_yaml(value: Any, **options: Any) -> str:
    """Plain values as YAML that `parse_yaml` reads back as they are. options: of PyYAML's
    `dump`."""
    return str(
        yaml.dump(value, Dumper=_Dumper, **{"sort_keys": False, "allow_unicode": True, **options})
    )


def read_with_bases(file: Path) -> dict[str, Any]:
    """A config's values over those of the files that it `extends` (one or a list, relative to its
    own folder, later ones first), by `merge`. Raises UserError where a file extends itself or one
    that is not there, or where there are too many."""
    return _read_over_bases(file, (), [])


def _read_over_bases(file: Path, above: tuple[Path, ...], files: list[Path]) -> dict[str, Any]:
    """above: the files that extend this one, the first first. files: all that were read before, in
    order."""
    files.append(file)
    if len(files) > MOST_FILES:
        raise UserError(
            f"{files[0]}: extends more than {MOST_FILES} files, each counted as often as it is "
            "extended; take some out"
        )
    body = read_yaml(file, "a config")
    bases = body.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            f"{file}: extends is {bases!r:.80}, it must be the name of a config file or a list "
            "of such; change it"
        )
    merged: dict[str, Any] = {}
    for base in bases:
        path = file.parent / base
        if not path.exists():
            raise UserError(
                f"{file}: extends {base!r}, which does not exist beside it; mend the path"
            )
        if path.resolve() in [p.resolve() for p in (*above, file)]:
            raise UserError(
                f"{file}: extends {base!r}, which extends this file in turn; take one of the "
                "two out"
            )
        merged = merge(merged, _read_over_bases(path, (*above, file), files))
    return merge(merged, body)


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings merge, anything else replaces."""
    both = {
        k: merge(below[k] or {}, v or {})
        for k, v in above.items()
        if isinstance(below.get(k), dict) and isinstance(v, (dict, type(None)))
    }
    return {**below, **above, **both}


def apply_override(body: dict[str, Any], override: str) -> None:
    """`a.b.0.c=value` into nested YAML values; the value is read as YAML."""
    path, value = parse_override(override)
    put(body, path, value, f"--set {override!r:.200}")


def parse_override(override: str) -> tuple[str, Any]:
    """`a.b.0.c=value` -> its dotted path, and the value read as YAML. Raises UserError."""
    path, sign, text = override.partition("=")
    where = f"--set {override!r:.200}"
    if not sign or not path:
        raise UserError(
            f"{where} is not of the form key=value; write for example --set train.epochs=3"
        )
    return path, parse_yaml(text, where)


def put(body: dict[str, Any], path: str, value: Any, where: str) -> None:
    """`value` at the dotted `path` in nested plain values. Raises UserError where the path goes
    through a value."""
    *parents, last = path.split(".")
    here: Any = body
    for part in parents:
        if isinstance(here, list):
            here = _item(here, part, where)
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, (dict, list)):
            raise UserError(
                f"{where}: {part!r:.60} holds the value {here!r:.80} and has no keys below it; "
                "check the path"
            )
    if isinstance(here, list):
        _item(here, last, where)
        here[int(last)] = value
    else:
        here[last] = value


def _item(values: list[Any], part: str, where: str) -> Any:
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(values):
        raise UserError(
            f"{where}: {part!r:.60} is not a position in a list of {len(values)}; count from 0"
        )
    return values[int(part)]


def expand(text: str) -> str:
    """Replaces ${NAME} and ${NAME:-default} from the environment."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match.group(1).partition(":-")
        found = os.environ.get(name) or default
        if not found:
            raise UserError(
                f"{text!r} needs the environment variable {name}, which is not set; export it "
                "or write the path out"
            )
        return found

    expanded = re.sub(r"\$\{([^}]+)\}", value, text)
    refuse_secrets(expanded, f"what {text!r} stands for")
    return expanded


def absolute(uri: str) -> str:
    """Raises UserError where it is a URI with a secret in it."""
    refuse_secrets(uri)
    return uri if "://" in uri else os.path.abspath(uri)
