"""Small synthetic copies of data sets in the layouts of their official files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.io import savemat

from pipeline import cli
from pipeline.data import card_files, formats
from pipeline.data.packs import ImageChecker

REPOSITORY = Path(__file__).resolve().parents[1]
SIDES = (20, 16)  # width and height of the synthetic images


def write_image(path: Path, seed: int = 0) -> None:
    """Write a noise image; the file name determines the format."""
    width, height = SIDES
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=95)


def write_lists(folder: Path, **lines: list[str]) -> None:
    """Write one text file NAME.txt per argument."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in lines.items():
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))


def write_mat(path: Path, compressed: Any = True, **values: Any) -> None:
    """Write a .mat file of version 5, compressed like MATLAB's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, values, do_compression=compressed)


def structs(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a MATLAB struct array of shape (1, rows)."""
    kinds = [(name, object) for name in rows[0]]
    return np.array([[tuple(row.values()) for row in rows]], kinds)


def cells(texts: list[str]) -> Any:
    """Return texts as a MATLAB cell array with one column."""
    column = np.empty((len(texts), 1), object)
    column[:, 0] = texts
    return column


def small_card(folder: Path, name: str, **changes: Any) -> str:
    """Write a card of `datasets` with its source below `folder` and without counts. Returns: the
    path of the new card."""
    body = yaml.safe_load((REPOSITORY / "datasets" / name / "card.yaml").read_text())
    body["source"]["path"] = str(folder / "prepared")
    body.pop("counts", None)
    path = folder / "card.yaml"
    path.write_text(yaml.safe_dump(body | changes))
    return str(path)


def prepare(
    capsys: pytest.CaptureFixture[str], card: str, source: Path, *options: str, code: int = 0
) -> str:
    """Run `data prepare`, and return stdout and stderr as one line."""
    assert cli.main(["data", "prepare", card, str(source), *options]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return " ".join((captured.out + captured.err).split())


def labels_of(card: str) -> dict[str, dict[str | None, int]]:
    """Return the number of listed images of each class, by split."""
    counts: dict[str, Counter[str | None]] = {"train": Counter(), "test": Counter()}
    loaded = card_files.load_card_file(card)
    checker = ImageChecker(loaded)
    for unit in formats.units(loaded, map):
        for item, data in unit.read(*unit.args):
            assert item.problem is None
            assert data
            counts[item.split][checker.label(item)] += 1
    return {split: dict(sorted(labels.items())) for split, labels in counts.items()}
