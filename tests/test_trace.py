"""A trace says what the engine computed, and changes nothing: off, not a hook is there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.engine.generate import Engine, Generation
from eyas.engine.trace import statistics
from eyas.errors import InputError
from eyas.formats.trace import TRACE, Record, Trace, TraceRequest, read_trace
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target, record_boundaries
from eyas.pipeline.inspect import inspect_path
from eyas.run import read_manifest, verify_files
from eyas.settings import DraftingSettings
from replay import BranchingProposer
from test_engine import random_draft

PROMPT = [1, *range(40, 90, 2)]
P, NEW, BOUNDARIES = len(PROMPT), 12, (2, 4, 5)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return random_draft(target)


@pytest.fixture(scope="module")
def plain(target: Target, draft: Draft) -> Generation:
    return generate(target, draft, None)


def generate(target: Target, draft: Draft, request: TraceRequest | None) -> Generation:
    engine = Engine(target, draft, num_steps=3, kernels="torch", announce=False, trace=request)
    try:
        return engine.generate(PROMPT, NEW, num_steps=3, ignore_eos=True)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def traced(target: Target, draft: Draft, plain: Generation, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("trace") / "t"
    assert generate(target, draft, TraceRequest(folder, tensors=True)).ids == plain.ids
    return read_trace(folder)


def tensor(trace: Trace, record: Record) -> torch.Tensor:
    assert record.tensor is not None
    return load_file(trace.folder / record.tensor)["x"]


def test_every_stage_of_every_round_is_there_in_the_order_it_was_computed(traced: Trace, plain: Generation) -> None:
    rounds = len(plain.rounds)
    states = ["embedding", "tap", "tap", "tap"]
    rewritten = ["taps", "fc", "layer"]
    chain = ["logits", "layer", "logits", "layer", "logits"]
    middle = [*states, "accepted", *rewritten, *chain]
    wanted = [*states, *rewritten, *chain, *middle * (rounds - 1), *states, "accepted"]
    assert [record.stage for record in traced.records] == wanted
    assert [one.accepted for one in traced.of("accepted")] == list(plain.rounds)
    assert [one.round for one in traced.of("accepted")] == list(range(1, rounds + 1))
    assert [one.step for one in traced.of("logits")][:3] == [0, 1, 2]
    assert traced.header.boundaries == BOUNDARIES and traced.header.source == "eyas"


def test_recorded_taps_are_the_boundaries_of_one_forward_over_the_text(
    traced: Trace, target: Target, plain: Generation
) -> None:
    text = [*PROMPT, *plain.ids]
    with record_boundaries(target, BOUNDARIES) as recorder:
        target.backbone(input_ids=torch.tensor([text]))
    checked = 0
    for record in traced.of("taps"):
        assert record.positions is not None
        rows = list(record.positions)
        wanted = torch.cat([recorder.states[b][0, rows] for b in BOUNDARIES], dim=-1)
        torch.testing.assert_close(tensor(traced, record)[0], wanted, rtol=1e-4, atol=1e-4)
        assert list(record.ids or ()) == [text[row] for row in rows]
        checked += len(rows)
    assert checked >= P


def test_fc_output_and_logits_are_the_drafts_own(traced: Trace, draft: Draft) -> None:
    for taps, fc in zip(traced.of("taps"), traced.of("fc"), strict=True):
        torch.testing.assert_close(tensor(traced, fc), draft.fuse(tensor(traced, taps)))
    layers, logits = traced.of("layer"), traced.of("logits")
    torch.testing.assert_close(tensor(traced, logits[0]), draft.logits(tensor(traced, layers[0])[:, -1:]))
    assert layers[0].ids is not None and layers[0].positions == tuple(range(P))
    assert layers[0].ids[:-1] == tuple(PROMPT[1:])


def test_padding_rows_are_left_out_and_refused_ones_are_in(traced: Trace) -> None:
    for record in traced.records:
        if record.round and record.stage in ("embedding", "tap"):
            assert record.shape[1] == 4 == len(record.ids or ())


def test_statistics_are_those_of_the_tensor(traced: Trace) -> None:
    record = traced.of("fc")[0]
    values = tensor(traced, record)
    assert record.dtype == "float32" and record.shape == tuple(values.shape)
    assert record.mean == pytest.approx(values.double().mean().item())
    assert record.deviation == pytest.approx(values.double().std(correction=0).item())
    assert record.norm == pytest.approx(values.double().norm().item())
    assert record.first == tuple(values.flatten()[:5].tolist())


def test_values_that_are_not_finite_are_null_and_the_line_stays_json() -> None:
    found = statistics(torch.tensor([1.0, float("inf"), float("nan")]))
    assert found["first"] == [1.0, None, None] and found["norm"] is None
    json.loads(json.dumps(found, allow_nan=False))
    assert statistics(torch.zeros(0))["mean"] is None


def test_off_there_is_no_hook_but_the_taps(target: Target, draft: Draft) -> None:
    engine = Engine(target, draft, num_steps=3, kernels="torch", announce=False)
    hooked = [module for module in draft.modules() if module._forward_hooks]
    assert engine.trace is None and hooked == []
    assert not target.backbone._forward_hooks
    engine.close()


def test_closing_takes_every_hook_off_and_completes_the_folder(traced: Trace, target: Target, draft: Draft) -> None:
    for module in [*draft.modules(), target.backbone, target.model.get_input_embeddings()]:
        assert not module._forward_hooks
    manifest = read_manifest(traced.folder, "trace")
    assert manifest.facts["texts"] == 1 and manifest.facts["records"] == len(traced.records)
    assert verify_files(traced.folder) == []


def test_after_the_last_call_asked_for_nothing_is_recorded(target: Target, draft: Draft, tmp_path: Path) -> None:
    generate(target, draft, TraceRequest(tmp_path / "t", calls=2))
    trace = read_trace(tmp_path / "t")
    assert {record.call for record in trace.records} == {0, 1}
    assert not (tmp_path / "t" / "tensors").exists()


def test_the_environment_switches_it_on_for_any_engine(
    target: Target, draft: Draft, plain: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_TRACE", "1")
    monkeypatch.setenv("EYAS_TRACE_OUT", str(tmp_path / "t"))
    assert generate(target, draft, None).ids == plain.ids
    assert generate(target, draft, None).ids == plain.ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t-2"]
    assert read_trace(tmp_path / "t-2").of("accepted")


@pytest.mark.parametrize("value", ["", "0"])
def test_an_environment_that_says_no_asks_for_nothing(value: str) -> None:
    assert TraceRequest.from_environment({"EYAS_TRACE": value, "EYAS_TRACE_OUT": "x"}) is None
    assert TraceRequest.from_environment({}) is None


def test_a_cut_last_line_is_left_out_and_a_bad_one_named(traced: Trace, tmp_path: Path) -> None:
    whole = (traced.folder / TRACE).read_text().replace('"tensor"', '"x"')
    (tmp_path / TRACE).write_text(whole[:-20])
    assert len(read_trace(tmp_path).records) == len(traced.records) - 1
    lines = whole.splitlines(keepends=True)
    for bad, words in (("{\n", "line 3"), ('{"stage": "tpas", "call": 0}\n', "stage")):
        (tmp_path / TRACE).write_text("".join([*lines[:2], bad, *lines[2:]]))
        with pytest.raises(InputError, match=words):
            read_trace(tmp_path)
    (tmp_path / TRACE).write_text('{"format": 2, "source": "eyas", "version": "9"}\n')
    with pytest.raises(InputError, match="format 2"):
        read_trace(tmp_path)
    (tmp_path / TRACE).write_text("")
    with pytest.raises(InputError, match="empty"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="trace folder"):
        read_trace(tmp_path / "nowhere")


def test_inspect_says_what_a_trace_is_with_and_without_a_manifest(traced: Trace, tmp_path: Path) -> None:
    assert inspect_path(traced.folder)["kind"] == "trace"
    (tmp_path / TRACE).write_text((traced.folder / TRACE).read_text().replace('"tensor"', '"x"'))
    seen = inspect_path(tmp_path)
    assert (seen["kind"], seen["boundaries"], seen["tensors"]) == ("trace", [2, 4, 5], False)
    assert seen["records"]["taps"] == len(traced.of("taps")) and seen["source"].startswith("eyas ")


def test_a_tensor_that_is_gone_is_named(traced: Trace, tmp_path: Path) -> None:
    (tmp_path / TRACE).write_text((traced.folder / TRACE).read_text())
    with pytest.raises(InputError, match="000001-embedding"):
        read_trace(tmp_path)


def test_a_folder_with_a_trace_is_not_written_over(traced: Trace, target: Target, draft: Draft) -> None:
    with pytest.raises(InputError, match="without a trace"):
        generate(target, draft, TraceRequest(traced.folder))
    assert target.model.config._attn_implementation != "eyas"


def test_a_tree_is_traced_with_its_parents_and_the_path_that_stood(
    target: Target, draft: Draft, plain: Generation, tmp_path: Path
) -> None:
    drafting = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=10)
    request = TraceRequest(tmp_path / "t", tensors=True)
    engine = Engine(target, draft, drafting=drafting, kernels="torch", announce=False, trace=request)
    engine.proposer = BranchingProposer(plain.ids, P, target.vocab_size, lambda i: i % 4 == 0)
    run = engine.generate(PROMPT, NEW, num_steps=3, ignore_eos=True)
    engine.close()
    assert run.ids == plain.ids and max(run.rounds) > 0
    trace, text = read_trace(tmp_path / "t"), [*PROMPT, *plain.ids]
    for record in trace.of("accepted"):
        assert record.drafted is not None and record.parents is not None and len(record.parents) == len(record.drafted)
    for record in trace.of("taps"):
        assert list(record.ids or ()) == [text[row] for row in record.positions or ()]
