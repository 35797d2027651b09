"""Small backbones of timm's families, and the table of methods and families in docs/backbones.md.

.venv/bin/python -m tests.families      # writes docs/backbones.md
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.methods import METHODS
from workers.model import vit

PAGE = Path(__file__).parents[1] / "docs" / "backbones.md"
COMMAND = ".venv/bin/python -m tests.families"

# Family -> settings of a small backbone: 32 pixels, a few blocks.
SMALL: dict[str, dict[str, Any]] = {
    "ConvNeXt": {
        "name": "convnext_atto",
        "img_size": 32,
        "options": {"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 32], "patch_size": 4},
    },
    "ResNet": {
        "name": "test_resnet",
        "img_size": 32,
        "options": {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]},
    },
    "MobileNetV3": {"name": "lcnet_035", "img_size": 32},
    "EVA-02": {
        "name": "eva02_tiny_patch14_224",
        "img_size": 32,
        "options": {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
    },
    "Swin": {
        "name": "swin_tiny_patch4_window7_224",
        "img_size": 32,
        "options": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    },
    "BEiT": {
        "name": "beit_base_patch16_224",
        "img_size": 32,
        "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "DINOv3": {
        "name": "vit_tiny_patch16_dinov3_qkvb",
        "img_size": 32,
        "options": {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
    },
    "EfficientNet": {"name": "test_efficientnet", "img_size": 32},
}


def settings_of(family: str) -> BackboneSettings:
    """Return the settings of a family's small backbone; `ViT` is timm's VisionTransformer."""
    if family == "ViT":
        options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        return BackboneSettings(name="vit_tiny_patch16_224", img_size=32, options=options)
    return BackboneSettings(**SMALL[family])


def taken() -> dict[str, dict[str, bool]]:
    """Return method -> family -> whether the method supports it with default settings."""
    table: dict[str, dict[str, bool]] = {name: {} for name in METHODS}
    for family in ("ViT", *SMALL):
        outline = vit.outline(settings_of(family))
        for name, method in METHODS.items():
            try:
                method.check_backbone(method.Settings(), copy.deepcopy(outline))
                table[name][family] = True
            except UserError:
                table[name][family] = False
    return table


def page() -> str:
    """Return the text of docs/backbones.md."""
    families = ("ViT", *SMALL)
    lines = [
        "# Methods and families of backbones",
        "",
        "The table shows which method supports which family of timm models with its default",
        "settings. `plan` and `run` refuse the others before anything is computed; the error names",
        "models that fit. Other families: any timm model for images can be a backbone, and methods",
        "that work on parameters by name or on features support it. `lora` supports backbones",
        "without attention with `target: linear`.",
        "",
        f"This page is written by `{COMMAND}`.",
        "",
        f"| method | {' | '.join(families)} |",
        f"|---|{'---|' * len(families)}",
    ]
    for name, row in sorted(taken().items()):
        cells = ["yes" if row[family] else "" for family in families]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
