"""Samples whose states are computed when they are asked for: the target beside the trainer, nothing of it on disk.

The same responses, settings and arithmetic give the samples that a capture would hold, in its order: bit for bit where
both run one sample a forward (`capture.batch_tokens = 1`), else within what sharing a forward changes (1e-6 of a
state's norm in float32, docs/decisions/0032-captures.md).
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eyas.data.captures import capture_batch, check_target, make_sample, read_ids, survey
from eyas.data.responses import RESPONSES
from eyas.data.shards import Entry, NormState, Sample, plan_shards
from eyas.errors import InputError
from eyas.models.target import DTYPES, Target
from eyas.recipe import CaptureSettings
from eyas.run import Manifest
from eyas.stage import check_file


class TargetSamples:
    """The answers of a responses folder with the states of `target`, one forward a batch of them.

    Raises InputError for responses of another target, changed ones, and where no sample is left.
    """

    def __init__(self, folder: Path, manifest: Manifest, target: Target, settings: CaptureSettings) -> None:
        check_target(target, manifest.facts, folder)
        self.target, self.settings = target, settings
        self.boundaries = settings.boundaries_of(target.num_hidden_layers)
        self.last_hidden_norm: NormState = "before"
        self.greedy = bool(manifest.facts["greedy"])
        self.lines = check_file(folder, RESPONSES, manifest)
        self.sources, skipped = survey(self.lines, settings)
        if not self.sources:
            raise InputError(
                wanted="at least one sample with a supervised token",
                got=f"none; skipped: {dict(skipped)}",
                where=str(self.lines),
                next="--set capture.max_length to more than the prompts' lengths",
                code="mask_empty",
            )
        self.samples = [Entry(one.id, one.split, "", 0, one.length, one.prompt_tokens) for one in self.sources]

    def read_all(self, numbers: Sequence[int]) -> list[Sample]:
        """These samples, in this order, by as few forwards of `capture.batch_tokens` as hold them."""
        lengths = [self.samples[number].length for number in numbers]
        found: dict[int, Sample] = {}
        for places in plan_shards(lengths, self.settings.batch_tokens, sum(lengths))[0]:
            chosen = [numbers[place] for place in places]
            ids = [self.ids(number) for number in chosen]
            states = capture_batch(self.target, ids, self.boundaries, DTYPES[self.settings.store])
            for place, number, captured in zip(places, chosen, states, strict=True):
                found[place] = make_sample(self.sources[number], *captured)
        return [found[place] for place in range(len(numbers))]

    def mask(self, number: int) -> Tensor:
        """The loss mask [T]: the answer."""
        entry = self.samples[number]
        return torch.arange(entry.length) >= entry.prompt_tokens

    def ids(self, number: int) -> list[int]:
        """The token ids, read from their line."""
        with self.lines.open("rb") as file:
            return read_ids(file, self.sources[number])

    def of_split(self, split: str) -> list[int]:
        """Numbers of the samples of a split."""
        return [number for number, entry in enumerate(self.samples) if entry.split == split]
