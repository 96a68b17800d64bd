"""Drafts that Eyas did not write: EAGLE, SpecForge, TorchSpec, AngelSlim, speculators and ModelOpt folders, read back.

Their config.json says little of the target and nothing of its weights, so the target is named; where the numbering of
layer ids is not known, boundaries are too. What tensors show (layers, biases, norms, block) counts before the keys.

Shapes: H hidden, V the target's vocabulary, D the draft's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig, TargetIdentity
from eyas.formats.methods import MASK_HIDDEN
from eyas.formats.names import canonical_name, twin
from eyas.formats.read_config import DraftFile, read_config
from eyas.formats.target_config import layer_prefix, read_json, text_config
from eyas.formats.tensor_list import block_of
from eyas.models.resolve import resolve_target
from eyas.models.streaming.weights import Checkpoint

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
LONGER = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
"""Rope types for which a longer context changes no angle."""


@dataclass(frozen=True)
class NamedTarget:
    """What a foreign draft needs of its target: who it is, how long its contexts are, and its embedding [V, H]."""

    identity: TargetIdentity
    context_length: int
    embedding: Tensor


def name_target(name: str, trust_remote_code: bool = False) -> NamedTarget:
    """Read the three tensors that make a target's identity, and nothing else of it.

    Raises InputError for a name that leads to no checkpoint, and for a quantisation that is not supported.
    """
    folder = resolve_target(name, trust_remote_code=trust_remote_code)
    checkpoint, text = Checkpoint.open(folder), text_config(read_json(folder / "config.json"))
    prefix = layer_prefix(checkpoint.headers, folder)
    outer = prefix.removesuffix("model.")
    embedding_VH = checkpoint.load(f"{prefix}embed_tokens.weight")
    norm = next(f"{prefix}{norm}.weight" for norm in NORMS if f"{prefix}{norm}.weight" in checkpoint)
    head = f"{outer}lm_head.weight"
    head_VH = checkpoint.load(head) if head in checkpoint else embedding_VH
    digest = hashlib.sha256()
    for tensor in (embedding_VH, checkpoint.load(norm), head_VH):
        digest.update(tensor.contiguous().numpy().data)
    is_snapshot = folder.parent.name == "snapshots"
    identity = TargetIdentity(
        name=name if is_snapshot else folder.name,
        revision=folder.name if is_snapshot else None,
        weights_hash=digest.hexdigest(),
        model_type=str(text["model_type"]),
        num_hidden_layers=text["num_hidden_layers"],
        hidden_size=embedding_VH.shape[1],
        vocab_size=head_VH.shape[0],
    )
    return NamedTarget(identity, int(text.get("max_position_embeddings", 2048)), embedding_VH)


def read_foreign(
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    target: NamedTarget,
    where: str,
    boundaries: Sequence[int] | None = None,
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """The draft's config and its tensors under canonical names, ready for `Draft`.

    An embedding equal to the target's is dropped, one that differs makes the draft its owner; a missing t2d follows
    from d2t. Raises InputError where the wiring is not known and `boundaries` does not say it, where the file lacks a
    size, where the two norms of a later layer differ (SGLang and vLLM would each use another), and where `boundaries`
    contradict the file.
    """
    found = _canonical(tensors, where)
    file = read_config(raw, target.identity)
    if boundaries is not None:
        _check_stated(file, boundaries, where)
        file = read_config(raw | _stated(boundaries), target.identity)
    config = _config(file, raw, where)
    shown = DraftConfig.model_validate(config.model_dump() | _shown(config, found, target))
    return shown, _finish(found, target, where)


def _check_stated(file: DraftFile, boundaries: Sequence[int], where: str) -> None:
    """Boundaries given by hand fill a gap; they do not overrule a list that says its own."""
    says = file.boundaries if file.keys.top or file.keys.nested else None
    if says is not None and says != tuple(boundaries):
        raise InputError(
            wanted=f"boundaries {list(says)} ({file.boundaries_source})",
            got=f"{list(boundaries)}, as stated or captured",
            where=where,
            next=f"--boundaries {','.join(map(str, says))}, or mend the layer ids in config.json",
            code="tap_offset",
        )


def _stated(boundaries: Sequence[int]) -> dict[str, Any]:
    """Boundaries given by hand, in the place where every reader takes them as they are."""
    return {"eagle_aux_hidden_state_layer_ids": list(boundaries), "eagle_config": {"use_aux_hidden_state": True}}


def _config(file: DraftFile, raw: dict[str, Any], where: str) -> DraftConfig:
    ids = file.keys.top or file.keys.nested
    if file.boundaries is None or not ids:
        got = f"{list(ids)}, whose numbering is not known" if ids else file.boundaries_source
        raise InputError(
            wanted="layer ids that say which boundaries the draft was trained on",
            got=got,
            where=where,
            next="eyas export --boundaries 2,15,27 states them and takes it over; eyas check --captures measures them",
        )
    if file.config is None:
        raise InputError(
            wanted="a config.json with hidden_size, intermediate_size, heads and max_position_embeddings",
            got=f"{file.format}: {', '.join(sorted(raw))}",
            where=where,
            next="add the keys that are absent; eyas inspect shows them",
        )
    if file.config.block == "mla" and raw.get("rope_interleave") is False:
        raise InputError(
            wanted="a latent draft whose rotated parts are interleaved pairs, as vLLM's always are",
            got="rope_interleave: false",
            where=where,
            next="reorder the rotated rows of q_b_proj and kv_a_proj_with_mqa into pairs and drop the key",
        )
    return file.config


def _canonical(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors under canonical names; second names (formats/names.py `twin`) are dropped if they hold the same."""
    named = {canonical_name(name): tensor for name, tensor in tensors.items()}
    for name in [name for name in named if twin(name) is not None]:
        source = named.get(str(twin(name)))
        if source is None:
            named[str(twin(name))] = named.pop(name)
        elif torch.equal(source, named[name]):
            del named[name]
        else:
            raise InputError(
                wanted=f"{name} and {twin(name)} with the same values",
                got="two norms that differ: SGLang would use one, vLLM the other",
                where=where,
                next="serve it with the engine it was trained for; Eyas cannot represent both",
            )
    return named


def _shown(config: DraftConfig, found: dict[str, Tensor], target: NamedTarget) -> dict[str, Any]:
    """What the tensors show of a draft, over what its keys say."""
    layers = {name.split(".")[1] for name in found if name.startswith("layers.")}
    head, fused = found.get("lm_head.weight"), found.get("fc.weight")
    kind = (config.rope_scaling or {}).get("rope_type", (config.rope_scaling or {}).get("type", "default"))
    context = max(config.max_position_embeddings, target.context_length) if kind in LONGER else None
    own = found.get("embed_tokens.weight")
    return {
        "num_hidden_layers": len(layers) or config.num_hidden_layers,
        "block": block_of(found),
        "method": "peagle" if MASK_HIDDEN in found else config.method,
        "fc_norm": "fc_norm.0.weight" in found,
        "norm_before_fc": "input_norm.weight" in found,
        "fc_bias": "fc.bias" in found,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in found,
        "draft_vocab_size": config.draft_vocab_size if head is None else head.shape[0],
        "hidden_size": config.hidden_size if fused is None else fused.shape[0],
        "max_position_embeddings": context or config.max_position_embeddings,
        "own_embedding": own is not None and not same_embedding(own, target.embedding),
    }


def same_embedding(own_VH: Tensor, target_VH: Tensor) -> bool:
    """Whether a draft's embedding is the target's, in the coarser of the two precisions."""
    if own_VH.shape != target_VH.shape:
        return False
    return torch.equal(own_VH.to(torch.bfloat16), target_VH.to(torch.bfloat16))


def _finish(found: dict[str, Tensor], target: NamedTarget, where: str) -> dict[str, Tensor]:
    """Tables in their dtypes, a t2d where there is none, no copy of the target's embedding."""
    tensors = {name: tensor for name, tensor in found.items() if "rotary_emb" not in name}
    own = tensors.get("embed_tokens.weight")
    if own is not None and same_embedding(own, target.embedding):
        del tensors["embed_tokens.weight"]
    d2t = tensors.get("d2t")
    if d2t is None:
        tensors.pop("t2d", None)
        return tensors
    tensors["d2t"] = d2t.to(torch.int64)
    ids_D = torch.arange(d2t.numel()) + tensors["d2t"]
    vocab_size = target.identity.vocab_size
    if d2t.numel() == vocab_size:  # a whole vocabulary: an identity table says nothing
        return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "t2d" not in tensors:
        if int(ids_D.min()) < 0 or int(ids_D.max()) >= vocab_size:
            raise InputError(
                wanted=f"d2t offsets into the target's {vocab_size} tokens",
                got=f"ids {int(ids_D.min())}..{int(ids_D.max())}",
                where=where,
                next="eyas check --draft DRAFT --engine sglang says what the table holds",
            )
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_D, True)
    tensors["t2d"] = tensors["t2d"].to(torch.bool)
    return tensors
