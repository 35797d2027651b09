"""What several tests of records and pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    from pipeline.report import plots

    usual, plots.DPI = plots.DPI, 40
    yield
    plots.DPI = usual


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A storage that holds the run of `fake_run`."""
    import fake_run

    folder = str(tmp_path_factory.mktemp("storage"))
    fake_run.write(folder)
    return folder
