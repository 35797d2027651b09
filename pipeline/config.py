"""YAML and overrides become frozen, checked settings; every error names the key, the value, the
rule and the remedy."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from pipeline.yaml_files import apply_override, merge, read_with_bases
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Frozen, TrainSettings
from workers.storage.secrets import refuse_secrets

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
ELSEWHERE = ("name", "storage", "cluster", "tracking")  # settings that change no result
LONGEST_SUFFIX = 60  # characters that `--set` adds to a run's name
PLAIN = {
    r"a valid dictionary( or instance of \w+)?": "a mapping of keys to values",
    r"^dictionary": "this mapping",
    r"a valid (list|tuple)": "a list",
    r"^(list|tuple)": "this list",
    r"^string": "this text",
    r"a valid string": "text",
}  # pydantic's words for Python's types


class TaskEntry(Frozen):
    """One line of the stream; with `split`, as many tasks of equal size, in the card's class
    order."""

    card: str
    name: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", description="default: the card's name"
    )
    classes: tuple[str, ...] | None = Field(
        None, min_length=1, description="default: all classes of the card"
    )
    order: str = Field(
        "",
        description="CARD/NAME of a file in a card's `orders`: which classes, in which order, in "
        "place of `classes`",
    )
    split: int = Field(
        0, ge=0, description="number of tasks that the classes are dealt to; 0 means one task"
    )
    role: Literal["task", "base", "unlabelled"] = Field(
        "task",
        description="`base`: the backbone is trained on it first; `unlabelled`: no task, but "
        "images that steps in front of the first task see without their labels",
    )

    @field_validator("classes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return [as_name(item) for item in value] if isinstance(value, (list, tuple)) else value


class StreamSettings(Frozen):
    tasks: tuple[TaskEntry, ...] = Field(min_length=1)
    scenario: Literal["task", "class"] = "task"


class ClusterSettings(Frozen):
    """Where it runs. None of this is in the key of a result. `workers`, `cpus_per_worker` and
    `gpus_per_worker` decide in which order floats are summed, which rounds differently; the rest
    changes no bit."""

    largest_whole: ClassVar[int] = 100_000

    workers: int = Field(
        0,
        ge=0,
        description="ranks per worker group; 0 runs everything in this process, without Ray",
    )
    groups: int = Field(
        0,
        ge=0,
        description="most worker groups side by side; 0: as many as there is room for. Set it "
        "where nodes are started on "
        "demand: then groups are asked for although there is no room yet",
    )
    min_workers: int = Field(
        0,
        ge=0,
        description="fewest ranks that a group goes on with when nodes are lost; it grows again "
        "between stages. 0: always "
        "`workers`",
    )
    cpus_per_worker: int = Field(
        1,
        gt=0,
        description="also the number of threads of a rank: results are the same to the last "
        "bit for one number, and up to the order of summation for another",
    )
    gpus_per_worker: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="a fraction shares a GPU; then the ranks of a group talk over gloo, as nccl "
        "wants a GPU each",
    )
    memory_gb_per_worker: float = Field(
        0.0, ge=0, le=1e6, description="memory that Ray keeps for a rank; 0: it does not count"
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(
        default_factory=dict,
        description="what else a rank takes of its node, e.g. `accelerator_type:H100: 0.001`",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="ranks of a group: on few nodes, or on many"
    )
    address: str = Field(
        "",
        description="Ray cluster to join; empty: RAY_ADDRESS if set, else a private local one; "
        "`local`: always private",
    )
    retries: int = Field(
        2,
        ge=0,
        le=1000,
        description="how often a stage that was interrupted or failed is tried again",
    )
    checkpoint_s: float = Field(
        60.0,
        ge=0,
        le=1e9,
        description="seconds between checkpoints inside a stage; 0: only when told to leave",
    )
    loader_workers: int = Field(
        2, ge=0, le=1000, description="decoding threads of a rank; any number gives the same bits"
    )
    cache: str = Field(
        "",
        description="folder of each node for shards and decoded images; empty: in the storage "
        "where that is a disk, else a temporary one",
    )
    cache_gb: float = Field(
        50.0,
        gt=0,
        le=1e9,
        description="what it may hold before what was not used for longest is deleted",
    )

    @model_validator(mode="after")
    def _elastic(self) -> ClusterSettings:
        if self.min_workers > self.workers:
            raise ValueError(
                f"min_workers is {self.min_workers} and workers {self.workers}: a group has at "
                "least min_workers ranks and at most workers"
            )
        return self


class TrackingSettings(Frozen):
    """The record in MLflow; `tracking: off` keeps none."""

    enabled: bool = True
    uri: str = Field(
        "",
        description="MLflow tracking URI; empty: MLFLOW_TRACKING_URI if set, else SQLite in the "
        "storage folder",
    )
    experiment: str = "accrete"
    patience_s: float = Field(
        60.0,
        ge=0,
        le=1e6,
        description="seconds that the end of a run waits for a tracking server that is away",
    )
    models: bool = Field(
        True,
        description="also log each method of a finished run as a model that serves its tasks, and "
        "register it",
    )
    system_metrics: bool = Field(
        False,
        description="also sample CPU, memory, disk, network and GPUs of the driver's machine; "
        "needs psutil",
    )


class OwnEntry(Frozen):
    """What the steps of one task alone have of a method: training settings, and those of the
    method's own that serving does not read."""

    train: dict[str, Any] = Field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class MethodEntry(Frozen):
    """One method of the run under its label: what differs from `train` and `data`, the method's own
    settings, and by task what it alone has."""

    method: str
    train: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tasks: dict[str, OwnEntry] = Field(default_factory=dict, exclude_if=lambda tasks: not tasks)
    settings: dict[str, Any] = Field(default_factory=dict)


class Config(Frozen):
    """A run: a stream, a backbone, and the methods that face them side by side."""

    _base_name: str = PrivateAttr("")

    name: str = Field(pattern=NAME)
    seed: int = Field(0, ge=0)
    storage: str = Field(
        "storage", min_length=1, description="folder or URI of everything that is kept"
    )
    stream: StreamSettings
    backbone: BackboneSettings = BackboneSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    methods: dict[str, MethodEntry] = Field(min_length=1)
    cluster: ClusterSettings = ClusterSettings()
    tracking: TrackingSettings = TrackingSettings()

    @field_validator("tracking", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, (bool, str)) else value

    @field_validator("methods", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        entries = {}
        for label, raw in value.items():
            label = as_name(label)
            body = _parted(raw, f"methods.{label}", ("train", "data", "steps", "tasks"))
            tasks = body.get("tasks", {})
            if isinstance(tasks, dict):
                body["tasks"] = {
                    as_name(task): _parted(
                        task_body, f"methods.{label}.tasks.{task}", ("train", "steps")
                    )
                    for task, task_body in tasks.items()
                }
            entries[label] = {"method": body["settings"].pop("method", label), **body}
        return entries

    @model_validator(mode="after")
    def _labels(self) -> Config:
        for label in self.methods:
            if not re.fullmatch(NAME, label):
                raise ValueError(
                    f"methods.{label}: a label has letters, digits, '_', '.' and '-' only"
                )
        return self

    @property
    def base_name(self) -> str:
        """The name in the file, where `--set` has changed what is computed, and so the name."""
        return self._base_name or self.name

    def entry_of(self, label: str, task: str | None = None) -> MethodEntry:
        """Return the settings of a method for one task: those for all tasks, overridden by those
        under `tasks`. task: None returns those for all tasks."""
        entry = self.methods[label]
        task_entry = entry.tasks.get(task or "", OwnEntry())
        return entry.model_copy(
            update={
                "train": entry.train | task_entry.train,
                "steps": merge(entry.steps, task_entry.steps),
                "settings": entry.settings | task_entry.settings,
            }
        )

    def train_of(
        self, label: str, step: str = "train", where: str = "", task: str | None = None
    ) -> TrainSettings:
        """The training settings of one step of one method: `train`, then the method's, then the
        task's, then the step's."""
        entry = self.entry_of(label, task)
        merged = {**self.train.model_dump(), **entry.train, **entry.steps.get(step, {})}
        return checked(TrainSettings, merged, f"{place_of(label, task)}.train", where)

    def data_of(self, label: str, where: str = "") -> DataSettings:
        """Return the data settings of one method: `data`, then the method's."""
        return checked(
            DataSettings,
            {**self.data.model_dump(), **self.methods[label].data},
            f"methods.{label}.data",
            where,
        )


def as_name(value: Any) -> str:
    """Return a name, which YAML may have read as a whole number, as text.

    Raise `ValueError` when YAML reads it as something else.
    """
    if type(value) not in (str, int):
        raise ValueError(
            f"a name is text or a whole number, and {value!r:.80} is neither; write it in quotes"
        )
    return str(value)


def _parted(raw: Any, path: str, shared: tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping of settings with all but the `shared` keys moved below `settings`.

    path: of the mapping in the config. shared: keys that every method has.
    """
    if not isinstance(raw, (dict, type(None))):
        raise ValueError(f"{path} is {raw!r}, it must be a mapping of settings")
    body = dict(raw or {})
    return {**{k: body.pop(k) or {} for k in shared if k in body}, "settings": body}


def place_of(label: str, task: str | None = None) -> str:
    """Where in a config a method's settings stand, or those that a task alone has."""
    return f"methods.{label}" + (f".tasks.{task}" if task else "")


def load(path: str, overrides: list[str] | None = None, with_methods: bool = True) -> Config:
    """Read a config file, apply `key.sub=value` overrides and check everything.

    with_methods: False leaves out the checks of the methods' own settings, which import torch.
    Raise `UserError` with one sentence.
    """
    file = Path(path)
    if not file.exists():
        near = (
            difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], 1)
            if file.parent.exists()
            else []
        )
        raise UserError(
            f"config {path!r} does not exist"
            + (
                f"; did you mean {str(file.parent / near[0])!r}?"
                if near
                else "; give the path of a .yaml file"
            )
        )
    body = read_with_bases(file)
    plain = copy.deepcopy(body)
    for override in overrides or []:
        apply_override(body, override)
    refuse_secrets(body, f"{path}: ")
    config = check(body, path, with_methods)
    if not overrides:
        return config
    try:
        return named_by_overrides(config, check(plain, path, with_methods))
    except UserError:  # without them the file is no run
        return config


def check(body: dict[str, Any], where: str, with_methods: bool = True) -> Config:
    """Return the settings that plain YAML values stand for. Raise `UserError` with one sentence."""
    config = checked(Config, body, "", where)
    for label, task in _entries(config):
        for step in dict.fromkeys(("train", *config.entry_of(label, task).steps)):
            if (
                config.train_of(label, step, where, task).keep == "best"
                and not config.data_of(label, where).val_fraction
            ):
                key = "train.keep" if step == "train" else f"steps.{step}.keep"
                raise UserError(
                    f"{where}: {place_of(label, task)}.{key} is 'best' with data.val_fraction "
                    "0: the best epoch is chosen on validation "
                    "images; hold some out, or set it to last"
                )
    if with_methods:
        _check_methods(config, where)
    return config


def _entries(config: Config) -> list[tuple[str, str | None]]:
    """Return (label, None) for every method, each followed by (label, task) for the tasks with
    settings of their own."""
    entries: list[tuple[str, str | None]] = []
    for label, entry in config.methods.items():
        entries.append((label, None))
        entries.extend((label, task) for task in entry.tasks)
    return entries


def _check_methods(config: Config, where: str) -> None:
    # imports torch, so it comes after everything that can be checked without
    from workers.methods import METHODS

    for label, entry in config.methods.items():
        if entry.method not in METHODS:
            near = difflib.get_close_matches(entry.method, list(METHODS), 1)
            raise UserError(
                f"{where}: methods.{label} names method {entry.method!r}, which does not exist; "
                + (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"there are: {', '.join(sorted(METHODS))}"
                )
            )
        if config.stream.scenario not in METHODS[entry.method].scenarios:
            raise UserError(
                f"{where}: methods.{label} cannot serve stream.scenario "
                f"{config.stream.scenario!r}; "
                f"{entry.method!r} serves {', '.join(sorted(METHODS[entry.method].scenarios))}"
            )
    for label, task in _entries(config):
        _check_entry(config, label, task, METHODS[config.methods[label].method], where)


def _check_entry(config: Config, label: str, task: str | None, cls: Any, where: str) -> None:
    """cls: the method's class."""
    entry = config.entry_of(label, task)
    path = place_of(label, task)
    if task is not None:
        _check_own(config.methods[label].tasks[task].settings, cls, path, label, where)
    settings = checked(cls.Settings, entry.settings, path, where)
    steps = [s.name for s in cls.steps]
    for step in entry.steps:
        if step not in steps:
            raise UserError(
                f"{where}: {path}.steps.{step} is not a step of {entry.method!r}; its steps "
                f"are {', '.join(steps)}"
            )
        config.train_of(label, step, where, task)
    for step in (s.name for s in cls.steps if s.trains):
        try:
            cls.validate(
                settings,
                config.train_of(label, step, where, task),
                config.data_of(label, where),
                config.stream.scenario,
            )
        except UserError as error:
            raise UserError(f"{where}: {path}: {error}") from None


def _check_own(settings: dict[str, Any], cls: Any, path: str, label: str, where: str) -> None:
    """Raise `UserError` when a task overrides a setting that only the whole method may have."""
    able = [*sorted(cls.per_task), "steps", "train"]
    for key, value in settings.items():
        if key in {"data", *_keys_at(cls.Settings, [])} - cls.per_task:
            raise UserError(
                f"{where}: {path}.{key} is {value!r:.80}, and {key} is one for all tasks of "
                f"{cls.name!r}; set it at methods.{label}.{key} "
                f"(a task's own may be: {', '.join(able)})"
            )
        if key not in able:
            near = difflib.get_close_matches(key, able, 1, 0.5)
            raise UserError(
                f"{where}: {path}.{key} is not a known key (value {value!r:.80}); "
                + (f"did you mean {near[0]!r}?" if near else f"valid keys are: {', '.join(able)}")
            )


Settings = TypeVar("Settings", bound=BaseModel)


def checked(model: type[Settings], body: Any, prefix: str, where: str = "") -> Settings:
    """Return the checked settings. Raise `UserError` with one sentence per mistake.

    prefix: path of the settings in a config. where: the file that they come from.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise UserError(
            (f"{where}: " if where else "") + sentence_of(error, model, prefix)
        ) from None


def sentence_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first problem of a validation error, as: key, value, rule, remedy."""
    first = error.errors()[0]
    loc = [str(p) for p in first["loc"]]
    key = ".".join(([prefix] if prefix else []) + loc)
    value = repr(first["input"])
    if len(value) >= 80:
        value = value[:77] + "..."
    if first["type"] == "extra_forbidden":
        valid = sorted(_keys_at(model, loc[:-1]))
        near = difflib.get_close_matches(loc[-1], valid, 1, 0.5)
        return f"{key} is not a known key (value {value}); " + (
            f"did you mean {near[0]!r}?"
            if near
            else f"valid keys are: {', '.join(valid) or 'none'}"
        )
    if first["type"] == "missing":
        return f"{key} is missing; add it"
    message = first["msg"].removeprefix("Value error, ").removesuffix(" after validation, not 0")
    message = message[0].lower() + message[1:]
    for python, plain in PLAIN.items():
        message = re.sub(python, plain, message)
    remedy = (
        "write it in quotes"
        if first["type"] == "string_type" and isinstance(first["input"], (int, float))
        else "change it"
    )
    return f"{key} is {value}: {message}; {remedy}" if key else f"{message}; {remedy}"


def _keys_at(model: type[BaseModel], path: list[str]) -> Iterator[str]:
    """Keys that the model accepts below `path` (list positions and free labels are stepped
    over)."""
    current: list[type[BaseModel]] = [model]
    for part in path:
        nested: list[type[BaseModel]] = []
        for settings_class in current:
            if part in settings_class.model_fields:
                nested.extend(_models_in(settings_class.model_fields[part].annotation))
        current = nested or current
    for settings_class in current:
        for name, info in settings_class.model_fields.items():
            yield info.alias or name


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted keys, for comparing two sets of inputs."""
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for name, nested in value.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            flat.update(flatten(nested, path))
        return flat
    if isinstance(value, tuple):
        return {prefix: list(value)}
    return {prefix: value}


def named_by_overrides(config: Config, plain: Config) -> Config:
    """A run that computes something else than its file says has a name, and so a record, a
    report and MLflow runs, of its own: NAME-seed-1 for `--set seed=1`. plain: the file without
    overrides."""
    before, after = (flatten(computed(settings)) for settings in (plain, config))
    changed = {
        key: after.get(key)
        for key in sorted(before.keys() | after.keys())
        if before.get(key, {}) != after.get(key, {})
    }  # an empty mapping says nothing
    if not changed or config.name != plain.name:
        return config
    text = "-".join(f"{key}-{value}" for key, value in changed.items())
    suffix = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    if suffix != text or len(suffix) > LONGEST_SUFFIX:
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        suffix = f"{suffix[:LONGEST_SUFFIX]}-{digest}"
    named = config.model_copy(update={"name": f"{config.name}-{suffix}"})
    named._base_name = plain.name
    return named


def computed(config: Config) -> dict[str, Any]:
    """The part of a config that says what is computed, not under which name, nor where."""
    return {key: value for key, value in dump(config).items() if key not in ELSEWHERE}


def dump(config: Config) -> dict[str, Any]:
    """The resolved config as plain values, in the layout of a config file."""
    body = config.model_dump(mode="json", by_alias=True)
    for entry in body["methods"].values():
        for part in (entry, *entry.get("tasks", {}).values()):
            part.update(part.pop("settings"))
    return body
