"""What a healthy start says: the milestones of each engine, and the order of the phases.

A milestone is matched from the start of a message, its head taken off (launch/lines.py): words inside a request's text
or a configuration are no milestone. Sources: SGLang 0.5.11 to 0.5.23 and vLLM 0.20 to 0.33, files named per block;
llama.cpp's server as of 2026; Eyas's own lines in launch/own_lines.py.
"""

import re
from collections import defaultdict
from typing import Literal, NamedTuple

from eyas.launch.said_taps import RUNNERS
from eyas.launch.said_taps import STARTS as SAYS_TAPS

Engine = Literal["sglang", "vllm", "embedded", "llamacpp"]

LOADING = ["args", "distributed", "weights", "draft_weights"]
SERVING = ["http", "warmup", "ready"]
ORDERS: dict[Engine, list[str]] = {
    "sglang": [*LOADING, "kv_cache", "compile", "graphs", *SERVING],
    "vllm": [*LOADING, "compile", "kv_cache", "graphs", *SERVING],
    "embedded": [*LOADING, "compile", "kv_cache", "graphs", "warmup", "http", "ready"],
    "llamacpp": [
        "args",
        "distributed",
        "http",
        "weights",
        "draft_weights",
        "kv_cache",
        "compile",
        "graphs",
        "warmup",
        "ready",
    ],
}
"""vLLM compiles while it profiles, before it sizes the KV cache, as ours measures its paths before; llama.cpp opens its
port before it loads."""

STATES = {"args": "starting", "distributed": "starting", "weights": "loading", "draft_weights": "loading"}
STATES |= dict.fromkeys(("kv_cache", "compile", "graphs", "http", "warmup"), "warming") | {"ready": "ready"}
"""The state that a phase stands for, while nothing went wrong."""


class Milestone(NamedTuple):
    """`act`: start (what was before is another server's), enter (the phase), load (weights, the target's or the
    draft's), done (its work is over, the phase is not), taps (the same, and which layers are read), serve (a server at
    work: ready if its start was not seen), stop (it was told to end)."""

    engine: Engine | None
    phase: str
    act: Literal["start", "enter", "load", "done", "taps", "serve", "stop"]
    starts: tuple[str, ...]
    """The message begins with one of these,"""
    then: str = ""
    """and goes on like this (a regular expression)."""


GRAPH = r"(?:[\w-]+ ){0,5}?(?:cuda|CUDA|CPU|XPU|NPU|cpu) graph "
DECODE = r"(?: \[\d+\])?[.,] #running-req: \d{1,6}, .*gen throughput \(token/s\): \d+\.\d+, #queue-req: \d{1,6}"

MILESTONES = (
    # SGLang: entrypoints/engine.py, distributed/bootstrap.py, model_executor/model_runner.py
    Milestone("sglang", "args", "start", ("server_args=",)),
    Milestone("sglang", "distributed", "enter", ("Init parallel begin.", "Init torch distributed begin.")),
    Milestone("sglang", "distributed", "enter", ("sglang is using nccl==",)),
    Milestone("sglang", "distributed", "done", ("Init parallel ends.", "Init torch distributed ends.")),
    Milestone("sglang", "distributed", "done", ("Memory baseline taken. mem usage=",)),
    Milestone("sglang", "weights", "load", ("Load weight begin. avail mem=",)),
    Milestone("sglang", "weights", "done", ("Load weight end.",)),
    # SGLang: mem_cache/memory_pool.py, swa_memory_pool.py, kv_cache_configurator.py
    Milestone("sglang", "kv_cache", "enter", ("KV Cache ", "Mamba Cache "), r"(?:is allocated|VA upper bound)\. "),
    Milestone("sglang", "kv_cache", "enter", ("SWAKVPool mem usage: ", "SWAKVPool VA upper bound: ")),
    Milestone("sglang", "kv_cache", "done", ("Memory pool end. avail mem=",)),
    # SGLang: cuda_graph_setup.py, eagle_worker_v2.py; older "Capture cuda graph begin."
    Milestone("sglang", "graphs", "enter", ("Capture ",), GRAPH + r"begin\."),
    Milestone("sglang", "graphs", "done", ("Capture ",), GRAPH + r"end\."),
    # SGLang: entrypoints/http_server.py, scheduler_components/metrics_reporter.py
    Milestone("sglang", "warmup", "enter", ("Prefill batch",), r"[.,]? (?:\[\d+\], )?#new-seq: \d"),
    Milestone("sglang", "ready", "enter", ("The server is fired up and ready to roll!",), "$"),
    Milestone("sglang", "ready", "serve", ("Decode batch",), DECODE),
    # vLLM: entrypoints/common/startup.py, v1/engine/core.py, distributed/parallel_state.py
    Milestone("vllm", "args", "enter", ("vLLM API server version ", "vLLM server version ")),
    Milestone("vllm", "args", "start", ("non-default args: {",)),
    Milestone("vllm", "distributed", "enter", ("Initializing a V1 LLM engine (v", "Initializing a V0 LLM engine (v")),
    Milestone("vllm", "distributed", "enter", ("world_size=",), r"\d+ rank=\d+ local_rank="),
    # vLLM: v1/worker/gpu_model_runner.py, gpu/model_runner.py, model_loader/default_loader.py
    Milestone("vllm", "weights", "enter", tuple(RUNNERS)),
    Milestone("vllm", "weights", "done", ("Loading weights took ",), r"[\d.]+ seconds"),
    Milestone("vllm", "draft_weights", "enter", ("Loading drafter model...",)),
    Milestone("vllm", "draft_weights", "taps", SAYS_TAPS, r"(?:speculative )?(?:config|model): "),
    Milestone("vllm", "weights", "done", ("Model loading took ",), r"[\d.]+ GiB"),
    # vLLM: compilation/backends.py, monitor.py, v1/worker/cpu_model_runner.py
    Milestone("vllm", "compile", "enter", ("Dynamo bytecode transform time: ", "Compiling a graph for ")),
    Milestone("vllm", "compile", "enter", ("torch.compile took ", "Warming up model for the compilation")),
    Milestone("vllm", "compile", "enter", ("Using cache directory: ",), r".*torch\.compile"),
    Milestone("vllm", "compile", "done", ("Warming up done.", "Initial profiling/warmup run took ")),
    # vLLM: v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py, v1/worker/gpu_model_runner.py
    Milestone("vllm", "kv_cache", "enter", ("Available KV cache memory: ", "Profiling CUDA graph memory: ")),
    Milestone("vllm", "kv_cache", "done", ("GPU KV cache size: ", "CPU KV cache size: "), r"[\d,]+ tokens"),
    Milestone("vllm", "graphs", "enter", ("Capturing model for speculator", "Capturing prefill CUDA graphs")),
    Milestone("vllm", "graphs", "enter", ("Capturing decode CUDA graphs",)),
    Milestone("vllm", "graphs", "done", ("Graph capturing finished in ",), r"\d+ secs"),
    Milestone("vllm", "kv_cache", "done", ("init engine (profile, create kv cache, warmup model) took ",)),
    # vLLM: entrypoints/launchers/api_server/entry.py; v1/metrics/loggers.py, v1/spec_decode/metrics.py
    Milestone("vllm", "http", "enter", ("Starting vLLM server on ", "Starting vLLM API server")),
    Milestone("vllm", "ready", "serve", ("Avg prompt throughput: ", "Engine "), r"[\d.]+(?:: Avg prompt| tokens/s)"),
    Milestone("vllm", "ready", "serve", ("SpecDecoding metrics: Mean acceptance length: ",), r"\d"),
    # uvicorn, of either engine ("Application startup complete." means ready or not by engine: launch/reading.py)
    Milestone(None, "http", "enter", ("Started server process [", "Waiting for application startup.")),
    Milestone(None, "http", "enter", ("Uvicorn running on ",)),
    Milestone(None, "ready", "stop", ("Shutting down", "Finished server process [", "Application shutdown complete.")),
    # vLLM: entrypoints/launchers/launcher.py, entrypoints/cli/serve.py
    Milestone("vllm", "ready", "stop", ("[shutdown] API server: shutdown triggered", "Received shutdown signal")),
    # llama.cpp: tools/server/server.cpp, server-context.cpp, src/llama.cpp
    Milestone("llamacpp", "args", "enter", ("llama_server: initializing",)),
    Milestone("llamacpp", "weights", "enter", ("load_model: loading model '", "llama_model_loader: loaded meta data ")),
    Milestone("llamacpp", "kv_cache", "enter", ("llama_context: constructing llama_context", "llama_kv_cache")),
    Milestone("llamacpp", "warmup", "enter", ("common_init",), r"\w*: warming up the model"),
    Milestone("llamacpp", "ready", "enter", ("main: server is listening on http", "llama_server: listening on http")),
    Milestone("llamacpp", "ready", "enter", ("update_slots: all slots are idle",)),
)

LETTERS = 4
STARTUP_COMPLETE = "Application startup complete."
BANNER = re.compile(r".{0,80}[▀▄█].{0,80} version \d+\.\d")
"""vLLM's banner: block letters, the version beside the second row."""
ACCESS = re.compile(r'[\w.:\[\]-]{3,60} - "(?P<method>[A-Z]+) (?P<path>/[^ ?"]*)[^ "]* HTTP/[\d.]+" (?P<status>\d{3})')
WEIGHT_BARS = re.compile(
    r"(?:Loading (?:safetensors|pt|gguf) checkpoint shards|Multi-thread loading (?:pt checkpoint )?shards"
    r"|Loading safetensors using [\w ]+)(?: \(\w+\))?$"
)
GRAPH_BARS = re.compile(r" *$|Capturing ")
"""A bar without a name belongs to the graphs once they have begun: SGLang's older capture."""


def _by_letters() -> dict[str, list[tuple[Milestone, str, re.Pattern[str]]]]:
    table = defaultdict(list)
    for milestone in MILESTONES:
        for start in milestone.starts:
            table[start[:LETTERS]].append((milestone, start, re.compile(milestone.then)))
    return dict(table)


BY_LETTERS = _by_letters()


def milestone(message: str) -> Milestone | None:
    """The milestone that `message` is."""
    for found, start, then in BY_LETTERS.get(message[:LETTERS], ()):
        if message.startswith(start) and then.match(message, len(start)):
            return found
    return None
