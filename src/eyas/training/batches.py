"""Packed batches of captured samples: a plan made of sample lengths alone, so a run can resume at any step of it.

Shapes: T packed rows, A width of the taps, H target hidden.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.data.shards import Sample, Samples
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


class Batches:
    """Loads batches of captured samples. The teacher's argmax is the next token where greedy decoding wrote the answer;
    elsewhere it is computed once a sample and kept in a file, for it costs a third of a training step."""

    def __init__(self, reader: Samples, teacher: Teacher, *, steps: int, loss_on: str, argmax_file: Path) -> None:
        self.reader, self.teacher = reader, teacher
        self.steps, self.loss_on = steps, loss_on
        self.next_is_argmax = reader.greedy and loss_on == "assistant"
        self.starts = np.cumsum([0, *(sample.length for sample in reader.samples)])
        self.kept_argmax = None if self.next_is_argmax else _open_argmax(argmax_file, int(self.starts[-1]))

    def load(self, indices: list[int], device: torch.device) -> Batch:
        """The batch of these samples, float32 states."""
        samples = self.reader.read_all(indices)
        masks = [self._mask(sample) for sample in samples]
        argmax = [self._argmax(index, sample) for index, sample in zip(indices, samples, strict=True)]
        return Batch(
            samples=tuple(sample.id for sample in samples),
            ids_T=torch.cat([sample.ids_T for sample in samples]).to(device, torch.int64),
            taps_TA=torch.cat([sample.taps_TA for sample in samples]).to(device, torch.float32),
            last_hidden_TH=torch.cat([sample.last_hidden_TH for sample in samples]).to(device, torch.float32),
            argmax_T=torch.cat(argmax).to(device),
            rows=supervise(torch.cat(masks), [len(mask) for mask in masks], self.steps).to(device),
        )

    def _mask(self, sample: Sample) -> Tensor:
        return torch.ones_like(sample.loss_mask_T) if self.loss_on == "all" else sample.loss_mask_T

    def _argmax(self, index: int, sample: Sample) -> Tensor:
        if self.kept_argmax is None:
            return next_tokens(sample.ids_T)
        kept_T = self.kept_argmax[self.starts[index] : self.starts[index + 1]]
        if kept_T[0] == UNKNOWN:
            kept_T[:] = self.teacher.argmax(sample.last_hidden_TH).cpu().numpy()
        return torch.from_numpy(kept_T.astype(np.int64))


def _open_argmax(path: Path, tokens: int) -> np.memmap:
    """A file of one int32 a captured token, UNKNOWN until computed. It only saves work: a stale size starts it anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.stat().st_size != 4 * tokens:
        np.full(tokens, UNKNOWN, dtype=np.int32).tofile(path)
    return np.memmap(path, dtype=np.int32, mode="r+", shape=(tokens,))
