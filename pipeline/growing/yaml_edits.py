"""Edit hand-written YAML files: only the changed values are replaced, and comments stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from pipeline.config.yaml_files import compose_yaml, dump_yaml, parse_yaml
from workers.errors import UserError

LINE_WIDTH = 96  # maximum number of characters per line of a new list
Path = Sequence[str | int]  # keys of mappings and positions in lists, from the root of a file


class YamlText:
    r"""The text of a YAML file, edited value by value.

    `body` holds the parsed values. After each edit, the text is parsed again and compared with the
    expected values. So an edit cannot change anything else.

    Args:
        text: Content of a file. Its root is a mapping.
        where: Name of the file, for messages.

    Raises:
        UserError: If the text is not valid YAML. All edits raise it if the file is written in a way
            that they do not support.

    Example:
        >>> file = YamlText("tasks: [a]  # in order\n", "config.yaml")
        >>> file.append(["tasks"], "b")
        >>> file.text
        'tasks: [a, b]  # in order\n'
    """

    def __init__(self, text: str, where: str):
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.text = text if text.endswith("\n") or not text else text + self.newline
        self.where = where
        self.body = parse_yaml(self.text, where)

    def append(self, path: Path, value: Any) -> None:
        """Add a value at the end of a list."""
        self.extend(path, [value])

    def extend(self, path: Path, values: Sequence[Any]) -> None:
        """Add values at the end of a list."""
        node = self._find(path)
        if not isinstance(node, yaml.SequenceNode):
            raise self._refuse(path)
        expected = _copy(self.body)
        _get(expected, path).extend(values)
        if node.flow_style:
            self._add_in_brackets(node, [_flow(value) for value in values], expected)
            return
        indent = " " * node.start_mark.column
        items: list[str] = []
        for value in values:
            first, *rest = _block(value).splitlines()
            items += [f"{indent}- {first}", *(f"{indent}  {line}" for line in rest)]
        self._add_lines(node, items, expected)

    def divide(self, path: Path, values: Sequence[Any]) -> None:
        """Replace the list item at a path by one or more items."""
        *parents, index = path
        parent = self._find(parents)
        node = self._find(path)
        expected = _copy(self.body)
        _get(expected, parents)[index : int(index) + 1] = list(values)
        if not isinstance(parent, yaml.SequenceNode):
            raise self._refuse(path)
        text = ", ".join(map(_flow, values))
        if not parent.flow_style:
            indent = " " * parent.start_mark.column
            blocks = [_block(value).replace("\n", f"\n{indent}  ") for value in values]
            text = f"\n{indent}- ".join(blocks)
        self._replace(node.start_mark.index, _find_end(node), text, expected)

    def set(self, path: Path, value: Any) -> None:
        """Set the value of a mapping key or a list item. A key is added if it does not exist."""
        *parents, last = path
        parent = self._find(parents)
        expected = _copy(self.body)
        _get(expected, parents)[last] = value
        node = _child(parent, last)
        if node is not None:
            # `_find_end`, because PyYAML's end of a block collection is after later comments
            start, end = node.start_mark.index, _find_end(node)
            indent = " " * parent.start_mark.column
            text = _wrap_yaml(value).replace("\n", f"\n{indent}")
            if isinstance(node, yaml.CollectionNode) and not node.flow_style:
                start = self._after_key(parent, last)
                text = f" {text}"
            elif start == end:  # `key:` without a value
                text = f" {text}"
            self._replace(start, end, text, expected)
            return
        if not isinstance(parent, yaml.MappingNode):
            raise self._refuse(path)
        if parent.flow_style:
            self._add_in_brackets(parent, [f"{_flow(last)}: {_flow(value)}"], expected)
            return
        indent = " " * parent.start_mark.column
        lines = _block({last: value}).splitlines()
        self._add_lines(parent, [indent + line for line in lines], expected)

    def remove(self, path: Path) -> None:
        """Remove a mapping key or a list item, and the comment on the same line.

        If it is the only one, the collection is replaced by `{}` or `[]`.
        """
        *parents, last = path
        parent = self._find(parents)
        expected = _copy(self.body)
        del _get(expected, parents)[last]
        node = _child(parent, last)
        if node is None:
            raise self._refuse(path)
        first = _key_node(parent, last) if isinstance(parent, yaml.MappingNode) else node
        assert isinstance(parent, yaml.CollectionNode)
        if not _get(expected, parents):  # write the empty collection in brackets
            if not parents:
                raise self._refuse(path)
            self.set(parents, _get(expected, parents))
            return
        if parent.flow_style:
            self._remove_in_brackets(parent, first, node, expected)
            return
        start = self.text.rfind("\n", 0, first.start_mark.index) + 1
        before = self.text[start : first.start_mark.index]
        end = self._end_of_line(_find_end(node))
        if before.strip() == "-" and isinstance(parent, yaml.MappingNode):
            # the first key of a list item: the next key is moved to its place after the dash
            following = parent.value[1][0]
            start, end = first.start_mark.index, following.start_mark.index
        elif before.strip() not in ("", "-"):
            raise self._refuse(path)
        self._replace(start, end, "", expected)

    # ---- places in the text ----------------------------------------------------------------------
    def _find(self, path: Path) -> yaml.Node:
        node = compose_yaml(self.text)
        for part in path:
            child = _child(node, part) if node is not None else None
            if child is None:
                raise self._refuse(path)
            node = child
        assert node is not None
        return node

    def _after_key(self, parent: yaml.Node, key: str | int) -> int:
        """Return the index after `key:`, or the index after the dash of a list item."""
        if not isinstance(parent, yaml.MappingNode):
            child = _child(parent, key)
            assert child is not None
            return int(child.start_mark.index) - 1
        return self.text.index(":", _key_node(parent, key).end_mark.index) + 1

    def _end_of_line(self, index: int) -> int:
        """Return the index of the start of the line after the one that contains `index`."""
        # a block scalar ends after its last newline
        if index > 0 and self.text[index - 1] == "\n":
            return index
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end + 1

    def _add_lines(self, node: yaml.Node, lines: Sequence[str], expected: Any) -> None:
        place = self._end_of_line(_find_end(node))
        self._replace(place, place, "".join(f"{line}\n" for line in lines), expected)

    def _add_in_brackets(
        self, node: yaml.CollectionNode, items: Sequence[str], expected: Any
    ) -> None:
        """Add items before the closing bracket. Items that do not fit on a line are wrapped."""
        place = node.end_mark.index - 1
        if node.value:
            last = node.value[-1]
            place = _find_end(last[1] if isinstance(last, tuple) else last)
        indent = "\n" + " " * (node.start_mark.column + 1)
        column = place - self.text.rfind("\n", 0, place) - 1
        text = ""
        for item in items:
            space = "" if not text and not node.value else ", "
            if space and column + len(space) + len(item) > LINE_WIDTH and len(items) > 1:
                space, column = f",{indent}", len(indent) - 2
            text += space + item
            column += len(space) + len(item)
        self._replace(place, place, text, expected)

    def _remove_in_brackets(
        self, parent: yaml.CollectionNode, first: yaml.Node, last: yaml.Node, expected: Any
    ) -> None:
        """Remove an item between brackets, with its comma. Comments of other items stay.

        Args:
            parent: The list or mapping in brackets.
            first: First node of the item.
            last: Last node of the item.
            expected: Content of the file after the edit.
        """
        items = [item if isinstance(item, tuple) else (item, item) for item in parent.value]
        index = next(i for i, item in enumerate(items) if item[0] is first)
        if index + 1 < len(items):
            end = items[index + 1][0].start_mark.index
            self._replace(first.start_mark.index, end, "", expected)
            return
        start = _find_end(items[index - 1][1])
        between = self.text[start : first.start_mark.index].replace(",", "", 1)
        self._replace(start, _find_end(last), between if "#" in between else "", expected)

    def _replace(self, start: int, end: int, text: str, expected: Any) -> None:
        """Replace `self.text[start:end]`, if the file then has the expected content.

        Args:
            start: First index to replace.
            end: Index after the last one to replace.
            text: The replacement. Its line breaks are line feeds; those of the file replace them.
            expected: Content of the file after the edit.

        Raises:
            UserError: If the file would have another content. The text is not changed then.
        """
        changed = self.text[:start] + text.replace("\n", self.newline) + self.text[end:]
        try:
            body = parse_yaml(changed, self.where)
        except UserError:
            body = None
        if body != expected:
            raise UserError(
                f"{self.where}: this command cannot edit it as it is written, near line "
                f"{self.text.count(chr(10), 0, start) + 1}; write its lists with a line for each "
                "item, without anchors, and repeat the command"
            )
        self.text = changed
        self.body = body

    def _refuse(self, path: Path) -> UserError:
        return UserError(
            f"{self.where}: {'.'.join(map(str, path))} is not an editable value of this file; "
            "write it there, and repeat the command"
        )


def _child(node: yaml.Node, part: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value  # type: ignore[no-any-return]
    values = node.value if isinstance(node, yaml.SequenceNode) else []
    return values[part] if isinstance(part, int) and part < len(values) else None


def _key_node(node: yaml.MappingNode, part: str | int) -> yaml.Node:
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    return next(key for key, _ in pairs if key.value == str(part))


def _find_end(node: yaml.Node) -> int:
    """Return the index after the last character of a value."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _copy(body: Any) -> Any:
    """Return a deep copy. Values that aliases share are copied separately."""
    if isinstance(body, dict):
        return {key: _copy(value) for key, value in body.items()}
    return [_copy(value) for value in body] if isinstance(body, list) else body


def _get(body: Any, path: Path) -> Any:
    """Return the value at a path."""
    for part in path:
        body = body[part]
    return body


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump_yaml([value], default_flow_style=True, width=float("inf")).strip()
    return text[1:-1]


def _block(value: Any) -> str:
    """Return a value as YAML, with a line for each key of a mapping. Lists are in brackets."""
    if isinstance(value, dict) and value:
        lines = [f"{_flow(key)}: {_wrap_yaml(of_key)}" for key, of_key in value.items()]
        return "\n".join(lines)
    return _flow(value)


def _wrap_yaml(value: Any) -> str:
    """Return a value as YAML, collections in brackets. A long list is wrapped."""
    if not isinstance(value, list):
        return _flow(value)
    text = dump_yaml(value, default_flow_style=True, width=LINE_WIDTH - 8).strip()
    first, *rest = text.splitlines()
    return "\n".join([first, *(f"  {line.strip()}" for line in rest)])
