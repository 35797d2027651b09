"""The report of a search: a self-contained HTML page, the table of trials, and figures.

Everything is read from the records of the search (`pipeline.results.trials`, which also defines a
phase). The search may still be running. Start with `build_search_report`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from pipeline.config.text import format_bytes, format_count, format_seconds
from pipeline.report import files, search_pictures, search_plots
from pipeline.report.figures import FigureFile
from pipeline.report.html_parts import NO_VALUE, format_rate, format_value, render_markup
from pipeline.report.parameters import (
    Parameter,
    format_setting,
    measure_importance,
    search_parameters,
)
from pipeline.results.metrics import metrics_for
from pipeline.results.trials import (
    SLACK,
    SearchRecord,
    Trial,
    as_number,
    best,
    completed,
    compute_trial_forgetting,
    gpu_hours,
    has_score,
    load_search_record,
    pareto,
    score,
    size,
)

COLUMNS = (
    "number",
    "phase",
    "status",
    "accuracy",
    "forgetting",
    "bytes",
    "tasks_completed",
    "stages_run",
    "stages_reused",
    "device_s",
    "gpu_s",
    "origin",
    "message",
)
RELOAD_S = 20  # seconds after which a browser reloads the page of a running search
OLDEST_MINUTES = 5  # maximum age of the page while the search is running
STATUS_STYLES = {"finished": "done", "stopped": "soft", "running": "pending", "failed": "bad"}
STATUS_TEXTS = {
    "finished": "finished",
    "stopped": "stopped early",
    "running": "running or interrupted",
    "failed": "failed",
}
PROTOCOLS = {
    "end_of_stream": "Every trial learns the whole stream with its own settings. Trials are "
    "compared by their average validation accuracy after the last task. The choice uses "
    "hindsight: with tasks that arrive one by one, later tasks could not have been tried first.",
    "first_k_tasks": "Every trial learns the first {tasks} of the stream with its own settings, "
    "and is compared by its average validation accuracy there. The winner's settings are then "
    "used for the whole stream, so later tasks had no part in the choice.",
    "per_task": "Settings are chosen task by task, in the order of the stream. Several trials "
    "learn the next task, each with other settings for it; all earlier tasks keep the settings "
    "chosen for them. The search continues from the best trial. The choice is greedy: it never "
    "uses later tasks and is never revised, so it can be made while tasks arrive, but may not be "
    "the best for the whole stream. Accuracies of trials for different tasks average over "
    "different tasks, so they cannot be compared.",
    "two_streams": "Every trial learns a stream made for the search, with its own settings. "
    "Trials are compared by their average validation accuracy after its last task. The winner's "
    "settings are then tested on the other stream, which had no part in the choice.",
}
ALGORITHMS = {
    "random": "Settings were drawn at random",
    "grid": "All combinations of settings were tried in turn",
    "tpe": "Settings were drawn more and more from where earlier trials did well (TPE)",
}
SCHEDULERS = {
    "none": "every trial ran to its end",
    "asha": "trials that were behind others after the same number of tasks were stopped early "
    "(ASHA)",
    "pbt": "trials that fell behind continued from changed settings of better ones (population "
    "based training)",
}


def build_search_report(
    storage: str, name: str, is_running: bool | None = None
) -> dict[str, bytes]:
    """Build all files of the report: `search.html`, `trials.csv`, `trials.parquet` and PNGs.

    Args:
        storage: Folder or URI of the results.
        name: Name of the search.
        is_running: Whether the search is running; None to read it from the lock of the search.

    Returns:
        File name -> content.

    Raises:
        UserError: If the search does not exist.
    """
    search = load_search_record(storage, name)
    if is_running is not None:
        search = replace(search, is_running=is_running)
    varied = search_parameters(search)
    shares, reason = measure_importance(search, varied)
    pictures = search_pictures.search_pictures(search, varied, shares)
    rows = trial_rows(search)
    columns = trial_columns(search)
    report_files = {
        "search.html": render_search_page(search, varied, pictures, reason).encode(),
        "trials.csv": files.as_csv(rows, columns),
        "trials.parquet": files.as_parquet(rows, columns),
    }
    return report_files | {picture.name: picture.png for picture in pictures}


def trial_columns(search: SearchRecord) -> list[str]:
    """Return the columns of the table of trials, in order."""
    keys = [parameter.key for parameter in search_parameters(search)]
    return [*COLUMNS[:3], *keys, *COLUMNS[3:]]


def trial_rows(search: SearchRecord) -> list[files.Row]:
    """Return one row per trial, with one column per setting.

    If one value of a setting is not a number, all values of the setting are written as text: a
    column of Parquet has one type.
    """
    text_keys = set()
    for parameter in search_parameters(search):
        values = [t["params"][parameter.key] for t in search.trials if parameter.key in t["params"]]
        if any(math.isnan(as_number(value)) for value in values):
            text_keys.add(parameter.key)
    origins = search.origins()
    rows = []
    for trial in search.trials:
        settings = dict(trial["params"])
        for key in text_keys & settings.keys():
            settings[key] = format_setting(settings[key])
        rows.append(
            {
                "number": trial["number"],
                "phase": trial["phase"],
                "status": trial["status"],
                **settings,
                "accuracy": score(trial),
                "forgetting": compute_trial_forgetting(trial["results"]),
                "bytes": size(trial),
                "tasks_completed": completed(trial),
                "stages_run": trial["stages"]["run"],
                "stages_reused": trial["stages"]["reused"],
                "device_s": float(trial["device_s"]),
                "gpu_s": float(trial.get("gpu_s", 0.0)),
                "origin": origins.get(trial["number"], ""),
                "message": trial["message"],
            }
        )
    return rows


# ---- the page ------------------------------------------------------------------------------------
def render_search_page(
    search: SearchRecord, varied: Sequence[Parameter], pictures: Sequence[FigureFile], reason: str
) -> Markup:
    """Render the page.

    Args:
        search: The search.
        varied: Parameters of the search.
        pictures: Pictures of the search.
        reason: Why importance was not measured; empty if it was measured.
    """
    winner = _find_winner(search)
    marks = _trial_marks(search)
    settings = {"space": search.record["space"], "set": search.record.get("set") or {}}
    provenance = search.record["provenance"]
    return render_markup(
        "search.html",
        title=search.name,
        reload_s=RELOAD_S if search.is_running else 0,
        search=search,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        has_failed=_has_failed(search),
        OLDEST_MINUTES=OLDEST_MINUTES,
        **_head_values(search),
        winner=winner,
        reason=explain_choice(search, winner) if winner else "",
        chosen=[(p, winner["params"][p.key]) for p in varied if p.key in winner["params"]]
        if winner
        else [],
        tests=_test_values(search, winner) if winner and search.winner else None,
        choices=choice_cells(search, varied),
        figure_names=list(search_pictures.SEARCH_FIGURES),
        pictures={picture.name: picture for picture in pictures},
        no_importance=reason if search.trials else "",
        space=[[p.name, p.dist or "-", p.says, p.key] for p in varied],
        cost=_cost_values(search),
        has_phases=len(search.phases) > 1,
        has_front=any("front" in mark for mark in marks.values()),
        trial_heading=_trial_heading(search, varied),
        trial_cells=[_trial_cells(search, trial, varied, marks) for trial in rank_trials(search)],
        failures=_numbers_by_message(search),
        settings=settings | search.settings,
        provenance=[(str(name), format_setting(value)) for name, value in provenance.items()],
    )


def _has_failed(search: SearchRecord) -> bool:
    """Return whether all trials of the last phase failed, so that the search has no winner."""
    trials = search.of(search.phases[-1]) if search.trials else []
    return bool(trials) and all(trial["status"] == "failed" for trial in trials)


def _head_values(search: SearchRecord) -> dict[str, Any]:
    protocol = str(search.settings.get("protocol", "end_of_stream"))
    trials = format_count(len(search.trials), "trial")
    budget = (search.settings.get("budget") or {}).get("trials")
    if budget and not search.winner and protocol != "per_task":
        trials += f" of {budget} planned"
    statuses = [trial["status"] for trial in search.trials]
    num_tasks = search.settings.get("first_tasks")
    if not num_tasks:
        num_tasks = max(map(completed, search.trials), default=0)
    return {
        "protocol": protocol,
        "protocol_text": PROTOCOLS.get(protocol, "").replace(
            "{tasks}", format_count(num_tasks, "task")
        ),
        "trials": trials,
        "counts": [
            f"{statuses.count(status)} {trial_status_text(search, status)}"
            for status in STATUS_TEXTS
            if status in statuses
        ],
        "algorithm": _describe_algorithm(search),
        "page_links": _links(search),
    }


def trial_status_text(search: SearchRecord, status: str) -> str:
    """Return the text for a status. Without a running search, `running` means interrupted."""
    if status != "running" or search.is_running is None:
        return STATUS_TEXTS[status]
    return "running" if search.is_running else "interrupted"


def _links(search: SearchRecord) -> list[tuple[str, str]]:
    links = [("winner", "Winner")]
    if len(search.phases) > 1:
        links.append(("choices", "Task by task"))
    links += [("space", "Search space"), ("cost", "Cost"), ("trials", "All trials")]
    if any(trial["status"] == "failed" for trial in search.trials):
        links.append(("failures", "Failures"))
    links.append(("settings", "Settings"))
    return links


def _describe_algorithm(search: SearchRecord) -> str:
    """Describe how settings were drawn and trials were stopped, without the final full stop."""
    algorithm = ALGORITHMS.get(str(search.settings.get("algorithm")), "Settings were drawn")
    scheduler = SCHEDULERS.get(str(search.settings.get("scheduler")))
    text = f"{algorithm}; {scheduler}" if scheduler else algorithm
    if "bytes" in (search.settings.get("objectives") or []):
        text += ". The search optimizes both accuracy and bytes"
    origins = search.origins()
    if origins:
        earlier = search.record["warm_start"].get("search")
        text += f". The first {format_count(len(origins), 'trial')} have points of search {earlier}"
    if search.record.get("note"):
        text += f" ({search.record['note']})"
    return text


# ---- the winner ----------------------------------------------------------------------------------
def _find_winner(search: SearchRecord) -> Trial | None:
    """Return the winner, or the best trial of the last phase with a finished trial, or None."""
    if search.winner:
        trial = search.trial(search.winner["trial"])
        if trial is not None:
            return trial
    chosen = search.chosen()
    for phase in reversed(search.phases):
        if phase in chosen:
            return search.trial(chosen[phase])
    return None


def explain_choice(search: SearchRecord, trial: Trial) -> str:
    """Explain why this trial was chosen, by accuracy, tolerance and size (see `best`).

    If the rule of `best` would now choose another trial, the text says so.
    """
    finished = [candidate for candidate in search.of(trial["phase"]) if has_score(candidate)]
    ruled = best(finished, search.tolerance)
    accuracy = format_rate(score(trial))
    if ruled != trial["number"]:
        return (
            f"The record of the search names trial {trial['number']} ({accuracy}). The rule of "
            f"this page gives trial {ruled}: trials may have finished after the choice was made."
        )
    top = search.trial(best(finished)) or trial
    threshold = score(top) - search.tolerance
    near = [candidate for candidate in finished if score(candidate) >= threshold - SLACK]
    trials = format_count(len(finished), "finished trial")
    if len(search.phases) > 1:
        trials += f" of those for {trial['phase']}"
    tolerance = format_points(search.tolerance)
    if len(near) == 1:
        text = f"It has the highest validation accuracy, {accuracy}, of {trials}"
        if search.tolerance:
            text += f"; no other comes within the tolerance of {tolerance}"
        return f"{text}."
    text = (
        f"The highest validation accuracy of {trials} is {format_rate(score(top))} "
        f"(trial {top['number']}). "
    )
    if search.tolerance:
        text += (
            f"Differences up to the tolerance of {tolerance} count as equal, and {len(near)} "
            f"trials reach {format_rate(threshold)} or more. "
        )
    else:
        text += f"{len(near)} trials reach it. "
    text += f"Of these trial {trial['number']}, with {accuracy}, "
    sizes = [size(candidate) for candidate in near]
    if math.isnan(size(trial)) or sizes.count(size(trial)) > 1:
        return f"{text}comes first among those that store the fewest bytes per task."
    return f"{text}stores the fewest bytes per task: {format_bytes(size(trial))}."


def _test_values(search: SearchRecord, trial: Trial) -> dict[str, Any] | None:
    """Return the results of the winner on test images for the template; None without a test."""
    records = search.winner["tests"] if search.winner else []
    tests = [t for t in records if not math.isnan(as_number(t.get("average_accuracy")))]
    if not tests:
        return None
    accuracies = [as_number(test["average_accuracy"]) for test in tests]
    mean = statistics.mean(accuracies)
    mean_text = f"{100 * mean:.1f}"
    if len(accuracies) > 1:
        mean_text += f" ± {100 * statistics.stdev(accuracies):.1f}"
    metrics = metrics_for("search_tests")
    rows = []
    for test in tests:
        cells = [format_value(as_number(test.get(metric.name)), metric.unit) for metric in metrics]
        rows.append([test.get("seed", "-"), test.get("run", "-"), *cells])
    if len(tests) > 1:
        means = [format_value(_compute_mean(tests, metric.name), metric.unit) for metric in metrics]
        rows.append(["all", "mean ± standard deviation", f"{mean_text} %", *means[1:]])
    planned = search.settings.get("seeds")
    if isinstance(planned, list):
        planned = len(planned)
    return {
        "count": len(tests),
        "mean_text": mean_text,
        "lowest": min(accuracies),
        "highest": max(accuracies),
        "compared": _compare_with_validation(search, trial, mean),
        "planned": planned,
        "missing": max(planned - len(tests), 0) if isinstance(planned, int) else 0,
        "heading": ["seed", "run", *(metric.title for metric in metrics)],
        "rows": rows,
    }


def _compute_mean(tests: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean of a value over the tests that have the value; NaN if no test has it."""
    values = [as_number(test.get(key)) for test in tests]
    known = [value for value in values if not math.isnan(value)]
    return statistics.mean(known) if known else math.nan


def _compare_with_validation(search: SearchRecord, trial: Trial, mean: float) -> str:
    """Return a sentence that compares the validation accuracy of the winner with its test accuracy.

    Args:
        search: The search.
        trial: The winner.
        mean: Mean test accuracy.
    """
    accuracy = score(trial)
    if search.settings.get("protocol") in ("two_streams", "first_k_tasks"):
        return (
            f"Its validation accuracy in the search, {format_rate(accuracy)}, was measured on "
            "other tasks, so the two cannot be compared."
        )
    side = "above" if mean < accuracy else "below"
    return (
        f"Its validation accuracy in the search was {format_rate(accuracy)}, "
        f"{format_points(abs(mean - accuracy))} {side} that. Some loss is usual: the best of many "
        "trials is partly the luckiest."
    )


def choice_cells(search: SearchRecord, varied: Sequence[Parameter]) -> list[list[object]]:
    """Return one row of cells per task with its chosen trial; empty if there is only one phase."""
    if len(search.phases) < 2:
        return []
    chosen = search.chosen()
    rows: list[list[object]] = []
    for phase in search.phases:
        trials = search.of(phase)
        num_finished = len([trial for trial in trials if trial["status"] == "finished"])
        progress = f"{num_finished} of {len(trials)}"
        trial = search.trial(chosen.get(phase))
        if trial is None:
            rows.append([phase, "not chosen yet", "-", progress, NO_VALUE, "-"])
            continue
        settings = []
        for parameter in varied:
            if parameter.key in trial["params"]:
                value = format_setting(trial["params"][parameter.key])
                settings.append(f"{parameter.name} {value}")
        accuracy = format_value(score(trial), "rate")
        cells: list[object] = [phase, ", ".join(settings), trial["number"], progress, accuracy]
        cells.append(format_bytes(size(trial)))
        rows.append(cells)
    return rows


# ---- cost ----------------------------------------------------------------------------------------
def _cost_values(search: SearchRecord) -> dict[str, Any]:
    """Return device time, budget, and the time saved by shared stages, for the template."""
    num_run = sum(trial["stages"]["run"] for trial in search.trials)
    num_reused = sum(trial["stages"]["reused"] for trial in search.trials)
    device_s = sum(trial["device_s"] for trial in search.trials)
    sessions = search.record["sessions"]
    walls = [as_number(session.get("wall_s")) for session in sessions if isinstance(session, dict)]
    wall_s = sum(wall for wall in walls if not math.isnan(wall))
    wall_text = "-"
    if sessions:
        wall_text = f"{format_seconds(wall_s)} in {format_count(len(sessions), 'session')}"
    rows = [
        ["device time", f"{format_seconds(device_s)} ({device_s / 3600:.3g} device-hours)"],
        ["stages computed", f"{num_run:,}"],
        ["stages reused", f"{num_reused:,}"],
        ["wall time", wall_text],
    ]
    gpus = gpu_hours(search.trials)
    if gpus:
        rows.insert(1, ["GPU time", f"{format_seconds(3600 * gpus)} ({gpus:.3g} GPU-hours)"])
    used = {"hours": wall_s / 3600, "stages": num_run, "gpu_hours": gpus}
    rows += _budget_cells(search, used)
    if not (num_run and num_reused):
        return {"rows": rows, "share": 0}
    share = 100 * num_reused / (num_run + num_reused)
    # estimate: a reused stage would have taken the mean time of the computed ones
    return {"rows": rows, "share": share, "saved_s": device_s / num_run * num_reused}


def _budget_cells(search: SearchRecord, used: Mapping[str, float]) -> list[list[str]]:
    """Return one row per limit of the budget.

    Args:
        search: The search.
        used: Limit -> used amount, for all limits except the number of trials.
    """
    trials_name = "trials"
    num_trials = len(search.trials)
    if search.settings.get("protocol") == "per_task":
        trials_name = "trials for each task"
        num_trials = max((len(search.of(phase)) for phase in search.phases), default=0)
    budget = search.settings.get("budget") or {}
    rows = []
    for name, value in {"trials": num_trials, **used}.items():
        if not math.isnan(as_number(budget.get(name))):
            title = trials_name if name == "trials" else name
            rows.append([f"budget of {title}", f"{value:.3g} of {budget[name]:,} used"])
    return rows


# ---- trials --------------------------------------------------------------------------------------
def rank_trials(search: SearchRecord) -> list[Trial]:
    """Sort trials by phase, status and accuracy, and among equals by size and number.

    Stopped trials are sorted by the number of learned tasks before the accuracy, because accuracies
    after different numbers of tasks cannot be compared.
    """
    phases = {phase: index for index, phase in enumerate(search.phases)}
    statuses = list(STATUS_STYLES)

    def rank(trial: Trial) -> tuple[Any, ...]:
        progress = completed(trial) if trial["status"] == "stopped" else 0
        accuracy = score(trial)
        if math.isnan(accuracy):
            accuracy = -math.inf
        num_bytes = size(trial)
        if math.isnan(num_bytes):
            num_bytes = math.inf
        phase = phases[trial["phase"]]
        status = statuses.index(trial["status"])
        return phase, status, -progress, -accuracy, num_bytes, trial["number"]

    return sorted(search.trials, key=rank)


def _trial_heading(search: SearchRecord, varied: Sequence[Parameter]) -> list[str]:
    heading = ["trial", "", "status", "accuracy", "forgetting", "bytes", "tasks"]
    if len(search.phases) > 1:
        heading.insert(1, "for task")
    heading += [parameter.name for parameter in varied]
    return [*heading, "stages run / reused", "device time"]


def _trial_cells(
    search: SearchRecord, trial: Trial, varied: Sequence[Parameter], marks: Mapping[int, str]
) -> list[str]:
    status = trial["status"]
    state = Markup('<span class="{}">{}</span>').format(
        STATUS_STYLES[status], trial_status_text(search, status)
    )
    if status == "stopped" and trial["message"]:
        state += Markup('<div class="soft reason">{}</div>').format(trial["message"])
    params = trial["params"]
    return [
        str(trial["number"]),
        *([trial["phase"]] if len(search.phases) > 1 else []),
        marks.get(trial["number"], ""),
        state,
        format_value(score(trial), "rate"),
        format_value(compute_trial_forgetting(trial["results"]), "rate"),
        format_bytes(size(trial)),
        str(completed(trial)),
        *(format_setting(params[p.key]) if p.key in params else NO_VALUE for p in varied),
        f"{trial['stages']['run']} / {trial['stages']['reused']}",
        format_seconds(float(trial["device_s"])),
    ]


def _trial_marks(search: SearchRecord) -> dict[int, Markup]:
    """Return trial number -> marks: chosen, on the Pareto front, taken from an earlier search.

    A chosen trial on the front has the mark of a chosen trial instead of that of the front.
    """
    soft = Markup('<span class="soft">{}</span>')
    marks: dict[int, Markup] = {}
    if search_plots.sizes_differ(search):
        for phase in search.phases:
            marks |= dict.fromkeys(pareto(search.of(phase)), soft.format("front"))
    label = Markup("<b>{}</b>").format(search_plots.chosen_label(search))
    marks |= dict.fromkeys(search.chosen().values(), label)
    for number, origin in search.origins().items():
        mark = marks[number] + " " if number in marks else Markup()
        marks[number] = mark + soft.format(f"of {origin}")
    return marks


def _numbers_by_message(search: SearchRecord) -> dict[str, list[int]]:
    """Return message -> numbers of the failed trials with this message."""
    numbers: dict[str, list[int]] = {}
    for trial in search.trials:
        if trial["status"] == "failed":
            message = " ".join(trial["message"].split()) or "no reason was recorded"
            numbers.setdefault(message, []).append(trial["number"])
    return numbers


def format_points(difference: float) -> str:
    """Return a difference of accuracies in percentage points, such as `0.5 points` for 0.005."""
    text = f"{100 * difference:.2g}"
    return f"{text} point" if text == "1" else f"{text} points"
