"""Export, import and remove single tasks of a model folder (bundle)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError

from workers.errors import UserError
from workers.job import Frozen, Task, add_neutral_values
from workers.methods import METHODS
from workers.methods.base import Method
from workers.serving.bundle import Bundle, carried_file
from workers.serving.model_file import NAME, REFERENCE, TaskBody, state_file, task_body
from workers.serving.reference import forget_task, load_reference
from workers.serving.versions import Versions, changing
from workers.storage.artifact import file_info
from workers.storage.taskstate import Carried, TaskState, check_values, load_tensors, read_metadata

# The state of a task is valid only in bundles with equal values of these fields.
COMMON_FIELDS = (
    "method",
    "settings",
    "scenario",
    "seed",
    "backbone_digest",
)


class NeedsBody(Frozen):
    """The JSON `accrete.needs` of an exported task.

    It has the values that a bundle must have to import the task, and facts about the task.

    Attributes:
        method: Name of the method. This and the next four fields must be those of the bundle.
        carried: Step -> sha256 of the step's carried state, which must be that of the bundle.
        classes: Names of the task's classes.
        card: Name of the card.
        data: Key of the ingest stage.
        role: Its role, see `Task`.
        state: sha256 of the state file.
    """

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
    """Return a task's state and the fields of `NeedsBody` as one safetensors file."""
    task = bundle.task(name)
    data = bundle.read(state_file(name))
    tensors, header = load_tensors(data, f"state of task {name!r}")
    needs = {
        **{key: bundle.body[key] for key in COMMON_FIELDS},
        "carried": list_carried_digests(bundle),
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
    """Add an exported task to a model folder.

    Args:
        uri: The model folder (bundle).
        data: The exported task.
        where: Name of `data` in errors.
        replace: Replace a task with an equal name.

    Returns:
        The added task.

    Raises:
        UserError: If the task does not fit the bundle, or the bundle has a task of this name and
            `replace` is false.
    """
    with changing(uri) as versions:
        return _import(versions, data, where, replace)


def _import(versions: Versions, data: bytes, where: str, replace: bool) -> Task:
    """See `import_task`."""
    uri = versions.uri
    bundle = Bundle.open(uri)
    method = METHODS.get(bundle.body["method"])
    if method is None:
        raise UserError(
            f"{uri}: this version of Accrete has no method {bundle.body['method']!r}; import the "
            "task with the version that wrote the folder"
        )
    if trains_shared(method):
        raise UserError(
            f"{uri}: method {bundle.body['method']!r} trains weights that its tasks share, so a "
            "task's state cannot be used with the weights of another run; only tasks that were "
            "trained independently of each other (a star) can be imported"
        )
    needs = read_needs(data, where)
    state = TaskState.from_bytes(data, where)
    provided = {key: bundle.body[key] for key in COMMON_FIELDS}
    provided["carried"] = list_carried_digests(bundle)
    for body in (needs, provided):  # older versions wrote only the settings of the config
        body["settings"] = complete_settings(provided["method"], body["settings"])
    for key, value in provided.items():
        if needs.get(key) != value:
            raise UserError(
                f"{where}: task {state.task!r} was exported from a model whose {key} is "
                f"{str(needs.get(key))[:60]}, but in {uri} it is {str(value)[:60]}; import it "
                "into a model with the same method, settings and backbone"
            )
    if not NAME.fullmatch(state.task):
        raise UserError(
            f"{where}: its task is called {state.task!r:.80}, but a name has only letters, digits, "
            "'_', '.' and '-'; export it again"
        )
    if state.task in [task.name for task in bundle.tasks] and not replace:
        raise UserError(
            f"{uri} serves a task {state.task!r} already; add `--replace` to replace it"
        )
    task = Task(state.task, needs["card"], needs["data"], state.classes, needs["role"])
    _check_task(task, needs, where)
    check_values(state.float_tensors(), where)
    state_bytes = state.to_bytes()  # without the metadata `accrete.needs`
    if file_info(state_bytes)["sha256"] != needs["state"]:
        raise UserError(
            f"{where}: it is damaged (its sha256 differs from the exported one); export it again"
        )
    tasks = [task if one.name == task.name else one for one in bundle.tasks]
    if task not in tasks:
        tasks.append(task)
    changed = bundle.with_tasks(tasks, {state_file(task.name): state_bytes})
    _check_answers(changed, task, where)
    versions.publish(changed)
    return task


def _check_task(task: Task, needs: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if a task cannot be written into `model.json`."""
    try:
        TaskBody.model_validate(task_body(task))
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{where}: {field_name} of its task is {first['input']!r:.80} ({first['msg']}); export "
            "it again"
        ) from None
    if list(task.classes) != needs["classes"] or len(set(task.classes)) < len(task.classes):
        raise UserError(
            f"{where}: its classes are {list(task.classes)!r:.80} and {needs['classes']!r:.80}, "
            "but both lists must be equal, without duplicates; export it again"
        )


@torch.no_grad()
def _check_answers(bundle: Bundle, task: Task, where: str) -> None:
    """Raise `UserError` if a task cannot be loaded, or its logits are too few or not finite."""
    method = bundle.method()
    images = _make_noise(bundle)
    with bundle._loading(f"the state of task {task.name!r}"):
        logits = method.logits(images, task.name)
        if logits.shape[-1] < task.num_classes or not torch.isfinite(logits).all():
            raise UserError(
                f"{where}: task {task.name!r} answers with {logits.shape[-1]} numbers for "
                f"{task.num_classes} classes, or with numbers that are not finite; export it again"
            )


def _make_noise(bundle: Bundle) -> torch.Tensor:
    """Return two fixed images of noise: float32 (2, 3, H, W)."""
    side = bundle.body["backbone"]["img_size"]
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def read_needs(data: bytes, where: str) -> dict[str, Any]:
    """Return the requirements of an exported task, with the fields of `NeedsBody`.

    Args:
        data: The exported task.
        where: Name of `data` in errors.

    Raises:
        UserError: If the bytes are not an exported task.
    """
    try:
        needs: dict[str, Any] = json.loads(read_metadata(data)["accrete.needs"])
        NeedsBody.model_validate(needs)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{where}: it is not an exported task; make one with `python -m pipeline tasks "
            "MODEL_DIR export NAME FILE`"
        ) from None
    return needs


def list_carried_digests(bundle: Bundle) -> dict[str, str]:
    """Return step -> sha256 of the step's carried state."""
    files = bundle.body["files"]
    return {step: files[file]["sha256"] for step, file in bundle.body["carried"].items()}


def remove_task(uri: str, name: str) -> str:
    """Remove a task and its state from a model folder, and delete earlier versions with the task.

    Args:
        uri: The model folder.
        name: Name of the task.

    Returns:
        A note about remaining traces of the task and about deleted versions, or "".

    Raises:
        UserError: If the task is the only one, or the logits of other tasks depend on its state.
    """
    with changing(uri) as versions:
        return _remove_from_versions(versions, name)


def _remove_from_versions(versions: Versions, name: str) -> str:
    """See `remove_task`."""
    uri = versions.uri
    bundle = Bundle.open(uri)
    removed = bundle.task(name)
    remaining = [task for task in bundle.tasks if task != removed]
    if not remaining:
        raise UserError(f"{uri}: {name!r} is the only task; remove the folder instead")
    new_files: dict[str, bytes] = {}
    new_names: dict[str, str] = {}  # step -> file
    head = f"heads/{name}/"  # prefix of the tensors of the task's head in a carried state
    for step, file in bundle.body["carried"].items():
        carried = Carried.from_bytes(bundle.read(file))
        tensors = {key: t for key, t in carried.tensors.items() if not key.startswith(head)}
        if len(tensors) < len(carried.tensors):
            data = Carried(tensors, carried.meta).to_bytes()
            new_names[step] = carried_file(f"{step}-{file_info(data)['sha256'][:8]}")
            new_files[new_names[step]] = data
    if REFERENCE in bundle.body["files"]:
        load_reference(bundle)  # raises an error if the file is damaged
        new_files[REFERENCE] = forget_task(bundle.read(REFERENCE), name)
    changed = bundle.with_tasks(remaining, new_files, new_names)
    if not has_same_answers(bundle, changed):
        raise UserError(
            f"{uri}: task {name!r} cannot be removed, because other tasks of method "
            f"{bundle.body['method']!r} use its state; run the stream without it instead"
        )
    versions.publish(changed, forget=name)
    notes: list[str] = []
    if trains_shared(METHODS[bundle.body["method"]]):
        notes.append(
            "its training changed the weights that tasks share; these changes stay, because "
            "later tasks depend on them"
        )
    # `versions` still describes the folder before `publish`, which dropped these versions
    earlier = versions.find_earlier(name)
    if earlier:
        numbers = ", ".join(map(str, earlier))
        notes.append(f"earlier versions with it were deleted ({numbers})")
    return "; ".join(notes)


def trains_shared(method: type[Method]) -> bool:
    """Return whether training a task changes weights that other tasks use."""
    return bool(method.carries) or method.trains_on == "seen"


@torch.no_grad()
def has_same_answers(before: Bundle, after: Bundle) -> bool:
    """Return whether the tasks of `after` have bit-identical logits in both bundles, on noise."""
    images = _make_noise(before)
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


def complete_settings(method: str, written: dict[str, Any]) -> dict[str, Any]:
    """Add the settings that a file lacks.

    They get their neutral values, which keep the behaviour from before the setting existed, or else
    their default values.

    Args:
        method: Name of the method.
        written: Settings from a file.

    Returns:
        All settings; `written` itself if this version does not know one of the written settings.
    """
    cls = METHODS[method].Settings
    try:
        settings = cls.model_validate(add_neutral_values(cls, written))
    except ValidationError:
        return written
    return settings.model_dump(by_alias=True, mode="json")
