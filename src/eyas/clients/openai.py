"""The OpenAI protocol as SGLang, vLLM and the embedded server speak it: answers whole or streamed."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from eyas.clients.address import address
from eyas.clients.health import client, engine_of_models
from eyas.errors import InputError

Message = dict[str, str]
DONE = "[DONE]"
MODELS = "/v1/models"
SHOWN = 300
HERE = ("127.0.0.1", "localhost", "::1")
NO_KEY = "export EYAS_API_KEY=KEY, the server's (in Python: key=KEY)"
OTHER_KEY = "export EYAS_API_KEY=KEY, the server's: the one that was sent is another"
NO_SUCH_SERVER = f"--url with the address that {MODELS} lies behind, as http://127.0.0.1:8000"


def server_key() -> str | None:
    """The key of the servers that are asked, as the environment has it."""
    return os.environ.get("EYAS_API_KEY") or None


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
    """One server, its address with or without /v1. Raises InputError where it does not answer, or with an error."""

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0, key: str | None = None) -> None:
        self.url = address(url).url
        self.http = client(self.url, timeout_s)
        if key is not None:
            self.http.headers["Authorization"] = f"Bearer {key}"
        self._model = model
        self._listed: list[dict[str, Any]] | None = None

    def __enter__(self) -> "OpenAI":
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()

    @property
    def model(self) -> str:
        """The name the server serves under: the one given, else the first it lists."""
        if self._model is None:
            self._model = self.models()[0]
        return self._model

    @property
    def engine(self) -> str | None:
        """Which engine answers, by who owns its first model; None where it does not say."""
        return engine_of_models(self._entries())

    def models(self) -> list[str]:
        return [str(entry.get("id")) for entry in self._entries()]

    def _entries(self) -> list[dict[str, Any]]:
        """What the server lists, asked once."""
        if self._listed is None:
            data = self._json("GET", MODELS).get("data")
            entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
            if not entries:
                raise self._error(MODELS, "no model in the list", NO_SUCH_SERVER)
            self._listed = entries
        return self._listed

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
        except httpx2.HTTPError as error:
            raise self._unreachable(path, error) from error
        if answer.status_code != 200:
            raise self._refused(path, answer)
        return self._parsed(path, answer.text)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self.http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refused(path, answer)
                for line in answer.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data and data != DONE:
                        event = self._parsed(path, data)
                        if "error" in event:
                            raise self._error(path, said_of(event)[:SHOWN], self._look)
                        yield event
        except httpx2.HTTPError as error:
            raise self._unreachable(path, error) from error

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise self._error(path, f"no JSON: {text[:SHOWN]!r}", NO_SUCH_SERVER) from error
        if not isinstance(found, dict):
            raise self._error(path, f"no JSON object: {text[:SHOWN]!r}", NO_SUCH_SERVER)
        return found

    @property
    def _look(self) -> str:
        return f"eyas watch --url {self.url} --once"

    def _refused(self, path: str, answer: httpx2.Response) -> InputError:
        """An answer that is an error, with what helps against its status."""
        status, headers = answer.status_code, answer.headers
        if status in (401, 403):
            advice = OTHER_KEY if "authorization" in self.http.headers else NO_KEY
        elif status == 404:
            advice = NO_SUCH_SERVER if path == MODELS else f"curl {self.url}{MODELS} lists the models"
        elif status == 429:
            after = headers.get("retry-after", "")
            advice = f"the same again {f'in {after} s' if after.isdecimal() else 'later'}: the server is full"
        elif status == 503:
            advice = f"eyas watch --url {self.url}, until it is ready"
        elif 300 <= status < 400:
            advice = f"--url {headers.get('location', '')}".removesuffix(path)
        elif status < 500:
            advice = "change what the server names (a prompt beyond its context: a shorter one, fewer new tokens)"
        else:
            advice = self._look
        return self._error(path, f"{status}: {' '.join(said_of_text(answer.text).split())[:SHOWN]}", advice)

    def _unreachable(self, path: str, error: httpx2.HTTPError) -> InputError:
        """No answer, or one that broke off."""
        words = str(error)
        advice = self._look
        if "CERTIFICATE_VERIFY_FAILED" in words:
            advice = "put the server's CA among those that this machine trusts, or use its http address"
        elif "[SSL" in words:
            advice = f"--url {self.url.replace('https://', 'http://')}, if the server speaks plain HTTP"
        elif isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError) and self.url.startswith("http://"):
            advice = f"--url {self.url.replace('http://', 'https://')}, if the server wants TLS; else {self._look}"
        elif isinstance(error, httpx2.ConnectError) and address(self.url).host not in HERE:
            advice = "--url with a host and a port that answer (curl URL/v1/models)"
        elif isinstance(error, httpx2.ConnectError):
            advice = "eyas watch --all lists the servers of this machine, eyas serve starts one"
        return self._error(path, f"{type(error).__name__}: {words}", advice)

    def _error(self, path: str, got: str, advice: str) -> InputError:
        wanted = "an answer of an OpenAI-compatible server"
        return InputError(wanted=wanted, got=got, where=f"{self.url}{path}", next=advice)


def said_of_text(text: str) -> str:
    """What an error's body says: OpenAI's message, else the text as it is."""
    try:
        body = json.loads(text)
    except ValueError:
        return text
    return said_of(body) if isinstance(body, dict) else text


def said_of(body: dict[str, Any]) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else json.dumps(body)
