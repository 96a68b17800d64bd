"""Methods of drafting: what each adds to the names, keys and flags of EAGLE-3. No torch.

P-EAGLE (arXiv 2602.01469): EAGLE-3's tensors and `mask_hidden`, a placeholder for the taps of tokens that are not known
yet; `mask_token_id` is the placeholder for their ids. Sources: speculators 0.9.0 models/peagle, SpecForge 0.2.0
modeling/draft/peagle.py, vLLM 0.20 to 0.33 {llama,qwen3}_eagle3.py and spec_decode/llm_base_proposer.py, as read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MethodName = Literal["eagle3", "peagle"]
MASK_HIDDEN = "mask_hidden"
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the placeholder's id: in the first from 0.32, in the others always."""
PEAGLE_CLASSES = frozenset({"PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"})


@dataclass(frozen=True)
class MethodFormat:
    """How a method is written down and asked for; each part is beside what an EAGLE-3 draft has."""

    words: str
    tensors: tuple[str, ...] = ()
    """Tensors of its own, [1, 1, A], A the width of the concatenated taps."""
    mask_keys: tuple[str, ...] = ()
    """Keys of config.json that hold `mask_token_id`."""
    sglang: str | None = None
    """--speculative-algorithm; None: SGLang has no such method."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Keys of --speculative-config."""


METHODS: dict[MethodName, MethodFormat] = {
    "eagle3": MethodFormat("EAGLE-3", sglang="EAGLE3", vllm={"method": "eagle3"}),
    "peagle": MethodFormat(
        "P-EAGLE",
        tensors=(MASK_HIDDEN,),
        mask_keys=("mask_token_id", "pard_token"),
        vllm={"method": "eagle3", "parallel_drafting": True},
    ),
}


def method_of(raw: Mapping[str, Any]) -> MethodName:
    """The method that a draft's config.json is for, whoever wrote it."""
    block = raw.get("eyas")
    inner = block.get("draft") if isinstance(block, Mapping) else None
    if isinstance(inner, Mapping):
        return "peagle" if inner.get("method") == "peagle" else "eagle3"
    names = raw.get("architectures")
    named = isinstance(names, list) and any(isinstance(name, str) and name in PEAGLE_CLASSES for name in names)
    said = raw.get("speculators_model_type") == "peagle" or mask_token_of(raw) is not None
    return "peagle" if named or said else "eagle3"


def mask_token_of(raw: Mapping[str, Any]) -> int | None:
    """The id that stands for tokens not known yet, where a config.json names one."""
    return next((raw[key] for key in MASK_TOKEN_KEYS if type(raw.get(key)) is int), None)
