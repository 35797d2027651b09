"""Read YAML files safely, with strict rules and size limits; apply `extends`, `--set`, `${NAME}`.

Scalars follow the core schema of YAML 1.2. Only true and false are booleans: `no`, `on` and `off`
are strings. 010 is ten, 0o10 is eight, 1e-3 is a number; 1:30, 1_000 and 2024-01-01 are strings. A
numeric or boolean setting also accepts a string with an unambiguous meaning: 1_000 is a
thousand, `yes` is true.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from workers.errors import UserError, did_you_mean
from workers.storage.regular_file import read_regular
from workers.storage.secrets import refuse_secrets

# limits of one file
MAX_TEXT = 16 << 20  # characters
MAX_VALUES = 200_000  # values; an alias counts as all values that it refers to
MAX_LEVELS = 50  # levels of nesting
MAX_FILES = 100  # files of a config; a file counts each time that it is extended
LONGEST_UTF8 = 4  # maximal bytes of a character
# Mutually exclusive settings: setting one in a file or with `--set` removes the other.
ALTERNATIVES = {"seed": "seeds", "seeds": "seed"}
# In a checkout, configs and cards are next to the packages; in a wheel, they are in `pipeline`.
PACKAGE = Path(__file__).resolve().parents[1]
IS_CHECKOUT = not (PACKAGE / "configs").is_dir()
CONFIGS = PACKAGE.parent / "configs" if IS_CHECKOUT else PACKAGE / "configs"
CARDS = PACKAGE.parent / "datasets" if IS_CHECKOUT else PACKAGE / "cards"
STREAMS = CONFIGS / "streams"
METHODS = CONFIGS / "methods"
# Keys of METHODS/NAME.yaml in addition to those of a config.
RECOMMENDED = "recommended"  # stream -> recommended settings of the method
SEARCH = "search"  # a search; its keys are relative to `methods.NAME`
TAG = "tag:yaml.org,2002:"  # prefix of YAML's standard tags
UNENCODABLE = re.compile("[\0\ud800-\udfff]")  # NUL and lone surrogates


class ScalarKind(NamedTuple):
    """A kind of scalar other than a string.

    Attributes:
        pattern: Regular expression of its plain (unquoted) texts.
        first: Possible first characters, by which PyYAML finds the pattern; "" for the empty text.
    """

    pattern: str
    first: list[str]


SCALARS = {
    "null": ScalarKind(r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": ScalarKind(r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": ScalarKind(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": ScalarKind(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "merge": ScalarKind(r"<<", ["<"]),
}
INT_BASES = {"0o": 8, "0x": 16}  # prefix -> base


class _PlainYamlLoader(yaml.SafeLoader):
    """YAML loader that creates only plain values, and rejects a key that occurs twice.

    Files are not trusted. A file with too many values, counted with all aliases expanded, or too
    many levels is rejected before its values are created.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.values = 0  # number of values so far, with aliases expanded
        self.level = 0
        self.anchor_sizes: dict[str, int] = {}  # anchor -> number of values in its node

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        anchor: Any = getattr(event, "anchor", None)
        is_alias = isinstance(event, yaml.AliasEvent)
        values_before = self.values
        if is_alias:
            if anchor in self.anchors and anchor not in self.anchor_sizes:
                raise yaml.MarkedYAMLError(
                    problem=f"alias {anchor!r:.80} refers to a value that contains it",
                    problem_mark=event.start_mark,
                )
            self.values += self.anchor_sizes.get(anchor, 1)
        else:
            self.values += 1
        self.level += 1
        self._check_limits(event)
        node = super().compose_node(parent, index)
        self.level -= 1
        if anchor and not is_alias:
            self.anchor_sizes[anchor] = self.values - values_before
        return node

    def _check_limits(self, event: Any) -> None:
        if self.values > MAX_VALUES:
            problem = f"more than {MAX_VALUES} values, each alias counted in full"
        elif self.level > MAX_LEVELS:
            problem = f"more than {MAX_LEVELS} levels"
        else:
            return
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            self._refuse_repeated_keys(node)
        return super().construct_mapping(node, deep)

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        keys = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == TAG + "merge":
                continue
            key = self.construct_object(key_node)
            if key in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} occurs twice",
                    problem_mark=key_node.start_mark,
                )
            keys.add(key)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if UNENCODABLE.search(text):
            raise yaml.MarkedYAMLError(
                problem=f"text {text!r:.80} has a character that no file can be named with",
                problem_mark=node.start_mark,
            )
        return text

    def construct_plain_scalar(self, node: Any) -> Any:
        """Return a null, a boolean or a number.

        The pattern is checked here too, because an explicit tag (`!!int x`) can claim a type.
        """
        kind = node.tag.removeprefix(TAG)
        text = self.construct_scalar(node)
        if not re.fullmatch(SCALARS[kind].pattern, text):
            raise yaml.MarkedYAMLError(
                problem=f"{text!r:.80} is not a valid {kind}", problem_mark=node.start_mark
            )
        match kind:
            case "int":
                return int(text, INT_BASES.get(text[:2], 10))
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "bool":
                return text.lower() == "true"
        return None


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes a string if YAML 1.1 or 1.2 would read it as another type."""


# The loader loses PyYAML's rules of YAML 1.1 (`no` is false, 010 is eight), and its constructors of
# other types. The loop below adds the rules of SCALARS. The dumper keeps the rules of YAML 1.1 too,
# so that it quotes each string that either version would misread.
_PlainYamlLoader.yaml_implicit_resolvers = {}
_PlainYamlLoader.yaml_constructors = {
    TAG + "str": yaml.SafeLoader.yaml_constructors[TAG + "str"],
    TAG + "seq": yaml.SafeLoader.yaml_constructors[TAG + "seq"],
    TAG + "map": yaml.SafeLoader.yaml_constructors[TAG + "map"],
    None: yaml.SafeLoader.yaml_constructors[None],
}
for _name, _scalar in SCALARS.items():
    for _class in (_PlainYamlLoader, _Dumper):
        _pattern = re.compile(rf"(?:{_scalar.pattern})\Z")
        _class.add_implicit_resolver(TAG + _name, _pattern, _scalar.first)
    if _name != "merge":
        _PlainYamlLoader.add_constructor(TAG + _name, _PlainYamlLoader.construct_plain_scalar)


def read_yaml(file: Path, kind: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Args:
        file: Path of the file.
        kind: Description of the file in errors, for example `a config`.

    Raises:
        UserError: If the file cannot be read, is not a mapping, or contains a secret.
    """
    body = parse_yaml(_read_yaml_text(file, kind), str(file))
    if not isinstance(body, dict):
        raise UserError(
            f"{file}: {kind} is a mapping of keys to values, this is {body!r:.40}; fix the file"
        )
    refuse_secrets(body, f"{file}: ")
    return body


def _read_yaml_text(file: Path, kind: str) -> str:
    try:
        text = read_regular(file, LONGEST_UTF8 * MAX_TEXT).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8"
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise UserError(
            f"{file}: not readable as text ({reason}); give the path of a .yaml file"
        ) from None
    if len(text) > MAX_TEXT:
        raise UserError(
            f"{file}: longer than {MAX_TEXT} characters, too long for {kind}; fix the file"
        )
    return text


def parse_yaml(text: str, where: str) -> Any:
    """Return the plain values of a YAML text.

    Args:
        text: The text.
        where: Name of the source, for errors.

    Raises:
        UserError: If the text is not valid YAML.
    """
    try:
        return yaml.load(text, _PlainYamlLoader)  # safe: a subclass of SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            where += f", line {mark.line + 1}, column {mark.column + 1}"
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UserError(
            f"{where}: not readable as YAML ({reason}); fix its brackets, quotes or indentation"
        ) from None
    except (ValueError, TypeError) as error:
        # for example a number with thousands of digits
        raise UserError(
            f"{where}: not readable as YAML ({error}); write the value in quotes, or fix it"
        ) from None


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text, or None for an empty text.

    A node has its line and column in the text, for edits that keep the rest of a file.

    Raises:
        yaml.YAMLError: If the text is not valid YAML.
    """
    node: yaml.Node | None = yaml.compose(text, _PlainYamlLoader)
    return node


def dump_yaml(value: Any, **options: Any) -> str:
    """Return plain values as YAML that `parse_yaml` reads back unchanged.

    Args:
        value: The values.
        **options: Options of PyYAML's `dump`.
    """
    options = {"sort_keys": False, "allow_unicode": True, **options}
    return str(yaml.dump(value, Dumper=_Dumper, **options))


def find_config(path: str) -> Path:
    """Return the file of a config.

    Args:
        path: Path of the config. If `configs/...` does not exist in the current folder, the file
            shipped with Accrete is used, and its path is printed.
    """
    file = Path(path)
    shipped = find_shipped(file)
    if file.exists() or not shipped.exists():
        return file
    _notify_once(f"{path} is the one that comes with Accrete, {shipped}")
    return shipped


def find_shipped(file: Path) -> Path:
    """Return the path of the shipped config for a path `configs/...`. The file need not exist.

    Any other path is returned unchanged.
    """
    if file.parts[:1] != ("configs",) or ".." in file.parts:
        return file
    return CONFIGS.joinpath(*file.parts[1:])


def find_base(folder: Path, name: str) -> Path:
    """Return the path of the config `name`, relative to `folder`. It need not exist.

    If `configs/...` does not exist in `folder`, the file shipped with Accrete is used, and
    its path is printed.
    """
    file = folder / name
    shipped = find_shipped(Path(name))
    if file.exists() or not shipped.exists():
        return file
    _notify_once(f"{name} is the one that comes with Accrete, {shipped}")
    return shipped


@functools.cache
def _notify_once(text: str) -> None:
    from workers.storage import filesystem  # lazy import: loads pyarrow

    filesystem.notify(text)


def read_with_bases(file: Path) -> dict[str, Any]:
    """Return the values of a config, merged over the files that it `extends` (its bases).

    `extends` is a path or a list of paths, relative to the folder of the file, or `configs/...` for
    files shipped with Accrete. Later bases override earlier ones, and the file overrides its bases.

    Raises:
        UserError: If a file extends itself or a missing file, or there are too many files.
    """
    return _read_over_bases(file, (), [])


def _read_over_bases(
    file: Path, extending: tuple[Path, ...], files_read: list[Path]
) -> dict[str, Any]:
    """Return the values of `file` merged over its bases, and append all files to `files_read`.

    Args:
        file: The file.
        extending: Chain of `extends` that leads to this file, the outermost file first.
        files_read: All files read so far.
    """
    files_read.append(file)
    if len(files_read) > MAX_FILES:
        raise UserError(
            f"{files_read[0]}: extends more than {MAX_FILES} files, "
            "each counted as often as it is extended; take some out"
        )
    return _merge_over_bases(read_yaml(file, "a config"), file, extending, files_read)


def read_mapping_with_bases(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of a config given as a mapping, merged over the files that it extends.

    Args:
        values: The mapping. Its paths are relative to the current folder.
        name: Name of the mapping in errors.

    Raises:
        UserError: If the mapping has a secret, or a value that a file cannot contain; and in the
            cases of `read_with_bases`.
    """
    body = to_plain_values(values)
    refuse_secrets(body, f"{name}: ")
    return _merge_over_bases(body, Path(name), (), [])


def to_plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a mapping to plain values. Raise `UserError` if a file cannot contain a value."""
    return {str(key): json.loads(_json_text(str(key), value)) for key, value in values.items()}


def _merge_over_bases(
    body: dict[str, Any], file: Path, extending: tuple[Path, ...], files_read: list[Path]
) -> dict[str, Any]:
    """Return the values `body` of `file` merged over its bases; see `_read_over_bases`.

    Methods that `body` gives by name get their recommended settings for the stream. `body` is
    changed.
    """
    _find_cards(body, file.parent)
    bases = body.pop("extends", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            f"{file}: extends is {bases!r:.80}, "
            "it must be the name of a config file or a list of such; change it"
        )
    chain = (*extending, file)
    resolved_chain = [path.resolve() for path in chain]
    merged: dict[str, Any] = {}
    for base in bases:
        base_path = find_base(file.parent, base)
        if not base_path.exists():
            raise UserError(
                f"{file}: extends {base!r}, which does not exist beside it; fix the path"
            )
        if base_path.resolve() in resolved_chain:
            raise UserError(
                f"{file}: extends {base!r}, which extends this file in turn; "
                "take one of the two out"
            )
        merged = merge_files(merged, _read_over_bases(base_path, chain, files_read))
    if file.resolve().parent == METHODS:
        body = {key: value for key, value in body.items() if key not in (RECOMMENDED, SEARCH)}
    stream = find_stream(file, bases)
    return merge_files(merge_files(merged, take_named_methods(body, stream, str(file))), body)


# ---- methods that are given by their name only ------------------------------------------------
def find_stream(file: Path, bases: Sequence[str] | None = None) -> str:
    """Return the name of the stream of a config: the file in configs/streams that it is or extends.

    Args:
        file: Path of the config.
        bases: Names of the files that the config extends; only the last one is followed. None:
            read them from the file.

    Returns:
        The name without its extension, or "" if the config has no such file.
    """
    if file.resolve().parent == STREAMS:
        return file.stem
    if bases is None:
        extends = read_yaml(file, "a config").get("extends", [])
        bases = [extends] if isinstance(extends, str) else extends
    return find_stream(find_base(file.parent, bases[-1])) if bases else ""


def take_named_methods(body: dict[str, Any], stream: str, where: str) -> dict[str, Any]:
    """Remove `methods: [NAME, ...]` from a config, and return their recommended settings.

    Args:
        body: Values of a config. If `methods` is a name or a list of names, the key is removed.
        stream: Name of the stream, see `find_stream`.
        where: Name of the config in errors.

    Returns:
        `methods` with the settings of each name, and `backbone` if the only method is recommended
        with another one. {} if `methods` is not a name or a list.

    Raises:
        UserError: If a name occurs twice, or several methods need different backbones.
    """
    names = body.get("methods")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        return {}
    del body["methods"]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UserError(f"{where}: methods names {repeated[0]!r:.60} twice; name it once")
    taken: dict[str, Any] = {"methods": {}}
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise UserError(
                f"{where}: methods names {name!r:.60}, and no method is called so; "
                "`accrete methods` lists them"
            )
        settings = read_recommended(name).get(stream, {})
        backbone = settings.pop("backbone", None)
        if backbone is not None and len(names) > 1:
            raise UserError(
                f"{where}: method {name!r} is recommended with another backbone on the stream "
                f"{stream!r} ({json.dumps(backbone)}), and the methods of a run share one; run it "
                f"alone, or write its settings below `methods`"
            )
        if backbone is not None:
            taken["backbone"] = backbone
        taken["methods"][name] = settings
    return taken


def read_recommended(method: str) -> dict[str, dict[str, Any]]:
    """Read the recommended settings of a method: stream -> settings; {} if there are none."""
    by_stream = _read_method_file(method).get(RECOMMENDED) or {}
    return {stream: dict(settings or {}) for stream, settings in by_stream.items()}


def read_search(method: str) -> dict[str, Any]:
    """Read the search of a method's settings; {} if its file has none.

    The keys of `space` in the file are relative to `methods.NAME`. They are returned in full.
    """
    search = dict(_read_method_file(method).get(SEARCH) or {})
    space: dict[str, Any] = {}
    for key, dimension in search.get("space", {}).items():
        conditions = dimension.get("when", {})
        if conditions:
            when = {f"methods.{method}.{other}": value for other, value in conditions.items()}
            dimension = {**dimension, "when": when}
        space[f"methods.{method}.{key}"] = dimension
    return {**search, "space": space} if space else {}


def _read_method_file(method: str) -> dict[str, Any]:
    file = METHODS / f"{method}.yaml"
    return read_yaml(file, "the config of a method") if file.exists() else {}


def _find_cards(body: dict[str, Any], folder: Path) -> None:
    """Resolve the cards in a config's stream relative to `folder`, the folder of the file.

    A path that does not exist relative to this folder stays unchanged.
    """
    stream = body.get("stream")
    tasks = stream.get("tasks") if isinstance(stream, dict) else None
    if not isinstance(tasks, list):
        return
    for index, entry in enumerate(tasks):
        card = entry.get("card") if isinstance(entry, dict) else entry
        if not isinstance(card, str) or not is_path_of_card(card):
            continue
        path = os.path.normpath(folder / card)
        if not os.path.exists(path):
            continue
        if not is_path_of_card(path):  # a folder in the current folder looks like a name
            path = os.path.join(".", path)
        if isinstance(entry, dict):
            entry["card"] = path
        else:
            tasks[index] = path


def is_path_of_card(card: str) -> bool:
    """Return whether a text is the path of a card's file or folder, and not the name of a card."""
    return "/" in card or card.endswith((".yaml", ".yml"))


def merge_files(base: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of a config over its base's values, like `merge`.

    `seeds` in the config removes `seed` of the base, and vice versa.
    """
    replaced = {other for key, other in ALTERNATIVES.items() if key in body}
    remaining = {key: value for key, value in base.items() if key not in replaced}
    return merge(remaining, body)


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `overrides` merged over `base`: mappings are merged, other values are replaced.

    An override None, which is an empty value in YAML, does not change a mapping.
    """
    merged = dict(base)
    for key, value in overrides.items():
        base_value = base.get(key)
        if isinstance(base_value, dict) and isinstance(value, (dict, type(None))):
            merged[key] = merge(base_value, value or {})
        else:
            merged[key] = value
    return merged


def apply_override(body: dict[str, Any], override: str) -> None:
    """Apply an override `a.b.0.c=value` to nested plain values, in place.

    Raises:
        UserError: If the override has another form, or its path does not fit the values.
    """
    path, value = parse_override(override)
    body.pop(ALTERNATIVES.get(path, ""), None)
    put(body, path, value, f"--set {override!r:.200}")


def parse_override(override: str) -> tuple[str, Any]:
    """Split `a.b.0.c=value` into the dotted path and the value, which is parsed as YAML.

    Raises:
        UserError: If the text does not have this form.
    """
    path, equals_sign, text = override.partition("=")
    where = f"--set {override!r:.200}"
    if not equals_sign or not path:
        raise UserError(
            f"{where} is not of the form key=value; write for example --set train.epochs=3"
        )
    if any("\ud800" <= sign <= "\udfff" for sign in override):  # undecodable bytes
        raise UserError(
            f"{where} has letters that the locale of this shell does not know; set LC_ALL=C.UTF-8"
        )
    return path, parse_yaml(text, where)


def format_override(path: str, value: Any) -> str:
    """Return `a.b.0.c=value`, the inverse of `parse_override`.

    Args:
        path: The dotted path.
        value: A plain value; paths and NumPy numbers are accepted too.

    Raises:
        UserError: If the value has another type.
    """
    return f"{path}={_json_text(path, value)}"


def _json_text(path: str, value: Any) -> str:
    """Return a plain value as JSON. `path` is its path in a config, for errors."""
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is {value!r:.80}, which a config cannot hold ({error}); give numbers, texts, "
            "booleans, None, or lists and mappings of them"
        ) from None


def _plain(value: Any) -> Any:
    """Convert a path to a string, a mapping to a dict, and a NumPy number to a Python number.

    Raise TypeError for another type.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"it has a {type(value).__name__}")


def put(body: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set the value at a dotted path in nested plain values. Missing mappings are created.

    Args:
        body: The values, which are changed.
        path: The path.
        value: The new value.
        where: Name of the override in errors.

    Raises:
        UserError: If a part of the path is a value without keys, or not an index of a list.
    """
    *parents, last = path.split(".")
    node: Any = body
    for part in parents:
        if isinstance(node, list):
            node = node[_parse_position(node, part, where)]
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if not isinstance(node, (dict, list)):
            raise UserError(
                f"{where}: {part!r:.60} holds the value {node!r:.80} and has no keys below it; "
                "check the path"
            )
    if isinstance(node, list):
        node[_parse_position(node, last, where)] = value
    else:
        node[last] = value


def _parse_position(values: list[Any], part: str, where: str) -> int:
    """Parse a part of a path as a list index. Raise `UserError` if the index is invalid."""
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(values):
        raise UserError(
            f"{where}: {part!r:.60} is not a position in a list of {len(values)}; count from 0"
        )
    return int(part)


VARIABLE = re.compile(r"\$\{([^}]+)\}")  # ${NAME} and ${NAME:-default}


def expand(text: str) -> str:
    """Replace ${NAME} and ${NAME:-default} by the values of environment variables.

    An empty variable or default counts as missing.

    Raises:
        UserError: If a variable is not set and has no default, or the result contains a secret.
    """

    def replacement(match: re.Match[str]) -> str:
        name, _, default = match.group(1).partition(":-")
        value = os.environ.get(name) or default
        if not value:
            raise UserError(
                f"{text!r} needs the environment variable {name}, which is not set; "
                "export it or write the path out"
            )
        return value

    expanded = VARIABLE.sub(replacement, text)
    refuse_secrets(expanded, f"what {text!r} stands for")
    return expanded


def describe_variables(text: str) -> str:
    """Return the start of the remedy for a missing path that contains a variable.

    It ends with "or ", for another remedy to follow. It is "" if the path has no variable.
    """
    parts = [name.partition(":-") for name in VARIABLE.findall(text)]
    if not parts:
        return ""
    name, _, default = parts[0]
    value = os.environ.get(name) or default
    state = "it is" if os.environ.get(name) else "it is not set, and its default is"
    return f"set the environment variable {name} to the right folder ({state} {value!r:.200}), or "


def suggest_file(file: Path) -> str:
    """Return the remedy for a missing YAML file: a similar name in its folder, if there is one."""
    names = [sibling.name for sibling in file.parent.glob("*.yaml")]
    return did_you_mean(file.name, names, "give the path of a .yaml file", str(file.parent))


def absolute(uri: str) -> str:
    """Return a path as an absolute path, and a URI unchanged.

    Raises:
        UserError: If the URI contains a secret.
    """
    refuse_secrets(uri)
    if "://" in uri:
        return uri
    return os.path.abspath(uri)
