"""A new draft: its shape from the target's config, its vocabulary from the answers, its weights from the target.

Shapes: H hidden (the target's), D draft vocabulary, V target vocabulary, I in-features of a weight.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from eyas.data.shards import CaptureReader
from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.models.vocab import build_vocab, target_ids
from eyas.progress import say
from eyas.recipe import DraftSettings

EMBEDDING_STD = 0.02
"""Start of the weights that read the embedding: the target's layers have none to copy."""


def draft_config(target: Target, boundaries: Iterable[int], settings: DraftSettings) -> DraftConfig:
    """The draft's shape: what `settings` leave open is the target's own."""
    config = target.config
    heads = config.num_attention_heads
    vocab_size = min(settings.vocab_size, target.vocab_size)
    if vocab_size < settings.vocab_size:
        say(f"draft.vocab_size = {settings.vocab_size} exceeds the target's vocabulary: {vocab_size}, nothing reduced")
    theta, scaling = _rope(config)
    return DraftConfig(
        boundaries=tuple(boundaries),
        target_num_hidden_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        target_model_type=target.identity.model_type,
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or getattr(config, "intermediate_size", 4 * target.hidden_size),
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=settings.rope_theta or theta,
        rope_scaling=scaling,
        max_position_embeddings=target.context_length,
        block=settings.block,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
    )


def _rope(config: Any) -> tuple[float, dict[str, Any] | None]:
    """The target's rotary base and scaling. Transformers 5 keeps both in `rope_parameters`, for some models one a
    kind of layer: there the full-attention layers' is taken."""
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    theta = float(rope.pop("rope_theta", 10_000.0))
    return theta, None if rope.get("rope_type", "default") == "default" else rope


def count_tokens(reader: CaptureReader, indices: Iterable[int], loss_on: str, vocab_size: int) -> Tensor:
    """How often each target token is supervised in these samples [V]. Raises InputError where none is."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for index in indices:
        sample = reader.read(index)
        ids = sample.ids_T if loss_on == "all" else sample.ids_T[sample.loss_mask_T.bool()]
        counts_V += torch.bincount(ids.to(torch.int64), minlength=vocab_size)
    if not counts_V.any():
        raise InputError(
            wanted="captures with supervised tokens",
            got="an empty loss mask in every train sample",
            where="captures: loss_mask",
            next="eyas inspect CAPTURES; make the responses again, or train.loss_on=all",
        )
    return counts_V


def special_ids(target: Target, counts_V: Tensor) -> list[int]:
    """The stop ids, and other special tokens that answers contain: never left out, however rare."""
    special = {int(index) for index in target.tokenizer.all_special_ids}
    return sorted(set(target.stop_ids) | {index for index in special if index < len(counts_V) and counts_V[index]})


def new_draft(target: Target, config: DraftConfig, counts_V: Tensor, initialise: str, seed: int) -> Draft:
    """A draft ready to train, from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Draft(config)
        draft.d2t, draft.t2d = build_vocab(counts_V, config.draft_vocab_size, special_ids(target, counts_V))
        draft.share_embedding(target.embedding)
        draft.to(target.embedding.device)
        if initialise == "target":
            with torch.no_grad():
                copy_head(draft, target)
                copy_layer(draft, target)
                start_from_last_tap(draft)
    return draft


def copy_head(draft: Draft, target: Target) -> None:
    """The head from the target's rows of the draft vocabulary, the norm from its final norm (whatever its spelling)."""
    rows_DH = target.head.weight[target_ids(draft.d2t)]
    if rows_DH.shape == draft.lm_head.weight.shape:
        draft.lm_head.weight.copy_(rows_DH)
        draft.norm.weight.copy_(gain(target.final_norm, draft.norm.weight))


def gain(norm: nn.Module, like_H: Tensor) -> Tensor:
    """The weight of an RMS norm, seen from outside: a state of ones has RMS 1, so what comes out is the gain, also of
    norms that store it minus one. Any other norm (its answer to ones is nothing) gives ones."""
    found_H = norm(torch.ones_like(like_H)[None])[0].to(like_H.dtype)
    return found_H if bool(found_H.abs().sum() > 0) else torch.ones_like(like_H)


def copy_layer(draft: Draft, target: Target) -> None:
    """Attention, MLP and norms of the draft's layers from the target's last ones, wherever shapes agree.

    The first layer reads cat(embedding, state): its query, key and value take the target's weights on the state's
    half and start small on the embedding's.
    """
    kept = draft.config.num_hidden_layers
    for layer, source in zip(draft.layers, target.layers[-kept:], strict=True):
        found = source.state_dict()
        for name, parameter in layer.named_parameters():
            weight = found.get(name)
            if weight is None or "layernorm" in name:
                continue
            if weight.shape == parameter.shape:
                parameter.copy_(weight)
            elif weight.dim() == 2 and parameter.shape == (weight.shape[0], 2 * weight.shape[1]):
                parameter[:, weight.shape[1] :] = weight
                nn.init.normal_(parameter[:, : weight.shape[1]], std=EMBEDDING_STD)
        children = dict(source.named_children())
        for ours, theirs in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm",) * 2):
            _copy_gain(dict(layer.named_children()).get(ours), children.get(theirs))


def _copy_gain(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    if ours is not None and theirs is not None:
        weight: Any = ours.weight
        weight.copy_(gain(theirs, weight))


def start_from_last_tap(draft: Draft) -> None:
    """`fc` begins as the last tap itself; the other taps' weights keep their small random start."""
    hidden, width = draft.config.hidden_size, draft.config.target_hidden_size
    if hidden == width:
        draft.fc.weight[:, -width:] += torch.eye(hidden, device=draft.fc.weight.device)
