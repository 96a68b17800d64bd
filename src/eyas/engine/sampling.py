"""Which token comes next at a row: the argmax, or a draw whose randomness belongs to the place in the text.

The draw of output position i uses one uniform number, a hash of (seed, i), and nothing else that is random. A verify
row's choice is therefore the very token that plain decoding would choose there, and a drafted token stands where it is
that token: it is accepted with probability p(x), and what is emitted in its stead has p without x, renormalised, which
is the rule for tokens drafted without chance (docs/decisions/0025-one-draw-a-position.md).

Order of what is done to logits: Hugging Face's generate (bias, penalties, temperature, top-k, top-p, min-p).

Shapes: V vocabulary, K kept tokens, R rows.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.settings import SamplingSettings

HEAD, SPARE = 1024, 64
"""So many of the likeliest tokens are looked at first (for top-k: that many more than k), and all of them only where
what was not seen might belong: sorting a whole vocabulary costs as much as a small target's step."""


class Sampler:
    """Chooses tokens for one text. `told` grows with what is emitted; rows add what was drafted on their path."""

    def __init__(self, settings: SamplingSettings, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """Raises InputError for a bias on a token that does not exist."""
        unknown = [token for token in settings.biases if not 0 <= token < vocab_size]
        if unknown:
            raise InputError(
                wanted=f"token ids below {vocab_size}",
                got=", ".join(map(str, unknown)),
                where="logit_bias",
                next="eyas inspect TARGET shows the vocabulary's size",
            )
        self.settings = settings
        self.prompt = frozenset(prompt_ids)
        self.counts: Counter[int] = Counter()
        self.emitted = 0

    @property
    def plain_argmax(self) -> bool:
        """Whether a row's choice is its argmax, whatever came before."""
        return self.settings.greedy and not self.settings.adjusts

    def tell(self, tokens: Sequence[int]) -> None:
        """`tokens` are emitted."""
        self.counts.update(tokens)
        self.emitted += len(tokens)

    def choose(self, logits_V: Tensor, drafted: Sequence[int] = ()) -> int:
        """The token after what is emitted and `drafted`. Greedy ties go to the lowest id."""
        settings = self.settings
        if settings.adjusts:
            logits_V = adjusted(logits_V, settings, self.prompt, self.counts + Counter(drafted))
        if settings.greedy:
            return int(logits_V.argmax())
        ids_K, weights_K = kept(logits_V, settings)
        return int(ids_K[draw(weights_K, uniform(settings.seed, self.emitted + len(drafted)))])


def adjusted(logits_V: Tensor, settings: SamplingSettings, prompt: frozenset[int], counts: Counter[int]) -> Tensor:
    """Logits with bias and penalties, float32. `counts` holds the text so far, `prompt` the prompt's tokens.

    The repetition penalty counts prompt and text (Hugging Face, vLLM), the other two the text alone (OpenAI, vLLM).
    """
    logits_V = logits_V.float().clone()
    device = logits_V.device
    if settings.logit_bias:
        biased = torch.tensor(list(settings.biases), device=device)
        logits_V[biased] += torch.tensor(list(settings.biases.values()), device=device)
    if settings.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(prompt | counts.keys()), dtype=torch.long, device=device)
        of_seen = logits_V[seen]
        factor = settings.repetition_penalty
        logits_V[seen] = torch.where(of_seen > 0, of_seen / factor, of_seen * factor)
    if counts and (settings.presence_penalty or settings.frequency_penalty):
        told = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits_V[told] -= settings.presence_penalty + settings.frequency_penalty * times
    return logits_V


def kept(logits_V: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """(ids, weights) [K] of the tokens that may be drawn, float64, not normalised; every weight is above 0."""
    logits_V = logits_V.double()
    # The likeliest at 0 before the division: a temperature near 0 makes the others vanish, and nothing infinite.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / settings.temperature, dim=-1)
    if settings.top_k == 0 and settings.top_p == 1.0:
        ids = torch.arange(len(probabilities_V), device=logits_V.device)
        return _positive(ids, probabilities_V, settings.min_p)
    ids, weights = _nucleus(probabilities_V, settings.top_k, settings.top_p)
    return _positive(ids, weights, settings.min_p)


def _nucleus(probabilities_V: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Ids and probabilities left by top-k, then by top-p of what that left, most likely first, ties by id."""
    size = len(probabilities_V)
    for count in (min(top_k + SPARE if top_k else HEAD, size), size):
        weights, ids = _ordered(probabilities_V, count)
        unseen = float(weights[-1]) if count < size else -1.0
        total = probabilities_V.sum()
        if top_k and top_k < size:
            if float(weights[top_k - 1]) <= unseen:
                continue
            inside = weights >= weights[top_k - 1]
            ids, weights, total, unseen = ids[inside], weights[inside], weights[inside].sum(), -1.0
        inside = weights.cumsum(0) - weights < top_p * total
        if float(weights[inside][-1]) > unseen:
            return ids[inside], weights[inside]
    raise AssertionError("the whole vocabulary leaves nothing unseen")


def _ordered(probabilities_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest probabilities and their ids, equals by id."""
    ids = probabilities_V.topk(count).indices.sort().values
    weights, order = probabilities_V[ids].sort(descending=True, stable=True)
    return weights, ids[order]


def _positive(ids: Tensor, weights: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    inside = (weights > 0) & (weights >= min_p * weights.max())
    return ids[inside], weights[inside]


def draw(weights_K: Tensor, number: float) -> int:
    """The index whose share of the summed weights holds `number`, in [0, 1)."""
    cumulative = weights_K.cumsum(0)
    place = torch.searchsorted(cumulative, cumulative[-1:] * number, right=True)
    return min(int(place), len(weights_K) - 1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to an output position: 53 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
