"""Promises of the script `accrete`: it runs this checkout from any folder, adds nothing else to
what can be imported, explains itself, and completes its commands in a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import app, cli
from pipeline.shell import completion, help, installation, invocation, version
from pipeline.shell.installation import CHECKOUT, install
from workers.errors import UserError

DATASETS = """
from importlib.util import find_spec
spec = find_spec("datasets")
print(spec and spec.submodule_search_locations)
"""
PRECEDENCE = "import accrete_checkout\naccrete_checkout.take_precedence()\n"
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {!r}], check=True)"
ORIGIN = "import pipeline; print(pipeline.__file__)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment, in a folder with a space, that has our packages and the script `accrete`."""
    prefix = tmp_path_factory.mktemp("an environment") / "venv"
    venv.create(prefix, symlinks=True)
    site_packages = next(prefix.glob("lib/python*/site-packages"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "packages.pth").write_text("\n".join(packages))
    install(prefix)
    return prefix


def run(environment: Path, folder: Path, *argv: str, code: int = 0, **variables: str) -> str:
    """Run a program of an environment in a folder. Return what it printed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ACCRETE"))}
    process = subprocess.run(
        [environment / "bin" / argv[0], *argv[1:]],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == code, process.stderr
    return process.stdout + process.stderr


def write_decoys(folder: Path) -> None:
    """Write packages of the names of ours."""
    for name in ("pipeline", "workers"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")


# ---- the script and the path file ----------------------------------------------------------------
def test_accrete_runs_this_checkout_from_any_folder(environment: Path, tmp_path: Path) -> None:
    write_decoys(tmp_path)
    text = run(environment, tmp_path, "accrete", "--version")
    assert text.strip() == str(app.version())
    text = run(environment, tmp_path, "accrete", "plan", "missing.yaml", code=2)
    assert text.startswith("accrete: config 'missing.yaml' does not exist")
    assert len(text.splitlines()) == 1


def test_python_finds_pipeline_from_any_folder_and_the_current_folder_first(
    environment: Path, tmp_path: Path
) -> None:
    ours = str(CHECKOUT / "pipeline" / "__init__.py")
    assert run(environment, tmp_path, "python", "-c", ORIGIN).strip() == ours
    text = run(environment, tmp_path, "python", "-m", "pipeline", "--help")
    assert text.startswith("usage: python -m pipeline")
    write_decoys(tmp_path)
    theirs = str(tmp_path / "pipeline" / "__init__.py")
    assert run(environment, tmp_path, "python", "-c", ORIGIN).strip() == theirs


def test_processes_that_accrete_starts_find_the_same_packages(
    environment: Path, tmp_path: Path
) -> None:
    write_decoys(tmp_path)
    text = run(environment, tmp_path, "python", "-c", PRECEDENCE + CHILD.format(ORIGIN))
    assert text.strip() == str(CHECKOUT / "pipeline" / "__init__.py")


@pytest.mark.parametrize("prelude", ["", PRECEDENCE])
def test_the_folder_datasets_is_no_package(prelude: str, environment: Path, tmp_path: Path) -> None:
    """Hugging Face's package has that name: `import datasets` is its own, or fails."""
    text = run(environment, tmp_path, "python", "-c", prelude + DATASETS)
    assert str(CHECKOUT) not in text
    package = tmp_path / "packages" / "datasets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    path = str(package.parent)
    text = run(environment, tmp_path, "python", "-c", prelude + DATASETS, PYTHONPATH=path)
    assert text.strip() == str([str(package)])


def test_an_installation_is_repeated_and_leaves_that_of_another_checkout(
    environment: Path, tmp_path: Path
) -> None:
    files = install(environment)
    assert os.access(files.script, os.X_OK)
    before = [path.read_text() for path in files]
    other = tmp_path / "other"
    (other / "pipeline").mkdir(parents=True)
    with pytest.raises(UserError, match=f"accrete runs the checkout {CHECKOUT}; give this one an"):
        install(environment, other)
    assert [path.read_text() for path in files] == before


def test_an_installation_of_a_checkout_that_is_gone_is_replaced(tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    venv.create(prefix, symlinks=True)
    gone = tmp_path / "it's gone"
    install(prefix, gone)
    install(prefix)
    assert run(prefix, tmp_path, "python", "-c", ORIGIN).strip().startswith(str(CHECKOUT))


def test_an_installation_needs_an_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installation.main([str(tmp_path)]) == 2
    assert "is no virtual environment of Python" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_of_an_interpreter_is_started_by_a_shell() -> None:
    assert installation.first_line("/venv/bin/python") == "#!/venv/bin/python"
    path = "/" + "long/" * 30 + "python"
    lines = installation.first_line(path).splitlines()
    assert lines[0] == "#!/bin/sh"
    assert path in lines[1]
    compile("\n".join(lines), "script", "exec")  # Python reads a text there


# ---- version -------------------------------------------------------------------------------------
def test_a_version_names_the_commit_where_there_is_one(tmp_path: Path) -> None:
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


def test_new_code_makes_a_checkout_dirty_and_a_tag_hides_no_commit(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "loop.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    assert version.git_commit(tmp_path) == "", "no checkout"
    subprocess.run([*git, "init", "-q"], check=True)
    assert version.git_commit(tmp_path) == "", "no commit"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    commit = version.git_commit(tmp_path)
    subprocess.run([*git, "tag", "-a", "v9", "-m", "nine"], check=True)
    assert re.fullmatch("[0-9a-f]{12}", commit)
    assert version.git_commit(tmp_path) == commit
    (tmp_path / "notes.txt").write_text("")
    assert version.git_commit(tmp_path) == commit, "no result depends on it"
    new_method = tmp_path / "workers" / "new.py"
    new_method.write_text("")
    assert version.git_commit(tmp_path) == f"{commit}-dirty"
    new_method.unlink()
    (tmp_path / "workers" / "loop.py").unlink()
    assert version.git_commit(tmp_path) == f"{commit}-dirty"


def test_printed_commands_begin_as_the_process_was_started(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/pipeline/__main__.py"])
    assert invocation.this_command() == f"{invocation.this_python()} -m pipeline"
    script = environment / "bin" / "accrete"
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert invocation.this_command() == str(script)
    monkeypatch.chdir(environment)
    assert invocation.this_command() == "bin/accrete"
    monkeypatch.setenv("PATH", str(script.parent))
    assert invocation.this_command() == "accrete"


# ---- help ----------------------------------------------------------------------------------------
def test_the_help_lists_every_command_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for group in help.GROUPS for name in group.commands]
    commands = help.subparsers_of(cli.parser()).choices
    assert sorted(grouped) == sorted(commands) == sorted(help.EXAMPLES)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for group in help.GROUPS:
        assert f"\n{group.title}:\n" in text
        assert re.search(rf"^ +e\.g\. .* {re.escape(help.EXAMPLES[group.example])}$", text, re.M)
        assert group.example in group.commands


@pytest.mark.parametrize("command", help.EXAMPLES)
def test_the_example_of_a_command_is_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(help.EXAMPLES[command].partition(" > ")[0])
    assert words[0] == command
    assert cli.parser().parse_args(words)
    for word in words:
        if word.startswith("configs/"):
            assert (CHECKOUT / word).is_file()
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert help.EXAMPLES[command] in capsys.readouterr().out


def test_help_and_version_import_the_standard_library_alone(tmp_path: Path) -> None:
    script = (
        "import json, sys; from pipeline import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: print(json.dumps(sorted(sys.modules)))\n"
    )
    for option in ("--help", "--version"):
        command = [sys.executable, "-c", script, option]
        output = subprocess.run(
            command, cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=60
        ).stdout
        modules = json.loads(output.splitlines()[-1])
        tops = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
        assert tops & {"numpy", "pyarrow", "pydantic", "yaml", "torch", "ray", "shtab"} == set()


# ---- completion ----------------------------------------------------------------------------------
Completer = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Completer:
    """Return what bash offers after a line, in a folder with a config, a card and two runs."""
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
def test_zsh_reads_its_completion(tmp_path: Path) -> None:
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


def test_completion_without_its_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert "completion needs the package shtab" in capsys.readouterr().err
