"""The draft vocabulary: which target tokens the draft can say, as an offset table and a mask.

`d2t` [D] int64 is an OFFSET table (target id = i + d2t[i]), `t2d` [V] bool the mask of target ids that are in it.
Source: EAGLE cnets.py, SpecForge, vLLM `draft_id_to_target_id`, SGLang `hot_token_id = d2t + arange(D)`.

Shapes: D draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from eyas.errors import InputError


def build_vocab(counts_V: Tensor, draft_vocab_size: int, keep: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
    """`(d2t, t2d)` of the `draft_vocab_size` most counted tokens, `keep` (stop ids and the like) always among them.

    Ties, and places left when fewer tokens were counted, go to the lowest ids: no id is ever twice. A draft vocabulary
    of the target's size is the identity. Raises InputError where D exceeds V, `keep` does not fit, or a
    count is not finite: a sort puts NaN before everything, `keep` too.
    """
    vocab_size, size = counts_V.numel(), draft_vocab_size
    kept = sorted(set(keep))
    if not 1 <= size <= vocab_size:
        raise InputError(
            wanted=f"a draft vocabulary of 1 to {vocab_size} tokens (the target's)",
            got=str(size),
            where="draft.vocab_size",
            next=f"--set draft.vocab_size={vocab_size}",
        )
    if len(kept) > size:
        raise InputError(
            wanted=f"a draft vocabulary with room for the {len(kept)} stop and special tokens",
            got=str(size),
            where="draft.vocab_size",
            next=f"--set draft.vocab_size={min(vocab_size, 2 * len(kept))}",
        )
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise InputError(
            wanted=f"stop ids below the vocabulary size {vocab_size}",
            got=str(kept),
            where="the target's generation_config.json",
            next="mend eos_token_id there",
        )
    if not bool(counts_V.isfinite().all()):
        raise InputError(
            wanted="a finite count of each token",
            got=f"{int((~counts_V.isfinite()).sum())} of {vocab_size} that are not",
            where="what the target says after captured rows",
            next="eyas check --captures CAPTURES compares them with their target",
        )
    ranked = counts_V.to(torch.float64, copy=True)
    ranked[kept] = torch.inf
    used_D = torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[used_D] = True
    return used_D - torch.arange(size), t2d


def coverage(counts_V: Tensor, t2d: Tensor) -> float:
    """Share of counted tokens that the draft vocabulary holds; 1.0 where nothing was counted."""
    total = int(counts_V.sum())
    return float(counts_V[t2d].sum()) / total if total else 1.0


def target_ids(d2t: Tensor) -> Tensor:
    """The target id of each draft id, [D]."""
    return torch.arange(d2t.numel(), device=d2t.device) + d2t


def draft_ids(t2d: Tensor) -> Tensor:
    """The draft id of each target id, [V]; -1 where it has none."""
    index_V = torch.cumsum(t2d, dim=0) - 1
    return torch.where(t2d, index_V, -1)


def check_vocab(d2t: Tensor, t2d: Tensor | None, vocab_size: int | None = None, where: str = "draft: d2t, t2d") -> None:
    """Raise InputError unless the tables are one strictly increasing map into the target's vocabulary.

    `t2d` may be absent (ModelOpt does not write it); then `vocab_size` is needed. The message tells a table of target
    ids from one of offsets.
    """
    if vocab_size is None:
        assert t2d is not None, "one of t2d and vocab_size says how large the target's vocabulary is"
        vocab_size = t2d.numel()
    size = d2t.numel()

    def refuse(wanted: str, got: str, code: str) -> InputError:
        return InputError(
            wanted=wanted, got=got, where=where, next="eyas inspect shows the draft's problems", code=code
        )

    if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32) or not 1 <= size <= vocab_size:
        got = f"{d2t.dtype} {tuple(d2t.shape)}"
        raise refuse(f"d2t: int64, one dimension, at most {vocab_size} long", got, "shape_mismatch")
    if t2d is not None and (t2d.dtype != torch.bool or tuple(t2d.shape) != (vocab_size,)):
        raise refuse(f"t2d: bool [{vocab_size}]", f"{t2d.dtype} {tuple(t2d.shape)}", "shape_mismatch")
    ids_D = target_ids(d2t.to(torch.int64))
    fits = bool((ids_D[1:] > ids_D[:-1]).all()) and int(ids_D[0]) >= 0 and int(ids_D[-1]) < vocab_size
    if not fits or (t2d is not None and not bool(t2d[ids_D].all())):
        absolute = _looks_absolute(d2t, t2d)
        hint = " (it holds target ids, not offsets: subtract arange)" if absolute else ""
        raise refuse(
            f"d2t offsets: i + d2t[i] strictly increasing, within 0..{vocab_size - 1}, true in t2d",
            f"ids {int(ids_D.min())}..{int(ids_D.max())}{hint}",
            "d2t_absolute" if absolute else "d2t_out_of_range",
        )
    if t2d is not None and int(t2d.sum()) != size:
        got = f"{int(t2d.sum())} true for {size} draft tokens"
        raise refuse("t2d true exactly at the ids that d2t names", got, "d2t_out_of_range")


def _looks_absolute(d2t: Tensor, t2d: Tensor | None) -> bool:
    """Whether the entries themselves are an increasing list of target ids."""
    vocab_size = t2d.numel() if t2d is not None else int(d2t.max()) + 1
    inside = int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size
    return inside and bool((d2t[1:] > d2t[:-1]).all()) and (t2d is None or bool(t2d[d2t.to(torch.int64)].all()))
