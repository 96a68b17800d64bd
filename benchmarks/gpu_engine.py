"""The embedded engine on one CUDA device: losslessness, then paired speed-ups; writes bench/out/gpu_engine.json.

    python benchmarks/gpu_engine.py               # the default target, then a random Llama of --billions parameters
    python benchmarks/gpu_engine.py --dry-run     # the same steps on the CPU, the random Llama tiny: no figures

Losslessness: texts of chains, trees and n-gram lookup, with CUDA graphs, against plain decoding of the same engine
without them, float32 and bfloat16; and whether graphs were used, or why not.
Speed: plain and speculative decoding in bfloat16 under a simulated accept length of 3, each with graphs and without, in
turn. Random weights cost what trained ones do; their texts mean nothing. Kernels are torch's own on either device: CUDA
has no others here. The dry run's graphs are calls of what was recorded.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.engine.generate import Engine
from eyas.engine.graphs import Recording
from eyas.formats.draft_config import TargetIdentity
from eyas.formats.taps import default_boundaries
from eyas.models.draft import Draft
from eyas.models.target import DEFAULT_TARGET, Target, load_target
from eyas.progress import say
from eyas.recipe import DraftSettings
from eyas.run import machine, versions
from eyas.settings import DraftingSettings
from eyas.training.initialise import draft_config

CURVE = (0.81, 0.66, 0.53)
"""Survival of a chain of three whose accept length is 3.0."""
WAYS = {
    "chain": DraftingSettings(num_steps=3),
    "tree": DraftingSettings(num_steps=3, topk=4, num_draft_tokens=8),
    "ngram": DraftingSettings(num_steps=3, ngram=3),
}
OUT = Path("bench/out/gpu_engine.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--billions", type=float, default=7.0, help="parameters of the random Llama, about")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    device = "cpu" if args.dry_run else "cuda"
    if args.dry_run:
        args.prompts, args.tokens = 1, 8
    recording = Recording(call_again) if args.dry_run else None
    report: dict[str, Any] = {"dry_run": args.dry_run, "device": device_name(device)}
    for precision in ("float32", "bfloat16"):
        target = on(load_target(args.target, dtype=precision), device)
        prompts = prompts_of(target, args.prompts)
        report[f"lossless_{precision}"] = lossless(target, prompts, args.tokens, recording)
    report["target"] = args.target
    report["default_target"] = speed(target, prompts, args.tokens, recording)
    shape = (256, 2, 8) if args.dry_run else shape_of(args.billions)
    large = random_llama(target, *shape, device)
    report["random_llama"] = {
        "billions": round(sum(parameter.numel() for parameter in large.model.parameters()) / 1e9, 2),
        "lossless_bfloat16": lossless(large, prompts[:2], args.tokens, recording),
        **speed(large, prompts, args.tokens, recording),
    }
    report |= {"machine": machine(), "versions": versions()}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def call_again() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A recorder without a device: a step is replayed by calling it."""

    def record(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step

    return record


def lossless(target: Target, prompts: Sequence[list[int]], tokens: int, recording: Recording | None) -> dict[str, Any]:
    """Per way of drafting: the engine's own verdict, whether graphs ran, and how many texts are plain decoding's."""
    found = {}
    for name, drafting in WAYS.items():
        engine = Engine(
            target, make_draft(target), drafting=drafting, kernels="torch", announce=False, recording=recording
        )
        same = 0
        for prompt in prompts:
            rest(engine, True)
            plain = engine.generate(prompt, tokens, 0, ignore_eos=True)
            rest(engine, False)
            fast = engine.generate(prompt, tokens, 3, ignore_eos=True)
            replayed = engine.generate(prompt, tokens, 0, ignore_eos=True)
            same += fast.ids == plain.ids == replayed.ids
        engine.close()
        found[name] = {"self_test": engine.facts.lossless, "equal": same, "of": len(prompts), "graphs": used(engine)}
        say(f"{target.identity.name}, {engine.facts.describe()}: {name} {same} of {len(prompts)} texts equal")
    return found


def speed(target: Target, prompts: Sequence[list[int]], tokens: int, recording: Recording | None) -> dict[str, Any]:
    """Plain and simulated decoding, with graphs and without, prompt by prompt, who goes first alternating."""
    drafting = DraftingSettings(num_steps=3, simulate=CURVE)
    engine = Engine(target, make_draft(target), drafting=drafting, kernels="torch", recording=recording)
    ways = [(num_steps, eager) for num_steps in (0, 3) for eager in (False, True)]
    seconds, rounds = dict.fromkeys(ways, 0.0), list[int]()
    for num_steps, eager in ways:
        rest(engine, eager)
        for prompt in prompts[:2]:  # whose graphs are recorded meanwhile
            engine.generate(prompt, tokens, num_steps, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        for num_steps, eager in ways if index % 2 == 0 else ways[::-1]:
            rest(engine, eager)
            run = engine.generate(prompt, tokens, num_steps, ignore_eos=True)
            seconds[num_steps, eager] += run.seconds_decode
            rounds += run.rounds if num_steps else ()
    engine.close()
    return {
        "graphs": used(engine),
        "speedup_at_simulated_3": round(seconds[0, False] / seconds[3, False], 3),
        "speedup_at_simulated_3_eager": round(seconds[0, True] / seconds[3, True], 3),
        "graphs_over_eager_plain": round(seconds[0, True] / seconds[0, False], 3),
        "graphs_over_eager_speculative": round(seconds[3, True] / seconds[3, False], 3),
        "accept_length": round(1 + sum(rounds) / len(rounds), 3),
        "plain_tokens_per_second": round(len(prompts) * (tokens - 1) / seconds[0, False], 1),
    }


def rest(engine: Engine, eager: bool) -> None:
    for graphs in engine.graphs:
        graphs.on = not eager


def used(engine: Engine) -> dict[str, str | int]:
    """What became of the graphs of target and draft: why they are not used, or how many steps were recorded."""
    return {graphs.name: graphs.why or graphs.recorded for graphs in engine.graphs}


def on(target: Target, device: str) -> Target:
    target.model.to(device)
    return target


def prompts_of(target: Target, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, target.vocab_size, (count, 64), generator=generator).tolist()


def shape_of(billions: float) -> tuple[int, int, int]:
    """Hidden width, layers and heads of a Llama of about that size: 12 hidden^2 parameters a layer, 32 layers."""
    heads = max(8, round((billions * 1e9 / (12 * 32)) ** 0.5 / 128))
    return heads * 128, 32, heads


def random_llama(like: Target, hidden: int, layers: int, heads: int, device: str) -> Target:
    """A Llama with random weights in bfloat16, made on the device, with another target's tokenizer."""
    config = LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 128 * 128,
        num_hidden_layers=max(layers, 8),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    identity = TargetIdentity(
        name="random-llama",
        weights_hash="",
        model_type="llama",
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
    )
    return Target(model, like.tokenizer, Path(), identity, torch.bfloat16)


def make_draft(target: Target) -> Draft:
    """Untrained, of the default shape."""
    torch.manual_seed(0)
    draft = Draft(draft_config(target, default_boundaries(target.num_hidden_layers), DraftSettings()))
    draft.share_embedding(target.embedding)
    return draft.to(target.model.device)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    main()
