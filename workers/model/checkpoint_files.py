"""Convert pickled checkpoints of PyTorch (`.pt`, `.pth`, `.bin`) to safetensors.

Only tensors and plain values are unpickled (`torch.load` with `weights_only`), so a checkpoint
cannot run code.
"""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from workers.errors import UserError, describe_error

SUFFIXES = (".pth.tar", ".pth", ".pt", ".bin", ".ckpt")
# Prefixes that wrappers (DistributedDataParallel, torch.compile) add to the names of all tensors.
WRAPPERS = ("module.", "_orig_mod.")
# Tied weights share their bytes in a checkpoint, so all tensors can have more bytes than the file.
MAX_SHARING = 4


class Conversion(NamedTuple):
    """The result of `convert_checkpoint`.

    Attributes:
        target: Path of the written file.
        key: Entry of the checkpoint whose tensors were taken, or "" for the checkpoint itself.
        tensors: Number of tensors.
        values: Number of values of all tensors.
    """

    target: str
    key: str
    tensors: int
    values: int


def convert_checkpoint(source: str, target: str = "", key: str = "") -> Conversion:
    """Write the tensors of a pickled checkpoint to a safetensors file.

    Prefixes of wrappers (`WRAPPERS`) that all names have are removed.

    Args:
        source: Path of the checkpoint.
        target: Path of the new file. Default: the source with the suffix `.safetensors`.
        key: Entry with the tensors, for example `state_dict_ema`. Default: the only one.

    Raises:
        UserError: If the checkpoint cannot be read, `key` does not select one set of tensors, a
            tensor cannot be stored, or the target exists or cannot be written.
    """
    target = target or _replace_suffix(source)
    if os.path.exists(target):
        raise UserError(f"{target} exists already; remove it, or name another file to write")
    content = _load(source)
    key, tensors = _choose_tensors(content, source, key)
    tensors = _remove_wrappers(tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if num_bytes > MAX_SHARING * os.path.getsize(source):
        raise UserError(
            f"{source} has tensors of {num_bytes} bytes, more than {MAX_SHARING} times the file: "
            "views that repeat values; give a file with whole tensors"
        )
    try:
        # clones, because safetensors refuses tensors that share memory
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        data = safetensors.torch.save(copies)
    except (KeyError, ValueError, RuntimeError, NotImplementedError) as error:
        reason = describe_error(error, only_first_line=True)
        raise UserError(
            f"{source} has a tensor that safetensors cannot store ({reason}); save dense tensors "
            "of real numbers"
        ) from None
    _write(data, target)
    values = sum(tensor.numel() for tensor in copies.values())
    return Conversion(target, key, len(copies), values)


def _remove_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of WRAPPERS that all names have, in any order."""
    while True:
        prefix = next((w for w in WRAPPERS if all(name.startswith(w) for name in tensors)), None)
        if prefix is None:
            return tensors
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _replace_suffix(source: str) -> str:
    for suffix in SUFFIXES:
        if source.endswith(suffix):
            return source.removesuffix(suffix) + ".safetensors"
    return source + ".safetensors"


def _load(source: str) -> Any:
    """Unpickle tensors and plain values.

    Raises:
        UserError: If this is not possible.
    """
    remedy = "give a file that `torch.save` wrote from a `state_dict`"
    try:
        _refuse_compressed(source, remedy)
        # argparse's namespace of settings is common in checkpoints, and harmless
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}); {remedy}") from None
    except UserError:
        raise
    except Exception as error:  # damaged files raise exceptions of many classes
        if "unsupported global" in str(error).lower():
            raise UserError(
                f"{source} contains more than tensors and plain values, and loading it could run "
                f"code; {remedy}"
            ) from None
        raise UserError(f"{source} is not a checkpoint of PyTorch; {remedy}") from None


def _refuse_compressed(source: str, remedy: str) -> None:
    """Raise `UserError` for compressed entries. PyTorch writes none, and they can be huge."""
    if not zipfile.is_zipfile(source):
        return
    try:
        with zipfile.ZipFile(source) as archive:
            is_stored = all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())
    except zipfile.BadZipFile as error:
        raise UserError(f"{source} is not a checkpoint of PyTorch ({error}); {remedy}") from None
    if not is_stored:
        raise UserError(f"{source} has compressed entries, which PyTorch does not write; {remedy}")


def _choose_tensors(content: Any, source: str, key: str) -> tuple[str, dict[str, Tensor]]:
    """Return the chosen entry of a checkpoint and its tensors by name.

    Raises:
        UserError: If there is no such entry, several and `key` names none, or the entry has values
            that are not tensors.
    """
    entries: dict[str, Any] = {}
    if isinstance(content, Mapping):
        entries = {str(name): value for name, value in content.items()}
    if not key and any(isinstance(value, Tensor) for value in entries.values()):
        return "", _as_state(content, source)
    found = [
        name
        for name, value in entries.items()
        if isinstance(value, Mapping) and any(isinstance(t, Tensor) for t in value.values())
    ]
    if key and key not in found:
        among = ", ".join(found) or "none"
        raise UserError(f"{source} has no entry {key!r} of tensors by name; those are: {among}")
    if not found:
        raise UserError(f"{source} has no entry of tensors by name; save a `state_dict`")
    if not key and len(found) > 1:
        raise UserError(
            f"{source} has several entries of tensors by name ({', '.join(found)}); choose one "
            f"with --key, as in --key {found[0]}"
        )
    key = key or found[0]
    return key, _as_state(entries[key], source)


def _as_state(mapping: Mapping[Any, Any], source: str) -> dict[str, Tensor]:
    """Return names and tensors.

    Raises:
        UserError: If a name is not a string, or a value not a tensor.
    """
    for name, value in mapping.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f"{source} has a value {name!r} among its tensors that is not a tensor with a "
                "name; save a `state_dict` of tensors"
            )
    return dict(mapping)


def _write(data: bytes, target: str) -> None:
    """Write a new file, whole or not at all.

    Raises:
        UserError: If it cannot be written.
    """
    part = f"{target}.part"
    try:
        with open(part, "xb") as stream:
            stream.write(data)
        os.replace(part, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); name a file in a folder that exists, "
            f"and remove {part} if it is there"
        ) from None
