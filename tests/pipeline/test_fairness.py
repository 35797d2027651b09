"""Tests of fairness: conditions under each table, and no bold for a lead that they may explain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_compare import run_of
from test_paper import _answers_as_counted, comparison  # noqa: F401 (a fixture)

from pipeline.report import comparison_page, paper, table_section
from pipeline.report.comparison import ComparedMethod
from pipeline.report.fairness import (
    Conditions,
    count_exemplars,
    describe_conditions,
    find_advantages,
)

pytestmark = pytest.mark.usefixtures("small_pictures")
CONDITIONS = Conditions(
    backbone="vit_tiny_patch16_224 at 32 px",
    weights="none",
    order=(("a", ("x", "y")), ("b", ("z",))),
    validation=0.1,
    seeds=("0", "1", "2"),
    exemplars=200,
    epochs=5.0,
    images=10_000.0,
    parameters=8000.0,
)


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({}, []),
        ({"backbone": "vit_base_patch16_224 at 32 px"}, ["backbone"]),
        ({"weights": "timm"}, ["weights"]),
        ({"order": (("b", ("z",)), ("a", ("x", "y")))}, ["class order"]),
        ({"validation": 0.0}, ["share of images for validation"]),
        ({"seeds": ("0", "1", "3")}, ["seeds"]),
        ({"exemplars": 201, "images": 10_000.0}, []),
        ({"exemplars": 400}, ["exemplars"]),
        ({"images": 10_090.0}, []),
        ({"images": 12_000.0, "epochs": 6.0}, ["images trained on"]),
        ({"images": 100.0, "exemplars": 0, "epochs": 0.0}, []),
        ({"parameters": 1e9}, []),
        ({"exemplars": None}, ["exemplars"]),
        (
            {"validation": None, "images": None},
            ["share of images for validation", "images trained on"],
        ),
    ],
)
def test_different_start_or_more_images_is_an_advantage(
    changes: dict[str, Any], titles: list[str]
) -> None:
    """Fewer images or exemplars are no advantage. Trained parameters and epochs are ignored,
    because they belong to the method."""
    assert find_advantages(replace(CONDITIONS, **changes), CONDITIONS) == titles


def test_condition_unknown_for_other_method_is_an_advantage() -> None:
    assert find_advantages(CONDITIONS, replace(CONDITIONS, weights=None)) == ["weights"]


def test_conditions_are_described_as_equal_unequal_or_unknown() -> None:
    other = replace(CONDITIONS, exemplars=0, weights="timm", images=None, seeds=("0",))
    assert describe_conditions([CONDITIONS, other]) == [
        "Equal for all: backbone (vit_tiny_patch16_224 at 32 px), class order, share of images for "
        "validation (10 %), epochs a task (5), trained parameters (8,000).",
        "Not equal: weights (none / timm), seeds (0, 1, 2 / 0), exemplars (0 to 200).",
        "Not known for some: images trained on.",
    ]


def with_conditions(compared: Any, monkeypatch: pytest.MonkeyPatch, **of_meat: Any) -> Any:
    """Give all methods the same conditions, except for the changes `of_meat` to `meat`."""
    facts = {entry.name: CONDITIONS for entry in compared.entries}
    facts["meat"] = replace(CONDITIONS, **of_meat)
    monkeypatch.setattr(ComparedMethod, "conditions", property(lambda entry: facts[entry.name]))
    return compared


def test_leader_with_more_exemplars_is_explained_and_not_bold(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = with_conditions(comparison(storage), monkeypatch, exemplars=900)
    table = paper.accuracy_table(compared)
    assert not any(cell.is_best for cells in table.rows.values() for cell in cells)
    sentence = (
        "meat has the best average by more than the noise but is not bold: its conditions "
        "were other ones, or better: exemplars (finetune)."
    )
    assert compared.fairness_notes()[-1] == sentence
    for text in (
        paper.as_latex(table, paper.format_caption(compared)),
        paper.as_markdown(table, paper.format_caption(compared)),
        table_section.render_table_of_tasks(compared),
        comparison_page.render_comparison_page(compared),
    ):
        assert sentence in text
        assert "exemplars (200 to 900)" in text


def test_leader_with_fewer_exemplars_and_images_is_bold(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = with_conditions(comparison(storage), monkeypatch, exemplars=0, images=10.0)
    assert paper.accuracy_table(compared).rows["meat"][0].is_best
    assert not any("is not bold" in sentence for sentence in compared.fairness_notes())


def test_size_winner_ignores_unequal_conditions(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = with_conditions(comparison(storage), monkeypatch, exemplars=900)
    winner = compared.winner("bytes_per_task", min)
    assert winner is not None
    assert winner is compared.leader("bytes_per_task", min)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 0), ({"memory": 50}, 50), ({"memory": 50, "per_class": 2}, 28), (None, None)],
)
def test_exemplar_count_is_computed_from_stage_settings(
    settings: dict[str, int] | None, count: int | None, storage: Any
) -> None:
    run = run_of(storage, "t-seed-0", 0, ("meat",))
    for stage in run.record["stages"]:
        if stage["label"] == "meat":
            stage["inputs"] = {} if settings is None else {"settings": settings}
    assert count_exemplars(run, "meat") == count
