"""Hugging Face's side of bench_peers.py: transformers' generate, plain. It has no EAGLE-3."""

import time

import torch
import transformers
from transformers.generation.streamers import BaseStreamer
from worker import JSON, Answer, Running, serve


class Clock(BaseStreamer):
    """The times at which the prompt went in and every token came out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to be said."""


def start(job: JSON) -> Running:
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["precision"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()

    @torch.inference_mode()
    def answer(ids: list[int], max_tokens: int) -> Answer:
        prompt, clock = torch.tensor([ids]), Clock()
        started = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=job["stop_ids"],
            pad_token_id=job["stop_ids"][0],
            streamer=clock,
        )
        made = output[0, prompt.shape[1] :].tolist()
        _, first, *_ = clock.times
        return Answer(made, len(made) - 1, first - started, clock.times[-1] - first)

    facts = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return Running(answer, facts | {"attention": model.config._attn_implementation, "cache": "dynamic"})


if __name__ == "__main__":
    serve(start)
