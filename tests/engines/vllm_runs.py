"""What vLLM's own interpreter runs (no Eyas there): the cases of a job, one engine after the other.

`python vllm_runs.py JOB.json`. A job: `target`, `out`, `options` (of vllm.LLM), `cases`. A case: `name`, `draft`,
`num_steps`, `prompts` (token ids), `max_tokens`, and where wanted `speculative` (more keys of speculative_config),
`environment`, `last_first` (an engine that hands on
its taps in the opposite order), `trace_after` (start a trace by the worker extension, then say the
first prompt once more).
Writes a line a case: `name`, and `error` or `answers`, each `ids`, `drafts`, `accepted` (per position).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
REFUSALS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError)
"""What vLLM raises in this process over a draft that it will not load."""


def main() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(job["out"]).open("w") as out:
        for case in job["cases"]:
            try:
                found = run(job, case)
            except REFUSALS as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            cleanup_dist_env_and_memory()
            out.write(json.dumps({"name": case["name"], **found}) + "\n")
            out.flush()


def run(job: JSON, case: JSON) -> JSON:
    from vllm import LLM

    os.environ.update(case.get("environment", {}))
    if case.get("last_first"):
        hand_on_last_first()
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": case["draft"],
            "num_speculative_tokens": case["num_steps"],
            **case.get("speculative", {}),
        },
        **job["options"],
    )
    answers = [answer(llm, prompt, case["max_tokens"]) for prompt in case["prompts"]]
    if not case.get("trace_after"):
        return {"answers": answers}
    hooked = llm.collective_rpc("eyas_trace_start")
    return {"answers": answers, "hooked": hooked, "again": answer(llm, case["prompts"][0], case["max_tokens"])}


def answer(llm: Any, prompt: list[int], max_tokens: int) -> JSON:
    """One prompt alone, greedily, and what the engine's own counters gained by it."""
    from vllm import SamplingParams

    before = counters(llm)
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False
    )
    drafts, accepted = counters(llm)
    return {
        "ids": list(output.outputs[0].token_ids),
        "drafts": drafts - before[0],
        "accepted": [now - then for now, then in zip(accepted, before[1] or [0] * len(accepted), strict=True)],
    }


def counters(llm: Any) -> tuple[int, list[int]]:
    """Rounds so far, and drafted tokens accepted at each position."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return found[DRAFTS].value, list(found[ACCEPTED].values)


def hand_on_last_first() -> None:
    """Plant it in this process: every later engine's taps come in the opposite order."""
    from vllm.model_executor.models.interfaces import EagleModelMixin

    keep = EagleModelMixin._maybe_add_hidden_state

    def first(self: Any, taps: list[Any], layer: int, hidden: Any, residual: Any) -> list[Any]:
        taps[:0] = keep(self, [], layer, hidden, residual)
        return taps

    EagleModelMixin._maybe_add_hidden_state = first


if __name__ == "__main__":
    main()
