"""Does the engine accept what the evaluator promised? The walk over captures against the engine on the same prompts.

Two parts of the pipeline that could agree by luck: the evaluator drafts from stored states with the training attention,
the engine from its own states with its caches. On greedy answers in float32 the two count the same rounds exactly.
Answers decoded in a lower precision part from the engine's at a near tie, and another text has another accept length:
there the walk is over the engine's own text, its states computed anew.
"""

from dataclasses import asdict, dataclass

import torch

from eyas.data.captures import capture_batch
from eyas.data.shards import CaptureReader, Sample
from eyas.engine.generate import Engine
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.models.vocab import target_ids
from eyas.progress import Progress
from eyas.training.evaluate import Tally, add_sample
from eyas.training.teacher import Teacher

ALLOWED = 0.03
"""Relative difference of the two accept lengths."""


@dataclass(frozen=True)
class Served:
    """The two accept lengths over the same prompts, chains of `num_steps`."""

    walk: float
    engine: float
    num_steps: int
    samples: int
    texts_equal: int
    """Answers that the engine repeated token for token."""

    @property
    def difference(self) -> float:
        return abs(self.engine - self.walk) / self.walk

    @property
    def as_dict(self) -> dict[str, float | int]:
        return {**asdict(self), "difference": round(self.difference, 6)}


def walk_against_engine(
    target: Target,
    draft: Draft,
    reader: CaptureReader,
    *,
    num_steps: int,
    tokens: int,
    length: int,
    split: str = "heldout",
) -> Served | None:
    """Walk and decode answers of `split`, cut at `length` tokens each, `tokens` or a few more in all.

    None where there is none with a round to count.
    """
    chosen = chosen_samples(reader, tokens, length, split)
    tally, words = Tally(num_steps), target_ids(draft.d2t)
    stored, anew = Teacher(target, words, reader.last_hidden_norm), Teacher(target, words, "before")
    samples = [reader.read(index).cut(reader.samples[index].prompt_tokens + length) for index in chosen]
    engine = Engine(target, draft, num_steps=num_steps, announce=False)
    rounds: list[int] = []
    texts: list[list[int]] = []
    try:
        with Progress("check: the engine against the walk", len(samples), "answers") as bar:
            for sample, index in zip(samples, chosen, strict=True):
                prompt_tokens = reader.samples[index].prompt_tokens
                ids = sample.ids_T.tolist()
                got = engine.generate(ids[:prompt_tokens], max_new_tokens=len(ids) - prompt_tokens, num_steps=num_steps)
                rounds.extend(got.rounds)
                texts.append([*ids[:prompt_tokens], *got.ids])
                bar.advance(1)
    finally:
        engine.close()
    equal = 0
    for sample, text in zip(samples, texts, strict=True):
        same = text == sample.ids_T.tolist()
        equal += same
        add_sample(tally, draft, sample if same else states_of(target, reader, sample, text), stored if same else anew)
    walked = tally.result(greedy=True)["accept_length_walk"]
    if walked is None or not rounds:
        return None
    return Served(walked, 1 + sum(rounds) / len(rounds), num_steps, len(samples), equal)


def states_of(target: Target, reader: CaptureReader, sample: Sample, text: list[int]) -> Sample:
    """The sample with another answer to its prompt: states computed here in float32, the last one before its norm."""
    ((taps_TA, last_TH, ids_T),) = capture_batch(target, [text], reader.boundaries, torch.float32)
    prompt_tokens = int((~sample.loss_mask_T.bool()).sum())
    return Sample(sample.id, sample.split, taps_TA, last_TH, ids_T, torch.arange(len(text)) >= prompt_tokens)


def chosen_samples(reader: CaptureReader, tokens: int, length: int, split: str) -> list[int]:
    """Numbers of the first samples of `split` whose answers, cut at `length`, hold `tokens` in all."""
    chosen, held = [], 0
    for number in reader.of_split(split):
        if held >= tokens:
            break
        entry = reader.samples[number]
        chosen.append(number)
        held += min(length, entry.length - entry.prompt_tokens)
    return chosen
