"""Flags that the engines' servers take: SGLang 0.5.23 (arg_groups/fields/*.py), vLLM 0.33 (engine/arg_utils.py and
entrypoints), our own (engine/server/arguments.py, to which a test holds the list). Used to name the nearest one where a
server did not know the flag that it was given."""

from functools import cache
from pathlib import Path

from eyas.errors import did_you_mean

ENGINES = ("sglang", "vllm", "embedded")
RENAMED = {
    "vllm": {
        "--disable-prefix-caching": "--no-enable-prefix-caching",
        "--disable-radix-cache": "--no-enable-prefix-caching",
        "--disable-log-requests": "--no-enable-log-requests",
        "--disable-cuda-graph": "--enforce-eager",
        "--mem-fraction-static": "--gpu-memory-utilization",
        "--context-length": "--max-model-len",
        "--max-running-requests": "--max-num-seqs",
        "--tp-size": "--tensor-parallel-size",
        "--model-path": "the model's path right after `vllm serve`, without a flag",
        "--speculative-model": """--speculative-config '{"method": "eagle3", "model": "DRAFT"}'""",
        "--num-speculative-tokens": """--speculative-config '{"num_speculative_tokens": 3}'""",
    },
    "sglang": {
        "--no-enable-prefix-caching": "--disable-radix-cache",
        "--enforce-eager": "--disable-cuda-graph",
        "--gpu-memory-utilization": "--mem-fraction-static",
        "--max-model-len": "--context-length",
        "--max-num-seqs": "--max-running-requests",
        "--speculative-config": "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT",
        "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    },
}
"""What a flag of another release, or of the other engine, is called here."""


@cache
def known_flags(engine: str) -> frozenset[str]:
    """All flags of `engine`'s server; vLLM's switches also in their `--no-` form."""
    names = Path(__file__).with_name("flags").joinpath(f"{engine}.txt").read_text(encoding="utf-8").split()
    return frozenset(names) | {f"--no-{name[2:]}" for name in names if engine == "vllm" and "enable" in name}


def nearest_flag(engine: str, flag: str) -> str:
    """` (did you mean "--tp-size"?)`, or an empty string where `engine` has nothing near."""
    if renamed := RENAMED.get(engine, {}).get(flag):
        return f" (here: {renamed})"
    return did_you_mean(flag, known_flags(engine)) if engine in ENGINES else ""
