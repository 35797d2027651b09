"""Tests of reads of regular files that users name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from workers.storage.regular_file import MIN_READ_BYTES, read_regular


def test_file_that_reports_no_size_is_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in /proc report 0 bytes."""
    path = tmp_path / "a"
    content = bytes(range(256)) * (MIN_READ_BYTES // 64)
    path.write_bytes(content)
    real = os.fstat

    def report_no_size(descriptor: int) -> os.stat_result:
        values = [*real(descriptor)]
        values[stat.ST_SIZE] = 0
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", report_no_size)
    assert read_regular(path, len(content)) == content
    with pytest.raises(OSError, match="more than"):
        read_regular(path, len(content) - 1)


def test_file_is_read_completely_or_refused_above_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = bytes(range(256)) * (MIN_READ_BYTES // 64)
    path.write_bytes(content)
    assert read_regular(path, len(content)) == content
    with pytest.raises(OSError, match="more than") as caught:
        read_regular(path, len(content) - 1)
    assert caught.value.errno == errno.EFBIG
