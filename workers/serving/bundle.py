"""A bundle: all that serves the tasks of one finished method, in one folder, without a store, a
card or a pickle.

model.json                  what it is: method, settings, tasks in stream order, preprocessing,
                            provenance; sha256 of each file and of itself
backbone.safetensors        the one backbone
tasks/NAME.safetensors      what each task left behind
carried/STEP.safetensors    what a chain, or a star that starts from common steps, hands on
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from workers.data.shards import MAX_PIXELS
from workers.errors import UserError
from workers.job import BackboneSettings, Frozen, StageJob, Task, with_neutral
from workers.methods import METHODS
from workers.methods.base import Method
from workers.model import vit
from workers.restore import merge_carried
from workers.rng import derive_seed
from workers.storage.artifact import (
    Artifact,
    digest_of,
    file_info,
    join,
    read_bytes,
    read_json,
    resolve,
    write_bytes,
)
from workers.storage.taskstate import Carried, TaskState, load_tensors

FORMAT = 1
MODEL, BACKBONE = "model.json", "backbone.safetensors"
PLAIN = "[A-Za-z0-9][A-Za-z0-9_.-]*"
NAME = re.compile(PLAIN)
Plain = Annotated[str, Field(pattern=f"^{PLAIN}$")]
Shown = Annotated[str, Field(pattern=r"^[^\pC]{1,200}$")]  # goes to terminals
File = Annotated[
    str, Field(pattern=rf"^(backbone|tasks/{PLAIN}|carried/{PLAIN})\.safetensors$")
]  # nothing outside the folder
# what a task's state means nothing without
COMMON = (
    "method",
    "settings",
    "scenario",
    "seed",
    "backbone_digest",
)


class FileBody(Frozen):
    bytes: NonNegativeInt
    sha256: str


class TaskBody(Frozen):
    name: Plain
    classes: tuple[Shown, ...] = Field(min_length=1)
    card: str
    data: str
    role: Literal["task", "base"]


class Body(Frozen):
    """What `model.json` must say: a folder may come from a stranger."""

    format: int
    method: str
    settings: dict[str, Any]
    backbone: BackboneSettings
    backbone_digest: str
    scenario: Literal["task", "class"]
    seed: NonNegativeInt
    tasks: tuple[TaskBody, ...] = Field(min_length=1)
    carried: dict[Plain, File]
    preprocessing: dict[str, Any]
    max_pixels: PositiveInt
    provenance: dict[str, Any]
    files: dict[File, FileBody]
    sha256: str


class NeedsBody(Frozen):
    """What an exported task says that it must find."""

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


@dataclass(frozen=True)
class Bundle:
    """body: what `model.json` says. fetch: the bytes of a file by name. where: what people call
    it."""

    body: Mapping[str, Any]
    fetch: Callable[[str], bytes]
    where: str

    @classmethod
    def open(cls, uri: str) -> Bundle:
        """A folder, or any URI that pyarrow knows. Raises UserError where it is none, or not as it
        was written."""
        try:
            body = read_json(join(uri, MODEL))
        except UserError:  # of the storage
            raise
        except (OSError, ValueError) as error:
            reason = (
                ""
                if isinstance(error, FileNotFoundError)
                else f" ({getattr(error, 'strerror', None) or error})"
            )
            raise UserError(
                f"{uri!r} is no model folder: it has no readable {MODEL}{reason}; make one with "
                "`python -m pipeline bundle`"
            ) from None
        if (
            not isinstance(body, dict)
            or body.get("sha256") != digest_of(body)
            or body.get("format") != FORMAT
        ):
            version = body.get("format") if isinstance(body, dict) else None
            why = (
                f"its format is {version}, this version reads {FORMAT}"
                if version not in (FORMAT, None)
                else "it is not as it was written"
            )
            raise UserError(
                f"{join(uri, MODEL)}: {why}; make the folder anew with `python -m pipeline bundle`"
            )
        try:
            Body.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{join(uri, MODEL)}: {'.'.join(map(str, first['loc']))} is "
                f"{first['input']!r:.80} ({first['msg']}); make the folder anew with "
                "`python -m pipeline bundle`"
            ) from None
        needed = {
            BACKBONE,
            *body["carried"].values(),
            *(state_file(task["name"]) for task in body["tasks"]),
        }
        if needed != body["files"].keys():
            raise UserError(
                f"{join(uri, MODEL)}: its files are not those of its tasks "
                f"({', '.join(sorted(needed ^ body['files'].keys()))[:200]}); make the "
                "folder anew with `python -m pipeline bundle`"
            )
        return cls(
            body, lambda name: read_bytes(join(uri, name), body["files"][name]["bytes"]), uri
        )

    @classmethod
    def of_job(cls, job: StageJob, max_pixels: int = MAX_PIXELS) -> Bundle:
        """What `restore.finished_method` loads for a job, straight from the store.

        Files are read when they are asked for.
        """
        assert job.backbone is not None
        places = {BACKBONE: (job.backbone, "state.safetensors")}
        places |= {state_file(task): (key, "task.safetensors") for task, key in job.states.items()}
        places |= {
            carried_file(step): (key, "carried.safetensors") for step, key in job.previous.items()
        }
        artifacts = {key: Artifact.need(job.root, key) for key, _ in places.values()}
        tasks = [t for t in job.tasks if t.name in job.states]
        c = job.backbone_settings
        # all: defaults may change
        settings = (
            METHODS[job.method]
            .Settings.model_validate(job.settings)
            .model_dump(by_alias=True, mode="json")
        )
        body = {
            "format": FORMAT,
            "method": job.method,
            "settings": settings,
            "backbone": c.model_copy(update={"weights": "none"}).model_dump(mode="json"),
            "backbone_digest": artifacts[job.backbone].manifest["digest"],
            "scenario": job.scenario,
            "seed": job.seed,
            "tasks": [described(t) for t in tasks],
            "carried": {step: carried_file(step) for step in job.previous},
            "preprocessing": {
                "resize": round(c.img_size / c.crop_pct),
                "crop": c.img_size,
                "interpolation": "bicubic",
                "mean": list(c.mean),
                "std": list(c.std),
            },
            "max_pixels": max_pixels,
            "provenance": {**job.provenance, "weights": c.weights},
            "files": {
                name: artifacts[key].manifest["files"][file] for name, (key, file) in places.items()
            },
        }
        return cls(
            sealed(body),
            lambda name: artifacts[places[name][0]].read(places[name][1]),
            f"run of {job.method}",
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """In stream order."""
        return tuple(
            Task(t["name"], t["card"], t["data"], tuple(t["classes"]), t["role"])
            for t in self.body["tasks"]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        sizes: list[int] = [info["bytes"] for info in self.body["files"].values()]
        return sum(sizes)

    @property
    def most_task_bytes(self) -> int:
        """The largest exported task that is read for this model: twice its backbone plus 1 GiB."""
        backbone_bytes = int(self.body["files"][BACKBONE]["bytes"])
        return 2 * backbone_bytes + (1 << 30)

    def task(self, name: str) -> Task:
        """Raises UserError where there is no such task."""
        found = next((t for t in self.tasks if t.name == name), None)
        if found is None:
            raise UserError(
                f"task {name!r} is not in {self.where}; there are "
                f"{', '.join(t.name for t in self.tasks)}"
            )
        return found

    def read(self, name: str) -> bytes:
        """The bytes of one file. Raises UserError where they are not those that were written."""
        try:
            data = self.fetch(name)
        except OSError as error:
            problem = (
                "is missing"
                if isinstance(error, FileNotFoundError)
                else f"cannot be read ({error.strerror or error})"
            )
            raise UserError(
                f"{self.where}: {name} {problem}; make the folder anew with `python -m pipeline "
                "bundle`"
            ) from None
        if file_info(data) != self.body["files"].get(name):
            raise UserError(
                f"{self.where}: {name} is damaged (its sha256 differs from {MODEL}); make the "
                "folder anew with `python -m pipeline bundle`"
            )
        return data

    def state(self, name: str) -> TaskState:
        return TaskState.from_bytes(
            self.read(state_file(name)), f"state of task {name!r} in {self.where}"
        )

    def write(self, uri: str) -> None:
        """Into a folder that is new or empty; `model.json` comes last. Raises UserError where it is
        neither."""
        system, path = resolve(uri)
        from pyarrow import fs

        if (
            system.get_file_info(fs.FileSelector(path, allow_not_found=True))
            or system.get_file_info(path).type == fs.FileType.File
        ):
            raise UserError(
                f"{uri!r} is there already and not an empty folder; name another, or remove it "
                "first"
            )
        for name in self.body["files"]:
            write_bytes(join(uri, name), self.read(name))
        write_model(uri, self.body)

    def method(self, device: torch.device | None = None) -> Method:
        """The method with all tasks loaded, on `device` (None: the CPU), in evaluation mode.

        Raises UserError where what the bundle says does not fit together."""
        body = self.body
        try:
            backbone_settings = BackboneSettings.model_validate(
                with_neutral(BackboneSettings, body["backbone"])
            )
            cls = METHODS[body["method"]].Settings
            settings = cls.model_validate(with_neutral(cls, body["settings"]))
        except (KeyError, ValidationError) as error:
            problem = (
                f"method {error} is not known"
                if isinstance(error, KeyError)
                else str(error.errors()[0]["msg"])
            )
            raise UserError(
                f"{self.where}: its settings cannot be used here ({problem}); use the version "
                "of Accrete that wrote it"
            ) from None
        self._check_sizes(backbone_settings)
        weights = self.read(BACKBONE)
        with torch.random.fork_rng(devices=[]):  # whatever is drawn here is what evaluation drew
            backbone = vit.build(backbone_settings)
            vit.from_bytes(backbone, weights, f"backbone of {self.where}")
            if vit.digest_of(backbone) != body["backbone_digest"]:
                raise UserError(
                    f"{self.where}: its backbone is not the one that its tasks were trained on; "
                    "make the folder anew with "
                    "`python -m pipeline bundle`"
                )
            torch.manual_seed(
                derive_seed(
                    body["seed"], "begin", self.tasks[-1].name if self.tasks else "", "evaluate"
                )
            )
            method = METHODS[body["method"]](backbone, settings, body["seed"])
        device = device or torch.device("cpu")
        method.to(device)
        method.scenario, method.stream = body["scenario"], self.tasks
        for task in self.tasks:
            state = self.state(task.name)
            if (state.task, state.classes) != (task.name, task.classes):
                raise UserError(
                    f"{self.where}: the state of task {task.name!r} is of task {state.task!r} "
                    "with other classes; make the folder anew with "
                    "`python -m pipeline bundle`"
                )
            with self._loading(f"the state of task {task.name!r}"):
                method.load_task(state)
        if body["carried"]:
            parts = {
                step: Carried.from_bytes(self.read(file), f"{file} of {self.where}")
                for step, file in body["carried"].items()
            }
            with self._loading("what its tasks carry"):
                method.load_carried(merge_carried(self.where, body["method"], parts).to(device))
        return method.to(device).requires_grad_(False).eval()

    @contextmanager
    def _loading(self, part: str) -> Iterator[None]:
        """Inside, what a stranger's tensors break in a method is told as UserError."""
        try:
            yield
        except UserError:
            raise
        except (
            RuntimeError,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            AssertionError,
        ) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{self.where}: {part} does not fit method {self.body['method']!r} "
                f"({reason:.300}); make the folder anew with "
                "`python -m pipeline bundle`"
            ) from None

    def _check_sizes(self, settings: BackboneSettings) -> None:
        """Raises UserError where settings ask for a backbone that is larger than its file, or a
        file is larger than any that its tasks can have; nothing is read or made before."""
        outline = vit.outline(settings)
        files = {name: info["bytes"] for name, info in self.body["files"].items()}
        least = sum(tensor.nbytes for tensor in outline.state_dict().values())
        if files[BACKBONE] < least:
            raise UserError(
                f"{self.where}: {BACKBONE} has {files[BACKBONE]} bytes, and a backbone of these "
                f"settings {least}; make the folder anew with "
                "`python -m pipeline bundle`"
            )
        # what a chain carries may hold a backbone for each task
        most = vit.most_bytes(outline) * (len(self.body["tasks"]) + 1)
        large = next((name for name, size in files.items() if size > most), None)
        if large is not None:
            raise UserError(
                f"{self.where}: {large} has {files[large]} bytes, and no file of such a model "
                f"more than {most}; make the folder anew with "
                "`python -m pipeline bundle`"
            )

    def but(
        self,
        tasks: Sequence[Task],
        files: Mapping[str, bytes] | None = None,
        carried: Mapping[str, str] | None = None,
    ) -> Bundle:
        """The same with these tasks alone. files: the bytes of what is new. carried: step -> file,
        where another one takes its place."""
        new, steps = dict(files or {}), {**self.body["carried"], **(carried or {})}
        keep = {BACKBONE, *steps.values(), *(state_file(t.name) for t in tasks)}
        infos = {name: info for name, info in self.body["files"].items() if name in keep}
        body = {
            **self.body,
            "carried": steps,
            "tasks": [described(t) for t in tasks],
            "files": {**infos, **{name: file_info(data) for name, data in new.items()}},
        }
        return Bundle(
            sealed(body), lambda name: new[name] if name in new else self.fetch(name), self.where
        )


def described(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "classes": list(task.classes),
        "card": task.card,
        "data": task.data,
        "role": task.role,
    }


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """With the sha256 of all the rest, as JSON gives it back."""
    plain = json.loads(
        json.dumps({name: value for name, value in body.items() if name != "sha256"}, default=str)
    )
    return {**plain, "sha256": digest_of(plain)}


def write_model(uri: str, body: Mapping[str, Any]) -> None:
    write_bytes(join(uri, MODEL), json.dumps(body, indent=1, sort_keys=True).encode())


def state_file(task: str) -> str:
    return f"tasks/{task}.safetensors"


def whole_settings(method: str, written: dict[str, Any]) -> dict[str, Any]:
    """All settings of a method, as a file has them, with what it leaves out; as they are where this
    version does not know them."""
    cls = METHODS[method].Settings
    try:
        settings = cls.model_validate(with_neutral(cls, written))
    except ValidationError:
        return written
    return settings.model_dump(by_alias=True, mode="json")


def carried_file(step: str) -> str:
    return f"carried/{step}.safetensors"


# ---- single tasks --------------------------------------------------------------------------------
def export_task(bundle: Bundle, name: str) -> bytes:
    """A task's state with all that another bundle must agree with, as one safetensors file."""
    task, data = bundle.task(name), bundle.read(state_file(name))
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


def import_task(uri: str, data: bytes, where: str) -> Task:
    """Puts an exported task into the bundle at `uri`. Raises UserError where the two do not belong
    together."""
    bundle = Bundle.open(uri)
    method = METHODS.get(bundle.body["method"])
    if method is None or trains_shared(method):
        raise UserError(
            f"{uri}: method {bundle.body['method']!r} trains weights that its tasks share, and "
            "a task's state means nothing beside those of "
            "another run; only tasks of a star can be imported"
        )
    needs, state = needs_of(data, where), TaskState.from_bytes(data, where)
    mine = {**{key: bundle.body[key] for key in COMMON}, "carried": carried_digests(bundle)}
    for body in (needs, mine):  # an older one lists those alone that a config had set
        body["settings"] = whole_settings(mine["method"], body["settings"])
    other = next((key for key, value in mine.items() if needs.get(key) != value), None)
    if other:
        values = (str(needs.get(other))[:60], str(mine[other])[:60])
        raise UserError(
            f"{where}: task {state.task!r} was exported from a model whose {other} is "
            f"{values[0]}, and in {uri} it is {values[1]}; import it "
            "into a model with the same method, settings and backbone"
        )
    if not NAME.fullmatch(state.task):
        raise UserError(
            f"{where}: its task is called {state.task!r:.80}, and a name has letters, digits, "
            "'_', '.' and '-' only; export it anew"
        )
    if state.task in {t.name for t in bundle.tasks}:
        raise UserError(f"{uri} serves a task {state.task!r} already; remove that one first")
    task = Task(
        state.task, str(needs["card"]), str(needs["data"]), state.classes, str(needs["role"])
    )
    plain = state.to_bytes()
    if file_info(plain)["sha256"] != needs["state"]:
        raise UserError(
            f"{where}: it is damaged (its sha256 differs from what was exported); export it anew"
        )
    changed = bundle.but([*bundle.tasks, task], {state_file(task.name): plain})
    changed.method()  # what does not load is not put in
    write_bytes(join(uri, state_file(task.name)), plain)
    write_model(uri, changed.body)
    return task


def needs_of(data: bytes, where: str) -> dict[str, Any]:
    """What an exported task must find; nothing where the bytes are no exported task."""
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
    return {
        step: bundle.body["files"][file]["sha256"] for step, file in bundle.body["carried"].items()
    }


def remove_task(uri: str, name: str) -> str:
    """Takes a task and its state out of the bundle at `uri`; the others answer as before, which is
    tried. Returns what a person should know of it. Raises UserError where the others' answers are
    made of that task's state."""
    bundle = Bundle.open(uri)
    gone = bundle.task(name)
    rest = [t for t in bundle.tasks if t != gone]
    if not rest:
        raise UserError(f"{uri}: {name!r} is the only task; remove the folder instead")
    files, moved = {}, {}
    for step, file in bundle.body["carried"].items():
        carried = Carried.from_bytes(bundle.read(file))
        kept = {
            key: t for key, t in carried.tensors.items() if not key.startswith(f"heads/{name}/")
        }
        if len(kept) < len(carried.tensors):
            data = Carried(kept, carried.meta).to_bytes()
            moved[step] = carried_file(f"{step}-{file_info(data)['sha256'][:8]}")
            files[moved[step]] = data
    changed = bundle.but(rest, files, moved)
    if not same_answers(bundle, changed):
        raise UserError(
            f"{uri}: other tasks of method {bundle.body['method']!r} answer with what task "
            f"{name!r} left behind, so that it cannot be taken "
            "out; run the stream without it instead"
        )
    for file, data in files.items():
        write_bytes(join(uri, file), data)
    write_model(uri, changed.body)  # from here on it is gone; nobody asks for what is deleted now
    for file in set(bundle.body["files"]) - set(changed.body["files"]):
        system, path = resolve(join(uri, file))
        system.delete_file(path)
    shared = trains_shared(METHODS[bundle.body["method"]])
    return (
        "what its training left in the weights that tasks share stays, because later tasks "
        "stand on it"
        if shared
        else ""
    )


def trains_shared(method: type[Method]) -> bool:
    """Whether a task's training changes what other tasks are served with."""
    return bool(method.carries) or method.trains_on == "seen"


@torch.no_grad()
def same_answers(before: Bundle, after: Bundle) -> bool:
    """Whether the tasks of `after` answer on images of noise as they did, bit for bit."""
    side = before.body["backbone"]["img_size"]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    old = before.method()
    try:
        new = after.method()
        return all(
            torch.equal(old.logits(images, t.name), new.logits(images, t.name)) for t in after.tasks
        )
    except (UserError, LookupError, RuntimeError, ValueError):
        return False
