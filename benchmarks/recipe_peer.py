"""speculators' side of bench_recipes.py, run by its interpreter: `recipe_peer.py START SEED STEPS`.

START.json has the draft's sizes, START.safetensors the target's embedding, norm and head, and how often each token is
supervised. Nothing of the recipe is written down here: shape, vocabulary map, loss, optimisers and schedule are what
`TrainConfig()` of their command line holds and what their own functions make of it. Not theirs: the loop around a step
(their Trainer wants an accelerator; clipping to 1.0 is as in it), float32 where it casts to bfloat16, in torch's Muon
too, and the eager loss, for the fused one is a Triton kernel.

The first line out is the recipe. Each line in names a batch's file: one step on it, and its loss out. `save FILE`
writes the draft's tensors.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/conformance"))

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.train.cli import set_seed
from speculators.train.config.schema import TrainConfig
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from torch.optim import _muon
from transformers import get_linear_schedule_with_warmup

from peer_worker import Facts, Tensors, speculators_batch, speculators_untrained

SHAPE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "sliding_window")


def orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch's Newton-Schulz iteration (optim/_muon.py), in the gradient's float32: many a CPU multiplies bfloat16 at a
    tenth of the speed, and a step of Muon would take ten times as long as all the rest of it."""
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def recipe(defaults: TrainConfig) -> dict[str, Any]:
    """What their command line trains with where nothing else is said."""
    shape = {name: getattr(defaults.draft, name) for name in SHAPE}
    parts = [part.model_dump() for part in (defaults.loss, defaults.optimizer, defaults.scheduler)]
    return {"draft": shape, **{name: value for part in parts for name, value in part.items()}}


class Run:
    def __init__(self, facts: Facts, start: Tensors, seed: int, steps: int) -> None:
        defaults = TrainConfig()
        assert defaults.scheduler.scheduler_type == "linear", "the one schedule that is built here"
        self.recipe = recipe(defaults)
        self.config = facts | self.recipe["draft"]
        set_seed(seed)
        self.model = speculators_untrained(self.config, "sdpa")
        counts = {token: count for token, count in enumerate(start["counts"].tolist()) if count}
        d2t, t2d = build_vocab_mappings_from_distribution(counts, facts["draft_vocab_size"], facts["vocab_size"])
        self.model.load_vocab_mappings(t2d, d2t)
        head = start["head"][t2d]
        owned = {"embed_tokens": start["embedding"], "lm_head": head, "verifier_lm_head": head}
        owned["verifier_norm"] = start["norm"]
        _, unexpected = self.model.load_state_dict({f"{name}.weight": w for name, w in owned.items()}, strict=False)
        assert not unexpected, unexpected
        self.model.train()
        _muon._zeropower_via_newtonschulz = orthogonal
        self.optimisers = build_optimizers(self.model, defaults.optimizer)
        planned = TrainerConfig(
            defaults.optimizer.lr, num_epochs=1, save_path="", max_steps=steps, **defaults.scheduler.model_dump()
        )
        warmup, total = _resolve_scheduler_steps(planned, steps)
        self.schedules = [get_linear_schedule_with_warmup(one, warmup, total) for one in self.optimisers]
        self.recipe["warmup_steps"] = warmup
        self.call = {
            "ttt_steps": defaults.loss.ttt_steps,
            "ttt_step_loss_decay": defaults.loss.ttt_step_loss_decay,
            "loss_config": resolve_loss_config(defaults.loss.loss_fn, implementation="eager"),
        }

    def step(self, tensors: Tensors) -> float:
        documents = sum(name.endswith(".ids") for name in tensors)
        batch = speculators_batch({"documents": documents, "config": self.config}, tensors, multiple=1)
        _, loss, _ = self.model(**batch, **self.call)
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        for schedule in self.schedules:
            schedule.step()
        return loss.item()

    def save(self, path: str) -> None:
        """All but what is the target's."""
        owned, state = ("verifier_", "embed_tokens"), self.model.state_dict()
        save_file({name: one.clone() for name, one in state.items() if not name.startswith(owned)}, path)


def main(start: Path, seed: int, steps: int) -> None:
    torch.set_num_threads(int(os.environ["EYAS_BENCH_THREADS"]))
    out, sys.stdout = sys.stdout, sys.stderr
    facts, tensors = json.loads(start.with_suffix(".json").read_text()), load_file(start.with_suffix(".safetensors"))
    run = Run(facts, tensors, seed, steps)
    print(json.dumps(run.recipe), file=out, flush=True)
    for line in sys.stdin:
        word, _, path = line.strip().rpartition(" ")
        if word == "save":
            run.save(path)
        print(json.dumps({} if word else {"loss": run.step(load_file(path))}), file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
