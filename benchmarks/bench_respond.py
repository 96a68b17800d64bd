"""Tokens a second of the respond stage's decoding on the default target.

python benchmarks/bench_respond.py --prompts PROMPTS.jsonl --limit 160 --batch-size 64 --max-new-tokens 256
"""

import argparse
import json
import platform
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

from eyas.data.decode import decode
from eyas.data.responses import Waiting, read_conversations
from eyas.data.sampling import Sampler
from eyas.models.target import DEFAULT_TARGET, load_target
from eyas.recipe import RespondSettings
from eyas.run import processor_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--limit", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.precision)
    settings = RespondSettings(max_new_tokens=args.max_new_tokens, batch_size=args.batch_size)
    waiting = Waiting(target, settings, Counter())
    waiting.fill(read_conversations(args.prompts)[: args.limit])
    prompt_tokens = sum(len(request.ids) for request in waiting.requests)
    started, answers, tokens = time.perf_counter(), 0, 0
    for answer in decode(target, waiting, Sampler(), args.batch_size):
        answers, tokens = answers + 1, tokens + len(answer.ids)
    seconds = time.perf_counter() - started
    print(
        json.dumps(
            {
                "tokens_per_s": round(tokens / seconds, 1),
                "answers": answers,
                "answer_tokens": tokens,
                "prompt_tokens": prompt_tokens,
                "seconds": round(seconds, 1),
                "batch_size": args.batch_size,
                "dtype": str(target.dtype),
                "threads": torch.get_num_threads(),
                "peak_gb": round(psutil.Process().memory_info().rss / 1e9, 2),
                "processor": processor_name(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main()
