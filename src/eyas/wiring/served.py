"""Does the engine accept what the evaluator promised? The walk over captures against the engine on the same prompts.

Two parts of the pipeline that could agree by luck: the evaluator drafts from stored states with the training attention,
the engine from its own states with its caches. On greedy answers in float32 the two count the same rounds exactly; on
answers or states of a lower precision a near tie may part the texts, and the two stay within a few percent.
"""

from dataclasses import asdict, dataclass

from eyas.data.shards import CaptureReader
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
    tally = Tally(num_steps)
    teacher = Teacher(target, target_ids(draft.d2t), reader.last_hidden_norm)
    samples = [reader.read(index).cut(reader.samples[index].prompt_tokens + length) for index in chosen]
    for sample in samples:
        add_sample(tally, draft, sample, teacher)
    engine = Engine(target, draft, num_steps=num_steps, announce=False)
    rounds: list[int] = []
    equal = 0
    try:
        with Progress("check: the engine against the walk", len(samples), "answers") as bar:
            for sample, index in zip(samples, chosen, strict=True):
                prompt_tokens = reader.samples[index].prompt_tokens
                ids = sample.ids_T.tolist()
                answer = ids[prompt_tokens:]
                got = engine.generate(ids[:prompt_tokens], max_new_tokens=len(answer), num_steps=num_steps)
                rounds.extend(got.rounds)
                equal += list(got.ids) == answer
                bar.advance(1)
    finally:
        engine.close()
    walked = tally.result(greedy=True)["accept_length_walk"]
    if walked is None or not rounds:
        return None
    return Served(walked, 1 + sum(rounds) / len(rounds), num_steps, len(samples), equal)


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
