"""Recorded steps, acted out on a CPU (tape.py): they give the eager forward's bits, or are left aside."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.engine.cache import KVCache, path_to
from eyas.engine.draft_forward import PlainDraft
from eyas.engine.forward import TargetForward
from eyas.engine.generate import Engine
from eyas.engine.graphed_draft import GraphedDraft
from eyas.engine.graphed_forward import GraphedForward
from eyas.engine.graphs import Recorder, Recording, recording_for
from eyas.engine.propose import DraftProposer, prepared
from eyas.models.target import Target, load_target
from eyas.settings import DraftingSettings, SamplingSettings
from replay import BranchingProposer, ReplayProposer
from tape import tape_recorder
from test_engine import TREES, prompts, random_draft
from tiny import save_tiny_target

TAPE = Recording(tape_recorder, room=600)
TREE = DraftingSettings(num_steps=3, topk=2, num_draft_tokens=5)
WIDE = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(params=["float32", "bfloat16"])
def target(folder: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(str(folder), dtype=request.param)


@pytest.fixture
def target32(folder: Path) -> Target:
    return load_target(str(folder))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def graphed(target: Target, drafting: DraftingSettings = TREE, recording: Recording = TAPE) -> Engine:
    return Engine(target, random_draft(target), drafting=drafting, kernels="torch", announce=False, recording=recording)


def rest(engine: Engine, on: bool) -> None:
    for graphs in engine.graphs:
        graphs.on = on


def rows_of(forward: TargetForward, ids: list[int], start: int, parents: list[int] | None) -> Tensor:
    """Logits and taps of the real rows."""
    logits = forward.logits(forward.verify(ids, start, parents))
    return torch.cat([logits, forward.taps()[0].float()], dim=-1)[: len(ids)]


def test_a_cpu_records_nothing_of_its_own() -> None:
    assert recording_for(torch.device("cpu")) is None


def test_cuda_records_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recording_for(torch.device("cuda"), 300)
    assert found is not None and found.room == 300
    monkeypatch.setenv("EYAS_GRAPHS", "0")
    assert recording_for(torch.device("cuda"), 300) is None


def test_replayed_rows_have_the_eager_forwards_bits_across_a_length_border(target: Target) -> None:
    engine = graphed(target, WIDE)
    assert engine.facts.graphs == "used" and engine.facts.lossless
    forward, graphs = engine.forward, engine.graphs[0]
    assert isinstance(forward, GraphedForward)
    ids = (prompts(40)[-1] * 300)[:290]
    forward.prefill(ids[:240])
    for start in (240, 250, 255, 263):
        for parents in (None, *TREES):
            count = len(parents) if parents else 1 + start % 8
            rows = ids[start : start + count]
            graphs.on = False
            expected = rows_of(forward, rows, start, parents)
            graphs.on = True
            assert torch.equal(rows_of(forward, rows, start, parents), expected), (start, parents)
        graphs.on = False
        for at in range(start, min(start + 13, 290)):
            forward.verify(ids[at : at + 1], at)
    # Chains and trees of 1, 2, 4 and 8 paths at two lengths, and those that the start-up test wanted.
    assert {key[1:] for key in graphs.steps if key[0] == "verify"} >= {(8, 256, 0), (8, 512, 0), (8, 512, 2)}


@pytest.mark.parametrize("parents", TREES)
def test_a_kept_path_leaves_the_rows_that_an_eager_one_leaves(target32: Target, parents: list[int]) -> None:
    engine, ids = graphed(target32, WIDE), prompts(40)[-1] * 4
    forward, graphs = engine.forward, engine.graphs[0]
    path = path_to(len(parents) - 1, parents)
    found = []
    for on in (False, True, True):  # recorded, then replayed
        graphs.on = on
        forward.prefill(ids[:20])
        forward.verify(ids[20 : 20 + len(parents)], 20, parents)
        forward.keep(path)
        cache = forward.cache
        rows = slice(0, 20 + len(path))
        found.append([side[layer][:, :, rows].clone() for side in (cache.keys, cache.values) for layer in range(6)])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("way", ["chain", "tree", "branches", "sampled", "ngram"])
def test_no_graph_changes_a_token(folder: Path, way: str) -> None:
    target = load_target(str(folder), dtype="float32" if way in ("chain", "ngram") else "bfloat16")
    settings = DraftingSettings(num_steps=3) if way in ("chain", "ngram") else TREE
    settings = settings.model_copy(update={"ngram": 3, "adaptive": True}) if way == "ngram" else settings
    sampling = SamplingSettings(temperature=0.8, seed=3) if way == "sampled" else SamplingSettings()
    engine = graphed(target, settings)
    for prompt, tokens in (((prompts(5)[2] * 300)[:246], 18), (prompts(6)[4], 12)):
        rest(engine, False)
        plain = engine.generate(prompt, tokens, 0, ignore_eos=True, sampling=sampling)
        if way in ("chain", "branches"):
            proposer = ReplayProposer if way == "chain" else BranchingProposer
            engine.proposer = proposer(plain.ids, len(prompt), 259, lambda i: i % 7 == 0)
        eager = engine.generate(prompt, tokens, 3, ignore_eos=True, sampling=sampling)
        rest(engine, True)
        for num_steps in (0, 3):
            run = engine.generate(prompt, tokens, num_steps, ignore_eos=True, sampling=sampling)
            assert run.ids == plain.ids
        if way != "ngram":  # whose choice learns from text to text
            assert run.rounds == eager.rounds
    assert not any(graphs.why for graphs in engine.graphs)
    if way in ("tree", "sampled"):
        assert engine.graphs[1].recorded > 2


def test_the_draft_drafts_what_it_drafts_eagerly(target: Target) -> None:
    draft = prepared(random_draft(target), target)
    prompt = (prompts(5)[2] * 300)[:262]
    forward = TargetForward(target, draft.config.boundaries)
    forward.cache.reserve(300)
    _, taps = forward.prefill(prompt)
    assert taps is not None
    for drafting in (DraftingSettings(num_steps=4), DraftingSettings(num_steps=4, topk=3, num_draft_tokens=9)):
        trees = []
        for runner in (PlainDraft(draft), GraphedDraft(draft, TAPE)):
            proposer = DraftProposer(runner, drafting)
            proposer.settle(5, "torch")
            proposer.reserve(300)
            proposer.begin()
            proposer.observe(taps[:, :240], prompt[1:241], 0)
            for start in range(240, 258, 3):
                trees.append(proposer.propose(4))
                trees.append(proposer.propose(4))  # from the same row once more
                proposer.observe(taps[:, start : start + 3], prompt[start + 1 : start + 4], start)
        half = len(trees) // 2
        assert trees[:half] == trees[half:]
        assert isinstance(runner, GraphedDraft) and runner.graphs.recorded > 1 and not runner.graphs.why
    forward.close()


def test_what_a_step_gave_is_the_callers_to_keep(target32: Target) -> None:
    forward = graphed(target32).forward
    ids = prompts(40)[-1] * 2
    forward.prefill(ids[:20])
    first = forward.verify(ids[20:22], 20)
    copy = first.clone()
    forward.verify(ids[22:24], 22)
    assert torch.equal(first, copy)


# Where graphs do not hold


def test_a_cache_that_grew_has_its_steps_recorded_anew(target32: Target) -> None:
    engine = graphed(target32, recording=Recording(tape_recorder, room=100))
    short, long = prompts(6)[4], (prompts(5)[2] * 300)[:520]
    expected = []
    for on in (False, True):
        rest(engine, on)
        expected.append([engine.generate(prompt, 8, 3, ignore_eos=True).ids for prompt in (short, long, short)])
        if not on:  # grown by now: a fresh engine, so that the graphs see it happen
            engine.close()
            engine = graphed(target32, recording=Recording(tape_recorder, room=100))
            steps = dict(engine.graphs[0].steps)
    assert expected[0] == expected[1]
    assert steps and not set(map(id, steps.values())) & set(map(id, engine.graphs[0].steps.values()))
    assert not engine.graphs[0].why


def test_another_texts_cache_is_run_eagerly(target32: Target) -> None:
    engine = graphed(target32)
    forward, graphs = engine.forward, engine.graphs[0]
    ids, recorded = prompts(40)[-1], graphs.recorded
    own, forward.cache = forward.cache, KVCache(torch.float32)
    forward.cache.reserve(64)
    forward.prefill(ids[:10])
    eager = rows_of(forward, ids[10:13], 10, None)
    assert graphs.recorded == recorded
    forward.cache = own
    forward.prefill(ids[:10])
    assert torch.equal(rows_of(forward, ids[10:13], 10, None), eager)


def broken(how: str) -> Recorder:
    def record(step: Callable[[], None]) -> Callable[[], None]:
        if how == "refused":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        step()
        return lambda: None  # what was computed on the day it was recorded, for ever

    return record


@pytest.mark.parametrize(
    ("how", "told"),
    [("refused", "operation not permitted when stream is capturing"), ("stale", "replayed rows are not the eager")],
)
def test_a_step_that_cannot_be_replayed_is_left_aside_aloud(
    target32: Target, how: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = graphed(target32, recording=Recording(lambda: broken(how), room=300))
    assert engine.facts.graphs.startswith(told.split(" when")[0]) and engine.facts.lossless
    assert f"no CUDA graphs ({told.split(' when')[0]}" in engine.facts.describe()
    prompt = prompts(6)[4]
    fast = engine.generate(prompt, 30, 3, ignore_eos=True).ids
    err = capsys.readouterr().err
    assert f"CUDA graphs of the target are not used: {told}" in err and "graphs of the draft are not used" in err
    assert err.count("not used") == 2
    engine.close()
    assert Engine(target32, kernels="torch", announce=False).generate(prompt, 30, ignore_eos=True).ids == fast


def test_a_step_that_waits_for_the_device_is_not_recorded() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"):
        tape_recorder()(lambda: x.mul_(float(x.sum())))


def test_a_tape_reads_what_lies_there_when_it_plays() -> None:
    x, y, start = torch.ones(3), torch.zeros(5), torch.tensor([1])

    def step() -> None:
        y.index_copy_(0, start + torch.arange(3), x.view(3) * 2)

    play = tape_recorder()(step)
    y.zero_()
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    start.fill_(2)
    play()
    assert y.tolist() == [0, 0, 2, 4, 6]
