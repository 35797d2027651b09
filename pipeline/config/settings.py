"""The settings of a config: read from YAML and overrides, validated and immutable.

Start with `load`, which returns a `Config`. Two checks go beyond those of pydantic: the classes of
the methods check the settings below `methods`, and an idle setting, which has no effect because of
the value of another one, is an error. Every error names the key, the value, the rule and the
remedy.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from pipeline.config.yaml_files import (
    ALTERNATIVES,
    STREAMS,
    apply_override,
    find_config,
    find_stream,
    merge,
    read_mapping_with_bases,
    read_with_bases,
    suggest_file,
    take_named_methods,
)
from workers.errors import UserError, did_you_mean
from workers.job import (
    ActiveIf,
    BackboneModel,
    DataSettings,
    Frozen,
    Interpolation,
    Neutral,
    TrainSettings,
    find_idle,
)
from workers.plugins import MODULE_NAME
from workers.storage.secrets import refuse_secrets

if TYPE_CHECKING:
    from workers.methods.base import Method

ConfigSource = str | Mapping[str, Any]  # path of a config file, or the values of a config
MAPPING = "the config"  # the name that errors give to a config without a file
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
ELSEWHERE = (
    "name",
    "storage",
    "cluster",
    "tracking",
    "plugins",
)  # settings that do not affect the key of any result
# characters that overrides add to the name of a run; a longer suffix is cut, and gets a digest
MAX_SUFFIX_CHARACTERS = 60
MAX_PROBLEM_TEXT = 500  # characters of an error; further mistakes of a file are only counted
MAX_VALUE_CHARACTERS = 80  # characters of a value in an error
# rule for the setting `tracking.prometheus` in errors
ADDRESS_RULE = "give HOST:PORT, or PORT alone for this machine; port 0 is any free one"
PLAIN_WORDS = {
    r"a valid dictionary( or instance of \w+)?": "a mapping of keys to values",
    r"^dictionary": "this mapping",
    r"a valid (list|tuple)": "a list",
    r"^(list|tuple)": "this list",
    r"^string": "this text",
    r"a valid string": "text",
}  # patterns of type names in pydantic's messages -> replacements
# first parts of the ids of stages that all methods share
SHARED_STAGES = ("data", "backbone", "features", "report")


def as_name(value: Any) -> str:
    """Return a name as a string. YAML may have read the name as an integer.

    Raises:
        ValueError: If the value is neither a string nor an integer.
    """
    if type(value) not in (str, int):
        raise ValueError(
            f"a name is text or a whole number, and {value!r:.80} is neither; write it in quotes"
        )
    return str(value)


Name = Annotated[str, BeforeValidator(as_name)]


class Slices(Frozen):
    """Division of images into tasks in which classes recur. Each image is in one task."""

    kind: Literal["blurry", "repeating"] = Field(
        description="`blurry`: a class comes mainly in one task (i-Blurry); `repeating`: a class "
        "comes equally in several tasks (the slots of CIR)"
    )
    tasks: int = Field(ge=2, le=1000, description="number of tasks")
    disjoint: Annotated[float, ActiveIf("kind", ("blurry",))] = Field(
        0.5, ge=0, le=1, description="share of the classes that come in one task only"
    )
    blur: Annotated[float, ActiveIf("kind", ("blurry",))] = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the images of each other class that come in other tasks than its "
        "main task",
    )
    classes: Annotated[int, ActiveIf("kind", ("repeating",))] = Field(
        2, ge=1, description="number of classes with images in each task"
    )
    seed: int = Field(0, ge=0, description="draws which class comes in which task")


MAX_SPLIT = 100_000  # tasks of an entry of the stream, or classes of a task in a list


def _check_split(value: Any) -> Any:
    """Return a value of `split`. Raise `ValueError` if it is neither a number nor a list."""
    is_list = isinstance(value, (list, tuple)) and len(value) > 1
    numbers = value if is_list else [value]
    if any(type(number) is not int or not is_list <= number <= MAX_SPLIT for number in numbers):
        raise ValueError(
            "give the number of tasks, or a list with the number of classes of each of two or more "
            f"tasks (at most {MAX_SPLIT})"
        )
    return value


TaskSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_SPLIT)], ...], Field(min_length=2)]
Split = Annotated[
    Annotated[int, Field(ge=0, le=MAX_SPLIT)] | TaskSizes, BeforeValidator(_check_split)
]


class TaskEntry(Frozen):
    """A task of the stream.

    With `split` the entry is several tasks, which divide its classes in the order of `classes` or
    `order`, else of the card. With `slices` it is several tasks that all have outputs for all
    classes, but may have images of only some.
    """

    card: str = Field(
        description="name of a card in `datasets`, or path of a card's file, or of the folder that "
        "holds it as card.yaml, from the folder of the config"
    )
    name: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", description="default: the card's name"
    )
    classes: tuple[Name, ...] | None = Field(
        None, min_length=1, description="default: all classes of the card"
    )
    order: Name = Field(
        "",
        description="CARD/NAME of a file in a card's `orders`, which lists the classes in order; "
        "or a whole number: the card's classes, permuted by numpy's RandomState of it. Replaces "
        "`classes`",
    )
    split: Split = Field(
        0,
        description="number of tasks that the classes are divided into equally; 0: one task. Or a "
        "list: the number of classes of each task, as in `[50, 10, 10, 10, 10, 10]`",
    )
    slices: Annotated[Slices | None, Neutral(None)] = Field(
        None, description="divides the images of all classes into tasks, in scenario `domain`"
    )
    role: Literal["task", "base", "pretrained", "unlabelled"] = Field(
        "task",
        description="`base`: the backbone is trained on it before the other tasks; `pretrained`: "
        "the backbone has learned it already, and the classifier in `backbone.weights`, with an "
        "output for each class in this order, is its head; "
        "`unlabelled`: not a task, but images without labels for the steps before the first task",
    )

    def list_task_names(self, card: str) -> list[str]:
        """Return the names of the tasks that the entry defines. `card` is the name of the card."""
        name = self.name or card
        count = self.slices.tasks if self.slices else self.split
        if isinstance(count, tuple):
            count = len(count)
        if not count:
            return [name]
        digits = len(str(count - 1))
        return [f"{name}-{index:0{digits}d}" for index in range(count)]


class StreamSettings(Frozen):
    """The tasks in the order in which they are learned."""

    tasks: tuple[TaskEntry, ...] = Field(
        min_length=1,
        description="in order; a card's name alone is a task with all classes of the card",
    )
    scenario: Literal["task", "class", "domain"] = Field(
        "task",
        description="`task`: the task of an image is given at test time (TIL); `class`: it is not, "
        "and one output space grows (CIL); `domain`: it is not, and all tasks have the same "
        "classes (DIL)",
    )
    measure_next: bool = Field(
        False,
        exclude_if=lambda is_on: not is_on,
        description="scenario `domain`: after each task, also measure the next one, before it is "
        "learned; this gives forward transfer",
    )

    @model_validator(mode="after")
    def _check_next(self) -> StreamSettings:
        if self.measure_next and self.scenario != "domain":
            raise ValueError(
                "measure_next needs scenario `domain`: in the others, a model has no outputs for "
                "the classes of a task that it has not learned; leave it out"
            )
        return self

    @field_validator("tasks", mode="before")
    @classmethod
    def _read_names(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [{"card": entry} if isinstance(entry, str) else entry for entry in value]


def _check_gpu_share(gpus: float) -> float:
    """Return a number of GPUs. Raise `ValueError` for a number that Ray cannot allocate."""
    if gpus > 1 and gpus % 1:
        raise ValueError(
            "a rank gets a part of one GPU, or whole GPUs; give a fraction below 1, or a whole "
            "number"
        )
    return gpus


Gpus = Annotated[float, Field(ge=0, le=1000), AfterValidator(_check_gpu_share)]


class StageLimits(Frozen):
    """Resources of a rank for one kind of stage, and the time limit of a try.

    A missing resource is taken from `cluster`.
    """

    cpus: int | None = Field(
        None,
        gt=0,
        description="as `cpus_per_worker`; for `ingest`: all CPUs divided by it is the number of "
        "its tasks that run at a time",
    )
    gpus: Gpus | None = Field(None, description="as `gpus_per_worker`")
    memory_gb: float | None = Field(None, ge=0, le=1e6, description="as `memory_gb_per_worker`")
    resources: dict[str, Annotated[float, Field(gt=0, le=1e9)]] | None = Field(
        None, description="as `resources`, in place of it"
    )
    timeout_s: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="seconds after which a try is ended and counts as failed; 0: no limit",
    )


class ClusterSettings(Frozen):
    """The resources that a run uses. These settings are not part of the key of a result.

    `workers`, `min_workers`, `cpus_per_worker` and `gpus_per_worker` (also in `stages`) determine
    the order in which floats are summed, so they change results by rounding. The other settings do
    not change results.
    """

    largest_whole: ClassVar[int] = 100_000  # limit of integers (`Frozen`); code loops over them

    workers: int = Field(
        0,
        ge=0,
        description="ranks per worker group; 0 runs everything in this process, without Ray",
    )
    groups: int = Field(
        0,
        ge=0,
        description="largest number of worker groups that run at a time; 0: as many as the cluster "
        "has room for. Set it on an autoscaling cluster, to request groups that do not fit yet",
    )
    min_workers: int = Field(
        0,
        ge=0,
        description="smallest number of ranks with which a group continues when nodes are lost; "
        "it grows again between stages. 0: always `workers`",
    )
    cpus_per_worker: int = Field(
        1,
        gt=0,
        description="also the number of threads of a rank; "
        "results are bit-equal for equal numbers, and differ by rounding for others",
    )
    gpus_per_worker: Gpus = Field(
        0.0,
        description="a fraction: ranks share a GPU, each with that part of its memory, and "
        "communicate by gloo, because NCCL needs a GPU per rank",
    )
    memory_gb_per_worker: float = Field(
        0.0, ge=0, le=1e6, description="memory that Ray reserves for a rank; 0: none"
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(
        default_factory=dict,
        description="other Ray resources of a rank, e.g. `accelerator_type:H100: 0.001`",
    )
    stages: dict[str, StageLimits] = Field(
        default_factory=dict,
        exclude_if=lambda stages: not stages,
        description="by kind of stage (`ingest`, `backbone`, `features`, `train`, `evaluate`, or "
        "another step of a method), where a rank takes other resources or a try has a time limit",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="strategy of Ray's placement group for the ranks of a worker group"
    )
    address: str = Field(
        "",
        description="Ray cluster to join; empty: RAY_ADDRESS if set, else a new local cluster; "
        "`local`: always a new local cluster",
    )
    retries: int = Field(
        2,
        ge=0,
        le=1000,
        description="retries of a stage that failed or lost its workers",
    )
    checkpoint_s: float = Field(
        60.0,
        ge=0,
        le=1e9,
        description="seconds between checkpoints inside a stage; 0: only at a preemption",
    )
    loader_workers: Literal["auto"] | Annotated[int, Field(ge=0, le=1000)] = Field(
        "auto",
        description="loader processes of a rank, which decode and crop images; they start after "
        "two seconds of such work in threads; `auto`: one per core of the node, divided by its "
        "ranks, at least 2; 0: only threads. They do not change results",
    )
    cache: str = Field(
        "",
        description="folder on each node that caches shards, decoded images and large sample "
        "tables; empty: inside a storage on disk, else a temporary folder",
    )
    cache_gb: float = Field(
        50.0,
        gt=0,
        le=1e9,
        description="size of the cache, from which the least recently used files are deleted",
    )

    @model_validator(mode="after")
    def _check_min_workers(self) -> ClusterSettings:
        if self.min_workers > self.workers:
            raise ValueError(
                f"min_workers is {self.min_workers} and workers {self.workers}: "
                "a group has at least min_workers ranks and at most workers"
            )
        return self

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, value: dict[str, StageLimits]) -> dict[str, StageLimits]:
        if "report" in value:
            raise ValueError(
                "the report is made by the driver itself, which takes neither resources nor a "
                "time limit; leave `report` out"
            )
        ingest = value.get("ingest", StageLimits())
        if ingest.gpus or ingest.memory_gb or ingest.resources:
            raise ValueError(
                "ingest runs without a GPU in tasks that reserve nothing; "
                "it may have `gpus: 0`, `cpus` and `timeout_s`"
            )
        return value

    def of_step(self, step: str) -> ClusterSettings:
        """Return the settings with the resources for one kind of stage, for example `train`."""
        limits = self.stages.get(step, StageLimits())
        resources = {
            "cpus_per_worker": limits.cpus,
            "gpus_per_worker": limits.gpus,
            "memory_gb_per_worker": limits.memory_gb,
            "resources": limits.resources,
        }
        changed = {name: value for name, value in resources.items() if value is not None}
        return self.model_copy(update=changed)

    def of_any_step(self) -> ClusterSettings:
        """Return the settings of a rank that can run every kind of stage.

        Each resource is the maximum over the kinds of stages.
        """
        kinds = [self, *(self.of_step(step) for step in self.stages)]
        resources: dict[str, float] = {}
        for kind in kinds:
            for name, amount in kind.resources.items():
                resources[name] = max(amount, resources.get(name, 0.0))
        most = {
            "cpus_per_worker": max(kind.cpus_per_worker for kind in kinds),
            "gpus_per_worker": max(kind.gpus_per_worker for kind in kinds),
            "memory_gb_per_worker": max(kind.memory_gb_per_worker for kind in kinds),
            "resources": resources,
        }
        return self.model_copy(update=most)

    def time_limit(self, step: str) -> float | None:
        """Return the time limit in seconds of a try of one kind of stage; None: no limit."""
        limits = self.stages.get(step, StageLimits())
        return limits.timeout_s or None


def parse_address(text: str) -> tuple[str, int]:
    """Parse the setting `tracking.prometheus` into host and port.

    Args:
        text: `HOST:PORT`, `[IPv6]:PORT`, or `PORT`.

    Raises:
        ValueError: If the text is not an address.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if ":" in host:
        ipaddress.IPv6Address(host)
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} has no port; {ADDRESS_RULE}")
    return host, int(port)


class TrackingSettings(Frozen):
    """How a run is recorded in MLflow; `tracking: off` records nothing."""

    enabled: bool = Field(True, description="false: record nothing, as `tracking: off`")
    uri: str = Field(
        "",
        description="MLflow tracking URI; empty: MLFLOW_TRACKING_URI if set, "
        "else SQLite in the storage folder",
    )
    experiment: str = Field("accrete", description="name of the experiment in MLflow")
    patience_s: float = Field(
        60.0,
        ge=0,
        le=1e6,
        description="seconds to wait at the end of a run for a tracking server "
        "that does not answer",
    )
    models: bool = Field(
        True,
        description="log and register each method of a finished run as a model "
        "that serves its tasks",
    )
    system_metrics: bool = Field(
        False,
        description="record use of CPU, memory and GPUs of the workers' machines, and of the "
        "driver's machine with its disk and network too; needs psutil",
    )
    prometheus: str = Field(
        "",
        description="HOST:PORT, or PORT alone for this machine, where the driver answers "
        "Prometheus with metrics of the run while it goes on, with `enabled: false` too; "
        "0: any free port",
    )

    @field_validator("prometheus", mode="before")
    @classmethod
    def _check_address(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
            return value
        parse_address(str(value))
        return str(value)

    @property
    def samples_machines(self) -> bool:
        """Whether CPU, memory and GPU use of the workers' machines are sampled."""
        return bool(self.prometheus) or (self.enabled and self.system_metrics)


class TaskOverrides(Frozen):
    """The settings of a method that differ for one task.

    Attributes:
        train: Differences from the method's `train`.
        steps: Differences from the method's `steps`.
        settings: Differences from the method's own settings. Serving does not read them.
    """

    train: dict[str, Any] = Field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class MethodEntry(Frozen):
    """The settings of one method of the run, under its label.

    Attributes:
        train: Differences from the config's `train`.
        data: Differences from the config's `data`.
        steps: Step -> training settings of this step.
        tasks: Name of a task -> differences for this task.
        settings: The method's own settings.
    """

    method: str
    train: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tasks: dict[str, TaskOverrides] = Field(
        default_factory=dict, exclude_if=lambda tasks: not tasks
    )
    settings: dict[str, Any] = Field(default_factory=dict)


class BackboneChoice(BackboneModel):
    """The backbone that all tasks share: any image model of timm.

    Missing values come from the model's configuration in timm or on the hub.
    """

    name: str = Field(
        "",
        description="name of a timm model, such as `convnext_atto` or, with the tag of its "
        "weights, `resnet18.a1_in1k`; or `t2t_vit_12`, `convit_local`. Empty: the model that "
        "`weights: hf-hub:...` names, else vit_tiny_patch16_224",
    )
    img_size: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="height and width of input images in pixels; position embeddings are "
        "resampled to it. null: the model's own, else 224",
    )
    mean: tuple[float, float, float] | None = Field(
        None,
        description="mean of each colour channel (R, G, B) of pixels in [0, 1], which inputs "
        "are normalised by. null: the model's own, else 0.5",
    )
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = Field(
        None,
        description="standard deviation of each colour channel (R, G, B) of pixels in [0, 1], "
        "which inputs are normalised by. null: the model's own, else 0.5",
    )
    crop_pct: float | None = Field(
        None,
        ge=0.1,
        le=1,
        description="side of the centre crop in evaluation, as a share of the resized image's "
        "side. null: the model's own, else 0.9",
    )
    interpolation: Annotated[Interpolation | None, Neutral(None)] = Field(
        None,
        description="how images are resized, antialiased, for evaluation and for training without "
        "`crop: resized`, whose crops are bilinear. null: the model's own, else bicubic",
    )


class Config(Frozen):
    """A run: a stream of tasks, a backbone, and the methods that learn the stream with it."""

    _base_name: str = PrivateAttr("")

    name: str = Field(pattern=NAME, description="name of the run, its record and its report")
    seed: int = Field(0, ge=0, description="all randomness of the run follows from it")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        min_length=1,
        exclude_if=lambda seeds: not seeds,
        description="in place of `seed`: the run is repeated with each of them, as one graph with "
        "one report; one seed is the same as `seed`",
    )
    orders: tuple[Name, ...] = Field(
        (),
        min_length=1,
        exclude_if=lambda orders: not orders,
        description="class orders with each of which the run is repeated: what `order` of every "
        "task with `split` is set to in turn",
    )
    storage: str = Field(
        "storage", min_length=1, description="folder or URI of all results, checkpoints and records"
    )
    stream: StreamSettings = Field(description="the tasks, and the scenario")
    backbone: BackboneChoice = Field(
        BackboneChoice(), description="the network that all tasks share, and its initial weights"
    )
    data: DataSettings = Field(
        DataSettings(), description="how images are read, augmented and held out"
    )
    train: TrainSettings = Field(
        TrainSettings(),
        description="training of all methods; each method has its own default for a setting that "
        "is not given",
    )
    methods: dict[str, MethodEntry] = Field(
        min_length=1,
        description="label -> a method and its settings; or names of methods, which take the "
        "settings that are recommended for the stream",
    )
    cluster: ClusterSettings = Field(
        ClusterSettings(), description="the resources that the run uses; in no key of a result"
    )
    tracking: TrackingSettings = Field(
        TrackingSettings(), description="how the run is recorded in MLflow; `off`: not at all"
    )
    plugins: tuple[Annotated[str, Field(pattern=rf"^{MODULE_NAME}$", max_length=200)], ...] = Field(
        (),
        exclude_if=lambda plugins: not plugins,
        description="modules outside of Accrete that define methods of this config; they are "
        "required, and never loaded by it: install their packages, or give `--plugin MODULE`",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_seeds(cls, body: Any) -> Any:
        if not isinstance(body, dict) or "seeds" not in body:
            return body
        seeds = body["seeds"]
        if isinstance(seeds, (list, tuple)) and len(seeds) == 1:
            rest = {key: value for key, value in body.items() if key != "seeds"}
            return {**rest, "seed": seeds[0]}
        return body

    @field_validator("seeds", "orders")
    @classmethod
    def _list_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) < len(value):
            raise ValueError("one of them is listed twice; list each once")
        return value

    @field_validator("tracking", mode="before")
    @classmethod
    def _read_switch(cls, value: Any) -> Any:
        if isinstance(value, (bool, str)):
            return {"enabled": value}
        return value

    @field_validator("methods", mode="before")
    @classmethod
    def _read_methods(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        entries = {}
        for key, raw in value.items():
            label = as_name(key)
            body = _split_settings(
                raw, build_settings_path(label), ("train", "data", "steps", "tasks")
            )
            tasks = body.get("tasks", {})
            if isinstance(tasks, dict):
                overrides = {}
                for task, raw_task in tasks.items():
                    path = build_settings_path(label, task)
                    overrides[as_name(task)] = _split_settings(raw_task, path, ("train", "steps"))
                body["tasks"] = overrides
            entries[label] = {"method": body["settings"].pop("method", label), **body}
        return entries

    @model_validator(mode="after")
    def _check_labels(self) -> Config:
        for label in self.methods:
            if not re.fullmatch(NAME, label):
                raise ValueError(
                    f"methods.{label}: a label has letters, digits, '_', '.' and '-' only"
                )
            if label in SHARED_STAGES:
                raise ValueError(
                    f"methods.{label}: stages that all methods share have this name; choose "
                    "another label"
                )
        return self

    @property
    def base_name(self) -> str:
        """The name in the file. `name` differs from it if `--set` changes the results."""
        return self._base_name or self.name

    def merge_entry(self, label: str, task: str | None = None) -> MethodEntry:
        """Return the settings of a method, merged with its settings for one task.

        Args:
            label: Label of the method.
            task: The task. None: only the settings that hold for all tasks.
        """
        entry = self.methods[label]
        task_entry = entry.tasks.get(task or "", TaskOverrides())
        return entry.model_copy(
            update={
                "train": entry.train | task_entry.train,
                "steps": merge(entry.steps, task_entry.steps),
                "settings": entry.settings | task_entry.settings,
            }
        )

    def merge_train(
        self, label: str, step: str = "train", where: str = "", task: str | None = None
    ) -> TrainSettings:
        """Return the training settings of one step of one method.

        Later values override earlier ones: the defaults of the method, `train` of the config, of
        the method and of the task, `steps` of the method and of the task.

        Args:
            label: Label of the method.
            step: Name of the step, for example `finetune`.
            where: Name of the config in errors.
            task: The task. None: only the settings that hold for all tasks.

        Raises:
            UserError: If a value is invalid.
        """
        return self._complete_train(
            self.methods[label].method,
            step,
            self._configured_train(label, step, task),
            f"{build_settings_path(label, task)}.train",
            where,
        )

    def backbone_train(self) -> TrainSettings:
        """Return the training settings of the stage that trains the backbone on the base task.

        The stage trains like the method `finetune`, whose defaults replace the values that the
        config's `train` does not set.
        """
        return self._complete_train("finetune", "train", self._set_train(), "train", "")

    def _complete_train(
        self, method: str, step: str, configured: dict[str, Any], path: str, where: str
    ) -> TrainSettings:
        from workers.methods import METHODS  # imports torch

        is_from_scratch = self.backbone.weights == "none"
        values = METHODS[method].train_defaults.complete(configured, step, is_from_scratch)
        return checked(TrainSettings, values, path, where)

    def _set_train(self) -> dict[str, Any]:
        """Return only the values that the section `train` sets, without defaults of methods."""
        return self.train.model_dump(exclude_unset=True)

    def _configured_train(self, label: str, step: str, task: str | None) -> dict[str, Any]:
        """Return the training settings that the config sets for one step of one method."""
        entry = self.merge_entry(label, task)
        return {**self._set_train(), **entry.train, **entry.steps.get(step, {})}

    def configured_keep(
        self, label: str, step: str, where: str = "", task: str | None = None
    ) -> str:
        """Return the setting `keep` of a step, after a check of its configured training settings.

        Unlike `merge_train`, which has the same arguments, this method does not import torch,
        because it does not fill in the defaults of the method.
        """
        path = f"{build_settings_path(label, task)}.train"
        configured = self._configured_train(label, step, task)
        return checked(TrainSettings, configured, path, where).keep

    def merge_data(self, label: str, where: str = "") -> DataSettings:
        """Return the data settings of one method: its own values override those of `data`."""
        merged = {**self.data.model_dump(), **self.methods[label].data}
        return checked(DataSettings, merged, f"{build_settings_path(label)}.data", where)


def _split_settings(raw: Any, path: str, shared: tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping with the keys of `raw`: the shared ones at the top, others in `settings`.

    Args:
        raw: The settings of a method, or of a method for one task. None: no settings.
        path: Its path in the config, for errors.
        shared: Keys that every method has. An empty value becomes {}.

    Raises:
        ValueError: If `raw` is not a mapping.
    """
    if not isinstance(raw, (dict, type(None))):
        raise ValueError(f"{path} is {raw!r}, it must be a mapping of settings")
    settings = dict(raw or {})
    body = {}
    for key in shared:
        if key in settings:
            body[key] = settings.pop(key) or {}
    return {**body, "settings": settings}


def build_settings_path(label: str, task: str | None = None) -> str:
    """Return the dotted path of a method's settings in a config, or of the settings for a task."""
    path = f"methods.{label}"
    if task:
        path += f".tasks.{task}"
    return path


def load(
    source: ConfigSource, overrides: list[str] | None = None, with_methods: bool = True
) -> Config:
    """Read a config, apply overrides and validate all settings.

    Args:
        source: Path of a file, or the content of such a file with paths relative to the current
            folder.
        overrides: Overrides `key.sub=value`, like `--set`.
        with_methods: Also make the checks that need the classes of methods, which imports torch.

    Returns:
        The config. If the overrides change the results, it has another name (see
        `derive_run_name`).

    Raises:
        UserError: If the config is invalid.
    """
    body = read_values(source, overrides or ())
    where = get_source_name(source)
    refuse_secrets(body, f"{where}: ")
    if "space" in body and "methods" not in body:
        raise UserError(
            f"{where}: this is a search, with a `space`; use `python -m pipeline search`, "
            "or give the config that it names as `base`"
        )
    if "methods" not in body and "stream" in body:
        raise UserError(
            f"{where} names no method; add --method NAME, or `methods: [NAME]` to a config that "
            "extends it (`python -m pipeline methods` lists all methods)"
        )
    config = check(body, where, with_methods)
    if not overrides:
        return config
    try:
        plain = read_values(source, [o for o in overrides if _names_methods_of_stream(o, source)])
        return derive_run_name(config, check(plain, where, with_methods))
    except UserError:  # the file is only valid with the overrides
        return config


def read_values(source: ConfigSource, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the values of a config, apply overrides, and insert settings of methods given by name.

    Args:
        source: Path of a file, or the values.
        overrides: Overrides `key.sub=value`, like `--set`.

    Raises:
        UserError: If a file cannot be read, or an override cannot be applied.
    """
    body = _list_values(source)
    for override in overrides:
        apply_override(body, override)
        if override.startswith("methods="):
            body = set_named_methods(body, source)
    return body


def _names_methods_of_stream(override: str, source: ConfigSource) -> bool:
    """Return whether an override adds methods to a config without methods (a stream).

    `set_named_methods` puts these methods into the name of the run. Therefore, `load` must not
    count the override as a change that derives another name.
    """
    return override.startswith("methods=") and "methods" not in _list_values(source)


def set_named_methods(body: dict[str, Any], source: ConfigSource) -> dict[str, Any]:
    """Replace names of methods in the values of a config by their recommended settings.

    A recommended backbone replaces only the backbone of the stream's own file. If a file has no
    `name`, the run is called FILE-METHOD, with all given methods.
    """
    where = get_source_name(source)
    if not isinstance(source, str):
        return merge(body, take_named_methods(body, "", where))
    file = find_config(source)
    stream = find_stream(file)
    taken = take_named_methods(body, stream, where)
    if "backbone" in taken:
        of_stream = read_with_bases(STREAMS / f"{stream}.yaml").get("backbone")
        if body.get("backbone") != of_stream:  # the config or an override has chosen another one
            del taken["backbone"]
    if taken and "name" not in body:
        body = {"name": "-".join([file.stem, *taken["methods"]]), **body}
    return merge(body, taken)


def get_source_name(source: ConfigSource) -> str:
    """Return the name of a config in errors: the path of the file, if it has one."""
    return source if isinstance(source, str) else MAPPING


def _list_values(source: ConfigSource) -> dict[str, Any]:
    """Return the values of a config, merged over its bases. The caller may change the result."""
    if not isinstance(source, str):
        return read_mapping_with_bases(source, MAPPING)
    file = find_config(source)
    if not file.exists():
        raise _missing_config(file, source)
    return read_with_bases(file)


def _missing_config(file: Path, path: str) -> UserError:
    return UserError(f"config {path!r} does not exist; {suggest_file(file)}")


def check(body: dict[str, Any], where: str, with_methods: bool = True) -> Config:
    """Validate the plain YAML values of a config.

    Args:
        body: The values.
        where: Name of the config in errors.
        with_methods: Also make the checks that need the classes of methods, which imports torch.

    Raises:
        UserError: If a value is invalid.
    """
    if "seed" in body and "seeds" in body:
        raise UserError(
            f"{where}: seed is {body['seed']!r:.80} and seeds is {body['seeds']!r:.80}, and a "
            "config has one of the two; leave `seed` out"
        )
    config = checked(Config, body, "", where)
    for label, task in _labels_and_tasks(config):
        config.merge_data(label, where)
        for step in dict.fromkeys(("train", *config.merge_entry(label, task).steps)):
            config.configured_keep(label, step, where, task)
    _check_orders(config, where)
    _check_slices(config, where)
    if with_methods:
        _check_methods(config, where)
        _check_train_and_data(config, where)
        _check_kinds_of_stages(config, where)
        config = _with_plugins(config)
    return config


def _check_orders(config: Config, where: str) -> None:
    """Raise `UserError` if there are class orders, but no task is split by classes."""
    if config.orders and not any(entry.split for entry in config.stream.tasks):
        raise UserError(
            f"{where}: orders is {list(config.orders)}, and no task of stream.tasks has `split`, "
            "so there are no classes to divide in another order; leave orders out"
        )


def _check_slices(config: Config, where: str) -> None:
    """Raise `UserError` if `slices` cannot be used here, or has a setting without an effect."""
    for index, entry in enumerate(config.stream.tasks):
        if entry.slices is None:
            continue
        path = f"stream.tasks.{index}.slices"
        if config.stream.scenario != "domain":
            raise UserError(
                f"{where}: {path} makes tasks with the same classes, and stream.scenario is "
                f"{config.stream.scenario!r}; set it to `domain`, where tasks have one output space"
            )
        if entry.split or entry.role != "task":
            key = "split" if entry.split else "role"
            raise UserError(
                f"{where}: {path} and stream.tasks.{index}.{key} both say which tasks there are; "
                "leave one out"
            )
        idle = find_idle(entry.slices)
        for key in sorted(idle.keys() & entry.slices.model_fields_set):
            value = getattr(entry.slices, key)
            raise UserError(f"{where}: {_idle_text(path, key, value, *idle[key])}")


def _labels_and_tasks(config: Config) -> list[tuple[str, str | None]]:
    """Return (label, None) for every method, and then (label, task) for each entry of `tasks`."""
    pairs: list[tuple[str, str | None]] = []
    for label, entry in config.methods.items():
        pairs.append((label, None))
        pairs.extend((label, task) for task in entry.tasks)
    return pairs


def _check_methods(config: Config, where: str) -> None:
    """Raise `UserError` if a method does not exist, or cannot be used as the config says."""
    # imports torch, so all checks that do not need torch come first
    from workers.methods import METHODS
    from workers.methods.registration import (
        describe_unknown,
        explain_not_importable,
        require_plugins,
    )

    require_plugins(config.plugins, where)
    for label, entry in config.methods.items():
        path = build_settings_path(label)
        if entry.method not in METHODS:
            raise UserError(
                f"{where}: {path} names method {entry.method!r}, which does not exist; "
                f"{describe_unknown(entry.method)}"
            )
        scenarios = METHODS[entry.method].scenarios
        if config.stream.scenario not in scenarios:
            raise UserError(
                f"{where}: {path} cannot serve stream.scenario {config.stream.scenario!r}; "
                f"{entry.method!r} serves {', '.join(sorted(scenarios))}"
            )
        if any(task.slices for task in config.stream.tasks):
            _check_takes_slices(METHODS[entry.method], path, where)
        reason = explain_not_importable(entry.method)
        if reason and config.cluster.workers:
            raise UserError(
                f"{where}: {path} names {entry.method!r}, which Ray workers cannot import, because "
                f"{reason}; set cluster.workers to 0, or move the class to the top of a module"
            )
    for label, task in _labels_and_tasks(config):
        method_class = METHODS[config.methods[label].method]
        _check_entry(config, label, task, method_class, where)


def _check_takes_slices(method_class: type[Method[Any]], path: str, where: str) -> None:
    """Raise `UserError` if a method cannot learn `slices`: tasks without images of some classes."""
    from workers.methods import METHODS

    if method_class.shares_head:
        return
    able = ", ".join(sorted(name for name, other in METHODS.items() if other.shares_head))
    raise UserError(
        f"{where}: {path} names {method_class.name!r}, which has a head for each task, and a slice "
        f"has no images for some of its classes; methods with one head for all tasks are {able}"
    )


def _with_plugins(config: Config) -> Config:
    """Return the config with `plugins` extended by the modules of methods outside of Accrete."""
    from workers.methods.registration import method_module

    modules = [method_module(entry.method) for entry in config.methods.values()]
    needed = [module for module in modules if module not in ("", "__main__")]
    plugins = tuple(dict.fromkeys([*config.plugins, *needed]))
    return config if plugins == config.plugins else config.model_copy(update={"plugins": plugins})


def _check_kinds_of_stages(config: Config, where: str) -> None:
    """Raise `UserError` if `cluster.stages` names a kind of stage that does not exist."""
    if not config.cluster.stages:
        return
    from workers.methods import METHODS  # imports torch

    kinds = dict.fromkeys(("ingest", "backbone", "features", "train", "evaluate"))
    for method_class in METHODS.values():
        kinds |= dict.fromkeys(step.name for step in method_class.steps)
    for kind in config.cluster.stages:
        if kind not in kinds:
            hint = did_you_mean(kind, kinds, f"there are: {', '.join(kinds)}")
            raise UserError(
                f"{where}: cluster.stages.{kind} is not a kind of stage (a step of a run); {hint}"
            )


def _check_entry(
    config: Config, label: str, task: str | None, method_class: type[Method[Any]], where: str
) -> None:
    """Raise `UserError` if a method does not accept its settings, or its settings for a task."""
    entry = config.merge_entry(label, task)
    path = build_settings_path(label, task)
    if task is not None:
        overrides = config.methods[label].tasks[task].settings
        _check_task_overrides(overrides, method_class, path, label, where)
    settings = checked(method_class.Settings, entry.settings, path, where)
    idle = find_idle(settings, scenario=config.stream.scenario)
    for key, (mark, value) in idle.items():
        if key in entry.settings:
            set_by_task = task is not None and key in config.methods[label].tasks[task].settings
            key_path = path if set_by_task else build_settings_path(label)
            raise UserError(
                f"{where}: {_idle_text(key_path, key, entry.settings[key], mark, value)}"
            )
    for key, reason in method_class.unused_train_settings(settings).items():
        if key in entry.train:
            raise UserError(
                f"{where}: {path}.train.{key} is {entry.train[key]!r:.80}, and has no effect with "
                f"{entry.method!r}, because {reason}; leave it out"
            )
    steps = [step.name for step in method_class.steps]
    for name in entry.steps:
        if name not in steps:
            raise UserError(
                f"{where}: {path}.steps.{name} is not a step of {entry.method!r}; "
                f"its steps are {', '.join(steps)}"
            )
        config.merge_train(label, name, where, task)
    for step in method_class.steps:
        if not step.trains:
            continue
        train = config.merge_train(label, step.name, where, task)
        data = config.merge_data(label, where)
        try:
            method_class.validate(settings, train, data, config.stream.scenario)
        except UserError as error:
            raise UserError(f"{where}: {path}: {error}") from None
        reads_several = "seen" in (method_class.reads, method_class.trains_on)
        has_soft_targets = data.mixup or data.cutmix or data.smoothing
        if config.stream.scenario == "domain" and reads_several and has_soft_targets:
            _check_one_head(method_class, path, where)


def _check_one_head(method_class: type[Method[Any]], path: str, where: str) -> None:
    """Raise `UserError` if a method with soft targets (mixup, smoothing) has a head per task."""
    if not method_class.shares_head:
        raise UserError(
            f"{where}: {path}: data.mixup, data.cutmix or data.smoothing is above 0, and "
            f"{method_class.name!r} has a head for each task in scenario `domain`, where one class "
            "has several outputs; set all three to 0 for this method"
        )


def _check_train_and_data(config: Config, where: str) -> None:
    """Raise `UserError` for a setting of a `train` or `data` section that has no effect anywhere.

    A setting is accepted if it has its default value, or if one step of one method uses it.
    """
    from workers.methods import METHODS  # imports torch

    errors: dict[tuple[str, str], str] = {}  # (section, key) -> error, raised if nothing uses it
    used: set[tuple[str, str]] = set()

    def check_section(section: str, values: Mapping[str, Any], resolved: Frozen) -> None:
        idle = find_idle(resolved)
        for key, value in values.items():
            # a recorded config contains all settings, including those without an effect
            is_default = value == type(resolved).model_fields[key].default
            if key in idle and not is_default:
                errors[section, key] = _idle_text(section, key, value, *idle[key])
            else:
                used.add((section, key))

    shared_train = config.train.model_dump(exclude_unset=True)
    shared_data = config.data.model_dump(exclude_unset=True)
    if any(task.role == "base" for task in config.stream.tasks):
        check_section("train", shared_train, config.backbone_train())
    for label, task in _labels_and_tasks(config):
        method = config.methods[label]
        entry = method if task is None else method.tasks[task]
        path = build_settings_path(label, task)
        data = config.merge_data(label, where)
        check_section("data", shared_data, data)
        check_section(f"{build_settings_path(label)}.data", method.data, data)
        for step in METHODS[method.method].steps:
            if not step.trains:
                continue
            train = config.merge_train(label, step.name, where, task)
            check_section("train", shared_train, train)
            check_section(f"{build_settings_path(label)}.train", method.train, train)
            check_section(f"{path}.train", entry.train, train)
            check_section(f"{path}.steps.{step.name}", entry.steps.get(step.name, {}), train)
    for key, error in errors.items():
        if key not in used:
            raise UserError(f"{where}: {error}")


def _idle_text(path: str, key: str, value: Any, mark: ActiveIf, other: Any) -> str:
    """Return the error for a setting that has no effect because of the value of another setting.

    Args:
        path: Path of the section in the config.
        key: The setting without an effect.
        value: Its value.
        mark: Names the other setting, and its values at which `key` has an effect.
        other: Value of the other setting.
    """
    if mark.name == "scenario":
        decider = "stream.scenario"
        remedy = ""
    else:
        decider = mark.name
        values = " or ".join(map(_yaml_text, mark.values))
        other_than = " or ".join(map(_yaml_text, mark.but))
        remedy = f", or set {decider} to {values or f'another value than {other_than}'}"
    return (
        f"{path}.{key} is {value!r:.80}, and has no effect with {decider} {_yaml_text(other)}; "
        f"leave it out{remedy}"
    )


def _yaml_text(value: Any) -> str:
    """Format a value as in a config."""
    return json.dumps(value).strip('"')


def _check_task_overrides(
    settings: dict[str, Any], method_class: type[Method[Any]], path: str, label: str, where: str
) -> None:
    """Raise `UserError` if a task overrides an unknown setting, or one that holds for all tasks.

    Args:
        settings: The task's differences from the method's own settings.
        method_class: The method; `per_task` has the settings that a task may override.
        path: Path of the task's settings in the config.
        label: Label of the method.
        where: Name of the config in errors.
    """
    allowed = [*sorted(method_class.per_task), "steps", "train"]
    common = {"data", *_list_accepted_keys(method_class.Settings, [])} - method_class.per_task
    for key, value in settings.items():
        if key in common:
            raise UserError(
                f"{where}: {path}.{key} is {value!r:.80}, "
                f"and {key} is one for all tasks of {method_class.name!r}; "
                f"set it at methods.{label}.{key} (a task's own may be: {', '.join(allowed)})"
            )
        if key not in allowed:
            hint = _similar_key(key, allowed)
            raise UserError(
                f"{where}: {path}.{key} is not a known key (value {value!r:.80}); {hint}"
            )


def _similar_key(key: str, valid: list[str]) -> str:
    return did_you_mean(key, valid, f"valid keys are: {', '.join(valid) or 'none'}", cutoff=0.5)


Settings = TypeVar("Settings", bound=BaseModel)


def checked(model: type[Settings], body: Any, prefix: str, where: str = "") -> Settings:
    """Validate settings.

    Args:
        model: The model.
        body: The values.
        prefix: Path of the settings in a config.
        where: Name of their file in errors.

    Raises:
        UserError: If a value is invalid; see `describe_validation_error` for the message.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        sentence = describe_validation_error(error, model, prefix, body)
        if where:
            sentence = f"{where}: {sentence}"
        raise UserError(sentence) from None


def describe_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = "", body: Any = None
) -> str:
    """Describe a validation error: key, value, rule and remedy of each problem.

    After MAX_PROBLEM_TEXT characters, further problems are only counted.

    Args:
        error: The error.
        model: The validated model.
        prefix: Path of the settings in a config.
        body: The validated values. None: only the first problem is described.
    """
    problems: dict[tuple[Any, ...], Any] = {}
    places = [problem["loc"] for problem in error.errors()]
    above = {place[:depth] for place in places for depth in range(len(place))}
    for problem in error.errors():  # a value of a union has a problem for each type of the union
        # pydantic counts only valid items, so a list of invalid items is reported as too short
        if problem["type"] != "too_short" or problem["loc"] not in above:
            problems.setdefault(_format_place(body, problem["loc"]), problem)
    sentences: list[str] = []
    length = 0
    for problem in problems.values():
        sentence = _problem_text(problem, model, prefix)
        length += len(sentence)
        if sentences and (body is None or length > MAX_PROBLEM_TEXT):
            break
        sentences.append(sentence)
    num_left = len(problems) - len(sentences)
    if body is not None and num_left:
        sentences.append(f"{num_left} more {'mistake' if num_left == 1 else 'mistakes'}")
    return "; and ".join(sentences)


def _format_place(body: Any, location: Sequence[Any]) -> tuple[Any, ...]:
    """Return the part of a location that is a path in `body`, or ends with a missing key.

    pydantic appends the tried type to a location inside a union. Without it, all problems of one
    value have the same place.
    """
    path: list[Any] = []
    for part in location:
        path.append(part)
        try:
            body = body[part]
        except (LookupError, TypeError):
            return tuple(path[:-1] if not isinstance(body, dict) else path)
    return tuple(path)


def _problem_text(first: Any, model: type[BaseModel], prefix: str) -> str:
    location = [str(part) for part in first["loc"]]
    key = ".".join([prefix, *location] if prefix else location)
    value = repr(first["input"])
    if len(value) >= MAX_VALUE_CHARACTERS:
        value = value[: MAX_VALUE_CHARACTERS - 3] + "..."
    if first["type"] == "extra_forbidden":
        hint = _similar_key(location[-1], sorted(_list_accepted_keys(model, location[:-1])))
        return f"{key} is not a known key (value {value}); {hint}"
    if first["type"] == "missing":
        return f"{key} is missing; add it"
    message = first["msg"].removeprefix("Value error, ").removesuffix(" after validation, not 0")
    message = message[0].lower() + message[1:]
    for pattern, words in PLAIN_WORDS.items():
        message = re.sub(pattern, words, message)
    remedy = "change it"
    if first["type"] == "string_type" and isinstance(first["input"], (int, float)):
        remedy = "write it in quotes"
    if not key:
        return f"{message}; {remedy}"
    return f"{key} is {value}: {message}; {remedy}"


def _list_accepted_keys(model: type[BaseModel], path: list[str]) -> Iterator[str]:
    """Yield the keys that a model accepts below `path`.

    Parts of the path that are not fields, for example list positions and labels, are skipped.
    """
    current: list[type[BaseModel]] = [model]
    for part in path:
        nested: list[type[BaseModel]] = []
        for settings_class in current:
            if part in settings_class.model_fields:
                nested.extend(_find_models(settings_class.model_fields[part].annotation))
        current = nested or current
    for settings_class in current:
        for name, info in settings_class.model_fields.items():
            yield info.alias or name


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type annotation, for example `dict[str, MethodEntry]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _find_models(argument)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into dotted key -> value, to compare two sets of inputs.

    An empty mapping is kept as a value, and a tuple becomes a list, as in JSON.
    """
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for name, nested in value.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            flat.update(flatten(nested, path))
        return flat
    if isinstance(value, tuple):
        return {prefix: list(value)}
    return {prefix: value}


def derive_run_name(config: Config, plain: Config) -> Config:
    """Return the config with a derived name if the overrides change the results.

    The renamed run has its own record, report and MLflow runs: NAME-seed-1 for `--set seed=1`. A
    name that an override sets is kept.

    Args:
        config: The config with the overrides.
        plain: The config of the file without them.
    """
    before = flatten(computed(plain))
    after = flatten(computed(config))
    changed = {}
    for key in sorted(before.keys() | after.keys()):
        # `flatten` keeps an empty mapping as a value; it is equal to a missing mapping
        if before.get(key, {}) != after.get(key, {}):
            changed[key] = after.get(key)
    if not changed or config.name != plain.name:
        return config
    parts = []
    for key, value in changed.items():
        if key == "seeds" and value:
            parts += [key, *map(str, value)]
        elif key not in ALTERNATIVES or value is not None:
            parts += [key, str(value)]
    text = "-".join(parts)
    suffix = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    if suffix != text or len(suffix) > MAX_SUFFIX_CHARACTERS:
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        suffix = f"{suffix[:MAX_SUFFIX_CHARACTERS]}-{digest}"
    named = config.model_copy(update={"name": f"{config.name}-{suffix}"})
    named._base_name = plain.name
    return named


def computed(config: Config) -> dict[str, Any]:
    """Return the settings that determine the results, without names, folders and resources."""
    return {key: value for key, value in dump(config).items() if key not in ELSEWHERE}


def dump(config: Config) -> dict[str, Any]:
    """Return the resolved config as plain values, in the layout of a config file."""
    body = config.model_dump(mode="json", by_alias=True)
    # a default of a method must not become a value of the config when the result is read again
    body["train"] = config.train.model_dump(mode="json", exclude_unset=True)
    if config.seeds:
        del body["seed"]
    for entry in body["methods"].values():
        for part in (entry, *entry.get("tasks", {}).values()):
            part.update(part.pop("settings"))
    return body
