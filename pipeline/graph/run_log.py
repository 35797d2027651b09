"""Log of a driver: the file `<storage>/runs/NAME/driver.log`, and the output of `--log-level`.

All loggers of the project are children of the logger `accrete`. A run appends their records of
level INFO and above to its driver.log. Secrets are redacted.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pipeline.graph.walk import Decision, DecisionKind, Event, EventKind, Walk
from workers.errors import UserError
from workers.storage.secrets import printable

LOG = logging.getLogger("accrete.run")
LEVELS = ("debug", "info", "warning", "error")
FILE = "driver.log"
ON_SCREEN = "is_on_screen"  # attribute of a log record; true if the terminal shows its content
FAILURES = (EventKind.FAILED, EventKind.LOST, EventKind.DAMAGED)
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OneLineFormatter(logging.Formatter):
    """Formats a log record as one printable line without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(" ".join(super().format(record).splitlines()))


def is_not_on_screen(record: logging.LogRecord) -> bool:
    """Return whether the terminal does not show the content of a record. Used as a filter."""
    return not getattr(record, ON_SCREEN, False)


class FileHandler(logging.StreamHandler[TextIO]):
    """Writes log records to an open file.

    Errors are ignored: a record that cannot be written is lost. (If the disk is full, the run fails
    when it writes results, and reports it.)
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the default prints a traceback to stderr."""


def log_to_stderr(level: str) -> None:
    """Print the records of the project's loggers to stderr. A later call replaces this one.

    At level "warning", records that the terminal shows in another form are not printed again.

    Args:
        level: Lowest level to print: an item of LEVELS.
    """
    logger = logging.getLogger("accrete")
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(OneLineFormatter(LINE if level in ("debug", "info") else "%(message)s"))
    handler.set_name("stderr")
    if level == "warning":
        handler.addFilter(is_not_on_screen)
    for old in [old for old in logger.handlers if old.get_name() == "stderr"]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, handler.level))
    logger.propagate = False


@contextmanager
def driver_log(storage: str, name: str) -> Iterator[None]:
    """Context manager that appends log records to the driver.log of a run.

    In a bucket, the log is written when the context ends, and it replaces the previous log. If the
    file cannot be written, the run continues without it.

    Args:
        storage: URI of the storage.
        name: Name of the run.
    """
    # imported here to keep the start-up fast: they import pyarrow
    from pipeline.graph.event_log import open_log
    from workers.storage.artifact import is_local, join, resolve, write_bytes
    from workers.storage.filesystem import FIRST_CONTACT_S, patience

    path = join(storage, "runs", name, FILE)
    buffer = io.StringIO()
    stream: TextIO = buffer
    if is_local(storage):
        try:
            stream = open_log(resolve(path)[1])
        except OSError as error:
            reason = error.strerror or error
            LOG.warning("%s cannot be written (%s); the run continues without it", path, reason)
    handler = FileHandler(stream)
    handler.set_name(FILE)
    handler.setFormatter(OneLineFormatter(LINE))
    handler.setLevel(logging.INFO)
    logger = logging.getLogger("accrete")
    level_before = logger.level
    logger.setLevel(min(logging.INFO, level_before or logging.INFO))
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        LOG.info("the run ended with %s: %s", type(error).__name__, error)
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        text = buffer.getvalue()
        with suppress(OSError):  # for example because the disk is full
            stream.close()
        if text and not is_local(storage):
            # an unreachable storage must neither hide the outcome of the run nor delay it for long
            with suppress(OSError, UserError), patience(FIRST_CONTACT_S):
                write_bytes(path, text.encode())


class RunLog:
    """Logs the events of a run: failures as warnings, progress as debug, other events as info."""

    def progress(self, event: Event) -> None:
        """Log an event that does not change the state of a stage: notes, starts, progress."""
        if event.kind is EventKind.NOTE:
            LOG.info("%s", event.message)
        elif event.kind is EventKind.STARTED:
            LOG.info("%s: started in %s", event.stage, event.body.get("where", ""))
        elif event.kind is EventKind.CHECKPOINT:
            epoch, step = event.body["epoch"], event.body["step"]
            LOG.info("%s: checkpoint before step %d of epoch %d", event.stage, step, epoch)
        else:
            LOG.debug("%s: %s", event.stage, event.body)

    def on_event(self, walk: Walk, event: Event) -> None:
        """Log an event."""
        match event.kind:
            case EventKind.DONE:
                LOG.info("%s: done in %.1f s", event.stage, event.body.get("wall_s", 0.0))
                for warning in event.body.get("warnings") or []:
                    LOG.warning("%s: %s", event.stage, warning, extra={ON_SCREEN: True})
            case EventKind.STARTED | EventKind.PROGRESS | EventKind.CHECKPOINT | EventKind.NOTE:
                self.progress(event)
            case _:
                level = logging.WARNING if event.kind in FAILURES else logging.INFO
                text = f"{event.stage}: {event.kind}: {event.message}"
                LOG.log(level, "%s", text, extra={ON_SCREEN: True})

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Log a decision."""
        text = f": {decision.reason}" if decision.reason else ""
        level = logging.WARNING if decision.kind is DecisionKind.FAIL else logging.INFO
        line = f"{decision.stage}: {decision.kind}{text}"
        LOG.log(level, "%s", line, extra={ON_SCREEN: True})
