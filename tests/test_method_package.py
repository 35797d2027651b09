"""Tests of `accrete methods new NAME`, which writes a package with a method."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.app.method_package import write_method_package
from pipeline.cli import main
from pipeline.config.version import CHECKOUT
from workers.errors import UserError


def test_example_package_equals_the_output_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "square"
    assert main(["methods", "new", "square", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out.split()
    example = CHECKOUT / "examples" / "method_package"
    files = [path for path in example.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(folder / path.relative_to(example)) for path in files} == {*printed}
    for path in files:
        assert (folder / path.relative_to(example)).read_text() == path.read_text()


def test_package_files_are_named_after_the_method(tmp_path: Path) -> None:
    paths = write_method_package("my-best.method", str(tmp_path / "new"))
    assert [str(path.relative_to(tmp_path / "new")) for path in paths] == [
        "pyproject.toml",
        "README.md",
        "accrete_my_best_method/__init__.py",
        "tests/test_my_best_method.py",
    ]
    assert '"my-best.method" = "accrete_my_best_method:MyBestMethod"' in paths[0].read_text()
    assert "class MyBestMethod(Method[MyBestMethodSettings]):" in paths[2].read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("meat", "there is a method 'meat' already; give the new one another name"),
        ("a b", "'a b' cannot be the name of a method; give a letter first"),
        ("../up", "cannot be the name of a method"),
        ("ends-", "cannot be the name of a method"),  # not allowed as a package name
        ("new", "'new' cannot be the name of a method"),  # a word of the command itself
    ],
)
def test_invalid_method_name_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        write_method_package(name, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already; give another folder with --out"):
        write_method_package("square", str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["methods", "new"], "give its name: `methods new NAME`"),
        (["methods", "meat", "hat"], "only `methods new NAME` takes a second name"),
    ],
)
def test_incomplete_or_invalid_command_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err
