"""The section of the report with the measurements of `analyse`.

It is shown only while the evaluations that it was made from are those of the run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.graph.run_record import RunRecord
from pipeline.graph.store import Store
from pipeline.report.figures import FigureFile
from pipeline.report.html_parts import render
from workers.storage.artifact import join, read_bytes, read_json

NAME = "analysis.json"
ORDER = ("attention", "heads", "robustness", "shifted", "maps")  # of the parts on the page
BEFORE = (
    '<a href="#sizes">',
    '<h2 id="sizes">',
)  # the link and the section are inserted before these
Table = tuple[list[str], list[list[str]]]  # heading, rows


@dataclass(frozen=True)
class AnalysisPart:
    """A part of an analysis: pictures, other files by name, and small tables."""

    pictures: Sequence[FigureFile]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def all_files(self) -> dict[str, bytes]:
        """Return the files and the pictures by name."""
        return {**self.files, **{picture.name: picture.png for picture in self.pictures}}


def evaluation_keys(record: RunRecord) -> dict[str, Any]:
    """Return the identity of the analysed results: the run name and the keys of the evaluations."""
    keys = {}
    for stage in record["stages"]:
        if stage["step"] == "evaluate":
            keys[stage["id"]] = stage["key"]
    return {"run": record["name"], "evaluations": keys}


def analysis_files(
    parts: Mapping[str, AnalysisPart], records: Sequence[RunRecord], store: Store
) -> dict[str, bytes]:
    """Return the files of an analysis for the folder of the first run, with a list of the parts.

    records: of the analysed runs. Earlier parts stay listed while their results are current.
    """
    earlier = load_parts(store, records[0]["name"])
    entries = {n: part for n, part in earlier.items() if is_current(part, records[0], store)}
    analysis_of = [evaluation_keys(record) for record in records]
    files: dict[str, bytes] = {}
    for name, part in parts.items():
        files |= part.all_files()
        pictures = [{"name": p.name, "title": p.title, "says": p.caption} for p in part.pictures]
        entries[name] = {
            "analysis-of": analysis_of,
            "files": sorted(part.all_files()),
            "tables": [list(table) for table in part.tables],
            "pictures": pictures,
        }
    ordered = {name: entries[name] for name in ORDER if name in entries}
    files[NAME] = json.dumps(ordered, indent=1).encode()
    return files


def load_parts(store: Store, run: str) -> dict[str, Any]:
    """Return the listed parts of a run's analysis; none when the list is absent or damaged."""
    try:
        parts = read_json(join(store.storage, "runs", run, NAME))
    except (OSError, ValueError):
        return {}
    if not isinstance(parts, dict):
        return {}
    return {name: part for name, part in parts.items() if _is_valid(part)}


def _is_valid(part: Any) -> bool:
    return isinstance(part, dict) and bool(part.get("analysis-of"))


def is_current(part: Mapping[str, Any], record: RunRecord, store: Store) -> bool:
    """Return whether a part was made from the present evaluations of all its runs.

    The first run may have been renamed since. Other runs without a record are not checked.
    """
    first, *compared = part["analysis-of"]
    if first["evaluations"] != evaluation_keys(record)["evaluations"]:
        return False
    for keys in compared:
        other_record = store.record(keys["run"])
        if other_record is not None and evaluation_keys(other_record) != keys:
            return False
    return True


def add_section(files: Mapping[str, bytes], record: RunRecord, store: Store) -> dict[str, bytes]:
    """Return the files of a report, with the section in its page when the run was analysed."""
    parts = load_parts(store, record["name"])
    page = files.get("report.html", b"").decode()
    if not parts or not all(marker in page for marker in BEFORE):
        return dict(files)
    link = '<a href="#attention">Attention</a>'
    section = str(render_section(parts, record, store))  # Markup would escape the marker
    for marker, html in zip(BEFORE, (link, section), strict=True):
        page = page.replace(marker, html + marker, 1)
    return {**files, "report.html": page.encode()}


def render_section(parts: Mapping[str, Any], record: RunRecord, store: Store) -> str:
    """Render the section with the parts that are current."""
    folder = join(store.storage, "runs", record["name"])
    current = [part for part in parts.values() if is_current(part, record, store)]
    runs: dict[str, None] = {}
    for part in current:
        runs |= dict.fromkeys(run["run"] for run in part["analysis-of"])
    return render(
        "analysis.html",
        parts=[_part_values(part, folder) for part in current],
        runs=list(runs),
        num_outdated=len(parts) - len(current),
    )


def _part_values(part: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return pictures, tables and names of files; a missing picture is left out."""
    pictures = []
    for entry in part["pictures"]:
        with contextlib.suppress(OSError):
            png = read_bytes(join(folder, entry["name"]))
            pictures.append(FigureFile(entry["name"], entry["title"], entry["says"], png))
    names = [name for name in part["files"] if not name.endswith(".png")]
    return {"pictures": pictures, "tables": part["tables"], "files": names}
