"""What `analyse` found, in the report: a section of the page, shown only while the results that it
was made of stand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pipeline.graph.store import Store
from pipeline.report.figures import Picture
from pipeline.report.page import render_picture, render_table
from workers.storage.artifact import join, read_bytes, read_json

NAME = "analysis.json"
ORDER = ("attention", "heads", "robustness", "shifted", "maps")  # of the parts on the page
BEFORE = ('<a href="#sizes">', '<h2 id="sizes">')  # where the link and the section go
Table = tuple[list[str], list[list[str]]]  # heading, rows


@dataclass(frozen=True)
class Part:
    """A part of an analysis: pictures, files beside them by name, and small tables for people."""

    pictures: Sequence[Picture]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def all_files(self) -> dict[str, bytes]:
        return {**self.files, **{p.name: p.png for p in self.pictures}}


def evaluation_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """What an analysis of a run looked at: its name, and the keys of its evaluations, which stand
    for all that is behind them."""
    return {
        "run": record["name"],
        "evaluations": {s["id"]: s["key"] for s in record["stages"] if s["step"] == "evaluate"},
    }


def analysis_files(
    parts: Mapping[str, Part], records: Sequence[Mapping[str, Any]], store: Store
) -> dict[str, bytes]:
    """The files of an analysis of the runs that `records` describe, for the folder of the first,
    with a list of them. Earlier parts stay listed while what they were made of stands."""
    found = {
        name: part
        for name, part in load_parts(store, records[0]["name"]).items()
        if is_current(part, records[0], store)
    }
    of = [evaluation_keys(record) for record in records]
    found |= {
        name: {
            "analysis-of": of,
            "files": sorted(part.all_files()),
            "tables": [list(table) for table in part.tables],
            "pictures": [{"name": p.name, "title": p.title, "says": p.says} for p in part.pictures],
        }
        for name, part in parts.items()
    }
    found = {name: found[name] for name in ORDER if name in found}
    return {name: data for part in parts.values() for name, data in part.all_files().items()} | {
        NAME: json.dumps(found, indent=1).encode()
    }


def load_parts(store: Store, run: str) -> dict[str, Any]:
    """The parts that stand in the folder of a run; none where the list is absent or damaged."""
    try:
        found = read_json(join(store.storage, "runs", run, NAME))
    except (OSError, ValueError):
        return {}
    return (
        {
            name: part
            for name, part in found.items()
            if isinstance(part, dict) and part.get("analysis-of")
        }
        if isinstance(found, dict)
        else {}
    )


def is_current(part: Mapping[str, Any], record: Mapping[str, Any], store: Store) -> bool:
    """Whether the run of `record`, whatever its name, and every other that it was compared with and
    whose record is there, is still what was looked at."""
    own, *others = part["analysis-of"]
    return own["evaluations"] == evaluation_keys(record)["evaluations"] and all(
        (now := store.record(other["run"])) is None or evaluation_keys(now) == other
        for other in others
    )


def add_section(
    files: Mapping[str, bytes], record: Mapping[str, Any], store: Store
) -> dict[str, bytes]:
    """The files of a report, its page with the section in it where the run was analysed."""
    parts = load_parts(store, record["name"])
    page = files.get("report.html", b"").decode()
    if not parts or not all(place in page for place in BEFORE):
        return dict(files)
    for place, text in zip(
        BEFORE,
        ('<a href="#attention">Inside attention</a>', render_section(parts, record, store)),
        strict=True,
    ):
        page = page.replace(place, text + place, 1)
    return {**files, "report.html": page.encode()}


def render_section(parts: Mapping[str, Any], record: Mapping[str, Any], store: Store) -> str:
    standing = [part for part in parts.values() if is_current(part, record, store)]
    body = "".join(_part(part, join(store.storage, "runs", record["name"])) for part in standing)
    runs = list(dict.fromkeys(run["run"] for part in standing for run in part["analysis-of"]))
    says = [
        "What finished models look at on test images, and how they do on images that are "
        "harder. Nothing here was used for training."
    ] * bool(standing)
    says += [f"Compared: {escape(', '.join(runs))}."] * (len(runs) > 1)
    says += [
        "An analysis that stands beside this page is left out, because the results that it "
        "looked at have changed since; <code>python -m pipeline "
        "analyse</code> makes it anew."
    ] * (len(standing) < len(parts))
    return f'<h2 id="attention">Inside attention</h2><p>{" ".join(says)}</p>{body}'


def _part(part: Mapping[str, Any], folder: str) -> str:
    """Pictures, tables, and the names of the files; a picture that is gone is left out."""
    figures = []
    for about in part["pictures"]:
        try:
            figures.append(
                render_picture(
                    Picture(
                        about["name"],
                        about["title"],
                        about["says"],
                        read_bytes(join(folder, about["name"])),
                    )
                )
            )
        except OSError:
            continue
    tables = "".join(render_table(heading, rows, 1) for heading, rows in part["tables"])
    names = ", ".join(
        f"<code>{escape(name)}</code>" for name in part["files"] if not name.endswith(".png")
    )
    return (
        "".join(figures)
        + tables
        + (f"<p class=soft>As files beside this page: {names}.</p>" if names else "")
    )
