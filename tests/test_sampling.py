"""Sampling keeps the target's distribution whatever is drafted: literal filters, Hugging Face's own processors as the
oracle of one row, chi-square over whole texts, and wrong rules that the same chi-square refuses."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.engine.sampling import Sampler, draw, kept, uniform
from eyas.engine.tree import Node, Tree, grow
from eyas.engine.verify import CurveJudge, TargetJudge, Walk, cut
from eyas.errors import InputError
from eyas.settings import SamplingSettings

VOCAB, LENGTH, TEXTS = 6, 3, 1500
DRAFT_VOCAB = (0, 2, 3)
PROMPT = (1, 4)

SETTINGS = {
    "temperature": SamplingSettings(temperature=0.8),
    "top_k": SamplingSettings(temperature=1.3, top_k=3),
    "top_p": SamplingSettings(temperature=1.1, top_p=0.7),
    "min_p": SamplingSettings(temperature=1.0, min_p=0.3),
    "repetition": SamplingSettings(temperature=1.0, repetition_penalty=1.8),
    "presence": SamplingSettings(temperature=1.0, presence_penalty=1.5),
    "frequency": SamplingSettings(temperature=1.0, frequency_penalty=1.0),
    "bias": SamplingSettings(temperature=1.0, logit_bias={"0": 1.0, "5": -2.0}),
    "all": SamplingSettings(
        temperature=0.9,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={"1": 0.5},
    ),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


# A target and a draft of a few tokens: the next token depends on the last alone.

TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)) * 1.2
DRAFT = (TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)) * 0.5).softmax(-1)


def drafted(last: int, topk: int, num_steps: int) -> Tree:
    """Chain or tree, of the tokens that the draft can say."""

    def expand(frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        rows = [DRAFT[token] for token in ([node.token for node in frontier] or [last])]
        return [sorted(((t, float(row[t])) for t in DRAFT_VOCAB), key=lambda pair: -pair[1])[:topk] for row in rows]

    return grow(expand, topk, num_steps, nodes=5)


def hugging_face(logits_V: Tensor, settings: SamplingSettings, history: Sequence[int]) -> Tensor:
    """Probabilities [V] by transformers' processors in transformers' order; penalties OpenAI has, written out."""
    ids, text = torch.tensor([list(history)]), history[len(PROMPT) :]
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if settings.logit_bias:
        before.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in settings.biases.items()]))
    if settings.repetition_penalty != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    after.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        after.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        after.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        after.append(MinPLogitsWarper(settings.min_p))
    scores = before(ids, logits_V[None].clone())
    for token in set(text):
        scores[0, token] -= settings.presence_penalty + settings.frequency_penalty * text.count(token)
    return after(ids, scores.double())[0].softmax(-1)


def expected_texts(settings: SamplingSettings) -> dict[tuple[int, ...], float]:
    probability = {}
    for text in product(range(VOCAB), repeat=LENGTH):
        probability[text] = 1.0
        for index, token in enumerate(text):
            history = (*PROMPT, *text[:index])
            probability[text] *= float(hugging_face(TARGET[history[-1]], settings, history)[token])
    return probability


WalkRule = Callable[[Tree, Tensor, Sampler], Walk]


def by_engine(tree: Tree, logits_RV: Tensor, sampler: Sampler) -> Walk:
    return TargetJudge(sampler).walk(tree, logits_RV)


def write(settings: SamplingSettings, topk: int, num_steps: int, rule: WalkRule) -> tuple[int, ...]:
    sampler = Sampler(settings, PROMPT, VOCAB)
    text: list[int] = []
    while len(text) < LENGTH:
        last = text[-1] if text else PROMPT[-1]
        tree = drafted(last, topk, num_steps) if num_steps else Tree()
        verdict = cut(rule(tree, TARGET[[last, *tree.tokens]], sampler), (), LENGTH - len(text))
        sampler.tell(verdict.tokens)
        text += verdict.tokens
    return tuple(text)


def chi_square(settings: SamplingSettings, topk: int, num_steps: int, rule: WalkRule = by_engine) -> float:
    """p-value of TEXTS texts under the target's own distribution; rare texts are counted together."""
    found = Counter(write(settings.model_copy(update={"seed": seed}), topk, num_steps, rule) for seed in range(TEXTS))
    cells: list[tuple[float, int]] = []
    rare, rare_found = 0.0, 0
    for text, probability in expected_texts(settings).items():
        if probability == 0:
            assert found[text] == 0, f"{text} cannot occur"
        elif probability * TEXTS < 5:
            rare, rare_found = rare + probability, rare_found + found[text]
        else:
            cells.append((probability, found[text]))
    if rare * TEXTS >= 1:
        cells.append((rare, rare_found))
    statistic = sum((count - TEXTS * p) ** 2 / (TEXTS * p) for p, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 2), (3, 2)], ids=["chain", "tree"])
def test_texts_have_the_targets_distribution(name: str, topk: int, num_steps: int) -> None:
    assert chi_square(SETTINGS[name], topk, num_steps) > 1e-3


def one_by_one(tree: Tree, logits_RV: Tensor, sampler: Sampler, *, wrong: str = "") -> Walk:
    """The textbook's rule: siblings are tried in turn, each with its probability among what is left, and the remainder
    is renormalised without them. `wrong` breaks it in one place."""
    rows, tokens, tries = [0], list[int](), 0

    def number() -> float:
        nonlocal tries
        tries += 1
        return uniform(sampler.settings.seed, 1000 * (sampler.emitted + 1) + tries)

    while True:
        row, before = rows[-1], [] if wrong == "history of the root" else tokens
        history = [*PROMPT, *sampler.counts.elements(), *before]
        left = hugging_face(logits_RV[row], sampler.settings, history)
        whole = left.clone()
        children = [index + 1 for index, parent in enumerate(tree.parents) if parent == row]
        for child in children:
            token = tree.tokens[child - 1]
            total = 1.0 if wrong == "siblings against the whole" else float(left.sum())
            if number() * total < float(left[token]):
                rows.append(child)
                tokens.append(token)
                break
            left[token] = 0.0
        else:
            rest = whole if wrong == "rejected tokens drawn again" else left
            tokens.append(int(rest.nonzero()[draw(rest[rest > 0], number()), 0]))
            return Walk(tuple(rows), tuple(tokens))


def wrongly(wrong: str) -> WalkRule:
    return lambda tree, logits, sampler: one_by_one(tree, logits, sampler, wrong=wrong)


@pytest.mark.parametrize("topk", [1, 3])
def test_the_textbook_rule_gives_the_same_distribution(topk: int) -> None:
    assert chi_square(SETTINGS["temperature"], topk, 2, wrongly("")) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "name", "topk"),
    [
        ("rejected tokens drawn again", "temperature", 1),
        ("rejected tokens drawn again", "temperature", 3),
        ("siblings against the whole", "temperature", 3),
        ("history of the root", "frequency", 1),
        ("history of the root", "presence", 3),
    ],
)
def test_a_wrong_rule_is_refused(wrong: str, name: str, topk: int) -> None:
    assert chi_square(SETTINGS[name], topk, 2, wrongly(wrong)) < 1e-6


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_seed_gives_the_same_text_whatever_is_drafted(name: str) -> None:
    for seed in range(30):
        settings = SETTINGS[name].model_copy(update={"seed": seed})
        texts = {write(settings, topk, num_steps, by_engine) for topk, num_steps in ((1, 0), (1, 1), (1, 3), (3, 2))}
        assert len(texts) == 1


# One row


def weights(logits: list[float], **settings: object) -> dict[int, float]:
    ids, values = kept(torch.tensor(logits), SamplingSettings(temperature=1.0, **settings))
    return {int(i): round(float(v / values.sum()), 3) for i, v in zip(ids, values, strict=True)}


LOGITS = [0.0, 3.0, 1.0, 2.0, 1.0]


def test_filters_keep_these_tokens() -> None:
    assert weights(LOGITS) == {0: 0.029, 1: 0.592, 2: 0.08, 3: 0.218, 4: 0.08}
    assert weights(LOGITS, top_k=2).keys() == {1, 3}
    assert weights(LOGITS, top_k=3).keys() == {1, 2, 3, 4}, "equals of the k-th stay"
    assert weights(LOGITS, top_p=0.5).keys() == {1}
    assert weights(LOGITS, top_p=0.8).keys() == {1, 3}
    assert weights(LOGITS, top_p=0.85).keys() == {1, 2, 3}, "of equals the lowest id"
    assert weights(LOGITS, min_p=0.3).keys() == {1, 3}
    assert weights(LOGITS, top_k=2, top_p=0.6).keys() == {1}, "top-p counts within what top-k left"


@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, 7),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_one_row_is_hugging_faces(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    settings = SamplingSettings(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, values = kept(logits, settings)
    ours = torch.zeros(40, dtype=torch.float64)
    ours[ids] = values / values.sum()
    torch.testing.assert_close(ours, hugging_face(logits, settings, PROMPT))


def test_a_large_vocabulary_is_cut_as_a_sorted_one() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    for top_k, top_p in ((0, 0.2), (0, 0.97), (50, 1.0), (2000, 0.9), (30, 0.5), (5000, 0.5)):
        settings = SamplingSettings(temperature=1.0, top_k=top_k, top_p=top_p)
        ids, values = kept(logits, settings)
        probabilities = logits.double().softmax(0)
        ranked = sorted(range(5000), key=lambda i: (-float(logits[i]), i))
        if top_k:
            ranked = [i for i in ranked if logits[i] >= logits[ranked[top_k - 1]]]
        total, before, wanted = float(probabilities[ranked].sum()), 0.0, []
        for i in ranked:
            if before >= top_p * total - 1e-12:
                break
            wanted.append(i)
            before += float(probabilities[i])
        assert abs(len(ids) - len(wanted)) <= 1
        assert ids.tolist()[: len(wanted) - 1] == wanted[:-1]
        assert bool((values > 0).all())


def test_greedy_is_the_lowest_of_the_likeliest_after_bias_and_penalties() -> None:
    logits = torch.tensor([1.0, 5.0, 5.0, 4.0])

    def choose(drafted: Sequence[int] = (), **settings: object) -> int:
        return Sampler(SamplingSettings(**settings), [3], 4).choose(logits, drafted)

    assert choose() == 1
    assert choose(logit_bias={"0": 4.5}) == 0
    assert choose([1], presence_penalty=0.5) == 2
    assert choose([1, 2], presence_penalty=0.5) == 1
    assert choose([1, 1, 2], frequency_penalty=0.5) == 2
    assert choose([1, 2], repetition_penalty=2.0) == 1, "2.5, 2.5, and the prompt's 3 has 2.0"
    assert choose([1, 2], frequency_penalty=2.0) == 3, "the prompt is not counted"


def test_a_temperature_near_zero_draws_the_likeliest_and_overflows_nowhere() -> None:
    logits = torch.tensor([3.0, 50_000.0, -7.0])
    for temperature in (5e-324, 1e-300, 1e-3):
        ids, weights = kept(logits, SamplingSettings(temperature=temperature, top_p=5e-324))
        assert (ids.tolist(), weights.tolist()) == ([1], [1.0])


def test_a_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="below 4"):
        Sampler(SamplingSettings(logit_bias={"4": 1.0}), [1], 4)


def test_a_number_of_a_place_is_uniform_and_its_own() -> None:
    numbers = torch.tensor([uniform(seed, place) for seed in range(40) for place in range(50)])
    assert uniform(0, 0) == uniform(0, 0)
    assert len(set(numbers.tolist())) == 2000
    assert torch.histc(numbers, 10, 0, 1).tolist() == pytest.approx([200] * 10, abs=50)
    assert draw(torch.tensor([0.25, 0.5, 0.25]), 0.0) == 0
    assert draw(torch.tensor([0.25, 0.5, 0.25]), 0.25) == 1
    assert draw(torch.tensor([0.25, 0.5, 0.25]), 0.9999) == 2


def test_simulated_acceptance_follows_its_curve_and_says_so() -> None:
    judge = CurveJudge([0.8, 0.5, 0.1])
    assert (judge.valid, TargetJudge(Sampler(SamplingSettings(), [], 9)).valid) == (False, True)
    tree = Tree((5, 6, 7, 8), (0, 0, 2, 3))
    logits = torch.eye(9)[[0, 1, 2, 3, 4]]
    walks = [judge.walk(tree, logits) for _ in range(2000)]
    shares = [sum(walk.accepted >= level for walk in walks) / 2000 for level in (1, 2, 3)]
    assert shares == pytest.approx([0.8, 0.5, 0.1], abs=0.04)
    assert {walk.accepted: walk for walk in walks} == {
        0: Walk((0,), (0,)),
        1: Walk((0, 2), (6, 2)),
        2: Walk((0, 2, 3), (6, 7, 3)),
        3: Walk((0, 2, 3, 4), (6, 7, 8, 4)),
    }
