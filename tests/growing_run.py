"""A run on a growing folder of digits, with a hand-written config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from tests import small_run

CONFIG = """\
# birds, in truth digits
name: small   # of the run
seed: 5
storage: {storage}
tracking: false
stream:
  scenario: {scenario}
  # Tasks are learned in this order.
  tasks:
{tasks}
# small and quick
backbone:
  img_size: 16
  crop_pct: 1.0
  options: {{patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}}
train: {{epochs: 1, batch_size: 16, lr: 2e-3}}
methods:  # a star and a chain
{methods}
cluster: {{workers: 0, checkpoint_s: 0, loader_workers: 0}}
"""
CARD = """\
name: digits  # of the card
source: {{format: folder, path: raw{splits}}}
licence: none
classes: {classes}
num_classes: {number}  # another number is an error
"""
TASKS = """\
    - name: one
      card: card.yaml   # beside this file
      classes: ['0', '1']
      role: base
    - {name: two, card: card.yaml, classes: ['2', '3']}
"""


class GrowingRun:
    """A folder with images, a card and a config; `raw` holds the images of the card."""

    def __init__(
        self,
        folder: Path,
        tasks: str = TASKS,
        scenario: str = "task",
        classes: str = "from_source",
        methods: Iterable[str] = ("linear", "ewc"),
        digits: str = "0123",
    ):
        self.folder = folder
        self.raw = folder / "raw"
        self.config = str(folder / "config.yaml")
        self.card = folder / "card.yaml"
        for digit in digits:
            self.put(self.raw, digit)
        self.card.write_text(CARD.format(classes=classes, number=len(digits), splits=""))
        Path(self.config).write_text(
            CONFIG.format(
                storage=folder / "storage",
                scenario=scenario,
                tasks=tasks.rstrip("\n"),
                methods="\n".join(f"  {name}: {{}}" for name in methods),
            )
        )

    def put(self, data: Path, digit: str, train: int = 12, test: int = 4, first: int = 0) -> None:
        """Write images of a digit into the subfolders `train` and `test` of `data`."""
        images, labels = small_run.digits()
        rows = np.flatnonzero(labels == int(digit))[first : first + train + test]
        for number, row in enumerate(rows):
            folder = data / ("train" if number < train else "test") / digit
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(folder / f"{row:05d}.png")

    @property
    def text(self) -> str:
        """The current text of the config file."""
        return Path(self.config).read_text()

    @property
    def storage(self) -> Path:
        """Folder of the results."""
        return self.folder / "storage"
