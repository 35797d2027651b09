"""Remove a task, a class or images from a run, its storage and a model folder.

The steps are: edit the config and the cards, ingest, train, publish a new version of the model,
delete data. Because of this order, the same command can be repeated after a kill: each step skips
what was done before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.app import runs as app
from pipeline.app.prepared import find_or_make_record
from pipeline.app.screen import OpenScreen
from pipeline.config import settings as configs
from pipeline.config.yaml_files import absolute
from pipeline.graph.replica_configs import refuse_replicas
from pipeline.graph.store import Store
from pipeline.growing import leftovers as storage_leftovers
from pipeline.growing import publishing
from pipeline.growing.add import Say
from pipeline.growing.removals import Target, find_removal
from pipeline.growing.training import describe_training
from workers.errors import UserError

Confirm = Callable[[str], bool]
OTHER_MODELS = "other model folders and exported tasks, which nothing here knows of"


@dataclass(frozen=True)
class RemoveRequest:
    """Arguments of `remove`.

    Attributes:
        config: Path of the config file.
        target: The item to remove.
        model: Model folder to update. Empty: none.
        method: Label of the method that the model folder serves. None: choose it if only one fits.
    """

    config: str
    target: Target
    model: str = ""
    method: str | None = None


def remove(
    request: RemoveRequest, open_screen: OpenScreen, program: str, say: Say, confirm: Confirm
) -> None:
    """Remove an item, train the affected tasks, and delete the results that depend on the item.

    The caller must hold `change_lock`. If the changed config is invalid, or its data cannot be
    ingested, the previous config and cards are restored.

    Args:
        request: Arguments of the command.
        open_screen: Creates the screen of the run.
        program: Command that starts Accrete, for messages.
        say: Called with each line of progress.
        confirm: Asks the user a yes/no question before stored data is deleted. If it returns false,
            that data stays. The config is already changed, and earlier versions of `model` deleted.

    Raises:
        UserError: If the item cannot be removed, or a stage fails.
    """
    config = configs.load(request.config)
    refuse_replicas(config, request.config, "`remove` updates one model")
    store = Store(absolute(config.storage))
    label = ""
    if request.model:
        label = publishing.choose_method(config, request.model, request.method)
    removal = find_removal(request.target, request.config, config, store)
    if request.model:
        publishing.check_served(request.model, config, store, request.target.task)
    options = request.target.options()
    command = app.format_command("remove", request.config, (), options)
    removal.changes.write()
    try:
        run = app.prepare(request.config, to_run=True, say=say)
        if removal.changes.texts:
            app.ingest(run, open_screen, command)
            run = app.prepare(request.config)
    except UserError:
        removal.changes.undo()
        raise
    for line in removal.changes.lines:
        say(line)
    plan = app.plan(run)
    trained = describe_training(plan)
    record = store.record(run.config.name)
    keys = {stage["id"]: stage["key"] for stage in record["stages"]} if record else {}
    is_new = bool(plan.stages_to_run) or keys != run.keys
    if is_new:
        for line in trained:
            say(line)
        report_command = app.format_command("report", request.config, ())
        run = app.execute(run, open_screen, command, report_command).run
    leftovers = storage_leftovers.find_leftovers(run, request.config, find_or_make_record(run))
    is_pending = is_new or not leftovers.is_empty()
    published = ""
    if request.model:
        published = publishing.publish_removal(
            run, label, request.model, request.target.task, is_pending
        )
    if not is_pending and not published and not leftovers.left:
        say(f"there is nothing to remove: {' '.join(options)} was removed before")
        return
    say("to delete:")
    for line in leftovers.lines():
        say(f"  {line}")
    left = [*leftovers.left]
    is_confirmed = confirm("delete this for good?")
    if is_confirmed:
        left = leftovers.delete()
    other = f"{program} remove CONFIG {' '.join(options)}"
    others = storage_leftovers.describe_other_users(store, run.config.name, removal.cards, other)
    for title, lines in (
        (
            "deleted",
            leftovers.lines() if is_confirmed else ["nothing; the same command deletes it"],
        ),
        ("trained again", [line.strip() for line in trained] or ["nothing"]),
        ("published", [published] if published else []),
        ("left to you", [*removal.raw, *removal.kept, *left, *others, OTHER_MODELS]),
    ):
        if lines:
            say(f"{title}:")
        for line in lines:
            say(f"  {line}")
