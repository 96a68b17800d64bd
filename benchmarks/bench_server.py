"""The embedded server on the default target, as paired ratios of one run; writes bench/out/server.json.

    python benchmarks/bench_server.py [--draft shipped] [--target T] [--dtype bfloat16] [--tokens 96] [--rounds 3]
    python benchmarks/bench_server.py --soak 300 [--idle 200] [--active 16]

Every round: one stream by the bare engine in this process and one by the server, eight streams plain and eight with
speculation, eight prompts of 200 tokens at once; the order in a pair alternates. The soak keeps idle connections open
while active ones ask, cancel and read slowly, compares every whole greedy answer with the lone run's, and counts
memory, cache rows and file handles before and after.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil

from eyas.clients.health import probe
from eyas.clients.metrics import parse_metrics
from eyas.engine.generate import Engine
from eyas.measure.prompts import load_test_set
from eyas.models.target import DEFAULT_TARGET, load_target
from eyas.run import machine, versions

OUT = Path("bench/out/server.json")
STREAMS, PROMPT = 8, 200
EVENT, TOKENS = re.compile(rb"data: ({.*})"), re.compile(rb'"token_ids":\[\d')
BARE, ONE = "bare engine, one stream", "server, one stream"
PLAIN, SPECULATIVE = "eight streams, plain", "eight streams, speculative"
Json = dict[str, Any]


class Server:
    """The server as a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = ["--target", options.target, "--dtype", options.dtype, "--port", str(port)]
        words += ["--draft", str(options.draft)] if options.draft else ["--ngram", "4"]
        self.process = subprocess.Popen([sys.executable, "-m", "eyas.engine.server", *words])
        while not probe(self.url).ready:
            if self.process.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.2)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


async def answer(url: str, ids: list[int], tokens: int, **more: Any) -> Json:
    """One streamed answer: its token ids, when its first and its last token came, in seconds since it was asked.

    Bytes are kept and read at the end: a client's own work on the same cores is not the server's (an ordinary client
    was seen to spend three times what the server spends on an event).
    """
    asked = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(asked | {"stream": True} | more).encode()
    started = time.perf_counter()
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"the server answered {status!r}")
        parts = list[tuple[float, bytes]]()
        while part := await reader.read(2**16):
            parts.append((time.perf_counter() - started, part))
    finally:
        writer.close()
    came = [at for at, part in parts if TOKENS.search(part)]
    events = [json.loads(line) for line in EVENT.findall(b"".join(part for _, part in parts))]
    got = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    return {"ids": got, "first": came[0], "last": came[-1]}


async def together(url: str, prompts: list[list[int]], tokens: int, **more: Any) -> tuple[float, list[Json]]:
    """Total tokens a second of all prompts at once, prefills included, and the answers."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(answer(url, ids, tokens, **more) for ids in prompts))
    return sum(len(one["ids"]) for one in answers) / (time.perf_counter() - started), list(answers)


async def measure(options: argparse.Namespace, server: Server, engine: Engine, prompts: list[list[int]]) -> Json:
    """Each round all ways in turn, the order rotating."""
    rates: dict[str, list[float]] = {}
    firsts: list[float] = []
    alone: dict[int, list[int]] = {}
    for ids in prompts[:2]:
        await answer(server.url, ids, 8)

    async def bare() -> None:
        made = engine.generate(prompts[0], options.tokens, ignore_eos=True)
        alone[0] = list(made.ids)
        keep(BARE, (len(made.ids) - 1) / made.seconds_decode)

    async def one() -> None:
        told = await answer(server.url, prompts[0], options.tokens, num_steps=0)
        same.append(told["ids"] == alone.setdefault(0, told["ids"]))
        keep(ONE, (len(told["ids"]) - 1) / (told["last"] - told["first"]))

    async def eight(name: str, **more: Any) -> None:
        rate, answers = await together(server.url, prompts[:STREAMS], options.tokens, **more)
        keep(name, rate)
        for index, told in enumerate(answers):
            same.append(told["ids"] == alone.setdefault(index, told["ids"]))

    async def first() -> None:
        _, answers = await together(server.url, [fresh(engine.target.vocab_size) for _ in range(STREAMS)], 2)
        firsts.extend(told["first"] for told in answers)

    def keep(name: str, rate: float) -> None:
        rates.setdefault(name, []).append(rate)

    same: list[bool] = []
    pairs: list[list[Callable[[], Awaitable[None]]]] = [
        [bare, one],
        [lambda: eight(PLAIN, num_steps=0), lambda: eight(SPECULATIVE)],
        [first],
    ]
    for index in range(options.rounds):
        for pair in pairs:
            for way in pair if index % 2 else pair[::-1]:
                await way()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    base = middle[BARE]
    return {
        "tokens_s": middle,
        "ratios_to_bare_engine": {name: round(rate / base, 3) for name, rate in middle.items()},
        "paired": {
            "server over bare": paired(rates[ONE], rates[BARE]),
            "speculative over plain": paired(rates[SPECULATIVE], rates[PLAIN]),
        },
        "first_token_s_of_eight": {"median": statistics.median(firsts), "max": max(firsts)},
        "same_answers": all(same),
    }


def paired(ours: list[float], theirs: list[float]) -> Json:
    """Of the rounds' own ratios the median and the quartiles."""
    low, median, high = statistics.quantiles(
        [a / b for a, b in zip(ours, theirs, strict=True)], n=4, method="inclusive"
    )
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def fresh(size: int) -> list[int]:
    """A prompt that no cache has seen."""
    return [random.randrange(10, size) for _ in range(PROMPT)]


def client(url: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=500, max_keepalive_connections=500)
    return httpx2.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits)


async def soak(options: argparse.Namespace, server: Server, prompts: list[list[int]]) -> Json:
    """Idle connections beside active ones that ask, cancel and read slowly."""
    host, port = server.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(options.idle)]
    process = psutil.Process(server.process.pid)
    counts = {"answers": 0, "differing": 0, "cancelled": 0, "slow": 0}
    async with client(server.url) as http:
        expected = [(await answer(server.url, ids, 48))["ids"] for ids in prompts]
        deadline = time.monotonic() + options.soak

        async def work(number: int) -> None:
            draws = random.Random(number)
            while time.monotonic() < deadline:
                index = draws.randrange(len(prompts))
                kind = draws.random()
                if kind < 0.2:
                    task = asyncio.ensure_future(answer(server.url, prompts[index], 48))
                    await asyncio.sleep(draws.random())
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    counts["cancelled"] += 1
                elif kind < 0.3:
                    await slowly(http, prompts[index])
                    counts["slow"] += 1
                else:
                    told = await answer(server.url, prompts[index], 48)
                    counts["answers"] += 1
                    counts["differing"] += told["ids"] != expected[index]

        async def early() -> Json:
            """When everything has been seen once, so that what is kept for good is there."""
            await asyncio.sleep(0.4 * options.soak)
            return facts(process, server.url)

        before, *_ = await asyncio.gather(early(), *(work(number) for number in range(options.active)))
        await asyncio.sleep(1)
        after = facts(process, server.url)
    for _, writer in idle:
        writer.close()
    return {
        "seconds": options.soak,
        "idle": options.idle,
        "active": options.active,
        **counts,
        "before": before,
        "after": after,
    }


async def slowly(http: httpx2.AsyncClient, ids: list[int]) -> None:
    """A client that reads a line now and then."""
    body = {"prompt": ids, "max_tokens": 48, "temperature": 0, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            await asyncio.sleep(0.05)


def facts(process: psutil.Process, url: str) -> Json:
    metrics = parse_metrics(httpx2.get(url + "/metrics", trust_env=False).text)
    names = ("kv_cache_rows_used", "num_requests_running", "num_requests_waiting")
    rows = {name: metrics.total(f"eyas:{name}") for name in names}
    return {
        "rss_mb": process.memory_info().rss // 2**20,
        "handles": process.num_fds(),
        "threads": process.num_threads(),
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds; 0 measures instead")
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--active", type=int, default=16)
    options = parser.parse_args()
    target = load_target(options.target, dtype=options.dtype)
    tokenizer: Any = target.tokenizer
    rows = load_test_set()[::20][:STREAMS]
    texts = [
        tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    server = Server(options)
    try:
        if options.soak:
            found = asyncio.run(soak(options, server, prompts))
        else:
            found = asyncio.run(measure(options, server, Engine(target, None, announce=False), prompts))
    finally:
        found_rc = server.stop()
    found |= {"exit": found_rc, "machine": machine(), "versions": versions(), "dtype": options.dtype}
    print(json.dumps(found, indent=1))
    path = OUT.with_stem("soak") if options.soak else OUT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
