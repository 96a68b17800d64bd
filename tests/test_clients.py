"""Clients of servers: one definition of accept length whatever the source; metrics as text; readiness by status."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.clients.acceptance import (
    Counters,
    Trend,
    counters_of,
    from_drafted,
    from_histogram,
    from_line,
    read_counters,
)
from eyas.clients.address import address
from eyas.clients.health import Prober, client, engine_of, get, probe
from eyas.clients.metrics import parse_metrics
from eyas.clients.openai import OpenAI
from eyas.errors import InputError

CASES = Path(__file__).parents[1].parent / "shared" / "cases"
VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
vllm:generation_tokens_total{engine="0",model_name="m"} 250.0
"""
SGLANG = """sglang:spec_verify_calls_total{model_name="m"} 400.0
sglang:generation_tokens_total{model_name="m",streaming="false"} 600.0
sglang:generation_tokens_total{model_name="m",streaming="true"} 400.0
sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.4
"""


def test_an_accept_length_is_one_plus_accepted_over_rounds_and_one_plus_the_sum_of_survival() -> None:
    counters = counters_of(parse_metrics(VLLM), time=10.0)
    assert counters is not None
    found = counters.since(Counters(0.0))
    assert found is not None
    assert (found.accept_length, found.rounds, found.survival) == (2.5, 100, (0.8, 0.5, 0.2))
    assert found.accept_length == pytest.approx(1 + sum(found.survival or ()))
    assert found.conditional == pytest.approx((0.8, 0.625, 0.4))
    assert found.tokens_s == 25.0 and found.exact


def test_an_interval_is_the_difference_of_two_counts_and_a_restart_begins_anew() -> None:
    early = Counters(0.0, 100, 150, (80, 50, 20), 250)
    late = Counters(10.0, 200, 250, (150, 80, 20), 450)
    found = late.since(early)
    assert found is not None
    assert (found.accept_length, found.rounds, found.survival, found.tokens_s) == (2.0, 100, (0.7, 0.3, 0.0), 20.0)
    restarted = Counters(20.0, 10, 5, (5, 0, 0), 15).since(late)
    assert restarted is not None and (restarted.accept_length, restarted.rounds) == (1.5, 10)
    assert late.since(late) is None


def test_sglang_counters_include_the_prefill_tokens_and_say_so() -> None:
    counters = counters_of(parse_metrics(SGLANG), time=10.0)
    assert counters is not None
    found = counters.since(None)
    assert found is not None
    assert (found.accept_length, found.rounds, found.exact) == (2.5, 400, False)
    assert "prefill" in found.source


def test_a_sample_that_is_no_number_is_passed_over() -> None:
    odd = "vllm:spec_decode_num_drafts_total NaN\nvllm:spec_decode_num_accepted_tokens_total +Inf\nx 1e999\ny 2\n"
    assert parse_metrics(odd).samples == {"y": [({}, 2.0)]}
    assert counters_of(parse_metrics(odd), 0.0) is None


def test_a_server_without_speculation_has_no_counters() -> None:
    assert counters_of(parse_metrics("vllm:generation_tokens_total 12\n"), 0.0) is None
    assert counters_of(parse_metrics("sglang:spec_accept_length 0.0\nsglang:generation_tokens_total 5\n"), 0.0) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(sum))
def test_a_histogram_of_accepted_tokens_gives_the_mean_and_survival(histogram: list[int]) -> None:
    found = from_histogram(histogram)
    assert found is not None and found.survival is not None
    rounds = [count for count, times in enumerate(histogram) for _ in range(times)]
    assert found.accept_length == pytest.approx(1 + sum(rounds) / len(rounds))
    assert 1 <= found.accept_length <= len(histogram)
    assert list(found.survival) == sorted(found.survival, reverse=True)
    for index, share in enumerate(found.survival):
        assert share == pytest.approx(sum(one > index for one in rounds) / len(rounds))


def test_both_engines_log_lines_give_the_same_definition() -> None:
    sglang = from_line(
        "[2026-11-29 18:00:00 TP0] Decode batch, #running-req: 1, #token: 9, token usage: 0.00, accept len: 2.50, "
        "accept rate: 0.50, cuda graph: True, gen throughput (token/s): 120.50, #queue-req: 0"
    )
    vllm = from_line(
        "(APIServer pid=1) INFO 11-29 18:00:00 [metrics.py:1] SpecDecoding metrics: Mean acceptance length: 2.50, "
        "Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: 150 tokens, "
        "Drafted: 300 tokens, "
        "Per-position acceptance rate: 0.800, 0.500, 0.200, Avg Draft acceptance rate: 50.0%"
    )
    assert sglang is not None and vllm is not None
    assert sglang.accept_length == vllm.accept_length == 2.5
    assert (sglang.tokens_s, vllm.survival, vllm.rounds) == (120.5, (0.8, 0.5, 0.2), 100)
    assert from_line("accept len: 0.00, gen throughput (token/s): 0.0") is None
    assert from_line("The server is fired up and ready to roll!") is None


@pytest.mark.skipif(not CASES.is_dir(), reason="needs the case files beside the repository")
def test_definitions_of_the_field_convert_to_ours() -> None:
    chain, sglang = json.loads((CASES / "bench" / "E-04_accept_length_definitions.json").read_text())["cases"]
    found = from_drafted(chain["drafts"], chain["draft_tokens"], chain["accepted"])
    assert found is not None
    assert found.accept_length == pytest.approx(chain["al_with_bonus"], abs=1e-3)
    assert found.accept_length - 1 == pytest.approx(chain["al_without"], abs=1e-3)
    assert chain["accepted"] / chain["draft_tokens"] == pytest.approx(chain["acceptance_rate"], abs=1e-4)
    served = Counters(1.0, sglang["spec_verify_ct"], None, None, sglang["completion_tokens"]).since(None)
    assert served is not None and served.accept_length == sglang["al_sglang"]


def test_more_tokens_than_were_drafted_are_no_acceptance() -> None:
    with pytest.raises(ValueError, match="accepted 7 of 6"):
        from_drafted(3, 6, 7)
    assert from_drafted(0, 0, 0) is None


def test_a_trend_compares_the_later_half_with_the_earlier() -> None:
    trend = Trend()
    for length in (2.0, 2.0, 2.0):
        trend = trend.add(length)
    assert trend.words == "no trend yet"
    assert trend.add(2.0).words == "steady"
    assert trend.add(1.0).words == "falling by 0.50"


def test_prometheus_text_keeps_escaped_labels_and_passes_over_what_is_no_sample() -> None:
    text = '# TYPE x counter\nx{a="q\\"}b\\n",c="1"} 2.5 1700000000\nx 1\nnonsense\ny NaN\nz{a="1"} word\n'
    metrics = parse_metrics(text)
    assert metrics.samples["x"] == [({"a": 'q"}b\n', "c": "1"}, 2.5), ({}, 1.0)]
    assert metrics.total("x") == 3.5 and metrics.by("x", "c") == {"1": 2.5} and metrics.total("z") is None


class Handler(BaseHTTPRequestHandler):
    """`answers`: path to (status, body). `hits` are the paths asked for."""

    answers: dict[str, tuple[int, str]]
    hits: list[str]

    def do_GET(self) -> None:
        self.hits.append(self.path)
        status, body = self.answers.get(self.path, (404, ""))
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "3")
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Own", (Handler,), {"answers": {}, "hits": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", handler
        http.shutdown()
        thread.join()


def test_readiness_is_a_status_and_never_a_word_in_a_body(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.answers = {"/ready": (503, "ready healthy ok"), "/health": (200, "not ready")}
    assert not probe(url).ready
    handler.answers = {"/ready": (200, "starting")}
    assert probe(url).ready


def test_a_ready_sglang_is_asked_nothing_that_costs_a_token(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.answers = {"/ready": (200, "")}
    prober = Prober(url)
    assert [prober.wait().ready for _ in range(3)] == [True] * 3
    assert handler.hits == ["/ready"] * 3
    prober.close()
    # an older release has no /ready: /health is asked until it says 200, and not once more
    handler.hits, handler.answers = [], {"/health": (503, ""), "/model_info": (200, "{}")}
    prober = Prober(url)
    assert not prober.wait().ready
    handler.answers["/health"] = (200, "")
    assert prober.wait().ready and prober.wait().ready and prober.wait().ready
    assert handler.hits == ["/ready", "/health", "/health", "/model_info", "/model_info", "/model_info"]
    prober.close()


def test_vllm_is_asked_for_its_health(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.answers = {"/health": (200, "")}
    prober = Prober(url)
    assert prober.wait().ready and prober.wait().ready
    assert handler.hits[-1] == "/health" and handler.hits.count("/ready") == 1
    prober.close()


def test_a_body_that_does_not_end_is_left_and_its_status_stands(
    server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    handler.answers = {"/health": (200, "x" * 300_000)}
    monkeypatch.setattr("eyas.clients.health.WHOLE_S", -1.0)
    with client(url) as http:
        status, body, error = get(http, "/health")
    assert (status, error) == (200, None) and 0 < len(body) < 300_000


def test_nobody_there_is_an_answer_too() -> None:
    health = probe("http://127.0.0.1:9")
    assert health.status is None and "ConnectError" in str(health.error)


def test_an_engine_is_known_by_who_owns_its_models(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    for owner, engine in (("vllm", "vllm"), ("sglang", "sglang"), ("eyas", "embedded"), ("someone", None)):
        handler.answers = {"/v1/models": (200, json.dumps({"data": [{"id": "m", "owned_by": owner}]}))}
        assert engine_of(url) == engine
    handler.answers = {"/v1/models": (200, "[]")}
    assert engine_of(url) is None


def test_server_info_serves_where_metrics_are_off(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    states = [{"avg_spec_accept_length": 2.0}, {"avg_spec_accept_length": 3.0}, {"avg_spec_accept_length": None}]
    handler.answers = {"/server_info": (200, json.dumps({"internal_states": states}))}
    counters = read_counters(url, 1.0)
    assert counters is not None
    found = counters.since(None)
    assert found is not None and (found.accept_length, found.exact, found.rounds) == (2.5, False, None)


def test_chat_whole_and_streamed_give_text_counts_and_reason(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    whole = {
        "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    handler.answers = {
        "/v1/models": (200, json.dumps({"data": [{"id": "m"}]})),
        "/v1/chat/completions": (200, json.dumps(whole)),
    }
    with OpenAI(url) as api:
        answer = api.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
        assert (answer.text, answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (
            "Hello",
            3,
            2,
            "stop",
        )
        events = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "Hel"}}]},
            {"choices": [{"delta": {"content": "lo"}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        handler.answers["/v1/chat/completions"] = (200, body)
        answer = api.stream([{"role": "user", "content": "Hi"}], max_tokens=2)
    assert (answer.text, answer.completion_tokens, answer.finish_reason) == ("Hello", 2, "length")
    assert answer.first_token_s is not None and answer.first_token_s <= answer.seconds


@pytest.mark.parametrize(
    ("status", "body", "key", "got", "next"),
    [
        (
            401,
            {"error": {"message": "Incorrect key."}},
            None,
            "401: Incorrect key.",
            "export EYAS_API_KEY=KEY, the server's",
        ),
        (401, {"error": "Unauthorized"}, "k", '401: {"error": "Unauthorized"}', "the one that was sent is another"),
        (404, {"error": {"message": "no model m"}}, None, "404: no model m", "/v1/models lists the models"),
        (400, {"error": {"message": "too long"}}, None, "400: too long", "change what the server names"),
        (429, {}, None, "429: {}", "the same again in 3 s: the server is full"),
        (503, {"error": {"message": "loading"}}, None, "503: loading", "until it is ready"),
        (500, {"error": {"message": "a\n  fault"}}, None, "500: a fault", "--once"),
        (200, [], None, "no JSON object: '[]'", "--url with the address that /v1/models lies behind"),
    ],
)
def test_an_error_of_a_server_says_what_helps_against_its_status(
    server: tuple[str, type[Handler]], status: int, body: object, key: str | None, got: str, next: str
) -> None:
    url, handler = server
    handler.answers = {"/v1/chat/completions": (status, json.dumps(body))}
    with OpenAI(url + "/v1/", model="m", key=key) as api, pytest.raises(InputError) as refused:
        api.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
    assert refused.value.where == f"{url}/v1/chat/completions"
    assert refused.value.got == got and next in refused.value.next


def test_what_is_no_such_server_is_told_apart_from_one_that_refuses(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.answers = {"/v1/models": (200, "<!doctype html>")}
    told = {}
    for typed in (url, url.replace("http://", "https://"), "127.0.0.1:9", url + "/elsewhere"):
        with OpenAI(typed, timeout_s=5.0) as api, pytest.raises(InputError) as refused:
            api.models()
        told[typed] = refused.value
    page, tls, nobody, elsewhere = told.values()
    assert page.got == "no JSON: '<!doctype html>'" and "/v1/models lies behind" in page.next
    assert tls.next == f"--url {url}, if the server speaks plain HTTP"
    assert nobody.where == "http://127.0.0.1:9/v1/models" and "eyas serve starts one" in nobody.next
    assert elsewhere.got.startswith("404") and "/v1/models lies behind" in elsewhere.next


@pytest.mark.parametrize(
    ("typed", "url", "port"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", 8000),
        ("localhost:8000/v1", "http://localhost:8000", 8000),
        ("https://a.example/models/v1/", "https://a.example/models", 443),
        ("http://[::1]:30000/", "http://[::1]:30000", 30000),
    ],
)
def test_an_address_is_read_as_it_is_typed(typed: str, url: str, port: int) -> None:
    assert (address(typed).url, address(typed).port) == (url, port)


@pytest.mark.parametrize("typed", ["nonsense", "ftp://x", "http://[bad", "http://", "http://a:99999", ""])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(InputError, match="a server's address"):
        address(typed)


def test_a_refusing_server_is_an_error_that_names_it(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.answers = {"/v1/chat/completions": (400, "max_tokens is too large")}
    with OpenAI(url, model="m") as api, pytest.raises(InputError, match="max_tokens is too large"):
        api.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
