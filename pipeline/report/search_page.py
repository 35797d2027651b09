"""The report of a search: one self-contained HTML page, the table of its trials, and its plots.

Everything is read from the records of the search, finished or not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from pipeline.report import files, plots, search_pictures, search_plots
from pipeline.report.figures import Picture
from pipeline.report.html_parts import (
    NO_VALUE,
    format_seconds,
    format_value,
    format_yaml,
    plural,
    render_document,
    render_facts,
    render_links,
    render_picture,
    render_table,
)
from pipeline.report.parameters import (
    Parameter,
    format_setting,
    measure_importance,
    search_parameters,
)
from pipeline.results.metrics import metrics_for
from pipeline.results.trials import (
    SLACK,
    Search,
    Trial,
    as_number,
    best,
    completed,
    forgetting,
    gpu_hours,
    load,
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
RELOAD_S = 20  # a browser loads the page of a running search again
OLDEST_MINUTES = 5  # age of the page of a search that runs, at most
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


def build(storage: str, name: str, is_running: bool | None = None) -> dict[str, bytes]:
    """Return all files of the report by name: `search.html`, `trials.csv`, `trials.parquet`, PNGs.

    is_running: whether the search goes on; None: as its lock says. Raise UserError when there is no
    such search.
    """
    search = load(storage, name)
    if is_running is not None:
        search = replace(search, is_running=is_running)
    varied = search_parameters(search)
    shares, reason = measure_importance(search, varied)
    pictures = search_pictures.search_pictures(search, varied, shares)
    rows = trial_rows(search)
    columns = trial_columns(search)
    report_files = {
        "search.html": render_page(search, varied, pictures, reason).encode(),
        "trials.csv": files.as_csv(rows, columns),
        "trials.parquet": files.as_parquet(rows, columns),
    }
    return report_files | {picture.name: picture.png for picture in pictures}


def trial_columns(search: Search) -> list[str]:
    """Return the columns of the table of trials, in order."""
    keys = [parameter.key for parameter in search_parameters(search)]
    return [*COLUMNS[:3], *keys, *COLUMNS[3:]]


def trial_rows(search: Search) -> list[files.Row]:
    """Return one row per trial with a column per setting.

    A setting is a text column when one of its values is no number.
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
                "forgetting": forgetting(trial["results"]),
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
def render_page(
    search: Search, varied: Sequence[Parameter], pictures: Sequence[Picture], reason: str
) -> str:
    """Return the page as HTML. reason: why importance is not measured, empty if it is."""
    figures = {picture.name: render_picture(picture) for picture in pictures}
    if reason and search.trials:
        figures["importance.png"] = f'<p class="soft">{escape(reason)}</p>'
    sections = [
        render_head(search),
        render_problems(search),
        render_winner(search, varied),
        render_choices(search, varied),
    ]
    sections += [figures.get(name, "") for name in search_pictures.SEARCH_FIGURES]
    sections.append(render_space(search, varied))
    sections.append(render_cost(search))
    sections.append(render_trials(search, varied))
    sections.append(render_failures(search))
    sections.append(render_settings(search))
    reload_s = RELOAD_S if search.is_running else 0
    return render_document(f"{escape(str(search.name))} · search", sections, reload_s)


def count_text(count: float, noun: str) -> str:
    """(2, `trial`) -> `2 trials`."""
    return f"{count:,} {noun}{plural(count)}"


def _has_failed(search: Search) -> bool:
    """Whether all trials of the last phase failed, so that it has no winner."""
    trials = search.of(search.phases[-1]) if search.trials else []
    return bool(trials) and all(trial["status"] == "failed" for trial in trials)


def render_head(search: Search) -> str:
    """Return title, state, introduction and links."""
    protocol = str(search.settings.get("protocol", "end_of_stream"))
    state = "finished"
    live = ""
    if search.is_running:
        written = time.strftime("%Y-%m-%d %H:%M:%S %z")
        state = f'<span class="pending">running at {written}</span>'
        live = (
            '<p class="soft">This page loads itself again while the search runs. It is written at '
            f"least every {OLDEST_MINUTES} minutes: if that time is older, the search was killed. "
            "The same command continues it.</p>"
        )
    elif _has_failed(search):
        state = '<span class="bad">failed: every trial failed, the table of trials says why</span>'
    elif not search.winner:
        state = '<span class="pending">not finished: there is no winner yet</span>'
    trials = count_text(len(search.trials), "trial")
    budget = (search.settings.get("budget") or {}).get("trials")
    if budget and not search.winner and protocol != "per_task":
        trials += f" of {budget} planned"
    statuses = [trial["status"] for trial in search.trials]
    counts = [
        f"{statuses.count(status)} {status_text(search, status)}"
        for status in STATUS_TEXTS
        if status in statuses
    ]
    num_tasks = search.settings.get("first_tasks")
    if not num_tasks:
        num_tasks = max(map(completed, search.trials), default=0)
    protocol_text = PROTOCOLS.get(protocol, "").replace("{tasks}", count_text(num_tasks, "task"))
    return (
        f"<h1>{escape(str(search.name))}</h1>"
        f"<div class=soft>search · protocol {escape(protocol)} · {trials} · "
        f"seed {escape(str(search.settings.get('seed', 0)))} · "
        f"started {escape(str(search.record.get('created', '')))} · {state}</div>"
        "<p style='margin-top:14px'>A search tries many settings and keeps the best. A "
        "<b>trial</b> is one choice of settings, trained and then evaluated on "
        "<b>validation images</b>, which are held out of training. Test images are not read until "
        f"the winner is chosen. {escape(protocol_text)}</p>"
        f"<p>{escape(_describe_algorithm(search))}. "
        f"Trials: {', '.join(counts) or 'none has started'}.</p>"
        f"{live}{render_links(_links(search))}"
    )


def status_text(search: Search, status: str) -> str:
    """Return what the page says of trials with a status: without a process none is running."""
    if status != "running" or search.is_running is None:
        return STATUS_TEXTS[status]
    return "running" if search.is_running else "interrupted"


def _links(search: Search) -> list[tuple[str, str]]:
    links = [("winner", "Winner")]
    if len(search.phases) > 1:
        links.append(("choices", "Task by task"))
    links += [("space", "Search space"), ("cost", "Cost"), ("trials", "All trials")]
    if any(trial["status"] == "failed" for trial in search.trials):
        links.append(("failures", "Failures"))
    links.append(("settings", "Settings"))
    return links


def _describe_algorithm(search: Search) -> str:
    """Return how settings were drawn and trials were stopped, without the last full stop."""
    algorithm = ALGORITHMS.get(str(search.settings.get("algorithm")), "Settings were drawn")
    scheduler = SCHEDULERS.get(str(search.settings.get("scheduler")))
    text = f"{algorithm}; {scheduler}" if scheduler else algorithm
    if "bytes" in (search.settings.get("objectives") or []):
        text += ". The search optimizes both accuracy and bytes"
    origins = search.origins()
    if origins:
        earlier = search.record["warm_start"].get("search")
        text += f". The first {count_text(len(origins), 'trial')} have points of search {earlier}"
    if search.record.get("note"):
        text += f" ({search.record['note']})"
    return text


def render_problems(search: Search) -> str:
    """Return the list of files that could not be read; empty without any."""
    if not search.problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in search.problems[:20])
    if len(search.problems) > 20:
        items += f"<li>and {len(search.problems) - 20} more</li>"
    title = f"{count_text(len(search.problems), 'file')} could not be used"
    return f'<div class="note"><b>{title}</b><ul>{items}</ul></div>'


# ---- the winner ----------------------------------------------------------------------------------
def render_winner(search: Search, varied: Sequence[Parameter]) -> str:
    """Return the winner, why it was chosen, its settings, and its accuracy on test images."""
    trial = _winner_trial(search)
    if trial is None:
        reason = "no trial has finished yet"
        if search.winner:
            reason = f"the record of trial {search.winner['trial']} of winner.json is missing"
        return f'<h2 id="winner">Winner</h2><p>There is no winner to show: {reason}.</p>'
    title = "Winner" if search.winner else "Leading so far"
    hint = ""
    if len(search.phases) > 1:
        hint = (
            "<p>Settings are chosen for each task, one after the other (<a "
            "href='#choices'>task by task</a>). This trial holds the last choice and all earlier "
            "ones.</p>"
        )
    return (
        f'<h2 id="winner">{title}: trial {trial["number"]}</h2>{hint}'
        f"<p>{escape(explain_choice(search, trial))}</p>"
        f"{render_chosen_settings(search, trial, varied)}{render_tests(search, trial)}"
    )


def _winner_trial(search: Search) -> Trial | None:
    """Return the winner, or the leading trial of the last phase that has one."""
    if search.winner:
        trial = search.trial(search.winner["trial"])
        if trial is not None:
            return trial
    chosen = search.chosen()
    for phase in reversed(search.phases):
        if phase in chosen:
            return search.trial(chosen[phase])
    return None


def explain_choice(search: Search, trial: Trial) -> str:
    """Return why this trial was chosen, by the rule of tolerance."""
    finished = [candidate for candidate in search.of(trial["phase"]) if _has_finished(candidate)]
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
    trials = count_text(len(finished), "finished trial")
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
    return f"{text}stores the fewest bytes per task: {plots.format_bytes(size(trial))}."


def _has_finished(trial: Trial) -> bool:
    return trial["status"] == "finished" and not math.isnan(score(trial))


def render_chosen_settings(search: Search, trial: Trial, varied: Sequence[Parameter]) -> str:
    """Return the settings of a trial, marked when they lie at an end of the search space."""
    rows = []
    for parameter in varied:
        if parameter.key in trial["params"]:
            value = trial["params"][parameter.key]
            hint = ""
            if parameter.at_end(value):
                hint = '<span class="pending">at an end: try a wider range</span>'
            name = f"<b>{escape(parameter.name)}</b>"
            chosen = f"<b>{escape(format_setting(value))}</b>"
            rows.append([name, chosen, escape(parameter.says), hint])
    html = ""
    if rows:
        html = render_table(["setting", "chosen", "searched", ""], rows, 4, is_html=True)
    if search.winner and search.winner.get("config"):
        path = escape(str(search.winner["config"]))
        html += (
            f"<p>All its settings are in <code>{path}</code> in the folder of this search, a "
            "config that <code>run</code> accepts.</p>"
        )
    return html


def render_tests(search: Search, trial: Trial) -> str:
    """Return the accuracy of the winner on test images; empty while there is no winner."""
    if search.winner is None:
        return ""
    tests = [
        t for t in search.winner["tests"] if not math.isnan(as_number(t.get("average_accuracy")))
    ]
    if not tests:
        return "<h3>On test images</h3><p>The winner has not been tested yet.</p>"
    accuracies = [as_number(test["average_accuracy"]) for test in tests]
    mean = statistics.mean(accuracies)
    mean_text = f"{100 * mean:.1f}"
    if len(accuracies) > 1:
        mean_text += f" ± {100 * statistics.stdev(accuracies):.1f}"
    text = (
        f"The winner was trained again with {count_text(len(tests), 'seed')} and tested on test "
        "images, which were not read before the choice was made: "
        f"<b>{mean_text}\u00a0%</b> on average"
    )
    if len(accuracies) > 1:
        text += f", from {format_rate(min(accuracies))} to {format_rate(max(accuracies))}"
    text += f". {_compare_with_validation(search, trial, mean)}"
    num_seeds = search.settings.get("seeds")
    if isinstance(num_seeds, list):
        num_seeds = len(num_seeds)
    if isinstance(num_seeds, int) and num_seeds > len(tests):
        missing = count_text(num_seeds - len(tests), "seed")
        text += f" {missing} of {num_seeds} not tested yet."
    heading = ["seed", "run", *(metric.title for metric in metrics_for("search_tests"))]
    table = render_table(heading, _test_cells(tests, mean_text), 2)
    return f"<h3>On test images</h3><p>{text}</p>{table}"


def _test_cells(tests: Sequence[Mapping[str, Any]], mean_text: str) -> list[list[Any]]:
    """Return one row per test, and for several tests a row of means."""
    metrics = metrics_for("search_tests")
    rows = []
    for test in tests:
        cells = [format_value(as_number(test.get(metric.name)), metric.unit) for metric in metrics]
        rows.append([test.get("seed", "-"), test.get("run", "-"), *cells])
    if len(tests) > 1:
        means = [format_value(_mean_of(tests, metric.name), metric.unit) for metric in metrics]
        rows.append(["all", "mean ± standard deviation", f"{mean_text} %", *means[1:]])
    return rows


def _mean_of(tests: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean of the tests that have a value; NaN when none has."""
    values = [as_number(test.get(key)) for test in tests]
    known = [value for value in values if not math.isnan(value)]
    return statistics.mean(known) if known else math.nan


def _compare_with_validation(search: Search, trial: Trial, mean: float) -> str:
    """Return a sentence on the winner's validation accuracy beside its test accuracy."""
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


def render_choices(search: Search, varied: Sequence[Parameter]) -> str:
    """Return the choice for each task, in stream order; empty without several phases."""
    if len(search.phases) < 2:
        return ""
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
        cells.append(plots.format_bytes(size(trial)))
        rows.append(cells)
    heading = ["task", "chosen settings", "trial", "trials finished", "accuracy", "bytes per task"]
    return (
        '<h2 id="choices">Task by task</h2><p>The settings chosen for each task, in the order of '
        "the stream. The accuracy is the average over the tasks so far, with the settings chosen "
        "for each of them. It falls where a harder task follows.</p>"
        f"{render_table(heading, rows, 2)}"
    )


# ---- space and cost ------------------------------------------------------------------------------
def render_space(search: Search, varied: Sequence[Parameter]) -> str:
    """Return the table of the settings that differ between trials."""
    rows = [[p.name, p.dist or "-", p.says, p.key] for p in varied]
    table = "<p>The record names no settings.</p>"
    if rows:
        table = render_table(["setting", "distribution", "values", "key in the config"], rows, 4)
    base = ""
    if search.record.get("base"):
        base = f"All other settings are those of <code>{escape(str(search.record['base']))}</code>."
    return (
        '<h2 id="space">Search space</h2><p>The settings that differ between trials. '
        f"{base}</p>{table}"
    )


def render_cost(search: Search) -> str:
    """Return device time, budget, and what was saved because trials share stages."""
    num_run = sum(trial["stages"]["run"] for trial in search.trials)
    num_reused = sum(trial["stages"]["reused"] for trial in search.trials)
    device_s = sum(trial["device_s"] for trial in search.trials)
    sessions = search.record["sessions"]
    walls = [as_number(session.get("wall_s")) for session in sessions if isinstance(session, dict)]
    wall_s = sum(wall for wall in walls if not math.isnan(wall))
    wall_text = "-"
    if sessions:
        wall_text = f"{format_seconds(wall_s)} in {count_text(len(sessions), 'session')}"
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
    saved = ""
    if num_run and num_reused:
        share = 100 * num_reused / (num_run + num_reused)
        saved_s = device_s / num_run * num_reused
        saved = (
            "<p>Trials with the same settings up to some stage share the results up to there. "
            f"<b>{share:.0f} %</b> of the stages that trials needed were reused and not computed "
            f"again. That saved about {format_seconds(saved_s)} of device time, at the average of "
            "the stages that ran.</p>"
        )
    return (
        '<h2 id="cost">Cost</h2><p>A stage is one step of one task, such as its training. Its '
        "result is stored and never computed twice.</p>"
        f"{render_table(['what', 'how much'], rows, 1)}{saved}"
    )


def _budget_cells(search: Search, used: Mapping[str, float]) -> list[list[str]]:
    """Return one row for each limit of the budget. used: all but the number of trials."""
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
def rank_trials(search: Search) -> list[Trial]:
    """Sort trials by phase and status; finished ones by accuracy, stopped ones by progress."""
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


def render_trials(search: Search, varied: Sequence[Parameter]) -> str:
    """Return the table of all trials."""
    if not search.trials:
        return '<h2 id="trials">All trials</h2><p>No trial has started yet.</p>'
    has_phases = len(search.phases) > 1
    marks = _trial_marks(search)
    rows = []
    for trial in rank_trials(search):
        cells = [str(trial["number"])]
        if has_phases:
            cells.append(escape(trial["phase"]))
        status = trial["status"]
        cells.append(marks.get(trial["number"], ""))
        reason = ""
        if status == "stopped" and trial["message"]:
            reason = f'<div class="soft reason">{escape(trial["message"])}</div>'
        state = f'<span class="{STATUS_STYLES[status]}">{status_text(search, status)}</span>'
        cells.append(state + reason)
        cells.append(format_value(score(trial), "rate"))
        cells.append(format_value(forgetting(trial["results"]), "rate"))
        cells.append(plots.format_bytes(size(trial)))
        cells.append(str(completed(trial)))
        for parameter in varied:
            cell = '<span class="soft">-</span>'
            if parameter.key in trial["params"]:
                cell = escape(format_setting(trial["params"][parameter.key]))
            cells.append(cell)
        cells.append(f"{trial['stages']['run']} / {trial['stages']['reused']}")
        cells.append(format_seconds(float(trial["device_s"])))
        rows.append(cells)
    heading = ["trial", "", "status", "accuracy", "forgetting", "bytes", "tasks"]
    order = "the best first"
    if has_phases:
        heading.insert(1, "for task")
        order = "task by task, the best first"
    heading += [parameter.name for parameter in varied]
    heading += ["stages run / reused", "device time"]
    legend = ""
    if any("front" in mark for mark in marks.values()):
        legend = "; <b>front</b>: no other trial is both smaller and better"
    table = render_table(heading, rows, 4 if has_phases else 3, is_html=True)
    return (
        f'<h2 id="trials">All trials</h2><p>Order: {order}, then trials stopped early by how many '
        "tasks they completed, then running and failed ones. Accuracy: average on validation "
        "images over the completed tasks; forgetting: how far accuracy on the tasks before the "
        f"last completed one is below their best; bytes: what is stored per task{legend}. The same "
        f"table as files: <code>trials.csv</code>, <code>trials.parquet</code>.</p>{table}"
    )


def _trial_marks(search: Search) -> dict[int, str]:
    """Return by number the marks of the chosen trials, of those on the front, and of those with a
    point of an earlier search."""
    marks: dict[int, str] = {}
    if search_plots.sizes_differ(search):
        for phase in search.phases:
            marks |= dict.fromkeys(pareto(search.of(phase)), '<span class="soft">front</span>')
    label = f"<b>{search_plots.chosen_label(search)}</b>"
    marks |= dict.fromkeys(search.chosen().values(), label)
    for number, origin in search.origins().items():
        of_earlier = f'<span class="soft">of {escape(origin)}</span>'
        marks[number] = f"{marks.get(number, '')} {of_earlier}".strip()
    return marks


def render_failures(search: Search) -> str:
    """Return the messages of failed trials, each once; empty when none failed."""
    numbers_by_message: dict[str, list[int]] = {}
    for trial in search.trials:
        if trial["status"] == "failed":
            message = " ".join(trial["message"].split()) or "no reason was recorded"
            numbers_by_message.setdefault(message, []).append(trial["number"])
    if not numbers_by_message:
        return ""
    items = ""
    for message, numbers in numbers_by_message.items():
        short_message = message if len(message) <= 600 else message[:599] + "…"
        trials = f"trial{plural(len(numbers))} {', '.join(map(str, numbers))}"
        items += f"<li>{escape(short_message)} <span class=soft>({trials})</span></li>"
    return (
        '<h2 id="failures">Failed trials</h2><p>They cannot win, and they do not end the search.'
        f'</p><div class="note"><ul>{items}</ul></div>'
    )


def render_settings(search: Search) -> str:
    """Return space, settings, base config and environment."""
    settings = {"space": search.record["space"], "set": search.record.get("set") or {}}
    settings |= search.settings
    provenance = search.record["provenance"]
    facts = [(str(name), format_setting(value)) for name, value in provenance.items()]
    return (
        '<h2 id="settings">Settings and environment</h2><p>Space and settings of the search:</p>'
        f"<pre><code>{format_yaml(settings)}</code></pre>"
        "<details><summary>The base config</summary>"
        f"<pre><code>{format_yaml(search.record['config'])}</code></pre></details>"
        f"{render_facts(facts) if facts else ''}"
    )


def format_rate(value: float) -> str:
    """0.612 -> `61.2 %`."""
    return f"{100 * value:.1f}\u00a0%"


def format_points(difference: float) -> str:
    """Return a difference of accuracies in percentage points: 0.005 -> `0.5 points`."""
    text = f"{100 * difference:.2g}"
    return f"{text} point" if text == "1" else f"{text} points"
