"""The capture stage against the bare forward of the same batches, paired: batch by batch, order alternating.

    python benchmarks/bench_capture.py --tokens 30000 --batch-tokens 4096

The bare forward is the backbone without the head, hooks and storing. Capture is everything: reading the line, the
forward with hooks, casting, packing, and the shard written, synced and hashed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch

from eyas.data.captures import capture_batch
from eyas.data.shards import Sample, pack, plan_shards, shard_name, write_shard
from eyas.formats.taps import default_boundaries
from eyas.models.target import DEFAULT_TARGET, DTYPES, Target, load_target
from eyas.run import processor_name


def made_up_lines(target: Target, tokens: int) -> list[str]:
    """Response lines of the demo's lengths (60 to 350 tokens)."""
    generator, lines, total = torch.Generator().manual_seed(0), [], 0
    while total < tokens:
        length = int(torch.randint(60, 350, (1,), generator=generator))
        ids = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids}))
        total += length
    return lines


def bare(target: Target, ids: list[list[int]]) -> float:
    """Seconds of the forward alone."""
    padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    for row, sample in enumerate(ids):
        padded[row, : len(sample)] = torch.tensor(sample)
    started = time.perf_counter()
    with torch.inference_mode():
        target.backbone(input_ids=padded, use_cache=False)
    return time.perf_counter() - started


def whole(target: Target, lines: list[str], store: torch.dtype, samples: list[Sample]) -> float:
    """Seconds of reading, forward and keeping."""
    started = time.perf_counter()
    ids = [json.loads(line)["input_ids"] for line in lines]
    boundaries = default_boundaries(target.num_hidden_layers)
    for taps, last, kept in capture_batch(target, ids, boundaries, store):
        samples.append(Sample("", "train", taps, last, kept, torch.ones(len(kept), dtype=torch.bool)))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--shard-tokens", type=int, default=32768)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--store", default="bfloat16")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.precision)
    lines = made_up_lines(target, args.tokens)
    every = [json.loads(line)["input_ids"] for line in lines]
    shards = plan_shards([len(ids) for ids in every], args.batch_tokens, args.shard_tokens)
    bare(target, [every[number] for number in shards[0][0]])  # warm-up: weights paged in, threads started
    bare_s, whole_s, ratios = 0.0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        for number, batches in enumerate(shards):
            samples: list[Sample] = []
            in_shard = 0.0
            for turn, batch in enumerate(batches):
                first = bare(target, [every[sample] for sample in batch]) if turn % 2 == 0 else None
                captured = whole(target, [lines[sample] for sample in batch], DTYPES[args.store], samples)
                plain = first if first is not None else bare(target, [every[sample] for sample in batch])
                bare_s, in_shard = bare_s + plain, in_shard + captured
                ratios.append(plain / captured)
            started = time.perf_counter()
            write_shard(Path(folder) / shard_name(number), pack(samples))
            whole_s += in_shard + time.perf_counter() - started
    tokens = sum(map(len, every))
    print(
        json.dumps(
            {
                "share_of_bare_speed": round(bare_s / whole_s, 3),
                "median_batch_share_before_writing": round(statistics.median(ratios), 3),
                "capture_tokens_per_s": round(tokens / whole_s),
                "bare_tokens_per_s": round(tokens / bare_s),
                "tokens": tokens,
                "batch_tokens": args.batch_tokens,
                "dtype": str(target.dtype),
                "store": args.store,
                "threads": torch.get_num_threads(),
                "rss_gb": round(psutil.Process().memory_info().rss / 1e9, 2),
                "processor": processor_name(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
