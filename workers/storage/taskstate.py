"""What a task leaves behind: masks as packed bits, tokens, a head, small copies; and what it hands
on to the next task."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from workers.errors import UserError

KINDS = ("masks", "tokens", "head", "copies")


def pack(mask: Tensor) -> Tensor:
    """Boolean mask of any shape -> uint8 tensor of ceil(n / 8) bytes (numpy's packbits order)."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().astype(bool).reshape(-1)))


def unpack(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack`: uint8 tensor -> boolean mask of `shape`. Raises ValueError where
    there are more or fewer bits: a few bytes that say they are a mask of billions would else
    become one."""
    count = math.prod(shape)
    if min(shape, default=0) < 0 or bits.numel() != (count + 7) // 8:
        raise ValueError(f"{bits.numel()} bytes are no mask of shape {shape}")
    return torch.from_numpy(
        np.unpackbits(bits.cpu().numpy(), count=count).astype(bool).reshape(shape)
    )


@dataclass
class TaskState:
    """masks are boolean; tokens, head and copies are float tensors. `meta` is plain JSON (settings,
    digests, steps)."""

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
        """Bytes by kind as stored: masks as packed bits, everything else as it is."""
        sizes = {
            kind: sum(t.numel() * t.element_size() for t in getattr(self, kind).values())
            for kind in KINDS[1:]
        }
        return {"masks": sum((m.numel() + 7) // 8 for m in self.masks.values()), **sizes}

    def to_bytes(self) -> bytes:
        tensors = {f"masks/{name}": pack(mask) for name, mask in self.masks.items()}
        for kind in KINDS[1:]:
            tensors |= {
                f"{kind}/{name}": t.detach().cpu().contiguous()
                for name, t in getattr(self, kind).items()
            }
        header = {
            "task": self.task,
            "classes": list(self.classes),
            "method": self.method,
            "backbone_digest": self.backbone_digest,
            "meta": self.meta,
            "mask_shapes": {name: list(mask.shape) for name, mask in self.masks.items()},
        }
        return safetensors.torch.save(tensors, {"accrete": json.dumps(header, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "task state") -> TaskState:
        """Raises UserError where the bytes are not a task state."""
        tensors, header = load_tensors(data, where)
        try:
            shapes = header["mask_shapes"]
            parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
            for full, tensor in tensors.items():
                kind, name = full.split("/", 1)
                parts[kind][name] = (
                    unpack(tensor, tuple(shapes[name])) if kind == "masks" else tensor
                )
            return cls(
                header["task"],
                tuple(header["classes"]),
                header["method"],
                header["backbone_digest"],
                meta=header["meta"],
                **parts,
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where}: not a task state ({error}); give a file that a finished stage wrote"
            ) from None


@dataclass
class Carried:
    """What task t hands to t+1 in a chain: tensors by name, and plain JSON beside them (exemplar
    references, counters)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> Carried:
        """The same with its tensors on `device`. What a method is given lies where its backbone
        does."""
        return Carried({name: t.to(device) for name, t in self.tensors.items()}, self.meta)

    def to_bytes(self) -> bytes:
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        return safetensors.torch.save(tensors, {"accrete": json.dumps(self.meta, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "carried state") -> Carried:
        return cls(*load_tensors(data, where))


def load_tensors(data: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, sorted by name, and JSON header of safetensors bytes. Raises UserError where they
    are not."""
    try:
        length = struct.unpack("<Q", data[:8])[0]
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        tensors = safetensors.torch.load(data)  # in another order in every process
        return dict(sorted(tensors.items())), json.loads(metadata.get("accrete", "{}"))
    except Exception as error:
        raise UserError(
            f"{where}: not readable as safetensors ({error}); give a file that a finished stage "
            "wrote"
        ) from None
