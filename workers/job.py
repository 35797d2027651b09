"""StageJob: the complete input of a worker for one stage, picklable and with absolute URIs.

This module also defines the settings that can change a result, and which ones are part of a key.
The key of a stage is a hash of everything that can change its result. The result is stored under
the key, so settings with the same key share it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

LARGEST = 1e30  # largest absolute value of a float setting
SMALLEST = 1e-30  # smallest absolute value other than 0; a division by it does not overflow


class Frozen(BaseModel):
    """Base of all settings: immutable; unknown keys and extreme numbers are errors.

    Very large numbers, or divisions by very small numbers, could overflow or make a loop run
    forever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    largest_whole: ClassVar[int] = 2**63 - 1  # largest absolute value of an integer setting

    @field_validator("*")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if type(number) in (int, float):
                _check_magnitude(number, cls.largest_whole)
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return pydantic's schema, with the general limits for numbers without their own limit."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        _limit_numbers(schema, {"integer": cls.largest_whole, "number": LARGEST})
        return schema


def _check_magnitude(number: float, largest_whole: int) -> None:
    """Raise `ValueError` if a number is too large, or too close to 0."""
    if type(number) is int:
        if abs(number) > largest_whole:
            raise ValueError(f"a whole number here is at most {largest_whole}")
    elif abs(number) > LARGEST:
        raise ValueError(f"a number here is at most {LARGEST:g}")
    elif 0 < abs(number) < SMALLEST:
        raise ValueError(f"a number here is 0, or at least {SMALLEST:g}")


def _limit_numbers(schema: Any, largest: Mapping[str, float]) -> None:
    """Add missing limits to the numbers in a JSON schema, in place; `> 0` becomes `>= SMALLEST`.

    Args:
        schema: A schema, or a part of a schema. Definitions that it refers to are not changed.
        largest: JSON type -> largest absolute value.
    """
    if isinstance(schema, list):
        for part in schema:
            _limit_numbers(part, largest)
    elif isinstance(schema, dict):
        limit = largest.get(str(schema.get("type")))
        if limit is not None:
            if not {"maximum", "exclusiveMaximum"} & schema.keys():
                schema["maximum"] = limit
            if not {"minimum", "exclusiveMinimum"} & schema.keys():
                schema["minimum"] = -limit
            if schema["type"] == "number" and schema.get("exclusiveMinimum") == 0:
                schema["minimum"] = SMALLEST
                del schema["exclusiveMinimum"]
        for part in schema.values():
            _limit_numbers(part, largest)


Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Neutral:
    """Marks a setting added after the first stored results: `Annotated[int, Neutral(1)]`.

    Attributes:
        value: The value that gives the results of the earlier code. With this value the setting is
            not part of a key, so older results stay valid. The neutral value must never change,
            even if the default of the setting changes. A default that is not neutral is part of
            the keys.
    """

    value: Any


@dataclass(frozen=True)
class ActiveIf:
    """Marks a setting that has an effect only at some values of another setting.

    Example: `crop_scale: Annotated[Range, ActiveIf("crop", ("resized",))]`

    Attributes:
        name: Name of the other setting in a config. `scenario` is the scenario of the stream.
        values: Values of the other setting at which the marked setting has an effect. (): all
            values except those in `but`.
        but: Values of the other setting at which the marked setting has no effect.
    """

    name: str
    values: tuple[Any, ...] = ()
    but: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Return whether the marked setting has an effect if the other setting has this value."""
        return value in self.values if self.values else value not in self.but


def find_idle(settings: BaseModel, **context: Any) -> dict[str, tuple[ActiveIf, Any]]:
    """Find the settings that have no effect.

    Args:
        settings: Settings, some of which are marked with `ActiveIf`.
        context: Values that are not fields of the settings, for example the scenario.

    Returns:
        Name of each such setting in a config -> (mark, value): its first mark that does not hold,
        and the value of the setting that the mark names.
    """
    values = settings.model_dump(by_alias=True) | context
    idle: dict[str, tuple[ActiveIf, Any]] = {}
    for name, info in type(settings).model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, ActiveIf) and not mark.holds(values[mark.name]):
                idle.setdefault(info.alias or name, (mark, values[mark.name]))
    return idle


def key_inputs(settings: BaseModel, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that are part of a key, by name in a config.

    Defaults are included. Settings with their neutral value are omitted, also in nested settings.

    Args:
        settings: The settings.
        exclude: Names, in a config, of settings without an effect on the result.
    """
    inputs = settings.model_dump(by_alias=True)
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        key = info.alias or name
        neutral = next((mark for mark in info.metadata if isinstance(mark, Neutral)), None)
        is_neutral = neutral is not None and _same(value, neutral.value)
        if key in exclude or is_neutral:
            del inputs[key]
        else:
            inputs[key] = _nested_inputs(value, inputs[key])
    return inputs


def add_neutral_values(model: type[BaseModel], written: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored file, with neutral values for missing settings.

    The file was written before these settings existed. Their defaults can differ from the neutral
    values.
    """
    neutral: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, Neutral):
                neutral[info.alias or name] = mark.value
    return {**neutral, **written}


def _nested_inputs(value: Any, dumped: Any) -> Any:
    """Return the part of a field's value that is part of a key.

    Args:
        value: Value of the field.
        dumped: The value as plain data.
    """
    if isinstance(value, BaseModel):
        return key_inputs(value)
    if isinstance(value, dict):
        return {key: _nested_inputs(part, dumped[key]) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(dumped)(map(_nested_inputs, value, dumped))
    return dumped


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and bool(value == neutral)


# ---- options of a backbone --------------------------------------------------------------------
# A config, a model folder or a record can come from an untrusted source. timm's `create_model`
# accepts more than the arguments of a model: URLs and files with weights, folders to write to,
# classes and functions to call. A file must not set those. This part of the check does not need
# timm; `workers/model/signature.py` compares names and types with the model's signature.
MAX_BLOCKS = 200  # maximum number of blocks of a backbone; the deepest timm models have about 60
MAX_OPTION = 65_536  # maximum of every other option, such as widths, heads and sides of patches
MAX_OPTION_VALUES = 16  # maximum number of values of a list option
BLOCK_COUNTS = frozenset({"depth", "depths", "layers"})  # options that are numbers of blocks
OPTION_NAME = re.compile(r"[a-z][A-Za-z0-9_]{0,39}")
OPTION_WORD = re.compile(r"[A-Za-z0-9_]{0,40}")
MODEL_NAME = re.compile(r"[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100})?")
HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
HUB_MODEL = re.compile(rf"hf-hub:({HUB_NAME}/{HUB_NAME})(?:@([A-Za-z0-9][A-Za-z0-9_./-]{{0,99}}))?")
# options with which timm loads weights or code, or builds a model in another way: not allowed
LOADER_OPTION = re.compile(
    r"pretrained.*|checkpoint_path|cache_dir|features_only|feature_.*|out_indices|pruned|"
    r"model_cfg|model_cls|kwargs_filter|variant|scriptable|exportable|no_jit|device|dtype|block|"
    r"block_args|.*_fn|embed_layer|mlp_layer|aa_layer"
)
OPTION_OF_ANOTHER_SETTING = {
    "img_size": "backbone.img_size",
    "drop_path_rate": "backbone.drop_path",
    "num_classes": "the classes of a task",
}


def check_option(name: str, value: Any) -> None:
    """Check an option of a backbone.

    Raises:
        ValueError: If `name` is not allowed, or `value` is not plain (null, true, false, a number,
            a word, or a short list of these).
    """
    if not OPTION_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.60} is not a name of an option")
    if LOADER_OPTION.fullmatch(name):
        raise ValueError(
            f"{name!r} says how timm loads or makes a model, and not what it is; no settings "
            "file may do that"
        )
    if name in OPTION_OF_ANOTHER_SETTING:
        raise ValueError(f"{name!r} is given by {OPTION_OF_ANOTHER_SETTING[name]}")
    items = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > MAX_OPTION_VALUES:
        raise ValueError(
            f"{name!r} has {len(items)} values, and a list has at most {MAX_OPTION_VALUES}"
        )
    largest = MAX_BLOCKS if name in BLOCK_COUNTS else MAX_OPTION
    for item in items:
        _check_plain(name, item, largest)
    num_blocks = sum(item for item in items if isinstance(item, (int, float)))
    if name in BLOCK_COUNTS and num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"{name!r} is {value!r:.60}, and a backbone has at most {MAX_BLOCKS} blocks"
        )


def _check_plain(name: str, value: Any, largest: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if not OPTION_WORD.fullmatch(value):
            raise ValueError(
                f"{name!r} is {value!r:.60}, and a word has letters, digits and '_', at most 40"
            )
    elif not isinstance(value, (int, float)):
        raise ValueError(
            f"{name!r} holds a {type(value).__name__}; it must be a number, a word, true, "
            "false, null, or a list of those"
        )
    elif not (abs(value) <= largest):  # also true for NaN
        raise ValueError(f"{name!r} is {value!r:.60}, and it must be a number of at most {largest}")


class ContextSettings(Frozen):
    """Uniform attention in the blocks of a ViT (workers/model/context.py).

    This changes the outputs of a pretrained backbone, except for kind `cbs` with default settings.
    """

    kind: Literal["cb", "cbs", "se", "replace", "parallel", "compensate"] = Field(
        "cb",
        description="how uniform attention is added, for tokens x with the context c: `cb`: "
        "(x + c) / 2; `cbs`: own x + Lambda c, Lambda learnt; `se`: squeeze and excitation, "
        "x sigmoid(W2 relu(W1 c)), for comparison; in attention `replace`: the "
        "first head becomes uniform, `parallel`: a uniform head is added, `compensate`: both",
    )
    place: Annotated[Literal["end", "front", "attention", "both"], Neutral("end")] = Field(
        "end",
        description="for `cb`, `cbs` and `se`, what is changed: `end`: the output of the MLP; "
        "`front`: its input; `attention`: the output of attention; `both`: the outputs of both",
    )
    blocks: Literal["all"] | tuple[NonNegativeInt, ...] = Field(
        "all", description="indices, from 0, of the blocks with uniform attention; `[]`: none"
    )
    pool: Literal["mean", "max", "class"] = Field(
        "mean",
        description="for `cb`, `cbs` and `se`, what c is: mean or maximum over tokens, or the "
        "class token",
    )
    own: PositiveFloat = Field(
        1.0,
        description="for `cbs`: factor of the token x; own 0.5 and start 0.5 give `cb` initially",
    )
    start: float = Field(
        0.0,
        description="for `cbs`: initial value of Lambda; methods that freeze the backbone "
        "keep it there",
    )
    reduction: Annotated[PositiveInt, Neutral(16)] = Field(
        16, description="for `se`: W1 maps the width D to D / reduction channels"
    )

    @field_validator("blocks", mode="before")
    @classmethod
    def _check_blocks(cls, value: Any) -> Any:
        if value == "all":
            return value
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(type(index) is int and index >= 0 for index in value):
            raise ValueError("it must be `all`, or a list of blocks, which count from 0")
        return value

    @model_validator(mode="after")
    def _check_kind_reads_settings(self) -> ContextSettings:
        in_branch = ("cb", "cbs", "se")
        readers = {
            "place": in_branch,
            "pool": in_branch,
            "own": ("cbs",),
            "start": ("cbs",),
            "reduction": ("se",),
        }
        for name, kinds in readers.items():
            value = getattr(self, name)
            default = type(self).model_fields[name].default
            if value != default and self.kind not in kinds:
                raise ValueError(
                    f"{name} is {value!r}, which kind {self.kind!r} does not read; leave it out, "
                    f"or use kind {kinds[-1]!r}"
                )
        return self


class BackboneModel(Frozen):
    """The part of a backbone's settings that identifies the timm model and its weights."""

    name: str = Field(
        "vit_tiny_patch16_224",
        description="name of a timm model, such as `convnext_atto` or, with the tag of its "
        "weights, `resnet18.a1_in1k`; or `t2t_vit_12`, `convit_local`",
    )
    weights: str = Field(
        "none",
        description="initial weights: `none`: random; `hub`: timm's pretrained ones; "
        "`hf-hub:OWNER/NAME` or `hf-hub:OWNER/NAME@REVISION`: a timm model on the Hugging Face "
        "hub; or the path of a local .safetensors file. A classifier in them is left out",
    )
    drop_path: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="stochastic depth: drop rate of the last block; earlier rates rise "
        "linearly from 0",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of the timm model (patch_size, depth, embed_dim, ...)",
    )
    context: Annotated[ContextSettings | None, Neutral(None)] = Field(
        None, description="Context Broadcasting (uniform attention); null: none"
    )

    @field_validator("name")
    @classmethod
    def _registered_name(cls, name: str) -> str:
        # timm would download a name `hf-hub:...`, and read the folder of `local-dir:...`
        if name and not MODEL_NAME.fullmatch(name):
            raise ValueError(
                "it must be a model's name alone, such as vit_tiny_patch16_224, or NAME.TAG, "
                "without a path or an address; a model on the hub is named by "
                "`weights: hf-hub:OWNER/NAME`"
            )
        return name

    @field_validator("weights")
    @classmethod
    def _known_source(cls, weights: str) -> str:
        source = weights.partition(":")[0]
        if source in ("local-dir", "hf_hub") or "://" in weights:
            raise ValueError(
                "it must be `none`, `hub`, `hf-hub:OWNER/NAME`, or the path of a .safetensors file"
            )
        if source == "hf-hub" and not HUB_MODEL.fullmatch(weights):
            raise ValueError("a model on the hub is hf-hub:OWNER/NAME, or hf-hub:OWNER/NAME@REV")
        return weights

    @field_validator("options")
    @classmethod
    def _plain_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            check_option(name, value)
        return options


class BackboneSettings(BackboneModel):
    """The backbone that all tasks share, as workers get it and as keys contain it.

    Values that a config leaves to the timm model are filled in.
    """

    img_size: int = Field(
        224,
        gt=0,
        le=4096,
        description="height and width of input images in pixels; position embeddings are "
        "resampled to it",
    )
    mean: tuple[float, float, float] = Field(
        (0.5, 0.5, 0.5),
        description="mean of each colour channel (R, G, B) of pixels in [0, 1], which inputs "
        "are normalised by",
    )
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.5, 0.5, 0.5),
        description="standard deviation of each colour channel (R, G, B) of pixels in [0, 1], "
        "which inputs are normalised by",
    )
    crop_pct: float = Field(
        0.9,
        ge=0.1,
        le=1,
        description="side of the centre crop in evaluation, as a share of the resized image's side",
    )
    interpolation: Annotated[Interpolation, Neutral("bicubic")] = Field(
        "bicubic",
        description="how images are resized, antialiased, for evaluation and for training without "
        "`crop: resized`, whose crops are bilinear",
    )


AreaShare = Annotated[float, Field(gt=0, le=1)]


class DataSettings(Frozen):
    """How samples are selected, augmented and cached."""

    val_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the training samples of each class that are held out for "
        "validation, chosen by hash (see `hold_out` of the card)",
    )
    crop: Literal["none", "pad", "resized"] = Field(
        "none",
        description="random crop in training; `pad`: shift by up to 1/8 of the side; "
        "`resized`: random resized crop",
    )
    crop_scale: Annotated[tuple[AreaShare, AreaShare], ActiveIf("crop", ("resized",))] = Field(
        (0.5, 1.0),
        description="for `crop: resized`: smallest and largest area of a crop, as shares of "
        "the image's area",
    )
    longest_side: Annotated[int | None, Neutral(None), ActiveIf("crop", ("resized",))] = Field(
        None,
        gt=0,
        le=65_500,
        description="for `crop: resized`: pixels of the longest side of an image that crops are "
        "cut from; longer ones are reduced to it when they are decoded; null: 3 x img_size",
    )
    flip: float = Field(0.0, ge=0, le=1, description="probability of a horizontal flip")
    randaugment: int = Field(
        0, ge=0, le=100, description="RandAugment: number of operations per image; 0: off"
    )
    magnitude: Annotated[float, ActiveIf("randaugment", but=(0,))] = Field(
        9.0, ge=0, le=10, description="RandAugment: magnitude of operations, 0 to 10"
    )
    mixup: NonNegativeFloat = Field(
        0.0, description="mixup: alpha of the Beta distribution; 0: off"
    )
    cutmix: NonNegativeFloat = Field(
        0.0, description="CutMix: alpha of the Beta distribution; 0: off"
    )
    erase: float = Field(0.0, ge=0, le=1, description="probability of random erasing")
    smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing, in [0, 1)")
    resident_mb: NonNegativeInt = Field(
        2048,
        description="largest size in MiB of a task's decoded images that are cached (told from "
        "some of them under `crop: resized`); those of a larger task are decoded in each epoch",
    )
    repeats: Annotated[int, Neutral(1)] = Field(
        1,
        gt=0,
        le=1000,
        description="repeated augmentation: number of consecutive copies of an image in an "
        "epoch of unchanged length; 1: off",
    )

    @field_validator("crop_scale")
    @classmethod
    def _check_crop_scale(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("give [low, high] with 0 < low <= high <= 1")
        return value


class TrainSettings(Frozen):
    """How a step is trained: length, batches, optimizer, learning rate, precision."""

    largest_whole: ClassVar[int] = 1_000_000

    epochs: int = Field(
        10, ge=0, le=100_000, description="number of passes over the training data of a task"
    )
    batch_size: PositiveInt = Field(
        64, description="GLOBAL batch size, over all ranks and accumulation steps"
    )
    accumulate: PositiveInt = Field(1, description="number of micro-batches per optimizer step")
    min_steps: Annotated[NonNegativeInt, Neutral(0)] = Field(
        0,
        description="smallest number of optimizer steps of a task: with few images its batches "
        "become smaller, then its epochs more; 0: `epochs` and `batch_size` as they are",
    )
    min_batch_size: Annotated[
        PositiveInt | None, Neutral(None), ActiveIf("min_steps", but=(0,))
    ] = Field(None, description="for `min_steps`: smallest global batch size; null: `batch_size`")
    max_epochs: Annotated[NonNegativeInt | None, Neutral(None), ActiveIf("min_steps", but=(0,))] = (
        Field(None, description="for `min_steps`: largest number of epochs; null: no limit")
    )
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="`adamw` (PyTorch's, fused), or `sgd` with momentum"
    )
    lr: PositiveFloat = Field(1e-3, description="peak learning rate of weights and heads")
    weight_decay: NonNegativeFloat = Field(
        0.05,
        description="weight decay of parameter groups that set none of their own, as "
        "PyTorch's optimizer applies it",
    )
    momentum: Annotated[float, ActiveIf("optimizer", ("sgd",))] = Field(
        0.9, ge=0, lt=1, description="momentum of sgd; adamw does not use it"
    )
    schedule: Annotated[Literal["step", "epoch"], Neutral("step")] = Field(
        "step",
        description="when the learning rate changes: `step`: at every step; `epoch`: at every "
        "epoch, as timm's cosine schedule",
    )
    warmup: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of all steps in which the learning rate rises linearly to its peak",
    )
    warmup_start: Annotated[float | None, Neutral(None), ActiveIf("warmup", but=(0,))] = Field(
        None,
        ge=0,
        lt=1,
        description="learning rate at the start of the warm-up, relative to the peak; null: 0 "
        "under `schedule: step`, 0.01 under `schedule: epoch`",
    )
    floor: float = Field(
        0.01,
        ge=0,
        le=1,
        description="final learning rate of the cosine schedule, relative to the peak",
    )
    clip: NonNegativeFloat = Field(
        0.0,
        description="largest global gradient norm; larger gradients are scaled down to it; 0: off",
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="`fp32`; `tf32`: products and convolutions of a GPU with 10 bits of mantissa; "
        "`bf16`: autocast of forward passes to bfloat16",
    )
    compile: bool | Literal["step"] = Field(
        False,
        description="`true`: torch.compile compiles the blocks of the backbone; `step`: on a GPU, "
        "each optimizer step is captured as a CUDA graph; false: neither",
    )
    recompute: Annotated[bool, ActiveIf("compile", (False,))] = Field(
        False,
        description="whether the backward pass computes the activations within each block again, "
        "which takes less memory and more time; the results are the same",
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="epoch whose weights are the result: `last`, or `best`: the one with the "
        "highest validation accuracy",
    )


@dataclass(frozen=True)
class ShardUrls:
    """Locations of the shards of a card that are used in place, from the user's own card.

    Attributes:
        train: Absolute paths and URLs of the train split, which can have braces, for example
            `s3://bucket/train-{0000..1023}.tar`.
        test: The same for the test split.
        val: The same for the validation split.
    """

    train: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    val: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task in the form that workers use. Labels are positions in `classes`."""

    name: str
    card: str
    data: str  # key of the data set's ingest stage
    classes: tuple[str, ...]
    # "task"; "base": the backbone was trained on this task; "unlabelled": labels have no meaning
    role: str = "task"
    shard_urls: ShardUrls | None = None  # None: the shards are in the ingest stage
    # Whether the data set has validation images. Otherwise they are held out of train.
    has_val: bool = False
    # For a slice of a stream: (class, start, stop), the share [start, stop) of the class's images
    # in the order of their sha256. The task has no images of other classes. None: all images.
    parts: tuple[tuple[str, float, float], ...] | None = None
    # For role `base`: the head is the classifier in the backbone's weights. False: it is trained.
    has_own_head: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """Share of the images of each class that belongs to the task."""
        if self.parts is None:
            return dict.fromkeys(self.classes, 1.0)
        return {name: stop - start for name, start, stop in self.parts}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


def count_classes(tasks: Iterable[Task]) -> int:
    """Count the classes that share a memory.

    The same class counts once per task, but only once for all slices of a stream (`Task.parts`).
    """
    classes: set[tuple[str, str]] = set()
    for task in tasks:
        owner = task.name if task.parts is None else ""
        classes.update((owner, name) for name in task.classes)
    return len(classes)


@dataclass(frozen=True)
class StageJob:
    """One stage, ready to run anywhere.

    Attributes:
        id: Name of the stage for messages, for example `METHOD/TASK/train`.
        key: Key of the stage (see the module docstring).
        step: Kind of the stage: `backbone`, `features`, `evaluate`, or a step of the method.
        method: Registered name of the method. "" for the stage `features`.
        settings: The method's settings that this stage reads; all of them for `evaluate`.
        task: Task of the stage. None for a backbone that is not trained.
        tasks: Every task of the stream up to and including this stage's task, in order (the base
            task first, if any). For `evaluate`, the tasks that the model serves: only the last two
            if the predictions on earlier tasks cannot change. For `features`, only `task`.
        backbone: Key of the backbone stage. None for the backbone stage itself.
        previous: Keys of the stages whose carried state this stage starts from, by step name.
        states: Keys of the stages with the states of tasks, by task name in stream order. For
            `evaluate` these are all `tasks`. For training they are the earlier tasks if the method
            carries state from task to task (a chain), else none.
        measured: Names of the tasks that `evaluate` measures, on images of `split`. A search
            measures only validation images.
        following: The next task, which `evaluate` measures before it is learned, or None.
        provenance: Git commit and versions of packages, for the manifest.
        parents: Keys of all stages with results that this stage can read.
        features: Key of the stage with the features of the task's images. None if the step does not
            read them.
    """

    id: str
    key: str
    step: str
    root: str  # URI of the folder of stage results
    method: str
    settings: dict[str, Any]
    backbone_settings: BackboneSettings
    data: DataSettings
    train: TrainSettings
    scenario: str
    seed: int
    task: Task | None
    tasks: tuple[Task, ...]
    backbone: str | None = None
    previous: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    split: Literal["test", "val"] = "test"
    following: Task | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    features: str | None = None
    # For a method from outside of this project: the module that registers it, and its code digest.
    method_module: str = ""
    method_code: str = ""
    # The result does not depend on the following fields.
    checkpoint_s: float = 60.0  # seconds between two checkpoints; 0: only before a preemption
    loader_workers: int | Literal["auto"] = "auto"
    cache: str = ""  # node-local folder for shards and decoded images; "": no cache
    cache_gb: float = 50.0  # limit of the cache in GiB
