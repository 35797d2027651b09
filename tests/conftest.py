"""One tiny store for the whole session: handwritten digits through the real ingest, a random backbone, the real stages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: also holds in processes that tests start


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """See `laboratory.Lab`: runs streams of tiny tasks through the real stages and remembers what it has run."""
    import torch
    from laboratory import Lab

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Lab(tmp_path_factory.mktemp("lab"))
    finally:
        torch.set_num_threads(before)
