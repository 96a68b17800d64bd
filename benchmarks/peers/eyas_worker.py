"""Eyas's side of bench_peers.py: the embedded engine, on its fastest path."""

import sys
from pathlib import Path

import torch
from worker import JSON, Answer, Running, serve

from eyas.engine.generate import Engine
from eyas.models.checkpoint import load_draft
from eyas.models.target import DTYPES, load_target
from eyas.settings import DraftingSettings


def start(job: JSON) -> Running:
    torch.set_num_threads(job["threads"])
    target = load_target(job["target"], dtype=job["precision"])
    shape = job["shape"]
    if job["draft"] is None:
        engine, num_steps = Engine(target), 0
    else:
        draft, _ = load_draft(Path(job["draft"]), target.embedding, DTYPES[job["precision"]])
        tree = {"topk": shape["topk"], "num_draft_tokens": shape["num_draft_tokens"]} if shape["topk"] > 1 else {}
        num_steps = shape["num_steps"]
        engine = Engine(target, draft, drafting=DraftingSettings(num_steps=num_steps, **tree))

    def answer(ids: list[int], max_tokens: int) -> Answer:
        run = engine.generate(ids, max_tokens, num_steps)
        return Answer(
            list(run.ids),
            len(run.ids) - 1 if not num_steps else len(run.rounds),
            run.seconds_prefill,
            run.seconds_decode,
        )

    facts = {"engine": engine.facts.describe(), "threads": torch.get_num_threads(), "python": sys.version.split()[0]}
    return Running(answer, facts)


if __name__ == "__main__":
    serve(start)
