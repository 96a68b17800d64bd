"""How fast a log is read, and in how much memory: kinds of logs of 100 MB each, one core,
in CPU seconds (the machine may be shared).

    python benchmarks/bench_logs.py [MEGABYTES [KIND]]

Prints, per kind: lines, lines a second, megabytes a second, and by how much the process grew while it read.
"""

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from eyas.launch.log_state import LogReader

START = (
    "[2026-05-01 10:00:00] server_args=ServerArgs(model_path='/m')\n"
    "[2026-05-01 10:00:09 TP0] Load weight begin. avail mem=78.00 GB\n"
)
FRAME = (
    '  File "/env/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 3800, in run\n    self.step()\n'
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHANCE = random.Random(0)
VOCABULARY = ["".join(CHANCE.choices(LETTERS, k=CHANCE.randint(2, 11))) for _ in range(20_000)]
WORDS = "".join(" ".join(CHANCE.choices(VOCABULARY, k=CHANCE.randint(8, 16))) + "\n" for _ in range(10_000))
KINDS = {
    "decode and access lines": (
        "[2026-05-01 10:20:00 TP0] Decode batch, #running-req: 8, #token: 3530, token usage: 0.01, accept len: 2.85, "
        "accept rate: 0.62, cuda graph: True, gen throughput (token/s): 842.10, #queue-req: 0, \n"
        '[2026-05-01 10:20:00] INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    ),
    "raw warnings": "  torch._dynamo.utils.warn_once(msg)\n/env/site-packages/x/y.py:81: UserWarning: slow\n",
    "vLLM records": "(EngineCore pid=13128) INFO 06-27 17:12:25 [scheduler.py:239] Chunked prefill is on, 8192.\n",
    "bars by return": "\rLoading safetensors checkpoint shards:  36% Completed | 23/64 [00:12<00:19,  2.14it/s]",
    "SGLang records of no milestone": "[2026-05-01 10:20:00 TP3] Use sliding window memory pool, full 0.8\n",
    "tracebacks": (
        "[2026-05-01 10:20:00 TP1] Request failed: Traceback (most recent call last):\n"
        + FRAME * 3
        + "ValueError: the answer is longer than the context\n"
    ),
    "random words": WORDS,
    "random words, SGLang's heads": WORDS.replace("\n", "\n[2026-05-01 10:20:00 TP3] "),
    "one line of 100 MB": "x" * 1024,
}


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 100) * 1e6)
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    for kind, text in KINDS.items():
        if only not in kind:
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            file.write(START)
            block = text * max(1, 1_000_000 // len(text))
            for _ in range(max(1, size // len(block.encode()))):
                file.write(block)
            file.flush()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.process_time()
            state = LogReader(Path(file.name)).poll()
            seconds = time.process_time() - started
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(
                f"{kind:32} {state.lines:>9,} lines  {state.lines / seconds:>9,.0f} lines/s  "
                f"{state.bytes_read / seconds / 1e6:>5,.0f} MB/s  grew {grown / 1024:,.1f} MB  {state.phase}"
            )


if __name__ == "__main__":
    main()
