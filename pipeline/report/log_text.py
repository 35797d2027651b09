"""The log of a run or a stage as text, with the full tracebacks of failed tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config.invocation import logs_command
from pipeline.config.text import format_seconds
from pipeline.graph.event_log import MAX_TEXT
from pipeline.graph.live_status import is_amount
from pipeline.graph.run_record import RunRecord, StageRecord
from pipeline.graph.store import Store
from pipeline.report.run_text import in_one_line, progress_line
from pipeline.results.runs import find_record
from pipeline.results.stage_log import RunEvent, find_failures, read_events, read_failure
from workers.errors import UserError, did_you_mean
from workers.storage.secrets import printable

MAX_EVENTS = 40  # number of latest events to print without --all
MAX_TRIES = 3  # number of latest failed tries to print without --all
LONGEST_LINE = 2 * MAX_TEXT  # maximum characters of a line for an event
MAX_NAMES = 8  # maximum number of stages that an error message lists
DECISION = "decision_"  # prefix of events that record a decision of the scheduler
ROUTINE = ("progress", "decision_launch")  # events that the log of a run omits without --all


def log_text(storage: str, name: str, stage_id: str = "", with_all: bool = False) -> str:
    """Return the log of a run or of one stage.

    Args:
        storage: Storage of the run.
        name: Name of the run.
        stage_id: Id of the stage; empty for the run.
        with_all: Whether to include all events and failures, not only the latest ones.

    Raises:
        UserError: If the run or the stage does not exist.
    """
    record = find_record(Store(storage), name)
    events = read_events(storage, name)
    if stage_id:
        stage = find_stage(record, stage_id)
        return printable(stage_events_text(storage, stage, events, with_all))
    return printable(run_text(storage, record, events, with_all))


def find_stage(record: RunRecord, stage_id: str) -> StageRecord:
    """Return a stage of a run. Raise `UserError` if the stage does not exist."""
    stages = {stage["id"]: stage for stage in record["stages"]}
    if stage_id in stages:
        return stages[stage_id]
    more = ", ..." if len(stages) > MAX_NAMES else ""
    listed = f"its stages are: {', '.join([*stages][:MAX_NAMES])}{more}"
    raise UserError(
        f"run {record['name']!r} has no stage {stage_id!r:.80}; "
        f"{did_you_mean(stage_id, stages, listed)}"
    )


def run_text(
    storage: str, record: RunRecord, events: Sequence[RunEvent], with_all: bool = False
) -> str:
    """Return the events of a run, and its stages that have failed tries.

    Args:
        storage: Storage of the run.
        record: Record of the run.
        events: Events of the run.
        with_all: Whether to include all events. If False, the kinds in ROUTINE are omitted, and
            only the last MAX_EVENTS other events are included.
    """
    if not with_all:
        events = [event for event in events if event.kind not in ROUTINE]
    lines = [f"run {record['name']} in {storage}", *format_events(events, with_all)]
    files = find_failures(storage)
    failed = [stage for stage in record["stages"] if stage["key"] in files]
    if failed:
        lines += ["", "failures, each with the command that prints its traceback:"]
    for stage in failed:
        count = len(files[stage["key"]])
        tries = "1 failed try" if count == 1 else f"{count} failed tries"
        command = logs_command(storage, record["name"])
        lines.append(f"  {tries}: {command} {stage['id']}")
    return "\n".join(lines)


def stage_events_text(
    storage: str, stage: StageRecord, events: Sequence[RunEvent], with_all: bool = False
) -> str:
    """Return the events of a stage, and its failed tries with their files and tracebacks."""
    of_stage = [event for event in events if event.stage == stage["id"]]
    lines = [
        f"stage {stage['id']}, key {stage['key']}",
        *format_events(of_stage, with_all, with_stage=False),
    ]
    files = find_failures(storage).get(stage["key"], [])
    first = 0 if with_all else max(0, len(files) - MAX_TRIES)
    if first:
        lines += ["", f"{first} earlier failed tries: --all prints them"]
    for number, file in enumerate(files[first:], first + 1):
        failure = read_failure(storage, stage["key"], file)
        heading = f"failed try {number} of {len(files)}: {failure.uri}"
        lines += ["", heading, "", failure.text.rstrip()]
    return "\n".join(lines)


def format_events(events: Sequence[RunEvent], with_all: bool, with_stage: bool = True) -> list[str]:
    """Return one line per event.

    Args:
        events: The events.
        with_all: Whether to include all events, not only the last MAX_EVENTS.
        with_stage: Whether to write the id of the stage.
    """
    if not events:
        return ["no event of it is in the log"]
    lines = []
    first = 0 if with_all else max(0, len(events) - MAX_EVENTS)
    if first:
        lines.append(f"{first} earlier events: --all prints them")
    for event in events[first:]:
        time = event.time[:19].replace("T", " ")
        owner = f"{event.stage}: " if event.stage and with_stage else ""
        line = f"{in_one_line(time)}  {in_one_line(owner + format_event(event))}"
        lines.append(line[:LONGEST_LINE])
    return lines


def shorten_value(value: Any) -> str:
    """Return a value of an event as text, cut to MAX_TEXT characters.

    The result is empty if the value is neither text nor a number.
    """
    if isinstance(value, str):
        return value[:MAX_TEXT]
    return str(value) if is_amount(value) else ""


def format_event(event: RunEvent) -> str:
    """Describe an event in a few words."""
    values = {name: shorten_value(value) for name, value in event.values.items()}
    message = values.get("message") or values.get("reason") or ""
    match event.kind:
        case "run_started":
            where = f"process {values.get('pid')} on {values.get('host')}"
            return f"run started: {values.get('to_run')} of {values.get('stages')} stages, {where}"
        case "run_ended":
            text = f"run {values.get('state')}"
        case "started":
            return f"started in {values.get('where', 'a process')}"
        case "progress":
            return progress_line(event.values.get("progress"))
        case "checkpoint":
            return f"checkpoint before step {values.get('step')} of epoch {values.get('epoch')}"
        case "done":
            wall_s = event.values.get("wall_s")
            return f"done in {format_seconds(wall_s)}" if is_amount(wall_s) else "done"
        case "decision_launch":
            return "queued"
        case _:
            text = event.kind.removeprefix(DECISION)
    if message:
        text += f": {message}"
    if values.get("host"):
        origin = [f"rank {values.get('rank')} on {values['host']}"]
        if values.get("log"):
            origin.append(f"log {values['log']}")
        text += f" ({', '.join(origin)})"
    return text
