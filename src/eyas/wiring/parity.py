"""Parity: what is trained (the TTT forward over packed rows) is what is served (row by row, with a cache).

Shapes: T rows, A width of the taps, R compared rows, D draft vocabulary.
"""

import torch
from torch import Tensor

from eyas.engine.cache import KVCache
from eyas.models.draft import Draft
from eyas.training.loss import unroll
from eyas.training.rows import supervise


@torch.no_grad()
def ttt_equals_incremental(draft: Draft, taps_TA: Tensor, ids_T: Tensor, steps: int = 3) -> float:
    """Largest difference between the logits of the TTT forward and of cached decoding, over their largest value.

    Every row with `steps` true tokens to follow is compared at every step: decoding writes the rows before it from taps
    one at a time, then feeds the chain its own states (P-EAGLE: placeholders) at the cache's end, which the next row
    overwrites.
    """
    taps_TA = taps_TA.to(draft.fc.weight.dtype)
    ids_T = ids_T.to(torch.int64)
    rows = supervise(torch.ones_like(ids_T), [len(ids_T)], steps)
    compared = len(rows.index[-1])
    assert compared > 0, f"parity needs at least {steps + 2} tokens"
    unrolled = unroll(draft, taps_TA, ids_T, rows)
    trained_SRD = torch.stack([draft.logits(hidden[:compared]) for hidden in unrolled])
    served_SRD = _decode(draft, taps_TA, ids_T, compared, steps)
    return float((trained_SRD - served_SRD).abs().max() / trained_SRD.abs().max())


def _decode(draft: Draft, taps_TA: Tensor, ids_T: Tensor, compared: int, steps: int) -> Tensor:
    cache = KVCache(draft.fc.weight.dtype, draft.fc.weight.device)
    cache.reserve(compared + steps)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cache.attend(layer, query, key, value, window=draft.config.sliding_window)

    def row(state_11H: Tensor, following_11: Tensor, place: int) -> Tensor:
        cache.begin(place, 1, by_position=False)
        return draft(following_11, state_11H, draft.rope(torch.tensor([[place]])), attend)

    def following(place: int) -> Tensor:
        return ids_T[None, place + 1, None]

    logits_RSD = []
    for first in range(compared):
        hidden = row(draft.fuse(taps_TA[None, first, None]), following(first), first)
        chain = [draft.logits(hidden)[0, 0]]
        for step in range(1, steps):
            hidden = row(*draft.fed(hidden, following(first + step)), first + step)
            chain.append(draft.logits(hidden)[0, 0])
        logits_RSD.append(torch.stack(chain))
    return torch.stack(logits_RSD, dim=1)
