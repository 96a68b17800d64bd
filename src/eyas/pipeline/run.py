"""`eyas run`: every stage of a recipe in order, each skipped when its folder is complete under the same values."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from eyas.data.captures import capture
from eyas.data.prompts import make_prompts
from eyas.data.responses import respond
from eyas.errors import InputError
from eyas.export.folder import check_exportable, export_draft
from eyas.formats.taps import default_boundaries
from eyas.measure.bench import bench
from eyas.measure.prompts import conversations
from eyas.models.checkpoint import has_info, read_info
from eyas.models.target import load_target
from eyas.pipeline.report import write_report
from eyas.progress import say
from eyas.recipe import BenchSettings, CaptureSettings, Recipe
from eyas.run import JSON, Manifest, is_complete, read_manifest, write_atomic
from eyas.shipped import draft_folder
from eyas.stage import result_stage
from eyas.training.evaluate import evaluate
from eyas.training.initialise import draft_config
from eyas.training.loop import train
from eyas.wiring.check import check
from eyas.wiring.findings import CODES, Finding


class Stages:
    """The stages of one run folder, timed and told apart into done now and done before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[JSON] = []

    def stage(self, name: str, work: Callable[[Path], Manifest]) -> Path:
        """Run one stage in `folder/name` unless it is complete; returns its folder."""
        folder = self.folder / name
        skipped = is_complete(folder)
        say(f"{name}: checking what is there" if skipped else f"{name}: making {folder}")
        started = time.monotonic()
        manifest = work(folder)
        seconds = manifest.seconds if skipped else time.monotonic() - started
        self._note(name, seconds, skipped)
        return folder

    def result(self, name: str, settings: JSON, inputs: dict[str, Path], compute: Callable[[], JSON]) -> JSON:
        """Run one stage whose product is a JSON object, or read it back."""
        folder = self.folder / name
        started = time.monotonic()
        result, skipped = result_stage(folder, name, settings=settings, inputs=inputs, compute=compute)
        seconds = read_manifest(folder, name).seconds if skipped else time.monotonic() - started
        self._note(name, seconds, skipped)
        return result

    def _note(self, name: str, seconds: float, skipped: bool) -> None:
        self.done.append({"name": name, "seconds": round(seconds, 2), "skipped": skipped})
        say(f"{name}: {'done before' if skipped else 'done'} ({seconds:.1f} s)")


def run_recipe(recipe: Recipe, folder: Path) -> JSON:
    """Run a recipe into `folder`. Returns `stages`, `draft`, `evaluate`, `check`, `bench`, the recipe's own `findings`
    and where all of it lies.

    Raises InputError where a folder there was made under other values; nothing already written is lost.
    """
    stages, target = Stages(folder), recipe.target
    findings = chain_findings(recipe)
    for found in findings:
        say(f"{found.severity}: {found.code}: {found.where} = {found.found}, {found.expected}. {found.fix}")
    if not is_complete(folder / "export"):
        refuse_early(recipe)
    prompts = stages.stage("prompts", lambda out: make_prompts(out, recipe.prompts))
    responses = stages.stage("responses", lambda out: respond(prompts, out, recipe.respond, target))
    captures = stages.stage("captures", lambda out: capture(responses, out, stored(recipe), target))
    data = responses if recipe.train.online else captures
    draft = stages.stage("draft", lambda out: train(data, out, recipe.train, recipe.draft, target, recipe.capture))
    evaluated = stages.result(
        "evaluate",
        recipe.evaluate.model_dump(mode="json"),
        {"draft": draft, "captures": captures},
        lambda: evaluate(draft, captures, recipe.evaluate, target),
    )
    export = stages.stage("export", lambda out: export_draft(draft, out, recipe.export))
    checked = stages.result(
        "check",
        {"target": target.name, "engines": list(recipe.export.engines)},
        {"draft": draft, "captures": captures, "export": export},
        lambda: check(target.name, captures, draft, export, target.trust_remote_code, recipe.export.engines),
    )
    benched = stages.result(
        "bench",
        recipe.bench.model_dump(mode="json"),
        {"export": export},
        lambda: bench(target, export, bench_settings(recipe, prompts), survival=evaluated["walk_survival"]),
    )
    result = {
        "run": str(folder.absolute()),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "stages": stages.done,
        "draft": str(export.absolute()),
        "evaluate": evaluated,
        "check": checked,
        "acceptance_parity": next(one.get("facts") for one in checked["checks"] if one["name"] == "acceptance"),
        "bench": benched,
        "findings": [found.model_dump() for found in findings],
        "report": str((folder / "report.md").absolute()),
    }
    write_atomic(folder / "recipe.json", recipe.model_dump_json(indent=1) + "\n")
    write_report(folder / "report.md", recipe, result)
    return result


def refuse_early(recipe: Recipe) -> None:
    """What a late stage would refuse after an hour of work, said before the first."""
    if recipe.prompts.heldout == 0:
        raise InputError(
            wanted="at least one held-out prompt: the draft is evaluated on its answer",
            got="prompts.heldout = 0",
            where="recipe: prompts.heldout",
            next="--set prompts.heldout=8, or the stages one by one (eyas prompts, respond, capture, train)",
        )
    if recipe.bench.prompts != "heldout":
        conversations(recipe.bench.prompts)
    target = load_target(recipe.target.name, trust_remote_code=recipe.target.trust_remote_code)
    boundaries = recipe.capture.boundaries or default_boundaries(target.num_hidden_layers, "recipe: capture.boundaries")
    start = None if recipe.train.start_from is None else draft_folder(recipe.train.start_from)
    ours = start is not None and has_info(start)
    config = read_info(start).draft if ours else draft_config(target, boundaries, recipe.draft)
    check_exportable(config, recipe.export)


def chain_findings(recipe: Recipe) -> list[Finding]:
    """Chains that the recipe will serve or measure and that are longer than training unrolls."""
    trained = recipe.train.ttt_length
    chains = {"bench.num_steps": recipe.bench.num_steps, "serve.num_steps": recipe.serve.num_steps}
    return [
        Finding(
            code="ttt_mismatch",
            severity=CODES["ttt_mismatch"].severity,
            where=f"recipe: {key}",
            expected=f"at most train.ttt_length = {trained}",
            found=str(steps),
            fix=f"--set train.ttt_length={steps}, or {key}={trained}",
            message=CODES["ttt_mismatch"].meaning,
        )
        for key, steps in chains.items()
        if steps is not None and steps > trained
    ]


def stored(recipe: Recipe) -> CaptureSettings:
    """What is captured: beside online training only what evaluation and checks read."""
    return recipe.capture.model_copy(update={"split": "heldout"}) if recipe.train.online else recipe.capture


def bench_settings(recipe: Recipe, prompts: Path) -> BenchSettings:
    """The bench's settings with `heldout` resolved to this run's own held-out prompts."""
    if recipe.bench.prompts != "heldout":
        return recipe.bench
    return recipe.bench.model_copy(update={"prompts": str(prompts / "prompts.jsonl")})
