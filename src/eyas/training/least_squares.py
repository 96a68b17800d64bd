"""A start in closed form: the draft whose first step is the best linear guess, before any step of training.

Row t knows the taps x of token t and the embedding e of token t+1; what it must give is y, the target's normed last
state of token t+1 (its head makes logits of it). Of all linear maps y ~ x P + e M the one of least squares is solved
from moments of some captured rows. P becomes `fc`. M passes through the first layer's attention: each key/value head
has one query head that reads the row's own token, and values and outputs are M's best factors of the rank they have.

Shapes: R rows, A width of the concatenated taps, H hidden, K key/value heads, G query heads of one of them, E width of
a head, U = K * E width of all values, D draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.data.shards import Samples
from eyas.models.attention import GroupedAttention
from eyas.models.draft import Draft, Layer
from eyas.progress import say
from eyas.training.batches import spread
from eyas.training.initialise import STATE_STD, gain, share_query_and_key
from eyas.training.inputs import finite
from eyas.training.teacher import Teacher

SELF_SCORE = 8.0
"""What a row's own key scores: exp(8) is 3,000 other keys' worth."""
ROWS_A_WIDTH, MOST_ROWS = 16, 131_072
"""Rows read: so many for each of A + H, but no more than that."""
MOST_WIDTH = 49_152
"""A + 2H at most: the moments of so many are 19 GB of the host's memory."""
OTHERS_STD = 0.02


@dataclass(frozen=True)
class Moments:
    """Means over rows of the products of [x, e, y] with each other, and the deviation of each tap."""

    product: Tensor
    """[A + 2H, A + 2H], float64, of taps divided by `unit_A`."""
    unit_A: Tensor
    rows: int
    width: int
    """A."""

    def of(self, left: str, right: str) -> Tensor:
        """A block: x, e or y by x, e or y."""
        hidden = (len(self.product) - self.width) // 2
        places = {
            "x": slice(0, self.width),
            "e": slice(self.width, self.width + hidden),
            "y": slice(self.width + hidden, None),
        }
        return self.product[places[left], places[right]]


def unfit(draft: Draft) -> str | None:
    """Why this start is none for such a draft; None where it is one."""
    if not isinstance(draft.layers[0].self_attn, GroupedAttention):
        return "latent attention has no value of its own to read a token by"
    if draft.config.target_hidden_size != draft.config.hidden_size:
        return "the target's states are wider or narrower than the draft's"
    if draft.config.taps_width + 2 * draft.config.hidden_size > MOST_WIDTH:
        return "least squares over taps so wide take more memory than they are worth"
    return None


@torch.no_grad()
def start_from_least_squares(draft: Draft, teacher: Teacher, samples: Samples, numbers: list[int], seed: int) -> Tensor:
    """Put the solution into `draft`; the deviation of what `fc` reads [A], the unit that its weights are to move in.

    `numbers`: the samples that may be read. Where they have not two rows to learn from nothing is done, in units of 1.
    """
    moments = moments_of(draft, teacher, samples, numbers)
    if moments is None:
        return torch.ones(draft.fc.in_features, device=draft.fc.weight.device)
    fc_AH, read_HU, write_UH = solve(moments, head_metric(draft).cpu(), values_width(draft))
    draft.fc.weight.copy_((fc_AH / moments.unit_A[:, None]).T)
    if draft.config.norm_output:  # what is fed back is then as large as h, and means what it meant at step 0
        size = guess_size(moments, fc_AH, read_HU @ write_UH)
        draft.norm.weight.mul_(size)
        draft.lm_head.weight.div_(size)
    device = draft.fc.weight.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        read_own_token(draft, read_HU.float().to(device), write_UH.float().to(device))
    say(f"train: starts from least squares over {moments.rows:,} rows")
    return moments.unit_A.float().to(device)


def values_width(draft: Draft) -> int:
    return draft.config.num_key_value_heads * draft.config.head_dim


@torch.no_grad()
def moments_of(draft: Draft, teacher: Teacher, samples: Samples, numbers: list[int]) -> Moments | None:
    """Of the rows of samples spread evenly over `numbers`; None of fewer than two rows."""
    wanted = min(MOST_ROWS, ROWS_A_WIDTH * (draft.config.taps_width + draft.config.hidden_size))
    width = draft.config.taps_width + 2 * draft.config.hidden_size
    product = torch.zeros(width, width, dtype=torch.float64)
    sums = squares = torch.zeros(draft.config.taps_width, dtype=torch.float64)
    rows = 0
    for x_RA, e_RH, y_RH in rows_of(draft, teacher, samples, spread(samples, numbers, wanted)):
        joined = torch.cat([x_RA, e_RH, y_RH], dim=1)
        product += (joined.T @ joined).cpu()  # multiplied where the rows are, summed and solved in the host's memory
        sums, squares = sums + x_RA.double().sum(0).cpu(), squares + x_RA.double().square().sum(0).cpu()
        rows += len(x_RA)
    if rows < 2:
        return None
    unit_A = (squares / rows - (sums / rows).square()).clamp(min=0).sqrt()
    unit_A = unit_A.clamp(min=1e-3 * float(unit_A.max()) or 1.0)
    units = torch.cat([unit_A, torch.ones(width - len(unit_A), dtype=torch.float64)])
    return Moments(product.div_(rows).div_(units[:, None]).div_(units), unit_A, rows, len(unit_A))


def rows_of(
    draft: Draft, teacher: Teacher, samples: Samples, groups: list[list[int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, e and y of the rows before a supervised token, a group of samples at a time.

    Raises InputError for states that are not finite.
    """
    weight = draft.fc.weight
    first = draft.layers[0]
    assert isinstance(first, Layer), "a draft is made of draft layers"
    norm_H = gain(teacher.target.final_norm, draft.norm.weight).float()
    norm_H = torch.where(norm_H.abs() < 1e-3, 1.0, norm_H)
    for group in groups:
        found = []
        for sample in finite(samples.read_all(group)):
            keep = sample.loss_mask_T[1:].nonzero().flatten()
            ids = sample.ids_T[1:][keep].to(weight.device, torch.int64)
            x_RA = draft.before_fc(sample.taps_TA[keep].to(weight.device, torch.float32))
            y_RH = teacher.normed(sample.last_hidden_TH[1:][keep]).float() / norm_H
            found.append((x_RA, first.input_layernorm(draft.embed_tokens(ids).float()), y_RH))
        joined = [torch.cat(parts) for parts in zip(*found, strict=True)]
        if len(joined[0]):
            yield joined[0], joined[1], joined[2]


def head_metric(draft: Draft) -> Tensor:
    """[H, H]: what an error in y does to logits, squared."""
    weight_DH = (draft.lm_head.weight * draft.norm.weight).double()
    return weight_DH.T @ weight_DH / len(weight_DH)


def solve(moments: Moments, metric_HH: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """P [A, H], and the factors [H, U] and [U, H] of M of the rank `width` that cost the logits least.

    The ridge is the noise that so few rows leave in so many moments.
    """
    ridge = 0.125 * len(moments.product) / moments.rows
    xx, ee = damped(moments.of("x", "x"), ridge), damped(moments.of("e", "e"), ridge)
    xe, xy, ey = moments.of("x", "e"), moments.of("x", "y"), moments.of("e", "y")
    of_taps = torch.linalg.solve(xx, torch.cat([xe, xy], dim=1))
    known_AH, y_AH = of_taps.split([xe.shape[1], xy.shape[1]], dim=1)  # what taps tell of e, and of y
    rest = ee - xe.T @ known_AH  # e beyond what taps tell
    token_HH = torch.linalg.solve(rest, ey - xe.T @ y_AH)
    # The best M of a rank is the largest part of the whole M, seen where e varies and in what logits feel of y.
    varies, _ = square_root(rest)
    felt, back = square_root(damped(metric_HH, 1e-3))
    left, sizes, right = torch.linalg.svd(varies @ token_HH @ felt, full_matrices=False)
    rank = min(width, len(sizes))
    inverse = torch.linalg.solve(varies, left[:, :rank])
    read_HU = inverse.new_zeros(len(token_HH), width)
    write_UH = inverse.new_zeros(width, len(token_HH))
    read_HU[:, :rank], write_UH[:rank] = inverse * sizes[:rank], right[:rank] @ back
    return y_AH - known_AH @ read_HU @ write_UH, read_HU, write_UH


def guess_size(moments: Moments, fc_AH: Tensor, token_HH: Tensor) -> float:
    """The RMS of an element of y as it is guessed, x P + e M; 1 where nothing is guessed."""
    inputs = torch.cat([fc_AH, token_HH])
    known = moments.product[: len(inputs), : len(inputs)]
    square = float(((known @ inputs) * inputs).sum()) / fc_AH.shape[1]
    return square**0.5 if square > 0 else 1.0


def damped(product: Tensor, share: float) -> Tensor:
    """With `share` of its mean diagonal added to its diagonal."""
    return product + share * product.diagonal().mean() * torch.eye(len(product), dtype=product.dtype).to(product.device)


def square_root(product: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(product)
    root = values.clamp(min=1e-12 * float(values[-1])).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T


def read_own_token(draft: Draft, read_HU: Tensor, write_UH: Tensor) -> None:
    """The first of each key/value head's query heads reads its own row's token by `read`, and adds `write` of it.

    The others begin with small random queries and outputs, all with small ones of the state.
    """
    config, attention = draft.config, draft.layers[0].self_attn
    assert isinstance(attention, GroupedAttention), "unfit() says so"
    hidden, groups = config.hidden_size, config.num_attention_heads // config.num_key_value_heads
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        nn.init.normal_(projection.weight, std=STATE_STD)
    nn.init.normal_(attention.o_proj.weight, std=OTHERS_STD)
    share_query_and_key(attention, config, SELF_SCORE, slice(0, 1))
    size = (write_UH.square().mean() / read_HU.square().mean().clamp(min=1e-12)).sqrt().sqrt()
    attention.v_proj.weight[:, :hidden] = (read_HU * size).T
    heads = attention.o_proj.weight.unflatten(1, (config.num_key_value_heads, groups, config.head_dim))
    heads[:, :, 0] = (write_UH / size).T.unflatten(1, (config.num_key_value_heads, config.head_dim))
