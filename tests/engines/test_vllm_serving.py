"""vLLM as people run it, each part a process: a server as `eyas trace` says, LLM(...) with the worker extension.

And its accept length: on the test prompts, at the same chain length in float32, vLLM accepts what the embedded engine
accepts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.cli import main
from eyas.engine.generate import Engine, Generation
from eyas.formats.trace import engine_environment, read_trace
from eyas.measure.prompts import BenchPrompt, bench_prompts
from eyas.measure.stats import accept_length
from eyas.models.checkpoint import load_draft
from eyas.models.target import Target
from eyas.progress import say
from running import declared, run_job, server

pytestmark = [pytest.mark.engines, pytest.mark.timeout(45 * 60)]

NUM_STEPS, PROMPTS, TOKENS = 3, 24, 48
TOLERANCE = 0.03
EXTENSION = "eyas_trace.vllm_plugin.TraceExtension"


def trace_statuses(
    trace: Path, export: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Status of each check that `eyas check` makes of a trace. None may have found anything."""
    arguments = ["check", "--trace", str(trace), "--draft", str(export), "--target", str(target_folder), "--json"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert (ended.value.code, found["findings"]) == (0, [])
    return {one["name"].split(" (")[0]: one["status"] for one in found["checks"] if one["name"].startswith("trace")}


RIGHT = {
    "trace taps": "pass",
    "trace and captures": "skipped",
    "trace rows": "pass",
    "trace draft": "pass",
    "trace tokens": "pass",
}


def test_a_server_started_as_eyas_trace_says_is_traced_and_passes(
    vllm_python: Path,
    target_folder: Path,
    export: Path,
    prompt: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Front end, engine core and worker are processes of their own; only the worker records."""
    said = engine_environment("vllm", tmp_path / "trace")
    speculation = {"method": "eagle3", "model": str(export), "num_speculative_tokens": NUM_STEPS}
    arguments = ["--model", str(target_folder), "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "1"]
    arguments += ["--speculative-config", json.dumps(speculation), *said["flags"]]
    with server(vllm_python, tmp_path / "run", arguments, said["environment"]) as running:
        request = {"model": str(target_folder), "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = running.post("/v1/completions", request)
        metrics = running.get("/metrics")
    assert answer["usage"]["completion_tokens"] == 12
    assert "vllm:spec_decode_num_accepted_tokens_total" in metrics
    assert running.log.read_text().count("eyas_trace: recording") == 1
    trace = read_trace(tmp_path / "trace")
    assert (trace.header.source, trace.header.boundaries) == ("vllm", declared(export).boundaries)
    assert trace.of("tap")[0].ids == tuple(prompt)
    assert trace_statuses(tmp_path / "trace", export, target_folder, capsys) == RIGHT


# LLM(...) -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """The test prompts decoded by the embedded engine and by vLLM."""

    prompts: list[BenchPrompt]
    ours: list[Generation]
    theirs: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def both(
    vllm_python: Path,
    target: Target,
    target_folder: Path,
    export: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Both:
    """vLLM runs with the plug-in on its path and not switched on; when all is said, a trace is asked for."""
    folder = tmp_path_factory.mktemp("offline")
    prompts = bench_prompts("test", target, PROMPTS, TOKENS)
    first = max(prompts, key=lambda prompt: len(prompt.ids))
    prompts = [first, *(prompt for prompt in prompts if prompt is not first)]
    case = {
        "name": "test",
        "draft": str(export),
        "num_steps": NUM_STEPS,
        "prompts": [list(prompt.ids) for prompt in prompts],
        "max_tokens": TOKENS,
        "trace_after": True,
    }
    said = engine_environment("vllm", folder / "trace")["environment"]
    variables = {name: value for name, value in said.items() if name != "EYAS_TRACE"}
    options = {"worker_extension_cls": EXTENSION}
    theirs = run_job(vllm_python, folder, target_folder, [case], options, variables)["test"]
    assert "error" not in theirs, theirs
    draft, _ = load_draft(export, target.embedding, target.dtype)
    engine = Engine(target, draft, num_steps=NUM_STEPS)
    ours = [engine.generate(prompt.ids, TOKENS, NUM_STEPS) for prompt in prompts]
    engine.close()
    return Both(prompts, ours, theirs, folder)


def survived(rounds: Sequence[int]) -> list[int]:
    """Rounds whose first 1, 2, ... drafted tokens were accepted."""
    return [sum(accepted >= place for accepted in rounds) for place in range(1, NUM_STEPS + 1)]


def test_vllm_accepts_what_the_embedded_engine_accepts(both: Both) -> None:
    answers = both.theirs["answers"]
    rounds = [accepted for run in both.ours for accepted in run.rounds]
    drafts = sum(answer["drafts"] for answer in answers)
    accepted = [sum(answer["accepted"][place] for answer in answers) for place in range(NUM_STEPS)]
    ours, theirs = accept_length(rounds), 1 + sum(accepted) / drafts
    say(
        f"accept length of {len(both.prompts)} test prompts at chains of {NUM_STEPS}: embedded engine {ours:.4f} "
        f"({len(rounds)} rounds, {survived(rounds)}), vLLM {theirs:.4f} ({drafts} rounds, {accepted})"
    )
    assert ours > 1.05, "a draft that accepts nothing proves nothing"
    assert abs(theirs - ours) <= TOLERANCE * ours


def test_where_both_say_the_same_every_round_is_the_same(both: Both) -> None:
    """Both decode losslessly in float32, in kernels of their own: a near tie may part a text, and few do."""
    same = [
        (run, answer)
        for run, answer in zip(both.ours, both.theirs["answers"], strict=True)
        if list(run.ids) == answer["ids"]
    ]
    assert len(same) >= 0.8 * PROMPTS
    parted = [
        answer
        for run, answer in same
        if (len(run.rounds), survived(run.rounds)) != (answer["drafts"], answer["accepted"])
    ]
    assert len(parted) <= 0.1 * len(same), parted


def test_off_it_leaves_no_trace_and_switched_on_it_changes_no_token(
    both: Both, export: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = both.theirs["answers"][0], both.theirs["again"]
    assert both.theirs["hooked"] == [["LlamaForCausalLM", "Eagle3LlamaForCausalLM"]]
    assert first == again
    assert {one.name for one in both.folder.iterdir()} == {"job.json", "out.jsonl", "log", "trace"}
    assert read_trace(both.folder / "trace").of("tap")[0].ids == both.prompts[0].ids
    assert trace_statuses(both.folder / "trace", export, target_folder, capsys) == RIGHT
