"""Answers as they come, from a server: parts of text, then how it went."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.clients.acceptance import from_histogram
from eyas.clients.openai import OpenAI


@dataclass(frozen=True)
class Part:
    """A piece of an answer; `accepted`: its token was drafted and stood."""

    text: str
    accepted: bool = False


@dataclass(frozen=True)
class Stats:
    """How an answer went. None: the server does not say."""

    tokens: int | None
    seconds_first: float | None
    seconds: float
    accept_length: float | None = None
    rounds: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None

    @property
    def tokens_s(self) -> float | None:
        """After the first token."""
        if self.tokens is None or self.seconds_first is None or self.tokens < 2 or self.seconds <= self.seconds_first:
            return None
        return (self.tokens - 1) / (self.seconds - self.seconds_first)

    @property
    def words(self) -> str:
        """A status line."""
        words = [f"{self.tokens} tokens"] if self.tokens is not None else []
        if self.tokens_s is not None:
            words.append(f"{self.tokens_s:.1f} tokens/s")
        if self.accept_length is not None:
            words.append(f"accept length {self.accept_length:.2f} over {self.rounds} rounds")
        if self.seconds_first is not None:
            words.append(f"first token {self.seconds_first:.2f} s")
        if self.cached_tokens:
            words.append(f"{self.cached_tokens} prompt tokens known")
        return ", ".join(words)

    @property
    def as_dict(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "tokens_s": None if self.tokens_s is None else round(self.tokens_s, 2),
            "accept_length": None if self.accept_length is None else round(self.accept_length, 4),
            "rounds": self.rounds,
            "first_token_s": None if self.seconds_first is None else round(self.seconds_first, 4),
            "cached_tokens": self.cached_tokens,
            "finish": self.finish,
        }


class ServerChat:
    """A server that speaks OpenAI's protocol; what only ours tells is used where it is there."""

    def __init__(self, url: str, settings: dict[str, Any], key: str | None = None) -> None:
        self.server = OpenAI(url, key=key)
        self.name = f"{self.server.model} at {self.server.url}"
        tells = self.server.engine == "embedded"
        # Other servers may refuse what they do not know.
        self.settings = settings | ({"mark_accepted": True} if tells else {})
        self.no_marks = None if tells else "the server does not say which tokens were drafted"

    def close(self) -> None:
        self.server.http.close()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[Part | Stats]:
        started, first = time.monotonic(), None
        usage: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        finish = None
        for event in self.server.events(messages, **self.settings):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                parts = parts_of(choice)
                if parts and first is None:
                    first = time.monotonic() - started
                yield from parts
                meta = choice.get("meta_info") or meta
                finish = choice.get("finish_reason") or finish
        found = from_histogram(meta.get("spec_correct_drafts_histogram") or ())
        yield Stats(
            usage.get("completion_tokens"),
            first,
            time.monotonic() - started,
            None if found is None else found.accept_length,
            None if found is None else found.rounds,
            meta.get("cached_tokens"),
            finish,
        )


def parts_of(choice: dict[str, Any]) -> list[Part]:
    """The text of one event, cut where its marks change."""
    if marks := choice.get("accepted"):
        return [Part(text, accepted) for text, accepted in marks if text]
    text = choice.get("delta", {}).get("content")
    return [Part(text)] if text else []
