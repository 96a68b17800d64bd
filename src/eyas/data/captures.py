"""The target's states over its own answers: taps, last hidden, ids and loss mask, in one pass by hooks.

The backbone runs without the head; only the taps and boundary n are kept. Samples are right-padded and attention is
causal, so a real row never sees a pad and no mask is needed; pad rows are dropped when stored.

Shapes: B samples of a batch, T rows, A width of the concatenated taps, H hidden.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from eyas.data.responses import RESPONSES, read_responses
from eyas.data.shards import INDEX, Entry, Sample, pack, plan_shards, shard_name, write_index, write_shard
from eyas.errors import InputError
from eyas.models.target import DTYPES, Target, fastest_dtype, load_target, record_boundaries
from eyas.progress import Progress, say
from eyas.recipe import CaptureSettings, TargetSettings, recorded
from eyas.run import JSON, Manifest, check_same, hash_bytes, hash_file, read_manifest, write_atomic
from eyas.stage import Stage, begin, check_file

JOURNAL = "shards.json"
TRUNCATED = "assistant truncated"


@dataclass(frozen=True)
class Source:
    """A sample to capture: where its line begins in responses.jsonl, and its lengths after the cut."""

    id: str
    split: str
    offset: int
    length: int
    prompt_tokens: int


def capture(
    responses: Path, out: Path, settings: CaptureSettings, target: TargetSettings = TargetSettings()
) -> Manifest:
    """Capture the states of every answer in `responses` (a responses folder) into the captures folder `out`.

    Resumes after a kill at the first unfinished shard. Returns at once where `out` is complete. Raises InputError for
    other settings or responses than `out` was begun with, another target than the responses', taps that do not fit,
    a full disk.
    """
    manifest = read_manifest(responses, "responses")
    settings.boundaries_of(manifest.facts["target"]["num_hidden_layers"])
    stage = begin(out, "captures", recorded(settings, target), {"responses": responses})
    if stage.complete is not None:
        return stage.complete
    lines = check_file(responses, RESPONSES, manifest)
    loaded = load_target(target.name, dtype=_precision(stage, settings), trust_remote_code=target.trust_remote_code)
    check_target(loaded, manifest.facts, responses)
    boundaries = settings.boundaries_of(loaded.num_hidden_layers)
    sources, skipped = survey(lines, settings)
    if not sources:
        raise InputError(
            wanted="at least one sample with a supervised token",
            got=f"none; skipped: {dict(skipped)}",
            where=str(lines),
            next="--set capture.max_length to more than the prompts' lengths",
        )
    entries, files = _capture_all(stage, lines, sources, loaded, boundaries, settings)
    index = write_index(entries)
    write_atomic(out / INDEX, index)
    done = stage.finish(
        files={**files, INDEX: hash_bytes(index.encode())},
        facts={
            "target": loaded.identity.model_dump(),
            "tokenizer_hash": loaded.tokenizer_hash,
            "template_hash": loaded.template_hash,
            "stop_ids": list(loaded.stop_ids),
            "boundaries": list(boundaries),
            "dtype": settings.store,
            "computed_in": str(loaded.dtype).removeprefix("torch."),
            "last_hidden_norm": "before",
            "greedy": manifest.facts["greedy"],
            "counts": _counts(entries),
            "skipped": dict(skipped),
        },
    )
    (out / JOURNAL).unlink(missing_ok=True)
    say(f"captures: {len(entries)} samples, {sum(entry.length for entry in entries):,} tokens in {out}")
    return done


def _precision(stage: Stage, settings: CaptureSettings) -> torch.dtype:
    """What `auto` measured at the first start holds for every resumption: one folder, one arithmetic."""
    if "precision" not in stage.decided:
        stage.save(precision=chosen_precision(settings))
    return DTYPES[stage.decided["precision"]]


def chosen_precision(settings: CaptureSettings) -> str:
    """The target's arithmetic as set, or as measured here."""
    auto = settings.precision == "auto"
    chosen = fastest_dtype(settings.batch_tokens) if auto else DTYPES[settings.precision]
    return str(chosen).removeprefix("torch.")


def check_target(target: Target, facts: JSON, responses: Path) -> None:
    """Raise InputError unless `target` wrote the responses of these facts."""
    theirs: JSON = facts["target"]
    advice = f"use the responses' own target ({theirs['name']}), or answer the prompts again with this one"
    for name, ours, wrote, code in (
        ("target weights_hash", target.identity.weights_hash, theirs["weights_hash"], "target_revision"),
        ("tokenizer_hash", target.tokenizer_hash, facts["tokenizer_hash"], "tokenizer_mismatch"),
        ("template_hash", target.template_hash, facts["template_hash"], "template_mismatch"),
    ):
        check_same(name, ours, wrote, responses, advice, code)


def survey(path: Path, settings: CaptureSettings) -> tuple[list[Source], Counter[str]]:
    """What is to be captured, in the order of ids, and counts of what is not. Holds numbers, no tokens.

    The order of ids, not of lines: answers are written as they finish, which differs from run to run.
    """
    sources, skipped, offset = [], Counter(), 0
    with path.open("rb") as file:
        offsets = []
        for line in file:
            offsets.append(offset)
            offset += len(line)
    for offset, line in zip(offsets, read_responses(path), strict=True):
        if settings.split not in ("all", line["split"]):
            skipped[f"not {settings.split}"] += 1
            continue
        length = min(len(line["input_ids"]), settings.max_length)
        if line["prompt_tokens"] >= length:
            skipped[TRUNCATED] += 1
            continue
        sources.append(Source(str(line["id"]), str(line["split"]), offset, length, line["prompt_tokens"]))
    return sorted(sources, key=lambda source: source.id), skipped


def _capture_all(
    stage: Stage,
    lines: Path,
    sources: Sequence[Source],
    target: Target,
    boundaries: tuple[int, ...],
    settings: CaptureSettings,
) -> tuple[list[Entry], dict[str, str]]:
    shards = plan_shards([source.length for source in sources], settings.batch_tokens, settings.shard_tokens)
    checksums = _finished_shards(stage.folder)
    entries: list[Entry] = []
    store = DTYPES[settings.store]
    total = sum(source.length for source in sources)
    done = sum(
        sources[number].length
        for shard, batches in enumerate(shards)
        if shard_name(shard) in checksums
        for batch in batches
        for number in batch
    )
    with Progress("capture", total, "tokens", done=done) as bar, lines.open("rb") as file:
        for shard, batches in enumerate(shards):
            name = shard_name(shard)
            order = [sources[number] for batch in batches for number in batch]
            entries.extend(_entries(order, name))
            if name in checksums:
                continue
            samples: list[Sample] = []
            for batch in batches:
                ids = [read_ids(file, sources[number]) for number in batch]
                states = capture_batch(target, ids, boundaries, store)
                samples.extend(
                    make_sample(sources[number], *captured) for number, captured in zip(batch, states, strict=True)
                )
                bar.advance(sum(map(len, ids)))
            checksums[name] = write_shard(stage.folder / name, pack(samples))
            write_atomic(stage.folder / JOURNAL, json.dumps(checksums) + "\n")
            stage.save()
    entries.sort(key=lambda entry: entry.id)
    return entries, {shard_name(shard): checksums[shard_name(shard)] for shard in range(len(shards))}


def capture_batch(
    target: Target, batch: Sequence[list[int]], boundaries: Sequence[int], store: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One forward of the backbone over samples of ids; for each its taps [T, A], boundary n [T, H] and ids [T].

    Which other samples share the forward changes a state by no more than the kernels' blocking does: 1e-6 of its norm
    in float32, 2e-2 in bfloat16 (measured on the default target; docs/decisions/0032-captures.md).
    """
    n = target.num_hidden_layers
    width = max(map(len, batch))
    ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, ids in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    with torch.inference_mode(), record_boundaries(target, sorted({*boundaries, n})) as recorder:
        target.backbone(input_ids=ids_BT.to(target.model.device), use_cache=False)
        return [
            (
                torch.cat([recorder.states[boundary][row, : len(ids)] for boundary in boundaries], dim=-1).to(
                    "cpu", store
                ),
                recorder.states[n][row, : len(ids)].to("cpu", store, copy=True),
                ids_BT[row, : len(ids)],
            )
            for row, ids in enumerate(batch)
        ]


def make_sample(source: Source, taps_TA: Tensor, last_hidden_TH: Tensor, ids_T: Tensor) -> Sample:
    """Raises InputError, the sample named, for states that are not finite."""
    for name, states in (("taps", taps_TA), ("last hidden", last_hidden_TH)):
        if not torch.isfinite(states.sum(dtype=torch.float32)):
            raise InputError(
                wanted="finite states",
                got=f"NaN or infinity in the {name}",
                where=f"sample {source.id}",
                next="capture in float32 (--set capture.precision=float32), or leave that prompt out",
            )
    mask = torch.arange(source.length) >= source.prompt_tokens
    return Sample(source.id, source.split, taps_TA, last_hidden_TH, ids_T, mask)


def read_ids(file: IO[bytes], source: Source) -> list[int]:
    """The token ids of one sample, cut to its length."""
    file.seek(source.offset)
    return json.loads(file.readline())["input_ids"][: source.length]


def _entries(sources: Sequence[Source], shard: str) -> list[Entry]:
    """Index entries of samples that lie one after another in `shard`."""
    entries, start = [], 0
    for source in sources:
        entries.append(Entry(source.id, source.split, shard, start, source.length, source.prompt_tokens))
        start += source.length
    return entries


def _finished_shards(folder: Path) -> dict[str, str]:
    """Shards of an earlier run whose files still are what its journal says; the others are made again."""
    path = folder / JOURNAL
    if not path.is_file():
        return {}
    journal: dict[str, str] = json.loads(path.read_text())
    return {
        name: checksum
        for name, checksum in journal.items()
        if (folder / name).is_file() and hash_file(folder / name) == checksum
    }


def _counts(entries: Sequence[Entry]) -> dict[str, int]:
    counts: Counter[str] = Counter(samples=len(entries), train=0, heldout=0)
    for entry in entries:
        supervised = entry.length - entry.prompt_tokens
        counts.update({entry.split: 1, "tokens": entry.length, "supervised_tokens": supervised})
    return dict(counts)
