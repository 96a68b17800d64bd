"""The prompts stage: what the target is asked, from the built-in bank or from a file of other people's prompts."""

import hashlib
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.data.bank import BankPrompt, generate
from eyas.data.records import Message, Record, Tally, iter_records
from eyas.errors import InputError, did_you_mean
from eyas.progress import say
from eyas.recipe import PromptsSettings
from eyas.run import MANIFEST, Manifest, check_same, hash_file, read_manifest, write_atomic
from eyas.stage import Stage, completed, standing

PROMPTS = "prompts.jsonl"
Row = dict[str, Any]


def make_prompts(out: Path, settings: PromptsSettings) -> Manifest:
    """Write `out/prompts.jsonl` (train rows, then held-out rows) and the manifest, or return a complete one's.

    Raises InputError where the source is missing or has too few prompts, or where `out` is complete under other
    settings or was made from another content of the source file. What was skipped or repaired is in `facts`.
    """
    stage = Stage(out, "prompts", settings.model_dump(mode="json"), {})
    standing(out, stage.name, stage.settings, {})  # a folder that another stage began is not taken over
    if (manifest := completed(out, stage.name, stage.settings, {})) is not None:
        return _same_source(out, settings, manifest)
    rows, facts = _bank_rows(settings) if settings.source == "bank" else _file_rows(Path(settings.source), settings)
    write_atomic(out / PROMPTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    facts = {"train": settings.train, "heldout": settings.heldout, **facts}
    return stage.finish(files={PROMPTS: hash_file(out / PROMPTS)}, facts=facts)


def read_prompts(folder: Path) -> list[Row]:
    """The rows of a complete prompts folder: {"id", "messages", "split", "topic", "family"}.

    Raises InputError for an unfinished folder or rows that do not match the manifest's checksum.
    """
    manifest = read_manifest(folder, "prompts")
    path = folder / PROMPTS
    if not path.is_file() or hash_file(path) != manifest.files[PROMPTS]:
        raise InputError(
            wanted=f"the {PROMPTS} that the manifest describes",
            got="other bytes" if path.is_file() else "no such file",
            where=str(path),
            next=f"remove {folder / MANIFEST} and run `eyas prompts` again",
        )
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def _same_source(out: Path, settings: PromptsSettings, manifest: Manifest) -> Manifest:
    """The manifest, if the source file still has the content that the prompts were made from."""
    source = Path(settings.source)
    if "source_sha256" in manifest.facts and source.is_file():
        again = f"give another --out, or remove {out} to make the prompts again"
        check_same("sha256 of prompts.source", hash_file(source), manifest.facts["source_sha256"], out, again)
    return manifest


def _bank_rows(settings: PromptsSettings) -> tuple[list[Row], Row]:
    drawn = generate(settings.train, settings.seed, "train") + generate(settings.heldout, settings.seed, "heldout")
    return [bank_row(prompt) for prompt in drawn], {"source": "bank", "skipped": {}, "repaired": {}}


def bank_row(prompt: BankPrompt) -> Row:
    """A drawn prompt as a row of prompts.jsonl."""
    return prompt_row(prompt.id, prompt.messages, prompt.split, prompt.topic, prompt.family)


def prompt_row(
    name: str, messages: list[Message], split: str, topic: str | None = None, family: str | None = None
) -> Row:
    return {"id": name, "messages": messages, "split": split, "topic": topic, "family": family}


def check_source(settings: PromptsSettings) -> None:
    """Raise InputError for a file of prompts that is not there."""
    if settings.source != "bank" and not Path(settings.source).exists():
        raise InputError(
            wanted="`bank`, or a JSONL file of prompts",
            got=f"{settings.source!r}, and there is no such file{did_you_mean(settings.source, ['bank'])}",
            where="prompts.source",
            next="check the path, or set prompts.source=bank",
        )


def _file_rows(path: Path, settings: PromptsSettings) -> tuple[list[Row], Row]:
    """Rows drawn from a file by hashes of seed and prompt: neither the file's order nor `train` moves the held-out."""
    check_source(settings)
    tally = Tally()
    wanted = settings.train + settings.heldout
    records = _keyed(iter_records(path, tally, on_error=settings.on_error), settings.seed)
    chosen = [record for _, _, record in heapq.nsmallest(wanted, records)]
    _tell(path, tally)
    if len(chosen) < wanted:
        raise InputError(
            wanted=f"{settings.train} train and {settings.heldout} held-out prompts",
            got=f"{len(chosen)} usable distinct prompts{_reasons(tally)}",
            where=str(path),
            next="set prompts.train and prompts.heldout so that they add up to no more, or give a larger file",
        )
    heldout, train = chosen[: settings.heldout], chosen[settings.heldout :]
    rows = [prompt_row(record.id, list(record.messages), "train") for record in train]
    rows += [prompt_row(record.id, list(record.messages), "heldout") for record in heldout]
    facts = {
        "source": str(path.absolute()),
        "source_sha256": hash_file(path),
        "usable": tally.kept,
        "skipped": dict(sorted(tally.skipped.items())),
        "repaired": dict(sorted(tally.repaired.items())),
        "warnings": tally.warnings,
        "problems": [str(problem) for problem in tally.problems],
    }
    return rows, facts


def _keyed(records: Iterator[Record], seed: int) -> Iterator[tuple[bytes, int, Record]]:
    for record in records:
        yield hashlib.sha256(f"{seed}:".encode() + record.fingerprint).digest(), record.line, record


def _reasons(tally: Tally) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.items()))
    return f" (skipped: {counts})" if counts else ""


def _tell(path: Path, tally: Tally) -> None:
    """Warnings and the first unusable lines, for the person watching; all counts are in the manifest."""
    for warning in tally.warnings:
        say(f"{path}: {warning}")
    for problem in tally.problems[:5]:
        say(f"{path}, {problem}")
    skipped = sum(tally.skipped.values())
    if skipped:
        say(f"{path}: {tally.kept} prompts usable, {skipped} lines skipped{_reasons(tally)}")
