"""Tests of the documentation: the links, paths, modules and commands in it exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline
from pipeline.cli import main
from pipeline.config.settings import load
from workers.methods import METHODS

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "datasets/README.md",
    "examples/README.md",
    *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/*.md")),
    *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("configs/**/*.md")),
]
DESCRIPTION = (
    "distributed continual-learning pipeline for vision transformers, task-, class- and "
    "domain-incremental, orchestrated as a DAG of cached stages on Ray, recorded in MLflow."
)
FOLDERS = ("pipeline", "workers", "datasets", "configs", "tests", "benchmarks", "docs", "examples")
# Placeholders that the reader replaces.
PLACEHOLDER = re.compile(r"NAME|CARD|TASK|CONFIG|[*$<>{}]")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python -m ((?:pipeline|benchmarks|tests|workers)[\w.]*)(?: ([a-z]+))?")
SCRIPT = re.compile(r"(?:^|`|\.venv/bin/)accrete +([a-z]+)\b", re.MULTILINE)
PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*$<>{{}}-]*)")
# In a command line: the task of a stage, and the task given by --task.
DEMO_STAGE = re.compile(r"--(?:until|from|only|force) +\w+/([\w-]+)")
DEMO_TASK = re.compile(r"--task +([\w-]+)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def text_of(document: str) -> str:
    """Return the text of a document."""
    return (REPOSITORY / document).read_text(encoding="utf-8")


def anchors_of(path: Path) -> set[str]:
    """Return the link fragments of the headings of a Markdown file."""
    anchors = set()
    for heading in HEADING.findall(path.read_text(encoding="utf-8")):
        words = re.sub(r"[^\w\s-]", "", heading.lower())
        anchors.add(re.sub(r"\s", "-", words.strip()))
    return anchors


def broken_links(document: str) -> Iterator[str]:
    """Yield the relative links of a document to a missing file or heading."""
    for link in LINK.findall(text_of(document)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        if not target.exists() or (fragment and fragment not in anchors_of(target)):
            yield link


def missing_modules(document: str, commands: str) -> Iterator[str]:
    """Yield the `python -m` modules and the commands in a document that do not exist.

    commands: the output of `accrete --help`.
    """
    for module, command in MODULE.findall(text_of(document)):
        path = REPOSITORY / module.strip(".").replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists():
            yield module
        if module == "pipeline" and command and not re.search(rf"^ +{command}\b", commands, re.M):
            yield f"{module} {command}"
    for command in SCRIPT.findall(text_of(document)):
        if not re.search(rf"^ +{command}\b", commands, re.M):
            yield f"accrete {command}"


def missing_paths(document: str) -> Iterator[str]:
    """Yield the paths of this repository that a document names but that do not exist."""
    for path in PATH.findall(text_of(document)):
        plain = path.rstrip(".")
        if PLACEHOLDER.search(plain):
            continue
        if not (REPOSITORY / plain).exists():
            yield path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_to_files_and_headings(document: str) -> None:
    assert list(broken_links(document)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_commands_that_are_run_exist(
    document: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert list(missing_modules(document, capsys.readouterr().out)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_of_this_repository_exist(document: str) -> None:
    assert list(missing_paths(document)) == []


def test_documents_name_existing_demo_stages_and_tasks() -> None:
    config = load(str(REPOSITORY / "configs/demo.yaml"))
    tasks = {entry.name for entry in config.stream.tasks}
    unknown = []
    for document in DOCUMENTS:
        for line in text_of(document).splitlines():
            if "configs/demo.yaml" in line:
                named = DEMO_STAGE.findall(line) + DEMO_TASK.findall(line)
                unknown += [f"{document}: {name}" for name in named if name not in tasks]
    assert unknown == []


def test_python_page_documents_the_whole_public_api() -> None:
    text = text_of("docs/notebook.md")
    named = set(re.findall(r"\bpipeline\.(\w+)", text)) - {"__all__"}
    assert named <= set(pipeline.__all__)
    assert [name for name in pipeline.__all__ if name.islower() and name not in named] == []
    classes: dict[str, type] = {
        "experiment": pipeline.Experiment,
        "results": pipeline.Results,
        "model": pipeline.Model,
        "comparison": pipeline.ComparisonResult,
        "search": pipeline.SearchExperiment,
        "found": pipeline.SearchResults,
    }
    clear_from_their_names = {"name", "labels", "tasks", "classes"}
    for variable, public in classes.items():
        used = set(re.findall(rf"\b{variable}\.(?!md\b)(\w+)", text))
        members = {name for name, value in vars(public).items() if is_documented(name, value)}
        fields = set(getattr(public, "__dataclass_fields__", ()))
        assert used <= members | fields, variable
        assert members - used <= clear_from_their_names, variable


def is_documented(name: str, member: object) -> bool:
    """Return whether a member of a class is a public function or property."""
    return not name.startswith("_") and (callable(member) or isinstance(member, property))


def test_readme_states_the_number_of_methods() -> None:
    assert f"**{len(METHODS)} methods**" in text_of("README.md")


def test_readme_is_short_and_starts_with_the_description() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 150
    title, sentence, commands = readme.split("\n\n")[:3]
    assert title == "# Accrete"
    assert " ".join(sentence.split()) == f"Accrete is a {DESCRIPTION}"
    assert [line.split("#")[0].strip() for line in commands.splitlines()[1:3]] == [
        "make demo",
        "make test",
    ]


def test_main_path_has_ten_lines_with_existing_names() -> None:
    section = text_of("README.md").split("## The main path in the code\n\n")[1].split("\n\n")[0]
    assert len(section.splitlines()) <= 10
    for step in re.split(r"\n(?=\d+\. )", section):
        paths = [REPOSITORY / path for path in PATH.findall(step) if not PLACEHOLDER.search(path)]
        source = "".join(path.read_text(encoding="utf-8") for path in paths)
        for name in re.findall(r"`(\w+)`", step):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), name


def test_every_config_is_in_the_index() -> None:
    folder = REPOSITORY / "configs"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    listed = set(LINK.findall(text_of("configs/README.md")))
    methods = {f"methods/{name}.yaml" for name in METHODS}  # docs/methods.md lists them
    assert sorted(files - listed - methods - {"README.md"}) == []


def test_every_docs_page_is_in_the_index() -> None:
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(LINK.findall(text_of("docs/README.md")))


def test_package_description_matches_the_readme() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert project["description"] == f"A {DESCRIPTION}"
    assert {"continual learning", "class-incremental", "task-incremental"} <= set(
        project["keywords"]
    )
