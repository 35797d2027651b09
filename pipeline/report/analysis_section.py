"""The section of the report with the results of `accrete analyse`.

`build_files` builds the files of an analysis, `add_section` inserts the section into the page. The
section has one part per kind of measurement (PART_ORDER). A part is current as long as the analysed
runs still have the evaluations that the part was computed from. Outdated parts are omitted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from pipeline.graph.run_record import RunRecord
from pipeline.graph.store import Store
from pipeline.report.figures import FigureFile
from pipeline.report.html_parts import render_markup
from workers.storage.artifact import join, read_bytes, read_json

LIST_FILE = "analysis.json"  # in the folder of the first analysed run: <storage>/runs/NAME
PART_ORDER = ("attention", "heads", "robustness", "shifted", "maps")  # order on the page
# The link to the section is inserted before the first marker, the section before the second.
INSERT_MARKERS = ('<a href="#sizes">', '<h2 id="sizes">')
LINK = '<a href="#analysis">Attention and robustness</a>'
Table = tuple[list[str], list[list[str]]]  # header row, data rows
FileName = Annotated[str, Field(pattern="^[^/]+$")]


class ListedPicture(TypedDict):
    """A picture in LIST_FILE. `says` is its caption."""

    name: FileName
    title: str
    says: str


class AnalysedRun(TypedDict):
    """An analysed run: its name, and the id and key (content address) of each evaluation stage."""

    run: str
    evaluations: dict[str, str]


# A part in LIST_FILE. The key `analysis-of` is not an identifier, hence no class as above.
ListedPart = TypedDict(
    "ListedPart",
    {
        "analysis-of": Annotated[list[AnalysedRun], Field(min_length=1)],
        "files": list[FileName],
        "tables": list[Table],
        "pictures": list[ListedPicture],
    },
)
LISTED_PART = TypeAdapter(ListedPart)


@dataclass(frozen=True)
class AnalysisPart:
    """A part of an analysis.

    Attributes:
        pictures: Pictures for the page.
        files: Name -> content of other files, such as CSV.
        tables: Small tables for the page.
    """

    pictures: Sequence[FigureFile]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def all_files(self) -> dict[str, bytes]:
        """Return name -> content of all files, including the pictures."""
        return {**self.files, **{picture.name: picture.png for picture in self.pictures}}


def identify_results(record: RunRecord) -> AnalysedRun:
    """Return the name of a run and the keys of its evaluation stages."""
    keys: dict[str, str] = {}
    for stage in record["stages"]:
        if stage["step"] == "evaluate":
            keys[stage["id"]] = stage["key"]
    return {"run": record["name"], "evaluations": keys}


def build_files(
    parts: Mapping[str, AnalysisPart], records: Sequence[RunRecord], store: Store
) -> dict[str, bytes]:
    """Build the files of an analysis and LIST_FILE, which lists all parts.

    The caller must write the files into the folder of the first run. Parts of earlier analyses
    stay listed if they are current.

    Args:
        parts: Name -> new part.
        records: Records of the analysed runs.
        store: The store of the first run.

    Returns:
        File name -> content.
    """
    earlier = load_parts(store, records[0]["name"])
    entries = {name: part for name, part in earlier.items() if is_current(part, records[0], store)}
    analysis_of = [identify_results(record) for record in records]
    files: dict[str, bytes] = {}
    for name, part in parts.items():
        files |= part.all_files()
        pictures: list[ListedPicture] = [
            {"name": p.name, "title": p.title, "says": p.caption} for p in part.pictures
        ]
        entries[name] = {
            "analysis-of": analysis_of,
            "files": sorted(part.all_files()),
            "tables": [*part.tables],
            "pictures": pictures,
        }
    names = [name for name in PART_ORDER if name in entries]
    names += [name for name in entries if name not in PART_ORDER]
    ordered = {name: entries[name] for name in names}
    files[LIST_FILE] = json.dumps(ordered, indent=1).encode()
    return files


def load_parts(store: Store, run: str) -> dict[str, ListedPart]:
    """Load the parts of a run's analysis from LIST_FILE, as name -> part.

    Damaged parts are omitted. The result is empty if the file is missing or cannot be read.
    """
    try:
        parts = read_json(join(store.storage, "runs", run, LIST_FILE))
    except (OSError, ValueError):
        return {}
    if not isinstance(parts, dict):
        return {}
    return {name: part for name, part in parts.items() if _is_valid_part(part)}


def _is_valid_part(part: Any) -> bool:
    try:
        LISTED_PART.validate_python(part)
    except ValidationError:
        return False
    return True


def is_current(part: ListedPart, record: RunRecord, store: Store) -> bool:
    """Return whether a part was computed from the current evaluations of all its runs.

    The name of the first run is not compared, because the run may have been renamed. Other runs
    are skipped if their record no longer exists.
    """
    first, *compared = part["analysis-of"]
    if first["evaluations"] != identify_results(record)["evaluations"]:
        return False
    for keys in compared:
        other_record = store.record(keys["run"])
        if other_record is not None and identify_results(other_record) != keys:
            return False
    return True


def add_section(files: Mapping[str, bytes], record: RunRecord, store: Store) -> dict[str, bytes]:
    """Return the files of a report, with the section inserted into report.html.

    The files are unchanged if the run was not analysed, or if the page lacks a marker of
    INSERT_MARKERS.

    Args:
        files: File name -> content of the report.
        record: The record of the run.
        store: The store of the run.
    """
    parts = load_parts(store, record["name"])
    page = files.get("report.html", b"").decode()
    if not parts or not all(marker in page for marker in INSERT_MARKERS):
        return dict(files)
    # a plain str: Markup + str would escape the HTML of the marker
    section = str(render_section(parts, record, store))
    for marker, html in zip(INSERT_MARKERS, (LINK, section), strict=True):
        page = page.replace(marker, html + marker, 1)
    return {**files, "report.html": page.encode()}


def render_section(parts: Mapping[str, ListedPart], record: RunRecord, store: Store) -> str:
    """Render the section with the current parts, and the number of outdated parts."""
    folder = join(store.storage, "runs", record["name"])
    current = [part for part in parts.values() if is_current(part, record, store)]
    runs: dict[str, None] = {}
    for part in current:
        runs |= dict.fromkeys(run["run"] for run in part["analysis-of"])
    return render_markup(
        "analysis.html",
        parts=[_part_values(part, folder) for part in current],
        runs=list(runs),
        num_outdated=len(parts) - len(current),
    )


def _part_values(part: ListedPart, folder: str) -> dict[str, Any]:
    """Return the pictures, tables and file names for the template.

    Pictures whose file cannot be read are omitted.
    """
    pictures = []
    for entry in part["pictures"]:
        with contextlib.suppress(OSError):
            png = read_bytes(join(folder, entry["name"]))
            pictures.append(FigureFile(entry["name"], entry["title"], entry["says"], png))
    names = [name for name in part["files"] if not name.endswith(".png")]
    return {"pictures": pictures, "tables": part["tables"], "files": names}
