"""Single tasks of model folders: export one into a file, import it, or remove it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError

from workers.errors import UserError
from workers.job import Frozen, Task, with_neutral
from workers.methods import METHODS
from workers.methods.base import Method
from workers.serving.bundle import Bundle, carried_file
from workers.serving.model_file import NAME, TaskBody, state_file, task_body
from workers.serving.versions import Versions, changing
from workers.storage.artifact import file_info
from workers.storage.taskstate import Carried, TaskState, check_values, load_tensors

# A task's state is valid only in bundles that agree with it in these.
COMMON = (
    "method",
    "settings",
    "scenario",
    "seed",
    "backbone_digest",
)


class NeedsBody(Frozen):
    """What an exported task requires of a bundle that imports it."""

    method: str
    settings: dict[str, Any]
    scenario: str
    seed: int
    backbone_digest: str
    carried: dict[str, str]
    classes: list[str]
    card: str
    data: str
    role: str
    state: str


def export_task(bundle: Bundle, name: str) -> bytes:
    """Return a task's state and what it requires of a bundle, as one safetensors file."""
    task = bundle.task(name)
    data = bundle.read(state_file(name))
    tensors, header = load_tensors(data, f"state of task {name!r}")
    needs = {
        **{key: bundle.body[key] for key in COMMON},
        "carried": carried_digests(bundle),
        "classes": list(task.classes),
        "card": task.card,
        "data": task.data,
        "role": task.role,
        "state": file_info(data)["sha256"],
    }
    return safetensors.torch.save(
        tensors,
        {
            "accrete": json.dumps(header, sort_keys=True),
            "accrete.needs": json.dumps(needs, sort_keys=True),
        },
    )


def import_task(uri: str, data: bytes, where: str, replace: bool = False) -> Task:
    """Add an exported task to the bundle at `uri`, and return it.

    Args:
        uri: Of the bundle.
        data: The exported task.
        where: The name of `data` in errors.
        replace: Whether a task of the same name is replaced.

    Raises:
        UserError: If the two do not fit together, or the task is there already.
    """
    with changing(uri) as versions:
        return _import_into(versions, data, where, replace)


def _import_into(versions: Versions, data: bytes, where: str, replace: bool) -> Task:
    uri = versions.uri
    bundle = Bundle.open(uri)
    method = METHODS.get(bundle.body["method"])
    if method is None or trains_shared(method):
        raise UserError(
            f"{uri}: method {bundle.body['method']!r} trains weights that its tasks share, and "
            "a task's state means nothing beside those of "
            "another run; only tasks of a star can be imported"
        )
    needs = needs_of(data, where)
    state = TaskState.from_bytes(data, where)
    provided = {key: bundle.body[key] for key in COMMON}
    provided["carried"] = carried_digests(bundle)
    for body in (needs, provided):  # older versions wrote only the settings that a config had set
        body["settings"] = whole_settings(provided["method"], body["settings"])
    for key, value in provided.items():
        if needs.get(key) != value:
            raise UserError(
                f"{where}: task {state.task!r} was exported from a model whose {key} is "
                f"{str(needs.get(key))[:60]}, and in {uri} it is {str(value)[:60]}; import it "
                "into a model with the same method, settings and backbone"
            )
    if not NAME.fullmatch(state.task):
        raise UserError(
            f"{where}: its task is called {state.task!r:.80}, and a name has letters, digits, "
            "'_', '.' and '-' only; export it anew"
        )
    if state.task in [task.name for task in bundle.tasks] and not replace:
        raise UserError(
            f"{uri} serves a task {state.task!r} already; replace it with `--replace`, or leave it"
        )
    task = Task(state.task, needs["card"], needs["data"], state.classes, needs["role"])
    _check_task(task, needs, where)
    check_values(state.float_tensors(), where)
    plain = state.to_bytes()
    if file_info(plain)["sha256"] != needs["state"]:
        raise UserError(
            f"{where}: it is damaged (its sha256 differs from what was exported); export it anew"
        )
    tasks = [task if one.name == task.name else one for one in bundle.tasks]
    if task not in tasks:
        tasks.append(task)
    changed = bundle.with_tasks(tasks, {state_file(task.name): plain})
    _check_answers(changed, task, where)
    versions.publish(changed)
    return task


def _check_task(task: Task, needs: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` unless `model.json` can list a task."""
    try:
        TaskBody.model_validate(task_body(task))
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{where}: {field_name} of its task is {first['input']!r:.80} ({first['msg']}); export "
            "it anew"
        ) from None
    if list(task.classes) != needs["classes"] or len(set(task.classes)) < len(task.classes):
        raise UserError(
            f"{where}: its classes are {list(task.classes)!r:.80} and {needs['classes']!r:.80}, "
            "and they must be the same and differ from each other; export it anew"
        )


@torch.no_grad()
def _check_answers(bundle: Bundle, task: Task, where: str) -> None:
    """Raise `UserError` if a task cannot be loaded, or does not answer with a number a class."""
    method = bundle.method()
    side = bundle.body["backbone"]["img_size"]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with bundle._loading(f"the state of task {task.name!r}"):
        logits = method.logits(images, task.name)
        if logits.shape[-1] < task.num_classes or not torch.isfinite(logits).all():
            raise UserError(
                f"{where}: task {task.name!r} answers with {logits.shape[-1]} numbers for "
                f"{task.num_classes} classes, or with numbers that are not finite; export it anew"
            )


def needs_of(data: bytes, where: str) -> dict[str, Any]:
    """Return what an exported task requires. Raise `UserError` when the bytes are none."""
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        needs: dict[str, Any] = json.loads(metadata["accrete.needs"])
        NeedsBody.model_validate(needs)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{where}: it is no exported task; make one with `python -m pipeline tasks "
            "MODEL_DIR export NAME FILE`"
        ) from None
    return needs


def carried_digests(bundle: Bundle) -> dict[str, str]:
    """Return step -> sha256 of what it hands on."""
    files = bundle.body["files"]
    return {step: files[file]["sha256"] for step, file in bundle.body["carried"].items()}


def remove_task(uri: str, name: str) -> str:
    """Remove a task from the bundle at `uri`, with its state and all versions that have the task.

    Returns:
        A note about what stays of it and about earlier versions that were deleted, or "".

    Raises:
        UserError: If other tasks need that task's state: they must give the same answers as
            before, which is tried.
    """
    with changing(uri) as versions:
        return _remove_from(versions, name)


def _remove_from(versions: Versions, name: str) -> str:
    uri = versions.uri
    bundle = Bundle.open(uri)
    removed = bundle.task(name)
    remaining = [task for task in bundle.tasks if task != removed]
    if not remaining:
        raise UserError(f"{uri}: {name!r} is the only task; remove the folder instead")
    new_files: dict[str, bytes] = {}
    new_names: dict[str, str] = {}  # step -> file
    head = f"heads/{name}/"
    for step, file in bundle.body["carried"].items():
        carried = Carried.from_bytes(bundle.read(file))
        tensors = {key: t for key, t in carried.tensors.items() if not key.startswith(head)}
        if len(tensors) < len(carried.tensors):
            data = Carried(tensors, carried.meta).to_bytes()
            new_names[step] = carried_file(f"{step}-{file_info(data)['sha256'][:8]}")
            new_files[new_names[step]] = data
    changed = bundle.with_tasks(remaining, new_files, new_names)
    if not same_answers(bundle, changed):
        raise UserError(
            f"{uri}: other tasks of method {bundle.body['method']!r} answer with what task "
            f"{name!r} left behind, so that it cannot be taken "
            "out; run the stream without it instead"
        )
    versions.publish(changed, forget=name)
    notes: list[str] = []
    if trains_shared(METHODS[bundle.body["method"]]):
        notes.append(
            "what its training left in the weights that tasks share stays, because later tasks "
            "stand on it"
        )
    earlier = versions.find_earlier(name)
    if earlier:
        numbers = ", ".join(map(str, earlier))
        notes.append(f"earlier versions that served it were deleted ({numbers})")
    return "; ".join(notes)


def trains_shared(method: type[Method]) -> bool:
    """Return whether training a task changes weights that other tasks are served with."""
    return bool(method.carries) or method.trains_on == "seen"


@torch.no_grad()
def same_answers(before: Bundle, after: Bundle) -> bool:
    """Return whether the tasks of `after` have the same logits on noise in both, bit for bit."""
    side = before.body["backbone"]["img_size"]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    old_method = before.method()
    try:
        new_method = after.method()
        for task in after.tasks:
            old_logits = old_method.logits(images, task.name)
            new_logits = new_method.logits(images, task.name)
            if not torch.equal(old_logits, new_logits):
                return False
    except (UserError, LookupError, RuntimeError, ValueError):
        return False
    return True


def whole_settings(method: str, written: dict[str, Any]) -> dict[str, Any]:
    """Return written settings of a method together with those that were left out.

    Return them unchanged when this version does not know them.
    """
    cls = METHODS[method].Settings
    try:
        settings = cls.model_validate(with_neutral(cls, written))
    except ValidationError:
        return written
    return settings.model_dump(by_alias=True, mode="json")
