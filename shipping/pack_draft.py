"""A trained draft into the package: rounded to bfloat16, exported, measured as it is shipped, described on a card.

    python shipping/pack_draft.py --draft DRAFT --responses RESPONSES --heldout CAPTURES --test CAPTURES \\
        --recipe shipping/shipped.toml [--prompts PROMPTS] [--bench BENCH.json]

Writes src/eyas/shipped/eagle3/: `draft/` (an export for SGLang and vLLM), `evaluate/result.json` (the test set's),
`card.json`, `recipe.toml`, `log.jsonl`. Figures are those of the rounded weights. Refuses a draft of more than 20 MB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from eyas.data.responses import RESPONSES, read_responses
from eyas.errors import EyasError, InputError
from eyas.export.folder import export_draft
from eyas.failures import report
from eyas.formats.draft_config import DraftConfig
from eyas.models.checkpoint import CONFIG, WEIGHTS, load_draft, read_info, save_draft
from eyas.progress import say
from eyas.recipe import EvaluateSettings, ExportSettings, TargetSettings, load_recipe
from eyas.run import JSON, hash_file, is_complete, machine, read_manifest, versions, write_atomic
from eyas.shipped import CARD, DRAFT, LOG, RECIPE, SHIPPED, Card, Figures, shipped_root
from eyas.stage import PROGRESS, chosen_step, step_number
from eyas.training.evaluate import evaluate
from eyas.training.metrics import HELD_OUT, METRICS

LIMIT = 20_000_000
"""Bytes of the whole folder."""
LOG_LINES = 200
LOGGED = ("step", "tokens", "loss", "accuracy", "learning_rate", "tokens_per_s", HELD_OUT)
BENCHED = ("baseline", "speculative", "speedup", "divergence", "identical_outputs", "num_steps", "precision", "prompts")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--draft", type=Path, required=True, help="a draft stage's folder, finished or not, or one of its steps")
    add("--responses", type=Path, required=True, help="the answers it learned from")
    add("--heldout", type=Path, required=True, help="captures whose heldout split is held-out topics")
    add("--test", type=Path, required=True, help="captures of the answers to the test set, all of them heldout")
    add("--recipe", type=Path, required=True)
    add("--prompts", type=Path, help="the prompts folder, for its seeds")
    add("--bench", type=Path, help="what `eyas bench --json` printed")
    add("--steps", type=int, default=5, help="chain length of the figures")
    add("--target", default=TargetSettings().name)
    add("--out", type=Path, default=shipped_root())
    options = parser.parse_args(argv)
    try:
        card = pack_draft(options)
    except EyasError as error:
        sys.exit(report(error, []))
    print(card.model_dump_json(indent=1))


def pack_draft(options: argparse.Namespace) -> Card:
    """Raises InputError, the folder left as it was, for a draft that is too large, of another target or not Eyas's."""
    load_recipe(str(options.recipe))  # a recipe that is shipped can be read
    step, answers = chosen_step(options.draft), read_manifest(options.responses, "responses")
    root = options.draft if (options.draft / METRICS).is_file() else options.draft.parent
    info, training = read_info(step), training_facts(root, step)
    with TemporaryDirectory() as temporary:
        made = Path(temporary) / SHIPPED
        rounded(step, made / DRAFT)
        results = measured(made / DRAFT, options)
        write_atomic(made / "evaluate" / "result.json", json.dumps(results["test"], indent=1) + "\n")
        write_atomic(made / RECIPE, options.recipe.read_text("utf-8"))
        write_atomic(made / LOG, short_log(root / METRICS, training["of_step"]))
        card = Card(
            name=SHIPPED,
            target=info.target,
            tokenizer_hash=info.tokenizer_hash,
            template_hash=info.template_hash,
            form=form(info.draft),
            figures={name: figures(result) for name, result in results.items()},
            prompts=prompt_facts(options.responses, options.prompts),
            answers={
                **answers.facts["counts"],
                "sampling": answers.facts["sampling"],
                "dtype": answers.facts["dtype"],
                "sha256": answers.files[RESPONSES],
            },
            training=training,
            bench=None if options.bench is None else benched(options.bench),
            commit=commit(),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            machine=machine(),
            versions=versions(),
            bytes=(made / DRAFT / WEIGHTS).stat().st_size,
            sha256={name: hash_file(made / DRAFT / name) for name in (CONFIG, WEIGHTS)},
        )
        write_atomic(made / CARD, card.model_dump_json(indent=1) + "\n")
        check_size(made)
        shutil.rmtree(options.out, ignore_errors=True)
        shutil.copytree(made, options.out)
    say(f"shipped: {card.bytes / 1e6:.2f} MB of weights, {card.words}; in {options.out}")
    return card


def training_facts(root: Path, step: Path) -> JSON:
    """What its folder says of the run: the step that is shipped (`of_step`), tokens until there, settings, seconds, and
    whether the run ended."""
    number = step_number(step)
    lines: list[JSON] = [json.loads(line) for line in (root / METRICS).read_text().splitlines()]
    tokens = next((line["tokens"] for line in lines if line["step"] == number), None)
    facts = {"of_step": number, "tokens": tokens, "finished": is_complete(root)}
    if is_complete(root):
        manifest = read_manifest(root, "draft")
        keys = ("steps", "precision", "vocabulary_coverage")
        facts |= {key: manifest.facts[key] for key in keys} | {"machine": manifest.machine}
        settings, seconds, start = manifest.settings, manifest.seconds, manifest.facts.get("start")
    else:
        state = json.loads((root / PROGRESS).read_text())
        facts |= {"steps": lines[-1]["step"], "precision": state["decided"].get("precision")}
        settings, seconds, start = state["settings"], state["seconds"], state["decided"].get("start")
    if start is not None:
        facts["start"] = described(start)
    kept = {**bare(settings["train"], "start_from"), "draft": settings["draft"]}
    return {**facts, "seconds": round(seconds), "settings": kept}


def described(start: dict[str, str]) -> JSON:
    """The draft that a run went on from, by its files' checksums; the one in the package by its card as well: how it
    was trained (with its own start), on which answers, at which commit."""
    path = shipped_root() / CARD
    card = Card.model_validate_json(path.read_text()) if path.is_file() else None
    if card is None or card.sha256 != start:
        return {"sha256": start}
    return {"sha256": start, "training": card.training, "answers": card.answers, "commit": card.commit}


def rounded(draft: Path, out: Path) -> None:
    """The draft in bfloat16 as an export, without a manifest: that would name this machine's folders."""
    module, info = load_draft(draft, dtype=torch.bfloat16)
    with TemporaryDirectory() as temporary:
        ours, export = Path(temporary) / "draft", Path(temporary) / "export"
        save_draft(ours, module, info)
        export_draft(ours, export, ExportSettings())
        for name in (WEIGHTS, CONFIG):
            write_atomic(out / name, (export / name).read_bytes())


def measured(draft: Path, options: argparse.Namespace) -> dict[str, JSON]:
    """The evaluation of the weights as they are shipped, on held-out topics and on the test set."""
    settings, target = EvaluateSettings(steps=options.steps), TargetSettings(name=options.target)
    return {name: evaluate(draft, getattr(options, name), settings, target) for name in ("heldout", "test")}


def figures(result: JSON) -> Figures:
    return Figures(
        accept_length=result["accept_length_walk"],
        by_steps=result["walk_by_steps"],
        survival=result["walk_survival"],
        steps=result["steps"],
        samples=result["samples"],
        tokens=result["tokens"],
        rounds=result["rounds"],
        exact=result["walk_exact"],
    )


def form(config: DraftConfig) -> str:
    """The draft in words; `plain` is what every engine loads fully."""
    options = {"fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "attention_bias", "fc_bias"}
    used = sorted(name for name in options if getattr(config, name))
    plain = not used and config.block == "llama" and config.num_hidden_layers == 1 and not config.own_embedding
    kind = "plain EAGLE-3" if plain else f"EAGLE-3 with {', '.join(used) or 'options'}"
    taps = ", ".join(map(str, config.boundaries))
    words = f"{kind}: {config.num_hidden_layers} {config.block} layer, taps {taps}"
    return f"{words}, {config.draft_vocab_size} of {config.vocab_size} tokens, bfloat16, the target's embedding"


def prompt_facts(responses: Path, prompts: Path | None) -> JSON:
    """Prompts answered, by where they come from (their id's head) and by split; what their folder says of seeds."""
    seen: dict[str, tuple[str, str]] = {}
    for line in read_responses(responses / RESPONSES):
        seen[line["prompt_id"]] = (line["prompt_id"].partition("-")[0], line["split"])
    by_source = Counter(source for source, _ in seen.values())
    by_split = Counter(split for _, split in seen.values())
    told = read_manifest(prompts, "prompts").settings if prompts is not None and is_complete(prompts) else {}
    told = bare(told, "source")
    return {"count": len(seen), "by_source": dict(by_source), "by_split": dict(by_split), "settings": told}


def bare(settings: JSON, key: str) -> JSON:
    """Settings with a path under `key` cut to its name: another machine's folders are nobody's business."""
    return settings | {key: Path(settings[key]).name} if settings.get(key) else settings


def short_log(metrics: Path, until: int) -> str:
    """Of the steps up to the one that is shipped every measured one, and others at even distances, in fewer keys."""
    lines: list[JSON] = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line["step"] <= until]
    every = max(1, len(lines) // LOG_LINES)
    kept = [line for number, line in enumerate(lines) if number % every == 0 or HELD_OUT in line or line is lines[-1]]
    return "".join(json.dumps({key: line[key] for key in LOGGED if key in line}) + "\n" for line in kept)


def benched(path: Path) -> JSON:
    found: dict[str, Any] = json.loads(path.read_text())
    return {key: found[key] for key in (*BENCHED, "max_new_tokens", "threads", "machine", "versions")}


def commit() -> str:
    """Of the checkout, with `+` where it has changes."""
    where = Path(__file__).parent
    words = [["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    head, changed = (
        subprocess.run(word, cwd=where, capture_output=True, text=True, check=False).stdout for word in words
    )
    return (head.strip() or "unknown") + ("+" if changed.strip() else "")


def check_size(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise InputError(
            wanted=f"a draft of at most {LIMIT / 1e6:.0f} MB with its card",
            got=f"{size / 1e6:.2f} MB",
            where=str(folder),
            next="--set draft.vocab_size=8192, and one layer: 19.8 MB in bfloat16 for this target",
        )


if __name__ == "__main__":
    main()
