"""A small process that behaves like an engine as far as a supervisor can see: lines, a port, an end on request.

Run as if it were the interpreter that has the engine (see `interpreter` in tests/test_serve.py):
    FAKE='{"fate": "ready"}' fake-python -m sglang.launch_server --model-path M --port P ...
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

PACE_S = 0.01
FLAGS = ("--model-path", "--port", "--host", "--tp-size", "--enable-metrics", "--mem-fraction-static")
METRICS = """# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="m"} 1000.0
sglang:generation_tokens_total{model_name="m"} 1030.0
sglang:spec_accept_length{model_name="m"} 1.03
"""


class Handler(BaseHTTPRequestHandler):
    ready = False
    old = False
    busy = threading.Lock()
    overlaps = 0
    hits: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        overlapping = not Handler.busy.acquire(blocking=False)
        Handler.overlaps += overlapping
        try:
            self._answer()
        finally:
            if not overlapping:
                Handler.busy.release()

    def _answer(self) -> None:
        Handler.hits.append(f"{self.path} {Handler.ready}")
        status, body = 200, ""
        if self.path in ("/ready", "/health"):
            status = 404 if Handler.old and self.path == "/ready" else 200 if Handler.ready else 503
            body = "ready"  # a word in a body is no readiness
        elif self.path == "/metrics":
            body = METRICS
        elif self.path == "/v1/models":
            body = json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]})
        elif self.path == "/hits":
            body = json.dumps({"hits": Handler.hits, "overlaps": Handler.overlaps})
        elif self.path not in ("/model_info",):
            status = 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *words: object) -> None:
        line(f'INFO:     127.0.0.1:1 - "{self.command} {self.path} HTTP/1.1" {words[1]} OK', stamped=False)


def line(text: str, *, stamped: bool = True, end: str = "\n") -> None:
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S TP0] ")
    sys.stderr.write((stamp if stamped else "") + text + end)
    sys.stderr.flush()


def start(port: int, fate: dict) -> int:
    line("server_args=ServerArgs(model_path='m')")
    line("Init torch distributed begin.")
    line("Init torch distributed ends. mem usage=0.10 GB")
    line("Load weight begin. avail mem=70.00 GB")
    if fate.get("child"):
        subprocess.Popen([sys.executable, __file__, "--child", fate["child"]])
    for shard in range(1, 9):
        time.sleep(PACE_S)
        bar = f"{shard * 12:3d}% Completed | {shard}/8 [00:0{shard}<00:01, 1.0it/s]"
        line(f"Loading safetensors checkpoint shards: {bar}", stamped=False, end="\r")
        if fate["fate"] == "silent" and shard == 4:
            line("", stamped=False)
            time.sleep(60)
        if fate["fate"] == "busy" and shard == 4:
            line("", stamped=False)
            while True:
                sum(range(10_000))
    line("", stamped=False)
    line("Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=50.00 GB, mem usage=20.00 GB.")
    line("KV Cache is allocated. #tokens: 1000, K size: 1.00 GB, V size: 1.00 GB")
    line("Memory pool end. avail mem=10.00 GB")
    if fate["fate"] == "traceback":
        line("Scheduler hit an exception: Traceback (most recent call last):")
        line('  File "x.py", line 1, in <module>', stamped=False)
        line("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", stamped=False)
        return 1
    line("Capture cuda graph begin. This can take up to several minutes. avail mem=10.00 GB")
    line("Capture cuda graph end. Time elapsed: 1.00 s. avail mem=9.00 GB.")
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        line(
            f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): {error}",
            stamped=False,
        )
        return 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    line("INFO:     Application startup complete.", stamped=False)
    line(f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)", stamped=False)
    line("Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0")
    time.sleep(fate.get("warmup_s", 0.1))
    Handler.ready = True
    line("The server is fired up and ready to roll!")
    time.sleep(fate.get("lives_s", 30))
    if fate["fate"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def record(text: str) -> None:
    line(time.strftime(f"(EngineCore pid={os.getpid()}) INFO %m-%d %H:%M:%S [core.py:1] {text}"), stamped=False)


def start_vllm(port: int, fate: dict) -> int:
    """As much of vLLM's start as tells its layers, then loading for `loads_s`, then ready."""
    record("non-default args: {'model': 'm'}")
    record("Loading model from scratch...")
    record(fate["said"])
    time.sleep(fate.get("loads_s", 0.0))
    record("Model loading took 1.00 GiB memory and 1.000000 seconds")
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    record(f"Starting vLLM server on http://127.0.0.1:{port}")
    line("INFO:     Application startup complete.", stamped=False)
    Handler.ready = True
    time.sleep(fate.get("lives_s", 30))
    return 0


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["--child"]:
        if words[1] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return 0
    fate = json.loads(os.environ.get("FAKE", '{"fate": "ready"}'))
    Handler.old = bool(fate.get("old"))
    if words[:1] == ["-c"]:
        name = "vllm" if fate["fate"] == "vllm" else "sglang"
        sys.stdout.write(json.dumps([fate["fate"] != "absent", name, fate.get("release", "0.5.23"), "3.11"]) + "\n")
        return 0
    if fate["fate"] == "vllm":
        return start_vllm(int(words[words.index("--port") + 1]), fate)
    flags = [word for word in words[2:] if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in FLAGS and not flag.startswith("--speculative")]
    if unknown:
        sys.stderr.write("usage: launch_server.py [-h] --model-path MODEL_PATH\n")
        sys.stderr.write(f"launch_server.py: error: unrecognized arguments: {' '.join(unknown)}\n")
        return 2
    return start(int(words[words.index("--port") + 1]), fate)


if __name__ == "__main__":
    sys.exit(main())
