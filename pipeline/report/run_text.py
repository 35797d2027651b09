"""Text about runs: the runs of a storage, and the progress of one run."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from pipeline.config.text import format_count, format_percent, format_seconds, table_text
from pipeline.graph import diagram
from pipeline.graph.gpu_use import gpu_sentences
from pipeline.graph.run_record import build_recorded_graph
from pipeline.graph.store import Store
from pipeline.results.runs import (
    MethodAccuracy,
    RunOverview,
    RunStatus,
    StageStatus,
    find_record,
    run_status,
)
from pipeline.shell.console import get_output_columns, progress_text
from workers.storage.artifact import join
from workers.storage.secrets import printable

WATCH_S = 2.0  # seconds between two reads of the status
MAX_STAGES = 40  # if a run has more, stages in QUIET_STATES are listed only with --all
MAX_METHODS = 4  # maximum number of methods whose accuracies are on a line
MAX_CHARACTERS = 200  # maximum length of the progress of a stage
CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"
QUIET_STATES = ("done", "reused", "waiting", "missing")  # a short list omits these stages
ORDER = (  # order in which states are counted
    "done",
    "reused",
    "running",
    "queued",
    "waiting",
    "interrupted",
    "missing",
    "failed",
    "blocked",
)


def run_picture(storage: str, name: str) -> str:
    """Return the graph of a run as SVG, with the state and duration of each stage.

    While a stage has no duration, the time in its current state is shown, if it is known. Each box
    links to the row of the stage in the report.
    """
    run = run_status(storage, name)
    record = find_record(Store(storage), name)
    report = join(storage, "runs", name, "report.html")
    links = {}
    times = {}
    for stage in run.stages:
        anchor = quote(f"stage-{stage.id}", errors="replace")
        links[stage.id] = f"{quote(report, safe='/:', errors='replace')}#{anchor}"
        duration = stage.wall_s if stage.wall_s is not None else stage.since_s
        if duration is not None:
            times[stage.id] = format_seconds(duration)
    states = {stage.id: stage.state for stage in run.stages}
    return printable(diagram.to_svg(build_recorded_graph(record), states, times, links))


def watch(name: str, storage: str, with_all: bool) -> None:
    """Print the progress of a run until it ends.

    A terminal shows the status of the run, which is refreshed every WATCH_S seconds. Other outputs
    get a line for each change.

    Args:
        name: Name of the run.
        storage: Storage of the run.
        with_all: See `status_text`.
    """
    is_terminal = sys.stdout.isatty()
    last: tuple[StageStatus, ...] | None = None
    while True:
        run = run_status(storage, name)
        if is_terminal:
            text = printable(status_text(run, with_all))
            if run.state == "running":
                text = fit_to_terminal(text)
            print(CLEAR_SCREEN + text, flush=True)
        else:
            changed = changes(last, run.stages)
            if changed:
                print(printable("\n".join(changed)), flush=True)
            last = run.stages
        if run.state != "running":
            if not is_terminal:
                print(printable(headline(run)), flush=True)
            return
        time.sleep(WATCH_S)


def fit_to_terminal(text: str) -> str:
    """Cut a text to the height and width of the terminal."""
    size = shutil.get_terminal_size()
    lines = text.splitlines()[: size.lines - 1]
    return "\n".join(line[: size.columns - 1] for line in lines)


def changes(before: Sequence[StageStatus] | None, stages: Sequence[StageStatus]) -> list[str]:
    """Return a line for each stage whose state has changed.

    Args:
        before: Earlier status of the stages. None in the first call: stages with a state in
            QUIET_STATES are omitted.
        stages: Current status of the stages.
    """
    states: Mapping[str, str] = {}
    if before is not None:
        states = {stage.id: stage.state for stage in before}
    lines = []
    for stage in stages:
        if before is None and stage.state in QUIET_STATES:
            continue
        if states.get(stage.id) != stage.state:
            text = stage_text(stage)
            lines.append(f"{stage.id}: {stage.state}" + (f", {text}" if text else ""))
    return lines


# ---- texts ---------------------------------------------------------------------------------------
def in_one_line(text: str) -> str:
    """Remove line breaks, so that text of unknown origin cannot imitate lines of the output."""
    return " ".join(text.split())


def runs_text(overviews: Sequence[RunOverview], storage: str) -> str:
    """Return the table of runs, in the order of `overviews`."""
    if not overviews:
        return f"no runs in {storage}"
    rows = []
    for run in overviews:
        started = run.started[:16].replace("T", " ")
        share = f"{run.done}/{run.total}"
        rows.append([run.name, run.state, in_one_line(started), share])
    heading = ["run", "state", "started", "stages"]
    lines = table_text(heading, rows, left=("run", "state")).splitlines()
    room = get_output_columns() - len(lines[0]) - 2
    texts = ["average accuracy"]
    texts += [in_one_line(methods_text(run.methods, room)) for run in overviews]
    return "\n".join(f"{line}  {text}".rstrip() for line, text in zip(lines, texts, strict=True))


def methods_text(methods: Sequence[MethodAccuracy], columns: int) -> str:
    """Return methods with their accuracies, best first: as many as fit, from 1 to MAX_METHODS.

    Args:
        methods: The methods.
        columns: Maximum number of characters.
    """
    best_first = sorted(methods, key=lambda method: -(method.average_accuracy or -1.0))
    text = ""
    for count in range(1, min(len(methods), MAX_METHODS) + 1):
        parts = [f"{m.label} {format_percent(m.average_accuracy)}" for m in best_first[:count]]
        if len(methods) > count:
            parts.append(f"{len(methods) - count} more")
        longer = ", ".join(parts)
        if text and len(longer) > columns:
            break
        text = longer
    return text


def status_text(run: RunStatus, with_all: bool = False) -> str:
    """Return the status of a run as text: state, counts, GPU utilisation, and a table of stages.

    Args:
        run: The status.
        with_all: Whether to list all stages if there are more than MAX_STAGES.
    """
    lines = [headline(run), counts_text(run)]
    lines += [in_one_line(sentence) for sentence in gpu_sentences(run.gpu_use)]
    listed = run.stages
    if not with_all and len(listed) > MAX_STAGES:
        listed = tuple(stage for stage in listed if stage.state not in QUIET_STATES)
    if listed:
        rows = []
        for stage in listed:
            duration = stage.wall_s if stage.wall_s is not None else stage.since_s
            took = "" if duration is None else format_seconds(duration)
            rows.append([in_one_line(stage.id), stage.state, took, stage_text(stage)])
        table = table_text(["stage", "state", "time", ""], rows, left=("stage", "state", ""))
        lines += ["", *[line.rstrip() for line in table.splitlines()]]
    if len(listed) < len(run.stages):
        lines.append(f"{len(run.stages) - len(listed)} other stages: --all lists them")
    return "\n".join(lines)


def headline(run: RunStatus) -> str:
    """Return the state of a run in one sentence.

    The sentence ends with the command that resumes the run. There is no command if the run is
    running or finished, if it has failed, or if the command is unknown.
    """
    driver = run.driver
    if driver is None or run.state == "finished":
        started = run.started[:16].replace("T", " ")
        return f"run {run.name}: {run.state}, started {started}"
    process = f"process {driver.pid} on {driver.host}"
    match run.state:
        case "running":
            text = f"running for {format_seconds(driver.age_s)}, {process}{format_time_left(run)}"
        case "killed":
            ago = format_seconds(driver.quiet_s)
            text = f"killed: {process} was last heard of {ago} ago; finished stages are kept"
        case "failed":
            text = f"failed: {driver.message}"
        case _:
            ago = format_seconds(driver.quiet_s)
            text = f"{run.state} {ago} ago, {process}; finished stages are kept"
    resume = ""
    if run.state not in ("running", "failed") and driver.command:
        resume = f"; to resume: {driver.command}"
    return in_one_line(f"run {run.name}: {text}{resume}")


def format_time_left(run: RunStatus) -> str:
    """Return the remaining time of a run as text; empty if it is unknown."""
    if run.left_s is None:
        return ""
    excluded = ""
    if run.left_without:
        excluded = (
            f", not counting {format_count(run.left_without, 'stage')} whose duration cannot be "
            "estimated yet"
        )
    return f", about {format_seconds(run.left_s)} left{excluded}"


def counts_text(run: RunStatus) -> str:
    """Return the number of stages in each state."""
    counts = run.counts
    parts = [f"{counts[state]} {state}" for state in ORDER if counts[state]]
    return f"{len(run.stages)} stages: {', '.join(parts)}"


def stage_text(stage: StageStatus) -> str:
    """Return details of a stage: progress, place, failed tries, error message, checkpoint."""
    parts = []
    if stage.state == "running":
        if stage.progress:
            parts.append(progress_line(stage.progress))
        if stage.where:
            parts.append(stage.where)
    if stage.tries:
        parts.append(f"{stage.tries} failed tries")
    if stage.message and stage.state not in ("done", "reused", "running"):
        parts.append(stage.message)
    if stage.is_saved:
        parts.append("the next run continues from its checkpoint")
    return in_one_line(", ".join(parts))


def progress_line(body: object) -> str:
    """Return the progress of a stage as text; empty if `body` has an unknown format."""
    if not isinstance(body, Mapping):
        return ""
    try:
        return progress_text(body)[:MAX_CHARACTERS]
    except (KeyError, TypeError, ValueError, OverflowError):
        return ""
