"""The command line.

The commands are init, data, run, plan, add, remove, launch, search, reproduce, measure, ingest,
shards, report, analyse, compare, predict, bundle, serve, tasks, runs, status, logs, ui, gc,
convert, methods, schema and completion. Settings of a config need no options of their own:
`--set key=value` overrides any of them.

The help, the version and the error for an unknown command need only the standard library. Each
command imports the packages that it needs.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from pipeline.cli import (
    computing,
    data,
    growing,
    housekeeping,
    reference,
    reproducing,
    results,
    serving,
)
from pipeline.cli.arguments import AddCommand, add_config_arguments
from pipeline.cli.completion import SHELLS
from pipeline.cli.help import GroupedParser, HelpFormatter, Parser, example_text
from pipeline.config import invocation
from pipeline.data.errors import UnfitSource
from pipeline.graph import run_log
from workers import plugins, preemption
from workers.errors import UserError
from workers.storage import secrets

BUCKET = re.compile(r"in bucket '([^']+)'")  # the bucket's name in an error of pyarrow
MAX_ERROR_CHARACTERS = 4000  # maximal printed characters of an error; errors of workers can be long


def leave(code: int) -> NoReturn:
    """Exit with a code, but skip the finalisation of the interpreter.

    A pyarrow thread that is still running during the finalisation would abort the process and
    change the exit code. The rest of a normal exit is done here: wait for Python threads, run the
    `atexit` functions, and flush the output.
    """
    try:
        vars(threading)["_shutdown"]()  # waits for threads that Python started
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    Returns:
        0: success. 2: an error; one sentence on stderr gives the reason. 130: interrupted by
            Ctrl-C. 143: stopped by SIGTERM. `ui` returns the exit code of `mlflow server`.
    """
    try:
        args = parser().parse_args(argv)
        for module in args.plugins:
            plugins.add_plugin(module)
        run_log.log_to_stderr(args.log_level)
        return args.command(args) or 0
    except UnfitSource as error:
        # imported here for a fast start: needs pyarrow
        from pipeline.data.source_advice import describe_source

        advice = describe_source(error.card, invocation.this_command())
        print(f"accrete: {one_line(f'{error}{advice}')}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"accrete: {one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe of our output, e.g. `| head`
        sys.stderr.close()
        return 0
    except ConnectionError as error:  # before OSError: it has no file name to report
        reason = one_line(str(error)) or type(error).__name__
        print(
            f"accrete: a connection was lost or refused ({reason}); "
            "finished stages are kept, run the same command again when the other side answers",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"accrete: {describe_file_error(error)}", file=sys.stderr)
        return 2
    except preemption.Preempted:
        print(
            "accrete: stopped on request; running stages are saved at their last checkpoint; run "
            "the same command again to resume",
            file=sys.stderr,
        )
        return 143
    except KeyboardInterrupt:
        print(
            "accrete: interrupted; finished stages are kept; run the same command again to resume",
            file=sys.stderr,
        )
        return 130


def describe_file_error(error: OSError) -> str:
    """Describe an error of a file, or of a bucket (an OSError of pyarrow), and the remedy."""
    text = one_line(str(error.strerror or error))
    file_name = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{file_name} cannot be written ({text}); free some space there "
            "and run the same command again"
        )
    is_aws_error = "AWS Error" in text
    if is_aws_error or "google::cloud" in text:
        # imported here for a fast start: needs pyarrow
        from workers.storage.filesystem import access_remedy

        scheme = "s3" if is_aws_error else "gs"
        match = BUCKET.search(str(error))
        bucket = match.group(1) if match else ""
        return f"the storage refuses ({text}); {access_remedy(f'{scheme}://{bucket}')}"
    return (
        f"{file_name} cannot be used ({text}); fix its path or permissions "
        "and run the same command again"
    )


def one_line(text: str) -> str:
    """Return a text as one line that is safe to print on a terminal.

    Secrets are redacted, escape sequences and other unprintable characters are replaced, and the
    middle of a very long text is removed.
    """
    line = secrets.printable(" ".join(text.split()))
    if len(line) <= MAX_ERROR_CHARACTERS:
        return line
    half = MAX_ERROR_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"


class PrintVersion(argparse.Action):
    """Print the version, commit and checkout of Accrete, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from pipeline.config.version import get_version  # imported here for a fast start: asks git

        print(get_version())
        parser.exit()


def parser(program: str = "") -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    The attribute `command` of the parsed arguments is the function that runs the command. It takes
    the parsed arguments and returns the exit code.

    Args:
        program: Name of the program. Default: the name with which this process was started.
    """
    program = program or invocation.program()
    top = GroupedParser(
        prog=program,
        usage=f"{program} [--version] [--log-level LEVEL] [--plugin MODULE] COMMAND ...",
        description="Grow one vision transformer by one task at a time.",
    )
    top.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print version, commit and checkout"
    )
    top.add_argument(
        "--log-level",
        choices=run_log.LEVELS,
        default="warning",
        help="level of the log on stderr (default: warning); give this option before COMMAND. Each "
        "run also writes a log at level info to <storage>/runs/NAME/driver.log",
    )
    top.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        dest="plugins",
        help="a module that defines methods; it is imported, so its code runs. Give the option "
        f"before COMMAND, several times if needed, or name the modules in {plugins.VARIABLE}. "
        "Plugins that are installed packages are found without it",
    )
    commands = top.add_subparsers(
        required=True, metavar="COMMAND", parser_class=Parser, prog=program
    )

    def add_command(
        name: str, function: Any, text: str, config: bool = True, **config_options: Any
    ) -> argparse.ArgumentParser:
        epilog = example_text(program, name)
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=HelpFormatter
        )
        sub.set_defaults(command=function)
        if config:
            add_config_arguments(sub, **config_options)
        return sub

    modules = (computing, results, growing, data, serving, housekeeping, reference, reproducing)
    for module in modules:
        module.add_commands(add_command)
    _add_completion_command(add_command)
    return top


def _add_completion_command(add_command: AddCommand) -> None:
    completion_parser = add_command(
        "completion",
        completion,
        "print a script by which the shell completes commands, options and names",
        config=False,
    )
    completion_parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def completion(args: argparse.Namespace) -> int:
    """Print the script that completes the command line in a shell."""
    from pipeline.cli.completion import completion_script
    from pipeline.config.invocation import SCRIPT

    print(completion_script(parser(SCRIPT), args.shell))
    return 0
