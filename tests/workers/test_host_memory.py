"""Tests of `host_memory`: a stage keeps freed memory, and returns it to the system at its end."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipeline.testing.lab import Lab
from workers import host_memory, loop

SCRIPT = """
import json, resource
import torch
from workers.host_memory import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):  # 16 MiB and 64 MiB: below and above the default threshold for mappings
        tensors = [torch.ones(4 << 20), torch.ones(16 << 20)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def read_resident_bytes():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

count_faults()
before = count_faults()
with keep_freed_memory():
    count_faults()
    inside = count_faults()
    full = read_resident_bytes()
returned = full - read_resident_bytes()
print(json.dumps([before, inside, returned, count_faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_reused_only_inside_the_context() -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stdout
    before, inside, returned, after = json.loads(output)
    assert inside * 100 < before
    assert returned > 70 << 20
    assert after > before / 2


def test_stage_keeps_freed_memory_until_it_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    run_stage = loop._run_stage

    @contextmanager
    def record() -> Iterator[None]:
        events.append("keep")
        yield
        events.append("return")

    def recorded(*arguments: Any) -> Any:
        events.append("stage")
        return run_stage(*arguments)

    monkeypatch.setattr(host_memory, "keep_freed_memory", record)
    monkeypatch.setattr(loop, "_run_stage", recorded)
    run = lab.run("linear", epochs=1, accumulate=4)
    (job,) = run.stages(0)
    run.prepare(job)
    events.clear()
    loop.run_stage(job, lab.group, lambda event: None)
    assert events == ["keep", "stage", "return"]
    loop.run_stage(job, lab.group, lambda event: None)  # the stage has a result now
    assert events == ["keep", "stage", "return"]
