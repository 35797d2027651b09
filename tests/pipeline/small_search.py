"""A small search of MEAT on handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.search import spec
from tests import small_run

SPACE = {
    "methods.meat.lambda": {"dist": "uniform", "low": 0.5, "high": 1.0},
    "methods.meat.alpha": {"dist": "choice", "values": [0.5, 1, 2]},
}


def written(
    folder: Path,
    cards: Any = ("a", "b"),
    changes: dict[str, Any] | None = None,
    method: str = "meat",
    **body: Any,
) -> str:
    """Write a search file over a small base config on digits, and return its path."""
    if not (folder / "base.yaml").exists():
        settings = small_run.make_body(
            folder,
            small_run.make_cards(folder, cards),
            methods=[method],
            data={"val_fraction": 0.3},
            **(changes or {}),
        )
        small_run.write_config(folder / "base.yaml", settings)
    return small_run.write_config(
        folder / "small.yaml",
        {"base": "base.yaml", "space": SPACE, "budget": {"trials": 3}, "seeds": [], **body},
    )


def prepared(folder: Path, *overrides: str, **body: Any) -> spec.Search:
    return spec.prepare_search(written(folder, **body), list(overrides))
