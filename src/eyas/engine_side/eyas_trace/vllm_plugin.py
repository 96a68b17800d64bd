"""vLLM: hooks on the top modules of target and draft, on the draft's fc, and on its logits processor.

All four are called from Python whatever is compiled below them; a full CUDA graph replays without them, so the engine
is started with --enforce-eager. The models are met where every loader returns them (`BaseModelLoader.load_model`).
"""

import functools
import importlib
from typing import Any

import torch

from .modules import argument, hook, hook_fc, is_draft, layer_list, of_class, tensor_of
from .record import Recorder, attempt, first_rank, logger, wanted

LOADER = "vllm.model_executor.model_loader.base_loader"
CONTEXT = "vllm.forward_context"
RECORDERS: list[Recorder] = []
"""The process's own, once there is a model to record."""


def register() -> None:
    """The entry point of `vllm.general_plugins`; may be called more than once in a process."""
    if not wanted():
        return
    try:
        loader: Any = importlib.import_module(LOADER).BaseModelLoader
        load_model = loader.load_model
    except (ImportError, AttributeError) as error:
        logger.warning("eyas_trace: no trace: %s.BaseModelLoader.load_model is not there (%s)", LOADER, error)
        return
    if hasattr(load_model, "eyas_trace"):
        return

    @functools.wraps(load_model)
    def traced(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        attempt("hook this model", attach, model)
        return model

    traced.__dict__["eyas_trace"] = True
    loader.load_model = traced


class TraceExtension:
    """For --worker-extension-cls eyas_trace.vllm_plugin.TraceExtension: start a trace in a running engine.

    `llm.collective_rpc("eyas_trace_start")`, under the same environment variables; returns what was hooked. A trace
    under way ends with it.
    """

    model_runner: Any

    def eyas_trace_start(self) -> list[str]:
        wanted()
        for earlier in RECORDERS:
            earlier.close()
        runner = self.model_runner
        holders = [getattr(runner, name, None) for name in ("drafter", "speculator")]
        models = [runner.get_model(), *(getattr(holder, "model", None) for holder in holders)]
        found = [model for model in models if isinstance(model, torch.nn.Module)]
        return [type(model).__name__ for model in found if attach(model)]


def recorder(another: bool = False) -> Recorder:
    """The process's own; `another` where a target was loaded: a process may hold one engine after the other."""
    if another or not RECORDERS or RECORDERS[-1].done:
        version = getattr(importlib.import_module("vllm"), "__version__", "?")
        RECORDERS.append(Recorder.from_environment("vllm", str(version)))
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
        if recorder.done or not serving():
            return
        hidden, taps = output if isinstance(output, tuple) and len(output) == 2 else (output, [])
        if not isinstance(hidden, torch.Tensor):  # an earlier pipeline stage hands on what is no state
            return
        rows = real_rows(len(hidden))
        ids, positions = (argument(args, kwargs, place, name) for place, name in enumerate(("input_ids", "positions")))
        boundaries = layer_list(model, "aux_hidden_state_layers")
        recorder.begin(cut(ids, rows), cut(positions, rows), [tap[:rows] for tap in taps], boundaries)

    hook(recorder, model, "target", after)


def attach_draft(recorder: Recorder, model: torch.nn.Module) -> None:
    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not recorder.recording or not serving():
            return
        fed = output[1] if isinstance(output, tuple) and len(output) == 2 else tensor_of(output)
        rows = real_rows(len(fed))
        ids, positions = (argument(args, kwargs, place, name) for place, name in enumerate(("input_ids", "positions")))
        recorder.layer(fed[:rows], cut(ids, rows), cut(positions, rows))

    def scored(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if recorder.recording and isinstance(output, torch.Tensor):
            recorder.logits(output)

    hook_fc(recorder, model)
    hook(recorder, model, "draft", after)
    hook(recorder, of_class(model, "LogitsProcessor"), "logits processor", scored)


def cut(rows: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if rows is None else rows[..., :count]


def context() -> Any:
    """vLLM's forward context; None outside of a forward."""
    module: Any = importlib.import_module(CONTEXT)
    return module.get_forward_context() if module.is_forward_context_available() else None


def serving() -> bool:
    """Whether this forward has attention metadata: profiling and warm-up runs have none."""
    current = context()
    return current is None or getattr(current, "attn_metadata", None) is not None


def real_rows(rows: int) -> int:
    """Rows that are no padding, as far as the attention metadata say."""
    metadata = getattr(context(), "attn_metadata", None)
    while isinstance(metadata, dict | list) and metadata:
        metadata = next(iter(metadata.values())) if isinstance(metadata, dict) else metadata[0]
    actual = getattr(metadata, "num_actual_tokens", None)
    return min(rows, actual) if isinstance(actual, int) else rows
