"""May several texts share a forward of the plain path? Found out on the real modules, and only where it is faster.

A text keeps its bucket of rows and its own attention calls; but a product of two buckets' rows may take another kernel
than that of one, and sum in another order. Two ways are tried: all texts' rows in one product, which reads each weight
once; and every product text by text, which has the lone forward's own shapes and still finds a layer's weights in the
processor's cache. Where neither gives every text the bits of its lone forward, or neither is faster, texts take their
forwards in turn.

Shapes: B texts, R rows of one, I in, V vocabulary, A width of the concatenated taps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eyas.engine.cache import KVCache
from eyas.engine.costs import best_seconds
from eyas.engine.forward import Forward, TargetForward
from eyas.engine.linear import Kernel
from eyas.engine.rows import TextRows
from eyas.engine.settle import layer_linears
from eyas.progress import say

MOST, TRIES = 8, 2
"""Texts in one forward: weights are read seldom enough by then, and every number of them is tried at start."""
PROMPT, BLOCK = 24, 64
"""Rows before the made-up texts' own, and one more for each text; and the length that is attended."""
IN_TURN = "in turn"


@torch.inference_mode()
def settle_texts(forward: Forward, most: int) -> None:
    """Set how many of up to `most` texts go through one forward. The compiled path needs no asking."""
    if not isinstance(forward, TargetForward) or most == 1:
        return
    with made_texts(forward, min(most, MOST)) as texts:
        alone = [_rows(forward, [text])[0] for text in texts]
        linears = [*layer_linears(forward.target), forward.target.head]
        own = [linear.forward for linear in linears]
        apart = [by_text(kernel) for kernel in own]
        seconds, counts = dict[str, float](), dict[str, int]()
        for way, kernels in ((IN_TURN, own), ("in one product", own), ("text by text", apart)):
            _install(linears, kernels)
            counts[way] = forward.together = 1 if way == IN_TURN else _agreeing(forward, texts, alone)
            if way == IN_TURN or counts[way] > 1:
                seconds[way] = best_seconds(lambda _: _compute(forward, texts), [0], TRIES)[0]
            if counts[way] == len(texts):  # whoever reads each weight once for all needs no other way
                break
        best = min(seconds, key=lambda way: seconds[way])
        _install(linears, apart if best == "text by text" else own)
        forward.together = counts[best]
    if best == IN_TURN:
        say("engine: on this path texts take their forwards in turn (docs/server.md)")
        return
    gain = seconds[IN_TURN] / seconds[best]
    say(f"engine: up to {counts[best]} texts share a forward, multiplied {best}, bit-equal, {gain:.1f} times as fast")


@contextmanager
def made_texts(forward: Forward, count: int) -> Iterator[list[TextRows]]:
    """Buckets of made-up rows behind prompts of several lengths, a cache each."""
    rows, size, own = forward.rows or 1, forward.target.vocab_size, forward.cache
    ids = torch.randint(size, (PROMPT + 2 * count + rows,), generator=torch.Generator().manual_seed(4)).tolist()
    forward.cache = first = KVCache(own.dtype, own.device, BLOCK)
    first.reserve(PROMPT + count)
    forward.prefill(ids[: PROMPT + count])
    texts = []
    for index in range(count):
        cache, start = KVCache(own.dtype, own.device, BLOCK), PROMPT + index
        cache.reserve(start + rows)
        cache.copy(first, start)
        texts.append(TextRows(cache, ids[start + index : start + index + rows], start))
    try:
        yield texts
    finally:
        forward.cache = own


def by_text(kernel: Callable[[Tensor], Tensor]) -> Kernel:
    """`kernel` for each text of [B, R, I] by itself."""

    def each(input: Tensor) -> Tensor:
        if input.dim() < 3 or len(input) == 1:
            return kernel(input)
        return torch.cat([kernel(part) for part in input.split_with_sizes([1] * len(input))])

    return each


def _install(linears: Sequence[nn.Linear], kernels: Sequence[Kernel]) -> None:
    for linear, kernel in zip(linears, kernels, strict=True):
        linear.forward = kernel


def _agreeing(forward: TargetForward, texts: Sequence[TextRows], alone: Sequence[Tensor]) -> int:
    """The largest number up to which any number of texts has the bits of lone forwards."""
    for count in range(2, len(texts) + 1):
        forward.together = count
        try:
            rows = _rows(forward, texts[:count])
        except (RuntimeError, ValueError, IndexError) as error:
            say(f"engine: this target takes one text a forward: {str(error).strip().splitlines()[0]}")
            return 1
        if not all(torch.equal(row, lone) for row, lone in zip(rows, alone[:count], strict=True)):
            return count - 1
    return len(texts)


def _compute(forward: Forward, texts: Sequence[TextRows]) -> None:
    for logits_RV, _ in forward.verify_texts(texts):
        logits_RV.argmax(dim=-1).tolist()


def measure_texts(forward: Forward, counts: Sequence[int]) -> dict[int, float]:
    """Seconds by number of texts, head and argmax included."""
    with made_texts(forward, max(counts)) as texts:
        return best_seconds(lambda count: _compute(forward, texts[:count]), counts, TRIES)


def _rows(forward: Forward, texts: Sequence[TextRows]) -> list[Tensor]:
    """Logits and taps [R, V + A] of each text."""
    return [
        torch.cat([logits_RV, verified.taps()[0].float()], dim=-1) if forward.boundaries else logits_RV
        for logits_RV, verified in forward.verify_texts(texts)
    ]
