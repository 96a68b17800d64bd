"""The command line: one function a command, no logic. What needs torch is imported when its command runs, so that
`inspect`, `doctor` and `recipe` start in a fraction of a second and work in the torch-free core install."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console

from eyas import __version__
from eyas.data.prompts import make_prompts
from eyas.errors import EyasError, InputError
from eyas.failures import interrupted, missing, report, usage_error
from eyas.formats.trace import engine_environment
from eyas.pipeline.doctor import cache_clear, cache_list, doctor
from eyas.pipeline.inspect import inspect_path
from eyas.pipeline.plan import Plan
from eyas.pipeline.show import show
from eyas.progress import say
from eyas.recipe import (
    BenchSettings,
    CaptureSettings,
    DraftSettings,
    EvaluateSettings,
    ExportSettings,
    PromptsSettings,
    RespondSettings,
    TargetSettings,
    TraceSettings,
    TrainSettings,
    load_recipe,
    packaged_recipes,
    recipe_reference,
    validate,
)
from eyas.run import Manifest, disk_error
from eyas.wiring.static_checks import check_launch, check_static

INTERRUPTED = 130

app = App(
    name="eyas",
    version=__version__,
    help="Raise EAGLE-3 drafts: data, training, wiring checks, export, measurement.",
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
recipes = App(name="recipe", help="Recipes: what `eyas run` needs, in one TOML.")
cache = App(name="cache", help="The cache: converted targets.")
app.command(recipes)
app.command(cache)

Flat = Parameter(name="*")
"""A section's fields are the command's flags."""


@Parameter(name="*", group=Group("Every command", sort_key=100))
@dataclass(frozen=True)
class Common:
    """Flags of every command."""

    json: bool = False
    """Print exactly one JSON object on stdout; progress stays on stderr."""
    plan: bool = False
    """Print what would be read, written and run, and do nothing."""


@Parameter(name="*")
@dataclass(frozen=True)
class TargetFlags:
    """Which target."""

    target: str = TargetSettings().name
    """The default target's name, a Hugging Face folder, or a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def settings(self) -> TargetSettings:
        return TargetSettings(name=self.target, trust_remote_code=self.trust_remote_code)


FLAGS, TARGET = Common(), TargetFlags()


def finish(common: Common, plan: Plan, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Print the plan, or do the work and print its result."""
    result = plan.as_dict if common.plan else work()
    if common.json:
        print(json.dumps(result))
    else:
        show(Console(highlight=False), result)
    return result


def staged(folder: Path, manifest: Manifest) -> dict[str, Any]:
    return {"folder": str(folder.absolute()), **manifest.model_dump(mode="json")}


@app.command
def prompts(
    *, out: Path, settings: Annotated[PromptsSettings, Flat] = PromptsSettings(), common: Common = FLAGS
) -> None:
    """Make prompts, from a JSONL file or the built-in bank."""
    plan = Plan("prompts", [settings.source], [out], settings)
    finish(common, plan, lambda: staged(out, make_prompts(out, settings)))


@app.command
def respond(
    *,
    prompts: Path,
    out: Path,
    target: TargetFlags = TARGET,
    settings: Annotated[RespondSettings, Flat] = RespondSettings(),
    common: Common = FLAGS,
) -> None:
    """Let the target answer the prompts; answers are kept as token ids. Resumes."""

    def work() -> dict[str, Any]:
        from eyas.data.responses import respond

        return staged(out, respond(prompts, out, settings, target.settings))

    finish(common, Plan("respond", [prompts, target.target], [out], settings), work)


@app.command
def capture(
    *,
    responses: Path,
    out: Path,
    target: TargetFlags = TARGET,
    settings: Annotated[CaptureSettings, Flat] = CaptureSettings(),
    common: Common = FLAGS,
) -> None:
    """Capture the target's hidden states over its answers. Resumes."""

    def work() -> dict[str, Any]:
        from eyas.data.captures import capture

        return staged(out, capture(responses, out, settings, target.settings))

    finish(common, Plan("capture", [responses, target.target], [out], settings), work)


@app.command
def train(
    *,
    captures: Path,
    out: Path,
    target: TargetFlags = TARGET,
    draft: Annotated[DraftSettings, Parameter(name="draft")] = DraftSettings(),
    settings: Annotated[TrainSettings, Flat] = TrainSettings(),
    common: Common = FLAGS,
) -> None:
    """Train a draft on captures. Resumes to the same weights."""

    def work() -> dict[str, Any]:
        from eyas.training.loop import train

        return staged(out, train(captures, out, settings, draft, target.settings))

    finish(common, Plan("train", [captures, target.target], [out], settings), work)


@app.command
def evaluate(
    *,
    draft: Path,
    captures: Path,
    target: TargetFlags = TARGET,
    split: str = "heldout",
    settings: Annotated[EvaluateSettings, Flat] = EvaluateSettings(),
    common: Common = FLAGS,
) -> None:
    """Accuracy and accept length over captures, without a server."""

    def work() -> dict[str, Any]:
        from eyas.training.evaluate import evaluate

        return evaluate(draft, captures, settings, target.settings, split)

    finish(common, Plan("evaluate", [draft, captures], [], settings), work)


@app.command
def export(
    *,
    draft: Path,
    out: Path,
    for_: Annotated[str, Parameter(name="--for")] = "sglang,vllm",
    target: str | None = None,
    boundaries: str | None = None,
    trust_remote_code: bool = False,
    common: Common = FLAGS,
) -> None:
    """Write one folder that the engines load right, or refuse and say why.

    A draft made elsewhere (EAGLE, SpecForge, speculators, ModelOpt) needs --target, and --boundaries 2,15,27 where its
    layer ids do not say theirs.
    """
    settings = validate(ExportSettings, {"engines": tuple(for_.split(","))}, "--for")

    def work() -> dict[str, Any]:
        from eyas.export.folder import export_draft

        named = None if target is None else TargetSettings(name=target, trust_remote_code=trust_remote_code)
        return staged(out, export_draft(draft, out, settings, named, _integers(boundaries)))

    finish(common, Plan("export", [draft, target], [out], settings), work)


def _integers(text: str | None) -> tuple[int, ...] | None:
    """`2,15,27` as numbers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.strip("[]").split(","))
    except ValueError as error:
        raise InputError(
            wanted="boundaries as numbers with commas", got=text, where="--boundaries", next="--boundaries 2,15,27"
        ) from error


@app.command
def check(
    *,
    captures: Path | None = None,
    draft: Path | None = None,
    export: Path | None = None,
    target: str | None = None,
    engine: Annotated[list[str] | None, Parameter(negative="")] = None,
    trace: Annotated[list[Path] | None, Parameter(negative="")] = None,
    engine_args: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    gpu_gb: float | None = None,
    trust_remote_code: bool = False,
    common: Common = FLAGS,
) -> int:
    """Is training wired as serving will be? Runs every check that what was given allows.

    With --engine (sglang@0.5.23, vllm@0.33.0, vllm@0.33.0/v1, ...; may be repeated) and only a draft or its
    config.json: what that engine would do with it, without starting it. With --engine-args "..." too: whether that
    launch would fit and hold together, on GPUs of --gpu-gb GiB, or on this machine's. With --trace (a trace, or states
    that another program dumped; may be repeated): what a running engine captured and fed its draft.
    """

    def work() -> dict[str, Any]:
        served = draft or export
        if engine and engine_args is not None:
            return check_launch(engine, engine_args, served, target, gpu_gb)
        if engine and served is not None and not (captures or trace) and (draft is None or export is None):
            return check_static(served, engine, target)
        from eyas.wiring.check import check

        return check(target, captures, draft, export, trust_remote_code, engine or (), trace or ())

    result = finish(common, Plan("check", [captures, draft, export, target, *(trace or [])], []), work)
    return 1 if result.get("verdict") == "fail" else 0


@app.command
def trace(
    *,
    out: Path,
    draft: Path | None = None,
    engine: str | None = None,
    target: TargetFlags = TARGET,
    settings: Annotated[TraceSettings, Flat] = TraceSettings(),
    common: Common = FLAGS,
) -> None:
    """What the embedded engine computes at each stage of each round; `eyas check --trace` holds it to account.

    With --engine sglang or vllm instead of a draft: the environment in which that engine writes the same trace.
    """

    def work() -> dict[str, Any]:
        if engine is not None:
            return engine_environment(engine, out)
        from eyas.pipeline.trace import trace

        return staged(out, trace(draft, out, settings, target.settings))

    finish(common, Plan("trace", [draft, settings.prompts, target.target], [out], settings), work)


@app.command
def bench(
    *,
    draft: Path,
    target: TargetFlags = TARGET,
    settings: Annotated[BenchSettings, Flat] = BenchSettings(),
    common: Common = FLAGS,
) -> int:
    """Plain against speculative decoding by the embedded engine, paired, with an interval."""

    def work() -> dict[str, Any]:
        from eyas.measure.bench import bench

        return bench(target.settings, draft, settings)

    result = finish(common, Plan("bench", [draft, settings.prompts, target.target], [], settings), work)
    return 1 if result.get("identical_outputs") is False else 0


@app.command
def run(
    recipe: str,
    *,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    common: Common = FLAGS,
) -> int:
    """Every stage of a recipe in order, skipping what is done."""
    loaded = load_recipe(recipe, tuple(set_ or ()))
    folder = out or Path("runs") / loaded.name

    def work() -> dict[str, Any]:
        from eyas.pipeline.run import run_recipe

        return run_recipe(loaded, folder)

    result = finish(common, Plan("run", [recipe, loaded.target.name, loaded.prompts.source], [folder], loaded), work)
    return 1 if result.get("check", {}).get("verdict") == "fail" else 0


@app.command
def inspect(
    path: Path,
    *,
    verify: bool = False,
    engine: Annotated[list[str] | None, Parameter(negative="")] = None,
    target: str | None = None,
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


@recipes.command(name="show")
def recipe_show(
    recipe: str = "demo",
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    common: Common = FLAGS,
) -> None:
    """Every key of a recipe, its value, its default and its meaning."""
    loaded = load_recipe(recipe, tuple(set_ or ()))
    result = {"recipe": recipe, "keys": recipe_reference(loaded)}
    finish(common, Plan("recipe show", [recipe], []), lambda: result)


@recipes.command(name="list")
def recipe_list(*, common: Common = FLAGS) -> None:
    """The packaged recipes."""
    finish(common, Plan("recipe list", [], []), lambda: {"recipes": packaged_recipes()})


@cache.default
def cache_show(*, common: Common = FLAGS) -> None:
    """What the cache holds, with sizes in bytes."""
    finish(common, Plan("cache", [], []), cache_list)


@cache.command(name="clear")
def cache_empty(*, common: Common = FLAGS) -> None:
    """Empty the cache; all of it can be made again."""
    finish(common, Plan("cache clear", [], []), cache_clear)


def main(argv: Sequence[str] | None = None) -> None:
    """The `eyas` program: runs a command and exits with its status (docs/commands.md)."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except EyasError as error:
        sys.exit(report(error, tokens))
    except CycloptsError as error:
        sys.exit(report(usage_error(error, tokens), tokens))
    except ModuleNotFoundError as error:
        sys.exit(report(missing(error), tokens))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has gone
        sys.exit(0)
    except OSError as error:
        sys.exit(report(disk_error(Path(error.filename or "."), error), tokens))
    except KeyboardInterrupt:
        if "--json" in tokens:
            report(interrupted(), tokens)
        say("interrupted; the same command resumes")
        sys.exit(INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
