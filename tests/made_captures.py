"""A small captures folder written by hand: greedy answers of a tiny target to random prompts, float32 states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.data.shards import Entry, Sample, pack, shard_name, write_index, write_shard
from eyas.models.target import Target, load_target, record_boundaries
from eyas.run import hash_file, write_atomic, write_manifest

BOUNDARIES = (2, 4, 5)


@torch.no_grad()
def greedy_answer(target: Target, prompt: list[int], limit: int) -> list[int]:
    ids = list(prompt)
    for _ in range(limit):
        ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids


@torch.no_grad()
def captured(target: Target, name: str, split: str, ids: list[int], prompt_tokens: int) -> Sample:
    n = target.num_hidden_layers
    with record_boundaries(target, [*BOUNDARIES, n]) as recorder:
        target.backbone(input_ids=torch.tensor([ids]))
    taps = torch.cat([recorder.states[boundary][0] for boundary in BOUNDARIES], dim=-1)
    mask = torch.arange(len(ids)) >= prompt_tokens
    return Sample(name, split, taps, recorder.states[n][0].clone(), torch.tensor(ids), mask)


def make_samples(target: Target, train: int = 10, heldout: int = 4, limit: int = 20, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(train + heldout):
        length = int(torch.randint(4, 12, (), generator=generator))
        prompt = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        ids = greedy_answer(target, prompt, limit)
        split = "train" if number < train else "heldout"
        samples.append(captured(target, f"sample-{number}", split, ids, length))
    return samples


def poisoned(sample: Sample, name: str = "taps_TA", value: float = float("nan")) -> Sample:
    """With `value` in the states of a row whose next two tokens are the answer's."""
    states = getattr(sample, name).clone()
    states[len(sample.ids_T) - 3] = value
    return replace(sample, **{name: states})


def with_two_answers(sample: Sample) -> Sample:
    """The second and third token, of the prompt, are marked too."""
    mask_T = sample.loss_mask_T.clone()
    mask_T[1:3] = True
    return replace(sample, loss_mask_T=mask_T)


def write_captures(folder: Path, made_by: Target, samples: list[Sample], **facts: Any) -> Path:
    folder.mkdir(parents=True)
    entries, start = [], 0
    for sample in samples:
        length = len(sample.ids_T)
        prompt = int((~sample.loss_mask_T).sum())
        entries.append(Entry(sample.id, sample.split, shard_name(0), start, length, prompt))
        start += length
    checksum = write_shard(folder / shard_name(0), pack(samples))
    write_atomic(folder / "index.json", write_index(entries))
    known = {
        "target": made_by.identity.model_dump(),
        "tokenizer_hash": made_by.tokenizer_hash,
        "template_hash": made_by.template_hash,
        "stop_ids": list(made_by.stop_ids),
        "boundaries": list(BOUNDARIES),
        "dtype": "float32",
        "last_hidden_norm": "before",
        "greedy": True,
    }
    files = {shard_name(0): checksum, "index.json": hash_file(folder / "index.json")}
    write_manifest(folder, "captures", settings={}, inputs={}, files=files, facts={**known, **facts}, seconds=0.0)
    return folder


def made(folder: Path, target_folder: Path, **counts: int) -> tuple[Path, Target]:
    target = load_target(str(target_folder))
    return write_captures(folder, target, make_samples(target, **counts)), target
