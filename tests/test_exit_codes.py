"""Tests of exit codes: a command keeps its own, even if threads of libraries still run."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline import cli
from tests import small_run

RUNS = 25  # per command
AT_ONCE = 3
THREAD = """
import threading, time
from pipeline.cli import leave
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("done")
leave({code})
"""


@pytest.mark.parametrize("code", [0, 2, 143])
def test_running_thread_does_not_change_exit_code(code: int) -> None:
    text = THREAD.format(code=code)
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=900
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "done\n", "")


def test_leave_waits_for_threads_and_runs_exit_handlers() -> None:
    text = (
        "import atexit, threading, time\n"
        "from pipeline.cli import leave\n"
        "atexit.register(print, 'registered')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\n"
        "leave(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=900
    )
    assert ended.stdout == "thread\nregistered\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_commands_end_with_success(tmp_path: Path) -> None:
    cards = small_run.make_cards(tmp_path, ["base", "a"])
    config = small_run.write_config(
        tmp_path / "config.yaml", small_run.make_body(tmp_path, cards, ["linear"])
    )
    assert cli.main(["run", config]) == 0
    image = next((tmp_path / "raw").rglob("*.png"))
    commands = [
        ["plan", config],
        ["status", config],
        ["report", config],
        ["predict", config, str(image), "--task", "a"],
    ]

    def run(argv: list[str]) -> tuple[int, str]:
        words = [sys.executable, "-m", "pipeline", *argv]
        ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=900)
        return ended.returncode, ended.stderr[-500:]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, commands * RUNS))
    assert {code for code, _ in results} == {0}, results


def test_sigterm_before_first_output_prints_a_message() -> None:
    words = [sys.executable, "-m", "pipeline", "methods"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        while True:  # until it handles SIGTERM
            caught = next(line for line in status.read_text().splitlines() if "SigCgt" in line)
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                break
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=900)
    assert process.returncode == 143
    assert printed == b"accrete: stopped before anything was started\n"
