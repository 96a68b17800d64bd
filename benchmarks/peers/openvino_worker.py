"""OpenVINO GenAI's side of bench_peers.py, run by the interpreter that holds openvino-genai."""

from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import JSON, Answer, Running, serve, to_stop


def start(job: JSON) -> Running:
    options = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": hint(job["precision"])}
    draft = {"draft_model": genai.draft_model(job["draft"], "CPU", **options)} if job["draft"] else {}
    pipeline = genai.LLMPipeline(job["target"], "CPU", **draft, **options)
    shape = job["shape"]

    def answer(ids: list[int], max_tokens: int) -> Answer:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False)
        config.stop_token_ids = set(job["stop_ids"])
        config.eos_token_id = job["stop_ids"][0]
        config.apply_chat_template = False
        if job["draft"]:
            config.num_assistant_tokens = shape["num_steps"] if shape["topk"] == 1 else shape["num_draft_tokens"] - 1
            if shape["topk"] > 1:
                config.tree_depth, config.branching_factor = shape["num_steps"], shape["topk"]
        prompt = np.array([ids], dtype=np.int64)
        result = pipeline.generate(genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt))), config)
        made, metrics = to_stop(list(result.tokens[0]), job["stop_ids"]), result.perf_metrics
        first = metrics.get_ttft().mean / 1e3
        whole = metrics.get_generate_duration().mean / 1e3
        forwards = len(made) - 1
        if job["draft"]:
            main = result.extended_perf_metrics.main_model_metrics
            forwards = len(main.raw_metrics.m_durations) - 1  # the prefill's is the first
        return Answer(made, forwards, first, whole - first)

    return Running(answer, {"openvino-genai": version("openvino-genai"), "openvino": version("openvino"), **options})


def hint(precision: str) -> str:
    """f32 over 16-bit weights where the CPU has no bfloat16 instructions: bf16 is five times slower there than f32, and
    its paged attention does not start."""
    able = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bf16" if precision == "bfloat16" and able else "f32"


if __name__ == "__main__":
    serve(start)
