"""A bundle (model folder): one folder with all files needed to serve a finished method.

A bundle can be used without a store and without cards. It contains no pickle.

model.json                  method, settings, tasks in stream order, preprocessing and provenance;
                            sha256 of each file and of itself; path of each file if it is not the
                            name of the file (see versions.py)
backbone.safetensors        the backbone
tasks/NAME.safetensors      state of a task
carried/STEP.safetensors    carried state of a step, if the method has any, without the entries of
                            `Method.training_only`
versions/                   `model.json` of earlier versions (see versions.py)
reference.safetensors       class means of training images, and weights of the rule `ranpac`
                            (see reference.py); optional
inputs/                     counts of the inputs by day (see input_counts.py); not in any digest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from workers.data.decoding import ANY_RANGE, ImageLimits
from workers.errors import UserError, describe_error
from workers.job import BackboneSettings, StageJob, Task, add_neutral_values
from workers.methods import METHODS
from workers.methods.base import Method
from workers.methods.registration import describe_unknown, require_plugins
from workers.model import vit
from workers.restore import merge_carried
from workers.rng import derive_seed
from workers.serving.model_file import (
    BACKBONE,
    FORMAT,
    MODEL,
    REFERENCE,
    REMAKE,
    find_place,
    read_model,
    remove_places,
    sealed,
    state_file,
    task_body,
    write_model,
)
from workers.storage.artifact import (
    Artifact,
    file_info,
    join,
    read_bytes,
    resolve,
    write_bytes,
)
from workers.storage.taskstate import Carried, TaskState, check_values


class BundleFile(NamedTuple):
    """A file of a stage in the store: the key of the stage, and the name of the file."""

    key: str
    file: str


@dataclass(frozen=True)
class Bundle:
    """The files needed to serve a finished method, in a folder or in a store.

    Args:
        body: Content of `model.json`.
        fetch: Function that returns the bytes of a file by its name.
        where: Name of the bundle in errors.
        job: The evaluation job from which the bundle was made; None for a folder.
    """

    body: Mapping[str, Any]
    fetch: Callable[[str], bytes]
    where: str
    job: StageJob | None = None

    @classmethod
    def open(cls, uri: str, file: str = MODEL) -> Bundle:
        """Open a bundle in a folder.

        Args:
            uri: Path of a folder, or a URI that pyarrow supports.
            file: Path, relative to `uri`, of `model.json` or of the file of an earlier version.

        Raises:
            UserError: If the folder is not a bundle, or was changed after it was written.
        """
        body = read_model(uri, file)

        def fetch(name: str) -> bytes:
            return read_bytes(join(uri, find_place(body, name)), body["files"][name]["bytes"])

        return cls(body, fetch, uri)

    @classmethod
    def of_job(cls, job: StageJob, limits: ImageLimits = ANY_RANGE) -> Bundle:
        """Return a bundle of the stored states from which an evaluation job builds its method.

        `restore.restore_finished_method` loads the same states. Files are read lazily, by `fetch`.
        Only carried states of methods with `Method.training_only` are read now: the bundle stores
        them without these entries, so their size and digest must be computed.

        Args:
            job: An evaluation of all tasks.
            limits: Limits of the training images.
        """
        assert job.backbone is not None
        sources = {BACKBONE: BundleFile(job.backbone, "state.safetensors")}
        for task_name, key in job.states.items():
            sources[state_file(task_name)] = BundleFile(key, "task.safetensors")
        for step, key in job.previous.items():
            sources[carried_file(step)] = BundleFile(key, "carried.safetensors")
        artifacts: dict[str, Artifact] = {}
        for source in sources.values():
            artifacts.setdefault(source.key, Artifact.need(job.root, source.key))
        training_only = METHODS[job.method].training_only
        reduced = {carried_file(step) for step in job.previous} if training_only else set()

        def fetch(name: str) -> bytes:
            source = sources[name]
            data = artifacts[source.key].read(source.file)
            if name in reduced:
                carried = Carried.from_bytes(data, f"carried state of {source.key}")
                data = carried.without(training_only).to_bytes()
            return data

        files: dict[str, Any] = {}
        for name, source in sources.items():
            files[name] = artifacts[source.key].manifest["files"][source.file]
            if name in reduced:
                files[name] = file_info(fetch(name))
        tasks = [task for task in job.tasks if task.name in job.states]
        backbone_settings = job.backbone_settings
        settings = METHODS[job.method].Settings.model_validate(job.settings)
        body = {
            "format": FORMAT,
            "method": job.method,
            # All settings are written, because defaults may change.
            "settings": settings.model_dump(by_alias=True, mode="json"),
            "backbone": backbone_settings.model_copy(update={"weights": "none"}).model_dump(
                mode="json"
            ),
            "backbone_digest": artifacts[job.backbone].manifest["digest"],
            "scenario": job.scenario,
            "seed": job.seed,
            "tasks": [task_body(task) for task in tasks],
            "carried": {step: carried_file(step) for step in job.previous},
            "preprocessing": {
                "resize": round(backbone_settings.img_size / backbone_settings.crop_pct),
                "crop": backbone_settings.img_size,
                "interpolation": backbone_settings.interpolation,
                "mean": list(backbone_settings.mean),
                "std": list(backbone_settings.std),
            },
            "max_pixels": limits.max_pixels,
            "provenance": {**job.provenance, "weights": backbone_settings.weights},
            "files": files,
        }
        if limits.value_range is not None:
            body["range"] = list(limits.value_range)
        if job.method_module not in ("", "__main__"):
            body["plugins"] = [job.method_module]

        return cls(sealed(body), fetch, f"run of {job.method}", job)

    @property
    def value_range(self) -> tuple[float, float] | None:
        """The values of black and white in images of more than 8 bits.

        None: the range that the format of each image declares (see `decoding.to_rgb`).
        """
        value_range = self.body.get("range")
        return None if value_range is None else (float(value_range[0]), float(value_range[1]))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The served tasks, in stream order."""
        return tuple(
            Task(t["name"], t["card"], t["data"], tuple(t["classes"]), t["role"])
            for t in self.body["tasks"]
        )

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        sizes: list[int] = [info["bytes"] for info in self.body["files"].values()]
        return sum(sizes)

    @property
    def max_task_bytes(self) -> int:
        """Maximum bytes of an exported task for this model: twice the backbone plus 1 GiB."""
        backbone_bytes = int(self.body["files"][BACKBONE]["bytes"])
        return 2 * backbone_bytes + (1 << 30)

    def task(self, name: str) -> Task:
        """Return a task by its name. Raise `UserError` if the bundle does not have it."""
        for task in self.tasks:
            if task.name == name:
                return task
        names = ", ".join(task.name for task in self.tasks)
        raise UserError(f"task {name!r} is not in {self.where}; there are {names}")

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            UserError: If the file is missing, cannot be read, or differs from its digest.
        """
        try:
            data = self.fetch(name)
        except FileNotFoundError:
            raise UserError(f"{self.where}: {name} is missing; {REMAKE}") from None
        except OSError as error:
            raise UserError(
                f"{self.where}: {name} cannot be read ({error.strerror or error}); {REMAKE}"
            ) from None
        expected = self.body["files"].get(name, {})
        if file_info(data) != {key: expected.get(key) for key in ("bytes", "sha256")}:
            raise UserError(
                f"{self.where}: {name} is damaged (its sha256 differs from {MODEL}); {REMAKE}"
            )
        return data

    def state(self, name: str) -> TaskState:
        """Return the state of a task."""
        where = f"state of task {name!r} in {self.where}"
        state = TaskState.from_bytes(self.read(state_file(name)), where)
        check_values(state.float_tensors(), where)
        return state

    def write(self, uri: str) -> None:
        """Write the bundle into a folder, with `model.json` last.

        Raises:
            UserError: If the folder is not empty.
        """
        check_new(uri)
        for name in self.body["files"]:
            write_bytes(join(uri, name), self.read(name))
        write_model(uri, remove_places(self.body))

    def backbone(self) -> nn.Module:
        """Build the backbone on the CPU, without the weights and modules of any task.

        Raises:
            UserError: If its settings are invalid, or its weights differ from the weights with
                which the tasks were trained.
        """
        body = self.body
        try:
            settings = BackboneSettings.model_validate(
                add_neutral_values(BackboneSettings, body["backbone"])
            )
        except ValidationError as error:
            raise self._unusable_settings(error) from None
        self._check_sizes(settings)
        weights = self.read(BACKBONE)
        with torch.random.fork_rng(devices=[]):
            backbone = vit.build(settings)
        vit.from_bytes(backbone, weights, f"backbone of {self.where}")
        check_values(backbone.state_dict().values(), f"backbone of {self.where}")
        if vit.compute_digest(backbone) != body["backbone_digest"]:
            raise UserError(
                f"{self.where}: its backbone is not the one that its tasks were trained on; "
                f"{REMAKE}"
            )
        return backbone

    def _unusable_settings(self, error: ValidationError) -> UserError:
        problem = error.errors()[0]["msg"]
        return UserError(
            f"{self.where}: its settings cannot be used here ({problem}); use the version of "
            "Accrete that wrote it"
        )

    def method(self, device: torch.device | None = None) -> Method:
        """Build the method and load all tasks, in evaluation mode.

        Args:
            device: Device of the method; None: the CPU.

        Raises:
            UserError: If this version does not know the method or its settings, or the parts of
                the bundle do not fit together.
        """
        body = self.body
        try:
            require_plugins(body.get("plugins", ()), self.where)
            cls = METHODS[body["method"]].Settings
            settings = cls.model_validate(add_neutral_values(cls, body["settings"]))
        except KeyError as error:
            raise UserError(
                f"{self.where}: its settings cannot be used here (method {error} is not known: "
                f"{describe_unknown(body['method'])}); use the version of Accrete that wrote it, "
                "or, if the method is your own, ask the model in Python where `pipeline.register` "
                "was called"
            ) from None
        except ValidationError as error:
            raise self._unusable_settings(error) from None
        # The constructor of a method may draw random numbers, so set the seed of the evaluation.
        with torch.random.fork_rng(devices=[]):
            backbone = self.backbone()
            last_task = self.tasks[-1].name if self.tasks else ""
            torch.manual_seed(derive_seed(body["seed"], "begin", last_task, "evaluate"))
            method = METHODS[body["method"]](backbone, settings, body["seed"])
        device = device or torch.device("cpu")
        method.to(device)
        method.join_stream(body["scenario"], self.tasks)
        for task in self.tasks:
            state = self.state(task.name)
            if (state.task, state.classes) != (task.name, task.classes):
                raise UserError(
                    f"{self.where}: the state of task {task.name!r} is of task {state.task!r} "
                    f"with other classes; {REMAKE}"
                )
            with self._loading(f"the state of task {task.name!r}"):
                method.load_task(state)
        if body["carried"]:
            parts: dict[str, Carried] = {}
            for step, file in body["carried"].items():
                parts[step] = Carried.from_bytes(self.read(file), f"{file} of {self.where}")
                check_values(parts[step].tensors.values(), f"{file} of {self.where}")
            with self._loading("the carried state of its tasks"):
                carried = merge_carried(self.where, body["method"], parts)
                method.load_carried(carried.to(device))
        return method.to(device).requires_grad_(False).eval()

    @contextmanager
    def _loading(self, part: str) -> Iterator[None]:
        """Context manager that raises `UserError` if invalid tensors make a method fail.

        Args:
            part: The part of the bundle that is loaded, for the message.
        """
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
            reason = describe_error(error)
            raise UserError(
                f"{self.where}: {part} does not fit method {self.body['method']!r} "
                f"({reason:.300}); {REMAKE}"
            ) from None

    def _check_sizes(self, settings: BackboneSettings) -> None:
        """Raise `UserError` if a file is too small or too large for the settings of the bundle.

        The file of the backbone must be at least as large as the tensors of the backbone. No file
        may be larger than a maximum that depends on the number of tasks. The check precedes any
        reading of these files and any allocation of memory for weights.
        """
        outline = vit.shared_outline(settings)
        files = {name: info["bytes"] for name, info in self.body["files"].items()}
        minimum = sum(tensor.nbytes for tensor in outline.state_dict().values())
        if files[BACKBONE] < minimum:
            raise UserError(
                f"{self.where}: {BACKBONE} has {files[BACKBONE]} bytes, but a backbone of these "
                f"settings has {minimum}; {REMAKE}"
            )
        # A carried state may contain a backbone for each task.
        maximum = vit.most_bytes(outline) * (len(self.body["tasks"]) + 1)
        large = next((name for name, size in files.items() if size > maximum), None)
        if large is not None:
            raise UserError(
                f"{self.where}: {large} has {files[large]} bytes, but a file of this model has at "
                f"most {maximum}; {REMAKE}"
            )

    def with_tasks(
        self,
        tasks: Sequence[Task],
        files: Mapping[str, bytes] | None = None,
        carried: Mapping[str, str] | None = None,
    ) -> Bundle:
        """Return a bundle with other tasks.

        Args:
            tasks: All tasks of the new bundle. The states of other tasks are left out.
            files: Name -> bytes of new or replaced files.
            carried: Step -> name of the new file with its carried state; only for steps whose
                carried state changes.
        """
        new_files = dict(files or {})
        carried_files = {**self.body["carried"], **(carried or {})}
        remaining = {BACKBONE, REFERENCE, *carried_files.values()}
        remaining |= {state_file(task.name) for task in tasks}
        infos = {name: info for name, info in self.body["files"].items() if name in remaining}
        for name, data in new_files.items():
            infos[name] = file_info(data)
        body = {
            **self.body,
            "carried": carried_files,
            "tasks": [task_body(task) for task in tasks],
            "files": infos,
        }

        def fetch(name: str) -> bytes:
            if name in new_files:
                return new_files[name]
            return self.fetch(name)

        return Bundle(sealed(body), fetch, self.where)


def check_new(uri: str) -> None:
    """Raise `UserError` if `uri` is a non-empty folder or a file."""
    system, path = resolve(uri)
    from pyarrow import fs

    if system.get_file_info(path).type == fs.FileType.File or system.get_file_info(
        fs.FileSelector(path, allow_not_found=True)
    ):
        raise UserError(
            f"{uri!r} exists already and is not an empty folder; give another, or remove it first"
        )


def carried_file(step: str) -> str:
    """Return the name of the file with the carried state of a step."""
    return f"carried/{step}.safetensors"
