"""Add data to a run: edit its config, train the affected tasks, and update the model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.app import runs as app
from pipeline.app.runs import RunResult
from pipeline.app.screen import OpenScreen
from pipeline.config import settings as configs
from pipeline.config.settings import Config
from pipeline.config.yaml_files import absolute
from pipeline.data.names import listed
from pipeline.graph.replica_configs import refuse_replicas
from pipeline.graph.store import Store
from pipeline.growing import publishing
from pipeline.growing.new_data import NewData, find_new_data, list_used_cards
from pipeline.growing.stream_edits import FileChanges, Kind, edit_stream, list_task_classes
from pipeline.growing.training import describe_cost, describe_training
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import join
from workers.storage.lock import stage_lock

Say = Callable[[str], None]


@dataclass(frozen=True)
class AddRequest:
    """Arguments of `add`.

    Attributes:
        config: Path of the config file.
        data: Path of the data.
        kind: How to interpret the data: as a task, as new classes, or as images of known classes.
            None: decide from the data, which must be unambiguous.
        into: Name of the task that the new classes join. Empty: they become a new task.
        name: Name of the new task. Empty: a free name is chosen.
        model: Model folder to update. Empty: none.
        method: Label of the method that the model folder serves. None: choose it if only one fits.
        max_drop: Largest accepted loss of accuracy of a task in the model folder, in percentage
            points.
    """

    config: str
    data: str
    kind: Kind | None = None
    into: str = ""
    name: str = ""
    model: str = ""
    method: str | None = None
    max_drop: float = 1.0


def add(
    request: AddRequest,
    open_screen: OpenScreen,
    program: str,
    say: Say,
    show: Callable[[RunResult], None],
) -> RunResult:
    """Add data to a run: edit its config, run the affected stages, and update the model folder.

    The command can be repeated after an interruption, because data that was added before changes
    no file. If the changed config is invalid, or the new images cannot be ingested, the previous
    config and cards are restored. If a later stage fails, they stay changed.

    Args:
        request: Arguments of the command.
        open_screen: Creates the screen of the run.
        program: Command that starts Accrete, for messages.
        say: Called with each line of progress.
        show: Called with the results of the run, before the model folder is updated.

    Returns:
        The results of the run.

    Raises:
        UserError: If the data cannot be added, a stage fails, or a task of the model folder would
            lose too much accuracy.
    """
    config = configs.load(request.config)
    refuse_replicas(config, request.config, "`add` updates one model")
    label = ""
    if request.model:
        label = publishing.choose_method(config, request.model, request.method)
    with change_lock(config, say):
        # load it again: another command may have changed the config while this one was waiting
        config = configs.load(request.config)
        new, changes = find_changes(request, config, program, say)
        command = app.format_command("add", request.config, (), [request.data])
        changes.write()
        try:
            run = app.prepare(request.config, to_run=True, say=say)
            for line in changes.lines:
                say(line)
            app.ingest(run, open_screen, command)
            run = app.prepare(request.config)
        except UserError:
            changes.undo()
            raise
        plan = app.plan(run)
        num_stages, num_to_run = len(run.graph), len(plan.stages_to_run)
        say(f"{num_stages} stages: {num_stages - num_to_run} up to date, {num_to_run} to run")
        for line in filter(None, [*describe_training(plan), describe_cost(plan)]):
            say(line)
        report_command = app.format_command("report", request.config, ())
        result = app.execute(run, open_screen, command, report_command)
        show(result)
        is_changed = bool(changes.texts) or num_to_run > 0
        if request.model:
            run = app.with_jobs(result.run)
            published = publishing.publish_run(run, label, request.model, request.max_drop)
            say(published.sentence)
            is_changed |= published.is_new
        if new.passed_over and not is_changed:
            raise UserError(
                f"nothing was added: {listed(new.passed_over)} are in no task, and an earlier run "
                "or the card has passed over them; `--as classes` takes them in"
            )
    return result


def find_changes(
    request: AddRequest, config: Config, program: str, say: Say
) -> tuple[NewData, FileChanges]:
    """Find the new data, and the resulting changes of a config and its cards. Write nothing.

    Args:
        request: Arguments of the command.
        config: The config.
        program: Command that starts Accrete, for messages.
        say: Called with a line about the new data.

    Returns:
        The new data, and the changes, which can be empty.

    Raises:
        UserError: If the data is ambiguous or cannot be added.
    """
    store = Store(absolute(config.storage))
    cards = list_used_cards(config)
    task_classes = list_task_classes(config, store.record(config.name))
    new = find_new_data(
        request.data, cards, task_classes, store, program, takes_all=request.kind == "classes"
    )
    if request.into and request.into not in task_classes:
        names = [*task_classes]
        remedy = did_you_mean(request.into, names, f"the tasks are {', '.join(names)}")
        raise UserError(f"--into {request.into!r}: the stream has no such task; {remedy}")
    say(f"{request.data}: {new.describe()}")
    changes = edit_stream(
        request.config,
        config,
        cards,
        task_classes,
        new,
        request.kind,
        request.into,
        request.name,
        request.data,
    )
    return new, changes


@contextmanager
def change_lock(config: Config, say: Say) -> Iterator[None]:
    """Context manager that holds a lock, so that another `add` or `remove` on this run waits."""

    def say_waiting() -> None:
        say(f"another command changes run {config.name}; waiting until it is done")

    root = join(absolute(config.storage), "stages")
    with stage_lock(root, f"change-{config.name}", on_wait=say_waiting):
        yield
