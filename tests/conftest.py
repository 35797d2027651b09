"""Made once for the whole session: a tiny store of handwritten digits, through the real ingest and
stages; a run that nothing interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# before torch is imported: also holds in processes that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("tests.recovery")  # so that its assertions say what they saw


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """See `laboratory.Lab`: runs streams of tiny tasks through the real stages and remembers what
    it has run."""
    import torch
    from laboratory import Lab

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Lab(tmp_path_factory.mktemp("lab"))
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> object:
    """See `recovery.Reference`: a run that nothing interrupted, made once."""
    from tests.recovery import Reference

    return Reference.made_in(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The same of DyTox over one output space: every step that is killed inside comes out the
    same."""
    from tests.recovery import Reference

    dytox = {"memory": 8, "steps": {"finetune": {"epochs": 4}}}
    return Reference.made_in(
        tmp_path_factory.mktemp("chain"), ("a", "b"), methods={"dytox": dytox}, scenario="class"
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[object]:
    """See `hostile.Site`: a place of a test's own; what lies beside it is as it was after the
    test."""
    from hostile import Site

    found = Site(tmp_path)
    yield found
    found.untouched()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process make a report without pictures."""
    from pipeline.report import page

    monkeypatch.setattr(page, "build", lambda *_: {"report.html": b"a page"})


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """The port of an S3-compatible server of this session."""
    from tests import s3

    with s3.server() as port:
        yield port


@pytest.fixture
def bucket(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A bucket of its own behind a proxy that can make requests fail (see `s3.Proxy`); the
    environment of this process leads there."""
    import uuid

    from tests import s3
    from workers.storage import filesystem

    with s3.Proxy(s3_server, bucket=f"bucket-{uuid.uuid4().hex[:8]}").served() as proxy:
        for name, value in s3.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        filesystem.open_filesystem.cache_clear()  # it leads to the proxy of another test
        s3.client_of(s3_server).create_bucket(Bucket=proxy.bucket)
        yield proxy
    filesystem.open_filesystem.cache_clear()
