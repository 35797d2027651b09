"""One small model of each module of timm, with the smallest image size that it accepts.

.venv/bin/python -m tests.timm_models      # writes golden/timm_models.json, in minutes
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import timm
import torch

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model import vit

FILE = Path(__file__).parent / "golden" / "timm_models.json"
COMMAND = ".venv/bin/python -m tests.timm_models"
# Image sizes in pixels, tried in this order before the default size of a model.
SIDES = (64, 96, 128, 160, 224)
LARGE = 60_000_000  # above this number of parameters, the depth is set to 2 if the model has one
# Module -> replacement for a smallest model that takes minutes to run.
INSTEAD = {"byoanet": "botnet26t_256"}
# Module -> part of the error for its model. Currently, no model is refused.
REFUSED: dict[str, str] = {}


def modules() -> list[str]:
    """Return the modules of timm with models, without the modules that this project registers."""
    names: list[str] = []
    for module in timm.list_modules():
        functions = [timm.model_entrypoint(name) for name in timm.list_models(module=module)]
        if any(function.__module__.startswith("timm.") for function in functions):
            names.append(module)
    return names


def smallest(module: str) -> str:
    """Return the model of a module with the fewest parameters; the first by name if equal."""
    if module in INSTEAD:
        return INSTEAD[module]
    sizes: dict[str, int] = {}
    for name in timm.list_models(module=module):
        with torch.device("meta"):
            model: Any = timm.create_model(name, num_classes=0)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    return min(sizes, key=lambda name: (sizes[name], name))


def settings_of(name: str) -> dict[str, Any]:
    """Return the backbone section of a model: the smallest image size, and depth 2 if it is large.

    A model refused at every size gets its default size.
    """
    with torch.device("meta"):
        model: Any = timm.create_model(name, num_classes=0)
    config = model.default_cfg if isinstance(model.default_cfg, dict) else vars(model.default_cfg)
    made_for = config["input_size"][-1]
    choices: list[dict[str, Any]] = [{}]
    if vit.count_elements(model) > LARGE:
        choices.insert(0, {"depth": 2})
    for options in choices:
        for side in (*(side for side in SIDES if side < made_for), made_for):
            section = {"name": name, "img_size": side, "options": options}
            try:
                vit.outline(BackboneSettings(**section))
            except UserError:
                continue
            return section
    return {"name": name, "img_size": made_for, "options": {}}


def pinned() -> dict[str, dict[str, Any]]:
    """Return module -> its model's backbone section, from the file."""
    sections: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return sections


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    derived = {module: settings_of(smallest(module)) for module in modules()}
    FILE.write_text(json.dumps(derived, indent=1) + "\n")
