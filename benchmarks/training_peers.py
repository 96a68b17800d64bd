"""The peers' side of bench_training.py, run by their interpreter: `training_peers.py PEER CASE PRECISION`.

PEER is speculators or specforge, CASE a pair of files as tests/conformance/peer_cases.py writes them. Every step
collates, computes the teacher, unrolls, goes back and steps the optimiser, all by the peer's own code but the last. In
bfloat16 the products are, by torch's autocast, as in speculators' trainer; weights and optimiser stay float32 for
everybody.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/conformance"))

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from worker_loop import optimiser_step, serve

from peer_worker import Facts, Tensors, specforge_batch, specforge_strategy, speculators_batch, speculators_model

Step = Callable[[int | None], dict[str, Any]]


def some(facts: Facts, documents: int | None) -> Facts:
    return facts if documents is None else facts | {"documents": documents}


def mixed(precision: str) -> torch.autocast:
    """For the forward pass alone, as torch advises: what goes back follows it."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")


def speculators_step(facts: Facts, tensors: Tensors, precision: str) -> Step:
    """Its trainer's call, on the fastest attention that has a backward on a CPU. The head is frozen, as it is there."""
    model = speculators_model(facts["config"], tensors, "sdpa")
    model.lm_head.weight.requires_grad_(False)
    update = optimiser_step(model.parameters())
    loss_config = resolve_loss_config("kl_div", implementation="eager")

    def step(documents: int | None) -> dict[str, Any]:
        with mixed(precision):
            _, loss, _ = model(
                **speculators_batch(some(facts, documents), tensors),
                ttt_steps=facts["steps"],
                ttt_step_loss_decay=facts["decay"],
                loss_config=loss_config,
            )
        loss.backward()
        update()
        return {"loss": loss.item()}

    return step


def specforge_step(facts: Facts, tensors: Tensors, precision: str) -> Step:
    strategy = specforge_strategy(facts["config"], tensors, facts["steps"], facts["decay"], "sdpa")
    update = optimiser_step(strategy.eagle3_model.parameters())

    def step(documents: int | None) -> dict[str, Any]:
        with mixed(precision):
            loss = strategy.forward_loss(specforge_batch(some(facts, documents), tensors)).loss
        loss.backward()
        update()
        return {"loss": loss.item()}

    return step


if __name__ == "__main__":
    peer, case, precision = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    make = {"speculators": speculators_step, "specforge": specforge_step}[peer]
    facts, tensors = json.loads(case.with_suffix(".json").read_text()), load_file(case.with_suffix(".safetensors"))
    serve(make(facts, tensors, precision))
