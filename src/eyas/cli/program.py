"""The `eyas` program: runs a command, reports what went wrong, exits with its status."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import CycloptsError

from eyas.cli import checks, keep, servers, stages
from eyas.cli.app import app
from eyas.errors import EyasError, InputError
from eyas.failures import interrupted, missing, report, usage_error
from eyas.pipeline.interrupts import Signalled
from eyas.progress import say
from eyas.ranks import place_of
from eyas.run import disk_error

INTERRUPTED = 130
SIGNALLED = 128
"""And the signal's number, as shells have it: 143 for SIGTERM."""
COMMANDS = (stages, checks, servers, keep)
"""Importing them registers their commands."""


def speaks() -> bool:
    """Whether a wrong flag is this process's to tell: to all that torchrun started the same line was given."""
    try:
        return place_of(os.environ).leads
    except InputError:
        return True


def main(argv: Sequence[str] | None = None) -> None:
    """The `eyas` program: runs a command and exits with its status (docs/commands.md)."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except EyasError as error:
        sys.exit(report(error, tokens))
    except CycloptsError as error:
        usage = usage_error(error, tokens)
        sys.exit(report(usage, tokens) if speaks() else usage.exit_code)
    except ModuleNotFoundError as error:
        sys.exit(report(missing(error), tokens))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has gone
        sys.exit(0)
    except OSError as error:
        sys.exit(report(disk_error(Path(error.filename or "."), error), tokens))
    except KeyboardInterrupt as error:
        if "--json" in tokens:
            report(interrupted(error), tokens)
        say("interrupted; the same command resumes")
        sys.exit(SIGNALLED + error.number if isinstance(error, Signalled) else INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)
