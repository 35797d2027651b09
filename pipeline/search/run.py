"""Run a search: phases of trials on Ray Tune, then the winner on test data. Start with `execute`.

A search is resumed from the trial records, and not from the state of Ray Tune. A session is one
process that runs the search; a resumed search has several. `pipeline.results.trials` defines a
phase.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pipeline.app import runs as app
from pipeline.app.prepared import PreparedRun
from pipeline.app.reports import WrittenReport
from pipeline.app.screen import OpenScreen
from pipeline.config import settings as configs
from pipeline.config.yaml_files import dump_yaml, find_config, read_yaml
from pipeline.graph import build
from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from pipeline.launch.cluster import connect
from pipeline.results.metrics import metrics_for
from pipeline.results.trials import SeedTest, Trial, best, get_search_lock_key, pareto
from pipeline.results.trials import load_search_record as load_trials
from pipeline.search import space as spaces
from pipeline.search.live_page import LivePage
from pipeline.search.screen import SearchScreen
from pipeline.search.space import Params
from pipeline.search.spec import Search, build_state, write_state
from pipeline.search.trial import PhasePlan, folder, now, with_history
from pipeline.shell.console import summary
from pipeline.tracking.prometheus import announce_metrics, search_metrics
from pipeline.tracking.search_recorder import SearchRecorder
from workers.errors import UserError
from workers.storage.artifact import join, write_bytes
from workers.storage.lock import stage_lock

if TYPE_CHECKING:
    from prometheus_client import Metric

WINNER_CONFIG = "winner.yaml"  # in the folder of the search
TrialObserver = Callable[[Trial], None]  # called when a trial has a new result or has ended
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C must end a search as it ends a run
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # `tune.build_tuner` adds the only logger
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that fails early reports no metric
}


@dataclass(frozen=True)
class SearchOutcome:
    """Number and config of the winner."""

    trial: int
    config: dict[str, Any]


# ---- the search ----------------------------------------------------------------------------------
def run_search(
    search: Search, resume_command: str, notify: TrialObserver, screen: SearchScreen
) -> SearchOutcome:
    """Run all phases of a search.

    Trials that ended in earlier sessions do not run again, but `notify` is called for them too.

    Args:
        search: The search.
        resume_command: Command that resumes the search, for messages.
        notify: Called with the record of each trial that has a new result or has ended.
        screen: Prints the progress if no trial ends for a while.

    Returns:
        The winner.

    Raises:
        UserError: If the search has no winner.
    """
    started = time.monotonic()
    session = {"started": now(), "wall_s": 0.0}
    search.sessions.append(session)

    def save_time() -> None:
        session["wall_s"] = round(time.monotonic() - started, 3)
        write_state(search)

    def save_time_and_notify(record: Trial) -> None:
        save_time()  # so that the time is counted even if this session is killed
        notify(record)

    save_time()
    with screen.activity(lambda: "starting Ray"):
        ray = connect(search.cluster)
    os.environ |= TUNE_ENVIRONMENT
    try:
        ingest_tasks(search, resume_command, screen.open_console)
        from pipeline.search import tune  # slow: ray.tune takes seconds to import

        chosen_so_far: dict[str, Params] = {}
        chosen: int | None = None
        for first, plan in phases(search, chosen_so_far):
            run_trials = tune.run_population if plan.each else tune.run_phase
            with screen.activity(screen.describe):
                run_trials(search, plan, first, save_time_and_notify)
            chosen = best(search.records(plan.phase), search.settings.tolerance)
            if chosen is None:
                raise UserError(explain_no_winner(search, plan.phase, resume_command))
            if plan.phase:
                chosen_so_far[plan.phase] = read_trial(search, chosen)["params"]
    finally:
        save_time()
        ray.shutdown()
    assert chosen is not None  # there is at least one phase
    return SearchOutcome(chosen, build_winner_config(search, chosen, chosen_so_far))


def phases(search: Search, chosen_so_far: Mapping[str, Params]) -> Iterator[tuple[int, PhasePlan]]:
    """Yield the number of the first trial and the plan of each phase.

    With protocol `per_task`, there is a phase for each task of `Search.method_tasks`; otherwise,
    there is one phase for all tasks. In the phase of a task, trials learn the tasks up to this one,
    and the earlier tasks keep the parameters chosen for them.

    Args:
        search: The search.
        chosen_so_far: Parameters chosen in each phase, by task. It is read at the start of each
            phase, so the caller must add the parameters of a phase before the next phase.
    """
    settings = search.settings
    plan = PhasePlan(
        search.name,
        search.storage,
        search.body,
        search.provenance,
        search.tasks,
        search.method_tasks,
        each=settings.scheduler == "pbt",
        max_forgetting=settings.max_forgetting,
    )
    if settings.protocol != "per_task":
        yield 0, plan
        return
    trials_per_task = settings.budget.trials or 0
    if settings.algorithm == "grid":
        trials_per_task = len(search.space.grid())
    for index, task in enumerate(search.method_tasks):
        task_count = search.tasks.index(task) + 1
        task_plan = replace(
            plan,
            tasks=search.tasks[:task_count],
            only=True,
            phase=task,
            chosen_so_far=dict(chosen_so_far),
        )
        yield index * trials_per_task, task_plan


def build_any_config(search: Search) -> configs.Config:
    """Return the config of an arbitrary point of the space, to find the data of all trials.

    All points have the same data and storage.
    """
    point = next(search.space.corners())
    return configs.check(spaces.with_params(search.body, point), search.name)


def ingest_tasks(search: Search, resume_command: str, open_screen: OpenScreen) -> None:
    """Ingest the data of the tasks once, before the trials need the data."""
    config = build_any_config(search)
    store = Store(search.storage)
    graph, tasks = build.build_graph(config, store, search.provenance, "val")
    cards = {f"data/{task.card}" for task in tasks if task.name in search.tasks}
    ingest_graph = Graph.of(graph.name, [stage for stage in graph if stage.id in cards])
    app.bring(ingest_graph, config, store, open_screen, resume_command)


def read_trial(search: Search, number: int) -> Trial:
    """Return the record of a trial."""
    return next(record for record in search.records() if record["number"] == number)


def explain_no_winner(search: Search, phase: str, resume_command: str) -> str:
    """Return the message that a phase has no winner, with the reason and the remedy."""
    records = search.records(phase)
    messages = [record["message"] for record in records if record["status"] == "failed"]
    stopped_for = [record["message"] for record in records if record["status"] == "stopped"]
    used_up = [bound for bound, share in search.budget_used().items() if share >= 1]
    more = f"raise the budget, as in --set budget.{(used_up or ['hours'])[0]}=N"
    if not records:
        reason = f"its budget was used up before a trial began; {more}"
    elif messages:
        reason = f"{len(messages)} of {len(records)} trials failed, the first one so: {messages[0]}"
    elif any(stopped_for):
        first = next(message for message in stopped_for if message)
        reason = (
            f"none of its {len(records)} trials finished, and one was stopped so: {first}; give "
            "it more trials by budget.trials, or a larger max_forgetting under another name"
        )
    else:
        reason = f"none of its trials came to its last task; {more}"
    for_task = f" for task {phase!r}" if phase else ""
    return (
        f"search {search.name!r} has no winner{for_task}: {reason}; "
        f"the finished trials are kept; resume with: {resume_command}"
    )


def build_winner_config(
    search: Search, number: int, chosen_so_far: Mapping[str, Params]
) -> dict[str, Any]:
    """Return the winner's config as plain values, with the stream of the base config.

    Args:
        search: The search.
        number: Number of the winner.
        chosen_so_far: Parameters chosen in each phase, by task; empty for a search with one phase.
    """
    winner = read_trial(search, number)
    history = chosen_so_far or winner["history"]
    return {
        **with_history(search.report_body, winner["params"], history),
        "name": f"{search.name}-winner",
        "storage": search.storage,
    }


def write_winner(search: Search, outcome: SearchOutcome, tests: Sequence[SeedTest]) -> str:
    """Write winner.yaml, a config for `run`, and winner.json. Return the path of winner.yaml.

    `_search_and_record` calls this function before the first test and again after each test, so
    that the page of the search shows the tests so far.

    Args:
        search: The search.
        outcome: The winner.
        tests: Results on test data so far, one per seed.
    """
    record = read_trial(search, outcome.trial)
    last = record["results"][-1]
    search_folder = folder(search.storage, search.name)
    lines = [
        f"# Winner of search {search.name}: trial {outcome.trial}, "
        f"validation accuracy {100 * last['accuracy']:.2f} % after {last['position'] + 1} tasks",
        f"# ({search.settings.protocol}), {last['bytes']:.0f} bytes kept per task.",
    ]
    lines += [f"# {key}: {value}" for key, value in record["params"].items()]
    lines.append(dump_yaml(outcome.config))
    config_path = join(search_folder, WINNER_CONFIG)
    write_bytes(config_path, "\n".join(lines).encode())
    body = {
        "trial": outcome.trial,
        "params": record["params"],
        "accuracy": last["accuracy"],
        "bytes": last["bytes"],
        "config": WINNER_CONFIG,
        "tests": list(tests),
        "pareto": pareto(search.records(record["phase"])),
    }
    write_bytes(join(search_folder, "winner.json"), json.dumps(body, indent=1).encode())
    return config_path


# ---- a whole search, with its report and MLflow record -------------------------------------------
def execute(
    search: Search, screen: SearchScreen, resume_command: str, report_command: str
) -> WrittenReport:
    """Run a search, measure its winner on test data, and write the report and MLflow record.

    Args:
        search: The search.
        screen: Prints the progress.
        resume_command: Command that resumes the search.
        report_command: Command that writes the report and the MLflow record again.

    Raises:
        UserError: If another process runs the search, or the search has no winner.
    """
    screen.say(screen.head())
    screen.say(f"its page, from now on: {get_page_path(search)}")
    try:
        with stage_lock(
            join(search.storage, "searches"), get_search_lock_key(search.name), wait=False
        ):
            return _search_and_record(search, screen, resume_command, report_command)
    except BlockingIOError:
        raise UserError(
            f"search {search.name!r} is being run by another process; "
            "wait for it, or give this one another name with --set name=NAME"
        ) from None


def _search_and_record(
    search: Search, screen: SearchScreen, resume_command: str, report_command: str
) -> WrittenReport:
    """Run the search, and write its winner, its report and its MLflow record."""
    recorder = SearchRecorder(search.tracking, search.storage, remedy=report_command)
    recorder.start(build_state(search))
    files: dict[str, bytes] = {}
    status = "KILLED"  # of the MLflow run, if an exception other than a UserError ends the search
    page = LivePage(partial(write_search_report, search, is_running=True))
    tests: list[SeedTest] = []
    write_state(search)  # the page is built from search.json

    def notify(record: Trial) -> None:
        screen(record)
        recorder.trial(record)
        page.on_result()

    def metrics() -> Iterator[Metric]:
        return search_metrics(search.name, list(screen.records.values()), search.budget_used())

    try:
        address = search.tracking.prometheus
        with page.writing(), announce_metrics(address, metrics, screen.say):
            outcome = run_search(search, resume_command, notify, screen)
            path = write_winner(search, outcome, tests)
            screen.say(screen.announce_winner(outcome.trial, path))
            page.on_result()
            for seed in search.settings.seeds:
                tests.append(evaluate_winner(search, outcome, seed, resume_command, screen))
                write_winner(search, outcome, tests)
                page.on_result()
        files = write_search_report(search, is_running=False)
        status = "FINISHED"
    except BaseException as error:
        if isinstance(error, UserError):
            status = "FAILED"
        with suppress(OSError, UserError):
            files = write_search_report(search, is_running=False)
        raise
    finally:
        winner = None
        with suppress(
            OSError, UserError
        ):  # an error here must not hide the reason why the search ended
            winner = load_trials(search.storage, search.name).winner
        recorder.finish(files, winner, status)
    screen.say(screen.describe_tests(tests))
    written = WrittenReport(get_page_path(search), recorder.warnings, recorder.links())
    screen.say("\n".join(written.lines))
    return written


def is_search(path: str) -> bool:
    """Return whether a file is a search file and not a config."""
    file = find_config(path)
    return file.exists() and "space" in read_yaml(file, "a config")


def report(search: Search) -> WrittenReport:
    """Write the report and the MLflow record of a search from the stored records.

    The search does not need to be finished. While it runs, only its own process writes the MLflow
    record.
    """
    write_search_report(search)
    if load_trials(search.storage, search.name).is_running:
        note = f"search {search.name!r} is running, and its process writes the MLflow record"
        return WrittenReport(get_page_path(search), [note], [])
    recorder = SearchRecorder.rebuild(search.storage, search.name, search.tracking)
    return WrittenReport(get_page_path(search), recorder.warnings, recorder.links())


def write_search_report(search: Search, is_running: bool | None = None) -> dict[str, bytes]:
    """Write the report into the folder of the search.

    Args:
        search: The search.
        is_running: Whether the page shows the search as running; None: derive it from the lock.

    Returns:
        File name -> content.
    """
    from pipeline.report import search_page  # slow: imports matplotlib

    files = search_page.build_search_report(search.storage, search.name, is_running)
    for name, data in files.items():
        write_bytes(join(folder(search.storage, search.name), name), data)
    return files


def get_page_path(search: Search) -> str:
    """Return the path or URI of the report's HTML page."""
    return join(folder(search.storage, search.name), "search.html")


def evaluate_winner(
    search: Search, outcome: SearchOutcome, seed: int, resume_command: str, screen: SearchScreen
) -> SeedTest:
    """Train the winner with one seed, and measure it on test data. Stored results are reused.

    The training is a run of its own, `SEARCH-winner-seedN`, with a report and an MLflow record.
    """
    name = f"{search.name}-winner-seed{seed}"
    config = configs.check({**outcome.config, "name": name, "seed": seed}, name)
    store = Store(search.storage)
    graph, tasks = build.build_graph(config, store, search.provenance)
    run = PreparedRun(config, store, graph, tasks)
    result = app.execute(run, screen.open_console, resume_command, resume_command)
    screen.say(summary(result.tables, result.outcome, result.report.lines))
    row = result.tables.summary(with_classes=False)[0]
    measured = {metric.name: row[metric.name] for metric in metrics_for("search_tests")}
    return cast(SeedTest, {"seed": seed, "run": name, **measured})
