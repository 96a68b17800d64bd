"""Looking at what is there: checks, traces, inspection, the machine."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from eyas.cli.app import (
    FLAGS,
    TARGET,
    Captures,
    Common,
    DraftPath,
    Engines,
    Flat,
    NamedDraft,
    NamedTarget,
    Out,
    TargetFlags,
    Trust,
    app,
    finish,
    staged,
)
from eyas.clients.openai import server_key
from eyas.formats.trace import engine_environment
from eyas.imports import uncollected
from eyas.pipeline.check_url import check_url
from eyas.pipeline.doctor import doctor
from eyas.pipeline.inspect import inspect_path
from eyas.pipeline.options import needs, not_with
from eyas.pipeline.plan import Plan
from eyas.recipe import TraceSettings
from eyas.wiring.static_checks import check_launch, check_static, reference_plan, require_paths


@app.command
def check(
    *,
    captures: Captures | None = None,
    draft: DraftPath = None,
    export: Annotated[DraftPath, Parameter(help="The folder that `eyas export` wrote.")] = None,
    target: NamedTarget = None,
    engine: Engines = None,
    trace: Annotated[
        list[Path] | None,
        Parameter(negative="", help="A trace, or states that another program dumped; may be repeated."),
    ] = None,
    engine_args: Annotated[
        str | None,
        Parameter(allow_leading_hyphen=True, help="An engine's flags in one string: would that launch hold together?"),
    ] = None,
    gpu_gb: Annotated[
        float | None, Parameter(help="GiB of each GPU that the launch is for; none means this machine's.")
    ] = None,
    url: Annotated[str | None, Parameter(help="A running server (EYAS_API_KEY is its key).")] = None,
    evaluate: Annotated[
        Path | None,
        Parameter(help="What `eyas evaluate` promised (RUN/evaluate); none means the one beside the draft."),
    ] = None,
    send: Annotated[
        int | None,
        Parameter(help="So many prompts are asked first, and only their rounds counted.", validator=Number(gte=1)),
    ] = None,
    prompts: Annotated[Path | None, Parameter(help="A prompts folder to ask from; none means the test set.")] = None,
    heatmap: Annotated[Path | None, Parameter(help="An SVG file to draw every block's distances to.")] = None,
    device: Annotated[str, Parameter(help="Where a target larger than memory is streamed through.")] = "cpu",
    trust_remote_code: Trust = False,
    common: Common = FLAGS,
) -> int:
    """Is training wired as serving will be? Runs every check that what was given allows.

    With --engine (sglang@0.5.23, vllm@0.33.0, vllm@0.33.0/v1, ...; may be repeated) and only a draft or its
    config.json: what that engine would do with it, without starting it. With --engine-args "..." too: whether that
    launch would fit and hold together, on GPUs of --gpu-gb GiB, or on this machine's. With --trace (a trace, or states
    that another program dumped; may be repeated): what a running engine captured and fed its draft. --heatmap FILE.svg
    draws each block's distance to every boundary. --device cuda: where a target larger than memory is streamed through.
    With --url: a running server's arguments, draft folder and acceptance against what `eyas evaluate` promised
    (--evaluate RUN/evaluate, else the one beside the draft), without a restart; --send 8 asks it prompts first.
    """

    if url is not None:
        not_with("--url", captures=captures, trace=trace, engine=engine, heatmap=heatmap)
    if engine_args is not None:
        not_with("--engine-args", captures=captures, trace=trace, heatmap=heatmap)
    needs("--url", url is not None, evaluate=evaluate, send=send, prompts=prompts)
    needs("--engine", bool(engine), engine_args=engine_args)
    needs("--engine-args", engine_args is not None, gpu_gb=gpu_gb)

    def work() -> dict[str, Any]:
        served = draft or export
        if url is not None:
            return check_url(url, served, target, evaluate, send or 0, prompts, server_key())
        if engine_args is not None and engine:
            return check_launch(engine, engine_args, served, target, gpu_gb)
        require_paths(captures, draft, export, *(trace or ()))
        if engine and served is not None and not (captures or trace) and (draft is None or export is None):
            return check_static(served, engine, target)
        with uncollected():
            from eyas.wiring.check import check

        return check(target, captures, draft, export, trust_remote_code, engine or (), trace or (), heatmap, device)

    reads, writes = [captures, draft, export, target, url, *(trace or [])], [] if heatmap is None else [heatmap]
    more = reference_plan(target, captures, draft or export) if common.plan else {}
    result = finish(common, Plan("check", reads, writes, more=more), work)
    return 1 if result.get("verdict") == "fail" else 0


@app.command
def trace(
    *,
    out: Out,
    draft: DraftPath = None,
    engine: Annotated[str | None, Parameter(help="sglang or vllm: the environment that makes it trace itself.")] = None,
    target: TargetFlags = TARGET,
    settings: Annotated[TraceSettings, Flat] = TraceSettings(),
    common: Common = FLAGS,
) -> None:
    """What the embedded engine computes at each stage of each round; `eyas check --trace` holds it to account.

    With --engine sglang or vllm instead of a draft: the environment in which that engine writes the same trace.
    """

    if engine is not None:
        not_with("--engine", draft=draft, prompt=settings.prompt)

    def work() -> dict[str, Any]:
        if engine is not None:
            return engine_environment(engine, out)
        with uncollected():
            from eyas.pipeline.trace import trace

        return staged(out, trace(draft, out, settings, target.settings))

    finish(common, Plan("trace", [draft, settings.prompts, target.target], [out], settings), work)


@app.command
def inspect(
    path: Annotated[
        NamedDraft,
        Parameter(
            help="A stage's folder, a draft's or target's, config.json, safetensors, a tensor list, or `shipped`."
        ),
    ],
    *,
    verify: Annotated[bool, Parameter(help="Hash the data again, and compare.")] = False,
    engine: Engines = None,
    target: NamedTarget = None,
    common: Common = FLAGS,
) -> None:
    """What a folder or file is, its taps in every dialect, its problems; with --engine, what that engine would do."""

    def work() -> dict[str, Any]:
        return inspect_path(path, verify=verify, engines=engine or (), target=target)

    finish(common, Plan("inspect", [path], []), work)


@app.command(name="doctor")
def doctor_command(*, common: Common = FLAGS) -> None:
    """Versions, devices, engines found, what is missing and the line to type."""
    finish(common, Plan("doctor", [], []), doctor)
