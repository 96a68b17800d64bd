"""An engine's argument list, understood as far as preflight needs it. No torch.

Flags and their aliases as read: SGLang 0.5.23 arg_groups/fields/*.py, vLLM 0.33 engine/arg_utils.py.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.errors import InputError
from eyas.formats.engines import Engine, parse_engine

SGLANG_FLAGS: dict[str, str] = {
    "--model-path": "target",
    "--model": "target",
    "--speculative-algorithm": "algorithm",
    "--speculative-algo": "algorithm",
    "--speculative-draft-model-path": "draft",
    "--speculative-draft-model": "draft",
    "--speculative-num-steps": "num_steps",
    "--speculative-eagle-topk": "topk",
    "--speculative-num-draft-tokens": "num_draft_tokens",
    "--speculative-draft-attention-backend": "draft_attention_backend",
    "--speculative-draft-model-quantization": "draft_quantization",
    "--speculative-draft-window-size": "draft_window",
    "--tp-size": "tp",
    "--tp": "tp",
    "--tensor-parallel-size": "tp",
    "--pp-size": "pp",
    "--pp": "pp",
    "--pipeline-parallel-size": "pp",
    "--port": "port",
    "--page-size": "page_size",
    "--attention-backend": "attention_backend",
    "--prefill-attention-backend": "prefill_attention_backend",
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--mem-fraction-static": "memory_fraction",
    "--max-running-requests": "max_running_requests",
    "--context-length": "context_length",
}
VLLM_FLAGS: dict[str, str] = {
    "--model": "target",
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--pipeline-parallel-size": "pp",
    "-pp": "pp",
    "--port": "port",
    "--block-size": "page_size",
    "--quantization": "quantization",
    "-q": "quantization",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--gpu-memory-utilization": "memory_fraction",
    "--max-num-seqs": "max_running_requests",
    "--max-model-len": "context_length",
    "--speculative-config": "speculative",
    "-sc": "speculative",
    "--spec-method": "algorithm",
    "--spec-model": "draft",
    "--spec-tokens": "num_steps",
}
VLLM_SPECULATIVE: dict[str, str] = {
    "method": "algorithm",
    "model": "draft",
    "num_speculative_tokens": "num_steps",
    "parallel_drafting": "parallel_drafting",
    "draft_tensor_parallel_size": "draft_tp",
    "attention_backend": "draft_attention_backend",
    "quantization": "draft_quantization",
}
EMBEDDED_FLAGS = {
    "--target": "target",
    "--draft": "draft",
    "--port": "port",
    "--num-steps": "num_steps",
    "--topk": "topk",
    "--num-draft-tokens": "num_draft_tokens",
}
INTEGERS = frozenset(
    {
        *("num_steps", "topk", "num_draft_tokens", "draft_window", "tp", "pp", "port", "page_size"),
        *("max_running_requests", "context_length", "draft_tp"),
    }
)
PORTS = {"sglang": 30000, "vllm": 8000}
SUFFIXES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Launch:
    """What an engine would be started with. None: the flag is not given."""

    engine: Engine
    target: str | None = None
    draft: str | None = None
    algorithm: str | None = None
    num_steps: int | None = None
    """vLLM's num_speculative_tokens."""
    topk: int | None = None
    num_draft_tokens: int | None = None
    parallel_drafting: bool = False
    """vLLM: all tokens of a chain in one forward of the draft."""
    tp: int = 1
    pp: int = 1
    draft_tp: int | None = None
    port: int | None = None
    page_size: int | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    draft_attention_backend: str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    draft_window: int | None = None
    kv_cache_dtype: str | None = None
    memory_fraction: float | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Every flag that was given, known or not."""

    @property
    def sglang(self) -> bool:
        return self.engine.name == "sglang"

    @property
    def speculative(self) -> bool:
        """Whether anything of speculation is asked for."""
        return any(value is not None for value in (self.algorithm, self.draft, self.num_steps, self.num_draft_tokens))

    @property
    def listens_on(self) -> int:
        return self.port if self.port is not None else PORTS.get(self.engine.name, 8000)


def parse_launch(engine: str | Engine, args: str | Sequence[str], env: Mapping[str, str] | None = None) -> Launch:
    """Read an argument list (or one string of it), with or without the program's own name in front.

    `NAME=value` words before the program count as environment. Flags that preflight does not ask about are passed
    over. Raises InputError for an unknown engine and for a value that is none.
    """
    reader = parse_engine(engine) if isinstance(engine, str) else engine
    words, env = _words(args) if isinstance(args, str) else list(args), dict(env or {})
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    flags = SGLANG_FLAGS if reader.name == "sglang" else VLLM_FLAGS
    found: dict[str, Any] = {}
    positional = _positional(words, reader.name)
    if positional is not None:
        found["target"] = positional
    pairs = _pairs(words)
    for flag, value in pairs:
        name = flags.get(flag)
        if name == "speculative":
            found |= _speculative(value)
        elif name is not None:
            found[name] = _value(flag, name, value)
    if reader.name == "vllm" and env.get("VLLM_USE_V2_MODEL_RUNNER") in ("0", "1"):
        reader = replace(reader, runner="v2" if env["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "v1")
    return Launch(engine=reader, env=env, flags=tuple(flag for flag, _ in pairs), **found)


def embedded_launch(words: Sequence[str]) -> Launch:
    """The embedded server's own arguments, as parse_launch reads the engines'."""
    pairs = _pairs(words)
    found = {name: _value(flag, name, value) for flag, value in pairs if (name := EMBEDDED_FLAGS.get(flag)) is not None}
    sources = ["draft"] if found.get("draft") else []
    longest = dict(pairs).get("--ngram") or "0"
    sources += [f"n-grams of {longest}"] if longest != "0" else []
    if sources:
        found["algorithm"] = " and ".join(sources)
    return Launch(engine=Engine("embedded", ""), flags=tuple(flag for flag, _ in pairs), **found)


def _words(args: str) -> list[str]:
    """The words of a shell's line, if it holds a flag or a subcommand at all."""
    words = split_words(args)
    if words and not any(word.startswith("-") or word == "serve" for word in words):
        raise _bad("the engine", f"{args!r}, which holds no flag")
    return words


def split_words(text: str) -> list[str]:
    """One string of arguments as a shell would split it. Raises InputError for a quote that is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            wanted="engine arguments as a shell reads them",
            got=f"{text!r}: {error}",
            where="--engine-args",
            next="close the quote, as in --engine-args '--max-model-len 8192'",
        ) from error


def _positional(words: Sequence[str], name: str) -> str | None:
    """`vllm serve MODEL`: the word after `serve`."""
    if name != "vllm" or "serve" not in words:
        return None
    after = words[words.index("serve") + 1 :]
    return after[0] if after and not after[0].startswith("-") else None


def _pairs(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """(flag, value) in order; a flag that another flag follows has none. Underscores count as dashes."""
    pairs: list[tuple[str, str | None]] = []
    for index, word in enumerate(words):
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        following = words[index + 1] if index + 1 < len(words) else None
        separate = following if following is not None and not following.startswith("--") else None
        pairs.append((flag.replace("_", "-"), value if equals else separate))
    return pairs


def _value(flag: str, name: str, text: str | None) -> Any:
    if text is None:
        raise _bad(flag, "no value")
    try:
        value = _number(name, text)
    except (ValueError, OverflowError) as error:
        raise _bad(flag, repr(text)) from error
    if name == "context_length" and value == -1:
        return None  # vLLM: as long as fits
    least = 0 if name == "port" else 1
    if (name in INTEGERS and value < least) or (name == "memory_fraction" and not 0 < value <= 1):
        raise _bad(flag, repr(text))
    return value


def _number(name: str, text: str) -> Any:
    if name not in INTEGERS:
        return float(text) if name == "memory_fraction" else text
    scale = SUFFIXES.get(text[-1:], 1)
    return int(float(text[:-1]) * scale) if scale > 1 else int(text)


def _speculative(text: str | None) -> dict[str, Any]:
    """vLLM's JSON of speculative settings."""
    flag = "--speculative-config"
    try:
        raw = json.loads(text or "")
    except ValueError as error:
        raise _bad(flag, f"{text!r}, which is no JSON") from error
    if not isinstance(raw, dict):
        raise _bad(flag, f"a {type(raw).__name__}")
    found = {name: raw[key] for key, name in VLLM_SPECULATIVE.items() if raw.get(key) is not None}
    wrong = [name for name, value in found.items() if not _sound(name, value)]
    if wrong:
        raise _bad(flag, f"{wrong[0]} = {found[wrong[0]]!r}")
    return found


def _sound(name: str, value: Any) -> bool:
    if name == "parallel_drafting":
        return type(value) is bool
    return type(value) is int and value > 0 if name in INTEGERS else type(value) is str


def _bad(flag: str, got: str) -> InputError:
    return InputError(wanted=f"a value for {flag}", got=got, where="--engine-args", next=f"{flag} VALUE")
