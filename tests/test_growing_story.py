"""Tests of four months of growing data: executed stages, decoded images, and results."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmarks.growing import MONTHS, SCENARIOS, Story
from benchmarks.serve_load import server
from pipeline.serving.client import Client
from tests.several_nodes import wait_for

# by month: images that ingest decodes, and tasks that a star and a chain train
DECODED = {1: 353, 2: 140, 3: 100, 4: 0}
TRAINED = {
    "star": {1: {"second"}, 2: {"digits-2"}, 3: {"second"}, 4: {"second"}},
    "chain": {
        1: {"second"},
        2: {"digits-2"},
        3: {"second", "digits-2"},
        4: {"second", "digits-2"},
    },
}
CHAINS = ("ewc", "icarl")


@pytest.mark.slow
@pytest.mark.parametrize("method", [*SCENARIOS])
def test_each_month_gives_the_results_of_a_run_from_scratch(
    method: str, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    story = Story(tmp_path / method, method, epochs=1)
    kind = "chain" if method in CHAINS else "star"
    for month in range(1, len(MONTHS) + 1):
        before = story.attempts()
        grown = story.live(month)
        new = {
            stage for stage, attempt in story.attempts().items() if attempt not in before.values()
        }
        trained = {stage.split("/")[1] for stage in new if stage.endswith("/train")}
        assert trained == TRAINED[kind][month], month
        assert grown.decoded == DECODED[month], month
        scratch, is_equal = story.from_scratch()
        assert is_equal, month
        assert scratch.ran == scratch.stages
        assert month == 1 or (grown.ran < scratch.ran and grown.decoded < scratch.decoded)
        assert story.served() == (["first", "second", "digits-2"][: 2 + (month > 1)])
    assert "4" not in story.classes("second")


@pytest.mark.slow
def test_server_answers_without_errors_while_data_grow(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    story = Story(tmp_path / "story", "ewc", epochs=1)
    story.live(1)
    image = next(story.raw.glob("0/*.png"))
    stop, problems = threading.Event(), list[str]()
    answers = 0

    def keep_asking(url: str) -> None:
        nonlocal answers
        client = Client(url, patience_s=0)
        while not stop.is_set():
            try:
                client.predict([str(image)], "first")
                answers += 1
            except Exception as error:
                problems.append(repr(error))

    with server(str(story.model)) as (url, _):
        thread = threading.Thread(target=keep_asking, args=(url,))
        thread.start()
        try:
            client = Client(url)
            seen = [client.tasks()["model"]]
            for month in range(2, len(MONTHS) + 1):
                story.live(month)
                wait_for(lambda: client.tasks()["model"] != seen[-1], 300)
                seen.append(client.tasks()["model"])
        finally:
            stop.set()
            thread.join(300)
    assert problems == []
    assert answers > 0
    assert len(set(seen)) == len(MONTHS)
