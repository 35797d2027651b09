"""Fixtures shared by the tests of records and report pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Draw plots at 40 dots per inch and without a layout engine, which saves seconds.

    The layout engine makes room for labels and takes longer than the drawing; `test_wide_runs`
    checks it.
    """
    from pipeline.report import plots

    to_png = plots.to_png

    def draw(figure: Figure) -> bytes:
        figure.set_layout_engine("none")
        return to_png(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 40)
        patch.setattr(plots, "to_png", draw)
        yield


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the run of `fake_run` to a storage folder, and return its path."""
    import fake_run

    folder = str(tmp_path_factory.mktemp("storage"))
    fake_run.write(folder)
    return folder
