"""Small backbones of timm's families, without pretrained weights, for tests and for the table of
docs/backbones.md."""

from __future__ import annotations

from typing import Any

# Family -> the settings of its smallest useful backbone: 32 to 64 pixels, a few blocks.
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
