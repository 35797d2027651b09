"""One task of a bundle as a plain timm model: weights that serve it, and timm's own `config.json`.

timm reads the folder by itself: `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import timm
import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods.base import Method
from workers.model import signature, vit
from workers.serving.bundle import Bundle, check_new
from workers.storage.artifact import join, write_bytes

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOLERANCE = 1e-5  # of the largest logit, or of 1
IMAGES = 4  # of noise, on which both models are compared


def write(bundle: Bundle, task_name: str, uri: str) -> None:
    """Write the files of `timm_files` into a new folder. Raise `UserError` as it does."""
    check_new(uri)
    for name, data in timm_files(bundle, task_name).items():
        write_bytes(join(uri, name), data)


def timm_files(bundle: Bundle, task_name: str) -> dict[str, bytes]:
    """Return `config.json` and `model.safetensors` of one task, by name.

    Raise `UserError` where timm's own model with these weights does not give the task's logits.
    """
    task = bundle.task(task_name)
    method = bundle.method()
    settings = BackboneSettings.model_validate(bundle.body["backbone"])
    reason = _obstacle(settings)
    if reason:
        raise _cannot(bundle, task_name, reason)
    arguments = _model_arguments(settings)
    classes = list(task.classes)
    try:
        model: Any = timm.create_model(settings.name, num_classes=len(classes), **arguments)
        model.load_state_dict(_folded(method, model, task_name))
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        detail = " ".join(str(error).split())
        raise _cannot(
            bundle, task_name, f"its weights are of another form ({detail:.200})"
        ) from None
    config = {
        "architecture": settings.name.partition(".")[0],
        "num_classes": len(classes),
        "num_features": int(model.num_features),
        "model_args": arguments,
        "label_names": classes,
        "pretrained_cfg": {
            "input_size": [3, settings.img_size, settings.img_size],
            "interpolation": settings.interpolation,
            "crop_pct": settings.crop_pct,
            "crop_mode": "center",
            "mean": list(settings.mean),
            "std": list(settings.std),
            "num_classes": len(classes),
        },
        "accrete": {"method": method.name, "task": task_name},
    }
    files = {CONFIG: json.dumps(config, indent=1).encode(), WEIGHTS: vit.to_bytes(model)}
    difference = _difference(files, method, settings.img_size, task_name)
    if not difference <= TOLERANCE:
        raise _cannot(
            bundle, task_name, f"a plain timm model gives logits that differ by {difference:.1e}"
        )
    return files


def _cannot(bundle: Bundle, task_name: str, reason: str) -> UserError:
    return UserError(
        f"{bundle.where}: task {task_name!r} cannot be written for plain timm: {reason}; leave out "
        "--timm, and a bundle serves it"
    )


def _obstacle(settings: BackboneSettings) -> str:
    """Return why no model of timm alone computes what the backbone does; empty where one may."""
    module = timm.model_entrypoint(settings.name.partition(".")[0]).__module__
    if not module.startswith("timm."):
        return f"{settings.name!r} is no model of timm"
    if settings.context is not None:
        return "its backbone has Context Broadcasting"
    return ""


def _model_arguments(settings: BackboneSettings) -> dict[str, Any]:
    """Return the arguments of timm's model, without those of training."""
    arguments = dict(settings.options)
    if "img_size" in signature.arguments_of(settings.name.partition(".")[0]):
        arguments["img_size"] = settings.img_size
    return arguments


def _folded(method: Method, model: Any, task_name: str) -> dict[str, Tensor]:
    """Return the weights of the model that serves a task: masked or copied ones, and its head."""
    method.activate_task(task_name)
    tensors = dict(method.backbone.state_dict())
    for name, tensor in method.weight_overrides.items():
        tensors[name] = tensor.detach()
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    for name, tensor in method.heads[task_name].state_dict().items():
        tensors[f"{names[0]}.{name}"] = tensor
    return tensors


@torch.no_grad()
def _difference(files: dict[str, bytes], method: Method, side: int, task_name: str) -> float:
    """Return how far the logits of timm's model are from the task's, relative to the largest."""
    images = torch.randn((IMAGES, 3, side, side), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
        for name, data in files.items():
            with open(os.path.join(folder, name), "wb") as stream:
                stream.write(data)
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    logits = method.logits(images, task_name)
    largest = max(1.0, float(logits.abs().max()))
    return float((model(images) - logits).abs().max()) / largest
