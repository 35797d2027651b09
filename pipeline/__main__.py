"""Entry point of `python -m pipeline`."""

import os
import signal
import sys

PROCESS = os.getpid()  # forked children inherit the handler, but have another id


def stop(number: int, frame: object) -> None:
    """Handle SIGTERM until a command installs its own handler: print a message and exit."""
    if os.getpid() == PROCESS:
        sys.stderr.write("accrete: stopped before anything was started\n")
        sys.stderr.flush()
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)  # in a forked child: end by the default action
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    from pipeline.cli import leave, main  # imported after the handler is set: takes up to 1 s

    leave(main())
