"""Training tokens a second, against the floor that the matrix products alone set.

    python benchmarks/bench_train.py --ttt 3 4 --batch-tokens 2048 [--captures RUN/captures] [--threads 2]

Without captures it makes random ones of the default target's shape (lengths as its answers have them). Tokens are
sequence tokens, prompt included, padding never: there is none. The floor counts multiply-adds of the forward and twice
that for the backward (once for a frozen head), not the optimiser's, over the rate of a large product measured here
first.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.shards import CaptureReader
from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft
from eyas.models.vocab import build_vocab, draft_ids
from eyas.recipe import TrainSettings
from eyas.run import machine, versions
from eyas.training.loop import row_weights
from eyas.training.loss import Batch, ttt_loss
from eyas.training.optimise import Optimiser, make_optimiser, trained
from eyas.training.rows import supervise
from eyas.training.start import trainable

VOCAB, HIDDEN = 49152, 576
LENGTH, PROMPT = 204, 64
"""Of an answer of the default target, in tokens, and of its prompt."""


def shape(draft_vocab: int) -> DraftConfig:
    """A draft for the default target."""
    return DraftConfig(
        boundaries=(2, 15, 27),
        target_num_hidden_layers=30,
        target_hidden_size=HIDDEN,
        target_model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        fc_norm=True,
    )


class RandomTeacher:
    """The product and softmax of a real teacher, on random weights of a real head's spread: wider logits would leave
    subnormal probabilities, which cost a CPU twenty times an ordinary one."""

    def __init__(self, draft_vocab: int) -> None:
        self.weight_DH = torch.randn(draft_vocab, HIDDEN) * 4 / HIDDEN**0.5

    def probabilities(self, last_hidden_RH: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.nn.functional.linear(last_hidden_RH.to(dtype), self.weight_DH.to(dtype)).float().softmax(-1)


def gemm_rate(dtype: torch.dtype) -> float:
    """Multiply-adds a second of a [1024, 1536] x [1536, 1536] product: the best of a second's tries."""
    x, weight = torch.randn(1024, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < 1:
        before = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - before)
    return 1024 * 1536 * 1536 / best


def multiply_adds(config: DraftConfig, tokens: int, rows: list[int], kept: list[int], head: str) -> float:
    """Of one batch, backward included; attention's own products left out (under 3 %)."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim * 2 * hidden
    query_to_mlp = 2 * hidden * heads + heads * hidden + 3 * hidden * config.intermediate_size
    vocabulary = hidden * config.draft_vocab_size
    inside = tokens * (config.taps_width * hidden + kv) + sum(rows) * query_to_mlp + sum(rows[1:]) * kv
    return 3 * inside + (3 if head == "trained" else 2) * sum(kept) * vocabulary + rows[0] * vocabulary


def make_batch(lengths: list[int], prompt: int, steps: int, config: DraftConfig) -> Batch:
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= prompt for length in lengths])
    return Batch(
        samples=("random",),
        ids_T=torch.randint(0, VOCAB, (total,)),
        taps_TA=torch.randn(total, config.taps_width),
        last_hidden_TH=torch.randn(total, HIDDEN),
        argmax_T=torch.randint(0, config.draft_vocab_size, (total,)),
        rows=supervise(mask, lengths, steps),
    )


def lengths_of(captures: str | None, batch_tokens: int) -> tuple[list[int], int]:
    """Document lengths of a batch, and the usual prompt length."""
    if captures is None:
        return [LENGTH] * max(1, batch_tokens // LENGTH), PROMPT
    samples = CaptureReader(Path(captures)).samples
    count = max(1, round(batch_tokens * len(samples) / sum(sample.length for sample in samples)))
    middle = sorted(sample.length for sample in samples)[len(samples) // 2]
    return [middle] * count, round(sum(sample.prompt_tokens for sample in samples) / len(samples))


def train_step(
    draft: Draft,
    optimiser: Optimiser,
    batch: Batch,
    teacher: Any,
    to_draft: Tensor,
    settings: TrainSettings,
    dtype: torch.dtype,
) -> None:
    """What `Trainer.advance` does with one batch."""
    loss, _ = ttt_loss(draft, batch, teacher, to_draft, row_weights([batch], draft.t2d, settings), dtype)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(list(trained(draft).values()), settings.clip_norm or math.inf)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--captures")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--head", choices=["frozen", "trained"], default=TrainSettings().head)
    parser.add_argument("--optimiser", choices=["adamw", "muon"], default=TrainSettings().optimiser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rate = gemm_rate(dtype)
    print(f"{machine()} {versions()} threads {torch.get_num_threads()}, {2e-9 * rate:.0f} GFLOP/s {options.dtype}")
    config = shape(options.draft_vocab)
    lengths, prompt = lengths_of(options.captures, options.batch_tokens)
    for steps in options.ttt:
        torch.manual_seed(0)
        draft = Draft(config)
        draft.share_embedding(torch.randn(VOCAB, HIDDEN))
        draft.d2t, draft.t2d = build_vocab(torch.arange(VOCAB, 0, -1), options.draft_vocab)
        settings = TrainSettings(ttt_length=steps, optimiser=options.optimiser, head=options.head)
        trainable(draft, settings.head)
        optimiser = make_optimiser(draft, settings, dtype=dtype)
        batch = make_batch(lengths, prompt, steps, config)
        teacher, to_draft = RandomTeacher(options.draft_vocab), draft_ids(draft.t2d)

        one = partial(train_step, draft, optimiser, batch, teacher, to_draft, settings, dtype)
        one()
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < options.seconds:
            one()
            done += 1
        seconds = (time.perf_counter() - started) / done
        rows = [len(index) for index in batch.rows.index]
        floor = multiply_adds(config, sum(lengths), rows, rows, settings.head) / rate
        print(
            f"TTT {steps}: {sum(lengths) / seconds:,.0f} tokens/s ({sum(lengths)} tokens, {rows[0]} supervised rows, "
            f"{seconds:.3f} s a step; floor {floor:.3f} s = {sum(lengths) / floor:,.0f} tokens/s, "
            f"{floor / seconds:.0%} of it reached)"
        )


if __name__ == "__main__":
    main()
