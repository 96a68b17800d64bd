"""What went wrong, as the person typing sees it: an exception as four parts, on stderr or as one JSON object."""

import json
import re
import sys

from cyclopts import CycloptsError, UnknownCommandError, UnusedCliTokensError
from pydantic import ValidationError

from eyas.clients.address import is_address
from eyas.errors import EyasError, InputError, MissingDependency
from eyas.pipeline.doctor import INSTALL_STACK, TORCH_STACK
from eyas.pipeline.interrupts import Signalled

WITH_URL = ("chat", "check")
"""Commands that take a server's address by --url alone."""


def usage_error(error: CycloptsError, tokens: list[str]) -> InputError:
    command = next((token for token in tokens if not token.startswith("-")), "")
    if isinstance(error, UnknownCommandError):
        command = ""
    unused = (error.unused_tokens or []) if isinstance(error, UnusedCliTokensError) else []
    url = next((token for token in unused if is_address(token)), None) if command in WITH_URL else None
    causes = (error.__cause__, error.__context__)
    got = next((told for cause in causes if (told := setting_error(cause, tokens))), str(error))
    return InputError(
        wanted=f"a command line that `eyas {command} --help` shows".replace("  ", " "),
        got=" ".join(got.split()),
        where="the command line",
        next=f"eyas {command} --help".replace("  ", " ") if url is None else f"eyas {command} --url {url}",
    )


def interrupted(by: KeyboardInterrupt) -> EyasError:
    got, where = (str(by), "another process") if isinstance(by, Signalled) else ("an interrupt", "the keyboard")
    return EyasError(wanted="the command to finish", got=got, where=where, next="the same command resumes")


def setting_error(cause: BaseException | None, tokens: list[str]) -> str:
    """A flag whose value a setting refused: the flag as typed, why, and the value; of flags that do not go together,
    why. Empty for any other cause."""
    if not isinstance(cause, ValidationError):
        return ""
    first = cause.errors(include_url=False)[0]
    flag = ".".join(str(part) for part in first["loc"] if isinstance(part, str)).replace("_", "-")
    typed = (token.partition("=")[0].removeprefix("--") for token in tokens if token.startswith("--"))
    flag = next((token for token in typed if token.rpartition(".")[2] == flag), flag)
    message = first["msg"].removeprefix("Value error, ")
    return f"--{flag} {first['input']}: {message}" if flag else message


def missing(error: ModuleNotFoundError) -> MissingDependency:
    """A package that is not installed, as the line to type; a fault of our own stays a traceback."""
    package = (error.name or "").split(".")[0]
    if package not in TORCH_STACK:
        raise error
    return MissingDependency(
        wanted=f"the package {package}", got="it is not installed", where="this Python", next=INSTALL_STACK
    )


SET = re.compile(r"--set (\w+)\.(\w+)(=(\[[^\]]*\]|[^\s,;)]+))?")
"""Advice in a recipe's words: `--set capture.max_length=4096`, the value quoted or left open."""
OWN = {"export.engines": "--for", "target.name": "--target"}
"""Where a command's flag is not the key's name: `eyas export --for`."""
PREFIXED = {("train", "draft"): "draft.", ("train", "capture"): "capture."}
"""Sections whose name stands before a command's flags: `eyas train --draft.vocab-size`."""


def for_command(error: EyasError, tokens: list[str]) -> EyasError:
    """The error with advice that its command understands: of stages run alone, flags; of `run`, keys of the recipe."""
    command = next((token for token in tokens if not token.startswith("-")), "")
    if command not in ("run", "recipe"):
        error.next = SET.sub(lambda found: as_flag(found, command), error.next)
    if command == "export" and error.where == "--engine":
        error.where, error.next = "--for", error.next.replace("--engine", "--for")
    return error


def as_flag(found: re.Match[str], command: str) -> str:
    section, key, value = found[1], found[2], found[4]
    prefix, name = PREFIXED.get((command, section), ""), key.replace("_", "-")
    flag = OWN.get(f"{section}.{key}", f"--{prefix}{name}")
    if value == "false":
        return f"--{prefix}no-{name}"
    if value in (None, "true"):
        return flag
    return f"{flag} {re.sub(r'[^0-9A-Za-z_.@/,-]', '', value)}"


def report(error: EyasError, tokens: list[str]) -> int:
    """Print an error in its four parts, as JSON under --json; returns the exit status."""
    error = for_command(error, tokens)
    if "--json" in tokens:
        print(json.dumps({"error": error.as_json()}))
    else:
        print(error.lines, file=sys.stderr)
    return error.exit_code
