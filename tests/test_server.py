"""The embedded server as a process on a tiny target: OpenAI's client unchanged, errors in OpenAI's shape, limits, an
orderly end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from starlette.requests import Request

from eyas.clients.acceptance import read_counters
from eyas.clients.chat import Part, ServerChat, Stats
from eyas.clients.health import engine_of, probe
from eyas.clients.metrics import parse_metrics
from eyas.engine.server.app import make_app, parsed
from eyas.engine.server.errors import ApiError
from eyas.engine.server.protocol import ChatRequest, CompletionRequest
from eyas.engine.server.service import Service
from eyas.launch.log_state import read_log
from eyas.models.target import load_target
from tiny import save_tiny_target

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG: list[Any] = [{"role": "user", "content": "x" * 2000}]
TWO_WAYS = {"add_generation_prompt": True, "continue_final_message": True}
TEMPLATE = {"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
TOOLS_OWN = {"role": "tool", "content": "x", "tool_call_id": "1"}
NOT_SERVED = "unsupported_parameter"
TWO_LIMITS = {"max_tokens": 2, "max_completion_tokens": 3}
LIMITS = ("--max-running", "3", "--max-waiting", "3", "--max-output", "900", "--max-body", "20000", "--grace-s", "20")
FLAGS = ("--ngram", "3", *LIMITS)


class Served:
    """A server with its log."""

    def __init__(self, target: Path, *flags: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=60)
        self.log = target.parent / f"server-{self.port}.log"
        words = ["--target", str(target), "--served-model-name", "tiny", "--dtype", "float32", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eyas.engine.server", *words, *flags], stderr=log, stdout=log, env=os.environ
            )

    def wait(self) -> "Served":
        deadline = time.monotonic() + 120
        while not probe(self.url).ready:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        return self

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.http.close()
        return code

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return self.http.get(path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        kind = {"json": body} if not isinstance(body, bytes) else {"content": body}
        return self.http.post(path, **kind, **more)

    def total(self, name: str) -> float:
        return parse_metrics(self.get("/metrics").text).total(f"eyas:{name}") or 0.0

    def settled(self) -> bool:
        """Whether nothing runs or waits, within a moment."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.total("num_requests_running") == self.total("num_requests_waiting") == 0:
                return True
            time.sleep(0.05)
        return False


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def served(target: Path) -> Iterator[Served]:
    server = Served(target, *FLAGS).wait()
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=HELLO, **{"temperature": 0, "max_tokens": 24} | more)


# The client, unchanged


def test_the_openai_client_lists_answers_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "eyas"
    whole = chat(client)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (45, 24, 69)
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
    assert events[-1].choices == [] and events[-1].usage.total_tokens == 69


def test_a_greedy_answer_is_the_bare_engines(served: Served, target: Path) -> None:
    from eyas.engine.generate import Engine

    engine = Engine(load_target(str(target)), announce=False)
    ids = [7, 9, 100, 50, 60]
    expected = list(engine.generate(ids, 30, ignore_eos=True).ids)
    body = {"prompt": ids, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: served.post("/v1/completions", body).json(), range(6)))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 6
    assert answers[0]["choices"][0]["prompt_token_ids"] == ids


def test_a_completion_continues_text_or_ids_and_echoes(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model="tiny", prompt="abc", max_tokens=8, temperature=0, echo=True)
    ids = [3 + sorted_alphabet().index(letter) for letter in "abc"]
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0)
    assert by_text.choices[0].text == "abc" + by_ids.choices[0].text
    several = client.completions.create(model="tiny", prompt=["abc", "abd"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == by_ids.choices[0].text[: len(several.choices[0].text)]


def sorted_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_seeds_choices_and_penalties_change_what_is_drawn(client: openai.OpenAI) -> None:
    drawn = chat(client, temperature=1.2, seed=3, n=3)
    again = chat(client, temperature=1.2, seed=4)
    texts = [choice.message.content for choice in drawn.choices]
    assert len(set(texts)) == 3 and again.choices[0].message.content == texts[1]
    greedy = chat(client, logprobs=True).choices[0].logprobs.content
    banned = chat(client, logit_bias={"5": 100.0}, logprobs=True).choices[0].logprobs.content
    assert len({note.token for note in banned}) == 1 and len({note.token for note in greedy}) > 1
    frequent = chat(client, frequency_penalty=2.0, presence_penalty=2.0).choices[0].message.content
    assert frequent != chat(client).choices[0].message.content


def test_logprobs_are_listed_most_likely_first(client: openai.OpenAI) -> None:
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 24
    for note in content:
        assert note.logprob == note.top_logprobs[0].logprob < 0 and note.token == note.top_logprobs[0].token
        assert [top.logprob for top in note.top_logprobs] == sorted(
            (top.logprob for top in note.top_logprobs), reverse=True
        )
    listed = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0, logprobs=2).choices[0]
    assert listed.logprobs is not None and listed.logprobs.token_logprobs is not None
    assert len(listed.logprobs.token_logprobs) == 5
    streamed = [e.choices[0].logprobs for e in chat(client, logprobs=True, stream=True) if e.choices]
    assert [n.logprob for one in streamed if one for n in one.content] == [note.logprob for note in content]


def test_tokens_of_one_text_are_told_apart_among_the_likeliest(client: openai.OpenAI) -> None:
    """Half of the tokens are parts of characters, which all read alike."""
    listed = client.completions.create(model="tiny", prompt="a", max_tokens=4, temperature=0, logprobs=20).choices[0]
    assert listed.logprobs is not None and listed.logprobs.top_logprobs is not None
    for token, top in zip(listed.logprobs.tokens or (), listed.logprobs.top_logprobs, strict=True):
        assert len(top) == 20 and token in top
    assert any(re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", name) for name in listed.logprobs.top_logprobs[0])


def test_every_choice_has_its_own_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.5, "seed": 5}
    whole = [
        [(note.token, note.logprob) for note in choice.logprobs.content] for choice in chat(client, **asked).choices
    ]
    streamed: list[list[Any]] = [[], [], []]
    for event in chat(client, stream=True, **asked):
        for choice in event.choices:
            notes = choice.logprobs.content if choice.logprobs else []
            streamed[choice.index] += [(note.token, note.logprob) for note in notes]
    assert streamed == whole and [len(notes) for notes in whole] == [24, 24, 24]
    assert whole[0] != whole[1] != whole[2]


def test_bytes_of_tokens_join_to_the_text_where_characters_are_split(client: openai.OpenAI) -> None:
    for seed in range(4):
        choice = chat(client, temperature=2, seed=seed, logprobs=True, extra_body={"ignore_eos": True}).choices[0]
        joined = bytes(byte for note in choice.logprobs.content for byte in note.bytes or ())
        assert len(joined) >= 24, "a token of this tokenizer is a byte, or a special one's name"
        spelt = bytes(byte for note in choice.logprobs.content if "<|" not in note.token for byte in note.bytes or ())
        assert spelt.decode(errors="replace") == choice.message.content


def test_a_stream_is_the_whole_answer_cut_at_characters_and_stop_strings(client: openai.OpenAI) -> None:
    """Random bytes: half of them are parts of characters that never come, and stop strings lie over several tokens."""
    for seed in range(6):
        asked = {"temperature": 2, "seed": seed, "extra_body": {"ignore_eos": True}}
        text = chat(client, **asked).choices[0].message.content
        for stop in (None, ["never", text[4:7]], [text[9:12]]):
            whole = chat(client, stop=stop, **asked).choices[0]
            parts = [
                e.choices[0].delta.content or "" for e in chat(client, stop=stop, stream=True, **asked) if e.choices
            ]
            assert "".join(parts) == whole.message.content
            assert whole.message.content == (text if stop is None else text[: text.index(stop[-1])])


def test_asyncio_clients_stream_side_by_side(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, words: str) -> str:
        said: list[Any] = [{"role": "user", "content": words}]
        made = client.chat.completions
        stream = await made.create(model="tiny", messages=said, stream=True, temperature=0, max_tokens=40)
        return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])

    async def six() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
            alone = [await ask(client, words) for words in ("a", "b")]
            return alone + list(await asyncio.gather(*(ask(client, words) for words in ("a", "b") * 3)))

    answers = asyncio.run(six())
    assert answers == answers[:2] * 4 and answers[0] != answers[1]


def test_a_client_that_leaves_within_its_body_leaves_no_trace(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt"')
        time.sleep(0.2)
    assert served.settled() and served.get("/health").status_code == 200
    assert "Traceback" not in served.log.read_text()


def test_stops_end_the_answer_and_are_not_part_of_it(client: openai.OpenAI, served: Served) -> None:
    full = chat(client).choices[0].message.content
    stop = full[6:8]
    expected = full[: full.index(stop)]
    stopped = chat(client, stop=["never there", stop])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (expected, "stop")
    assert stopped.choices[0].stop_reason == stop
    streamed = list(chat(client, stop=stop, stream=True))
    assert "".join(e.choices[0].delta.content or "" for e in streamed) == expected
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    ids = served.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    ended = served.post("/v1/completions", body | {"stop_token_ids": [ids[4]]}).json()["choices"][0]
    first = ids.index(ids[4])
    assert ended["token_ids"] == ids[: first + 1] and (ended["finish_reason"], ended["stop_reason"]) == ("stop", ids[4])


def test_what_was_drafted_is_told_by_answer_and_by_metrics(served: Served) -> None:
    before = read_counters(served.url, 0.0)
    body = {"prompt": [9, 8, 7, 6] * 12, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "mark_accepted": True}
    choice = served.post("/v1/completions", body).json()["choices"][0]
    meta, marks = choice["meta_info"], choice["accepted"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"] > 0
    accepted = sum(count * rounds for count, rounds in enumerate(histogram))
    assert accepted == meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    assert "".join(text for text, _ in marks) == choice["text"]
    assert sum(drafted for _, drafted in marks) in range(accepted - 3, accepted + 1)  # the last round may be cut
    after = read_counters(served.url, 1.0)
    assert after is not None
    gained = after.since(before)
    assert gained is not None and gained.rounds == meta["spec_verify_ct"]
    assert gained.accept_length == pytest.approx(meta["accept_length"]) == 1 + accepted / sum(histogram)
    assert gained.survival is not None and 1 + sum(gained.survival) == pytest.approx(gained.accept_length)
    plain = served.post("/v1/completions", body | {"num_steps": 0}).json()["choices"][0]
    assert plain["text"] == choice["text"] and plain["meta_info"]["spec_verify_ct"] == 0


def test_health_models_and_log_are_what_the_clients_read(served: Served) -> None:
    assert probe(served.url).ready and engine_of(served.url) == "embedded"
    state = read_log(served.log)
    assert (state.engine, state.phase, state.state) == ("embedded", "ready", "ready")


def test_chat_talks_to_it_with_marks(served: Served) -> None:
    with closing(ServerChat(served.url, {"max_tokens": 60, "temperature": 0.0})) as chat:
        *parts, stats = chat.answer([{"role": "user", "content": "hello"}])
    assert isinstance(stats, Stats) and stats.tokens == 60 and stats.finish == "length"
    assert stats.accept_length is not None and any(part.accepted for part in parts if isinstance(part, Part))


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", b"{", 400, "invalid_json", None),
        ("chat/completions", b'{"messages": "\xff"}', 400, "invalid_json", None),
        ("chat/completions", b"[" * 9000, 400, "invalid_json", None),
        ("chat/completions", b"", 400, "invalid_json", None),
        ("chat/completions", {"model": "tiny"}, 400, "invalid_value", "messages"),
        ("chat/completions", {"messages": []}, 400, "invalid_value", "messages"),
        ("chat/completions", {"messages": HELLO, "model": "gpt-9"}, 404, "model_not_found", "model"),
        ("chat/completions", {"messages": HELLO, "temprature": 0}, 400, "unknown_parameter", "temprature"),
        ("chat/completions", {"messages": HELLO, "temperature": "0"}, 400, "invalid_value", "temperature"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("chat/completions", {"messages": HELLO, **TWO_LIMITS}, 400, "invalid_value", "max_tokens"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ("chat/completions", {"messages": HELLO, "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ("chat/completions", {"messages": HELLO, "logit_bias": {"259": 1}}, 400, "invalid_value", "logit_bias"),
        ("chat/completions", {"messages": HELLO, "stop_token_ids": [2, 259]}, 400, "invalid_value", "stop_token_ids"),
        ("chat/completions", {"messages": HELLO, "reasoning_effort": "low"}, 400, NOT_SERVED, "reasoning_effort"),
        ("chat/completions", {"messages": HELLO, "n": 7}, 400, "too_many_texts", "n"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 901}, 400, "invalid_value", "max_tokens"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 901}, 400, "invalid_value", "max_comp"),
        ("completions", {"prompt": "a", "max_tokens": 901}, 400, "invalid_value", "max_tokens"),
        ("completions", {"prompt": "a" * 200, "max_tokens": 825}, 400, "context_length_exceeded", "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("completions", {"prompt": ["a"] * 4, "n": 2}, 400, "too_many_texts", "n"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, NOT_SERVED, "suffix"),
        ("chat/completions", {"messages": HELLO, "tools": [TOOL]}, 400, NOT_SERVED, "tools"),
        ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, NOT_SERVED, "tool_choice"),
        ("chat/completions", {"messages": HELLO, "functions": [TOOL]}, 400, NOT_SERVED, "functions"),
        ("chat/completions", {"messages": HELLO, "response_format": JSON}, 400, NOT_SERVED, "response_format"),
        ("chat/completions", {"messages": [TOOLS_OWN]}, 400, NOT_SERVED, "messages.0.tool_call_id"),
        ("chat/completions", {"messages": [PICTURE]}, 400, NOT_SERVED, "messages.0.content.0.image_url"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages.0.co"),
        ("chat/completions", {"messages": HELLO, "stop": ["a", ""]}, 400, "invalid_value", "stop.1"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json", None),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "invalid_value", "temperature"),
        ("chat/completions", {"messages": HELLO, **TWO_WAYS}, 400, "invalid_value", "continue_final_message"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": TEMPLATE}, 400, "invalid_value", "chat_te"),
        ("chat/completions", {"messages": HELLO, "n": 17}, 400, "invalid_value", "n"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1}, 400, NOT_SERVED, "echo"),
        ("completions", {"prompt": [[1], ["a"]]}, 400, "invalid_value", "prompt.1.0"),
        ("chat/completions", {"messages": LONG}, 400, "context_length_exceeded", "prompt"),
        ("completions", {"prompt": [259]}, 400, "invalid_value", "prompt"),
        ("completions", {"prompt": ""}, 400, "empty_prompt", "prompt"),
        ("completions", {"prompt": "a", "best_of": 2}, 400, NOT_SERVED, "best_of"),
        ("completions", {"prompt": "a" * 30000}, 413, "body_too_large", None),
    ],
)  # fmt: skip
def test_bad_requests_are_told_in_openais_shape(
    served: Served, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    answer = served.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, error["type"])
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": []}, "prompt: List should have at least 1 item after validation, not 0"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop: List should have at most 16 items after validation, not 17"),
        ({"prompt": 5}, "prompt: Input should be a valid string"),
        ({"prompt": "a", "n": 10**30}, "n: Input should be less than or equal to 16"),
        ({"prompt": ["a"] * 2000}, "prompt: List should have at most 16 items after validation, not 2000"),
        ({"prompt": [[1]] * 2000}, "prompt: List should have at most 16 items after validation, not 2000"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ({"prompt": "a", "stop": [5]}, "stop.0: Input should be a valid string"),
    ],
)
def test_of_several_forms_the_one_that_was_meant_is_explained(body: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(CompletionRequest, json.dumps(body).encode())
    assert refused.value.message == message


NOTHING = (
    *("n", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos", "temperature", "logit_bias", "seed"),
    *("max_tokens", "logprobs", "return_token_ids", "mark_accepted", "user", "suffix", "reasoning_effort", "tools"),
    *("response_format", "best_of", "echo", "add_special_tokens", "add_generation_prompt", "of_no_known_protocol"),
)


def test_null_asks_for_nothing_wherever_it_stands() -> None:
    none = dict.fromkeys(NOTHING)
    plain = parsed(CompletionRequest, json.dumps({"prompt": "a", **none}).encode())
    assert (plain.prompts, plain.choices, plain.limit, plain.usual, plain.notes) == (1, 1, None, None, None)
    said = [{"role": "assistant", "content": "x", "refusal": None, "audio": None, "tool_call_id": None}, *HELLO]
    chatty = parsed(ChatRequest, json.dumps({"messages": said, **none}).encode())
    assert chatty.messages[0].model_fields_set == {"role", "content", "refusal", "audio"}
    with pytest.raises(ApiError, match="prompt: Input should be a valid string"):
        parsed(CompletionRequest, b'{"prompt": null}')


@pytest.mark.parametrize("key", ["messages", "tools", "self", "conversation", "conversations", "tokenize", "padding"])
def test_what_renders_the_template_is_no_variable_of_it(served: Served, key: str) -> None:
    answer = served.post("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {key: 1}})
    words = f"chat_template_kwargs: `{key}` is the server's to set, and no variable of the target's template."
    assert answer.status_code == 400 and answer.json()["error"]["message"] == words
    fine = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False, "kwargs": 1}}
    assert served.post("/v1/chat/completions", fine).status_code == 200


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"n": 7},
            "7 texts are asked for (prompts times n); this server has 6 at a time at most: 3 at work, 3 waiting.",
        ),
        ({"stop_token_ids": [300]}, "stop_token_ids: token 300 is beyond the vocabulary of 259 (0 to 258)."),
        ({"prompt": [7, 259]}, "prompt: token 259 is beyond the vocabulary of 259 (0 to 258)."),
        (
            {"max_tokens": 901},
            "max_tokens: 901 is too large: this server's answers have 900 tokens at most (--max-output).",
        ),
        (
            {"prompt": [7] * 1000, "max_tokens": 25},
            "max_tokens: 25 is too large: this model's maximum context length is 1024 tokens, of which the prompt has "
            "1000: 24 are left.",
        ),
    ],
)
def test_what_could_never_be_served_is_refused_for_good_and_says_how_much_could(
    served: Served, more: dict[str, Any], message: str
) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", **more})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_without_a_limit_of_ones_own_an_answer_is_as_long_as_there_is_room(served: Served) -> None:
    def tokens(body: dict[str, Any], path: str = "completions") -> tuple[int, str]:
        answer = served.post(f"/v1/{path}", {"temperature": 0, "ignore_eos": True, **body}).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert tokens({"prompt": [7] * 10}) == (16, "length")
    assert tokens({"prompt": [7] * 1020}) == (4, "length"), "16 would be usual"
    assert tokens({"prompt": [7] * 1020, "max_tokens": 4}) == (4, "length")
    assert tokens({"prompt": [7] * 10, "max_tokens": None}) == (900, "length")
    assert tokens({"messages": HELLO}, "chat/completions") == (900, "length")
    assert tokens({"messages": [{"role": "user", "content": "x" * 940}]}, "chat/completions")[0] < 84


def test_an_echo_alone_is_the_prompt_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["abc", "d"], "max_tokens": 0, "echo": True}
    whole = client.completions.create(**asked, n=2)
    assert [choice.text for choice in whole.choices] == ["abc", "abc", "d", "d"]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 0)
    choices = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
    said = [(choice.index, choice.text, choice.finish_reason) for choice in choices]
    assert said == [(0, "abc", None), (0, "", "length"), (1, "d", None), (1, "", "length")]


def test_unknown_paths_and_methods_are_told_too(served: Served, client: openai.OpenAI) -> None:
    assert served.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    wrong = served.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="Unknown field: toools"):
        chat(client, extra_body={"toools": []})
    assert chat(client, tools=[], tool_choice="none", response_format={"type": "text"}).choices[0].message.content


def test_a_full_house_is_told_at_once_and_disturbs_nobody(served: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "temperature": 0, "ignore_eos": True, "num_steps": 0}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: served.post("/v1/completions", body), range(12)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429} and statuses.count(200) >= 6
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (
        refused.json()["error"]["message"] == "6 texts are at work or waiting, of 6 at a time: no room for 1 more now."
    )
    assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"] == "1"
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1
    assert served.settled() and probe(served.url).ready


def test_a_client_that_goes_away_cancels_its_text(served: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "temperature": 0, "ignore_eos": True, "num_steps": 0}
    before = served.total("generation_tokens_total")
    for stream in (True, False):
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
            words = json.dumps(body | {"stream": stream}).encode()
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(words), words)
            )
            while served.total("num_requests_running") == 0:
                time.sleep(0.01)
        assert served.settled()
    assert served.total("generation_tokens_total") - before < 1800, "neither was made to its end"


def test_nothing_is_left_of_hundreds_of_requests(served: Served) -> None:
    process = psutil.Process(served.process.pid)
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}

    def ask(index: int) -> int:
        more: dict[str, Any] = [{}, {"stream": True}, {"max_tokens": "x"}, {"n": 2}][index % 4]
        return served.post("/v1/completions", body | more).status_code

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(60)))
        assert served.settled()
        before = process.num_fds(), process.num_threads(), served.total("kv_cache_rows_remembered")
        list(pool.map(ask, range(240)))
    assert served.settled()
    deadline = time.monotonic() + 10
    while process.num_fds() > before[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    after = process.num_fds(), process.num_threads(), served.total("kv_cache_rows_remembered")
    assert after[0] <= before[0] and after[1:] == before[1:]
    assert served.total("kv_cache_rows_used") == 0


# Start and end


@pytest.mark.parametrize(
    ("given", "right"),
    [("Bearer s\u00e9cret", True), ("bearer s\u00e9cret", True), ("Bearer s\u00e9creT", False), ("Bearer ", False),
     ("s\u00e9cret", False), ("Basic s\u00e9cret", False), (None, False)],
)  # fmt: skip
def test_a_key_is_asked_for_where_one_is_set(target: Path, given: str | None, right: bool) -> None:
    headers = [] if given is None else [(b"authorization", given.encode())]
    request = Request({"type": "http", "headers": headers})
    service = Service(load_target(str(target)), "tiny", None, api_key="s\u00e9cret")  # pyrefly: ignore
    if right:
        service.check_key(request)
    else:
        with pytest.raises(ApiError, match="Incorrect API key") as refused:
            service.check_key(request)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_without_the_key_everything_under_v1_is_refused_in_openais_shape(target: Path) -> None:
    service = Service(load_target(str(target)), "tiny", None, api_key="secret")  # pyrefly: ignore

    async def ask(method: str, path: str, **headers: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=make_app(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.request(method, path, headers=headers)

    for method, path in (
        ("GET", "models"),
        ("GET", "models/tiny"),
        ("POST", "completions"),
        ("POST", "chat/completions"),
    ):
        answer = asyncio.run(ask(method, f"/v1/{path}"))
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert asyncio.run(ask("GET", "/v1/models", authorization="Bearer secret")).json()["data"][0]["id"] == "tiny"
    description = asyncio.run(ask("GET", "/openapi.json")).json()
    assert description["security"] == [{"key": []}]
    asked = description["components"]["schemas"]["ChatRequest"]
    assert "unsupported" in asked["description"] and "nsupported" in asked["properties"]["tools"]["description"]


def test_a_port_that_is_taken_is_found_before_weights_are_loaded(target: Path, served: Served) -> None:
    words = ["--target", str(target), "--port", str(served.port)]
    done = subprocess.run(
        [sys.executable, "-m", "eyas.engine.server", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "failed=port_busy" in done.stderr and "phase=weights" not in done.stderr


def test_an_end_that_cannot_wait_tells_its_clients(target: Path) -> None:
    server = Served(target, "--grace-s", "0.3").wait()
    body = {"prompt": [5, 6, 7], "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "num_steps": 0}
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(server.post, "/v1/completions", body | {"stream": bool(i % 2)}) for i in range(12)]
        while server.total("num_requests_running") < 12:
            time.sleep(0.01)
        assert server.stop() == 0
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers[0::2]} == {503}
    assert {answer.json()["error"]["code"] for answer in answers[0::2]} == {"shutting_down"}
    for answer in answers[1::2]:
        *_, error, done, end = answer.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (done, end) == ("data: [DONE]", "")
    assert "Traceback" not in server.log.read_text()


def test_an_end_is_orderly(served: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "temperature": 0, "ignore_eos": True, "num_steps": 0}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, "/v1/completions", body)
        while served.total("num_requests_running") == 0:
            time.sleep(0.01)
        assert served.stop() == 0
        assert running.result().json()["usage"]["completion_tokens"] == 900, "what runs is finished"
    text = served.log.read_text()
    phases = re.findall(r"\[eyas\] (?:phase=)?(\w+)", text)
    assert phases == ["args", "weights", "compile", "kv_cache", "warmup", "http", "ready", "stopped"]
    assert read_log(served.log).state == "stopped"
