"""Export one task of a bundle as a plain timm model: its weights, and timm's own `config.json`.

timm loads the folder without Accrete: `timm.create_model("local-dir:FOLDER", pretrained=True)`.
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
TOLERANCE = 1e-5  # largest accepted result of `_compute_timm_difference`
CHECKED_IMAGES = 4  # noise images on which the timm model is compared with the bundle


def write_timm_folder(bundle: Bundle, task_name: str, uri: str) -> None:
    """Write one task as a plain timm model into a new folder.

    Args:
        bundle: The bundle.
        task_name: Name of the task.
        uri: Path or URI of the folder.

    Raises:
        UserError: If the folder is not empty, or the task cannot be exported; see
            `export_timm_files`.
    """
    check_new(uri)
    for name, data in export_timm_files(bundle, task_name).items():
        write_bytes(join(uri, name), data)


def export_timm_files(bundle: Bundle, task_name: str) -> dict[str, bytes]:
    """Return the files of one task: `config.json` and `model.safetensors`, name -> bytes.

    Raises:
        UserError: If timm's own model cannot load these weights, or its logits differ by more than
            `TOLERANCE`.
    """
    task = bundle.task(task_name)
    method = bundle.method()
    settings = BackboneSettings.model_validate(bundle.body["backbone"])
    reason = _find_export_obstacle(settings)
    if reason:
        raise _make_timm_error(bundle, task_name, reason)
    arguments = _make_model_arguments(settings)
    classes = list(task.classes)
    try:
        model: Any = timm.create_model(settings.name, num_classes=len(classes), **arguments)
        model.load_state_dict(_collect_state_dict(method, model, task_name))
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        detail = " ".join(str(error).split())
        reason = f"its weights do not fit timm's model ({detail:.200})"
        raise _make_timm_error(bundle, task_name, reason) from None
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
    difference = _compute_timm_difference(files, method, settings.img_size, task_name)
    if not difference <= TOLERANCE:  # `not <=` is also true for NaN
        reason = f"a plain timm model gives logits that differ by {difference:.1e}"
        raise _make_timm_error(bundle, task_name, reason)
    return files


def _make_timm_error(bundle: Bundle, task_name: str, reason: str) -> UserError:
    """Return the error for a task that cannot be exported."""
    return UserError(
        f"{bundle.where}: task {task_name!r} cannot be written for plain timm: {reason}; leave out "
        "--timm and serve the bundle instead"
    )


def _find_export_obstacle(settings: BackboneSettings) -> str:
    """Return the reason why timm's own model cannot represent the backbone, or ""."""
    module = timm.model_entrypoint(settings.name.partition(".")[0]).__module__
    if not module.startswith("timm."):
        return f"{settings.name!r} is not a model of timm"
    if settings.context is not None:
        return "its backbone has Context Broadcasting"
    return ""


def _make_model_arguments(settings: BackboneSettings) -> dict[str, Any]:
    """Return the keyword arguments for `timm.create_model`.

    Training-only arguments such as `drop_path_rate` are omitted.
    """
    arguments = dict(settings.options)
    if "img_size" in signature.list_arguments(settings.name.partition(".")[0]):
        arguments["img_size"] = settings.img_size
    return arguments


def _collect_state_dict(method: Method, model: Any, task_name: str) -> dict[str, Tensor]:
    """Return the state dict of a timm model for one task.

    It has the weights of the backbone, in which the task's masked or copied weights replace the
    original weights, and the task's head with the name of the classifier in `model`.
    """
    method.activate_task(task_name)
    tensors = dict(method.backbone.state_dict())
    for name, tensor in method.weight_overrides.items():
        tensors[name] = tensor.detach()
    classifier = model.get_classifier()
    names = [name for name, module in model.named_modules() if module is classifier]
    if not names:  # for example, a distilled model has two
        raise RuntimeError("the model has several classifiers, or none")
    for name, tensor in method.heads[task_name].state_dict().items():
        tensors[f"{names[0]}.{name}"] = tensor
    return tensors


@torch.no_grad()
def _compute_timm_difference(
    files: dict[str, bytes], method: Method, side: int, task_name: str
) -> float:
    """Return the largest absolute difference between the logits of the two models.

    The difference is divided by the largest absolute logit, or by 1 if all logits are smaller.
    """
    images = torch.randn(
        (CHECKED_IMAGES, 3, side, side), generator=torch.Generator().manual_seed(0)
    )
    with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
        for name, data in files.items():
            with open(os.path.join(folder, name), "wb") as stream:
                stream.write(data)
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    logits = method.logits(images, task_name)
    largest = max(1.0, float(logits.abs().max()))
    return float((model(images) - logits).abs().max()) / largest
