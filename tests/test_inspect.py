"""What `eyas inspect` says of drafts, tensor lists, targets, stages and prompts; the real files where they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.prompts import make_prompts
from eyas.errors import InputError
from eyas.pipeline.inspect import inspect_path
from eyas.recipe import PromptsSettings
from eyas.run import write_manifest
from eyas.stage import result_stage
from eyas.wiring.findings import CODES

CASES = Path(__file__).parents[1].parent / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the folder of real cases is not beside the repository")
KEYS = {"kind", "format", "boundaries", "ids_ambiguous", "boundaries_source", "dialects", "tensors", "findings"}


def case(name: str) -> Path:
    (path,) = [path for path in CASES.glob(f"*/{name}*.json") if not path.name.endswith(".source.json")]
    return path


def codes(seen, severity=None):
    return {found["code"] for found in seen["findings"] if severity in (None, found["severity"])}


@needs_cases
def test_every_real_config_is_read_as_a_draft():
    paths = [path for path in CASES.glob("configs/*.json") if not path.name.endswith(".source.json")]
    assert len(paths) > 40
    for path in paths:
        seen = inspect_path(path)
        assert seen["kind"] == "draft" and seen.keys() >= KEYS, path.name
        assert seen["dialects"].keys() == {"sglang", "vllm", "vllm_v1", "llamacpp"}
        assert codes(seen) <= CODES.keys()
        assert (seen["boundaries"] is None) or not seen["ids_ambiguous"]


@needs_cases
@pytest.mark.parametrize(
    ("name", "written_by", "boundaries", "ambiguous"),
    [
        ("published__lmsys_Qwen3-235B-A22B-EAGLE3", "specforge", [2, 47, 91], False),
        ("specforge__deepseek-v3-671b-eagle3", "specforge", [2, 30, 58], False),
        ("published__nvidia_Llama-4-Maverick", "modelopt", [2, 24, 45], False),
        ("issue__speculators_qwen3-235b-size_4aux_layers", "speculators", [2, 46, 91, 93], False),
        ("published__RedHatAI_Qwen3-8B-speculator", "speculators", [2, 18, 33], False),
        ("published__nvidia_gpt-oss-120b-Eagle3-v3", "specforge", None, True),
        ("published__nvidia_gpt-oss-120b-Eagle3-short-context", "specforge", None, False),
        ("published__yuhuili_EAGLE3-LLaMA3.1-Instruct-8B", "eagle", None, False),
        ("angelslim__qwen3-8b-eagle3", "angelslim", None, False),
    ],
)
def test_formats_and_boundaries_of_published_drafts(name, written_by, boundaries, ambiguous):
    seen = inspect_path(case(name))
    assert (seen["format"], seen["boundaries"], seen["ids_ambiguous"]) == (written_by, boundaries, ambiguous)
    assert ("ids_ambiguous" in codes(seen)) == ambiguous


def test_specforge_norm_output_is_doubted_and_others_is_not(tmp_path):
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "draft_vocab_size": 32, "norm_output": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "feedback_norm" in codes(inspect_path(tmp_path), "warning")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"speculators_model_type": "eagle3"}))
    assert "feedback_norm" not in codes(inspect_path(tmp_path))


@needs_cases
def test_published_configs_have_the_faults_people_reported():
    assert "architecture_unknown" in codes(inspect_path(case("published__yuhuili_EAGLE3-LLaMA3.1")), "error")
    assert "ids_ignored" in codes(inspect_path(case("published__SyzygyResearch")))
    assert "config_key_missing" in codes(inspect_path(case("published__nvidia_Llama-3.3-70B")))
    assert "fc_skipped" not in codes(inspect_path(case("published__lmsys")))
    four = inspect_path(case("issue__speculators_qwen3-235b-size_4aux_layers"))
    assert {"config_key_wrong", "config_key_missing", "residual_norm", "sliding_window"} <= codes(four)
    assert four["dialects"]["sglang"]["captures"] is None


@needs_cases
@pytest.mark.parametrize(
    ("name", "errors", "taps"),
    [
        ("T-01", [], 3),
        ("T-02", [], 3),
        ("T-03", ["d2t", "fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"], None),
        ("T-04", [], None),
        ("T-05", ["layers.0.self_attn"], 3),
        ("T-06", [], None),
        ("T-07", ["embed_tokens.weight"], 3),
        ("T-08", [], 4),
    ],
)
def test_tensor_lists_are_judged_as_their_authors_found(name, errors, taps):
    seen = inspect_path(case(name))
    assert seen["kind"] == "tensors" and seen["layout"]["taps"] == taps
    assert sorted(f["where"].split(": ")[1] for f in seen["findings"] if f["severity"] == "error") == errors


def test_inspect_needs_neither_torch_nor_safetensors():
    code = (
        "import sys; from eyas.pipeline.inspect import inspect_path;"
        "print([name for name in ('torch', 'transformers', 'safetensors', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_target_shows_its_layers_and_default_taps(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576}))
    seen = inspect_path(tmp_path)
    assert (seen["kind"], seen["num_hidden_layers"], seen["boundaries"]) == ("target", 30, [2, 15, 27])
    path.write_text(json.dumps({"text_config": {"model_type": "qwen3", "num_hidden_layers": 4}}))
    assert inspect_path(path)["boundaries"] is None


def test_a_stage_folder_is_told_by_its_manifest(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 2**21)
    (tmp_path / "small.json").write_text("x")
    (tmp_path / "c.safetensors").write_bytes(b"torn")
    wrong = dict.fromkeys(("a.txt", "b.txt", "c.safetensors", "small.json"), "0" * 64)
    write_manifest(tmp_path, "captures", settings={"k": 1}, inputs={}, files=wrong, facts={"n": 2}, seconds=1.0)
    seen = inspect_path(tmp_path)
    assert (seen["kind"], seen["settings"], seen["facts"]) == ("captures", {"k": 1}, {"n": 2})
    assert [found["found"][:12] for found in seen["findings"]] == ["no such file", "4 bytes, too", "other bytes"]
    verified = inspect_path(tmp_path, verify=True)
    assert {found["found"][:12] for found in verified["findings"]} == {"other bytes", "no such file", "4 bytes, too"}
    assert len(verified["findings"]) == 4
    (tmp_path / "manifest.json").rename(tmp_path / "progress.json")
    with pytest.raises(InputError, match="not finished"):
        inspect_path(tmp_path)


def test_prompts_are_counted_and_broken_lines_named(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": []}\nnot json\n\n[1]\n{"prompt": "x"}\n')
    seen = inspect_path(path)
    assert (seen["kind"], seen["records"], seen["broken_lines"]) == ("prompts", 2, [2, 4])
    assert codes(seen) == {"data_corrupt"}


def test_a_run_tells_its_stages_what_they_found_and_what_is_missing(tmp_path: Path) -> None:
    make_prompts(tmp_path / "prompts", PromptsSettings(train=2, heldout=1))
    result_stage(tmp_path / "check", "check", settings={}, inputs={}, compute=lambda: {"verdict": "pass", "checks": []})
    seen = inspect_path(tmp_path)
    assert (seen["kind"], seen["check"], seen["draft"]) == ("run", {"verdict": "pass"}, None)
    assert [stage["name"] for stage in seen["stages"]] == ["prompts", "check"]
    assert seen["missing"] == ["responses", "captures", "draft", "evaluate", "export", "bench"]
    (tmp_path / "prompts" / "prompts.jsonl").write_text("{}")
    assert codes(inspect_path(tmp_path, verify=True)) == {"data_corrupt"}


def test_a_folder_of_steps_names_the_step_to_inspect(tmp_path: Path):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="sub-folders 4") as error:
        inspect_path(tmp_path)
    assert error.value.next == f"eyas inspect {tmp_path / '4'}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", ""),
        ("config.json", "[1, 2]"),
        ("config.json", "{}"),
        ("config.json", '{"tensors": {"a": "wide"}}'),
        ("config.json", '{"eyas": {"format": 9}}'),
        ("config.json", "[" * 100_000),
        ("model.safetensors", "short"),
        ("notes.txt", "hello"),
    ],
)
def test_what_cannot_be_read_is_an_input_error(tmp_path: Path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError):
        inspect_path(tmp_path / name)
    with pytest.raises(InputError):
        inspect_path(tmp_path / "gone")


SHAPES = st.none() | st.lists(st.integers(0, 6), max_size=3)
NAMES = [
    *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "embed_tokens.weight", "x.bias", "layers.weird"),
    *("midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "layers.0.self_attn.kv_b_proj.weight"),
]
HINTS = ["target_hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers", "eagle_config"]


@given(
    st.dictionaries(st.sampled_from(NAMES), SHAPES),
    st.dictionaries(st.sampled_from(HINTS), st.none() | st.integers(-1, 5) | st.text(max_size=2)),
)
@settings(max_examples=100)
def test_no_tensor_list_however_odd_ends_in_a_traceback(tmp_path_factory, tensors, hint):
    path = tmp_path_factory.mktemp("list") / "tensors.json"
    path.write_text(json.dumps({"tensors": tensors, "config_hint": hint}))
    assert codes(inspect_path(path)) <= CODES.keys()


def test_a_target_without_an_engine_to_hold_it_before_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="--engine beside --target"):
        inspect_path(tmp_path, target="nowhere")
