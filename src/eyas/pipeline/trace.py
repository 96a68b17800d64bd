"""`eyas trace`: the embedded engine over a few prompts, every stage of every round written down."""

from pathlib import Path

from eyas.data.samples import render
from eyas.engine.generate import Engine
from eyas.errors import InputError
from eyas.formats.trace import TraceRequest
from eyas.measure.prompts import bench_prompts
from eyas.models.checkpoint import look_at
from eyas.models.fitting import load_fitting
from eyas.models.target import Target, load_target
from eyas.recipe import TargetSettings, TraceSettings
from eyas.run import Manifest, read_manifest


def trace(draft: Path | None, out: Path, settings: TraceSettings, target: TargetSettings) -> Manifest:
    """Decode with `draft` in float32 (None: plainly) and write the trace folder `out`.

    Raises InputError where `out` holds a trace, or for targets, drafts or prompts that cannot be used.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(wanted="a new or empty folder", got="files in it", where=str(out), next="another --out")
    if draft is not None:
        look_at(draft, settings.num_steps)
    loaded = load_target(target.name, trust_remote_code=target.trust_remote_code)
    drafting = None if draft is None else load_fitting(draft, loaded)[0]
    prompts = texts(loaded, settings)
    num_steps = 0 if drafting is None else settings.num_steps
    request = TraceRequest(out, settings.tensors, settings.calls)
    engine = Engine(loaded, drafting, num_steps=max(num_steps, 1), announce=False, trace=request)
    try:
        for ids in prompts:
            engine.generate(ids, settings.max_new_tokens, num_steps=num_steps)
    finally:
        engine.close()
    return read_manifest(out, "trace")


def texts(target: Target, settings: TraceSettings) -> list[list[int]]:
    """The ids of the prompts to trace, up to the assistant's header."""
    if settings.prompt is not None:
        return [render(target.tokenizer, [{"role": "user", "content": settings.prompt}]).ids]
    found = bench_prompts(settings.prompts, target, settings.limit, settings.max_new_tokens)
    return [list(prompt.ids) for prompt in found]
