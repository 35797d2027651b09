"""The two kinds of state that training stores, as safetensors.

`TaskState` belongs to one finished task. `Carried` is what a stage hands to later stages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from workers.errors import UserError

# tensors of a `TaskState`: its fields, and the first part of their names in the file (KIND/NAME)
KINDS = ("masks", "tokens", "head", "copies")


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask of n entries into uint8 (ceil(n / 8),), in the order of np.packbits."""
    flat = mask.detach().cpu().numpy().astype(bool).reshape(-1)
    return torch.from_numpy(np.packbits(flat))


def unpack_mask(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the boolean mask of `shape` from packed bits, the inverse of `pack_mask`.

    Raises:
        ValueError: If the number of bytes does not fit the shape. Without this check, a few
            untrusted bytes with a huge shape would allocate gigabytes of memory.
    """
    count = math.prod(shape)
    if min(shape, default=0) < 0 or bits.numel() != (count + 7) // 8:
        raise ValueError(f"{bits.numel()} bytes are not a mask of shape {shape}")
    flat = np.unpackbits(bits.cpu().numpy(), count=count)
    return torch.from_numpy(flat.astype(bool).reshape(shape))


@dataclass
class TaskState:
    """The stored state of a finished task: masks, tokens, a head, and copies of small parts.

    Attributes:
        task: Name of the task.
        classes: Classes of the task, in the order of the head's outputs.
        method: Name of the method.
        backbone_digest: Digest of the backbone.
        masks: Name -> boolean mask, stored as packed bits.
        tokens: Name -> float tensor.
        head: Name -> float tensor.
        copies: Name -> float tensor.
        meta: Plain JSON, for example settings.
    """

    task: str
    classes: tuple[str, ...]
    method: str
    backbone_digest: str
    masks: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Return kind -> stored bytes. Masks count as packed bits, other tensors unchanged."""
        sizes = {"masks": sum((mask.numel() + 7) // 8 for mask in self.masks.values())}
        for kind, tensors in self._float_tensors().items():
            sizes[kind] = sum(t.numel() * t.element_size() for t in tensors.values())
        return sizes

    def float_tensors(self) -> list[Tensor]:
        """Return all tensors of tokens, head and copies."""
        return [t for tensors in self._float_tensors().values() for t in tensors.values()]

    def _float_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"tokens": self.tokens, "head": self.head, "copies": self.copies}

    def to_bytes(self) -> bytes:
        """Return the state as safetensors bytes. The header has all fields that are not tensors."""
        stored = {f"masks/{name}": pack_mask(mask) for name, mask in self.masks.items()}
        for kind, tensors in self._float_tensors().items():
            for name, tensor in tensors.items():
                stored[f"{kind}/{name}"] = tensor.detach().cpu().contiguous()
        header = {
            "task": self.task,
            "classes": list(self.classes),
            "method": self.method,
            "backbone_digest": self.backbone_digest,
            "meta": self.meta,
            "mask_shapes": {name: list(mask.shape) for name, mask in self.masks.items()},
        }
        return safetensors.torch.save(stored, {"accrete": json.dumps(header, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "task state") -> TaskState:
        """Read a state from the bytes of `to_bytes`.

        Args:
            data: The bytes.
            where: Name of the data, for errors.

        Raises:
            UserError: If the bytes are not a valid state.
        """
        tensors, header = load_tensors(data, where)
        try:
            shapes = header["mask_shapes"]
            parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
            for full_name, stored in tensors.items():
                kind, name = full_name.split("/", 1)
                tensor = stored
                if kind == "masks":
                    tensor = unpack_mask(stored, tuple(shapes[name]))
                parts[kind][name] = tensor
            texts = [
                header["task"],
                header["method"],
                header["backbone_digest"],
                *header["classes"],
            ]
            if not all(isinstance(text, str) for text in [*texts, *header["classes"]]):
                raise ValueError("its task, method and classes are not strings")
            return cls(
                header["task"],
                tuple(header["classes"]),
                header["method"],
                header["backbone_digest"],
                meta=dict(header["meta"]),
                **parts,
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where}: not a task state ({error}); give a file that a finished stage wrote"
            ) from None


@dataclass
class Carried:
    """The state that a stage hands to later stages, such as task t to task t+1 in a chain.

    Attributes:
        tensors: Name -> tensor.
        meta: Plain JSON (references to exemplars, counters).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> Carried:
        """Return the same state with its tensors on `device`."""
        return Carried({name: t.to(device) for name, t in self.tensors.items()}, self.meta)

    def without(self, patterns: Sequence[str]) -> Carried:
        """Return the state without the tensors and values of `meta` that match the patterns.

        Args:
            patterns: Patterns of `fnmatch` for names, for example `heads/*/means`.
        """

        def is_kept(name: str) -> bool:
            return not any(fnmatchcase(name, pattern) for pattern in patterns)

        tensors = {name: tensor for name, tensor in self.tensors.items() if is_kept(name)}
        return Carried(tensors, {name: v for name, v in self.meta.items() if is_kept(name)})

    def to_bytes(self) -> bytes:
        """Return the state as safetensors bytes, with `meta` in the header."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        return safetensors.torch.save(tensors, {"accrete": json.dumps(self.meta, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "carried state") -> Carried:
        """Read a state from the bytes of `to_bytes`. Raise `UserError` if they are invalid."""
        tensors, meta = load_tensors(data, where)
        return cls(tensors, meta)


def select_with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, without the prefix in their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def check_values(tensors: Iterable[Tensor], where: str) -> None:
    """Check that tensors have only values that training can produce.

    Args:
        tensors: The tensors.
        where: Name of the tensors, for errors.

    Raises:
        UserError: If a value is NaN or infinite, or if the absolute value of a float64 number is
            not 0 but below the smallest normal float32, because a division by it can overflow.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            continue
        tiny = torch.finfo(torch.float32).tiny
        is_small = tensor.dtype == torch.float64 and ((tensor != 0) & (tensor.abs() < tiny)).any()
        if is_small or not torch.isfinite(tensor).all():
            raise UserError(f"{where} holds numbers that are not finite; use another one")


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of safetensors bytes.

    Raises:
        ValueError: If the header cannot be read.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if not isinstance(metadata, dict):
        raise ValueError("the metadata in its header are not a mapping")
    return metadata


def load_tensors(data: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, sorted by name, and the JSON header of safetensors bytes.

    Args:
        data: The bytes.
        where: Name of the data, for errors.

    Raises:
        UserError: If the bytes cannot be read.
    """
    try:
        metadata = read_metadata(data)
        # sorted, because the order of `safetensors.torch.load` differs between processes
        tensors = safetensors.torch.load(data)
        return dict(sorted(tensors.items())), json.loads(metadata.get("accrete", "{}"))
    except Exception as error:
        raise UserError(
            f"{where}: not readable as safetensors ({error}); give a file that a finished stage "
            "wrote"
        ) from None
