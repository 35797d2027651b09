"""The report of a search: one HTML page that needs nothing else, the table of its trials and its
plots as files, from its records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report import files, plots, search_plots
from pipeline.report.figures import Picture
from pipeline.report.page import (
    STYLE,
    format_seconds,
    format_value,
    render_picture,
    render_table,
    to_plain,
)
from pipeline.report.parameters import (
    Parameter,
    format_setting,
    measure_importance,
    search_parameters,
)
from pipeline.results.trials import (
    SLACK,
    Search,
    Trial,
    as_number,
    best,
    completed,
    load,
    pareto,
    score,
    size,
)
from pipeline.yaml_files import dump_yaml

MOST_DRAWN = 12  # parameters side by side in one picture; of more, those that matter most
COLUMNS = (
    "number",
    "phase",
    "status",
    "accuracy",
    "bytes",
    "tasks_completed",
    "stages_run",
    "stages_reused",
    "device_s",
    "message",
)
STATES = {"finished": "done", "stopped": "soft", "running": "pending", "failed": "bad"}
PROTOCOLS = {
    "end_of_stream": "Every trial learns the whole stream with settings of its own; trials are "
    "compared by their average validation accuracy after the last "
    "task. This chooses with hindsight: whoever meets the tasks one by one could not have tried "
    "the later ones first.",
    "first_k_tasks": "Every trial learns the first {tasks} of the stream with settings of its own "
    "and is compared by its average validation accuracy there. "
    "The winner's settings then serve the whole stream, so tasks that come later had no part in "
    "the choice.",
    "per_task": "Settings are chosen task by task, in the order of the stream. Several trials "
    "learn the next task, each with other settings for it; all "
    "tasks before keep the settings chosen for them. The best trial is kept and the search goes "
    "on to the next task. Such a choice is greedy: it "
    "never looks at later tasks and is never taken back, so that it can be made while tasks "
    "arrive, and need not be the best for the stream as "
    "a whole. Accuracies of trials for different tasks are averages over different tasks and do "
    "not compare.",
    "two_streams": "Every trial learns a stream made for the search with settings of its own; "
    "trials are compared by their average validation accuracy "
    "after its last task. The winner's settings are then tested on the other stream, which had "
    "no part in the choice.",
}
ALGORITHMS = {
    "random": "Settings were drawn at random",
    "grid": "All combinations of settings were tried in turn",
    "tpe": "Settings were drawn more and more from where earlier trials did well (TPE)",
}
SCHEDULERS = {
    "none": "every trial ran to its end",
    "asha": "trials that were behind the others after the same number of tasks were stopped early "
    "(ASHA)",
    "pbt": "trials that fell behind went on from changed settings of better ones (population based "
    "training)",
}


def build(storage: str, name: str) -> dict[str, bytes]:
    """All files of the report, by name: `search.html`, `trials.csv`, `trials.parquet`, the plots as
    PNG. Works on finished and on unfinished searches. Raises UserError where there is no such
    search."""
    search = load(storage, name)
    varied = search_parameters(search)
    shares, reason = measure_importance(search, varied)
    pictures = search_pictures(search, varied, shares)
    rows = trial_rows(search, varied)
    first = [*COLUMNS[:3], *(p.key for p in varied), *COLUMNS[3:]]
    return {
        "search.html": render_page(search, varied, pictures, reason).encode(),
        "trials.csv": files.as_csv(rows, first),
        "trials.parquet": files.as_parquet(rows, first),
        **{p.name: p.png for p in pictures},
    }


def trial_rows(search: Search, varied: Sequence[Parameter]) -> list[files.Row]:
    """One row per trial; settings as columns, as text where a column would mix kinds."""
    as_text = {
        p.key
        for p in varied
        if len(
            {_kind(t["params"][p.key]) for t in search.trials if p.key in t["params"]} - {"number"}
        )
        > 0
    }
    rows = []
    for t in search.trials:
        settings = {
            key: format_setting(value) if key in as_text else value
            for key, value in t["params"].items()
        }
        rows.append(
            {
                "number": t["number"],
                "phase": t["phase"],
                "status": t["status"],
                **settings,
                "accuracy": score(t),
                "bytes": size(t),
                "tasks_completed": completed(t),
                "stages_run": t["stages"]["run"],
                "stages_reused": t["stages"]["reused"],
                "device_s": float(t["device_s"]),
                "message": t["message"],
            }
        )
    return rows


def _kind(value: Any) -> str:
    return "text" if math.isnan(as_number(value)) else "number"


def search_pictures(
    search: Search, varied: Sequence[Parameter], shares: Mapping[str, float]
) -> list[Picture]:
    """The figures that the trials so far allow, each with the sentence that explains it."""
    compared, drawn = search.standing(), list(varied)
    if len(drawn) > MOST_DRAWN:
        keys = [*shares, *(p.key for p in drawn if p.key not in shares)][:MOST_DRAWN]
        drawn = [p for p in drawn if p.key in keys]
    several, finished, stopped, failed = (
        len(search.phases) > 1,
        *(sum(t["status"] == s for t in search.trials) for s in ("finished", "stopped", "failed")),
    )
    absent = any(p.key not in t["params"] for p in drawn for t in search.trials)
    spoken = (
        "trial that was chosen for each task"
        if several
        else "winner"
        if search.winner
        else "leading trial"
    )
    left_out = (
        f" The {len(drawn)} settings that matter most are drawn, of {len(varied)}."
        if len(drawn) < len(varied)
        else ""
    )
    found = []
    if search.trials:
        found.append(
            Picture(
                "history.png",
                "How the search went",
                "Every trial by its number. The line is the highest accuracy of the trials "
                "finished so far: where it stays flat for "
                "long, more trials would hardly help."
                + (" Crosses at the bottom are failed trials." if failed else "")
                + (
                    " Each task starts anew, on a band of its own, in the order of the stream."
                    if several
                    else ""
                ),
                plots.to_png(search_plots.draw_history(search)),
            )
        )
    if len(compared) > 1 and drawn:
        found.append(
            Picture(
                "parallel.png",
                "Trials and their settings",
                "Every line is a trial and runs from left to right through its settings to its "
                "accuracy. Dark lines did well: where they run "
                f"close together on an axis, that setting matters. The thick line is the {spoken}."
                + (
                    " Trials that did not learn all tasks are dashed, failed ones dotted."
                    if finished < len(search.trials)
                    else ""
                )
                + (
                    " A trial that does not have a setting passes through the '-' below its axis."
                    if absent
                    else ""
                )
                + left_out,
                plots.to_png(search_plots.draw_parallel(search, drawn)),
            )
        )
    if shares:
        found.append(
            Picture(
                "importance.png",
                "Which settings matter",
                f"How much of the differences in accuracy between the {finished} finished "
                "trials goes back to each setting, by itself or together "
                "with others (fANOVA, from Optuna). A setting near 0 % can be left as it is. Of "
                "few trials this is a hint, no proof."
                + (
                    " A setting whose bad values were all stopped early looks less important "
                    "here than it is."
                    if stopped
                    else ""
                ),
                plots.to_png(
                    search_plots.draw_importance(
                        dict(list(shares.items())[:MOST_DRAWN]), {p.key: p.name for p in varied}
                    )
                ),
            )
        )
    if compared and drawn:
        found.append(
            Picture(
                "slices.png",
                "Accuracy against each setting",
                "The same trials, one setting at a time. Points that rise or fall together show "
                "what to change; a best point at the edge of its "
                "panel says that a wider range may hold something better." + left_out,
                plots.to_png(search_plots.draw_slices(search, drawn)),
            )
        )
    if any(len(t["results"]) > 1 for t in search.trials):
        found.append(
            Picture(
                "curves.png",
                "Trials along the stream",
                "Average validation accuracy over the tasks so far, after each task."
                + (
                    " A line that ends early is a trial that was stopped, and its further cost "
                    "saved, or that failed or still runs."
                    if finished < len(search.trials)
                    else ""
                ),
                plots.to_png(search_plots.draw_curves(search)),
            )
        )
    if search_plots.sizes_differ(search):
        found.append(
            Picture(
                "pareto.png",
                "Accuracy against size",
                "Finished trials by what they keep per task. The front joins those than which "
                "none is both smaller and better, with their "
                f"numbers; the star is the {spoken}. Best is top left.",
                plots.to_png(search_plots.draw_front(search)),
            )
        )
    return found


# ---- the page ------------------------------------------------------------------------------------
def render_page(
    search: Search, varied: Sequence[Parameter], pictures: Sequence[Picture], reason: str
) -> str:
    """The page as text. reason: why nothing is said about importance, else empty."""
    by_name = {p.name: render_picture(p) for p in pictures}
    if reason and search.trials:
        by_name["importance.png"] = f'<p class="soft">{escape(reason)}</p>'
    name = escape(str(search.name))
    sections = [
        render_head(search),
        render_problems(search),
        render_winner(search, varied),
        render_choices(search, varied),
        *(
            by_name.get(f"{which}.png", "")
            for which in ("history", "parallel", "importance", "slices", "curves", "pareto")
        ),
        render_space(search, varied),
        render_cost(search),
        render_trials(search, varied),
        render_failures(search),
        render_settings(search),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f"<title>{name} · search · "
        f"Accrete</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>"
    )


def count_text(number: float, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def render_head(search: Search) -> str:
    said = {status: sum(t["status"] == status for t in search.trials) for status in STATES}
    protocol = str(search.settings.get("protocol", "end_of_stream"))
    state = (
        "finished"
        if search.winner
        else '<span class="pending">not finished: no winner has been written yet</span>'
    )
    wanted = (search.settings.get("budget") or {}).get("trials")
    of = f" of {wanted} planned" if wanted and not search.winner and protocol != "per_task" else ""
    words = {
        "finished": "finished",
        "stopped": "stopped early",
        "running": "running or cut off",
        "failed": "failed",
    }
    shares = ", ".join(f"{said[s]} {words[s]}" for s in STATES if said[s]) or "none has started"
    how = (
        f"{ALGORITHMS.get(str(search.settings.get('algorithm')), 'Settings were drawn')}; "
        f"{SCHEDULERS.get(str(search.settings.get('scheduler')), '')}"
    )
    if "bytes" in (search.settings.get("objectives") or []):
        how = how.rstrip("; ") + ". High accuracy and few bytes are both sought"
    if search.record.get("note"):
        how = f"{how} ({escape(str(search.record['note']))})"
    told = PROTOCOLS.get(protocol, "").replace(
        "{tasks}",
        count_text(
            search.settings.get("first_tasks") or max(map(completed, search.trials), default=0),
            "task",
        ),
    )
    links = "".join(
        f'<a href="#{anchor}">{shown}</a>'
        for anchor, shown in [
            ("winner", "Winner"),
            *([("choices", "Task by task")] if len(search.phases) > 1 else []),
            ("space", "What was searched"),
            ("cost", "Cost"),
            ("trials", "All trials"),
            *([("failures", "Failures")] if said["failed"] else []),
            ("settings", "Settings"),
        ]
    )
    return (
        f"<h1>{escape(str(search.name))}</h1><div class=soft>search · protocol "
        f"{escape(protocol)} · {count_text(len(search.trials), 'trial')}{of} · "
        f"seed {escape(str(search.settings.get('seed', 0)))} · started "
        f"{escape(str(search.record.get('created', '')))} · {state}</div>"
        "<p style='margin-top:14px'>A search tries many settings and keeps the best. A "
        "<b>trial</b> is one choice of settings, trained and then judged on "
        "<b>validation images</b>: images that are held out of training. Test images are not "
        "looked at until the winner is chosen. "
        f"{escape(told)}</p><p>{escape(how.rstrip('; '))}. Trials: {shares}.</p><nav>{links}</nav>"
    )


def render_problems(search: Search) -> str:
    if not search.problems:
        return ""
    return (
        f'<div class="note"><b>{count_text(len(search.problems), "file")} could not be used</b><ul>'
        + "".join(f"<li>{escape(p)}</li>" for p in search.problems[:20])
        + (f"<li>and {len(search.problems) - 20} more</li>" if len(search.problems) > 20 else "")
        + "</ul></div>"
    )


def render_winner(search: Search, varied: Sequence[Parameter]) -> str:
    """Who won, why, with which settings, and how it did on test data."""
    chosen = search.chosen()
    phase = next((p for p in reversed(search.phases) if p in chosen), None)
    if search.winner and (named := search.trial(search.winner["trial"])):
        phase = named["phase"]
    if phase is None:
        missing = (
            f"winner.json names trial {search.winner['trial']}, whose record is missing"
            if search.winner
            else "no trial has finished yet"
        )
        return f'<h2 id="winner">Winner</h2><p>There is none to show: {missing}.</p>'
    trial = search.trial(chosen[phase])
    assert trial is not None
    title = "Winner" if search.winner else "Leading so far"
    several = (
        "<p>The settings are those chosen for each task, one after the other (<a "
        "href='#choices'>task by task</a>); this trial holds the last choice "
        "and all before it.</p>"
        if len(search.phases) > 1
        else ""
    )
    return (
        f'<h2 id="winner">{title}: trial '
        f"{trial['number']}</h2>{several}<p>{escape(explain_choice(search, trial))}</p>{render_chosen_settings(search, trial, varied)}"
        f"{render_tests(search, trial)}"
    )


def explain_choice(search: Search, trial: Trial) -> str:
    """Why this trial and no other, by the rule of tolerance."""
    among = [
        t
        for t in search.of(trial["phase"])
        if t["status"] == "finished" and not math.isnan(score(t))
    ]
    where = f" of those for {trial['phase']}" if len(search.phases) > 1 else ""
    top = next((t for t in among if t["number"] == best(among)), trial)
    line = score(top) - search.tolerance
    near = [t for t in among if score(t) >= line - SLACK]
    ruled = best(among, search.tolerance)
    if ruled != trial["number"]:
        return (
            f"The search's record names trial {trial['number']} ({format_rate(score(trial))}). By the "
            f"rule of this page it would be trial {ruled}: trials may "
            "have finished after the choice was made."
        )
    if len(near) == 1:
        return (
            f"It has the highest validation accuracy, {format_rate(score(trial))}, of "
            f"{count_text(len(among), 'finished trial')}{where}"
            + (
                f"; no other comes within the tolerance of {format_points(search.tolerance)}."
                if search.tolerance
                else "."
            )
        )
    equal = (
        f"The highest validation accuracy of {count_text(len(among), 'finished trial')}{where} is "
        f"{format_rate(score(top))} (trial {top['number']}). "
        + (
            f"Differences up to the tolerance of {format_points(search.tolerance)} count as equal, and "
            f"{len(near)} trials reach {format_rate(line)} or more. "
            if search.tolerance
            else f"{len(near)} trials reach it. "
        )
    )
    smallest = min(near, key=lambda t: size(t) if not math.isnan(size(t)) else math.inf)
    if sum(size(t) == size(smallest) for t in near) > 1 or math.isnan(size(trial)):
        return (
            equal
            + f"Of these trial {trial['number']}, with {format_rate(score(trial))}, comes first "
            "among those that keep the fewest bytes per task."
        )
    return (
        equal
        + f"Of these trial {trial['number']}, with {format_rate(score(trial))}, keeps the fewest "
        f"bytes per task: {plots.format_bytes(size(trial))}."
    )


def render_chosen_settings(search: Search, trial: Trial, varied: Sequence[Parameter]) -> str:
    """The settings of a trial, and whether they lie at an end of what was searched."""
    rows = [
        [
            f"<b>{escape(p.name)}</b>",
            f"<b>{escape(format_setting(value))}</b>",
            escape(p.says),
            '<span class="pending">at an end: try a wider range</span>' if p.at_end(value) else "",
        ]
        for p in varied
        if p.key in trial["params"]
        for value in [trial["params"][p.key]]
    ]
    use = ""
    if search.winner and search.winner.get("config"):
        use = (
            f"<p>All its settings stand in <code>{escape(str(search.winner['config']))}</code> "
            "in the folder of this search, a config that "
            "<code>run</code> accepts.</p>"
        )
    return (
        render_table(["setting", "chosen", "searched", ""], rows, 4, safe=True) if rows else ""
    ) + use


def render_tests(search: Search, trial: Trial) -> str:
    """The winner on test data, beside its validation score."""
    if search.winner is None:
        return ""
    tests = [
        t for t in search.winner["tests"] if not math.isnan(as_number(t.get("average_accuracy")))
    ]
    wanted = search.settings.get("seeds")
    wanted = len(wanted) if isinstance(wanted, list) else wanted if isinstance(wanted, int) else 0
    if not tests:
        return "<h3>On test images</h3><p>The winner has not been tested yet.</p>"
    values = [as_number(t["average_accuracy"]) for t in tests]
    mean, spread = (
        statistics.mean(values),
        f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else "",
    )
    rows: list[list[Any]] = [
        [
            t.get("seed", "-"),
            t.get("run", "-"),
            format_rate(v),
            format_value(as_number(t.get("forgetting")), "rate"),
            plots.format_bytes(as_number(t.get("bytes_per_task"))),
        ]
        for t, v in zip(tests, values, strict=True)
    ]
    if len(values) > 1:
        rows.append(
            [
                "all",
                "mean ± standard deviation",
                f"{100 * mean:.1f}{spread} %",
                *(
                    write(statistics.mean(v))
                    if (v := [x for t in tests if not math.isnan(x := as_number(t.get(key)))])
                    else "-"
                    for key, write in (
                        ("forgetting", format_rate),
                        ("bytes_per_task", plots.format_bytes),
                    )
                ),
            ]
        )
    same = search.settings.get("protocol") not in ("two_streams", "first_k_tasks")
    beside = (
        f"Its validation accuracy in the search was {format_rate(score(trial))}, "
        f"{format_points(abs(mean - score(trial)))} "
        f"{'above' if mean < score(trial) else 'below'} that. Some loss is usual: the best of "
        "many trials is in part the luckiest."
        if same
        else f"Its validation accuracy in the search, {format_rate(score(trial))}, was measured on "
        "other tasks, so the two do not compare."
    )
    left = (
        f" {count_text(wanted - len(tests), 'seed')} of {wanted} not tested yet."
        if wanted > len(tests)
        else ""
    )
    return (
        "<h3>On test images</h3><p>The winner was trained anew with "
        f"{count_text(len(tests), 'seed')} and tested on test images, which were not read before the "
        f"choice was made: <b>{100 * mean:.1f}{spread}\u00a0%</b> on average"
        + (f", from {format_rate(min(values))} to {format_rate(max(values))}" if spread else "")
        + ". "
        f"{beside}{left}</p>{render_table(['seed', 'run', 'average accuracy', 'forgetting', 'bytes per task'], rows, 2)}"
    )


def render_choices(search: Search, varied: Sequence[Parameter]) -> str:
    """Protocol `per_task`: what was chosen for each task, in stream order."""
    if len(search.phases) < 2:
        return ""
    chosen, rows = search.chosen(), []
    for phase in search.phases:
        members, trial = search.of(phase), search.trial(chosen.get(phase))
        done = sum(t["status"] == "finished" for t in members)
        says = (
            ", ".join(
                f"{p.name} {format_setting(trial['params'][p.key])}"
                for p in varied
                if p.key in trial["params"]
            )
            if trial
            else "not chosen yet"
        )
        rows.append(
            [
                phase,
                says,
                trial["number"] if trial else "-",
                f"{done} of {len(members)}",
                format_value(score(trial) if trial else None, "rate"),
                plots.format_bytes(size(trial)) if trial else "-",
            ]
        )
    return (
        '<h2 id="choices">Task by task</h2><p>What was chosen for each task, in the order of '
        "the stream. The accuracy is the average over the tasks so "
        "far, with the settings chosen for each of them; it falls where a harder task joins.</p>"
        + render_table(
            ["task", "chosen settings", "trial", "trials finished", "accuracy", "bytes per task"],
            rows,
            2,
        )
    )


def render_space(search: Search, varied: Sequence[Parameter]) -> str:
    rows = [[p.name, p.dist or "-", p.says, p.key] for p in varied]
    table = (
        render_table(["setting", "distribution", "values", "key in the config"], rows, 4)
        if rows
        else "<p>The record names no settings.</p>"
    )
    base = (
        f"All other settings are those of <code>{escape(str(search.record['base']))}</code>."
        if search.record.get("base")
        else ""
    )
    return (
        '<h2 id="space">What was searched</h2><p>The settings that differ between trials. '
        f"{base}</p>{table}"
    )


def render_cost(search: Search) -> str:
    """Budget, device time, and what was saved because trials share stages."""
    run, reused = (sum(t["stages"][kind] for t in search.trials) for kind in ("run", "reused"))
    device, walls = (
        sum(t["device_s"] for t in search.trials),
        [as_number(s.get("wall_s")) for s in search.record["sessions"] if isinstance(s, dict)],
    )
    wall = sum(w for w in walls if not math.isnan(w))
    saved = (
        "<p>Trials whose settings agree up to some stage share the results up to there: "
        f"<b>{100 * reused / (run + reused):.0f} %</b> of the stages that "
        "trials needed were reused and not computed again, about "
        f"{format_seconds(device / run * reused)} of device time at the average of the stages "
        "that "
        "ran.</p>"
        if run and reused
        else ""
    )
    budget = search.settings.get("budget") or {}
    used = {"trials": len(search.trials), "hours": wall / 3600, "stages": run}
    each = " for each task" if search.settings.get("protocol") == "per_task" else ""
    if each:
        used["trials"] = max((len(search.of(phase)) for phase in search.phases), default=0)
    rows = [
        ["device time", format_device_hours(device)],
        ["stages computed", f"{run:,}"],
        ["stages reused", f"{reused:,}"],
        [
            "time on the clock",
            f"{format_seconds(wall)} in {count_text(len(search.record['sessions']), 'session')}"
            if search.record["sessions"]
            else "-",
        ],
        *(
            [
                f"budget of {name}{each if name == 'trials' else ''}",
                f"{used[name]:.3g} of {budget[name]:,} used",
            ]
            for name in used
            if not math.isnan(as_number(budget.get(name)))
        ),
    ]
    return (
        '<h2 id="cost">Cost</h2><p>A stage is one step of one task, such as its training; its '
        "result is stored and never computed twice.</p>"
        f"{render_table(['what', 'how much'], rows, 1)}{saved}"
    )


def format_device_hours(seconds: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / 3600:.3g} device-hours)"


def rank_trials(search: Search) -> list[Trial]:
    """Best first, phase by phase: finished trials by accuracy, then those that were stopped by how
    far they came, running and failed ones."""

    def key(t: Trial) -> tuple[Any, ...]:
        value = score(t)
        return (
            search.phases.index(t["phase"]),
            list(STATES).index(t["status"]),
            -completed(t) if t["status"] == "stopped" else 0,
            math.isnan(value),
            -value if not math.isnan(value) else 0,
            size(t) if not math.isnan(size(t)) else math.inf,
            t["number"],
        )

    return sorted(search.trials, key=key)


def render_trials(search: Search, varied: Sequence[Parameter]) -> str:
    if not search.trials:
        return '<h2 id="trials">All trials</h2><p>No trial has started yet.</p>'
    several, chosen = len(search.phases) > 1, set(search.chosen().values())
    on_front = (
        {n for phase in search.phases for n in pareto(search.of(phase))}
        if search_plots.sizes_differ(search)
        else set()
    )
    rows = []
    for t in rank_trials(search):
        mark = (
            f"<b>{search_plots.chosen_label(search)}</b>"
            if t["number"] in chosen
            else '<span class="soft">front</span>'
            if t["number"] in on_front
            else ""
        )
        rows.append(
            [
                str(t["number"]),
                *([escape(t["phase"])] if several else []),
                mark,
                f'<span class="{STATES[t["status"]]}">{t["status"]}</span>',
                format_value(score(t), "rate"),
                plots.format_bytes(size(t)),
                str(completed(t)),
                *(
                    f"{escape(format_setting(t['params'][p.key]))}"
                    if p.key in t["params"]
                    else '<span class="soft">-</span>'
                    for p in varied
                ),
                f"{t['stages']['run']} / {t['stages']['reused']}",
                format_seconds(float(t["device_s"])),
            ]
        )
    heading = [
        "trial",
        *(["for task"] if several else []),
        "",
        "status",
        "accuracy",
        "bytes",
        "tasks",
        *(p.name for p in varied),
        "stages run / reused",
        "device time",
    ]
    first = "task by task, the best first" if several else "the best first"
    legend = "; <b>front</b>: no other trial is both smaller and better" if on_front else ""
    return (
        f'<h2 id="trials">All trials</h2><p>In this order: {first}, then those stopped early by '
        "how many tasks they completed, running and failed ones. "
        "Accuracy: average on validation images over the tasks that the trial completed; "
        f"bytes: what is kept per task{legend}. The same as files: "
        "<code>trials.csv</code>, "
        f"<code>trials.parquet</code>.</p>{render_table(heading, rows, 4 if several else 3, safe=True)}"
    )


def render_failures(search: Search) -> str:
    said: dict[str, list[int]] = {}
    for t in search.trials:
        if t["status"] == "failed":
            said.setdefault(" ".join(t["message"].split()) or "no reason was recorded", []).append(
                t["number"]
            )
    if not said:
        return ""
    items = "".join(
        f"<li>{escape(message if len(message) <= 600 else message[:599] + '…')} <span "
        f"class=soft>(trial{'s' * (len(numbers) > 1)} "
        f"{', '.join(map(str, numbers))})</span></li>"
        for message, numbers in said.items()
    )
    return (
        '<h2 id="failures">Failed trials</h2><p>They cannot win and do not end the '
        f'search.</p><div class="note"><ul>{items}</ul></div>'
    )


def render_settings(search: Search) -> str:
    def dumped(value: Any) -> str:
        return escape(dump_yaml(to_plain(value), default_flow_style=None, width=110))

    facts = "".join(
        f"<dt>{escape(str(k))}</dt><dd>{escape(format_setting(v))}</dd>"
        for k, v in search.record["provenance"].items()
    )
    return (
        '<h2 id="settings">Settings and environment</h2><p>Space and settings of the search:</p>'
        f"<pre><code>{dumped({'space': search.record['space'], 'set': search.record.get('set') or {}, **search.settings})}</code></pre>"
        "<details><summary>The base "
        f"config</summary><pre><code>{dumped(search.record['config'])}</code></pre></details>"
        + (f"<dl>{facts}</dl>" if facts else "")
    )


def format_rate(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%"


def format_points(difference: float) -> str:
    """A difference of accuracies in percentage points."""
    return f"{100 * difference:.2g} point{'s' * (f'{100 * difference:.2g}' != '1')}"
