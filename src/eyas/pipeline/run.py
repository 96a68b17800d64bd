"""`eyas run`: every stage of a recipe in order, each skipped when its folder is complete under the same values."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from eyas.data.captures import capture
from eyas.data.prompts import make_prompts
from eyas.data.responses import respond
from eyas.errors import InputError
from eyas.export.folder import check_exportable, export_draft, exported_before
from eyas.measure.bench import bench
from eyas.measure.prompts import conversations
from eyas.models.checkpoint import has_info, read_info
from eyas.models.resolve import local_folder
from eyas.models.target import outline_target
from eyas.pipeline.report import write_report
from eyas.progress import say
from eyas.recipe import BenchSettings, CaptureSettings, Recipe, recorded, recorded_training
from eyas.run import JSON, Manifest, is_complete, read_manifest, write_atomic
from eyas.shipped import draft_folder
from eyas.stage import Standing, result_stage, standing
from eyas.training.evaluate import evaluate
from eyas.training.foresee import check_start
from eyas.training.initialise import draft_config
from eyas.training.loop import train
from eyas.training.trainer_state import step_folders
from eyas.wiring.check import check
from eyas.wiring.findings import CODES, Finding

Kept = dict[str, tuple[JSON, dict[str, Path]]]
"""Stage to what its folder records of the settings it was made under, and its inputs."""


class Stages:
    """The stages of one run folder, timed and told apart into done now and done before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[JSON] = []

    def stage(self, name: str, work: Callable[[Path], Manifest]) -> Path:
        """Run one stage in `folder/name` unless it is complete; returns its folder."""
        folder = self.folder / name
        before = read_manifest(folder).created if is_complete(folder) else None
        if before is None:
            say(f"{name}: making {folder}")
        started = time.monotonic()
        manifest = work(folder)
        skipped = manifest.created == before  # an export is replaced where its draft is another
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
    target = recipe.target
    findings = chain_findings(recipe)
    for found in findings:
        say(f"{found.severity}: {found.code}: {found.where} = {found.found}, {found.expected}. {found.fix}")
    states = standings(recipe, folder)
    if states["export"] != "complete":
        refuse_early(recipe, folder, target.name)
    stages = Stages(folder)
    made = kept(recipe, folder)
    prompts = stages.stage("prompts", lambda out: make_prompts(out, recipe.prompts))
    responses = stages.stage("responses", lambda out: respond(prompts, out, recipe.respond, target))
    captures = stages.stage("captures", lambda out: capture(responses, out, stored(recipe), target))
    data = responses if recipe.train.online else captures
    draft = stages.stage("draft", lambda out: train(data, out, recipe.train, recipe.draft, target, recipe.capture))
    evaluated = stages.result("evaluate", *made["evaluate"], lambda: evaluate(draft, captures, recipe.evaluate, target))
    export = stages.stage("export", lambda out: export_draft(draft, out, recipe.export))
    engines = recipe.export.engines
    checked = stages.result(
        "check", *made["check"], lambda: check(target.name, captures, draft, export, target.trust_remote_code, engines)
    )
    survival = evaluated["walk_survival"]
    benched = stages.result(
        "bench", *made["bench"], lambda: bench(target, export, bench_settings(recipe, prompts), survival=survival)
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


def kept(recipe: Recipe, folder: Path) -> Kept:
    """What each stage of the recipe records of its settings, and what it is made from, in order."""
    online, target, engines = recipe.train.online, recipe.target, list(recipe.export.engines)
    trained = recorded_training(recipe.train, recipe.draft, target, recipe.capture if online else None)
    at = {name: folder / name for name in ("prompts", "responses", "captures", "draft", "export")}

    def made_from(*names: str) -> dict[str, Path]:
        return {name: at[name] for name in names}

    return {
        "prompts": (recipe.prompts.model_dump(mode="json"), {}),
        "responses": (recorded(recipe.respond, target), made_from("prompts")),
        "captures": (recorded(stored(recipe), target), made_from("responses")),
        "draft": (trained, made_from("responses" if online else "captures")),
        "evaluate": (recipe.evaluate.model_dump(mode="json"), made_from("draft", "captures")),
        "export": (recipe.export.model_dump(mode="json"), made_from("draft")),
        "check": ({"target": target.name, "engines": engines}, made_from("draft", "captures", "export")),
        "bench": (recipe.bench.model_dump(mode="json"), made_from("export")),
    }


def foreseen(recipe: Recipe, folder: Path) -> JSON:
    """What is known of a run before it begins: `stages` (each one's `state`: new, unfinished, complete), `findings`,
    `notes`.

    Raises InputError where `run_recipe` would before its first stage, and where a folder there was made under other
    values.
    """
    states = standings(recipe, folder)
    found: JSON = {
        "stages": [{"name": name, "state": state} for name, state in states.items()],
        "findings": [one.model_dump() for one in chain_findings(recipe)],
    }
    if states["export"] == "complete":
        return found
    name = recipe.target.name
    target = local_folder(name)
    if target is None:
        note = (
            f"{name} is not on this machine, or not converted yet: what the run would refuse of its draft is not known"
        )
        return found | {"notes": [note]}
    refuse_early(recipe, folder, str(target))
    return found


def standings(recipe: Recipe, folder: Path) -> dict[str, Standing]:
    """How far each stage is. Raises InputError for a folder made under other values, and for one whose input would be
    made anew: it would be refused once that is there."""
    found: dict[str, Standing] = {}
    doomed: dict[str, str] = {}
    for name, (settings, inputs) in kept(recipe, folder).items():
        anew = [one for one in inputs if found[one] != "complete" or one in doomed]
        if name == "export":  # takes seconds, and replaces an earlier one
            same = not anew and exported_before(folder / name, settings, inputs) is not None
            found[name] = "complete" if same else "new"
            continue
        found[name] = standing(folder / name, name, settings, inputs)
        if found[name] != "new" and anew:
            doomed[name] = anew[0]
    if doomed:
        first, gone = next(iter(doomed.items()))
        others = ", ".join(str(folder / name) for name in doomed)
        raise InputError(
            wanted=f"{folder / gone}, which {folder / first} was made from",
            got=f"{found[gone]}: it would be made, and be another one",
            where=str(folder),
            next=f"give another --out, or remove {others} too",
        )
    return found


def refuse_early(recipe: Recipe, folder: Path, named: str) -> None:
    """What a late stage would refuse after an hour of work, said before the first. `named`: the target."""
    if recipe.prompts.heldout == 0:
        raise InputError(
            wanted="at least one held-out prompt: the draft is evaluated on its answer",
            got="prompts.heldout = 0",
            where="recipe: prompts.heldout",
            next="--set prompts.heldout=8, or the stages one by one (eyas prompts, respond, capture, train)",
        )
    if recipe.bench.prompts != "heldout":
        conversations(recipe.bench.prompts)
    target = outline_target(named, trust_remote_code=recipe.target.trust_remote_code)
    boundaries = recipe.capture.boundaries_of(target.num_hidden_layers)
    begun = step_folders(folder / "draft")
    if not begun:  # what a run that goes on began from may be gone by now
        check_start(recipe.train, recipe.draft, None, recipe.capture, target, folder)
    start = recipe.train.start_from
    made = begun[-1] if begun else None if start is None else draft_folder(start)
    ours = made is not None and has_info(made)
    check_exportable(read_info(made).draft if ours else draft_config(target, boundaries, recipe.draft), recipe.export)


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
