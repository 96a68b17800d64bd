"""Packed batches of captured samples: a plan made of sample lengths alone, so a run can resume at any step of it.

Shapes: T packed rows, A width of the taps, H target hidden.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.data.shards import Sample, Samples
from eyas.errors import InputError
from eyas.progress import say
from eyas.recipe import TrainSettings
from eyas.training.distributed import Ranks
from eyas.training.loss import Batch
from eyas.training.rows import supervise
from eyas.training.teacher import Teacher, next_tokens

UNKNOWN = -1


def order(samples: int, epochs: float, seed: int) -> list[int]:
    """Sample indices over all epochs, each epoch a fresh permutation that depends on the seed and its number alone."""
    total = max(1, round(epochs * samples))
    indices: list[int] = []
    for epoch in range(math.ceil(total / samples)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        indices += torch.randperm(samples, generator=generator).tolist()
    return indices[:total]


def pack(indices: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Consecutive samples packed up to `batch_tokens`; a longer sample is a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for index in indices:
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


GROUP_TOKENS = 8192


def spread(samples: Samples, indices: list[int], rows: int) -> list[list[int]]:
    """Of these samples some of about `rows` rows together, spread evenly, in groups that fit in memory at one time."""
    lengths = [sample.length for sample in samples.samples]
    total = sum(lengths[index] for index in indices)
    return pack(indices[:: max(1, total // rows)], lengths, GROUP_TOKENS)


def planned(samples: Samples, settings: TrainSettings) -> list[list[list[int]]]:
    """Optimiser steps over all epochs, each of packed batches, each of indices of train samples."""
    return steps_over([sample.length for sample in samples.samples], samples.of_split("train"), settings)


def steps_over(lengths: list[int], chosen: list[int], settings: TrainSettings) -> list[list[list[int]]]:
    """The same of samples of these `lengths`, those of the train split `chosen`."""
    indices = [chosen[index] for index in order(len(chosen), settings.epochs, settings.seed)]
    packed = pack(indices, lengths, settings.batch_tokens)
    return [packed[first : first + settings.accumulate] for first in range(0, len(packed), settings.accumulate)]


def parts(batches: list[list[int]], lengths: list[int], batch_tokens: int, ranks: int) -> list[list[list[int]]]:
    """For each of `ranks` processes its packed batches of one optimiser step's `batches`: together the same samples.

    The longest samples go first, each to the process with the fewest tokens. All get as many batches, the last of some
    without a sample.
    """
    if ranks == 1:
        return [batches]
    indices = [index for batch in batches for index in batch]
    places: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(indices)), key=lambda place: (-lengths[indices[place]], place)):
        rank = tokens.index(min(tokens))
        places[rank].append(place)
        tokens[rank] += lengths[indices[place]]
    packed = [pack([indices[place] for place in sorted(mine)], lengths, batch_tokens) for mine in places]
    most = max(map(len, packed))
    return [part + [[]] * (most - len(part)) for part in packed]


def check_shares(plan: list[list[list[int]]], settings: TrainSettings, ranks: Ranks) -> None:
    """Raise InputError where no optimiser step has a sample for each process; say it where some have not."""
    counts = [sum(len(indices) for indices in step) for step in plan]
    if max(counts) < ranks.size:
        raise InputError(
            wanted=f"at least one sample in an optimiser step for each of {ranks.size} processes",
            got=f"{max(counts)} at most, in steps of {settings.accumulate} times {settings.batch_tokens} tokens",
            where="train.accumulate, train.batch_tokens",
            next=f"--set train.accumulate={settings.accumulate * ranks.size}, or --nproc-per-node {max(counts)}",
        )
    short = sum(count < ranks.size for count in counts)
    if short:
        say(f"train: {short} of {len(plan)} steps have fewer samples than processes; some idle in them")


class Batches:
    """Loads batches of captured samples. The teacher's argmax is the next token where greedy decoding wrote the answer;
    elsewhere it is computed once a sample and kept in a file, for it costs a third of a training step."""

    def __init__(self, reader: Samples, teacher: Teacher, *, steps: int, loss_on: str, argmax_file: Path) -> None:
        self.reader, self.teacher = reader, teacher
        self.steps, self.loss_on = steps, loss_on
        self.next_is_argmax = reader.greedy and loss_on == "assistant"
        self.starts = np.cumsum([0, *(sample.length for sample in reader.samples)])
        self.kept_argmax = None if self.next_is_argmax else _open_argmax(argmax_file, int(self.starts[-1]))

    def load(self, indices: list[int]) -> Batch:
        """The batch of these samples, float32 states, where the samples' own are."""
        samples = self.reader.read_all(indices)
        masks = [self._mask(sample) for sample in samples]
        argmax = [self._argmax(index, sample) for index, sample in zip(indices, samples, strict=True)]
        return Batch(
            samples=tuple(sample.id for sample in samples),
            ids_T=torch.cat([sample.ids_T for sample in samples]).to(torch.int64),
            taps_TA=torch.cat([sample.taps_TA for sample in samples]).to(torch.float32),
            last_hidden_TH=torch.cat([sample.last_hidden_TH for sample in samples]).to(torch.float32),
            argmax_T=torch.cat(argmax),
            rows=supervise(torch.cat(masks), [len(mask) for mask in masks], self.steps),
        )

    def _mask(self, sample: Sample) -> Tensor:
        return torch.ones_like(sample.loss_mask_T) if self.loss_on == "all" else sample.loss_mask_T

    def _argmax(self, index: int, sample: Sample) -> Tensor:
        if self.kept_argmax is None:
            return next_tokens(sample.ids_T)
        kept_T = self.kept_argmax[self.starts[index] : self.starts[index + 1]]
        if kept_T[0] == UNKNOWN:
            found_T = self.teacher.argmax(sample.last_hidden_TH).cpu().numpy()
            kept_T[1:] = found_T[1:]
            kept_T[0] = found_T[0]  # last: it tells the other processes of this machine that all are known
        return torch.from_numpy(kept_T.astype(np.int64))


class Ahead:
    """Batches of optimiser steps, those of the next one read while one is computed: training waits for no disk."""

    def __init__(self, read: Callable[[int], list[Batch]], steps: int) -> None:
        self.read, self.steps = read, steps
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.reading: dict[int, Future[list[Batch]]] = {}

    def take(self, step: int) -> list[Batch]:
        """Those of `step`. Raises what reading them raised."""
        found = self.reading.pop(step, None) or self.reader.submit(self.read, step)
        self.reading = {step + 1: self.reader.submit(self.read, step + 1)} if step + 1 < self.steps else {}
        return found.result()


def _open_argmax(path: Path, tokens: int) -> np.memmap:
    """A file of one int32 a captured token, UNKNOWN until computed. It only saves work: a stale size starts it anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.stat().st_size != 4 * tokens:
        np.full(tokens, UNKNOWN, dtype=np.int32).tofile(path)
    return np.memmap(path, dtype=np.int32, mode="r+", shape=(tokens,))
