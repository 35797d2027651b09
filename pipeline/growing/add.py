"""Add data to a run: the change of its config, what follows from it, and the model that serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline import app
from pipeline import config as configs
from pipeline.app import OpenScreen, RunResult
from pipeline.config import Config
from pipeline.data.names import listed
from pipeline.graph.replica_configs import refuse_replicas
from pipeline.graph.store import Store
from pipeline.growing import publishing
from pipeline.growing.new_data import NewData, find_new_data, list_cards
from pipeline.growing.stream_edits import FileChanges, Kind, edit_stream, list_task_classes
from pipeline.growing.training import describe_cost, describe_training
from pipeline.yaml_files import absolute
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import join
from workers.storage.lock import stage_lock

Say = Callable[[str], None]


@dataclass(frozen=True)
class AddRequest:
    """What a person asks `add` for.

    Attributes:
        config: Path of the config file.
        data: Path of the data.
        kind: What the data are. None if they leave no doubt.
        into: Task that new classes join. Empty: they are a new task.
        name: Of the new task. Empty: the next free one.
        model: Folder that is updated, if any.
        method: Label of the method that the folder serves.
        max_drop: Points of accuracy that a task of the folder may lose.
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
    """Take new data in, say what trains again, run it, and update the model that serves.

    Where nothing is new, nothing is written: so a command that was interrupted can be given again.
    The old files are put back if the config cannot be used with the change, or the new images
    cannot be ingested.

    Args:
        request: What to add.
        open_screen: Shows the run.
        program: How a person starts Accrete.
        say: Is given lines on what happens.
        show: Is given what came out, before the model is updated.

    Raises:
        UserError: If the data cannot be taken in, a stage fails, or a task of the model gets worse.
    """
    config = configs.load(request.config)
    refuse_replicas(config, request.config, "`add` updates one model")
    label = ""
    if request.model:
        label = publishing.choose_method(config, request.model, request.method)
    with changing(config, say):
        config = configs.load(request.config)  # as the command before left it
        new, changes = find_changes(request, config, program, say)
        command = app.command_text("add", request.config, (), [request.data])
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
        say(f"{num_stages} stages: {num_stages - num_to_run} stand, {num_to_run} to run")
        for line in filter(None, [*describe_training(run, plan), describe_cost(run, plan)]):
            say(line)
        report_command = app.command_text("report", request.config, ())
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
    """Return what is new in data, and what that changes in a config and its cards.

    Args:
        request: What to add.
        config: The values of the config.
        program: How a person starts Accrete.
        say: Is given a line on what is new.

    Raises:
        UserError: If the data can be read in two ways, or cannot be taken in.
    """
    store = Store(absolute(config.storage))
    cards = list_cards(config)
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
def changing(config: Config, say: Say) -> Iterator[None]:
    """Context manager for one change of a run; other commands that change it wait."""

    def say_waiting() -> None:
        say(f"another command changes run {config.name}; waiting until it is done")

    root = join(absolute(config.storage), "stages")
    with stage_lock(root, f"change-{config.name}", on_wait=say_waiting):
        yield
