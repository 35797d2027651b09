"""Tests of tables and figures for papers: formats, bold cells, LaTeX, widths, and budgets."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pyarrow.parquet as pq
import pytest
from test_compare import run_of

from pipeline.report import paper, replicas_page, table_section
from pipeline.report.comparison import Comparison
from pipeline.report.replicas import compare_replicas
from pipeline.results import answers
from pipeline.results.answers import RightAnswers
from pipeline.results.tables import RunTables

pytestmark = pytest.mark.usefixtures("small_pictures")
LABELS = ("meat", "finetune")


@pytest.fixture(autouse=True)
def _answers_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the predictions by ones with the counts of `run_of`: the first images are correct."""

    def right_answers(run: RunTables, label: str, tasks: Sequence[str]) -> RightAnswers:
        matrix = run.matrix(label)
        right = {}
        images = []
        for i in range(len(tasks)):
            total = int(matrix.total[i, i])
            images.append([(tasks[i], str(row)) for row in range(total)])
            for t in range(i, len(tasks)):
                right[t, i] = np.arange(total) < matrix.correct[t, i]
        return RightAnswers(right, images)

    monkeypatch.setattr(answers, "right_answers", right_answers)


def comparison(storage: Any, shifts: Sequence[int] = (0, 2, 1), **settings: Any) -> Comparison:
    """Return a comparison of two methods with one seed per shift.

    shifts: number of correct images added to each result of both methods.
    """
    runs = {
        f"seed-{seed}": run_of(storage, f"t-seed-{seed}", seed, LABELS, shift, **settings)
        for seed, shift in enumerate(shifts)
    }
    return compare_replicas("t", runs)


def test_only_significant_leads_are_bold(storage: Any) -> None:
    table = paper.accuracy_table(comparison(storage))
    best = {name: [cell.is_best for cell in cells] for name, cells in table.rows.items()}
    # finetune has forgotten much of the first two tasks; both methods learn the last one equally
    assert best["meat"][:2] == [True, True]
    assert best["meat"][-2:] == [True, True]  # average and forgetting
    assert not best["finetune"][0]


def test_one_seed_gives_no_bold_cells(storage: Any) -> None:
    table = paper.accuracy_table(comparison(storage, shifts=(0,)))
    assert not any(cell.is_best for cells in table.rows.values() for cell in cells)
    assert "One seed" in " ".join(paper.format_caption(comparison(storage, shifts=(0,))))


def test_the_caption_counts_the_replicas_of_each_run(storage: Any) -> None:
    compared = comparison(storage)
    assert "of 3 replicas (seed-0, seed-1, seed-2)." in " ".join(paper.format_caption(compared))
    compared.groups.append(comparison(storage, shifts=(0,)).groups[0])
    assert "deviation of 1 to 3 replicas." in " ".join(paper.format_caption(compared))


def test_equal_methods_give_no_bold_cells(storage: Any, monkeypatch: Any) -> None:
    compared = comparison(storage)
    compared.entries = [compared.entries[0], comparison(storage).entries[0]]
    compared.entries[1].name = "twin"
    table = paper.accuracy_table(compared)
    assert not any(cell.is_best for cells in table.rows.values() for cell in cells)


def test_every_table_format_has_the_same_numbers(storage: Any) -> None:
    files = paper.paper_files(comparison(storage))
    rows = list(csv.DictReader(io.StringIO(files["table.csv"].decode())))
    assert pq.read_table(io.BytesIO(files["table.parquet"])).num_rows == len(rows)
    for form in ("table.tex", "table.md"):
        text = files[form].decode()
        for row in rows:
            assert f"{100 * float(row['mean']):z.1f}" in text
    average = next(row for row in rows if (row["method"], row["column"]) == ("meat", "average"))
    assert float(average["low"]) < float(average["mean"]) < float(average["high"])
    assert float(average["deviation"]) > 0


def test_the_latex_table_has_a_cell_for_each_column(storage: Any) -> None:
    text = paper.paper_files(comparison(storage))["table.tex"].decode()
    columns = re.search(r"\\begin\{tabular\}\{(l r*|lr+)\}", text)
    assert columns
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(LABELS)
    assert {line.count("&") for line in lines} == {len(columns.group(1)) - 1}
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") == 1


def test_names_are_escaped_in_latex_and_markdown() -> None:
    assert paper.escape_latex("a_b & 50%") == r"a\_b \& 50\%"
    assert (
        paper.escape_latex("\\^~{}") == r"\textbackslash{}\textasciicircum{}\textasciitilde{}\{\}"
    )
    assert paper.escape_markdown("a_b|*") == r"a\_b\|\*"


@pytest.mark.slow
def test_latex_tables_compile(storage: Any, tmp_path: Path) -> None:
    latex = shutil.which("pdflatex")
    if latex is None:
        pytest.skip("pdflatex is not installed")
    files = paper.paper_files(comparison(storage))
    body = "\n\n".join(files[name].decode() for name in ("table.tex", "budget.tex"))
    source = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{body}"
    (tmp_path / "t.tex").write_text(source + "\\end{document}")
    command = [latex, "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]


def test_figures_have_column_width_and_are_deterministic(storage: Any) -> None:
    first, second = (paper.paper_files(comparison(storage)) for _ in range(2))
    for metric in ("average_accuracy", "forgetting"):
        assert first[f"{metric}.pdf"] == second[f"{metric}.pdf"]
        assert first[f"{metric}.svg"] == second[f"{metric}.svg"]
        box = re.search(rb"/MediaBox \[ ?0 0 ([0-9.]+)", first[f"{metric}.pdf"])
        assert box
        assert float(box.group(1)) == pytest.approx(72 * paper.COLUMN_INCHES, abs=0.1)
        assert b"<svg" in first[f"{metric}.svg"]


def test_budget_is_the_sum_over_stage_manifests(storage: Any) -> None:
    compared = comparison(storage)
    run = compared.runs[0]
    seconds = 0.0
    for stage_id, artifact in run.artifacts.items():
        if stage_id.startswith("meat/") and not stage_id.endswith("/evaluate"):
            seconds += artifact.manifest["wall_s"]
    budget = paper.budgets(compared)["meat"]
    assert budget.device_s == pytest.approx(seconds)
    assert budget.stored_bytes == run.sizes("meat")[-1]["total"]


def test_replicas_page_shows_table_differences_and_budgets(storage: Any) -> None:
    runs = comparison(storage).groups[0].runs
    record: Any = {**fake_run.record("t"), "replicas": {name: name for name in runs}}
    files = replicas_page.build_replicas_report(record, runs, gpu_use=["GPU 0 of n was busy 20%"])
    page = files["report.html"].decode()
    assert "<li>GPU 0 of n was busy 20%</li>" in page
    assert "GPU" not in replicas_page.build_replicas_report(record, runs)["report.html"].decode()
    for heading in ("Methods and tasks", "Differences", "Budgets", "Over the tasks"):
        assert f">{heading}</h2>" in page
    assert "beyond the noise" in page
    for name in table_section.PAPER_FILES:
        assert f"<code>{name}</code>" in page
        assert files[name]


@pytest.mark.slow
def test_one_seed_page_has_a_table_without_bold_cells(storage: Any) -> None:
    from pipeline.report import page

    files = page.build_run_report(storage, fake_run.record())
    text = files["report.html"].decode()
    table = text.split('<h2 id="table">')[1].split("<h2")[0]
    assert "One seed" in table
    assert "class=best" not in table
    assert files["table.tex"].decode().count("toprule") == 1
    assert files["average_accuracy.pdf"].startswith(b"%PDF")
