"""Run by the peers' own interpreter, not ours: `python peer_worker.py FOLDER` puts each NAME.json, NAME.safetensors of
FOLDER through speculators 0.9.0 and specforge 0.2.0 and writes NAME.PEER.ATTENTION.safetensors.

Both do everything themselves, from the raw ids, states and mask: their collation and shifts, their draft classes, their
loops over TTT steps, their losses. Read off by a hook on `lm_head`, and brought back to one row a token and document:
`logits.DOCUMENT.STEP` [L, D] and `trained.DOCUMENT.STEP` [L] (the loss reaches that row's logits); `loss.STEP`, `loss`
and `grad.NAME` as they are. What is not theirs: Triton kernels do not run on a CPU, so each peer's own reference loss
stands in for its fused one, and speculators' frozen head is made trainable. The caller sets TORCHDYNAMO_DISABLE=1.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import specforge.algorithms.eagle3.model as specforge_eagle3
import speculators.models.peagle.core as speculators_peagle
import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.train.data import CollateFn
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

Facts = dict[str, Any]
Tensors = dict[str, Tensor]

LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias",
)  # fmt: skip


def layer_keys(config: Facts) -> Facts:
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    return {key: config[key] for key in LAYER_KEYS} | {"rope_parameters": rope, "pad_token_id": None}


def load(model: nn.Module, weights: Tensors, may_miss: str) -> None:
    """Every weight must find its place; what the model has beyond them must match `may_miss`, and is set to zero."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    odd = [name for name in missing if not re.fullmatch(may_miss, name)]
    assert not odd and not unexpected, f"missing {odd}, unexpected {unexpected}"
    for name in missing:
        model.get_parameter(name).data.zero_()


def record_logits(head: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        if logits.requires_grad:
            logits.retain_grad()
        seen.append(logits)

    head.register_forward_hook(hook)
    return seen


# speculators --------------------------------------------------------------------------------------------------------


def speculators_untrained(config: Facts, attention: str) -> Eagle3DraftModel:
    """As their class initialises it; head, embedding and what belongs to the target are still to be set."""
    layer = (Qwen3Config if config["block"] == "qwen3" else LlamaConfig)(**layer_keys(config))
    if config["sliding_window"] is not None:
        layer.sliding_window = config["sliding_window"]
        layer.layer_types = ["sliding_attention"] * config["num_hidden_layers"]
    layer._attn_implementation = attention
    peagle = config["method"] == "peagle"
    model_class, config_class = (
        (PEagleDraftModel, PEagleSpeculatorConfig) if peagle else (Eagle3DraftModel, Eagle3SpeculatorConfig)
    )
    return model_class(
        config_class(
            transformer_layer_config=layer,
            draft_vocab_size=config["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=config["boundaries"],
            **({"mask_token_id": config["mask_token_id"]} if peagle else {}),
            **{key: config[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        )
    )


def speculators_model(config: Facts, tensors: Tensors, attention: str) -> Eagle3DraftModel:
    model = speculators_untrained(config, attention)
    weights = {name.removeprefix("draft."): one for name, one in tensors.items() if name.startswith("draft.")}
    if not model.use_draft_vocab:
        del weights["d2t"], weights["t2d"]
    weights["verifier_norm.weight"] = tensors["target.norm"]
    weights["verifier_lm_head.weight"] = tensors["target.head"][tensors["ids_D"]]
    load(model, weights, may_miss=r"layers\.\d+\.self_attn\.o_proj\.bias")
    model.lm_head.weight.requires_grad_(True)
    return model


def speculators_batch(facts: Facts, tensors: Tensors, multiple: int = 128) -> Facts:
    """Through their own collation, padded to a multiple of so many rows (flex attention needs 128)."""
    samples = []
    for number in range(facts["documents"]):
        ids = tensors[f"{number}.ids"]
        samples.append(
            {
                "input_ids": ids,
                "hidden_states": tensors[f"{number}.taps"],
                "verifier_last_hidden_states": tensors[f"{number}.last_hidden"],
                "loss_mask": tensors[f"{number}.mask.speculators"].bool(),
                "lengths": torch.tensor([len(ids)]),
                "position_ids": torch.arange(len(ids)),
            }
        )
    total = sum(len(sample["input_ids"]) for sample in samples)
    config = facts["config"]
    collate = CollateFn(
        -(-total // multiple) * multiple,
        config["hidden_size"],
        num_target_layers=len(config["boundaries"]),
        dtype=torch.float32,
        preprocess=shift_batch,
    )
    batch = collate(samples)
    del batch["error_records"]
    return batch


def run_speculators(facts: Facts, tensors: Tensors, attention: str) -> Tensors:
    if facts["config"]["method"] == "peagle":
        return run_speculators_peagle(facts, tensors, attention)
    model = speculators_model(facts["config"], tensors, attention)
    logits = record_logits(model.lm_head)
    flex = attention == "simple_flex_attention"
    with torch.set_grad_enabled(not flex):
        _, loss, metrics = model(
            **speculators_batch(facts, tensors),
            ttt_steps=facts["steps"],
            ttt_step_loss_decay=facts["decay"],
            loss_config=resolve_loss_config("kl_div", implementation="eager"),
        )
    if not flex:
        loss.backward()
    out = {"loss": loss} | {f"loss.{step}": metrics[f"loss_{step}_sum"] for step in range(facts["steps"])}
    out |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    start = 0
    for number in range(facts["documents"]):
        rows = slice(start, start + len(tensors[f"{number}.ids"]) - 1)
        start = rows.stop
        for step, one in enumerate(logits):
            out |= of_document(number, step, one, (0, rows))
    return out


def run_speculators_peagle(facts: Facts, tensors: Tensors, attention: str) -> Tensors:
    """Logits of the rows that their sampling keeps, at a ratio of 1 all but one or two a depth; the others are NaN."""
    model, seen = speculators_model(facts["config"], tensors, attention), []
    logits, sample = record_logits(model.lm_head), speculators_peagle.generate_cod_sample_indices

    def noted(**arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append(sample(**arguments))
        return seen[-1]

    speculators_peagle.generate_cod_sample_indices = noted
    batch, ratios = speculators_batch(facts, tensors), {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    with torch.no_grad():
        loss_config = resolve_loss_config("kl_div", implementation="eager")
        model(**batch, num_depths=facts["steps"], loss_config=loss_config, **ratios)
    (anchors, depths), out, start = seen[0], {}, 0
    for number in range(facts["documents"]):
        length = len(tensors[f"{number}.ids"]) - 1
        for depth in range(facts["steps"]):
            kept = (depths == depth) & (anchors >= start) & (anchors < start + length)
            rows = torch.full((length, logits[0].shape[-1]), torch.nan)
            rows[anchors[kept] - start] = logits[0][0, kept]
            out[f"logits.{number}.{depth}"] = rows
        start += length
    return out


# specforge ----------------------------------------------------------------------------------------------------------


class ReferenceLoss:
    """In place of LogSoftmaxLoss, a Triton kernel: what its authors hold it against."""

    apply = staticmethod(_compute_loss)


def specforge_strategy(
    config: Facts, tensors: Tensors, steps: int, decay: float, attention: str
) -> Eagle3TrainStrategy:
    draft_config = LlamaConfig(
        **layer_keys(config),
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config["target_hidden_size"],
        fc_norm=config["fc_norm"],
    )
    draft = LlamaForCausalLMEagle3(draft_config, attention_backend=attention)
    weights = {
        name.removeprefix("draft.").replace("layers.0.", "midlayer."): one
        for name, one in tensors.items()
        if name.startswith("draft.")
    }
    load(draft, weights, may_miss="")
    draft.freeze_embedding()
    with tempfile.TemporaryDirectory() as folder:
        keys = {"hidden_size": config["target_hidden_size"], "vocab_size": config["vocab_size"]}
        LlamaConfig(**keys, num_attention_heads=1).save_pretrained(folder)
        head = TargetHead(folder)
    head.fc.weight.data.copy_(tensors["target.head"])
    head.freeze_weights()
    specforge_eagle3.LogSoftmaxLoss = ReferenceLoss
    model = specforge_eagle3.OnlineEagle3Model(draft, length=steps, attention_backend=attention)
    return Eagle3TrainStrategy(model, target_head=head, ploss_decay=decay)


def specforge_batch(facts: Facts, tensors: Tensors) -> TrainBatch:
    """Through their own normalisation and collation. They store the last hidden state after the final norm."""
    samples = []
    for number in range(facts["documents"]):
        states = tensors[f"{number}.last_hidden"]
        scale = torch.rsqrt((states * states).mean(-1, keepdim=True) + facts["config"]["rms_norm_eps"])
        raw = {
            "input_ids": tensors[f"{number}.ids"],
            "aux_hidden_state": tensors[f"{number}.taps"][None],
            "hidden_state": (states * scale * tensors["target.norm"])[None],
            "loss_mask": tensors[f"{number}.mask.specforge"],
        }
        samples.append(normalize_offline_sample(raw, max_len=len(states)))
    batch = build_offline_collator()(samples)
    return TrainBatch(["case"], "eagle3", batch, {"target_repr": "hidden_state"})


def run_specforge(facts: Facts, tensors: Tensors, attention: str) -> Tensors:
    strategy = specforge_strategy(facts["config"], tensors, facts["steps"], facts["decay"], attention)
    draft = strategy.eagle3_model.draft_model
    logits = record_logits(draft.lm_head)
    flex = attention == "flex_attention"
    with torch.set_grad_enabled(not flex):
        output = strategy.forward_loss(specforge_batch(facts, tensors))
    if not flex:
        output.loss.backward()
    out = {"loss": output.loss} | {f"loss.{step}": loss for step, loss in enumerate(output.metrics["plosses"])}
    grads = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    out |= {f"grad.{name.replace('midlayer.', 'layers.0.')}": grad for name, grad in grads.items()}
    for number in range(facts["documents"]):
        rows = slice(0, len(tensors[f"{number}.ids"]))
        for step, one in enumerate(logits):
            out |= of_document(number, step, one, (number, rows))
    return out


def of_document(number: int, step: int, logits: Tensor, where: tuple[int, slice]) -> Tensors:
    out = {f"logits.{number}.{step}": logits[where]}
    if logits.grad is not None:
        out[f"trained.{number}.{step}"] = logits.grad[where].abs().sum(-1) > 0
    return out


PEERS = {"speculators": run_speculators, "specforge": run_specforge}


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        facts, tensors = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
        for run in facts["runs"]:
            peer, attention = run.split("/")
            out = PEERS[peer](facts, tensors, attention)
            name = f"{path.stem}.{peer}.{attention}.safetensors"
            save_file({key: tensor.detach().clone().contiguous() for key, tensor in out.items()}, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
