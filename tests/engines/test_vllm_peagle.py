"""A P-EAGLE draft of ours in a stock vLLM: the export loads, and vLLM accepts what the embedded engine accepts."""

from pathlib import Path

import pytest

from eyas.engine.generate import Engine
from eyas.formats.methods import METHODS
from eyas.measure.prompts import bench_prompts
from eyas.measure.stats import accept_length
from eyas.models.checkpoint import load_draft
from eyas.models.draft import ParallelDraft
from eyas.models.target import Target
from eyas.progress import say
from running import IN_PROCESS, ONE_PROCESS, run_job
from test_vllm_serving import NUM_STEPS, TOLERANCE, survived

pytestmark = [pytest.mark.engines, pytest.mark.timeout(45 * 60)]

PROMPTS, TOKENS = 8, 32


def test_vllm_drafts_a_whole_chain_and_accepts_what_the_embedded_engine_accepts(
    vllm_python: Path, target: Target, target_folder: Path, parallel_export: Path, tmp_path: Path
) -> None:
    prompts = bench_prompts("test", target, PROMPTS, TOKENS)
    case = {
        "name": "peagle",
        "draft": str(parallel_export),
        "num_steps": NUM_STEPS,
        "speculative": METHODS["peagle"].vllm,
        "prompts": [list(prompt.ids) for prompt in prompts],
        "max_tokens": TOKENS,
    }
    theirs = run_job(vllm_python, tmp_path / "run", target_folder, [case], IN_PROCESS, ONE_PROCESS)["peagle"]
    assert "error" not in theirs, theirs
    draft, _ = load_draft(parallel_export, target.embedding, target.dtype)
    assert isinstance(draft, ParallelDraft)
    engine = Engine(target, draft, num_steps=NUM_STEPS)
    ours = [engine.generate(prompt.ids, TOKENS, NUM_STEPS) for prompt in prompts]
    engine.close()

    rounds = [accepted for run in ours for accepted in run.rounds]
    drafts = sum(answer["drafts"] for answer in theirs["answers"])
    accepted = [sum(answer["accepted"][place] for answer in theirs["answers"]) for place in range(NUM_STEPS)]
    lengths = accept_length(rounds), 1 + sum(accepted) / drafts
    say(
        f"P-EAGLE, {PROMPTS} test prompts, chains of {NUM_STEPS}: embedded engine {lengths[0]:.4f} ({len(rounds)} "
        f"rounds, {survived(rounds)}), vLLM {lengths[1]:.4f} ({drafts} rounds, {accepted})"
    )
    assert lengths[0] > 1.05, "a draft that accepts nothing proves nothing"
    assert abs(lengths[1] - lengths[0]) <= TOLERANCE * lengths[0]
