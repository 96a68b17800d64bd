"""The command line of `python -m eyas.engine.server`. What `eyas serve` derives from a draft is typed the same here."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from pydantic import ValidationError

from eyas.engine.server.service import MEGABYTE, Limits
from eyas.errors import InputError
from eyas.launch.known_flags import nearest_flag
from eyas.models.target import DEFAULT_TARGET
from eyas.settings import DraftingSettings

PROG = "eyas.engine.server"
HELP = f"python -m {PROG} --help"
DTYPE = "auto measures which of float32 and bfloat16 is faster; int8 rounds the weights of target and draft"
STEPS = 3
MOST_RUNNING = 1024
"""What a round of 1, 2, ... texts costs is listed at start."""
MOST, DAY_S = 10**12, 86400.0


@dataclass(frozen=True)
class Number:
    """A flag's value: an int or a float, within bounds where it has any of its own."""

    flag: str
    kind: type[int] | type[float]
    default: float | None
    least: float = float("-inf")
    most: float = float("inf")

    def __call__(self, word: str) -> float:
        """Raises InputError for a word that is no such number."""
        try:
            value = self.kind(word)
        except ValueError:
            value = float("nan")
        if self.least <= value <= self.most:
            return value
        bounds = f" from {self.least} to {self.most}" if self.most < float("inf") else ""
        raise InputError(
            wanted=("a whole number" if self.kind is int else "a number") + bounds,
            got=repr(word),
            where=self.flag,
            next=f"leave {self.flag} out" if self.default is None else f"{self.flag} {self.default}",
        )


@dataclass(frozen=True)
class Word:
    """A flag's value that says something: an empty host would listen everywhere, an empty key would keep nobody out."""

    flag: str

    def __call__(self, word: str) -> str:
        if word.strip():
            return word.strip()
        raise InputError(wanted="a word", got=repr(word), where=self.flag, next=f"leave {self.flag} out")


class Parser(argparse.ArgumentParser):
    """Tells what is wrong as every other error is told."""

    def error(self, message: str) -> NoReturn:
        flag = re.search(r"--?[a-zA-Z][\w-]*", message)
        near = nearest_flag("embedded", flag.group()) if flag and message.startswith("unrecognized") else ""
        raise InputError(
            wanted="flags that this server has",
            got=f"{message}{near}",
            where=flag.group() if flag else "the command line",
            next=HELP,
        )


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags, and `drafting`, the settings that they make. Raises InputError for unknown, wrong, clashing ones."""
    parser = Parser(PROG, description="The embedded engine as an OpenAI-compatible server.")
    _add_server(parser)
    _add_drafting(parser.add_argument_group("drafting"))
    _add_limits(parser.add_argument_group("limits"))
    arguments = parser.parse_args(list(words))
    arguments.drafting = drafting_of(arguments)
    return arguments


def _add_server(parser: argparse.ArgumentParser) -> None:
    _word(parser, "--target", "a Hugging Face folder or a hub id (%(default)s)", DEFAULT_TARGET)
    _word(parser, "--draft", "a draft's folder, or `shipped`; none decodes plainly, or by --ngram")
    _word(parser, "--served-model-name", "the name /v1/models lists (the target's as it was given)")
    _word(parser, "--host", "address to listen on (%(default)s)", "127.0.0.1")
    _number(parser, "--port", 8000, "port to listen on (%(default)s)", 1, 65535)
    key = os.environ.get("EYAS_API_KEY") or None
    parser.add_argument("--api-key", type=Word("--api-key"), default=key, help="asked for under /v1; also EYAS_API_KEY")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto", help=DTYPE)


def _add_drafting(group: argparse._ArgumentGroup) -> None:
    """Bounds are DraftingSettings'."""
    _number(group, "--num-steps", STEPS, "levels drafted a round at most (%(default)s)")
    _number(group, "--topk", 1, "branches a node; 1 drafts a chain (%(default)s)")
    _number(group, "--num-draft-tokens", None, "rows of a verify forward at most (a tree's: 8)")
    _number(group, "--stop-below", 0.0, "draft no path less probable than this (%(default)s)")
    _number(group, "--ngram", 0, "also draft what followed so many tokens before (%(default)s: do not)")
    group.add_argument(
        "--fixed-depth", action="store_true", help="draft num_steps levels always, also where plain decoding is faster"
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    _number(group, "--max-model-len", None, "tokens of prompt and answer together (the target's context)", 2, MOST)
    _number(group, "--max-running", Limits.running, "texts worked on at a time (%(default)s)", 1, MOST_RUNNING)
    _number(group, "--max-waiting", Limits.waiting, "texts that may wait; then 429 (%(default)s)", 0, MOST)
    _number(
        group,
        "--max-output",
        Limits.output_tokens,
        "tokens of one answer; a max_tokens beyond is refused (%(default)s)",
        1,
        MOST,
    )
    _number(group, "--max-body", MEGABYTE, "bytes of a request; then 413 (%(default)s)", 1, MOST)
    _number(group, "--cache-rows", None, "cache rows in all (what half the free memory holds)", 1, MOST)
    _number(group, "--grace-s", 10.0, "seconds for running answers at the end (%(default)s)", 0, DAY_S)


def _number(group: argparse._ActionsContainer, flag: str, default: float | None, words: str, *bounds: float) -> None:
    kind = float if isinstance(default, float) else int
    group.add_argument(flag, type=Number(flag, kind, default, *bounds), default=default, help=words)


def _word(group: argparse._ActionsContainer, flag: str, words: str, default: str | None = None) -> None:
    group.add_argument(flag, type=Word(flag), default=default, help=words)


def drafting_of(arguments: argparse.Namespace) -> DraftingSettings:
    """An adaptive depth, unless asked otherwise: throughput never below plain decoding's.

    Raises InputError for what is out of bounds, or at odds, also where nothing drafts.
    """
    drafts = arguments.draft is not None or arguments.ngram > 0
    try:
        asked = DraftingSettings(
            num_steps=arguments.num_steps,
            topk=arguments.topk,
            num_draft_tokens=arguments.num_draft_tokens,
            stop_below=arguments.stop_below,
            ngram=arguments.ngram,
            adaptive=drafts and not arguments.fixed_depth,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(
            (*first["loc"], "num_draft_tokens")[0]
        )  # a chain's length is told twice, and what contradicts is this
        flag = "--" + field.replace("_", "-")
        raise InputError(
            wanted=first["msg"].removeprefix("Value error, ").replace("Input should be", "a value"),
            got=str(getattr(arguments, field)),
            where=flag,
            next=f"leave {flag} out",
        ) from error
    return asked if drafts else DraftingSettings(num_steps=1)
