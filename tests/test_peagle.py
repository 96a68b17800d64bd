"""P-EAGLE: a whole chain in one forward of the draft, and it is the chain that training predicts. Its losslessness,
its walk and its export are among the variants (test_variants.py), its training forward is held against loops in
test_loss.py and against decoding in test_parity.py."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.engine.draft_forward import NativeDraft, PlainDraft
from eyas.engine.forward import TargetForward
from eyas.engine.generate import Engine
from eyas.engine.native_build import load_native
from eyas.engine.propose import prepared
from eyas.engine.proposers import ParallelProposer, draft_proposer
from eyas.errors import InputError
from eyas.export.folder import export_draft, refusals
from eyas.formats.config_json import to_json
from eyas.formats.draft_config import DraftConfig
from eyas.formats.names import expected_tensors
from eyas.formats.read_config import read_config
from eyas.formats.taps import IDS_KEY
from eyas.formats.trace import TraceRequest
from eyas.launch.arguments import parse_launch
from eyas.launch.command import build_command
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.draft import ParallelDraft, make_draft
from eyas.models.foreign import name_target
from eyas.models.target import Target, load_target
from eyas.pipeline.inspect import inspect_path
from eyas.recipe import DraftSettings, ExportSettings, ServeSettings, TargetSettings, TrainSettings
from eyas.settings import DraftingSettings, SamplingSettings
from eyas.training.evaluate import chains
from eyas.training.initialise import draft_config, mask_token
from eyas.training.loop import train
from eyas.training.loss import unroll
from eyas.training.rows import Rows, supervise
from eyas.wiring.check import check
from eyas.wiring.loaders import loader_report
from eyas.wiring.preflight import preflight
from eyas.wiring.trace_draft import trace_checks
from made_captures import BOUNDARIES, captured, greedy_answer, made
from test_drafting import COSTS
from test_engine import prompts, random_draft

STEPS = 4
CHAIN = DraftingSettings(num_steps=STEPS)
TREE = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=9)
PEAGLE = {"method": "peagle", "mask_token_id": 0}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


def draft_of(target: Target, **options: object) -> ParallelDraft:
    draft = prepared(random_draft(target, **PEAGLE, **options), target)
    assert isinstance(draft, ParallelDraft)
    return draft


def proposer_of(draft: ParallelDraft, drafting: DraftingSettings = CHAIN) -> ParallelProposer:
    proposer = draft_proposer(PlainDraft(draft), drafting)
    assert isinstance(proposer, ParallelProposer)
    proposer.reserve(100)
    return proposer


def taps_of(target: Target, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        forward = TargetForward(target, BOUNDARIES)
        forward.cache.reserve(len(ids))
        _, taps = forward.prefill(ids)
        forward.close()
    assert taps is not None
    return taps


def trained_logits(draft: ParallelDraft, taps_1TA: Tensor, ids: list[int], steps: int = STEPS) -> Tensor:
    """[S, D] of the last tapped row, as training makes them; nothing after its next token is there to be read."""
    total = taps_1TA.shape[1]
    assert len(ids) == total + 1
    last, place = torch.tensor([total - 1]), torch.tensor([0])
    rows = Rows((0, total), torch.arange(total), (last,) * steps, (place,) * steps)
    with torch.no_grad():
        return draft.logits(torch.cat(unroll(draft, taps_1TA[0], torch.tensor(ids), rows)))


@pytest.mark.parametrize("length", [9, 40])
@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 2, "block": "qwen3"}, {"sliding_window": 6}])
def test_a_chain_takes_one_forward_and_is_what_training_predicts(target: Target, length: int, options: dict) -> None:
    draft, ids = draft_of(target, **options), torch.randint(3, 259, (length,)).tolist()
    taps, proposer, forwards = taps_of(target, ids[:-1]), proposer_of(draft), []
    handle = draft.register_forward_hook(lambda module, args, output: forwards.append(output.shape[1]))
    proposer.observe(taps, ids[1:], 0)
    tree = proposer.propose(STEPS)
    assert forwards == ([8 + STEPS - 1] if length == 9 else [38, STEPS]), "a long prompt's rows are written before"
    wanted = draft.target_ids(trained_logits(draft, taps, ids).argmax(-1)).tolist()
    assert list(tree.tokens) == wanted and tree.is_chain
    assert proposer.propose(2).tokens == tree.tokens[:2], "asked again it drafts the same"
    handle.remove()


def test_verified_rows_take_the_place_of_placeholders(target: Target) -> None:
    """Two rounds, one with two accepted tokens and one with none, against a proposer that is told all at once."""
    draft, ids = draft_of(target), prompts(4)[3][:12]
    told = [*ids, 7, 90, 200, 31]
    taps = taps_of(target, told[:-1])
    rounds, fresh = proposer_of(draft), proposer_of(draft)
    for first, last in ((0, len(ids) - 1), (len(ids) - 1, len(ids) + 2), (len(ids) + 2, len(ids) + 3)):
        rounds.observe(taps[:, first:last], told[first + 1 : last + 1], first)
        drafted = rounds.propose(STEPS)
    fresh.observe(taps, told[1:], 0)
    assert drafted == fresh.propose(STEPS)
    torch.testing.assert_close(rounds._logits_SD, fresh._logits_SD, atol=1e-5, rtol=1e-5)


def test_texts_side_by_side_do_not_share_rows(target: Target) -> None:
    draft, texts = draft_of(target), [torch.randint(3, 259, (9,)).tolist() for _ in range(2)]
    first = proposer_of(draft)
    second = first.fork()
    assert isinstance(second, ParallelProposer)
    second.reserve(100)
    for proposer, ids in ((first, texts[0]), (second, texts[1])):
        proposer.observe(taps_of(target, ids[:-1]), ids[1:], 0)
    drafted = [proposer.propose(STEPS).tokens for proposer in (first, second)]
    for ids, tokens in zip(texts, drafted, strict=True):
        wanted = trained_logits(draft, taps_of(target, ids[:-1]), ids).argmax(-1)
        assert list(tokens) == draft.target_ids(wanted).tolist()


def test_a_tree_is_the_likeliest_paths_of_levels_that_do_not_know_each_other(target: Target) -> None:
    draft, ids = draft_of(target), torch.randint(3, 259, (9,)).tolist()
    taps = taps_of(target, ids[:-1])
    proposer = proposer_of(draft, TREE)
    proposer.observe(taps, ids[1:], 0)
    tree = proposer.propose(3)
    shares_SD = trained_logits(draft, taps, ids, 3).softmax(-1)
    best = [
        list(zip(draft.target_ids(indices).tolist(), values.tolist(), strict=True))
        for values, indices in zip(*shares_SD.topk(3), strict=True)
    ]
    every = {}
    for depth in (1, 2, 3):
        for path in product(*best[:depth]):
            every[tuple(token for token, _ in path)] = torch.tensor([share for _, share in path]).prod().item()
    wanted = sorted(every, key=lambda path: -every[path])[:8]
    rows = range(1, len(tree.tokens) + 1)
    assert {tuple(tree.tokens[step - 1] for step in tree.path(row)[1:]) for row in rows} == set(wanted)


def test_the_placeholder_has_a_gradient_where_no_row_is_fed_it(target: Target) -> None:
    """Several processes wait for every parameter's: a short answer trains the first token alone."""
    draft = random_draft(target, **PEAGLE)
    draft.share_embedding(target.embedding)
    rows = supervise(torch.tensor([0, 1, 1, 1]), [4], 3)
    assert [len(index) for index in rows.index] == [2, 1, 0]
    for steps, fed in ((rows, True), (Rows(rows.starts, rows.positions_T, rows.index[:1], rows.inside[:1]), False)):
        draft.zero_grad()
        hidden = unroll(draft, torch.randn(4, 192), torch.tensor([5, 6, 7, 8]), steps)
        torch.cat(hidden).sum().backward()
        (gradient,) = [one.grad for name, one in draft.named_parameters() if name == "mask_hidden"]
        assert gradient is not None and bool(gradient.any()) == fed


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_every_way_of_drafting_gives_the_plain_text(target: Target, kernels: str) -> None:
    ways = [CHAIN, TREE, TREE.model_copy(update={"ngram": 3, "adaptive": True})]
    for drafting in ways:
        engine = Engine(target, draft_of(target), drafting=drafting, kernels=kernels, announce=False, costs=COSTS)
        for sampling in (SamplingSettings(), SamplingSettings(temperature=0.8, top_p=0.9, seed=3)):
            for prompt in prompts(4)[2:]:
                texts = [engine.generate(prompt, 20, steps, True, sampling=sampling).ids for steps in (0, 3)]
                assert texts[0] == texts[1]
        engine.close()


def test_the_compiled_rows_are_the_modules(target: Target) -> None:
    library = load_native()
    if isinstance(library, str):
        pytest.skip(library)
    draft = draft_of(target)
    plain, compiled = PlainDraft(draft), NativeDraft(draft, library)
    state, ids = torch.randn(1, 7, draft.config.hidden_size), torch.randint(3, 259, (7,)).tolist()
    found = []
    for forward in (plain, compiled):
        forward.cache.reserve(32)
        found.append(forward.logits(forward.chain(state, ids, 0, last=3)))
    assert found[0].shape == (1, 3, 200)
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


def test_what_is_evaluated_is_the_chain_that_is_proposed(target: Target) -> None:
    """Row by row of a greedy answer: the evaluator's hits are those of the proposer's tokens."""
    draft, prompt = draft_of(target), prompts(4)[3]
    ids = greedy_answer(target, prompt, 12)
    sample = captured(target, "s", "heldout", ids, len(prompt))
    argmax_T = torch.tensor([*ids[1:], greedy_answer(target, ids, 1)[-1]])
    found = chains(draft, sample, argmax_T, 3)
    assert found is not None
    for place, hits in enumerate(found.hits_RS):
        row = found.first + place
        proposer = proposer_of(draft)
        proposer.observe(sample.taps_TA[None, : row + 1], ids[1 : row + 2], 0)
        tokens = proposer.propose(3).tokens
        truth = [*argmax_T.tolist(), None, None, None]
        assert [token == truth[row + 1 + step] for step, token in enumerate(tokens)] == hits.tolist()


# Whoever reads one


def config_of(**options: object) -> DraftConfig:
    values = {
        **{"boundaries": (2, 4, 5), "target_num_hidden_layers": 8, "target_hidden_size": 64, "hidden_size": 64},
        **{"target_model_type": "llama", "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "vocab_size": 259, "draft_vocab_size": 200, "max_position_embeddings": 1024},
    }
    return DraftConfig.model_validate(values | PEAGLE | options)


def test_a_config_without_a_placeholder_or_with_one_too_many_is_refused() -> None:
    for options in ({"mask_token_id": None}, {"mask_token_id": 259}, {"method": "eagle3"}, {"norm_output": True}):
        with pytest.raises(InputError, match=r"mask_token_id|norm_output"):
            config_of(**options)


def test_the_placeholder_is_a_token_that_no_text_holds(target: Target) -> None:
    assert mask_token(target) == 0  # <|endoftext|>: neither the bos <|im_start|> nor the stop <|im_end|>
    config = draft_config(target, BOUNDARIES, DraftSettings(method="peagle"))
    assert (config.method, config.mask_token_id) == ("peagle", 0)
    assert draft_config(target, BOUNDARIES, DraftSettings(method="peagle", mask_token_id=9)).mask_token_id == 9
    assert draft_config(target, BOUNDARIES, DraftSettings()).mask_token_id is None


def test_vllm_gets_its_keys_and_sglang_a_refusal() -> None:
    config = config_of()
    content = to_json(config, {})
    assert (content["mask_token_id"], content["pard_token"]) == (0, 0)
    assert expected_tensors(config)["mask_hidden"] == (1, 1, 192)
    assert refusals(config, ["vllm@0.20", "vllm@0.24", "vllm@0.33"]) == []
    assert refusals(config, ["sglang"]) == ["sglang@0.5.23: method = peagle: it has no P-EAGLE"]
    plain = config_of(method="eagle3", mask_token_id=None)
    assert not {"mask_token_id", "pard_token"} & to_json(plain, {}).keys()


def exported(folder: Path, **options: object) -> tuple[Path, ParallelDraft]:
    """As eyas export writes it for vLLM, by hand."""
    config = config_of(**options)
    draft = make_draft(config)
    assert isinstance(draft, ParallelDraft)
    draft.d2t.copy_((torch.arange(200) >= 100) * 50)  # 0..99 and 150..249
    draft.t2d[torch.arange(200) + draft.d2t] = True
    eyas = {"format": 1, "draft": config.model_dump(mode="json"), "ttt_length": 3}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config, eyas)))
    save_file(
        {name: tensor.contiguous() for name, tensor in draft_tensors(draft).items()}, folder / "model.safetensors"
    )
    return folder, draft


def test_loaders_know_who_has_a_place_for_the_placeholder(tmp_path: Path) -> None:
    folder, draft = exported(tmp_path / "out")
    for engine in ("vllm@0.20", "vllm@0.24", "vllm@0.33"):
        report = loader_report(folder, engine)
        assert report.verdict == "pass", report.problems
        assert report.engine.runner == "v1" and report.gpu_default is None and report.scope == f"{engine}/v1"
        assert report.fates is not None and report.fates.loaded["mask_hidden"] == "mask_hidden"
    assert '"parallel_drafting": true' in report.words["algorithm"]
    other = loader_report(folder, "sglang")
    assert other.verdict == "fail" and "algorithm_mismatch" in {found.code for found in other.findings}
    tensors = draft_tensors(draft)
    del tensors["mask_hidden"]
    save_file(tensors, folder / "model.safetensors")
    assert {found.code for found in loader_report(folder, "vllm").findings} == {"tensor_missing"}


def test_inspect_names_the_method(tmp_path: Path) -> None:
    seen = inspect_path(exported(tmp_path / "out")[0])
    assert (seen["kind"], seen["method"], seen["boundaries"]) == ("draft", "peagle", [2, 4, 5])
    assert [found for found in seen["findings"] if found["severity"] == "error"] == []


def test_a_server_is_started_with_the_method_of_its_draft(tmp_path: Path) -> None:
    folder = str(exported(tmp_path / "out")[0])
    settings = ServeSettings(engine="vllm", num_steps=4)
    command = build_command(TargetSettings(name="org/target"), folder, settings, tmp_path)
    words = command.argv[command.argv.index("--speculative-config") + 1]
    assert json.loads(words) == {
        **{"method": "eagle3", "parallel_drafting": True, "model": folder, "num_speculative_tokens": 4}
    }
    with pytest.raises(InputError, match="P-EAGLE"):
        build_command(TargetSettings(name="org/target"), folder, ServeSettings(engine="sglang"), tmp_path)


@pytest.mark.parametrize(("method", "parallel", "found"), [
    ("peagle", True, False), ("peagle", False, True), ("eagle3", True, True), ("eagle3", False, False),
])  # fmt: skip
def test_a_launch_that_drafts_by_another_method_is_named(
    tmp_path: Path, tiny_target: Path, method: str, parallel: bool, found: bool
) -> None:
    options = {} if method == "peagle" else {"method": "eagle3", "mask_token_id": None}
    config = config_of(**options)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config, {"format": 1, "draft": config.model_dump()})))
    speculative = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    speculative |= {"parallel_drafting": True} if parallel else {}
    launch = parse_launch("vllm", ["--model", str(tiny_target), "--speculative-config", json.dumps(speculative)])
    named = [one for one in preflight(launch).findings if one.code == "algorithm_mismatch"]
    assert len(named) == found and all("parallel_drafting" in one.where for one in named)


def test_speculators_and_specforges_drafts_are_read(tmp_path: Path, tiny_target: Path) -> None:
    _, draft = exported(tmp_path / "ours")
    ours = to_json(draft.config, {})
    layer = {key: ours[key] for key in ours if key not in ("architectures", "eyas", "mask_token_id", "pard_token")}
    common = {"draft_vocab_size": 200, "mask_token_id": 0, IDS_KEY: [2, 4, 5]}
    written = {
        "speculators": {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "norm_output": True,
            "transformer_layer_config": layer,
        },
        "specforge": {**layer, "architectures": ["PEagleDraftModel"]},
    }
    for writer, raw in written.items():
        folder = tmp_path / writer
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | common))
        save_file(draft_tensors(draft), folder / "model.safetensors")
        file = read_config(raw | common)
        assert (file.format, file.method) == (writer, "peagle")
        loaded, info = load_draft(folder, foreign=name_target(str(tiny_target)))
        assert info.draft == draft.config and isinstance(loaded, ParallelDraft)
        assert torch.equal(loaded.mask_hidden, draft.mask_hidden)


def test_every_check_of_a_parallel_draft_runs_and_none_fails(target: Target, tiny_target: Path, tmp_path: Path) -> None:
    captures, _ = made(tmp_path / "captures", tiny_target)
    settings = TrainSettings(epochs=30, batch_tokens=64, learning_rate=3e-3, precision="float32", evaluate_every=0)
    named = TargetSettings(name=str(tiny_target))
    train(captures, tmp_path / "draft", settings, DraftSettings(method="peagle", vocab_size=200), named)
    export_draft(tmp_path / "draft", tmp_path / "out", ExportSettings(engines=("vllm",)))
    report = check(
        str(tiny_target), captures=captures, draft=tmp_path / "draft", export=tmp_path / "out", engines=("vllm@0.33",)
    )
    statuses = {one["name"]: one["status"] for one in report["checks"]}
    assert "fail" not in statuses.values(), report["findings"]
    assert statuses["TTT parity"] == statuses["export"] == statuses["acceptance"] == "pass"
    assert statuses["hypotheses"] == "pass"

    draft, _ = load_draft(tmp_path / "draft", target.embedding)
    for prompt in (prompts(4)[3], [5, 80, 9]):
        folder = tmp_path / f"trace-{len(prompt)}"
        request = TraceRequest(folder, True)
        engine = Engine(target, draft, num_steps=3, kernels="torch", announce=False, trace=request)
        engine.generate(prompt, 6, num_steps=3, ignore_eos=True)
        engine.close()
        checks = trace_checks([folder], target, None, draft)
        evidence = next(one for one in checks if one.name.startswith("trace draft")).evidence
        assert "layer differs by 0.00%" in evidence and "fail" not in {one.status for one in checks}, evidence
