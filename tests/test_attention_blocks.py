"""TTT attention block by block, against one softmax over a matrix of all scores; what is kept to go back."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.training import blocks
from eyas.training.attention import TTTAttention
from eyas.training.blocks import attend, attend_back, attend_plainly, attend_plainly_back, band, blocks_of
from eyas.training.loss import unroll
from eyas.training.rows import Rows, supervise
from test_loss import HIDDEN, VOCAB, make_draft

HEADS, KEY_HEADS = 4, 2


def states_of(rows: Rows, width: int, value_width: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of every step; at step 0 keys and values are all rows'."""
    generator = torch.Generator().manual_seed(seed)

    def made(heads: int, count: int, wide: int) -> Tensor:
        return (2 * torch.randn(1, heads, count, wide, generator=generator)).requires_grad_()

    made_of = []
    for step, index in enumerate(rows.index):
        keys = rows.positions_T.numel() if step == 0 else len(index)
        made_of.append(
            (made(HEADS, len(index), width), made(KEY_HEADS, keys, width), made(KEY_HEADS, keys, value_width))
        )
    return made_of


def at_once(rows: Rows, states: list[tuple[Tensor, Tensor, Tensor]], step: int, window: int | None) -> Tensor:
    """The context of a step from a matrix of all its rows by all keys and the rows' own."""
    query, key, value = states[step][0], *states[0][1:]
    groups, scale = HEADS // KEY_HEADS, query.shape[-1] ** -0.5
    document_T = torch.bucketize(torch.arange(rows.positions_T.numel()), torch.tensor(rows.starts[1:]), right=True)
    index, every = rows.index[step], torch.arange(rows.positions_T.numel())
    visible = (document_T[index][:, None] == document_T[None]) & (every[None] <= index[:, None])
    if window is not None:
        visible &= every[None] > index[:, None] + step - window
    scores = [(query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)]
    values = []
    for i in range(1, step + 1):
        if window is not None and step - i >= window:
            continue
        place = torch.searchsorted(rows.index[i], index)
        own, wide = (each[:, :, place].repeat_interleave(groups, 1) for each in states[i][1:])
        scores.append((query * own).sum(-1, keepdim=True) * scale)
        values.append(wide)
    shares = torch.cat(scores, -1).softmax(-1)
    total = len(every)
    context = shares[..., :total] @ value.repeat_interleave(groups, 1)
    for i, wide in enumerate(values):
        context = context + shares[..., total + i, None] * wide
    return context


@settings(max_examples=40, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4),
    steps=st.integers(1, 4),
    window=st.sampled_from([None, 1, 2, 5]),
    wide=st.sampled_from([(4, 4), (6, 3), (3, 5)]),
    size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_blocks_merged_with_own_keys_are_one_softmax_over_all_of_them(
    masks: list[list[bool]], steps: int, window: int | None, wide: tuple[int, int], size: int, seed: int
) -> None:
    mask = torch.tensor([bit for one in masks for bit in one], dtype=torch.int64)
    rows = supervise(mask, [len(one) for one in masks], steps)
    states = states_of(rows, *wide, seed)
    leaves = [each for step in states for each in step]
    found, wanted = [], []
    with mock.patch.object(blocks, "ROWS", size):
        attention = TTTAttention(rows, window)
        for step in range(steps):
            attention.begin(step)
            found.append(attention(0, *states[step]))
        wanted = [at_once(rows, states, step, window) for step in range(steps)]
        into = [torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)) for one in wanted]
        gradients = [
            torch.autograd.grad(contexts, leaves, into, allow_unused=True, materialize_grads=True)
            for contexts in (found, wanted)
        ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("window", [None, 6])
def test_the_kernel_and_plain_products_agree_on_a_block_and_on_a_merged_one(width: int, window: int | None) -> None:
    torch.manual_seed(0)
    (block,) = blocks_of(torch.arange(7, 12), (0, 20), window, 1)
    rows, keys = 5, block.keys.stop - block.keys.start
    query, grad = torch.randn(1, HEADS, rows, 8), torch.randn(1, HEADS, rows, width)
    key, value = torch.randn(1, KEY_HEADS, keys, 8), torch.randn(1, KEY_HEADS, keys, width)
    mask = block.mask(band([block], query))
    kernel, plain = attend(query, key, value, mask), attend_plainly(query, key, value, mask)
    for one, other in zip(kernel, plain, strict=True):
        torch.testing.assert_close(one, other)
    merged = torch.randn_like(kernel[0]), kernel[1] + torch.rand(kernel[1].shape)
    found = attend_back(grad, *merged, query, key, value, mask)
    for one, other in zip(found, attend_plainly_back(grad, *merged, query, key, value, mask), strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_ends_where_rows_do_not_follow_one_another_and_sees_its_document_up_to_its_last_row() -> None:
    index = torch.tensor([2, 3, 4, 7, 12, 13])
    with mock.patch.object(blocks, "ROWS", 2):
        found = blocks_of(index, (0, 10, 20), None, 0)
    spans = [((b.rows.start, b.rows.stop), (b.keys.start, b.keys.stop), b.before) for b in found]
    assert spans == [
        ((0, 2), (0, 4), 2),
        ((2, 3), (0, 5), 4),
        ((3, 4), (0, 8), 7),
        ((4, 6), (10, 14), 2),
    ]
    assert blocks_of(index, (0, 10, 20), 2, 2) == []


def kept_for_the_backward_pass(length: int) -> tuple[int, int]:
    """Elements of all tensors kept and of the largest, of one document's unrolling over three steps."""
    draft = make_draft()
    rows = supervise(torch.ones(length, dtype=torch.int64), [length], 3)
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = unroll(draft, torch.randn(length, 2 * HIDDEN), torch.randint(0, VOCAB, (length,)), rows)
    assert len(hidden) == 3
    return sum(sizes.values()), max(sizes.values())


def test_on_a_cpu_attention_stays_in_float32_under_mixed_precision() -> None:
    rows = supervise(torch.tensor([False] * 3 + [True] * 6), [9], 2)
    ((query, key, value), *_) = states_of(rows, 8, 8, seed=0)
    plain = TTTAttention(rows)(0, query, key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = TTTAttention(rows)(0, query, key, value)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, plain, rtol=0, atol=0)


def test_what_is_kept_for_the_backward_pass_grows_as_the_tokens_do() -> None:
    short, long = kept_for_the_backward_pass(512), kept_for_the_backward_pass(2048)
    assert long[0] < 4.2 * short[0]
    assert long[1] <= 2048 * 4 * HIDDEN  # no tensor is wider than the widest state, the MLP's or the taps'
