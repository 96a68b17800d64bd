"""llama.cpp's side of bench_peers.py, run by the interpreter that holds xllamacpp (llama.cpp's server in a wheel)."""

from importlib.metadata import version

import xllamacpp
from worker import JSON, Answer, Running, serve

DECODES = "llamacpp:n_decode_total "
EAGLE3 = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3


def start(job: JSON) -> Running:
    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx = job["room"]
    params.n_parallel = 1
    params.cache_prompt = False
    params.endpoint_metrics = True
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = job["threads"]
    if job["draft"]:
        draft = params.speculative.draft
        params.speculative.types = [EAGLE3]
        draft.mparams.path = job["draft"]
        draft.n_max, draft.n_min, draft.p_min = job["shape"]["num_steps"], 0, 0.0
        for threads in (draft.cpuparams, draft.cpuparams_batch):
            threads.n_threads = job["threads"]
    server = xllamacpp.Server(params)

    def answer(ids: list[int], max_tokens: int) -> Answer:
        before = forwards(server)
        result = server.handle_completions(
            {
                "prompt": ids,
                "n_predict": max_tokens,
                "temperature": 0.0,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,
            }
        )
        times, made = result["timings"], result["__verbose"]["tokens"]
        if times["predicted_n"] == len(made) + 1:
            made = [*made, job["stop_ids"][0]]
        prefills = -(-len(ids) // params.n_batch)
        return Answer(made, forwards(server) - before - prefills, times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3)

    return Running(answer, {"xllamacpp": version("xllamacpp")})


def forwards(server: xllamacpp.Server) -> int:
    """Calls of the target so far, by the server's own counter (draft calls are not in it)."""
    lines = str(server.handle_metrics()).splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith(DECODES))


if __name__ == "__main__":
    serve(start)
