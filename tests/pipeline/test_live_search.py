"""Tests of the output of a running search: its report page, console lines, and metrics."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import fake_search
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipeline.results.trials import Trial
from pipeline.search import live_page
from pipeline.search.live_page import LivePage, compute_pause_s
from pipeline.search.screen import SearchScreen
from pipeline.search.spec import Search
from pipeline.shell import console
from pipeline.tracking.prometheus import search_metrics


def trial(number: int, status: str = "finished", num_results: int = 5, **more: Any) -> Trial:
    body = fake_search.trial(number, status=status, **more)
    body["results"] = body["results"][:num_results]
    return cast(Trial, body)


# ---- the page ------------------------------------------------------------------------------------
class Pages:
    """A writer that counts its pages; `wait` waits for the next one."""

    def __init__(self, error: Exception | None = None):
        self.written = threading.Semaphore(0)
        self.error = error
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.written.release()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        assert self.written.acquire(timeout=60)


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "CHANGED_S", 0.0)
    monkeypatch.setattr(live_page, "LOOK_S", 0.001)


@pytest.mark.usefixtures("_no_pause")
def test_the_page_is_written_at_the_start_and_after_results() -> None:
    pages = Pages()
    page = LivePage(pages)
    threads = threading.active_count()
    with page.writing():
        pages.wait()
        for _ in range(3):
            page.on_result()
            pages.wait()
        assert pages.count == 4
    assert threading.active_count() == threads, "the thread has ended"


@pytest.mark.usefixtures("_no_pause")
def test_search_page_is_refreshed_without_new_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_page, "UNCHANGED_S", 0.01)
    pages = Pages()
    with LivePage(pages).writing():
        pages.wait()
        pages.wait()


@pytest.mark.usefixtures("_no_pause")
def test_failed_page_write_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(OSError("disk full"))
    page = LivePage(pages)
    with page.writing():
        pages.wait()
        page.on_result()
        pages.wait()
    assert "the report of the search was not written: disk full" in caplog.text


def test_rapid_results_write_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LOOK_S", 0.001)
    pages = Pages()
    page = LivePage(pages)
    with page.writing():
        pages.wait()
        for _ in range(100):
            page.on_result()
            time.sleep(0.001)
    assert pages.count == 1, "at most one page per CHANGED_S"


def test_a_page_that_takes_long_is_written_less_often() -> None:
    assert compute_pause_s(0.1) == 10
    assert compute_pause_s(2.0) == pytest.approx(40), "pages take at most 1/20 of the time"
    assert compute_pause_s(3600.0) == 240, "the page promises to be at most five minutes old"


# ---- lines ---------------------------------------------------------------------------------------
def screen_of(*records: Trial) -> tuple[SearchScreen, io.StringIO]:
    """Return the screen of a search with five tasks and these trials, and its stream."""
    stream = io.StringIO()
    search = SimpleNamespace(
        records=lambda: list(records),
        tasks=tuple(fake_search.TASKS),
    )
    return SearchScreen(cast(Search, search), stream), stream


def test_console_line_describes_the_progress_of_trials() -> None:
    screen, _ = screen_of(trial(0), trial(1, "stopped"))
    assert screen.describe() == "trials: 2 ended"
    screen(trial(3, "running", 2))
    screen(trial(2, "running", 0))
    text = "trials: 2 ended, trial 3 has learned 2 of 5 tasks"
    assert screen.describe() == text, "trial 2 has no result yet"
    for number in range(4, 10):
        screen(trial(number, "running", 1))
    assert screen.describe().endswith("trial 6 has learned 1 of 5 tasks, and 3 more")


def test_search_prints_a_line_at_least_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.Heartbeat, "_watch", lambda self, ended: None)
    now = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        screen, stream = screen_of()
        with screen.activity(screen.describe):
            for _ in range(60):
                now[0] += 1
                screen.heartbeat.beat()
                if now[0] == 1020:
                    screen(trial(0))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["trials: 0 ended (9.0 s so far)", "trials: 0 ended (18.0 s so far)"]
    assert lines[2].startswith("trial 0: ")
    assert lines[3] == "trials: 1 ended (29.0 s so far)"
    assert len(lines) == 7


# ---- metrics -------------------------------------------------------------------------------------
def test_search_metrics_match_the_trial_records() -> None:
    trials = [
        trial(0, accuracy=0.5, gpu_s=30.0),
        trial(1, accuracy=0.75, gpu_s=60.0),
        trial(2, "failed", 0),
        trial(3, "running", 1),
    ]

    class Collector:
        def collect(self) -> Iterator[Any]:
            return search_metrics("meat", trials, {"hours": 0.25})

    registry = CollectorRegistry()
    registry.register(Collector())
    lines = generate_latest(registry).decode().splitlines()
    assert {line for line in lines if not line.startswith("#")} == {
        'accrete_search_trials{search="meat",status="finished"} 2.0',
        'accrete_search_trials{search="meat",status="stopped"} 0.0',
        'accrete_search_trials{search="meat",status="running"} 1.0',
        'accrete_search_trials{search="meat",status="failed"} 1.0',
        'accrete_search_best_accuracy{search="meat",task=""} 0.75',
        'accrete_search_stages_total{how="run",search="meat"} 32.0',
        'accrete_search_stages_total{how="reused",search="meat"} 32.0',
        'accrete_search_device_seconds_total{search="meat"} 1360.0',
        'accrete_search_gpu_seconds_total{search="meat"} 90.0',
        'accrete_search_budget_used_ratio{bound="hours",search="meat"} 0.25',
    }
