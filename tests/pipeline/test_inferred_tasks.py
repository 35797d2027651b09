"""Tests of reports and records of methods that infer the task of an image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fake_run
import pytest

from pipeline.report import figures, files, page, plots
from pipeline.results.tables import PickCounts, RunTables
from pipeline.tracking.points import method_files, method_report_files, pick_points

NAMES = [t["name"] for t in fake_run.TASKS]


def picks(after: int, task: int) -> dict[str, Any]:
    """Return pick counts: all images of the first task are picked correctly. Of other tasks, three
    of four images are correct, and the rest are assigned to the first task."""
    total = fake_run.IMAGES[task]
    right = total if task == 0 else 3 * total // 4
    counts = [0] * (after + 1)
    counts[task] = right
    counts[0] += total - right
    return {
        "candidates": NAMES[: after + 1],
        "picked": counts,
        "right": right,
        "confidence_right": 0.9,
        "confidence_wrong": 0.4 if task else None,
    }


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunTables:
    """Return the tables of the fake run, with pick counts for `finetune`."""
    monkeypatch.setattr(plots, "DPI", 40)
    fake_run.write(str(tmp_path))
    run_tables = RunTables.load(str(tmp_path), fake_run.record())
    for after, name in enumerate(NAMES):
        for task, row in enumerate(
            run_tables.artifacts[f"finetune/{name}/evaluate"].manifest["result"]["rows"]
        ):
            row["picks"] = picks(after, task)
    return run_tables


def test_picks_table_lists_every_seen_task_after_each_task(tables: RunTables) -> None:
    rows = tables.picks("finetune")
    assert [(r["after"], r["task"]) for r in rows] == [
        (NAMES[t], NAMES[i]) for t in range(4) for i in range(t + 1)
    ]
    birds = next(r for r in rows if (r["after"], r["task"]) == ("roots", "birds"))
    assert (birds["images"], birds["right"], birds["share_right"]) == (120, 90, 0.75)
    assert (birds["confidence_right"], birds["confidence_wrong"]) == (0.9, 0.4)
    assert tables.tables()["picks"] == rows
    assert files.as_csv(rows)


def test_the_picture_shows_the_last_finished_task_in_stream_order(tables: RunTables) -> None:
    pick_counts = tables.pick_counts("finetune")
    assert pick_counts is not None
    counts, tasks, candidates = pick_counts
    assert tasks == candidates == NAMES
    assert counts.tolist() == [[200, 0, 0, 0], [30, 90, 0, 0], [38, 0, 112, 0], [16, 0, 0, 45]]
    earlier = tables.pick_counts("finetune", "birds")
    assert earlier is not None
    assert earlier[0].tolist() == [[200, 0], [30, 90]]
    assert "picked-finetune.png" in {
        p.name for p in figures.method_pictures(tables, "finetune", [])
    }
    assert (
        len(
            plots.to_png(
                plots.draw_confusion(
                    counts, tasks, "x", ["mask 0", "mask 1", "mask 2", "mask 3", "mask 4"][:4]
                )
            )
        )
        > 1000
    )
    assert (
        len(plots.to_png(figures.draw_picks("x", PickCounts(counts[:2], tasks[:2], candidates))))
        > 1000
    ), "a picture can have more candidates than tasks"


def test_page_shows_share_and_confidence_of_right_picks(tables: RunTables) -> None:
    text = page.render_picks(tables, "finetune")
    assert "After roots" in text
    assert (
        "<td class=left>leaves</td><td>150</td><td>74.7 %</td><td>90.0 %</td><td>40.0 "
        "%</td><td>leaves</td>" in text
    )
    assert (
        "<td class=left>shapes</td><td>200</td><td>100.0 %</td><td>90.0 %</td><td><span "
        "class=soft>-</span></td>" in text
    )
    assert page.render_picks(tables, "finetune") in page.render_page(
        tables, None, [], {"finetune": []}, "", {}
    )


def test_picks_are_recorded_as_curves_picture_and_tables(tables: RunTables) -> None:
    points = pick_points(tables.picks("finetune"))
    assert [(p.name, p.step) for p in points[:3]] == [
        ("picked_right/shapes", 0),
        ("picked_right/shapes", 1),
        ("picked_right/birds", 1),
    ]
    assert points[2].value == 0.75
    bodies = method_files(tables, "finetune")
    assert {"picked.png", "picked.csv", "picks.csv"} <= bodies.keys()
    assert bodies["picked.csv"].decode().splitlines()[2] == "birds,30,90,0,0"
    assert method_report_files({"picked-finetune.png": b"x"}, "finetune") == {
        "report/picked.png": b"x"
    }


def test_method_without_inferred_tasks_has_no_picks_output(
    tables: RunTables,
) -> None:
    assert tables.picks("meat") == []
    assert tables.pick_counts("meat") is None
    assert page.render_picks(tables, "meat") == ""
    assert "picked.png" not in method_files(tables, "meat")
    assert (
        pick_points([{"task": "x", "images": 0, "share_right": math.nan, "after_index": 0}]) == []
    )
