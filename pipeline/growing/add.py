"""Add data to a run: the change of its config, what follows from it, and the model that serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline import app
from pipeline import config as configs
from pipeline.app import OpenScreen, RunResult
from pipeline.config import Config
from pipeline.graph.replica_configs import refuse_replicas
from pipeline.graph.store import Store
from pipeline.growing.new_data import find_new_data, list_cards
from pipeline.growing.stream_edits import Kind, classes_of_tasks, edit_for
from pipeline.growing.training import describe_training
from pipeline.yaml_files import absolute
from workers.errors import UserError, did_you_mean

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


def take_in(request: AddRequest, config: Config, program: str, say: Say) -> None:
    """Write what new data change into a config and its cards.

    Where nothing is new, nothing is written: so a command that was interrupted can be given again.
    The old files are put back if the config cannot be used with the change.

    Args:
        request: What to add.
        config: The values of the config.
        program: How a person starts Accrete.
        say: Is given a line on what is new, and on each change.

    Raises:
        UserError: If the data can be read in two ways, or cannot be taken in.
    """
    store = Store(absolute(config.storage))
    cards = list_cards(config)
    task_classes = classes_of_tasks(config, store.record(config.name))
    new = find_new_data(request.data, cards, task_classes, store, program)
    if request.into and request.into not in task_classes:
        names = [*task_classes]
        remedy = did_you_mean(request.into, names, f"the tasks are {', '.join(names)}")
        raise UserError(f"--into {request.into!r}: the stream has no such task; {remedy}")
    say(f"{request.data}: {new.describe()}")
    if new.card is None or new.classes:
        changes = edit_for(
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
        changes.write()
        try:
            app.prepare(request.config)
        except UserError:
            changes.undo()
            raise
        for line in changes.lines:
            say(line)


def add(request: AddRequest, open_screen: OpenScreen, program: str, say: Say) -> RunResult:
    """Take new data in, show the plan, run it, and return what came out.

    Args:
        request: What to add.
        open_screen: Shows the run.
        program: How a person starts Accrete.
        say: Is given lines on what happens.

    Raises:
        UserError: If the data cannot be taken in, or a stage fails.
    """
    config = configs.load(request.config)
    refuse_replicas(config, request.config, "`add` updates one model")
    take_in(request, config, program, say)
    command = app.command_text("add", request.config, (), [request.data])
    run = app.prepare(request.config, to_run=True, say=say)
    app.ingest(run, open_screen, command)
    run = app.prepare(request.config)
    plan = app.plan(run)
    for line in describe_training(run, plan):
        say(line)
    report_command = app.command_text("report", request.config, ())
    return app.execute(run, open_screen, command, report_command)
