"""Tests of the command line's version, help, and shell completion."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.cli import completion, help
from pipeline.config import invocation, version
from pipeline.config.version import CHECKOUT


# ---- version -------------------------------------------------------------------------------------
def test_version_names_the_commit_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2"\n')
    assert str(version.get_version(tmp_path)) == f"accrete 1.2 from {tmp_path}"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "pyproject.toml"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    commit = version.get_version(tmp_path).commit
    assert re.fullmatch("[0-9a-f]{12}", commit)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.3"\n')
    text = str(version.get_version(tmp_path))
    assert text == f"accrete 1.3 (commit {commit}-dirty) from {tmp_path}"


def test_only_code_changes_mark_a_commit_as_dirty(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "loop.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    assert version.git_commit(tmp_path) == "", "not a git checkout"
    subprocess.run([*git, "init", "-q"], check=True)
    assert version.git_commit(tmp_path) == "", "no commit yet"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    commit = version.git_commit(tmp_path)
    subprocess.run([*git, "tag", "-a", "v9", "-m", "nine"], check=True)
    assert re.fullmatch("[0-9a-f]{12}", commit)
    assert version.git_commit(tmp_path) == commit
    (tmp_path / "notes.txt").write_text("")
    assert version.git_commit(tmp_path) == commit, "results do not depend on this file"
    new_method = tmp_path / "workers" / "new.py"
    new_method.write_text("")
    assert version.git_commit(tmp_path) == f"{commit}-dirty"
    new_method.unlink()
    (tmp_path / "workers" / "loop.py").unlink()
    assert version.git_commit(tmp_path) == f"{commit}-dirty"


def test_printed_commands_use_the_invocation_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "an environment"
    monkeypatch.setattr(sys, "argv", ["/x/pipeline/__main__.py"])
    assert invocation.this_command() == f"{invocation.this_python()} -m pipeline"
    script = environment / "bin" / "accrete"
    script.parent.mkdir(parents=True)
    script.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert invocation.this_command() == f"'{script}'", "the path has a space"
    monkeypatch.chdir(environment)
    assert invocation.this_command() == "bin/accrete"
    monkeypatch.setenv("PATH", str(script.parent))
    assert invocation.this_command() == "accrete"


# ---- help ----------------------------------------------------------------------------------------
def test_help_lists_every_command_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for group in help.GROUPS for name in group.commands]
    commands = help.list_subparsers(cli.parser()).choices
    assert sorted(grouped) == sorted(commands) == sorted(help.EXAMPLES)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for group in help.GROUPS:
        assert f"\n{group.title}:\n" in text
        assert re.search(rf"^ +e\.g\. .* {re.escape(help.EXAMPLES[group.example])}$", text, re.M)
        assert group.example in group.commands


@pytest.mark.parametrize("command", help.EXAMPLES)
def test_help_example_of_each_command_is_valid(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(help.EXAMPLES[command].partition(" > ")[0])
    assert words[0] == command
    assert cli.parser().parse_args(words)
    for word in words:
        if word.startswith("configs/"):
            assert (CHECKOUT / word).is_file()
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert help.EXAMPLES[command] in capsys.readouterr().out


def test_help_and_version_import_no_heavy_packages(tmp_path: Path) -> None:
    script = (
        "import json, sys; from pipeline import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: print(json.dumps(sorted(sys.modules)))\n"
    )
    for option in ("--help", "--version"):
        command = [sys.executable, "-c", script, option]
        output = subprocess.run(
            command, cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=900
        ).stdout
        modules = json.loads(output.splitlines()[-1])
        tops = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
        assert tops & {"numpy", "pyarrow", "pydantic", "yaml", "torch", "ray", "shtab"} == set()


# ---- completion ----------------------------------------------------------------------------------
Completer = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Completer:
    """Return a function that maps a command line to bash's completions.

    The current folder has a config, a card and two runs.
    """
    folder = tmp_path_factory.mktemp("completion")
    for name in ("configs", "storage/runs/demo", "storage/runs/other"):
        (folder / name).mkdir(parents=True)
    (folder / "mine.yaml").write_text("")
    (folder / "notes.txt").write_text("")
    parser = cli.parser("accrete")
    script = folder / "completion.bash"
    script.write_text(completion.completion_script(parser, "bash"))

    def offers(line: str) -> set[str]:
        words = line.split(" ")
        driver = (
            f"source {script}\n"
            f"COMP_WORDS=({' '.join(shlex.quote(word) for word in words)})\n"
            f"COMP_CWORD={len(words) - 1}\n"
            "function=$(complete -p accrete | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
            '"$function" accrete "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"\n'
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        process = subprocess.run(
            ["bash", "--norc", "-c", driver],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert process.stderr == ""
        return set(process.stdout.split())

    return offers


def test_bash_completes_commands_options_files_and_runs(complete: Completer) -> None:
    assert complete("accrete ru") == {"run", "runs"}
    assert complete("accrete pl") == {"plan"}
    assert {"--set", "--help"} <= complete("accrete run --")
    assert complete("accrete --log-level w") == {"warning"}
    assert "mine.yaml" in complete("accrete run m")
    assert "notes.txt" not in complete("accrete run ")
    assert {"demo", "other", "mine.yaml"} <= complete("accrete compare ")
    assert complete("accrete completion z") == {"zsh"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_loads_the_completion_script(tmp_path: Path) -> None:
    parser = cli.parser("accrete")
    path = tmp_path / "_accrete"
    path.write_text(completion.completion_script(parser, "zsh"))
    load = f"autoload -Uz compinit; compinit -u -d {tmp_path}/dump; print $_comps[accrete]"
    process = subprocess.run(
        ["zsh", "-f", "-c", f"fpath=({tmp_path} $fpath); {load}; autoload +X _accrete"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (process.returncode, process.stderr, process.stdout.strip()) == (0, "", "_accrete")


def test_completion_without_shtab_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert "completion needs the package shtab" in capsys.readouterr().err
