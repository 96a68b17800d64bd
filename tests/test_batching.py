"""Several texts at once: whoever comes, goes or is cancelled beside it, a text is that of its lone run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.batch_costs import BatchCosts
from eyas.engine.batching import End, Job, Outcome, Scheduler
from eyas.engine.cache import KVCache
from eyas.engine.cache_pool import CachePool
from eyas.engine.forward import TargetForward
from eyas.engine.generate import Engine
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.native_build import load_native
from eyas.engine.rows import TextRows
from eyas.engine.together import settle_texts
from eyas.engine.verify import Verdict, Walk
from eyas.models.target import load_target
from eyas.settings import DraftingSettings, SamplingSettings
from test_adapt import MadeUpDraft
from test_drafting import COSTS
from test_engine import random_draft
from tiny import save_tiny_target

WAYS = {
    "plain": DraftingSettings(num_steps=1),
    "n-grams": DraftingSettings(num_steps=3, ngram=3),
    "chain": DraftingSettings(num_steps=3),
    "tree, adaptive, n-grams": DraftingSettings(num_steps=3, topk=3, num_draft_tokens=8, ngram=3, adaptive=True),
}
SAMPLED = SamplingSettings(temperature=0.8, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(eq=False)
class Listener:
    """Keeps what it is told; asks to stop after `patience` tokens."""

    patience: int = 10**6
    ids: list[int] = field(default_factory=list)
    notes: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None
    outcome: Outcome | None = None
    error: str | None = None

    def tokens(self, verdict: Verdict, notes: Sequence[TokenLogprob]) -> bool:
        assert self.end is None, "nothing follows the end"
        self.ids += verdict.tokens
        self.notes += notes
        return len(self.ids) >= self.patience

    def ended(self, end: End, outcome: Outcome | None, error: str | None) -> None:
        assert self.end is None, "a text ends once"
        self.end, self.outcome, self.error = end, outcome, error


def engine_of(folder: Path, way: str, *, native: bool, precision: str = "float32") -> Engine:
    target = load_target(str(folder), dtype=precision)
    draft = random_draft(target) if way in ("chain", "tree, adaptive, n-grams") else None
    return Engine(target, draft, drafting=WAYS[way], kernels="auto" if native else "torch", announce=False, costs=COSTS)


def prompt(length: int, seed: int, shared: int = 0) -> tuple[int, ...]:
    """Random ids, the first `shared` of them everybody's."""
    draws = (torch.randint(3, 259, (size,), generator=torch.Generator().manual_seed(s)).tolist()
             for size, s in ((shared, 0), (length - shared, seed + 1)))  # fmt: skip
    return tuple(token for part in draws for token in part)


def run(scheduler: Scheduler, arrivals: dict[int, list[Job]], cancels: dict[int, list[Job]]) -> None:
    step = 0
    while step <= max([*arrivals, *cancels]) or not scheduler.idle:
        for job in arrivals.get(step, ()):
            scheduler.submit(job)
        for job in cancels.get(step, ()):
            scheduler.cancel(job)
        scheduler.step()
        step += 1
        assert step < 3000, "every text ends"


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "plain path"])
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_lone_runs_under_random_arrivals_and_cancellations(
    folder: Path, way: str, native: bool
) -> None:
    if native and isinstance(load_native(), str):
        pytest.skip("no compiled kernels here")
    engine = engine_of(folder, way, native=native)
    depth = engine.num_steps if engine.proposer is not None else 0
    shapes = [
        (20, 40, 0),
        (150, 12, 0),
        (300, 30, 140),
        (290, 9, 140),
        (5, 60, 0),
        (64, 33, 30),
        (64, 25, 30),
        (31, 1, 0),
    ]
    alone = []
    for index, (length, limit, shared) in enumerate(shapes):
        sampling = SAMPLED if index % 3 == 2 else SamplingSettings()
        ids = prompt(length, index, shared)
        alone.append((ids, limit, sampling, engine.generate(ids, limit, depth, True, sampling=sampling).ids))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        scheduler = Scheduler(engine, cache_rows=2048, most=5)
        jobs = [Job(ids, limit, Listener(), depth, True, sampling) for ids, limit, sampling, _ in alone]
        at = torch.randint(25, (2, len(jobs)), generator=generator).tolist()
        doomed = set(torch.randperm(len(jobs), generator=generator)[:3].tolist())
        arrivals: dict[int, list[Job]] = {}
        cancels: dict[int, list[Job]] = {}
        for index, job in enumerate(jobs):
            arrivals.setdefault(at[0][index], []).append(job)
            if index in doomed:
                cancels.setdefault(at[0][index] + at[1][index], []).append(job)
        run(scheduler, arrivals, cancels)
        for index, job in enumerate(jobs):
            listener, expected = job.reader, alone[index][3]
            assert isinstance(listener, Listener)
            if listener.end == "done":
                assert tuple(listener.ids) == expected
            else:
                assert index in doomed and listener.end == "cancelled"
                assert tuple(listener.ids) == expected[: len(listener.ids)]
        assert scheduler.pool.used == [] and scheduler.seats == []
    engine.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_rows_have_the_bits_of_the_lone_forward_whatever_stands_beside_them(
    folder: Path, precision: str
) -> None:
    if isinstance(load_native(), str):
        pytest.skip("no compiled kernels here")
    engine = engine_of(folder, "chain", native=True, precision=precision)
    forward, texts, alone = engine.forward, [], []
    for index, (length, rows, parents) in enumerate(
        [(9, 1, None), (200, 4, (-1, 0, 0, 2)), (270, 3, None), (40, 2, None)]
    ):
        forward.cache = place = CachePool(2048, 1, forward.cache.dtype).take((), length + 8).cache  # pyrefly: ignore
        ids = prompt(length + rows, index)
        forward.prefill(ids[:length])
        states = forward.verify(ids[length:], length, parents)
        alone.append((forward.logits(states), forward.taps()))
        texts.append(TextRows(place, ids[length:], length, parents))
    for (logits, verified), (expected, taps) in zip(forward.verify_texts(texts), alone, strict=True):
        assert torch.equal(logits, expected)
        assert torch.equal(verified.taps(), taps)
        assert torch.equal(verified.taps([0]), taps[:, :1])


def test_a_shared_beginning_is_computed_once(folder: Path) -> None:
    engine = engine_of(folder, "chain", native=not isinstance(load_native(), str))
    if isinstance(engine.forward, TargetForward):
        pytest.skip("the plain path shares whole chunks of 512 only")
    scheduler = Scheduler(engine, cache_rows=4096)
    first, second = (Job(prompt(200, seed, 150), 20, Listener(), 3) for seed in (1, 2))
    run(scheduler, {0: [first], 100: [second]}, {})
    expected = engine.generate(second.prompt, 20, 3).ids
    assert tuple(second.reader.ids) == expected  # pyrefly: ignore
    assert (first.reader.outcome.cached_tokens, second.reader.outcome.cached_tokens) == (0, 150)  # pyrefly: ignore
    assert scheduler.totals.cached_tokens == 150


def test_what_does_not_fit_waits_and_what_never_fits_is_refused(folder: Path) -> None:
    engine = engine_of(folder, "plain", native=False)
    scheduler = Scheduler(engine, cache_rows=512)
    small = [Job(prompt(200, seed), 20, Listener(), 0, True) for seed in range(3)]
    large = Job(prompt(200, 9), 400, Listener())
    over = Job(prompt(1024, 9), 1, Listener())
    for job in (*small[:2], large, small[2], over):
        scheduler.submit(job)
    scheduler.step()
    assert len(scheduler.seats) == 2 and scheduler.pool.rows_used == 512
    run(scheduler, {}, {0: []})
    assert [job.reader.end for job in small] == ["done"] * 3  # pyrefly: ignore
    assert large.reader.end == over.reader.end == "refused"  # pyrefly: ignore
    assert "of 512 in all" in large.reader.error and "1 to 1023 tokens" in over.reader.error  # pyrefly: ignore


def test_a_fault_of_one_text_ends_it_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, "n-grams", native=False)
    scheduler = Scheduler(engine, cache_rows=1024)
    jobs = [Job(prompt(20, seed), 30, Listener(), 3, True) for seed in range(2)]
    expected = engine.generate(jobs[0].prompt, 30, 3, True).ids
    for job in jobs:
        scheduler.submit(job)
    for _ in range(4):
        scheduler.step()
    seat = next(seat for seat in scheduler.seats if seat.job is jobs[1])

    def broken(tree: object, logits_RV: object) -> Walk:
        raise ArithmeticError("nothing to draw from")

    monkeypatch.setattr(seat.text.judge, "walk", broken)
    run(scheduler, {}, {0: []})
    assert (jobs[1].reader.end, jobs[1].reader.error) == (  # pyrefly: ignore
        "failed",
        "ArithmeticError: nothing to draw from",
    )
    assert tuple(jobs[0].reader.ids) == expected and scheduler.pool.used == []  # pyrefly: ignore


def test_a_reader_can_end_its_text(folder: Path) -> None:
    engine = engine_of(folder, "plain", native=False)
    scheduler = Scheduler(engine, cache_rows=512)
    job = Job(prompt(20, 1), 100, Listener(patience=7), 0, True)
    run(scheduler, {0: [job]}, {})
    assert (job.reader.end, len(job.reader.ids)) == ("halted", 7)  # pyrefly: ignore


def test_notes_are_the_targets_own_probabilities(folder: Path) -> None:
    engine = engine_of(folder, "n-grams", native=False)
    scheduler = Scheduler(engine, cache_rows=512)
    job = Job(prompt(20, 1), 40, Listener(), 3, True, logprobs=3)
    run(scheduler, {0: [job]}, {})
    listener = job.reader
    assert isinstance(listener, Listener)
    ids = [*job.prompt, *listener.ids]
    engine.close()
    logits = engine.target.model(torch.tensor([ids])).logits[0, len(job.prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, dim=-1)
    assert [note.token for note in listener.notes] == listener.ids
    for row, note in enumerate(listener.notes):
        assert note.logprob == pytest.approx(float(expected[row, note.token]), abs=1e-3)
        assert [value for _, value in note.top] == pytest.approx(expected[row].topk(3).values.tolist(), abs=1e-3)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600)), min_size=1, max_size=12))
def test_the_pool_never_exceeds_its_budget_and_shares_only_what_is_the_same(
    asked: list[tuple[int, int]],
) -> None:
    pool = CachePool(1536, 1, torch.float32)
    places = []
    for seed, length in asked:
        ids = prompt(length, seed, length // 2)
        place = pool.take(ids, length + 10)
        if place is None:
            pool.release(places.pop(0))
            continue
        pool.share(place)
        assert place.filled < length
        place.filled = length
        places.append(place)
        assert pool.rows_used + pool.rows_remembered <= 1536
    for place in places:
        pool.release(place)
    assert pool.used == [] and pool.rows_remembered <= 1536


def test_costs_of_a_batch_are_read_off_the_measured_sizes() -> None:
    drafting = DraftingSettings(num_steps=2)
    costs = BatchCosts({1: 1.0, 2: 1.0, 4: 2.0, 8: 3.0, 16: 6.0}, {1: {1: 0.25}, 2: {1: 0.5}}, drafting, row=0.3)
    alone, eight = costs.of(1), costs.of(8)
    assert alone.draft == {0: 1.0, 1: 1.25, 2: 2.0} and alone.ngram == {0: 1.0, 1: 1.0, 2: 1.5}
    assert eight.draft == {0: 1.0, 1: (6.0 + 2.0) / 3, 2: (9.0 + 4.0) / 3} and eight.ngram[1] == 2.0
    padded = BatchCosts({3: 1.0, 6: 1.5, 12: 2.0}, {1: {1: 0.25}, 2: {1: 0.5, 4: 1.0}}, drafting, bucket=3).of(4)
    assert alone.row == 0.3 and eight.row == pytest.approx(0.1)
    assert padded.draft == {0: 1.0, 1: 1.5, 2: 1.5} and padded.ngram == {0: 1.0, 1: 1.0, 2: 1.0}, "rows are padding"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_texts_that_share_a_plain_forward_have_the_bits_of_lone_ones(folder: Path, precision: str) -> None:
    engine = engine_of(folder, "chain", native=False, precision=precision)
    forward, texts, alone = engine.forward, [], []
    settle_texts(forward, 5)
    shapes = [(9, 1, None), (200, 4, (-1, 0, 0, 2)), (254, 4, None), (40, 2, None), (255, 4, (-1, 0, 1, 0))]
    for index, (length, rows, parents) in enumerate(shapes):
        cache = KVCache(forward.cache.dtype)
        cache.reserve(length + 8)
        forward.cache = cache
        ids = prompt(length + rows, index)
        forward.prefill(ids[:length])
        texts.append(TextRows(cache, ids[length:], length, parents))
    for text in texts:
        forward.cache = text.cache
        alone.append((forward.logits(forward.verify(text.ids, text.start, text.parents)), forward.taps()))
    forward.together = forward.together if forward.together != 1 else 5
    for count in range(2, 6):
        for (logits, verified), (expected, taps) in zip(forward.verify_texts(texts[:count]), alone, strict=False):
            assert torch.equal(logits, expected) and torch.equal(verified.taps(), taps)
            assert torch.equal(verified.taps([0]), taps[:, :1])


def test_texts_whose_bits_would_change_side_by_side_take_turns(folder: Path, capsys: pytest.CaptureFixture) -> None:
    engine = engine_of(folder, "plain", native=False)

    def off(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-6 * (len(output) - 1)

    engine.target.final_norm.register_forward_hook(off)
    settle_texts(engine.forward, 4)
    assert engine.forward.together == 1 and "in turn" in capsys.readouterr().err


@pytest.mark.parametrize(("texts", "depth"), [(1, 2), (4, 1), (8, 0)])
def test_the_depth_that_pays_for_one_text_is_not_that_for_eight(texts: int, depth: int) -> None:
    verify = {1: 1.0, 2: 1.02, 4: 1.1, 8: 1.3, 16: 2.1, 32: 4.0}
    costs = BatchCosts(verify, {1: {1: 0.02}, 2: {1: 0.04}}, DraftingSettings(num_steps=2)).of(texts)
    proposer = AdaptiveProposer(MadeUpDraft(), None, costs)
    proposer.begin()
    proposer.propose(1)
    for index in range(400):  # four of ten are accepted; a second one after it as often
        proposer.arms["draft"].survival.learn(2, (1, 0, 2, 0, 0)[index % 5])
    proposer.price(costs, texts)
    proposer.arms["draft"].aside = 0
    assert proposer.propose(2).depth == depth


def test_a_text_is_priced_for_all_that_are_seated_though_their_prompts_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[int] = []
    price = AdaptiveProposer.price
    monkeypatch.setattr(
        AdaptiveProposer, "price", lambda own, costs, texts: priced.append(texts) or price(own, costs, texts)
    )
    engine = engine_of(folder, "tree, adaptive, n-grams", native=False)
    scheduler = Scheduler(engine, cache_rows=4096, most=3)
    for length in (5, scheduler.chunk + 5):  # the second prompt takes two turns
        scheduler.submit(Job(prompt(length, 0), 4, Listener(), 3, ignore_eos=True))
    scheduler.step()
    assert [seat.prefilled for seat in scheduler.seats] == [True, False]
    assert priced == [2]


def test_rounds_of_a_lone_text_are_priced_by_the_engines_own_start_alone(folder: Path) -> None:
    engine = engine_of(folder, "tree, adaptive, n-grams", native=True)
    assert engine.facts.path == "compiled"
    assert [len(Scheduler(engine, cache_rows=512, most=most).costs) for most in (1, 2)] == [0, 2]
