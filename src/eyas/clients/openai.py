"""The OpenAI protocol as SGLang, vLLM and the embedded server speak it: answers whole or streamed."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from eyas.clients.health import client
from eyas.errors import InputError

Message = dict[str, str]
DONE = "[DONE]"


@dataclass(frozen=True)
class Answer:
    """One answer; times are seconds since the request was sent."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    seconds: float
    first_token_s: float | None = None
    """Until the first piece of text; None for an answer that was not streamed."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The last JSON object received: engines put their speculation figures into it."""


class OpenAI:
    """One server. Raises InputError where it does not answer, or answers with an error."""

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = client(self.url, timeout_s)
        if key is not None:
            self.http.headers["Authorization"] = f"Bearer {key}"
        self._model = model

    def __enter__(self) -> "OpenAI":
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()

    @property
    def model(self) -> str:
        """The name the server serves under: the one given, else the first it lists."""
        if self._model is None:
            self._model = str(self.models()[0])
        return self._model

    def models(self) -> list[str]:
        listed = self._json("GET", "/v1/models")
        names = [str(entry.get("id")) for entry in listed.get("data", ()) if isinstance(entry, dict)]
        if not names:
            raise self._refused("/v1/models", "no model in the list")
        return names

    def chat(self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0, **more: Any) -> Answer:
        """One answer, whole."""
        body = {"messages": list(messages), **self._body(max_tokens, temperature, more)}
        return self._whole("/v1/chat/completions", body)

    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, temperature: float = 0.0, **more: Any
    ) -> Answer:
        """A text, or token ids, continued."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        return self._whole("/v1/completions", body | self._body(max_tokens, temperature, more))

    def stream(self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0, **more: Any) -> Answer:
        """One answer, streamed, with the time of its first text."""
        body = {"messages": list(messages), **self._body(max_tokens, temperature, more), "stream": True}
        body["stream_options"] = {"include_usage": True}
        started, first, pieces, reason, usage = time.monotonic(), None, [], None, {}
        last: dict[str, Any] = {}
        for last in self._events("/v1/chat/completions", body):
            usage = last.get("usage") or usage
            for choice in last.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                if piece and first is None:
                    first = time.monotonic() - started
                pieces.append(piece)
                reason = choice.get("finish_reason") or reason
        seconds = time.monotonic() - started
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answer("".join(pieces), *counts, reason, seconds, first, last)

    def events(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0, **more: Any
    ) -> Iterator[dict[str, Any]]:
        """One answer, streamed: every event as it comes, the usage in the last."""
        body = {"messages": list(messages), **self._body(max_tokens, temperature, more), "stream": True}
        body["stream_options"] = {"include_usage": True}
        return self._events("/v1/chat/completions", body)

    def _body(self, max_tokens: int, temperature: float, more: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **more}

    def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        answer = self._json("POST", path, body)
        seconds = time.monotonic() - started
        choices = answer.get("choices") or [{}]
        text = choices[0].get("text", (choices[0].get("message") or {}).get("content")) or ""
        usage = answer.get("usage") or {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answer(text, *counts, choices[0].get("finish_reason"), seconds, None, answer)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self.http.request(method, path, json=body)
            parsed = answer.json() if answer.status_code == 200 else None
        except (httpx2.HTTPError, ValueError) as error:
            raise self._refused(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(parsed, dict):
            raise self._refused(path, f"{answer.status_code}: {answer.text[:300]}")
        return parsed

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self.http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refused(path, f"{answer.status_code}: {answer.text[:300]}")
                for line in answer.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data and data != DONE:
                        event = json.loads(data)
                        if "error" in event:
                            raise self._refused(path, str(event["error"])[:300])
                        yield event
        except (httpx2.HTTPError, ValueError) as error:
            raise self._refused(path, f"{type(error).__name__}: {error}") from error

    def _refused(self, path: str, got: str) -> InputError:
        return InputError(
            wanted="an answer of an OpenAI-compatible server",
            got=got,
            where=f"{self.url}{path}",
            next=f"eyas watch --url {self.url} --once",
        )
