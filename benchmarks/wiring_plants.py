"""What the wiring table plants in captures, drafts and dumps: faults that numbers must name, and right wirings.

Each fault meets each architecture, in another precision of the states every time.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from eyas.data.shards import Sample
from eyas.export.folder import exported_tensors
from eyas.models.checkpoint import load_draft
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target
from eyas.models.vocab import target_ids
from eyas.progress import say
from eyas.run import cache_folder
from eyas.wiring.check import CHECKS, attempt, open_captures
from eyas.wiring.findings import Finding
from eyas.wiring.given import Given
from eyas.wiring.hypotheses.wirings import DECLARED, Wiring
from eyas.wiring.trace_draft import trace_checks
from wiring_lab import (
    RIGHT,
    Document,
    documents,
    draft_config,
    rewrite_shard,
    samples_of,
    save_taught_target,
    stored,
    taught_draft,
    write_draft,
    write_lab_captures,
)

LAB = 2
"""Of the recipe below: another number makes everything anew."""
BOUNDARIES = (2, 4, 5)
LAST = 8
PRECISIONS = ("float32", "bfloat16", "float16", "fp8", "int8")
"""Of the states; `int8`: the target's weights, one scale a row, its states in bfloat16."""
RUN = ("captures", "origin", "tap identity", "teacher", "TTT parity", "vocabulary", "hypotheses", "export")
SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAST,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, query_pre_attn_scalar=16, final_logit_softcapping=30.0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=2.0, attention_multiplier=0.25, residual_multiplier=0.8),
}


@dataclass(frozen=True)
class Variant:
    """How a draft is trained: fields of its config, the wiring of its rows, and how much."""

    options: dict[str, Any] = field(default_factory=dict)
    wiring: Wiring = RIGHT
    steps: int = 250
    texts: int = 800
    only: tuple[str, ...] = tuple(ARCHITECTURES)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(),
    "eagle31": Variant({"fc_norm": True, "norm_output": True}),
    "residual": Variant({"norm_before_residual": True}),
    "whole": Variant({"norm_before_fc": True}),
    "own": Variant({"own_embedding": True}),
    "weak": Variant({"fc_norm": True}, steps=12, texts=3),
    "pace": Variant(wiring=Wiring(DECLARED, pace=0), only=("llama",)),
    "labels": Variant(wiring=Wiring(DECLARED, hidden=-1, token=-1)),
}
RIGHT_VARIANTS = ("plain", "eagle31", "residual", "whole", "own", "weak")


@dataclass(frozen=True, eq=False)
class Lab:
    """One architecture: its target, its drafts, and texts neither was trained on."""

    architecture: str
    target: Target
    drafts: dict[str, Draft]
    held: dict[str, list[Document]]
    """By the weights that computed the states: `float`, `int8`, `int3`."""


def make_lab(name: str) -> Lab:
    """Target and drafts, made or read back."""
    folder = cache_folder() / "wiring" / f"{LAB}-{name}"
    if not (folder / "target" / "config.json").is_file():
        say(f"wiring: teaching a {name} target")
        save_taught_target(folder / "target", ARCHITECTURES[name], steps=400, uneven=True)
    target = load_target(str(folder / "target"))
    learned: list[Document] = []
    drafts = {}
    for variant, how in VARIANTS.items():
        if name not in how.only:
            continue
        place = folder / variant
        if not (place / "config.json").is_file():
            say(f"wiring: teaching a {variant} draft of {name}")
            learned = learned or documents(target, 800, seed=1)
            config = draft_config(target, BOUNDARIES, **how.options)
            draft = taught_draft(target, learned[: how.texts], config, how.wiring, how.steps)
            write_draft(place, draft, target)
        drafts[variant] = load_draft(place, target.embedding)[0]
    held = {"float": documents(target, 24, seed=2)}
    for bits in (8, 3):
        held[f"int{bits}"] = documents(rounded(folder / "target", bits), 24, seed=2)
    return Lab(name, target, drafts, held)


def rounded(folder: Path, bits: int) -> Target:
    """The target with every projection rounded to `bits` bits, one scale a row."""
    target = load_target(str(folder))
    steps = 2 ** (bits - 1) - 1
    for name, parameter in target.model.named_parameters():
        if "proj" in name:
            scale = parameter.abs().amax(dim=1, keepdim=True) / steps
            parameter.data = (parameter / scale).round() * scale
    return target


@dataclass(frozen=True)
class Case:
    """A draft folder and captures: what is wrong with them, if anything."""

    name: str
    expected: str | None
    variant: str | None = "plain"
    """Which draft; None: captures alone."""
    declared: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that say something else than was trained."""
    tensors: Callable[[Lab], dict[str, Tensor]] | None = None
    boundaries: tuple[int, ...] = BOUNDARIES
    """What the captured blocks are."""
    says: tuple[int, ...] = BOUNDARIES
    """What captures and draft say they are."""
    hidden: int = 0
    token: int = 0
    change: Callable[[Lab, Sample], Sample] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the captures' manifest says beside the truth."""
    damage: Callable[[Path], None] | None = None
    """Done to the captures folder once it is written."""
    weights: str | None = None
    """Which of the lab's `held`; None: by the precision."""
    dump: Callable[[Lab, Document, str, Path], None] | None = None
    """Writes what an engine dumped, given as --trace."""
    exported: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """What the export's tensors became."""
    only: tuple[str, ...] = tuple(ARCHITECTURES)


# Faults in rows -----------------------------------------------------------------------------------------------------


def normed_last_tap(lab: Lab, sample: Sample) -> Sample:
    """The last block through the final norm: what Hugging Face calls hidden_states[n]."""
    width = lab.target.hidden_size
    normed = lab.target.final_norm(sample.taps_TA[:, -width:])
    return replace(sample, taps_TA=torch.cat([sample.taps_TA[:, :-width], normed], dim=-1).detach())


def normed_teacher(lab: Lab, sample: Sample) -> Sample:
    return replace(sample, last_hidden_TH=lab.target.final_norm(sample.last_hidden_TH).detach())


def embedding_rows(lab: Lab) -> dict[str, Tensor]:
    return {"lm_head.weight": lab.target.embedding[target_ids(lab.drafts["plain"].d2t)].contiguous()}


def other_embedding(lab: Lab) -> dict[str, Tensor]:
    noise = torch.randn(lab.target.embedding.shape, generator=torch.Generator().manual_seed(0))
    return {"embed_tokens.weight": noise * lab.target.embedding.std()}


def table(make: Callable[[Tensor], Tensor]) -> Callable[[Lab], dict[str, Tensor]]:
    return lambda lab: {"d2t": make(lab.drafts["plain"].d2t)}


def masks(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda folder: rewrite_shard(folder, lambda held: held | {"loss_mask": change(held["loss_mask"])})


def first_blank(mask_T: Tensor) -> Tensor:
    """The first sample's answer unmarked: its 64 tokens lie first."""
    return torch.cat([torch.zeros_like(mask_T[:64]), mask_T[64:]])


def flipped(folder: Path) -> None:
    """One byte of the states, in the middle of the file."""
    path = folder / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def cut(folder: Path) -> None:
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_shard(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()


def without_last_rows(folder: Path) -> None:
    rewrite_shard(folder, lambda held: {name: tensor[:-64] for name, tensor in held.items()})


def other_weights(folder: Path) -> None:
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    raw["facts"]["target"]["weights_hash"] = "0" * 64
    path.write_text(json.dumps(raw))


# Dumps --------------------------------------------------------------------------------------------------------------


def connector(boundaries: tuple[int, ...], shift: int = 0) -> Callable[[Lab, Document, str, Path], None]:
    """vLLM's hidden-state file of one text, as its connector writes it."""

    def write(lab: Lab, text: Document, precision: str, path: Path) -> None:
        states = torch.stack([text.states[boundary].roll(-shift, dims=0) for boundary in boundaries], dim=1)
        made: dict[str, Tensor] = {"token_ids": text.ids_T}
        if precision == "fp8":
            scale = (states.abs().amax(dim=-1) / 448).clamp_min(1e-12)
            made["hidden_states"] = (states / scale[..., None]).to(torch.float8_e4m3fn)
            made["hidden_states_scale"] = scale
        else:
            made["hidden_states"] = stored(states, "bfloat16" if precision == "int8" else precision)
        save_file({name: tensor.contiguous() for name, tensor in made.items()}, path)

    return write


def normed_connector(lab: Lab, text: Document, precision: str, path: Path) -> None:
    """The last tap after the final norm, by an engine that captured Hugging Face's hidden_states[n]."""
    normed = lab.target.final_norm(text.states[LAST]).detach()
    other = Document(text.ids_T, (*text.states[:LAST], normed))
    connector((2, 4, LAST))(lab, other, precision, path)


def faults() -> list[Case]:
    """What is planted in every architecture."""
    slipped, down, others, last = (0, 2, 4), (1, 3, 4), (4, 6, 7), (2, 5, LAST)
    far = {"rope_type": "linear", "factor": 8.0}
    return [
        Case("embedding slipped in: [0, t0, t1]", "tap_embedding", boundaries=slipped, says=slipped),
        Case("all taps one down", "tap_offset", boundaries=down, says=down),
        Case("the default taps lost", "tap_offset", boundaries=others, says=others),
        Case("captured one tap one layer off", "tap_offset", boundaries=(2, 3, 5)),
        Case("captured all taps one down", "tap_offset", boundaries=down),
        Case("captured the embedding for the first tap", "tap_embedding", boundaries=(0, 4, 5)),
        Case("captured the last tap after the final norm", "tap_post_norm", None, boundaries=last, says=last,
             change=normed_last_tap),
        Case("captured all taps later", "tap_offset", boundaries=others),
        Case("captured in descending order", "tap_order", boundaries=(5, 4, 2)),
        Case("captured with two taps swapped", "tap_order", boundaries=(2, 5, 4)),
        Case("states one row late", "token_shift", hidden=-1),
        Case("states one row early", "token_shift", hidden=1),
        Case("states two rows late", "token_shift", None, hidden=-2),
        Case("ids one row early", "token_shift", token=1),
        Case("ids one row late", "token_shift", token=-1),
        Case("labels shifted twice in training", "token_shift", "labels"),
        Case("teacher stored normed, declared un-normed", "teacher_double_normed", change=normed_teacher),
        Case("teacher stored un-normed, declared normed", "teacher_not_normed", facts={"last_hidden_norm": "after"}),
        Case("states two rows early", "token_shift", None, hidden=2),
        Case("residual declared after the norm", "residual_norm", declared={"norm_before_residual": True}),
        Case("residual declared before the norm", "residual_norm", "residual", {"norm_before_residual": False}),
        Case("feedback declared after the norm", "feedback_norm", declared={"norm_output": True}),
        Case("feedback declared before the norm", "feedback_norm", "eagle31", {"norm_output": False}),
        Case("norms before fc undeclared", "fc_norm", "eagle31", {"fc_norm": False}),
        Case("norm over all taps undeclared", "fc_norm", "whole", {"norm_before_fc": False}),
        Case("rope base lost", "rope_theta", declared={"rope_theta": 1_000_000.0}),
        Case("rope scaling added", "rope_scaling", declared={"rope_scaling": far}),
        Case("later steps trained at the row's own position", "position_shift", "pace", only=("llama",)),
        Case("d2t all zero", "d2t_missing", tensors=table(torch.zeros_like)),
        Case("d2t holds target ids", "d2t_absolute", tensors=table(target_ids)),
        Case("d2t beyond the vocabulary", "d2t_out_of_range", tensors=table(lambda d2t: d2t + 200)),
        Case("head replaced by the embedding", "head_mismatch", tensors=embedding_rows),
        Case("an embedding of its own, of another model", "embed_mismatch", "plain", {"own_embedding": True},
             other_embedding),
        Case("captured under int3 weights", "quantization_mismatch", weights="int3"),
        Case("mask one token late", "mask_shift", None, damage=masks(lambda mask: mask.roll(1))),
        Case("mask one token early", "mask_shift", None, damage=masks(lambda mask: mask.roll(-1))),
        Case("an answer without a mark", "mask_empty", None, damage=masks(first_blank)),
        Case("a byte of the states flipped", "data_corrupt", None, damage=flipped),
        Case("the shard cut", "data_corrupt", None, damage=cut),
        Case("the shard gone", "capture_incomplete", None, damage=without_shard),
        Case("the last sample's rows gone", "capture_incomplete", None, damage=without_last_rows),
        Case("captured from other weights", "target_revision", None, damage=other_weights),
        Case("captured with another tokenizer", "tokenizer_mismatch", None, facts={"tokenizer_hash": "0" * 64}),
        Case("captured with another chat template", "template_mismatch", None, facts={"template_hash": "0" * 64}),
        Case("a tensor of the export changed", "parity_mismatch",
             exported=lambda held: held | {"norm.weight": held["norm.weight"] * 1.01}),
        Case("the engine captured two states for three", "tap_missing", None, dump=connector((2, 4))),
        Case("the engine captured one layer later", "tap_offset", None, dump=connector((3, 5, 6))),
        Case("the engine captured the embedding", "tap_embedding", None, dump=connector((0, 2, 4))),
        Case("the engine's states one row late", "token_shift", None, dump=connector(BOUNDARIES, -1)),
        Case("the engine's last tap after the final norm", "tap_post_norm", None, boundaries=(2, 4, LAST),
             says=(2, 4, LAST), dump=normed_connector),
    ]  # fmt: skip


def rights() -> list[Case]:
    """Wirings that must raise nothing."""
    return [
        *(Case(f"{variant} draft", None, variant) for variant in RIGHT_VARIANTS),
        Case("captures alone, the last state among them", None, None, boundaries=(2, 5, LAST), says=(2, 5, LAST)),
        Case("teacher stored normed and declared so", None, change=normed_teacher, facts={"last_hidden_norm": "after"}),
        Case("a draft, its export and an engine's dump", None, dump=connector(BOUNDARIES), exported=dict),
    ]


def run(lab: Lab, case: Case, precision: str, folder: Path) -> list[str]:
    """Codes of every error and warning found, each once."""
    weights = case.weights or ("int8" if precision == "int8" else "float")
    kept = "bfloat16" if precision == "int8" else precision
    samples = samples_of(lab.held[weights], case.boundaries, kept, case.hidden, case.token)
    if case.change is not None:
        samples = [case.change(lab, sample) for sample in samples]
    captures = write_lab_captures(folder / "captures", lab.target, samples, case.says, kept, **case.facts)
    if case.damage is not None:
        case.damage(captures)
    draft = None if case.variant is None else planted_draft(lab, case, folder / "draft")
    export = None if case.exported is None or draft is None else planted_export(lab, case, draft, folder / "export")
    reader, damage = open_captures(captures)
    given = Given(lab.target, lab.target, reader, draft, export)
    checks = damage + [attempt(name, CHECKS[name], given) for name in RUN]
    if case.dump is not None:
        case.dump(lab, lab.held[weights][0], precision, folder / "dump.safetensors")
        checks += trace_checks([folder / "dump.safetensors"], lab.target, reader, given.draft_or_none(), draft)
    return codes(one for check in checks for one in check.findings)


def codes(findings: Iterator[Finding]) -> list[str]:
    return list(dict.fromkeys(one.code for one in findings if one.severity != "info"))


def planted_draft(lab: Lab, case: Case, place: Path) -> Path:
    declared = dict(case.declared)
    if case.says != BOUNDARIES:
        declared["boundaries"] = case.says
    assert case.variant is not None, "captures alone have no draft"
    draft = write_draft(place, lab.drafts[case.variant], lab.target, **declared)
    if case.tensors is not None:
        weights = draft / "model.safetensors"
        save_file(load_file(weights) | case.tensors(lab), weights)
    return draft


def planted_export(lab: Lab, case: Case, draft: Path, place: Path) -> Path:
    """The folder for engines, as export writes it (its refusals aside: an engine may not know the architecture)."""
    assert case.exported is not None
    loaded = load_draft(draft, lab.target.embedding)[0]
    place.mkdir()
    (place / "config.json").write_text((draft / "config.json").read_text())
    save_file(case.exported(exported_tensors(loaded)), place / "model.safetensors")
    return place
