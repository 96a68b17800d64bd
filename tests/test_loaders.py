"""What the loaders say of real configs and tensor lists, of exports, and of an upgrade; nothing ends in a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cli import main
from eyas.errors import InputError
from eyas.formats.config_json import to_json
from eyas.formats.engines import KNOWN
from eyas.formats.headers import TensorHeader
from eyas.formats.names import expected_tensors, exported_names
from eyas.formats.taps import IDS_KEY
from eyas.formats.vocab_tables import judge_tables
from eyas.wiring.findings import CODES
from eyas.wiring.loaders import TargetFacts, loader_report
from eyas.wiring.static_checks import check_loader, check_static
from test_formats import MLA, TARGET, draft_config

CASES = Path(__file__).parents[1].parent / "shared" / "cases"
ROWS = json.loads((Path(__file__).parent / "data" / "loader_cases.json").read_text())
ENGINES = [f"sglang@{release}" for release in KNOWN["sglang"]]
ENGINES += [f"vllm@{release}/{runner}" for release in KNOWN["vllm"] for runner in ("v1", "v2")]
WRONG = "config_key_wrong"
LLAMA = TargetFacts("llama", 8, 64, 259, 512)


def codes(report, severity="error"):
    return sorted({found.code for found in report.findings if found.severity == severity})


# Real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_every_real_config_has_its_reviewed_verdict(name):
    row = ROWS[name]
    target = TargetFacts(**row["target"]) if row["target"] else None
    assert row["reason"] and len(row["reason"]) > 20
    bare = loader_report(row["config"], "sglang").declared
    boundaries = None if bare.boundaries is None else list(bare.boundaries)
    assert (boundaries, bare.ids_ambiguous) == (row["boundaries"], row["ids_ambiguous"])
    for engine, expected in row["engines"].items():
        report = loader_report(row["config"], engine, target)
        captured = None if report.boundaries is None else list(report.boundaries)
        assert (captured, codes(report), codes(report, "warning")) == (
            expected["captures"],
            expected["errors"],
            expected["warnings"],
        ), engine
        assert report.verdict == ("fail" if expected["errors"] else report.verdict)


@pytest.mark.skipif(not CASES.is_dir(), reason="the folder of real cases is not beside the repository")
def test_the_restated_facts_are_those_of_the_files_and_every_file_has_a_row():
    paths = [path for path in CASES.glob("configs/*.json") if not path.name.endswith(".source.json")]
    assert {path.stem for path in paths} == set(ROWS)
    for path in paths:
        raw, row = json.loads(path.read_text()), ROWS[path.stem]
        assert {key: raw[key] for key in row["config"] if key != "transformer_layer_config"} == {
            key: value for key, value in row["config"].items() if key != "transformer_layer_config"
        }
        target = TargetFacts(**row["target"]) if row["target"] else None
        for engine in ENGINES:
            whole, restated = loader_report(path, engine, target), loader_report(row["config"], engine, target)
            assert whole.findings == restated.findings and whole.boundaries == restated.boundaries


ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
NORMS = ["input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"]
MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
TOP = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
LATENT = [f"self_attn.{n}.weight" for n in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")]
LATENT += ["self_attn.kv_a_proj_with_mqa.weight", "self_attn.o_proj.weight"]
QK = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]


def names(layer: str, inside: list[str], top: list[str]) -> dict[str, TensorHeader]:
    listed = [*(f"{layer}{name}" for name in inside), *top]
    return {name: TensorHeader(None, "I64" if name == "d2t" else None, "list") for name in listed}


BLOCK = ATTENTION + NORMS + MLP
TENSORS = {
    "T-01": (names("midlayer.", BLOCK, TOP), "midlayer names, embedding shared: read everywhere"),
    "T-02": (
        names("layers.0.", BLOCK, [*TOP[:4], "embed_tokens.weight"]),
        "layers.0 names: SGLang 0.5.11 drops the whole layer in silence, everyone else reads them; no t2d is no loss",
    ),
    "T-03": (
        names("layers.0.", [*ATTENTION, NORMS[0], NORMS[2], *MLP], ["embed_tokens.weight", "norm.weight"]),
        "EAGLE-1's layout: fc and hidden_norm would stay random",
    ),
    "T-04": (names("midlayer.", BLOCK, TOP), "midlayer names alone: read everywhere"),
    "T-05": (
        names("layers.0.", BLOCK + QK, ["fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight"]),
        "a Qwen3 block: SGLang drops its two norms, vLLM 0.20 stops on them, from 0.24 it has a class for it",
    ),
    "T-06": (names("layers.0.", LATENT + NORMS + MLP, ["fc.weight", "norm.weight"]), "an MLA draft, head shared"),
}


def from_names(headers):
    """As `eyas inspect LIST --engine ...` reads a tensor list: a config that the names imply."""
    return {"tensors": {name: None for name in headers}}


@pytest.mark.parametrize(
    ("case", "engine", "dropped", "refused", "missing"),
    [
        ("T-01", "sglang@0.5.11", [], [], []),
        ("T-01", "sglang@0.5.23", [], [], []),
        ("T-01", "vllm@0.20", [], [], []),
        ("T-01", "vllm@0.33", [], [], []),
        ("T-02", "sglang@0.5.11", BLOCK, [], BLOCK),
        ("T-02", "sglang@0.5.12", [], [], []),
        ("T-02", "vllm@0.33", [], [], []),
        ("T-03", "sglang@0.5.23", [], [], ["hidden_norm.weight", "fc.weight"]),
        ("T-03", "vllm@0.33", [], [], ["hidden_norm.weight", "fc.weight"]),
        ("T-04", "sglang@0.5.11", [], [], []),
        ("T-05", "sglang@0.5.23", QK, [], []),
        ("T-05", "vllm@0.20", [], QK, []),
        ("T-05", "vllm@0.24", [], [], []),
        ("T-05", "vllm@0.33", [], [], []),
        ("T-06", "sglang@0.5.12", [], [], []),
        ("T-06", "vllm@0.33", [], [], []),
    ],
)
def test_real_tensor_names_meet_their_fate(tmp_path, case, engine, dropped, refused, missing):
    headers, reason = TENSORS[case]
    path = tmp_path / "list.json"
    path.write_text(json.dumps(from_names(headers)))
    report = loader_report(path, engine)
    assert report.fates is not None, reason

    def bare(found):
        return sorted(name.removeprefix("layers.0.").removeprefix("midlayer.") for name in found)

    seen = (bare(report.fates.dropped), bare(report.fates.refused), bare(report.fates.missing))
    assert seen == (sorted(dropped), sorted(refused), sorted(missing)), reason
    assert report.verdict == ("fail" if dropped or refused or missing else "unknown")


@pytest.mark.skipif(not CASES.is_dir(), reason="the folder of real cases is not beside the repository")
@pytest.mark.parametrize("engine", ENGINES)
def test_real_tensor_lists_get_a_verdict_from_every_release(engine):
    verdicts = {path.name[:4]: loader_report(path, engine) for path in CASES.glob("tensors/*.json")}
    assert {name: report.verdict for name, report in verdicts.items() if name in ("T-01", "T-04")} == {
        "T-01": "unknown",
        "T-04": "unknown",
    }
    assert "embed_mismatch" in codes(verdicts["T-07"])  # 48 wide beside a target of 64, and no embedding of its own
    if engine.startswith("vllm"):
        assert "shape_mismatch" in codes(verdicts["T-08"])  # four states, and fc is built for three
    else:
        assert "architecture_unknown" in codes(verdicts["T-08"])  # the speculators format


# Tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d2t", "t2d", "code"),
    [
        ([0, 4, 7, 14], [0, 5, 9, 17], None),
        ([0, 5, 9, 17], [0, 5, 9, 17], "d2t_absolute"),
        ([0, 1, 2, 3], [0, 5, 9, 17], "d2t_absolute"),
        ([0, 0, 0, 0], [0, 5, 9, 17], "d2t_missing"),
        ([0, 0, 0, 0], None, "d2t_missing"),
        ([0, 0, 0, 0], [0, 1, 2, 3], None),  # a vocabulary of the target's first ids
        ([0, 4, 7, 40], [0, 5, 9, 17], "d2t_out_of_range"),
        ([0, 4, 7, 13], [0, 5, 9, 17], "d2t_out_of_range"),
        ([0, 4, 7, 14], None, None),
        ([0, 5, 9, 17], None, None),  # without t2d ids 0, 6, 11, 20 are as good as any
    ],
)
def test_tables_are_judged_as_the_four_of_the_bug_report(d2t, t2d, code):
    mask = None if t2d is None else bytes(int(i in t2d) for i in range(24))
    assert [problem.code for problem in judge_tables(d2t, mask, 24)] == ([] if code is None else [code])


# Upgrades and releases --------------------------------------------------------------------------------------------

KIMI = TargetFacts("kimi_k25", 61, 7168, 163840, 262144)
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
}


def kimi(ids, engine):
    nested = {} if ids is None else {"eagle_config": {IDS_KEY: ids}}
    return loader_report(DRAFT | nested, engine, KIMI)


def test_upgrading_the_engine_mis_wires_a_right_draft():
    assert kimi([2, 30, 58], "sglang@0.5.12.post1").boundaries == (3, 31, 59)  # as it was trained
    assert kimi([2, 30, 58], "sglang@0.5.13").boundaries == (2, 30, 58)
    assert kimi([-1, 2, 30], "sglang@0.5.12.post1").boundaries == (0, 3, 31)
    after = kimi([-1, 2, 30], "sglang@0.5.13")
    assert after.boundaries == (2, 30) and "tap_missing" in codes(after)


def test_the_upgrade_is_named_with_its_fix_where_the_draft_says_what_it_is():
    config = draft_config(
        boundaries=(3, 31, 59), target_num_hidden_layers=61, target_hidden_size=7168, target_model_type="kimi_k25",
        hidden_size=7168, vocab_size=163840, draft_vocab_size=32000, max_position_embeddings=262144,
    )  # fmt: skip
    target = TARGET.model_copy(update={"model_type": "kimi_k25", "num_hidden_layers": 61, "hidden_size": 7168})
    block = {"format": 1, "draft": config.model_dump(mode="json"), "target": target.model_dump(mode="json")}
    raw = to_json(config, block)
    assert raw["eagle_config"][IDS_KEY] == [3, 31, 59]
    old = raw | {"eagle_config": {IDS_KEY: [2, 30, 58]}}  # as published for releases up to 0.5.12.post1
    assert codes(loader_report(old, "sglang@0.5.12.post1", KIMI)) == []
    broken = loader_report(old, "sglang@0.5.13", KIMI)
    (found,) = [one for one in broken.findings if one.code == "tap_offset"]
    assert (broken.boundaries, found.fix) == ((2, 30, 58), f"eagle_config.{IDS_KEY} = [3, 31, 59]")
    assert loader_report(raw, "sglang@0.5.23", KIMI).boundaries == (3, 31, 59)


def test_a_release_in_between_follows_the_nearest_older_one_and_says_so():
    report = kimi([2, 30, 58], "sglang@0.5.14")
    assert report.boundaries == (2, 30, 58) and "version_unsupported" in codes(report, "warning")
    assert "version_unsupported" not in codes(kimi([2, 30, 58], "sglang@0.5.12"), "warning")


def test_a_pass_of_the_v1_runner_is_no_pass_for_the_gpu_default():
    raw = DRAFT | {"eagle_config": {IDS_KEY: [3, 31, 59]}, "num_aux_hidden_states": 3}
    report = loader_report(raw, "vllm@0.33.0/v1", KIMI)
    assert report.boundaries == (3, 31, 59) and report.gpu_default.boundaries == (2, 30, 58)
    assert "not the default on GPUs" in report.scope
    assert codes(loader_report(raw, "vllm@0.33.0", KIMI)) == ["ids_ignored"]


def test_a_check_that_passes_on_the_v1_runner_warns_of_the_other(tmp_path):
    path = tmp_path / "config.json"
    config = draft_config(
        boundaries=(3, 31, 59), target_num_hidden_layers=61, target_hidden_size=7168, target_model_type="kimi_k25",
        hidden_size=7168, vocab_size=163840, draft_vocab_size=32000, max_position_embeddings=262144,
    )  # fmt: skip
    raw = to_json(config, {"format": 1, "draft": config.model_dump(mode="json"), "target": None})
    path.write_text(json.dumps(raw))
    assert check_loader(path, "vllm@0.33.0/v1", KIMI).findings == []
    del raw[IDS_KEY]
    path.write_text(json.dumps(raw | {"eagle_config": {IDS_KEY: [3, 31, 59]}}))
    one = check_loader(path, "vllm@0.33.0/v1", KIMI)
    assert one.status == "pass"
    (warned,) = [found for found in one.findings if found.code == "tap_offset"]
    assert (warned.severity, warned.found[:11]) == ("warning", "[2, 30, 58]")
    assert "V1 runner (CPU" in one.evidence


@pytest.mark.parametrize("ids", [["1", "3", "4"], "1,3,4", {}, [True, 3, 4], [1.5, 3, 4]])
def test_ids_that_are_no_list_of_integers_are_an_error_where_they_are_read(ids):
    nested, top = {"eagle_config": {IDS_KEY: ids}}, {IDS_KEY: ids}
    for keys, engine, expected in [(nested, "sglang", True), (top, "sglang", False), (top, "vllm", True)]:
        found = [one.where for one in loader_report(DRAFT | keys, engine, LLAMA).findings if one.code == WRONG]
        assert any(where.endswith(IDS_KEY) for where in found) == expected, engine
    assert WRONG in codes(loader_report(DRAFT | nested, "vllm@0.33/v1", LLAMA))


def test_an_empty_list_is_not_the_default():
    raw = DRAFT | {IDS_KEY: [], "eagle_config": {IDS_KEY: []}}
    sglang, vllm = (loader_report(raw, engine, LLAMA) for engine in ("sglang", "vllm"))
    assert (sglang.boundaries, "tap_missing" in codes(sglang)) == ((), True)
    assert (vllm.boundaries, vllm.declared.boundaries) == ((2, 4, 5), None)


@pytest.mark.parametrize("value", [0, -64, "64", 64.0, True, [64]])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_size_that_is_none_is_an_error(key, value, engine):
    report = loader_report(DRAFT | {key: value, "num_key_value_heads": 1}, engine, LLAMA)
    assert any(found.where.endswith(key) for found in report.findings if found.code == WRONG)


@pytest.mark.parametrize(
    ("ids", "target", "boundaries"),
    [
        ([1, 17, 32], "qwen3", None),  # as outputs start; vLLM would read boundaries
        ([3, 23, 32], "qwen3", None),
        ([2, 18, 33], "qwen3", (2, 18, 33)),  # as the default boundaries start
        ([24, 30, 36], "qwen3", (24, 30, 36)),  # reaches n
        ([3, 18, 33], "kimi_k25", (3, 18, 33)),  # SGLang reads boundaries there too
    ],
)
def test_one_list_in_both_places_is_not_guessed(ids, target, boundaries):
    raw = DRAFT | {IDS_KEY: ids, "eagle_config": {IDS_KEY: ids}}
    report = loader_report(raw, "sglang@0.5.23", TargetFacts(target, 36))
    assert report.declared.boundaries == boundaries
    assert report.declared.ids_ambiguous == ("ids_ambiguous" in codes(report, "warning")) == (boundaries is None)


@pytest.mark.parametrize(
    ("engine", "target", "captured"),
    [
        ("vllm@0.20/v1", "llama", (2, 4, 5)),  # top level only, so the default of 8 layers
        ("vllm@0.24/v1", "llama", (1, 3, 4)),
        ("vllm@0.24", "llama", (2, 4, 5)),  # V2 there, which reads the top level only
        ("vllm@0.24", "gpt_oss", (1, 3, 4)),  # V1 there
        ("vllm@0.32/v2", "llama", (2, 4, 5)),
        ("sglang@0.5.11", "llama", (2, 4, 5)),
    ],
)
def test_nested_ids_by_release_and_runner(engine, target, captured):
    raw = {**DRAFT, "hidden_size": 64, "eagle_config": {IDS_KEY: [1, 3, 4]}}
    assert loader_report(raw, engine, TargetFacts(target, 8, 64)).boundaries == captured


def test_classes_that_cannot_capture_yet_are_refused_by_name():
    raw = DRAFT | {"eagle_config": {IDS_KEY: [1, 3, 4]}}
    for engine, target, severity in [
        ("sglang@0.5.11", "gemma3_text", "error"),
        ("sglang@0.5.23", "deepseek_v4", "error"),
        ("sglang@0.5.23", "mystery", "warning"),
        ("vllm@0.20", "glm4_moe", "error"),
    ]:
        assert "architecture_unknown" in codes(loader_report(raw, engine, TargetFacts(target, 8)), severity), engine


YARN = {"rope_type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"rope_scaling": YARN}, "sglang@0.5.16"),
        ({"rope_scaling": YARN}, "vllm@0.32"),
        ({**MLA, "rope_scaling": YARN}, "sglang@0.5.12"),
        ({**MLA, "rope_scaling": YARN}, "vllm@0.33"),
    ],
)
def test_the_releases_that_read_mscale_pass(options, engine):
    raw, headers = exported(**options)
    assert loader_report(raw, engine, LLAMA, headers).verdict == "pass"


def test_vllm_takes_a_deepseek_v3_draft_for_something_else():
    raw, headers = exported(**MLA)
    report = loader_report(raw | {"model_type": "deepseek_v3"}, "vllm", LLAMA, headers)
    (found,) = [one for one in report.findings if one.code == "architecture_unknown"]
    assert (found.where, found.fix) == ("vllm@0.33/v2: model_type", "model_type = deepseek_v2")
    halves = loader_report(raw | {"rope_interleave": False}, "vllm", LLAMA, headers)
    assert codes(halves) == ["rope_scaling"]
    assert codes(loader_report(raw | {"rope_interleave": False}, "sglang", LLAMA, headers)) == []


# Options ----------------------------------------------------------------------------------------------------------


def exported(**options):
    """A draft's config.json with its eyas block, and the tensors of its export."""
    config = draft_config(**options)
    block = {"format": 1, "draft": config.model_dump(mode="json"), "target": TARGET.model_dump(mode="json")}
    shapes = expected_tensors(config)
    headers = {
        name: TensorHeader(shapes[source], {"d2t": "I64", "t2d": "BOOL"}.get(name, "F32"), "model.safetensors")
        for name, source in exported_names(config).items()
    }
    return to_json(config, block), headers


@pytest.mark.parametrize("engine", ["sglang@0.5.23", "sglang@0.5.17", "vllm@0.33", "vllm@0.32/v1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
        {"num_hidden_layers": 2},
        {"boundaries": (2, 3, 4, 5)},
        MLA,
        {**MLA, "fc_norm": True, "norm_output": True},
    ],
)
def test_an_export_passes_every_recent_engine(engine, options):
    raw, headers = exported(**options)
    report = loader_report(raw, engine, LLAMA, headers)
    assert (report.findings, report.verdict) == ([], "pass")
    assert report.fates.dropped == report.fates.refused == report.fates.missing == []


@pytest.mark.parametrize(
    ("options", "engine", "code"),
    [
        ({"norm_before_residual": True}, "sglang", "residual_norm"),
        ({"block": "qwen3"}, "sglang", "architecture_unknown"),
        ({"attention_bias": True}, "sglang", "bias_dropped"),
        ({"own_embedding": True}, "sglang", "embed_mismatch"),
        ({"boundaries": (4,)}, "sglang", "fc_skipped"),
        ({"sliding_window": 32}, "sglang", "sliding_window"),
        ({"fc_bias": True}, "vllm", "bias_dropped"),
        ({"fc_norm": True}, "sglang@0.5.11", "fc_norm"),
        ({"norm_output": True}, "sglang@0.5.11", "feedback_norm"),
        ({"norm_output": True}, "vllm@0.20", "feedback_norm"),
        ({"norm_before_fc": True}, "sglang@0.5.16", "fc_norm"),
        ({"num_hidden_layers": 2}, "sglang@0.5.11", "config_key_wrong"),
        ({"boundaries": (2, 3, 4, 5)}, "sglang@0.5.11", "shape_mismatch"),
        ({"boundaries": (2, 3, 4, 5)}, "vllm@0.20", "shape_mismatch"),
        ({"block": "qwen3"}, "vllm@0.20", "architecture_unknown"),
        (MLA, "sglang@0.5.11", "architecture_unknown"),
        ({**MLA, "num_hidden_layers": 2}, "sglang", "config_key_wrong"),
        ({**MLA, "norm_before_fc": True}, "sglang", "fc_norm"),
        ({**MLA, "norm_before_fc": True}, "vllm", "fc_norm"),
        ({**MLA, "fc_norm": True}, "sglang@0.5.12", "fc_norm"),
        ({**MLA, "sliding_window": 32}, "sglang", "sliding_window"),
        ({**MLA, "sliding_window": 32}, "vllm", "sliding_window"),
        ({**MLA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "sglang", "rope_scaling"),
        ({**MLA, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": False}}, "vllm", "rope_scaling"),
        ({"rope_scaling": YARN}, "sglang@0.5.13", "rope_scaling"),
        ({"rope_scaling": YARN}, "vllm@0.24", "rope_scaling"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "sglang", "rope_scaling"),
    ],
)
def test_what_an_engine_does_not_do_is_found_by_name(options, engine, code):
    raw, headers = exported(**options)
    assert code in codes(loader_report(raw, engine, LLAMA, headers))


@pytest.mark.parametrize(
    ("change", "engine", "code"),
    [
        ({"target_hidden_size": None}, "sglang", "config_key_wrong"),
        ({"draft_vocab_size": "absent"}, "sglang", "config_key_missing"),
        ({"tie_word_embeddings": True}, "sglang", "tied_head"),
        ({"rope_theta": None, "rope_parameters": None}, "sglang", "rope_theta"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "vllm", "rope_theta"),
        ({"max_position_embeddings": 128}, "sglang", "context_too_short"),
        ({"max_position_embeddings": 128}, "vllm@0.24", "context_too_short"),
        ({"vocab_size": 300}, "vllm", "vocab_mismatch"),
        ({"num_aux_hidden_states": 4}, "vllm", "shape_mismatch"),
        ({"eagle_config": {IDS_KEY: [2, 4, 5]}}, "sglang", "tap_offset"),
        ({IDS_KEY: [0, 4, 5]}, "vllm", "tap_embedding"),
        ({IDS_KEY: [2, 4]}, "vllm", "tap_missing"),
        ({IDS_KEY: "absent"}, "vllm", "ids_ignored"),
    ],
)
def test_a_key_changed_by_hand_is_found_by_name(change, engine, code):
    raw, headers = exported()
    raw = {key: value for key, value in (raw | change).items() if value != "absent"}
    assert code in codes(loader_report(raw, engine, LLAMA, headers))


@pytest.mark.parametrize(
    ("rename", "engine", "code"),
    [
        (lambda name: f"draft_model.{name}", "sglang", "tensor_missing"),
        (lambda name: f"model.{name}", "vllm", "tensor_unexpected"),
        (lambda name: name.replace("midlayer.", "layers.0."), "sglang@0.5.11", "tensor_missing"),
        (lambda name: "x" if name == "d2t" else name, "sglang", "d2t_missing"),
        (lambda name: "midlayer.self_attn.q_proj.bias" if name == "t2d" else name, "sglang", "bias_dropped"),
        (lambda name: "midlayer.self_attn.q_proj.bias" if name == "t2d" else name, "vllm@0.20", "bias_dropped"),
        (lambda name: "aux_norm_low.weight" if name == "t2d" else name, "vllm", "tensor_unexpected"),
    ],
)
def test_a_tensor_by_another_name_is_found(rename, engine, code):
    raw, headers = exported()
    report = loader_report(raw, engine, LLAMA, {rename(name): header for name, header in headers.items()})
    assert code in codes(report)


def test_a_whole_vocabulary_with_a_table_stops_vllm_from_032():
    raw, headers = exported(draft_vocab_size=259)
    headers = headers | {"d2t": TensorHeader((259,), "I64", "f"), "t2d": TensorHeader((259,), "BOOL", "f")}
    assert codes(loader_report(raw, "vllm@0.24", LLAMA, headers)) == []
    assert codes(loader_report(raw, "vllm@0.32", LLAMA, headers)) == ["tensor_unexpected"]
    assert codes(loader_report(raw, "sglang", LLAMA, headers)) == []


def test_vllm_applies_a_window_only_where_layer_types_names_it():
    raw, headers = exported(sliding_window=32)
    named = raw | {"layer_types": ["sliding_attention"]}
    assert codes(loader_report(named, "vllm@0.33", LLAMA, headers)) == []
    plain = {key: value for key, value in raw.items() if key != "layer_types"}
    assert codes(loader_report(plain, "vllm@0.33", LLAMA, headers)) == ["sliding_window"]


def test_an_unreadable_draft_and_an_unknown_engine_are_input_errors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    with pytest.raises(InputError, match="only drafts have"):
        loader_report(tmp_path, "sglang")
    with pytest.raises(InputError, match="an engine"):
        loader_report(DRAFT, "tgi")
    with pytest.raises(InputError, match="on this machine"):
        check_static(tmp_path, ["sglang"], target="nobody/nothing")


SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3) | st.lists(st.integers(-2, 9), max_size=4)
)
KEYS = [*DRAFT, IDS_KEY, "eagle_config", "rope_scaling", "rope_parameters", "target_hidden_size", "layer_types",
        "transformer_layer_config", "speculators_model_type", "head_dim", "num_key_value_heads", "bias", "fc_norm",
        "use_sliding_window", "sliding_window", "kv_lora_rank", "tie_word_embeddings"]  # fmt: skip
NESTED = st.dictionaries(st.sampled_from([IDS_KEY, "layer_ids", "use_aux_hidden_state", "rope_type", *KEYS]), SCALARS)
TENSOR_NAMES = [*names("midlayer.", BLOCK + QK, [*TOP, "x.bias"]), "layers.1.hidden_norm.weight", "model.fc.weight"]


@given(
    st.dictionaries(st.sampled_from(KEYS), SCALARS | NESTED | st.sampled_from([["LlamaForCausalLMEagle3"]])),
    st.none() | st.dictionaries(st.sampled_from(TENSOR_NAMES), st.none() | st.lists(st.integers(0, 9), max_size=2)),
    st.sampled_from(ENGINES),
)
@settings(max_examples=300, deadline=None)
def test_no_config_however_odd_ends_in_a_traceback(changes, shapes, engine):
    raw = DRAFT | changes
    headers = None
    if shapes is not None:
        headers = {n: TensorHeader(None if s is None else tuple(s), None, "f") for n, s in shapes.items()}
    report = loader_report(raw, engine, LLAMA, headers)
    assert {found.code for found in report.findings} <= CODES.keys()
    json.dumps(report.as_dict)


# Command line -----------------------------------------------------------------------------------------------------


def run(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0), json.loads(capsys.readouterr().out)


def test_check_and_inspect_ask_engines_about_a_bare_config(tmp_path, capsys):
    path, target = tmp_path / "config.json", tmp_path / "target.json"
    path.write_text(json.dumps(DRAFT | {"eagle_config": {IDS_KEY: [1, 29, 57]}}))
    target.write_text(json.dumps({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2",
        "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}}))  # fmt: skip
    flags = ["--engine", "sglang@0.5.12", "--engine", "vllm@0.33.0/v1", "--target", str(target)]
    status, seen = run(capsys, "check", "--draft", str(path), *flags, "--json")
    statuses = {check["name"]: check["status"] for check in seen["checks"]}
    assert (status, seen["verdict"]) == (1, "fail")
    assert (statuses["loader sglang@0.5.12"], statuses["loader vllm@0.33/v1"]) == ("pass", "fail")
    assert statuses["tap identity"] == statuses["vocabulary"] == "skipped"
    status, seen = run(capsys, "inspect", str(path), *flags, "--json")
    assert status == 0 and seen["engines"]["sglang@0.5.12"]["captures"] == [2, 30, 58]
    assert seen["engines"]["vllm@0.33/v1"]["gpu_default"]["captures"] == [2, 30, 58]


def test_loaders_need_no_torch():
    code = (
        "import sys; import eyas.wiring.static_checks;"
        "print([name for name in ('torch', 'transformers', 'safetensors', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
