"""Drafting on a tiny target: a tree is its brute force, whatever drafts changes no token, caches hold what plain
decoding and a fresh prefill would have put there."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.costs import RoundCosts
from eyas.engine.forward import TargetForward
from eyas.engine.generate import Engine
from eyas.engine.propose import DraftProposer, prepared
from eyas.engine.tree import Tree, chain
from eyas.errors import InputError
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target
from eyas.settings import DraftingSettings, SamplingSettings
from replay import BranchingProposer
from test_engine import prompts, random_draft
from tiny import save_tiny_target

COSTS = RoundCosts({0: 1.0, 1: 1.2, 2: 1.3, 3: 1.4}, {0: 1.0, 1: 1.1, 2: 1.15, 3: 1.2})
CHAIN = DraftingSettings(num_steps=3)
TREE = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=8)
WAYS = {
    "chain": CHAIN,
    "tree": TREE,
    "sure": TREE.model_copy(update={"stop_below": 0.01}),
    "adaptive": CHAIN.model_copy(update={"adaptive": True}),
    "mixed": CHAIN.model_copy(update={"ngram": 3}),
    "all": TREE.model_copy(update={"ngram": 3, "adaptive": True}),
}
SAMPLED = SamplingSettings(temperature=0.7, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(params=["float32", "bfloat16"])
def target(folder: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(str(folder), dtype=request.param)


@pytest.fixture
def target32(folder: Path) -> Target:
    return load_target(str(folder))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine_of(
    target: Target, drafting: DraftingSettings, draft: Draft | None = None, kernels: str = "torch", int8: bool = False
) -> Engine:
    draft = draft or random_draft(target)
    return Engine(
        target, draft, drafting=drafting, kernels=kernels, int8=int8, draft_int8=int8, announce=False, costs=COSTS
    )


# Trees


def told(target: Target, draft: Draft, drafting: DraftingSettings, ids: Sequence[int]) -> DraftProposer:
    """A proposer that has been told `ids` but for the last, which follows them."""
    forward = TargetForward(target, draft.config.boundaries)
    forward.cache.reserve(len(ids))
    _, taps = forward.prefill(ids[:-1])
    forward.close()
    proposer = DraftProposer(prepared(draft, target), drafting)
    proposer.reserve(len(ids))
    assert taps is not None
    proposer.observe(taps, ids[1:], 0)
    return proposer


class Beams:
    """SGLang's rule by brute force: every path's distribution by a chain of single rows from a fresh cache."""

    def __init__(self, target: Target, draft: Draft, ids: Sequence[int]) -> None:
        self.target, self.draft, self.ids = target, draft, ids

    def after(self, path: tuple[int, ...]) -> torch.Tensor:
        proposer = told(self.target, self.draft, CHAIN, self.ids)
        proposer.propose(1)
        hidden = proposer.last
        for index, token in enumerate(path):
            hidden = proposer.forward.chain(self.draft.feedback(hidden), [token], proposer.next_row + index)
        return self.draft.logits(hidden)[0, -1].float().softmax(-1)

    def best(self, topk: int, num_steps: int, nodes: int) -> set[tuple[int, ...]]:
        probability: dict[tuple[int, ...], float] = {(): 1.0}
        beam, candidates = [()], list[tuple[int, ...]]()
        for _ in range(num_steps):
            level = []
            for path in beam:
                likeliest = self.after(path).topk(topk)
                for value, token in zip(
                    likeliest.values.tolist(), self.draft.target_ids(likeliest.indices).tolist(), strict=True
                ):
                    level.append((*path, token))
                    probability[level[-1]] = probability[path] * value
            candidates += level
            beam = sorted(level, key=lambda path: -probability[path])[:topk]
        return set(sorted(candidates, key=lambda path: -probability[path])[:nodes])


def paths(tree: Tree) -> set[tuple[int, ...]]:
    rows = range(1, len(tree.tokens) + 1)
    return {tuple(tree.tokens[step - 1] for step in tree.path(row)[1:]) for row in rows}


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "num_hidden_layers": 2}, {"sliding_window": 5}])
@pytest.mark.parametrize(("topk", "num_steps", "rows"), [(2, 3, 8), (3, 3, 12)])
def test_a_drafted_tree_is_that_of_brute_force(
    target32: Target, options: dict, topk: int, num_steps: int, rows: int
) -> None:
    draft = random_draft(target32, **options)
    ids = prompts(4)[3]
    drafting = DraftingSettings(num_steps=num_steps, topk=topk, num_draft_tokens=rows)
    tree = told(target32, draft, drafting, ids).propose(num_steps)
    assert paths(tree) == Beams(target32, draft, ids).best(topk, num_steps, rows - 1)


def test_one_branch_is_the_chain(target: Target) -> None:
    draft = random_draft(target)
    for ids in prompts(2):
        drafted = told(target, draft, CHAIN, [5, *ids]).propose(3)
        grown = told(target, draft, CHAIN.model_copy(update={"stop_below": 1e-30}), [5, *ids]).propose(3)
        assert drafted == grown
        assert drafted.is_chain
        assert len(drafted.tokens) == 3


def test_a_draft_stops_where_it_is_unsure(target32: Target) -> None:
    draft, ids = random_draft(target32), prompts(2)[1]
    whole = told(target32, draft, CHAIN, ids).propose(3)
    sure, probability = [], 1.0
    beams = Beams(target32, draft, ids)
    for step in range(3):
        probability *= float(beams.after(whole.tokens[:step]).max())
        sure.append(probability)
    for depth in range(3):
        stop = CHAIN.model_copy(update={"stop_below": (sure[depth] * 0.99)})
        assert told(target32, draft, stop, ids).propose(3) == chain(whole.tokens[: depth + 1])
    assert told(target32, draft, CHAIN.model_copy(update={"stop_below": 0.99}), ids).propose(3) == Tree()


# Texts


@pytest.mark.parametrize(
    ("kernels", "precision", "way"),
    [("torch", "float32", way) for way in WAYS]
    + [("torch", "bfloat16", way) for way in ("chain", "tree")]
    + [("torch", "int8", "all")]
    + [("auto", precision, way) for precision in ("float32", "bfloat16", "int8") for way in ("tree", "all")],
)
def test_no_way_of_drafting_changes_a_token(folder: Path, kernels: str, precision: str, way: str) -> None:
    int8 = precision == "int8"
    target = load_target(str(folder), dtype="bfloat16" if int8 else precision)
    engine = engine_of(target, WAYS[way], kernels=kernels, int8=int8)
    assert engine.facts.lossless
    for prompt in prompts(3)[1:]:
        for sampling in (SamplingSettings(), SAMPLED):
            plain = engine.generate(prompt, 24, 0, ignore_eos=True, sampling=sampling)
            fast = engine.generate(prompt, 24, 3, ignore_eos=True, sampling=sampling)
            assert fast.ids == plain.ids
            assert len(fast.rounds) == len(fast.depths)
            assert plain.depths == (0,) * 23


def test_ngrams_alone_need_no_draft(target32: Target) -> None:
    engine = Engine(target32, drafting=CHAIN.model_copy(update={"ngram": 3}), kernels="torch", announce=False)
    accepted = 0
    for prompt in prompts(5):
        plain = engine.generate(prompt, 48, 0, ignore_eos=True)
        fast = engine.generate(prompt, 48, 3, ignore_eos=True)
        assert fast.ids == plain.ids
        accepted += sum(fast.rounds)
    assert accepted > 0


@pytest.mark.parametrize("period", [2, 5])
def test_a_path_beside_the_first_branch_is_kept_right(target: Target, period: int) -> None:
    drafting = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=10)
    engine = engine_of(target, drafting)
    for prompt in (prompts(4)[2], (prompts(5)[2] * 300)[:238]):
        plain = engine.generate(prompt, 40, 0, ignore_eos=True)
        rows = len(prompt) + 34
        before = [engine.forward.cache.keys[layer][:, :, :rows].clone() for layer in range(8)]
        engine.proposer = BranchingProposer(plain.ids, len(prompt), 259, lambda i: i % period == 0)
        fast = engine.generate(prompt, 40, 3, ignore_eos=True)
        assert fast.ids == plain.ids
        assert max(fast.rounds) > 0
        for layer in range(8):
            assert torch.equal(engine.forward.cache.keys[layer][:, :, :rows], before[layer])


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("way", ["tree", "adaptive", "all"])
def test_the_draft_cache_is_that_of_a_fresh_prefill(target32: Target, way: str, kernels: str) -> None:
    draft, prompt = random_draft(target32), prompts(8)[6]
    engine = engine_of(target32, WAYS[way], draft, kernels)
    text = engine.generate(prompt, 40, 3, ignore_eos=True).ids
    proposer = engine.proposer
    if isinstance(proposer, AdaptiveProposer):
        proposer = proposer.draft
    assert isinstance(proposer, DraftProposer)
    rows, ids = proposer.next_row, [*prompt, *text]
    assert rows > len(prompt)
    _, taps = engine.forward.prefill(ids[:rows])
    fresh = DraftProposer(draft)
    fresh.reserve(rows)
    assert taps is not None
    fresh.observe(taps, ids[1 : rows + 1], 0)
    fresh.propose(1)
    for layer, keys in fresh.cache.keys.items():
        torch.testing.assert_close(proposer.cache.keys[layer][:, :, :rows], keys[:, :, :rows], atol=1e-4, rtol=1e-4)


def test_a_text_goes_on_round_by_round(target32: Target) -> None:
    engine = engine_of(target32, TREE)
    prompt = prompts(3)[2]
    whole = engine.generate(prompt, 20, 3, ignore_eos=True)
    text = engine.begin(prompt, 20, 3, ignore_eos=True)
    lengths = [len(text.ids)]
    while text.finish is None:
        verdict = engine.round(text)
        lengths.append(len(text.ids))
        assert lengths[-1] - lengths[-2] == len(verdict.tokens) >= 1
    got = text.generation()
    assert (got.ids, got.rounds, got.depths, got.finish) == (whole.ids, whole.rounds, whole.depths, "length")
    assert got.accept_length == pytest.approx(1 + sum(got.survival))


def test_simulated_texts_are_marked_and_follow_the_curve(target32: Target) -> None:
    engine = engine_of(target32, CHAIN.model_copy(update={"simulate": (0.9, 0.7, 0.4)}))
    runs = [
        engine.generate(prompt, 150, 3, sampling=SamplingSettings(seed=seed)) for seed, prompt in enumerate(prompts(3))
    ]
    assert not any(run.valid for run in runs)
    assert all((len(run.ids), run.finish) == (150, "length") for run in runs)
    rounds = [n for run in runs for n in run.rounds]
    assert 1 + sum(rounds) / len(rounds) == pytest.approx(3.0, abs=0.25)
    assert engine.generate(prompts(1)[0], 20, 0).valid


# Bad input


def test_a_cache_too_small_is_refused(target32: Target) -> None:
    engine = Engine(target32, random_draft(target32), drafting=TREE, kernels="torch", announce=False, cache_rows=60)
    assert len(engine.generate([5] * 20, 32, 3, ignore_eos=True).ids) == 32
    with pytest.raises(InputError, match="a cache of 61 rows"):
        engine.generate([5] * 20, 33, 3)


def test_a_draft_that_does_not_fit_is_refused_with_its_finding(target32: Target, tmp_path: Path) -> None:
    narrow = load_target(str(save_tiny_target(tmp_path / "narrow", hidden=32)))
    wordy = load_target(str(save_tiny_target(tmp_path / "wordy", vocab=300)))
    for other, code in ((narrow, "shape_mismatch"), (wordy, "vocab_mismatch")):
        with pytest.raises(InputError) as caught:
            engine_of(target32, CHAIN, random_draft(other))
        assert caught.value.code == code
        assert code in caught.value.as_dict()["got"]


def test_settings_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="has 4 num_draft_tokens"):
        DraftingSettings(num_steps=3, num_draft_tokens=5)
    with pytest.raises(ValueError, match="has 21 num_draft_tokens at most"):
        DraftingSettings(num_steps=2, topk=4, num_draft_tokens=22)
    assert DraftingSettings(num_steps=2, topk=4, num_draft_tokens=21).rows(2) == 21
    with pytest.raises(ValueError, match="shapes a tree"):
        DraftingSettings(num_draft_tokens=5)
    with pytest.raises(ValueError, match="never rises"):
        DraftingSettings(simulate=(0.5, 0.6))
    assert DraftingSettings(num_steps=3, num_draft_tokens=4).rows(2) == 3
    assert [TREE.rows(depth) for depth in (1, 2, 3)] == [4, 8, 8]
