"""Fixtures that several tests of records and report pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Draw plots at 40 dots per inch, which saves seconds."""
    from pipeline.report import plots

    usual_dpi = plots.DPI
    plots.DPI = 40
    yield
    plots.DPI = usual_dpi


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the run of `fake_run` to a storage folder, and return its path."""
    import fake_run

    folder = str(tmp_path_factory.mktemp("storage"))
    fake_run.write(folder)
    return folder
