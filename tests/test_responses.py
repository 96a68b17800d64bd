"""Responses: answers equal generate's, belong to their prompt whatever the batch, and survive a kill at any moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from eyas.data import sampling
from eyas.data.decode import Cohort, Request, decode, fits_cohorts
from eyas.data.responses import RESPONSES, read_responses, respond
from eyas.data.samples import render
from eyas.data.sampling import Sampler
from eyas.errors import InputError
from eyas.models.target import Target, load_target
from eyas.recipe import RespondSettings, TargetSettings
from eyas.run import hash_file, write_manifest
from tiny import save_tiny_target, tiny_tokenizer

WORDS = ["rain", "bicycle", "a longer question about the sea", "two", "why", "tell me of the moon and the tide", "x"]


class Listed:
    """A queue of fixed requests."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = list(requests)

    def take(self, count: int) -> list[Request]:
        taken, self.requests = self.requests[:count], self.requests[count:]
        return taken


def requests_for(target: Target, count: int, max_new_tokens: int) -> list[Request]:
    texts = [f"{WORDS[number % len(WORDS)]} {number}" for number in range(count)]
    return [
        Request(str(number), render(target.tokenizer, [{"role": "user", "content": text}]).ids, max_new_tokens)
        for number, text in enumerate(texts)
    ]


def answers(target: Target, requests: list[Request], batch_size: int, sampler: Sampler) -> dict[str, tuple[Any, str]]:
    return {a.request.key: (a.ids, a.finish) for a in decode(target, Listed(requests), sampler, batch_size)}


def generated(target: Target, request: Request) -> list[int]:
    """Hugging Face's own greedy answer."""
    prompt = torch.tensor([request.ids])
    with torch.inference_mode():
        output = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False
        )
    return output[0, len(request.ids) :].tolist()


def write_prompts(folder: Path, conversations: list[list[str]], split: str = "train") -> Path:
    """A complete prompts folder; each conversation a list of user messages."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "id": f"p{number:03d}",
            "messages": [{"role": "user", "content": text} for text in texts],
            "split": split,
            "topic": None,
            "family": None,
        }
        for number, texts in enumerate(conversations)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    files = {"prompts.jsonl": hash_file(folder / "prompts.jsonl")}
    write_manifest(folder, "prompts", settings={}, inputs={}, files=files, facts={}, seconds=0.0)


def quick(**changes: Any) -> RespondSettings:
    return RespondSettings(**{"max_new_tokens": 12, "batch_size": 8, "precision": "float32", **changes})


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def stopping(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with a list of stop tokens, so that many answers end by themselves, at many lengths."""
    folder = Path(shutil.copytree(tiny_target, tmp_path_factory.mktemp("stopping") / "t"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, *range(20, 259, 16)]}))
    return load_target(str(folder))


@pytest.fixture(scope="module")
def where(tiny_target: Path) -> TargetSettings:
    return TargetSettings(name=str(tiny_target))


def test_greedy_answers_equal_generates_token_for_token_through_refill_and_dropped_rows(stopping: Target) -> None:
    requests = requests_for(stopping, 23, 40)
    got = answers(stopping, requests, 8, Sampler())
    assert sorted(got, key=int) == [str(number) for number in range(23)]
    finishes = Counter(finish for _, finish in got.values())
    assert finishes["stop"] >= 3 and finishes["length"] >= 3, f"both ways to end are tried: {finishes}"
    for request in requests:
        assert got[request.key][0] == generated(stopping, request)


def test_an_answer_ends_with_the_stop_token_iff_it_was_not_cut(stopping: Target) -> None:
    stop_ids = set(stopping.stop_ids)
    for ids, finish in answers(stopping, requests_for(stopping, 23, 40), 8, Sampler()).values():
        assert (ids[-1] in stop_ids) == (finish == "stop")
        assert not stop_ids & set(ids[:-1])
        assert finish == "stop" or len(ids) == 40


@pytest.mark.parametrize("sampler", [Sampler(0.8, 1.0, 5), Sampler(0.7, 0.9, 5)])
def test_a_sampled_answer_does_not_depend_on_batch_or_order(target: Target, sampler: Sampler) -> None:
    requests = requests_for(target, 9, 15)
    alone = answers(target, requests, 1, sampler)
    assert answers(target, requests[::-1], 8, sampler) == alone
    assert answers(target, requests, 8, Sampler(sampler.temperature, sampler.top_p, 6)) != alone


def test_the_first_token_may_already_end_every_answer(target: Target) -> None:
    got = answers(target, requests_for(target, 10, 1), 4, Sampler())
    assert all(len(ids) == 1 for ids, _ in got.values()) and len(got) == 10


def test_a_sliding_window_narrower_than_prompt_and_answer_equals_generate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=9, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert fits_cohorts(target)
    requests = requests_for(target, 5, 20)
    got = answers(target, requests, 4, Sampler())
    for request in requests:
        assert got[request.key][0] == generated(target, request)


def test_a_target_whose_attention_is_not_plain_still_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=16, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert not fits_cohorts(target), "soft-capped attention goes row by row"
    requests = requests_for(target, 3, 10)
    got = answers(target, requests, 4, Sampler())
    for request in requests:
        assert got[request.key][0] == generated(target, request)
    assert answers(target, requests, 4, Sampler(0.8, 0.9, 1)) == answers(
        target, requests[::-1], 1, Sampler(0.8, 0.9, 1)
    )


def test_picks_are_literal() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.25, 0.05]]).log()
    assert Sampler().pick(torch.tensor([[1.0, 3.0, 3.0]]), []) == [1], "ties go to the lowest id"
    whole = Sampler(1.0, 1.0, 0)
    assert [whole.pick(logits, [u])[0] for u in (0.0, 0.49, 0.51, 0.69, 0.71, 0.94, 0.96)] == [0, 0, 1, 1, 2, 2, 3]
    nucleus = Sampler(1.0, 0.6, 0)  # keeps 0 and 2, of 0.75 together
    assert [nucleus.pick(logits, [u])[0] for u in (0.0, 0.66, 0.67, 0.999)] == [0, 0, 2, 2]
    assert Sampler(1.0, 0.5, 0).pick(logits, [0.999]) == [0], "the fewest tokens that reach top_p"


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(0, 0.999999), st.floats(0.05, 1.0))
@hypothesis_settings(deadline=None)
def test_a_nucleus_pick_is_among_the_most_likely_tokens_that_reach_top_p(
    logits: list[float], uniform: float, top_p: float
) -> None:
    row = torch.tensor([logits], dtype=torch.float64)
    picked = Sampler(1.0, top_p, 0).pick(row, [uniform])[0]
    probabilities = torch.softmax(row[0], dim=-1)
    more_likely = probabilities[probabilities > probabilities[picked]].sum().item()
    assert more_likely < top_p + 1e-9


def test_a_cohort_that_is_half_done_gives_half_its_memory_back() -> None:
    cohort = Cohort([Request(str(row), [1, 2], 3) for row in range(5)], Sampler())
    states = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 2, 2, 4)
    cohort.attend(0, states, states, states, 1.0, None)
    held = []
    for row in (1, 0, 1):
        cohort.drop(row)
        held.append(len(cohort.keys[0]))
        lives = [int(live.request.key) for live in cohort.rows]
        assert (
            cohort.keys[0][: len(lives), 0, 0, 0].tolist() == cohort.values[0][: len(lives), 0, 0, 0].tolist() == lives
        )
    assert held == [5, 5, 2]


@given(st.integers(0, 10_000), st.floats(0.1, 0.999), st.sampled_from([0.0, 0.3, 3.0, 9.0]), st.booleans())
def test_a_nucleus_sought_among_the_first_tokens_is_that_of_the_whole_vocabulary(
    seed: int, top_p: float, spread: float, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(6, 64, generator=generator, dtype=torch.float64)
    logits = logits.round() if ties else logits
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
    with mock.patch.object(sampling, "FIRST", 64):
        whole = Sampler(1.0, top_p, 0).pick(logits, uniforms)
    with mock.patch.object(sampling, "FIRST", 8):
        assert Sampler(1.0, top_p, 0).pick(logits, uniforms) == whole


def test_a_stage_writes_what_its_manifest_says(tmp_path: Path, target: Target, where: TargetSettings) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"], ["bicycle"], ["two", "and then?"]])
    manifest = respond(prompts, tmp_path / "r", quick(), where)
    lines = list(read_responses(tmp_path / "r" / RESPONSES))
    assert sorted(line["id"] for line in lines) == ["p000/0", "p001/0", "p002/0", "p002/1"]
    assert manifest.files == {RESPONSES: hash_file(tmp_path / "r" / RESPONSES)}
    assert manifest.facts["target"] == target.identity.model_dump()
    assert manifest.facts["default_system_prompt"] == "Be helpful."
    assert manifest.facts["greedy"] is True
    assert manifest.facts["counts"]["samples"] == 4
    assert manifest.facts["counts"]["answer_tokens"] == sum(len(x["input_ids"]) - x["prompt_tokens"] for x in lines)
    for line in lines:
        prompt = line["input_ids"][: line["prompt_tokens"]]
        assert target.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
        assert line["input_ids"][line["prompt_tokens"] :] == generated(target, Request("", prompt, 12))
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["manifest.json", "responses.jsonl"]


def test_a_later_turn_sees_the_targets_own_earlier_answer(
    tmp_path: Path, target: Target, where: TargetSettings
) -> None:
    prompts = write_prompts(tmp_path / "p", [["two", "and then?", "why"]])
    respond(prompts, tmp_path / "r", quick(), where)
    lines = list(read_responses(tmp_path / "r" / RESPONSES))
    assert [line["turn"] for line in lines] == [0, 1, 2]
    messages = []
    for line, text in zip(lines, ["two", "and then?", "why"], strict=True):
        messages.append({"role": "user", "content": text})
        prompt, answer = line["input_ids"][: line["prompt_tokens"]], line["input_ids"][line["prompt_tokens"] :]
        assert prompt == render(target.tokenizer, messages).ids
        messages.append({"role": "assistant", "content": target.tokenizer.decode(answer, skip_special_tokens=True)})


KILLED = """
import sys
from pathlib import Path
from eyas.data.responses import respond
from eyas.recipe import RespondSettings, TargetSettings
settings = RespondSettings(max_new_tokens=12, batch_size=8, precision="float32")
respond(Path(sys.argv[2]), Path(sys.argv[3]), settings, TargetSettings(name=sys.argv[4]))
"""


def test_a_killed_run_resumes_with_nothing_lost_or_doubled(
    tmp_path: Path, tiny_target: Path, where: TargetSettings
) -> None:
    prompts = write_prompts(tmp_path / "p", [[f"{WORDS[n % 7]} {n}", *(["more?"] * (n % 3))] for n in range(81)])
    out = tmp_path / "r"
    command = [sys.executable, "-c", KILLED, "run", str(prompts), str(out), str(tiny_target)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (out / RESPONSES).is_file() or (out / RESPONSES).read_bytes().count(b"\n") < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = (out / RESPONSES).read_bytes()
    assert not (out / "manifest.json").exists() and 20 <= kept.count(b"\n") < 162
    respond(prompts, out, quick(), where)
    assert (out / RESPONSES).read_bytes().startswith(kept[: kept.rfind(b"\n") + 1]), "what was written stays"
    whole = tmp_path / "whole"
    respond(prompts, whole, quick(), where)
    resumed, unbroken = ({line["id"]: line for line in read_responses(f / RESPONSES)} for f in (out, whole))
    assert resumed == unbroken and len(resumed) == 162
    assert (out / RESPONSES).read_bytes().count(b"\n") == 162
    turns: dict[str, int] = {}
    for line in read_responses(out / RESPONSES):
        assert line["turn"] == turns.get(line["prompt_id"], 0), "turns of a conversation in order"
        turns[line["prompt_id"]] = line["turn"] + 1


def test_a_torn_last_line_is_cut_off_and_answered_again(tmp_path: Path, where: TargetSettings) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"], ["bicycle"], ["two"]])
    respond(prompts, tmp_path / "whole", quick(), where)
    text = (tmp_path / "whole" / RESPONSES).read_bytes()
    first = text.index(b"\n") + 1
    for cut in (0, 5, first - 1, first, first + 7, len(text) - 1):
        out = tmp_path / f"cut{cut}"
        with pytest.raises(RuntimeError, match="stopped"):
            _stop(prompts, out, where)
        (out / RESPONSES).write_bytes(text[:cut])
        respond(prompts, out, quick(), where)
        assert Counter((out / RESPONSES).read_bytes().splitlines()) == Counter(text.splitlines())


def _stop(prompts: Path, out: Path, where: TargetSettings) -> None:
    """Begin a stage and fail before its first answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.data.responses.decode", _stopped)
        respond(prompts, out, quick(), where)


def _stopped(*args: Any) -> None:
    raise RuntimeError("stopped")


def test_a_complete_folder_is_returned_without_loading_the_target(
    tmp_path: Path, where: TargetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"]])
    manifest = respond(prompts, tmp_path / "r", quick(), where)
    monkeypatch.setattr("eyas.data.responses.load_target", _stopped)
    assert respond(prompts, tmp_path / "r", quick(), where) == manifest


@pytest.mark.parametrize("begun", ["complete", "unfinished"])
def test_other_settings_or_prompts_stop_with_the_fields_name(tmp_path: Path, where: TargetSettings, begun: str) -> None:
    prompts, out = write_prompts(tmp_path / "p", [["rain"]]), tmp_path / "r"
    if begun == "complete":
        respond(prompts, out, quick(), where)
    else:
        with pytest.raises(RuntimeError):
            _stop(prompts, out, where)
        (out / RESPONSES).write_text('{"id": "p0')
    with pytest.raises(InputError, match=r"responses\.max_new_tokens = 13"):
        respond(prompts, out, quick(max_new_tokens=13), where)
    with pytest.raises(InputError, match=r"wanted target\.name"):
        respond(prompts, out, quick(), TargetSettings(name="elsewhere"))
    with pytest.raises(InputError, match="the prompts it is made from"):
        respond(write_prompts(tmp_path / "p2", [["snow"]]), out, quick(), where)


def test_a_run_that_failed_before_its_first_answer_may_be_mended(tmp_path: Path, where: TargetSettings) -> None:
    prompts, out = write_prompts(tmp_path / "p", [["rain"]]), tmp_path / "r"
    with pytest.raises(InputError):
        respond(prompts, out, quick(), TargetSettings(name="no-such-target"))
    assert respond(prompts, out, quick(), where).settings["target"]["name"] == where.name


def test_changed_prompts_are_refused(tmp_path: Path, where: TargetSettings) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"]])
    with (prompts / "prompts.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"wanted prompts\.jsonl as the manifest describes it"):
        respond(prompts, tmp_path / "r", quick(), where)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": "a", "split": "train"}', '{"id": "a", "split": "x", "messages": [1]}']
)
def test_a_wrong_prompt_line_is_named(tmp_path: Path, where: TargetSettings, line: str) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"]])
    with (prompts / "prompts.jsonl").open("a") as file:
        file.write(line + "\n")
    seal(prompts)
    with pytest.raises(InputError) as caught:
        respond(prompts, tmp_path / "r", quick(), where)
    assert caught.value.where == f"{prompts / 'prompts.jsonl'}:2"


def test_a_prompt_longer_than_the_context_is_skipped_and_counted(
    tmp_path: Path, where: TargetSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p", [["rain"], ["x" * 1100, "more?"]])
    manifest = respond(prompts, tmp_path / "r", quick(), where)
    assert manifest.facts["skipped"] == {"prompt longer than the target's context": 2}
    assert manifest.facts["counts"]["samples"] == 1
    assert "2 skipped: prompt longer than the target's context" in capsys.readouterr().err


def test_prompts_that_are_all_too_long_are_refused(tmp_path: Path, where: TargetSettings) -> None:
    with pytest.raises(InputError, match="context of 1024 tokens"):
        respond(write_prompts(tmp_path / "p", [["x" * 1100]]), tmp_path / "r", quick(), where)


def test_a_target_without_a_template_is_a_clear_error(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="a target with a chat template"):
        respond(write_prompts(tmp_path / "p", [["rain"]]), tmp_path / "r", quick(), TargetSettings(name=str(folder)))


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, where: TargetSettings) -> None:
    resource = pytest.importorskip("resource", reason="file size limits are POSIX")
    prompts, out = write_prompts(tmp_path / "p", [[f"{WORDS[n % 7]} {n}"] for n in range(30)]), tmp_path / "r"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(InputError) as caught:
            respond(prompts, out, quick(), where)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.wanted == f"to write {out / RESPONSES}"
    assert caught.value.next.startswith("free some space")
    kept = (out / RESPONSES).read_bytes()
    assert kept.count(b"\n") > 3 and not kept.endswith(b"\n"), "the write that failed left a torn line"
    respond(prompts, out, quick(), where)
    assert (out / RESPONSES).read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert (out / RESPONSES).read_bytes().count(b"\n") == 30
