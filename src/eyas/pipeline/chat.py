"""`eyas chat`: a conversation in the terminal, with an engine in this process or a server behind a url.

Text goes to stdout as it is made; what is said about it goes to stderr, so that a pipe gets the answers alone.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console

from eyas.clients.chat import Part, Stats
from eyas.errors import InputError
from eyas.progress import say
from eyas.recipe import ChatSettings, TargetSettings
from eyas.settings import SamplingSettings

Message = dict[str, str]
HELP = (
    "/new forgets the conversation, /marks underlines accepted draft tokens, /system TEXT, /quit (or Ctrl-D); "
    "//TEXT says /TEXT"
)
MARKED = "underline green"


class Source(Protocol):
    """Who answers: parts of text, and at the end how it went."""

    name: str
    no_marks: str | None
    """Why no accepted draft tokens can be told; None: they are."""

    def answer(self, messages: list[Message]) -> Iterator[Part | Stats]: ...

    def close(self) -> None: ...


@dataclass
class Chat:
    """A conversation so far."""

    source: Source
    settings: ChatSettings
    patient: bool = True
    """Somebody types: Ctrl-C ends an answer, and a refusal is no failure. Otherwise Ctrl-C ends the conversation."""
    marks: bool = False
    messages: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks = self.settings.marks
        self.begin(self.settings.system)

    def begin(self, system: str | None) -> None:
        """Forget what was said."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, show: Callable[[Part], None]) -> Stats | None:
        """Ask, showing the answer as it comes. Ctrl-C ends the answer, which stays as far as it came.

        Raises InputError where there is no answer: then nothing was said.
        """
        self.messages.append({"role": "user", "content": text})
        parts, stats = list[str](), None
        answer = self.source.answer(self.messages)
        try:
            for part in answer:
                if isinstance(part, Stats):
                    stats = part
                else:
                    parts.append(part.text)
                    show(part)
        except KeyboardInterrupt:
            if not self.patient:
                raise
            say("\nthe answer is cut off")
        except InputError:
            self.messages.pop()
            raise
        whole = "".join(parts)
        self.messages.append({"role": "assistant", "content": whole})
        self.turns.append({"user": text, "assistant": whole, **({} if stats is None else stats.as_dict)})
        return stats

    def command(self, line: str) -> bool:
        """A line that begins with a slash. True: the end. Raises InputError for no command."""
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return True
        if word == "/new":
            self.begin(self.system)
            say("a new conversation")
        elif word == "/marks":
            self.marks = not self.marks
        elif word == "/system":
            self.begin(rest or None)
            say("a new conversation" + (f", under: {rest}" if rest else ", without a system message"))
        elif word == "/help":
            say(HELP)
        else:
            raise InputError(wanted=HELP, got=word, where="the conversation", next=f"/{line}, to say it to the target")
        return False


def converse(chat: Chat, lines: Iterable[str], console: Console) -> dict[str, Any]:
    """Answer every line until there are no more; the answers go to `console`.

    A line that gets no answer is dropped, said on stderr and listed in `refused`; where nobody types, the first of
    them is the result's `error` too.
    """
    refused, shown = list[dict[str, Any]](), list[Part]()
    if chat.marks:
        say_marks(chat, console)

    def show(part: Part) -> None:
        style = MARKED if chat.marks and part.accepted else None
        console.print(part.text, style=style, end="", markup=False, highlight=False, soft_wrap=True)
        shown.append(part)

    for text in filter(None, map(str.strip, lines)):
        shown.clear()
        try:
            if text.startswith("/") and not text.startswith("//"):
                marked = chat.marks
                if chat.command(text):
                    break
                if chat.marks != marked:
                    say_marks(chat, console)
                continue
            stats = chat.say(text.removeprefix("/"), show)
        except InputError as error:
            if shown:
                console.print()
            say(f"no answer\n{error.lines}")
            refused.append({"user": text, **error.as_json()})
            continue
        console.print()
        if stats is not None:
            say(f"[{stats.words}]")
    result: dict[str, Any] = {"source": chat.source.name, "turns": chat.turns, "refused": refused}
    if refused and not chat.patient:
        result["error"] = {part: told for part, told in refused[0].items() if part != "user"}
    return result


OF_AN_ENGINE = ("draft", "plain", "precision", "num_steps", "ngram")


def asked_of_server(settings: ChatSettings, target: str) -> dict[str, Any]:
    """What a request to a server says: OpenAI's fields, and of the others those that were set.

    Raises InputError for settings of an engine in this process.
    """
    fields = ChatSettings.model_fields
    own = [f"--{name.replace('_', '-')}" for name in OF_AN_ENGINE if getattr(settings, name) != fields[name].default]
    own += ["--target"] if target != TargetSettings().name else []
    if own:
        raise InputError(
            wanted="an engine in this process, or --url",
            got=f"--url and {', '.join(own)}",
            where="the command line",
            next=f"without {' and '.join(own)}: the server was started with its own",
        )
    more = {name: getattr(settings, name) for name in SamplingSettings.model_fields}
    more = {name: value for name, value in more.items() if value != fields[name].default}
    basic = {"max_tokens": settings.max_new_tokens, "temperature": settings.temperature, "top_p": settings.top_p}
    return more | basic


def say_marks(chat: Chat, console: Console) -> None:
    """Whether accepted draft tokens will be seen, and why not."""
    why = chat.source.no_marks or ("no terminal shows the answers" if console.color_system is None else None)
    if not chat.marks:
        say("accepted draft tokens are not marked")
    else:
        say("accepted draft tokens are underlined" if why is None else f"accepted draft tokens are not marked: {why}")


def said(prompts: Sequence[str]) -> Sequence[str]:
    """Turns given on the command line. Raises InputError for one without words."""
    if not all(prompt.strip() for prompt in prompts):
        raise InputError(
            wanted="a prompt with words in it",
            got="an empty one",
            where="--prompt",
            next='eyas chat --prompt "Why is the sky blue?"',
        )
    return prompts


def typed() -> Iterator[str]:
    """Lines of a terminal, prompted for; of a pipe, as they are."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    say(HELP)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            say("")
            return
