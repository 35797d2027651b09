"""Tests of the documentation site: navigation, links, and entries of methods, settings, commands
and metrics. Only the test of the build needs Sphinx."""

from __future__ import annotations

import importlib.util
import posixpath
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import pipeline
from docs.site import metrics_table
from docs.site.build import build
from docs.site.figures import anchor_of, figures_of
from docs.site.markdown import escape, from_docstring
from docs.site.pages import REPOSITORY, links_of, page_of, replace_links, text_of
from docs.site.settings_page import FILES
from docs.site.stage import stage
from pipeline.app.method_list import list_fields
from pipeline.results.metrics import METRICS
from workers.errors import UserError
from workers.methods import METHODS
from workers.storage.artifact import Manifest

TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Stage the site. Return path -> text of each page; the key "" has the path of the folder."""
    folder = tmp_path_factory.mktemp("site")
    texts = {page: (folder / page).read_text() for page in stage(folder)}
    return {**texts, "": str(folder)}


def pages_of(site: dict[str, str]) -> dict[str, str]:
    """Return the pages without the entry of the folder."""
    return {page: text for page, text in site.items() if page}


def test_every_page_is_in_the_navigation_once(site: dict[str, str]) -> None:
    listed = ["index.md"]
    for page, text in pages_of(site).items():
        for block in TOCTREE.findall(text):
            entries = [line for line in block.split("\n") if line and not line.startswith(":")]
            listed += [posixpath.join(posixpath.dirname(page), entry) for entry in entries]
    assert sorted(listed) == sorted(pages_of(site))


def test_every_link_target_exists(site: dict[str, str]) -> None:
    broken = []
    for page, text in pages_of(site).items():
        for link in links_of(text, page):
            exists = (Path(site[""]) / link.target).is_file()
            headings = HEADING.findall(site.get(link.target, ""))
            anchors = {f"#{anchor_of(heading)}" for heading in headings}
            if not exists or (link.fragment and link.fragment not in anchors):
                broken.append(f"{page}: {link.target}{link.fragment}")
    assert broken == []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_page_has_settings_figures_and_config_path(name: str, site: dict[str, str]) -> None:
    text = site[f"methods/{name}.md"]
    for key, _ in list_fields(METHODS[name].Settings):
        assert f"\n`{key}`\n: " in text
    assert ("Not measured yet" in text) == (not figures_of(name))
    assert f"configs/methods/{name}.yaml" in text.split("## Deviations")[1]


def test_method_names_link_to_their_pages(site: dict[str, str]) -> None:
    assert "[`toast_lite`](methods/toast_lite.md)" in site["methods.md"]
    assert "[`adahat`](methods/adahat.md)" in site["methods.md"]


def test_the_reference_names_every_command_and_setting(site: dict[str, str]) -> None:
    for command in ("run", "data prepare", "serve"):
        assert f"### `{command}`" in site["commands.md"]
    for setting in ("checkpoint_s", "val_fraction", "crop_pct", "concurrent", "max_pixels"):
        assert f"\n`{setting}`\n: " in site["settings.md"]


def test_python_page_lists_every_public_name_with_types(site: dict[str, str]) -> None:
    text = site["python.md"]
    aliases = {"ParamGroup"}  # alias of a dict type, without an entry
    for name in set(pipeline.__all__) - aliases:
        assert f"\n### `{name}`\n" in text
    for line in (
        "- `status(self) -> pd.DataFrame`: Return the progress of the run",
        "- `summary: pd.DataFrame`: One row per method",
        "- `winner: dict[str, Any]`: Config of the winner",
        "open_model(folder: AnyPath) -> Model",
    ):
        assert line in text


def test_sections_of_a_docstring_become_lists() -> None:
    text = from_docstring(
        """Add two numbers.

        Args:
            left: The first number,
                of any size.
            right: The second.

        Returns:
            The sum.

        Raises:
            UserError: If there is none.

        Example:
            >>> add(1, 2)
            3
        """
    )
    assert text == (
        "Add two numbers.\n\n"
        "**Args:**\n\n- `left`: The first number, of any size.\n- `right`: The second.\n\n"
        "**Returns:**\n\nThe sum.\n\n"
        "**Raises:**\n\n- `UserError`: If there is none.\n\n"
        "**Example:**\n\n```text\n>>> add(1, 2)\n3\n```"
    )


def test_every_setting_has_a_description() -> None:
    silent = []
    for parts in FILES.values():
        for part in parts:
            for key, info in list_fields(part.model):
                if not info.description:
                    silent.append(f"{part.path}.{key}")
    assert silent == []


def test_every_metric_has_its_formula_on_the_page() -> None:
    for name in METRICS:
        if METRICS[name].function or METRICS[name].unit != "rate":
            assert f"\n| `{name}` | " in text_of("docs/metrics.md")


def test_page_on_metrics_is_current() -> None:
    page = metrics_table.PAGE.read_text()
    assert page == metrics_table.replace_tables(page), "run python -m docs.site.metrics_table"


def test_every_field_of_a_manifest_is_on_the_page() -> None:
    page = text_of("docs/formats.md")
    assert [name for name in Manifest.__annotations__ if f"`{name}`" not in page] == []


def test_link_to_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.site.stage.text_of", lambda source: "[x](../nowhere.py)")
    with pytest.raises(UserError, match=r"docs/README.md links to nowhere.py"):
        stage(tmp_path)


def test_links_in_code_blocks_and_external_links_are_unchanged() -> None:
    text = "[a](b.md)\n```\n[c](d.md)\n```\n[e](https://f/g) [h](#i)"
    links = [link.target for link in links_of(text, "docs/README.md")]
    assert links == ["docs/b.md"]
    replaced = replace_links(text, "docs/README.md", lambda link: "x.md" + link.fragment)
    assert replaced == text.replace("b.md", "x.md")


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("docs/README.md", "index.md"),
        ("docs/data.md", "data.md"),
        ("docs/search.md", "searching.md"),  # Sphinx itself writes search.html
        ("configs/README.md", "configs.md"),
        ("configs/RESULTS.md", "configs/RESULTS.md"),
        ("pipeline/cli/main.py", "commands.md"),
    ],
)
def test_page_names_are_derived_from_sources(source: str, page: str) -> None:
    assert page_of(source) == page


def test_docstrings_become_markdown() -> None:
    docstring = """Do it.

    W .* M is <used>, see `a_b`:

        x_1 = 1

    - one
      goes on
    - two
    """
    assert from_docstring(docstring).split("\n\n") == [
        "Do it.",
        r"W .\* M is \<used\>, see `a_b`:",
        "```text\nx_1 = 1\n```",
        "- one goes on\n- two",
    ]
    assert escape("a_b `c_d`") == r"a\_b `c_d`"


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


class Addresses(HTMLParser):
    """Parser that collects the addresses of scripts, images, frames and style sheets."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.loaded.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") == "stylesheet":
            self.loaded.append(attributes.get("href") or "")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None,
    reason="Sphinx is not installed in this environment; `make docs` installs it",
)
def test_site_builds_without_warnings_or_external_resources(tmp_path: Path) -> None:
    index = build(tmp_path)
    pages = sorted(index.parent.rglob("*.html"))
    assert len(pages) > len(METHODS)
    for page in pages:
        parser = Addresses()
        parser.feed(page.read_text(encoding="utf-8"))
        assert [address for address in parser.loaded if "//" in address] == []
