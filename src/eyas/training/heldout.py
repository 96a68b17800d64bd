"""Held-out accept length while training goes on: a few samples, the target asked about each of them once.

EAGLE-3 over-trains: its loss still falls when what a server accepts does so too. The loss does not tell, this does.
"""

from typing import Any

from eyas.data.shards import Sample, Samples
from eyas.models.draft import Draft
from eyas.progress import say
from eyas.training.distributed import Ranks
from eyas.training.evaluate import Tally, Truth, add_sample, truth_of
from eyas.training.metrics import HELD_OUT
from eyas.training.teacher import Teacher


class HeldOut:
    """The samples that are measured: `limit` of the held-out split, spread evenly; chains of `steps`. Of several
    processes each takes every so manieth."""

    def __init__(self, reader: Samples, teacher: Teacher, steps: int, limit: int, ranks: Ranks) -> None:
        self.reader, self.teacher, self.steps, self.ranks = reader, teacher, steps, ranks
        held = reader.of_split("heldout")
        usable = [number for number in held if _one_answer(reader, number)]
        if len(usable) < len(held):
            unfit = f"train: {len(held) - len(usable)} of {len(held)} held-out samples are not measured"
            say(f"{unfit}: theirs is not one answer of two tokens or more, after a prompt, at the end")
        count = min(limit, len(usable))
        self.chosen = [usable[place * len(usable) // count] for place in range(count)]
        self.asked: dict[int, tuple[Sample, Truth]] = {}
        """This process's of the chosen ones, read once: online their states cost a forward of the target."""

    def measure(self, draft: Draft) -> dict[str, Any]:
        """`heldout_accept_length` (the walk; over rows where answers were sampled), `heldout_survival` over rows, and
        `heldout_by_context`: the accept length over rows by the first context length of each bucket."""
        tally = Tally(self.steps)
        for number in self.chosen[self.ranks.place.rank :: self.ranks.size]:
            if number not in self.asked:
                (sample,) = self.reader.read_all([number])
                self.asked[number] = sample, truth_of(sample, self.teacher)
            sample, truth = self.asked[number]
            add_sample(tally, draft, sample, self.teacher, truth)
        tallies = self.ranks.gather(tally)
        for other in tallies[1:]:
            tallies[0].merge(other)
        found = tallies[0].result(self.reader.greedy)
        kind = "accept_length_walk" if self.reader.greedy else "accept_length"
        by_context = {str(bucket["from"]): bucket["accept_length"] for bucket in found["by_length"]}
        return {
            HELD_OUT: round(found[kind], 6),
            "heldout_survival": found["survival"],
            "heldout_by_context": by_context,
        }


def _one_answer(reader: Samples, number: int) -> bool:
    """Whether a chain can be walked: two answer tokens or more, at the end and nowhere else."""
    entry, mask_T = reader.samples[number], reader.mask(number)
    prompt = int((~mask_T).sum())
    return prompt >= 1 and entry.length - prompt >= 2 and not bool(mask_T[:prompt].any())
