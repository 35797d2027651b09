"""`python -m pipeline`."""

import os
import signal
import sys

PROCESS = os.getpid()


def stop(number: int, frame: object) -> None:
    """End this process with a sentence, until a command listens to the signal itself."""
    if os.getpid() == PROCESS:
        sys.stderr.write("accrete: stopped before anything was started\n")
        sys.stderr.flush()
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)  # a process that this one forked
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    from pipeline.cli import leave, main  # may take a second

    leave(main())
