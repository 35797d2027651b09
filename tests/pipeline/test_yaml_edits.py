"""Tests of YAML edits: one value changes, and comments and other text are kept."""

from __future__ import annotations

import difflib

import pytest

from pipeline.growing.yaml_edits import YamlText
from workers.errors import UserError

TEXT = """\
# top
stream:
  scenario: task   # told
  # in order
  tasks:
    - name: one   # first
      card: a.yaml
      classes: [a, b,
        c]
      role: base
    - two   # whole
    # last

# next
train: {}
empty:
"""


def changed(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


def test_an_item_is_appended_after_the_last() -> None:
    file = YamlText(TEXT, "c.yaml")
    file.append(["stream", "tasks"], {"name": "no", "classes": ["1", "x: #"]})
    assert changed(TEXT, file.text) == ["+     - name: 'no'", "+       classes: ['1', 'x: #']"]
    assert file.text.index("# whole") < file.text.index("'no'") < file.text.index("# last")


def test_a_value_is_replaced_beside_its_comment() -> None:
    file = YamlText(TEXT, "c.yaml")
    file.set(["stream", "scenario"], "class")
    file.set(["stream", "tasks", 0, "name"], "eins")
    assert changed(TEXT, file.text) == [
        "-   scenario: task   # told",
        "+   scenario: class   # told",
        "-     - name: one   # first",
        "+     - name: eins   # first",
    ]
    file.set(["stream", "tasks", 0, "classes"], ["d"])
    assert "      classes: [d]\n      role: base\n" in file.text
    file.set(["train", "epochs"], 3)
    file.set(["empty"], [1])
    assert file.text.endswith("train: {epochs: 3}\nempty: [1]\n")


def test_a_key_is_added_to_an_item() -> None:
    file = YamlText(TEXT, "c.yaml")
    file.set(["stream", "tasks", 0, "order"], "7")
    assert changed(TEXT, file.text) == ["+       order: '7'"]


def test_list_item_is_divided_into_several() -> None:
    file = YamlText(TEXT, "c.yaml")
    file.divide(["stream", "tasks", 1], [{"name": "x"}, {"name": "y", "classes": ["a"]}])
    assert changed(TEXT, file.text) == [
        "-     - two   # whole",
        "+     - name: x",
        "+     - name: y",
        "+       classes: [a]   # whole",
    ]


def test_keys_and_items_are_removed() -> None:
    file = YamlText(TEXT, "c.yaml")
    file.remove(["stream", "tasks", 0, "name"])
    assert "    - card: a.yaml\n" in file.text
    file.remove(["stream", "tasks", 0, "role"])
    file.remove(["stream", "tasks", 1])
    assert file.body["stream"]["tasks"] == [{"card": "a.yaml", "classes": ["a", "b", "c"]}]
    assert "# last" in file.text
    file.remove(["empty"])
    assert file.text.endswith("train: {}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tasks: [a]  # in order\n", "tasks: [a, {b: 1}]  # in order\n"),
        ("tasks: []\n", "tasks: [{b: 1}]\n"),
        ("tasks:\n- a # x\n- c\nx: 1\n", "tasks:\n- a # x\n- c\n- b: 1\nx: 1\n"),
        ("tasks:\n  - a", "tasks:\n  - a\n  - b: 1\n"),
        ("tasks:\n  - |\n    a\n\nx: 1\n", "tasks:\n  - |\n    a\n\n  - b: 1\nx: 1\n"),
        ("tasks: [a, # x\n  c]\n", "tasks: [a, # x\n  c, {b: 1}]\n"),
    ],
)
def test_item_is_appended_to_every_yaml_list_style(text: str, expected: str) -> None:
    file = YamlText(text, "c.yaml")
    file.append(["tasks"], {"b": 1})
    assert file.text == expected


@pytest.mark.parametrize("text", ["a: &x [1]\ntasks: *x\n", "tasks: 3\n", "other: 1\n"])
def test_uneditable_yaml_is_refused_and_unchanged(text: str) -> None:
    file = YamlText(text, "c.yaml")
    with pytest.raises(UserError, match=r"c\.yaml: .* repeat the command"):
        file.append(["tasks"], "b")
    assert file.text == text


LISTS = """\
block:   # one a line
  - a  # ant
  - b  # bee
  # more
flow: [a,  # ant
  b]  # bee
"""


def test_edits_keep_comments_of_list_items() -> None:
    file = YamlText(LISTS, "c.yaml")
    for key in ("block", "flow"):
        file.extend([key], ["c", "d"])
    assert "  - b  # bee\n  - c\n  - d\n  # more\n" in file.text
    assert "flow: [a,  # ant\n  b, c, d]  # bee\n" in file.text
    file = YamlText(LISTS, "c.yaml")
    file.remove(["block", 0])
    file.remove(["flow", 1])
    assert "block:   # one a line\n  - b  # bee\n  # more\n" in file.text
    assert "flow: [a  # ant\n  ]  # bee\n" in file.text
    file = YamlText(LISTS, "c.yaml")
    file.remove(["flow", 0])
    assert "flow: [b]  # bee\n" in file.text


def test_long_flow_list_is_wrapped_over_several_lines() -> None:
    file = YamlText("a: [x]\n", "c.yaml")
    names = [f"class {number}" for number in range(40)]
    file.extend(["a"], names)
    assert file.body == {"a": ["x", *names]}
    assert max(map(len, file.text.splitlines())) <= 100


def test_edits_keep_windows_line_endings() -> None:
    file = YamlText(TEXT.replace("\n", "\r\n"), "c.yaml")
    file.append(["stream", "tasks"], {"name": "x", "classes": ["1"]})
    file.set(["empty"], [1])
    file.set(["train", "epochs"], 3)
    file.remove(["stream", "tasks", 0, "role"])
    assert file.text.count("\n") == file.text.count("\r\n") > 10
