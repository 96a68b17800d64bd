"""What is put through the peers and through Eyas: a draft's weights, documents, and the unrolling asked for.

A case becomes two files, NAME.json and NAME.safetensors, that a peer's own environment can read: no Eyas there.

Shapes: L a document's tokens, A width of the taps, H hidden, V target vocabulary, D draft vocabulary.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft, make_draft
from eyas.models.vocab import build_vocab, target_ids
from eyas.training.loss import Batch
from eyas.training.rows import supervise
from eyas.training.teacher import Teacher

DECAY = 0.8
BASE: dict[str, Any] = {
    "boundaries": (2, 4, 5),
    "target_num_hidden_layers": 8,
    "target_hidden_size": 32,
    "target_model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 80,
    "draft_vocab_size": 48,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """One draft over some documents. `runs` names peer and attention (`speculators/sdpa`)."""

    name: str
    runs: tuple[str, ...]
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (40,)
    prompts: tuple[int, ...] = (0,)
    """Where each document's answer starts; 0: every token is in the loss."""
    gradients: bool = True
    """False where the peer has no backward on a CPU, or trains rows that Eyas does not."""

    @property
    def config(self) -> DraftConfig:
        return DraftConfig(**BASE | self.options)


WINDOW = Case("window", ("speculators/sdpa",), 7, {"sliding_window": 9}, gradients=False)
"""Apart from CASES: there the peer's convention is another."""
PEAGLE = Case(
    "peagle",
    ("speculators/sdpa",),
    5,
    {"method": "peagle", "mask_token_id": 3, "num_hidden_layers": 2, "fc_norm": True},
    lengths=(40, 33),
    prompts=(9, 12),
    gradients=False,
)
"""Apart from CASES: there the peer draws which rows it trains."""
SDPA = ("speculators/sdpa", "specforge/sdpa")
CASES = (
    Case("ttt3", SDPA, 3),
    Case("ttt7", (*SDPA, "speculators/eager"), 7),
    Case("wide_heads", SDPA, 7, {"num_attention_heads": 8, "head_dim": 16}),
    Case("one_key_head", SDPA, 3, {"num_key_value_heads": 1}),
    Case("rope_theta", SDPA, 7, {"rope_theta": 500_000.0}),
    Case("rope_llama3", SDPA, 7, {"rope_scaling": LLAMA3}, lengths=(100,)),
    Case("full_vocabulary", SDPA, 3, {"draft_vocab_size": 80}),
    Case("fc_norm", SDPA, 3, {"fc_norm": True}),
    Case("wider_target", ("specforge/sdpa",), 3, {"target_hidden_size": 48}),
    Case("four_taps", ("speculators/sdpa",), 3, {"boundaries": (1, 2, 4, 5)}),
    Case("norm_before_residual", ("speculators/sdpa",), 7, {"norm_before_residual": True}),
    Case("norm_output", ("speculators/sdpa",), 7, {"norm_output": True, "fc_norm": True}),
    Case("norm_before_fc", ("speculators/sdpa",), 3, {"norm_before_fc": True}),
    Case("attention_bias", ("speculators/sdpa",), 3, {"attention_bias": True}),
    Case("two_layers", ("speculators/sdpa",), 7, {"num_hidden_layers": 2}),
    Case("qwen3", ("speculators/sdpa",), 7, {"block": "qwen3", "num_hidden_layers": 2, "head_dim": 16}),
    Case(
        "documents",
        (*SDPA, "speculators/eager"),
        7,
        lengths=(19, 31, 24),
        prompts=(6, 12, 9),
        gradients=False,
    ),
    Case(
        "flex",
        ("speculators/simple_flex_attention", "specforge/flex_attention"),
        7,
        lengths=(60, 50),
        prompts=(10, 20),
        gradients=False,
    ),
    Case("rows", SDPA, 3, lengths=(12,), prompts=(5,), gradients=False),
    Case("short_prompt", ("speculators/sdpa",), 3, lengths=(8, 12), prompts=(3, 1), gradients=False),
    Case(
        "default_target",
        SDPA,
        7,
        {
            "hidden_size": 576,
            "target_hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 6000,
            "draft_vocab_size": 2000,
            "rope_theta": 100_000.0,
        },
        lengths=(200,),
    ),
)


@dataclass
class Document:
    ids_L: Tensor
    taps_LA: Tensor
    last_hidden_LH: Tensor
    """Before the target's final norm."""
    mask_L: Tensor
    argmax_L: Tensor
    """The target's choice after each token, of the full vocabulary."""


@dataclass
class Material:
    """A case made: random weights, of a scale at which every part of the draft moves its logits."""

    draft: Draft
    norm_H: Tensor
    """The target's final norm."""
    head_VH: Tensor
    documents: list[Document]


def material(case: Case) -> Material:
    torch.manual_seed(sum(case.name.encode()))
    config = case.config
    draft = make_draft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            if not parameter.is_meta:
                fan_in = parameter.shape[1] if parameter.dim() == 2 else 1
                parameter.normal_(float(parameter.dim() == 1), 0.2 if parameter.dim() == 1 else fan_in**-0.5)
    draft.share_embedding(torch.randn(config.vocab_size, config.hidden_size))
    if config.reduced_vocabulary:
        draft.d2t, draft.t2d = build_vocab(torch.randint(0, 50, (config.vocab_size,)), config.draft_vocab_size)
    else:
        draft.t2d = torch.ones_like(draft.t2d)
    norm_H = 1 + 0.2 * torch.randn(config.target_hidden_size)
    head_VH = 2 * torch.randn(config.vocab_size, config.target_hidden_size) * config.target_hidden_size**-0.5
    documents = [
        document(config, length, prompt, norm_H, head_VH)
        for length, prompt in zip(case.lengths, case.prompts, strict=True)
    ]
    return Material(draft, norm_H, head_VH, documents)


def document(config: DraftConfig, length: int, prompt: int, norm_H: Tensor, head_VH: Tensor) -> Document:
    last_hidden_LH = 3 * torch.randn(length, config.target_hidden_size)
    return Document(
        ids_L=torch.randint(0, config.vocab_size, (length,)),
        taps_LA=torch.randn(length, config.taps_width),
        last_hidden_LH=last_hidden_LH,
        mask_L=(torch.arange(length) >= prompt).long(),
        argmax_L=(normed(last_hidden_LH, norm_H, config.rms_norm_eps) @ head_VH.T).argmax(-1),
    )


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def peer_masks(case: Case, made: Material, one: Document) -> dict[str, Tensor]:
    """The loss mask [L] that makes each peer train Eyas's rows of a document, where one does.

    The peers weigh row t of step s by one entry of the mask: speculators by entry t + 1 + s, SpecForge by t + s. So a
    single mask can say "up to the last teacher whose token is in the document"; it cannot say where a draft starts.
    speculators trains a row whose teacher's choice the draft cannot say; SpecForge leaves it out by itself, as we do.
    """
    if not case.gradients:
        return {"speculators": one.mask_L, "specforge": one.mask_L}
    length = len(one.ids_L)
    place_L = torch.arange(length)
    return {
        "speculators": ((place_L <= length - 2) & made.draft.t2d[one.argmax_L]).long(),
        "specforge": (place_L <= length - 3).long(),
    }


def batch_of(case: Case, made: Material) -> Batch:
    """The documents packed, as we train them."""
    documents = made.documents
    return Batch(
        samples=(case.name,),
        ids_T=torch.cat([one.ids_L for one in documents]),
        taps_TA=torch.cat([one.taps_LA for one in documents]),
        last_hidden_TH=torch.cat([one.last_hidden_LH for one in documents]),
        argmax_T=torch.cat([one.argmax_L for one in documents]),
        rows=supervise(torch.cat([one.mask_L for one in documents]), [len(one.ids_L) for one in documents], case.steps),
    )


def teacher_of(made: Material) -> Teacher:
    width = made.head_VH.shape[1]
    head, norm = nn.Linear(width, len(made.head_VH), bias=False), LlamaRMSNorm(width, made.draft.config.rms_norm_eps)
    head.weight = nn.Parameter(made.head_VH, requires_grad=False)
    norm.weight = nn.Parameter(made.norm_H, requires_grad=False)
    target = SimpleNamespace(head=head, final_norm=norm, scaled=lambda logits: logits)
    return Teacher(target, target_ids(made.draft.d2t), "before")  # type: ignore[arg-type]


def write_case(folder: Path, case: Case, made: Material) -> None:
    """NAME.json and NAME.safetensors."""
    tensors = {f"draft.{name}": tensor for name, tensor in made.draft.state_dict().items()}
    tensors |= {"target.norm": made.norm_H, "target.head": made.head_VH, "ids_D": target_ids(made.draft.d2t)}
    for number, one in enumerate(made.documents):
        tensors |= {
            f"{number}.ids": one.ids_L,
            f"{number}.taps": one.taps_LA,
            f"{number}.last_hidden": one.last_hidden_LH,
        }
        tensors |= {f"{number}.mask.{peer}": mask for peer, mask in peer_masks(case, made, one).items()}
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / f"{case.name}.safetensors")
    facts = {
        "config": case.config.model_dump(mode="json"),
        "runs": case.runs,
        "steps": case.steps,
        "decay": DECAY,
        "documents": len(made.documents),
        "gradients": case.gradients,
    }
    (folder / f"{case.name}.json").write_text(json.dumps(facts))
