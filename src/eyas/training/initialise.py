"""A new draft: its shape from the target's config, its vocabulary from the answers, its head from the target.

Shapes: H hidden (the target's), D draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from eyas.data.shards import Samples
from eyas.errors import InputError
from eyas.formats.draft_config import LATENT_KEYS, DraftConfig, LatentShape
from eyas.models.attention import GroupedAttention, LatentAttention
from eyas.models.draft import Draft, Layer, make_draft
from eyas.models.target import Target
from eyas.models.vocab import build_vocab, target_ids
from eyas.progress import say
from eyas.recipe import DraftSettings, validate
from eyas.training.batches import spread
from eyas.training.inputs import finite
from eyas.training.rows import supervise
from eyas.training.teacher import Teacher

SELF_SCORE, OUTPUT_GAIN, STATE_STD = 4.0, 3.0, 0.01


def draft_config(target: Target, boundaries: Iterable[int], settings: DraftSettings) -> DraftConfig:
    """The draft's shape: what `settings` leave open is the target's own. Raises InputError where they do not fit."""
    config = target.config
    heads = config.num_attention_heads
    parallel = settings.method == "peagle"
    theta, scaling = _rope(config)
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    latent = latent_shape(config, target.hidden_size, settings)
    if latent is not None:
        kv_heads, head_dim, scaling = heads, latent.qk_rope_head_dim, _latent_rope(scaling)
    elif (own := _own_latent(config)) is not None:
        head_dim = own.v_head_dim  # the target's head_dim is its rotated part only
    return DraftConfig(
        method=settings.method,
        mask_token_id=mask_token(target) if parallel and settings.mask_token_id is None else settings.mask_token_id,
        boundaries=tuple(boundaries),
        target_num_hidden_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        target_model_type=target.identity.model_type,
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or getattr(config, "intermediate_size", 4 * target.hidden_size),
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(settings.vocab_size, target.vocab_size),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=settings.rope_theta or theta,
        rope_scaling=scaling,
        max_position_embeddings=target.context_length,
        block=settings.block,
        latent=latent,
        fc_norm=settings.fc_norm,
        norm_output=not parallel if settings.norm_output is None else settings.norm_output,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
        sliding_window=settings.sliding_window,
    )


def mask_token(target: Target) -> int:
    """The id that stands for a token not known yet: the tokenizer's mask token, else an embedding that no token has,
    else the last special token that neither begins nor ends a text, else a stop token (speculators 0.9.0
    train/utils.py, but for the third)."""
    tokenizer = target.tokenizer
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < target.vocab_size:
        return len(tokenizer)
    special = set(tokenizer.all_special_ids) - {*target.stop_ids, tokenizer.bos_token_id}
    return max(special or target.stop_ids)


DEEPSEEK_V3 = LatentShape(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""What the engines' kernels for latent attention are made for."""


def latent_shape(config: Any, hidden_size: int, settings: DraftSettings) -> LatentShape | None:
    """The widths of block mla: those of `settings`, else the target's, else DeepSeek-V3's or what a small target has.

    None for another block. Raises InputError for widths given without the block.
    """
    given = {key: value for key in LATENT_KEYS if (value := getattr(settings, key)) is not None}
    if settings.block != "mla":
        if given:
            raise InputError(
                wanted="draft.block = mla with the widths of latent attention",
                got=f"draft.block = {settings.block} and {', '.join(given)}",
                where="draft",
                next="--set draft.block=mla",
            )
        return None
    target = _own_latent(config)
    if target is None:
        most, head_dim = DEEPSEEK_V3, hidden_size // config.num_attention_heads
        target = LatentShape(
            q_lora_rank=min(most.q_lora_rank, hidden_size),
            kv_lora_rank=min(most.kv_lora_rank, hidden_size // 2),
            qk_nope_head_dim=min(most.qk_nope_head_dim, head_dim),
            qk_rope_head_dim=min(most.qk_rope_head_dim, head_dim - head_dim % 2),
            v_head_dim=min(most.v_head_dim, head_dim),
        )
    return validate(LatentShape, target.model_dump() | given, "draft")


def _own_latent(config: Any) -> LatentShape | None:
    """The target's own widths, where it has latent attention (queries without a latent take DeepSeek-V3's)."""
    if getattr(config, "kv_lora_rank", None) is None:
        return None
    own = {key: getattr(config, key, None) for key in LATENT_KEYS}
    return LatentShape.model_validate(own | {"q_lora_rank": own["q_lora_rank"] or DEEPSEEK_V3.q_lora_rank})


def _latent_rope(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling a latent draft takes from its target: YaRN, which is all that the engines' MLA drafts do."""
    if scaling is None or scaling.get("rope_type") == "yarn":
        return scaling
    say(f"draft.block = mla: engines know no {scaling.get('rope_type')} rope there; the draft's is not scaled")
    return None


def _rope(config: Any) -> tuple[float, dict[str, Any] | None]:
    """The target's rotary base and scaling. Transformers 5 keeps both in `rope_parameters`, for some models one a
    kind of layer: there the full-attention layers' is taken."""
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    theta = float(rope.pop("rope_theta", 10_000.0))
    return theta, None if rope.get("rope_type", "default") == "default" else rope


def count_tokens(reader: Samples, indices: Iterable[int], loss_on: str, vocab_size: int) -> Tensor:
    """How often each target token is supervised in these samples [V]. Raises InputError where no sample has a row to
    supervise: two such tokens, one after another."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    learns = False
    for index in indices:
        ids_T = torch.tensor(reader.ids(index))
        mask_T = torch.ones_like(ids_T, dtype=torch.bool) if loss_on == "all" else reader.mask(index)
        counts_V += torch.bincount(ids_T[mask_T], minlength=vocab_size)
        learns = learns or len(supervise(mask_T, [len(mask_T)], steps=1).index[0]) > 0
    if not learns:
        alone = "no train sample with two supervised tokens in a row: answers of one token teach nothing"
        raise InputError(
            wanted="captures with a row to supervise",
            got=alone if counts_V.any() else "an empty loss mask in every train sample",
            where="captures: loss_mask",
            next="eyas inspect CAPTURES; make the responses again, or --set train.loss_on=all",
            code="mask_empty",
        )
    return counts_V


EXPECTED_ROWS = 16_384
"""Rows whose next tokens are expected, about."""


@torch.no_grad()
def expected_counts(target: Target, reader: Samples, indices: list[int]) -> Tensor:
    """The share of each token [V] among those supervised had the target drawn them, by its probabilities there.

    A draft serves texts that nobody has seen: of the tokens never counted these tell which are likely there.
    Raises InputError for states that are not finite.
    """
    teacher = Teacher(target, torch.arange(0), reader.last_hidden_norm)
    summed_V, rows = torch.zeros(target.vocab_size, dtype=torch.float64), 0
    for group in spread(reader, indices, EXPECTED_ROWS):
        for sample in finite(reader.read_all(group)):
            states = sample.last_hidden_TH[:-1][sample.loss_mask_T[1:]]
            if len(states):
                summed_V += teacher.expected_counts(states)
                rows += len(states)
    return summed_V / max(1, rows)


def special_ids(target: Target, counts_V: Tensor) -> list[int]:
    """The stop ids, and other special tokens that answers contain: never left out, however rare."""
    special = {int(index) for index in target.tokenizer.all_special_ids}
    return sorted(set(target.stop_ids) | {index for index in special if index < len(counts_V) and counts_V[index]})


def new_draft(
    target: Target,
    config: DraftConfig,
    counts_V: Tensor,
    initialise: str,
    seed: int,
    expected_V: Tensor | None = None,
) -> Draft:
    """A draft ready to train, from `seed` alone. Its vocabulary is of the tokens counted most, `expected_V` [V], their
    shares by the target's own probabilities, counted for as much."""
    ranked_V = counts_V if expected_V is None else counts_V + counts_V.sum() * expected_V
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = make_draft(config)
        draft.d2t, draft.t2d = build_vocab(ranked_V, config.draft_vocab_size, special_ids(target, counts_V))
        draft.share_embedding(target.embedding)
        draft.to(target.embedding.device)
        with torch.no_grad():
            copy_head(draft, target)
            if initialise != "random":
                attend_to_self(draft)
    return draft


def copy_head(draft: Draft, target: Target) -> None:
    """The head from the target's rows of the draft vocabulary, the norm from its final norm (whatever its spelling).

    Where norm(h) is fed back its weight goes into the head's columns: the same logits, and what a later step is fed is
    h in another size, not h with each element in a unit of its own, which no layer has met at step 0.
    """
    rows_DH = target.head.weight[target_ids(draft.d2t)]
    if rows_DH.shape == draft.lm_head.weight.shape:
        gain_H = gain(target.final_norm, draft.norm.weight)
        inside, outside = (torch.ones_like(gain_H), gain_H) if draft.config.norm_output else (gain_H, 1.0)
        draft.lm_head.weight.copy_(rows_DH * outside)
        draft.norm.weight.copy_(inside)


def gain(norm: nn.Module, like_H: Tensor) -> Tensor:
    """The weight of an RMS norm, seen from outside: a state of ones has RMS 1, so what comes out is the gain, also of
    norms that store it minus one. Any other norm (its answer to ones is nothing) gives ones."""
    found_H = norm(torch.ones_like(like_H)[None])[0].to(like_H.dtype)
    return found_H if bool(found_H.abs().sum() > 0) else torch.ones_like(like_H)


def attend_to_self(draft: Draft) -> None:
    """The first layer starts by reading each row's own next token, which a uniform attention would drown.

    Query and key share one random projection of the embedding, so a row's own key scores SELF_SCORE and another
    token's about nothing; value and output keep the scale of what they read. The states' half starts near nothing.
    Measured (docs/lab.md): accept length 1.36 after one epoch, against 1.30 from noise and 1.33 from the target's last
    layer, whose attention looks elsewhere.
    """
    first = draft.layers[0]
    assert isinstance(first, Layer), "a draft is made of draft layers"
    attention = first.self_attn
    if isinstance(attention, LatentAttention):
        _attend_to_self_latent(attention, draft.config.hidden_size)
    else:
        assert isinstance(attention, GroupedAttention), "attention is grouped or latent"
        _attend_to_self_grouped(attention, draft.config)
    nn.init.normal_(attention.o_proj.weight, std=OUTPUT_GAIN * attention.o_proj.in_features**-0.5)


def _attend_to_self_grouped(attention: GroupedAttention, config: DraftConfig) -> None:
    hidden = config.hidden_size
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        nn.init.normal_(projection.weight, std=STATE_STD)
    share_query_and_key(attention, config, SELF_SCORE)
    nn.init.normal_(attention.v_proj.weight[:, :hidden], std=hidden**-0.5)


def share_query_and_key(
    attention: GroupedAttention, config: DraftConfig, score: float, heads: slice = slice(None)
) -> None:
    """One random projection of the embedding for a key and for its group's query `heads`: a row's own key scores
    `score` on average."""
    hidden, groups = config.hidden_size, config.num_key_value_heads
    shared = torch.randn(groups, 1, config.head_dim, hidden, device=attention.q_proj.weight.device) / hidden**0.5
    shared *= (score / config.head_dim**0.5) ** 0.5  # |key|^2 / sqrt(E), what attention sees, becomes the score
    queries = attention.q_proj.weight.unflatten(0, (groups, -1, config.head_dim))
    queries[:, heads, :, :hidden] = shared
    attention.k_proj.weight[:, :hidden] = shared.reshape(-1, hidden)


def _attend_to_self_latent(attention: LatentAttention, hidden: int) -> None:
    """The same through latents: both start as one projection of the embedding, and heads as one matrix of the latent.

    A normed latent of c equal widths has |latent|^2 = c, and a random matrix [E', c] of deviation d makes a part of
    expected |part|^2 = E' * c * d^2 of it. The rotated part stays out of it: it would score by distance.
    """
    shape, heads = attention.shape, attention.heads
    rank, plain = min(shape.q_lora_rank, shape.kv_lora_rank), shape.qk_nope_head_dim
    query_a, key_a = attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight
    for weight in (query_a, key_a, attention.q_b_proj.weight):
        nn.init.normal_(weight, std=STATE_STD)
    nn.init.normal_(key_a[: shape.kv_lora_rank, :hidden], std=hidden**-0.5)
    nn.init.normal_(query_a[:, :hidden], std=hidden**-0.5)
    query_a[:rank, :hidden] = key_a[:rank, :hidden]
    own = SELF_SCORE * shape.qk_head_dim**0.5 / attention.stretch
    shared = torch.randn(heads, plain, rank, device=query_a.device) * (own / (plain * rank)) ** 0.5
    attention.q_b_proj.weight.unflatten(0, (heads, -1))[:, :plain, :rank] = shared
    spread = attention.kv_b_proj.weight.unflatten(0, (heads, -1))
    nn.init.normal_(spread, std=shape.kv_lora_rank**-0.5)
    spread[:, :plain] = 0.0
    spread[:, :plain, :rank] = shared
