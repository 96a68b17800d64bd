"""SGLang: hooks on the target's logits processor, and on the draft's inner model, fc and logits processor.

SGLang calls `model.forward`, not the module, so the top module's own hooks never run; the logits processor, which every
target class calls with its ids and captured states, is the highest module that is called. Forward hooks run on eager
forwards only: start with --disable-cuda-graph (0.5.11 to 0.5.13: and --disable-piecewise-cuda-graph).
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .modules import argument, hook, hook_fc, is_draft, layer_list, named_last, of_class, tensor_of
from .record import Recorder, attempt, first_rank, logger, safely, wanted

RUNNER = "sglang.srt.model_executor.model_runner"
REGISTRY = "sglang.srt.plugins.hook_registry"
PROCESSOR = "LogitsProcessor"
ARGUMENTS = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
"""Of LogitsProcessor.forward, in order."""
RECORDERS: list[Recorder] = []


def register() -> None:
    """The entry point of `sglang.srt.plugins`."""
    if not wanted():
        return
    try:
        runner = importlib.import_module(RUNNER).ModelRunner
        registry = importlib.import_module(REGISTRY)
        missing = [name for name in ("load_model", "forward") if not hasattr(runner, name)]
    except (ImportError, AttributeError) as error:
        logger.warning("eyas_trace: no trace: %s and %s are not as expected (%s)", RUNNER, REGISTRY, error)
        return
    if "load_model" in missing:
        logger.warning("eyas_trace: no trace: %s.ModelRunner has no load_model", RUNNER)
        return
    registry.HookRegistry.register(f"{RUNNER}.ModelRunner.load_model", after_load, registry.HookType.AFTER)
    if "forward" in missing:
        logger.warning("eyas_trace: ModelRunner has no forward: warm-up runs are recorded too")
        Serving.always = True
        return
    registry.HookRegistry.register(f"{RUNNER}.ModelRunner.forward", around_forward, registry.HookType.AROUND)


class Serving:
    """Whether a batch of the scheduler is under way: warm-up and graph capture do not come through ModelRunner."""

    always = False
    depth = 0

    @classmethod
    def now(cls) -> bool:
        return cls.always or cls.depth > 0


def around_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    Serving.depth += 1
    try:
        return forward(*args, **kwargs)
    finally:
        Serving.depth -= 1


def after_load(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Hook the model that a ModelRunner has just loaded."""
    attempt("hook this model", attach, runner.model)


def recorder(another: bool = False) -> Recorder:
    """The process's own; `another` where a target was loaded: a process may hold one engine after the other."""
    if another or not RECORDERS or RECORDERS[-1].done:
        version = getattr(importlib.import_module("sglang"), "__version__", "?")
        RECORDERS.append(Recorder.from_environment("sglang", str(version)))
    return RECORDERS[-1]


def attach(model: torch.nn.Module) -> bool:
    """Hook a target or a draft; False where this process does not record."""
    if not first_rank():
        return False
    if is_draft(model):  # loaded after its target, in both engines
        attach_draft(recorder(), model)
    else:
        attach_target(recorder(another=True), model)
    logger.info("eyas_trace: hooked %s", type(model).__name__)
    return True


def attach_target(recorder: Recorder, model: torch.nn.Module) -> None:
    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not recorder.done and Serving.now():
            ids, _, _, batch, taps = (argument(args, kwargs, place, name) for place, name in enumerate(ARGUMENTS))
            begin(recorder, model, ids, getattr(batch, "positions", None), taps)

    hook(recorder, of_class(model, PROCESSOR), "logits processor", after)


def begin(recorder: Recorder, model: torch.nn.Module, ids: Any, positions: Any, taps: Any) -> None:
    """A forward of the target; its taps come as a list, or packed side by side into one tensor."""
    boundaries = layer_list(model, "layers_to_capture")
    states = getattr(taps, "_buffer", taps)
    if isinstance(states, torch.Tensor):  # a buffer kept for the largest batch may be longer
        states = states[: len(ids)].chunk(len(boundaries) if boundaries else 1, dim=-1)
    recorder.begin(ids, positions, list(states or []), boundaries)


def attach_draft(recorder: Recorder, model: torch.nn.Module) -> None:
    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if recorder.recording and Serving.now():
            fed = tensor_of(output[1]) if isinstance(output, tuple) and len(output) == 2 else tensor_of(output)
            ids, positions = (argument(args, kwargs, at, name) for at, name in enumerate(("input_ids", "positions")))
            recorder.layer(fed, ids, positions)

    hook_fc(recorder, model)
    hook(recorder, named_last(model, "model"), "inner model", after)
    hook(recorder, of_class(model, PROCESSOR), "logits processor", scored_hook(recorder))


def scored_hook(recorder: Recorder) -> Callable[..., None]:
    def scored(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        logits = getattr(output, "next_token_logits", output)
        if recorder.recording and Serving.now() and isinstance(logits, torch.Tensor):
            recorder.logits(logits)

    return scored


def forward_hook(config: dict[str, Any]) -> Callable[..., None] | None:
    """The factory for --forward-hooks, where plug-ins are not wanted; None without EYAS_TRACE.

    `[{"target_modules": ["*fc"], "hook_factory": "eyas_trace.sglang_plugin:forward_hook", "config": {"stage": "fc"}},
    {"target_modules": ["*logits_processor"], ..., "config": {"stage": "logits"}}]`. A logits processor that is given
    more than one state is the target's.
    """
    if not wanted() or not first_rank():
        return None
    own = recorder()

    def fused(module: Any, args: Any, output: Any) -> None:
        if own.recording:
            own.taps(args[0])
            own.fc(tensor_of(output))

    def scored(module: Any, args: Any, output: Any) -> None:
        given = (*args, *[None] * len(ARGUMENTS))
        ids, taps, batch = given[0], given[4], given[3]
        if taps is not None and hasattr(taps, "__len__") and width(taps) > width(given[1]):
            begin(own, module, ids, getattr(batch, "positions", None), taps)
        elif own.recording and isinstance(logits := getattr(output, "next_token_logits", None), torch.Tensor):
            own.logits(logits)

    return safely(own, fused if config.get("stage") == "fc" else scored)


def width(states: Any) -> int:
    """Channels of a state, or of several side by side."""
    states = getattr(states, "_buffer", states)
    return states.shape[-1] if isinstance(states, torch.Tensor) else sum(one.shape[-1] for one in states)
