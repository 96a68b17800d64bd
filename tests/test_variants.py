"""Every draft variant through all of it: trained, evaluated, exported or refused, loaded back, served losslessly."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from eyas.data.shards import CaptureReader
from eyas.engine.generate import Engine
from eyas.errors import InputError
from eyas.export.folder import export_draft, refusals
from eyas.formats.draft_config import LatentShape
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.target import Target, load_target
from eyas.recipe import DraftSettings, EvaluateSettings, ExportSettings, TargetSettings, TrainSettings
from eyas.training.evaluate import evaluate
from eyas.training.initialise import draft_config, new_draft
from eyas.training.loop import train
from eyas.wiring.check import check
from eyas.wiring.loaders import loader_report
from eyas.wiring.parity import ttt_equals_incremental
from eyas.wiring.served import walk_against_engine
from made_captures import BOUNDARIES, made, make_samples, write_captures
from tiny import HIDDEN, LAYERS, tiny_tokenizer

SETTINGS = TrainSettings(
    epochs=2, batch_tokens=64, ttt_length=3, learning_rate=3e-3, precision="float32", initialise="target"
)
"""From least squares these 300 tokens would be known by heart before the first step, and no loss would fall."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 16.0, "original_max_position_embeddings": 64},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
LATENT = LatentShape(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


def save_latent_target(folder: Path) -> Path:
    """A dense DeepSeek-V3: latent attention of uneven widths, YaRN; no experts (whose row counts no bucket fixes)."""
    config = DeepseekV3Config(
        **LATENT.model_dump(),
        vocab_size=259,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=LAYERS,
        num_mtp_layers=0,
        max_position_embeddings=1024,
        rope_parameters=YARN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).to(torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.1)
        else:
            wide = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 0.8) / parameter.shape[1] ** 0.5
            parameter.normal_(0.0, wide)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ground:
    """A target's folder and captures of it."""

    folder: Path
    captures: Path
    target: Target


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Ground]:
    root = tmp_path_factory.mktemp("variants")
    folders = {"llama": tiny_target, "deepseek_v3": save_latent_target(root / "latent")}
    return {kind: Ground(folder, *made(root / kind, folder)) for kind, folder in folders.items()}


SERVED = {"sglang", "vllm"}
VARIANTS = [
    ("llama", {"norm_output": True}, set()),  # fc_norm is on by default: EAGLE-3.1
    ("llama", {"fc_norm": False, "norm_before_fc": True}, set()),
    ("llama", {"block": "qwen3", "norm_before_residual": True}, {"sglang"}),
    ("llama", {"num_hidden_layers": 3}, set()),
    ("llama", {"sliding_window": 6}, {"sglang"}),
    ("llama", {"block": "qwen3", "num_hidden_layers": 2, "sliding_window": 6, "norm_output": True}, {"sglang"}),
    ("llama", {"block": "mla", "v_head_dim": 12, "qk_nope_head_dim": 20, "kv_lora_rank": 24}, set()),
    ("deepseek_v3", {"block": "mla", "norm_output": True}, set()),
    ("deepseek_v3", {"block": "mla", "num_hidden_layers": 2, "norm_before_residual": True}, {"sglang"}),
    ("deepseek_v3", {"block": "mla", "sliding_window": 6}, SERVED),
    ("deepseek_v3", {"block": "mla", "fc_norm": False, "norm_before_fc": True}, SERVED),
    ("deepseek_v3", {"block": "llama"}, set()),
    ("llama", {"vocab_size": 259}, set()),  # the whole vocabulary: no tables
    ("llama", {"method": "peagle"}, {"sglang"}),
    ("llama", {"method": "peagle", "block": "qwen3", "num_hidden_layers": 2}, {"sglang"}),
    ("llama", {"method": "peagle", "sliding_window": 6, "vocab_size": 259}, {"sglang"}),
    ("deepseek_v3", {"method": "peagle", "block": "mla"}, SERVED),
]


@pytest.mark.parametrize(
    ("kind", "shape", "refused"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(sorted(v)) or "none"
)
def test_a_variant_is_trained_evaluated_exported_and_served_losslessly(
    grounds: dict[str, Ground], tmp_path: Path, kind: str, shape: dict[str, object], refused: set[str]
) -> None:
    ground = grounds[kind]
    named = TargetSettings(name=str(ground.folder))
    settings = DraftSettings.model_validate({"vocab_size": 200} | shape)
    train(ground.captures, tmp_path / "draft", SETTINGS, settings, named)
    lines = [json.loads(line) for line in (tmp_path / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 5 and lines[-1]["loss"] < lines[0]["loss"]

    found = evaluate(tmp_path / "draft", ground.captures, EvaluateSettings(steps=3), named, "heldout")
    assert found["walk_exact"] and 1 <= found["accept_length_walk"] <= 4

    draft, info = load_draft(tmp_path / "draft", ground.target.embedding)
    sample = CaptureReader(ground.captures).read(0)
    assert ttt_equals_incremental(draft, sample.taps_TA.float(), sample.ids_T) < 1e-5

    for engine in sorted(SERVED):
        _exported_or_refused(tmp_path, engine, refused, info.target.model_type)
    able = tuple(sorted(SERVED - refused))
    if able:
        export_draft(tmp_path / "draft", tmp_path / "out", ExportSettings(engines=able))
        back, exported = load_draft(tmp_path / "out")
        assert exported == info
        assert all(torch.equal(tensor, draft_tensors(draft)[name]) for name, tensor in draft_tensors(back).items())

    with torch.inference_mode():
        engine = Engine(ground.target, draft, num_steps=3, kernels="torch", announce=False)
        for prompt in ([5, 80, 9], [1, 30, 31, 200, 7, 7, 90, 12, 64]):
            plain, fast = (engine.generate(prompt, 24, steps, ignore_eos=True) for steps in (0, 3))
            assert fast.ids == plain.ids
        engine.close()

    served = walk_against_engine(
        ground.target, draft, CaptureReader(ground.captures), num_steps=3, tokens=80, length=20
    )
    assert served is not None and served.engine == served.walk and served.texts_equal == served.samples


def _exported_or_refused(folder: Path, engine: str, refused: set[str], model_type: str) -> None:
    """One engine at a time: an export that its loader reads right, or exit status 2 and nothing written."""
    out = folder / engine
    if engine in refused:
        with pytest.raises(InputError) as error:
            export_draft(folder / "draft", out, ExportSettings(engines=(engine,)))
        assert error.value.exit_code == 2 and not out.exists()
        return
    export_draft(folder / "draft", out, ExportSettings(engines=(engine,)))
    report = loader_report(out, engine)
    assert (report.verdict, report.boundaries) == ("pass", BOUNDARIES), report.problems
    assert report.fates is not None and report.fates.missing == report.fates.dropped == report.fates.refused == []


def test_every_check_of_a_latent_draft_runs_and_none_fails(grounds: dict[str, Ground], tmp_path: Path) -> None:
    ground = grounds["deepseek_v3"]
    shape = DraftSettings(block="mla", vocab_size=200)
    longer = SETTINGS.model_copy(update={"epochs": 40.0})  # hypotheses tell wirings of a draft that has learned one
    train(ground.captures, tmp_path / "draft", longer, shape, TargetSettings(name=str(ground.folder)))
    export_draft(tmp_path / "draft", tmp_path / "out", ExportSettings())
    report = check(
        str(ground.folder), captures=ground.captures, draft=tmp_path / "draft", export=tmp_path / "out",
        engines=("sglang@0.5.23", "vllm@0.33"),
    )  # fmt: skip
    statuses = {one["name"]: one["status"] for one in report["checks"]}
    assert "fail" not in statuses.values(), report["findings"]
    assert statuses["TTT parity"] == statuses["export"] == statuses["acceptance"] == "pass"


def test_a_latent_drafts_widths_are_the_targets_or_deepseeks_cut_to_a_small_target(grounds: dict[str, Ground]) -> None:
    mla = DraftSettings(block="mla")
    own = draft_config(grounds["deepseek_v3"].target, BOUNDARIES, mla)
    assert own.latent == LATENT and (own.num_key_value_heads, own.head_dim) == (4, 8)
    assert own.rope_theta == 50_000.0 and own.rope_scaling == {k: v for k, v in YARN.items() if k != "rope_theta"}
    small = draft_config(grounds["llama"].target, BOUNDARIES, mla)
    assert small.latent is not None
    assert list(small.latent.model_dump().values()) == [64, 32, 16, 16, 16]
    given = draft_config(grounds["llama"].target, BOUNDARIES, DraftSettings(block="mla", kv_lora_rank=8))
    assert given.latent is not None and given.latent.kv_lora_rank == 8
    grouped = draft_config(grounds["deepseek_v3"].target, BOUNDARIES, DraftSettings())
    assert grouped.latent is None and (grouped.num_key_value_heads, grouped.head_dim) == (4, 12)


def test_widths_without_the_block_and_odd_rotated_widths_are_refused(grounds: dict[str, Ground]) -> None:
    target = grounds["llama"].target
    with pytest.raises(InputError, match="kv_lora_rank"):
        draft_config(target, BOUNDARIES, DraftSettings(kv_lora_rank=8))
    with pytest.raises(InputError, match="qk_rope_head_dim"):
        draft_config(target, BOUNDARIES, DraftSettings(block="mla", qk_rope_head_dim=7))


def test_a_new_latent_draft_looks_at_its_own_next_token(grounds: dict[str, Ground]) -> None:
    target, seen = grounds["deepseek_v3"].target, []
    config = draft_config(target, BOUNDARIES, DraftSettings(block="mla", vocab_size=200))
    draft = new_draft(target, config, torch.arange(259), "target", seed=0)

    def attend(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query[0] @ key[0].transpose(-1, -2) / query.shape[-1] ** 0.5
        others = scores.masked_select(~torch.eye(40, dtype=torch.bool))
        seen.append((float(scores.diagonal(dim1=-2, dim2=-1).mean()), float(others.mean())))
        return value

    with torch.no_grad():
        embeds = draft.embed_tokens(torch.randperm(259)[None, :40])
        draft.layers[0](embeds, torch.randn(1, 40, HIDDEN), draft.rope(torch.arange(40)[None]), attend)
    own, others = seen[0]
    assert 3 < own < 5 and abs(others) < 0.5


def test_gradients_reach_every_latent_weight(grounds: dict[str, Ground]) -> None:
    target = grounds["deepseek_v3"].target
    config = draft_config(target, BOUNDARIES, DraftSettings(block="mla", num_hidden_layers=2))
    draft = new_draft(target, config, torch.arange(259), "target", seed=0)

    def attend(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    state = draft.fuse(torch.randn(1, 7, config.taps_width))
    hidden = draft(torch.randint(0, 259, (1, 7)), state, draft.rope(torch.arange(7)[None]), attend)
    draft.logits(hidden).logsumexp(-1).sum().backward()
    without = [n for n, p in draft.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert without == []


def test_what_no_engine_rotates_is_known_before_training(grounds: dict[str, Ground]) -> None:
    config = draft_config(grounds["deepseek_v3"].target, BOUNDARIES, DraftSettings(block="mla"))
    for scaling, words in [
        ({"rope_type": "llama3", "factor": 8.0}, "llama3"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}, "mscale"),
    ]:
        reasons = refusals(config.model_copy(update={"rope_scaling": scaling}), ["sglang", "vllm"])
        assert len(reasons) == 2 and all(words in reason for reason in reasons)
    for scaling in (None, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}):
        assert refusals(config.model_copy(update={"rope_scaling": scaling}), ["sglang", "vllm"]) == []


def test_where_the_engine_writes_another_text_its_own_is_walked(tmp_path: Path, tiny_target: Path) -> None:
    """Answers that are not the target's own, as those decoded in a lower precision may not be: nothing is mis-wired."""
    target = load_target(str(tiny_target))
    samples = make_samples(target, train=0, heldout=4)
    for sample in samples:
        answer = sample.loss_mask_T.bool()
        sample.ids_T[answer] = (sample.ids_T[answer] + 7) % 250 + 3
    reader = CaptureReader(write_captures(tmp_path / "captures", target, samples))
    config = draft_config(target, BOUNDARIES, DraftSettings(vocab_size=259))
    draft = new_draft(target, config, torch.arange(259), "target", 0)
    served = walk_against_engine(target, draft, reader, num_steps=3, tokens=80, length=20)
    assert served is not None and served.texts_equal == 0 and served.engine == served.walk > 1
