"""Search over streams: phases of trials on Ray Tune, the winner's config, and the winner measured
on test data. Records decide, not Tune's state."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import config as configs
from pipeline.console import Console, summary
from pipeline.results.trials import best, pareto
from pipeline.results.trials import load as load_trials
from pipeline.search import space as spaces
from pipeline.search.screen import SearchScreen
from pipeline.search.space import Params
from pipeline.search.spec import Search, prepare, state_of, write_state
from pipeline.search.trial import Plan, folder, now, with_history
from pipeline.tracking.search_recorder import SearchRecorder
from pipeline.yaml_files import dump_yaml, read_yaml
from workers.errors import UserError
from workers.storage.artifact import join, write_bytes
from workers.storage.lock import stage_lock

TrialObserver = Callable[
    [dict[str, Any]], None
]  # is given the record of each trial that has a new result or ended


@dataclass(frozen=True)
class Outcome:
    """The trial that won, and the config that it is."""

    trial: int
    config: dict[str, Any]


# ---- the search ----------------------------------------------------------------------------------
def run_search(search: Search, command: str, notify: TrialObserver) -> Outcome:
    """All phases, then the winner. What was found before stands, and is told again. Raises
    UserError where there is no winner."""
    from pipeline.launch.cluster import connect

    started = time.monotonic()
    session = {"started": now(), "wall_s": 0.0}
    search.sessions.append(session)

    def clocked(record: dict[str, Any]) -> None:
        session["wall_s"] = round(time.monotonic() - started, 3)
        write_state(search)  # a session that is killed has taken its time, too
        notify(record)

    write_state(search)
    ray = connect(search.cluster)
    os.environ |= {
        "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends a search as it ends a run
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # one of Tune's loggers is enough
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    }  # a trial may fail before its first result
    try:
        ingest(search, command)
        from pipeline.search import tune

        chosen_so_far: dict[str, Params] = {}
        chosen: int | None = None
        for first, plan in phases(search, chosen_so_far):
            run = tune.run_population if plan.each else tune.run_phase
            run(search, plan, first, clocked)
            chosen = best(search.records(plan.phase), search.settings.tolerance)
            if chosen is None:
                raise UserError(no_winner(search, plan.phase, command))
            chosen_so_far |= {plan.phase: record_of(search, chosen)["params"]} if plan.phase else {}
    finally:
        session["wall_s"] = round(time.monotonic() - started, 3)
        write_state(search)
        ray.shutdown()
    assert chosen is not None  # there is a phase
    return Outcome(chosen, winner_config(search, chosen, chosen_so_far))


def phases(search: Search, chosen_so_far: Mapping[str, Params]) -> Iterator[tuple[int, Plan]]:
    """Yield (number of the first trial, plan): one phase for all tasks, or one phase per task.

    `chosen_so_far` is read when a phase begins.
    """
    settings = search.settings
    plan = Plan(
        search.name,
        search.storage,
        search.body,
        search.provenance,
        search.tasks,
        search.own,
        each=settings.scheduler == "pbt",
    )
    if settings.protocol != "per_task":
        yield 0, plan
        return
    trials = (
        len(search.space.grid()) if settings.algorithm == "grid" else settings.budget.trials or 0
    )
    for index, task in enumerate(search.own):
        last = search.tasks.index(task) + 1
        yield (
            index * trials,
            replace(
                plan,
                tasks=search.tasks[:last],
                only=True,
                phase=task,
                chosen_so_far=dict(chosen_so_far),
            ),
        )


def ingest(search: Search, command: str) -> None:
    """The data of the tasks, once, by all of the cluster."""
    from pipeline import app
    from pipeline.graph import build
    from pipeline.graph.stage import Graph
    from pipeline.graph.store import Store

    config = configs.check(
        spaces.with_params(search.body, next(search.space.corners())), search.name
    )
    store = Store(search.storage)
    graph, tasks = build.graph_of(config, store, search.provenance, "val")
    cards = {f"data/{task.card}" for task in tasks if task.name in search.tasks}
    part = Graph.of(graph.name, [stage for stage in graph if stage.id in cards])
    app.bring(part, config, store, Console, command)


def record_of(search: Search, number: int) -> dict[str, Any]:
    return next(record for record in search.records() if record["number"] == number)


def no_winner(search: Search, phase: str, command: str) -> str:
    """Why no trial can win, in one sentence."""
    records = search.records(phase)
    messages = [record["message"] for record in records if record["status"] == "failed"]
    if not records:
        reason = "its budget was used up before a trial began; raise it, as in --set budget.hours=N"
    elif messages:
        reason = f"{len(messages)} of {len(records)} trials failed, the first one so: {messages[0]}"
    else:
        reason = (
            "none of its trials came to its last task; raise the budget, as in --set budget.hours=N"
        )
    return (
        f"search {search.name!r} has no winner{f' for task {phase!r}' if phase else ''}: "
        f"{reason}; what was found is kept, go on with: {command}"
    )


def winner_config(
    search: Search, number: int, chosen_so_far: Mapping[str, Params]
) -> dict[str, Any]:
    """Plain values of the config with what won in place, on the base's own stream."""
    winner = record_of(search, number)
    history = chosen_so_far or winner["history"]
    return {
        **with_history(search.report_body, winner["params"], history),
        "name": f"{search.name}-winner",
        "storage": search.storage,
    }


def write_winner(search: Search, outcome: Outcome, tests: Sequence[Mapping[str, Any]]) -> str:
    """winner.yaml, which `run` accepts, and winner.json; returns the path of the first."""
    record = record_of(search, outcome.trial)
    last = record["results"][-1]
    place = folder(search.storage, search.name)
    header = [
        f"# Winner of search {search.name}: trial {outcome.trial}, validation accuracy "
        f"{100 * last['accuracy']:.2f} % after {last['position'] + 1} tasks",
        f"# ({search.settings.protocol}), {last['bytes']:.0f} bytes kept per task.",
        *(f"# {key}: {value}" for key, value in record["params"].items()),
    ]
    write_bytes(
        join(place, "winner.yaml"), ("\n".join(header) + "\n" + dump_yaml(outcome.config)).encode()
    )
    body = {
        "trial": outcome.trial,
        "params": record["params"],
        "accuracy": last["accuracy"],
        "bytes": last["bytes"],
        "config": "winner.yaml",
        "tests": list(tests),
        "pareto": pareto(search.records(record["phase"])),
    }
    write_bytes(join(place, "winner.json"), json.dumps(body, indent=1).encode())
    return join(place, "winner.yaml")


# ---- the command ---------------------------------------------------------------------------------
def command(args: argparse.Namespace) -> int:
    """Searches, writes the winner's config, and measures it on test data."""
    from pipeline import app

    resume_command = app.command_text("search", args.config, args.overrides)
    remedy = app.command_text("report", args.config, args.overrides)
    search = prepare(args.config, args.overrides, app.provenance())
    screen = SearchScreen(search)
    print(screen.head(), flush=True)
    try:
        with stage_lock(join(search.storage, "searches"), f"search-{search.name}", wait=False):
            return searched(search, screen, resume_command, remedy)
    except BlockingIOError:
        raise UserError(
            f"search {search.name!r} is being run by another process; wait for it, or give this "
            "one another name with --set name=NAME"
        ) from None


def searched(search: Search, screen: SearchScreen, resume_command: str, remedy: str) -> int:
    """Run the search, and write its winner and its record.

    resume_command: the command that continues the search. remedy: the command that writes the
    MLflow record again.
    """
    recorder = SearchRecorder(search.tracking, search.storage, remedy=remedy)
    recorder.start(state_of(search))
    files: dict[str, bytes] = {}
    status = "KILLED"

    def notify(record: dict[str, Any]) -> None:
        screen(record)
        recorder.trial(record)

    try:
        outcome = run_search(search, resume_command, notify)
        path = write_winner(search, outcome, [])
        print(screen.won(outcome.trial, path), flush=True)
        tests = [
            evaluate_winner(search, outcome, seed, resume_command) for seed in search.settings.seeds
        ]
        write_winner(search, outcome, tests)
        files, status = export(search), "FINISHED"
    except UserError:
        status = "FAILED"
        raise
    finally:
        recorder.finish(files, load_trials(search.storage, search.name).winner, status)
    print(
        "\n".join(
            [
                screen.tested(tests),
                *recorder.warnings,
                f"report: {page_of(search)}",
                *recorder.links(),
            ]
        )
    )
    return 0


def is_search(path: str) -> bool:
    """Whether a file is a search, and no config to run."""
    return Path(path).exists() and "space" in read_yaml(Path(path), "a config")


def report(args: argparse.Namespace) -> int:
    """The report of a search from its records, also of an unfinished one."""
    from pipeline import app

    search = prepare(args.config, args.overrides, app.provenance())
    export(search)
    recorder = SearchRecorder.rebuild(search.storage, search.name, search.tracking)
    print("\n".join([*recorder.warnings, f"report: {page_of(search)}", *recorder.links()]))
    return 0


def export(search: Search) -> dict[str, bytes]:
    """Writes the report beside the records; returns its files."""
    from pipeline.report import search_page as page

    files = page.build(search.storage, search.name)
    for name, data in files.items():
        write_bytes(join(folder(search.storage, search.name), name), data)
    return files


def page_of(search: Search) -> str:
    return join(folder(search.storage, search.name), "search.html")


def evaluate_winner(
    search: Search, outcome: Outcome, seed: int, resume_command: str
) -> dict[str, Any]:
    """The winner with one seed, trained (as far as the store has it not) and measured on test
    data."""
    from pipeline import app
    from pipeline.graph import build
    from pipeline.graph.store import Store

    name = f"{search.name}-winner-seed{seed}"
    config = configs.check({**outcome.config, "name": name, "seed": seed}, name)
    store = Store(search.storage)
    graph, tasks = build.graph_of(config, store, search.provenance)
    run = app.PreparedRun(config, store, graph, tasks)
    result = app.execute(run, Console, resume_command, resume_command)
    print(summary(result.tables, result.outcome, result.published.lines))
    row = result.tables.summary()[0]
    return {
        "seed": seed,
        "run": name,
        **{key: row[key] for key in ("average_accuracy", "forgetting", "bytes_per_task")},
    }
