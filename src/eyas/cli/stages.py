"""The stages, from prompts to the measurement, and all of them in one. What needs torch is imported when its command
runs, so that the program starts in a fraction of a second and works in the torch-free core install."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from eyas.cli.app import (
    FLAGS,
    OUT,
    TARGET,
    Captures,
    Common,
    DraftPath,
    Flat,
    Integers,
    NamedDraft,
    NamedTarget,
    Out,
    Overrides,
    RecipeName,
    Responses,
    TargetFlags,
    Trust,
    app,
    finish,
    staged,
)
from eyas.data.prompts import check_source, make_prompts
from eyas.errors import InputError
from eyas.imports import uncollected
from eyas.pipeline.doctor import missing_stack
from eyas.pipeline.options import not_with
from eyas.pipeline.plan import Plan, changed
from eyas.progress import mute, say
from eyas.ranks import place_of, refuse_several
from eyas.recipe import (
    BenchSettings,
    CaptureSettings,
    DraftSettings,
    EvaluateSettings,
    ExportSettings,
    PromptsSettings,
    RespondSettings,
    TargetSettings,
    TrainSettings,
    load_recipe,
    recorded,
    validate,
)
from eyas.run import is_complete, read_manifest
from eyas.shipped import chosen_draft
from eyas.stage import standing


def standing_of(common: Common, out: Path, stage: str, settings: dict[str, Any], **inputs: Path) -> dict[str, Any]:
    """For a plan: the `state` of a stage's folder, and notes of inputs that are not complete. Raises InputError for an
    input that another stage wrote."""
    if not common.plan:
        return {}
    for name, path in inputs.items():
        if is_complete(path):
            read_manifest(path, name)
    unfinished = [path for path in inputs.values() if path.exists() and not is_complete(path)]
    notes = [f"{path} is unfinished, or not one of Eyas's" for path in unfinished]
    return {"state": standing(out, stage, settings, inputs)} | ({"notes": notes} if notes else {})


@app.command
def prompts(
    *, out: Out, settings: Annotated[PromptsSettings, Flat] = PromptsSettings(), common: Common = FLAGS
) -> None:
    """Make prompts, from a JSONL file or the built-in bank."""
    if common.plan:
        check_source(settings)
    more = standing_of(common, out, "prompts", settings.model_dump(mode="json"))
    plan = Plan("prompts", [settings.source], [out], settings, more)
    finish(common, plan, lambda: staged(out, make_prompts(out, settings)))


@app.command
def respond(
    *,
    prompts: Annotated[Path, Parameter(help="The folder that `eyas prompts` wrote.")],
    out: Out,
    target: TargetFlags = TARGET,
    settings: Annotated[RespondSettings, Flat] = RespondSettings(),
    common: Common = FLAGS,
) -> None:
    """Let the target answer the prompts; answers are kept as token ids. Resumes."""

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.data.responses import respond

        return staged(out, respond(prompts, out, settings, target.settings))

    more = standing_of(common, out, "responses", recorded(settings, target.settings), prompts=prompts)
    finish(common, Plan("respond", [prompts, target.target], [out], settings, more), work)


@app.command
def capture(
    *,
    responses: Responses,
    out: Out,
    target: TargetFlags = TARGET,
    settings: Annotated[CaptureSettings, Flat] = CaptureSettings(),
    common: Common = FLAGS,
) -> None:
    """Capture the target's hidden states over its answers. Resumes."""

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.data.captures import capture

        return staged(out, capture(responses, out, settings, target.settings))

    if common.plan and is_complete(responses):
        settings.boundaries_of(read_manifest(responses, "responses").facts["target"]["num_hidden_layers"])
    more = standing_of(common, out, "captures", recorded(settings, target.settings), responses=responses)
    finish(common, Plan("capture", [responses, target.target], [out], settings, more), work)


@app.command
def train(
    *,
    captures: Captures | None = None,
    responses: Annotated[
        Responses | None, Parameter(help="Instead of captures: answers, the target run beside.")
    ] = None,
    out: Out,
    target: TargetFlags = TARGET,
    draft: Annotated[DraftSettings, Parameter(name="draft")] = DraftSettings(),
    capture: Annotated[CaptureSettings, Parameter(name="capture")] = CaptureSettings(),
    settings: Annotated[TrainSettings, Flat] = TrainSettings(),
    common: Common = FLAGS,
) -> None:
    """Train a draft on captures, or on responses with the target run beside it. Resumes to the same weights.

    Several processes: torchrun --nproc-per-node N -m eyas.cli train ... with the same flags.
    """
    if not place_of(os.environ).leads:
        mute()
    data = captures or responses
    if data is None or (captures and responses):
        raise InputError(
            wanted="--captures CAPTURES, or --responses RESPONSES to run the target beside the trainer",
            got="neither" if data is None else "both",
            where="the command line",
            next="eyas train --captures CAPTURES --out DRAFT",
        )

    if captures is not None:
        not_with("--captures", **{f"capture.{name}": getattr(capture, name) for name in capture.model_fields_set})
    if is_complete(data):
        read_manifest(data, "responses" if captures is None else "captures")

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.training.loop import train

        return staged(out, train(data, out, settings, draft, target.settings, capture))

    sections = {"draft": draft, "target": target.settings} | ({"capture": capture} if captures is None else {})
    more: dict[str, Any] = {name: section.model_dump(mode="json") for name, section in sections.items()}
    if common.plan:
        with uncollected():
            from eyas.training.foresee import foreseen

        more |= foreseen(data, out, settings, draft, target.settings, capture, responses is not None)
        more["changed"] = changed(settings) | {
            name: value for key, section in sections.items() for name, value in changed(section, f"{key}.").items()
        }
    finish(common, Plan("train", [data, settings.start_from, target.target], [out], settings, more), work)


@app.command
def evaluate(
    *,
    draft: NamedDraft,
    captures: Captures,
    target: TargetFlags = TARGET,
    split: Annotated[Literal["heldout", "train", "all"], Parameter(help="Which samples.")] = "heldout",
    settings: Annotated[EvaluateSettings, Flat] = EvaluateSettings(),
    common: Common = FLAGS,
) -> None:
    """Accuracy and accept length over captures, without a server."""

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.training.evaluate import evaluate

        return evaluate(draft, captures, settings, target.settings, split)

    if common.plan and draft.exists() and is_complete(captures):
        with uncollected():
            from eyas.training.evaluate import refuse_early

        refuse_early(draft, captures)
    finish(common, Plan("evaluate", [draft, captures], [], settings), work)


@app.command
def export(
    *,
    draft: NamedDraft,
    out: Out,
    for_: Annotated[
        str, Parameter(name="--for", help="The engines, with commas; releases too: sglang@0.5.12.")
    ] = "sglang,vllm",
    target: Annotated[NamedTarget, Parameter(help="Of a draft made elsewhere: its target.")] = None,
    boundaries: Annotated[Integers, Parameter(help="Of a draft made elsewhere: its taps, as 2,15,27.")] = None,
    trust_remote_code: Trust = False,
    common: Common = FLAGS,
) -> None:
    """Write one folder that the engines load right, or refuse and say why.

    A draft made elsewhere (EAGLE, SpecForge, speculators, ModelOpt) needs --target, and --boundaries 2,15,27 where its
    layer ids do not say theirs.
    """
    settings = validate(ExportSettings, {"engines": tuple(for_.split(","))}, "--for")

    named = None if target is None else TargetSettings(name=target, trust_remote_code=trust_remote_code)

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.export.folder import export_draft

        return staged(out, export_draft(draft, out, settings, named, boundaries))

    more = {}
    if common.plan and draft.exists():
        with uncollected():
            from eyas.export.folder import foreseen

        more = foreseen(draft, out, settings, named, boundaries)
    finish(common, Plan("export", [draft, target], [out], settings, more), work)


@app.command
def bench(
    *,
    draft: DraftPath = None,
    plain: Annotated[bool, Parameter(help="Without a draft: n-grams alone, of --ngram.")] = False,
    target: TargetFlags = TARGET,
    settings: Annotated[BenchSettings, Flat] = BenchSettings(),
    common: Common = FLAGS,
) -> int:
    """Plain against speculative decoding by the embedded engine, paired, with an interval.

    Without --draft the one that comes with Eyas, where the target is the one that it is for; --plain goes without:
    n-grams alone (--ngram).
    """
    chosen, words = chosen_draft(draft, plain, target.target)

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.measure.bench import bench

        if words is not None:
            say(f"bench: {words}")
        return bench(target.settings, chosen, settings)

    if common.plan and (chosen is None or chosen.exists()):
        with uncollected():
            from eyas.measure.bench import refuse_early

        refuse_early(target.target, chosen, settings)
    result = finish(common, Plan("bench", [chosen, settings.prompts, target.target], [], settings), work)
    return 1 if result.get("identical_outputs") is False else 0


@app.command
def run(
    recipe: RecipeName,
    *,
    out: Annotated[Path | None, OUT, Parameter(help="The run's folder; none means runs/NAME.")] = None,
    set_: Overrides = None,
    common: Common = FLAGS,
) -> int:
    """Every stage of a recipe in order, skipping what is done."""
    refuse_several(os.environ, "run")
    loaded = load_recipe(recipe, tuple(set_ or ()))
    folder = out or Path("runs") / loaded.name

    def work() -> dict[str, Any]:
        with uncollected():
            from eyas.pipeline.run import run_recipe

        return run_recipe(loaded, folder)

    more: dict[str, Any] = {}
    if common.plan and (absent := missing_stack()):
        more = {"notes": [f"{', '.join(absent)} not installed: what the run would refuse is not known"]}
    elif common.plan:
        with uncollected():
            from eyas.pipeline.run import foreseen

        more = foreseen(loaded, folder)
    plan = Plan("run", [recipe, loaded.target.name, loaded.prompts.source], [folder], loaded, more)
    result = finish(common, plan, work)
    return 1 if result.get("check", {}).get("verdict") == "fail" else 0
