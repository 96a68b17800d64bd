"""Evaluation: the walk is what the engine does, and the figures are what their names say."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.shards import CaptureReader, Sample
from eyas.engine.generate import Engine
from eyas.errors import InputError
from eyas.models.checkpoint import load_draft
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target
from eyas.models.vocab import target_ids
from eyas.recipe import DraftSettings, EvaluateSettings, TargetSettings, TrainSettings
from eyas.training.evaluate import Chains, Tally, add_sample, chains, continuation, evaluate, walk
from eyas.training.loop import train
from eyas.training.teacher import Teacher
from made_captures import BOUNDARIES, captured, greedy_answer, make_samples, poisoned, with_two_answers, write_captures


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target: Target, tiny_target: Path) -> tuple[Path, Path]:
    """Captures and a draft that has half learned them: chains of every length occur."""
    root = tmp_path_factory.mktemp("evaluate")
    captures = write_captures(root / "captures", target, make_samples(target, 12, 6, limit=30))
    settings = TrainSettings(epochs=60, batch_tokens=128, ttt_length=3, learning_rate=3e-3, precision="float32")
    train(captures, root / "draft", settings, DraftSettings(vocab_size=200), TargetSettings(name=str(tiny_target)))
    return captures, root / "draft"


@pytest.fixture(scope="module")
def draft(folders: tuple[Path, Path], target: Target) -> Draft:
    return load_draft(folders[1], target.embedding)[0]


def chains_of(accepts: list[int], steps: int, inside: int) -> Chains:
    """Chains in which row r accepts accepts[r] tokens; the last rows reach beyond an answer of `inside` drafts."""
    hits = torch.tensor([[step < accept for step in range(steps)] for accept in accepts])
    true = torch.ones_like(hits)
    within = torch.tensor([[row + step < inside for step in range(steps)] for row in range(len(accepts))])
    return Chains(first=0, hits_RS=hits, onward_RS=true, known_RS=true, inside_RS=within)


@settings(max_examples=100, deadline=None)
@given(accepts=st.lists(st.integers(0, 4), min_size=1, max_size=20), steps=st.integers(1, 4))
def test_the_walk_jumps_by_accepted_and_one_more(accepts: list[int], steps: int) -> None:
    rounds = walk(chains_of(accepts, 4, 99), steps)
    assert rounds is not None
    place = 0
    for accepted in rounds:
        assert accepted == min(accepts[place], steps)
        place += accepted + 1
    assert place >= len(accepts) and place - rounds[-1] - 1 < len(accepts)


def test_the_figures_of_a_walk_by_hand() -> None:
    """Rows accept 2 0 1 0 3 of 3: rounds at rows 0, 3, 4; nine drafts lie inside an answer of five."""
    found = chains_of([2, 0, 1, 0, 3], 3, inside=5)
    tally = Tally(3)
    mask = torch.tensor([False] + [True] * 6)
    rounds = [walk(found, depth) or [] for depth in (1, 2, 3)]
    tally.add(Sample("one", "heldout", mask, mask, mask, mask), found, rounds)
    result = tally.result(greedy=True)
    assert rounds == [[1, 1, 1], [2, 0, 2], [2, 0, 3]]
    assert result["accept_length_walk"] == pytest.approx(1 + 5 / 3)
    assert result["walk_by_steps"] == pytest.approx([2.0, 1 + 4 / 3, 1 + 5 / 3])
    assert result["walk_survival"] == pytest.approx([2 / 3, 2 / 3, 1 / 3], abs=1e-6)
    assert result["survival"] == pytest.approx([3 / 5, 1 / 4, 0], abs=1e-6)
    assert result["conditional_acceptance"] == pytest.approx([3 / 5, 1 / 2, 0], abs=1e-6)
    assert result["accept_length"] == pytest.approx(1.85)
    assert (result["rows"], result["tokens"], result["rounds"], result["walk_exact"]) == (5, 6, 3, True)


def test_a_chain_that_outruns_what_is_known_is_not_guessed() -> None:
    found = chains_of([0, 3], 3, inside=2)
    known = torch.tensor([[True, True, True], [True, True, False]])
    unknown = Chains(0, found.hits_RS & known, found.onward_RS, known, found.inside_RS)
    assert walk(unknown, 3) is None
    assert walk(unknown, 2) == [0, 2]


@torch.no_grad()
def brute_force_rounds(target: Target, draft: Draft, prompt: list[int], answer: int, steps: int) -> list[int]:
    """Speculative decoding without any cache: the draft runs anew over all rows for every drafted token."""
    sequence = greedy_answer(target, prompt, 1)
    rounds = []
    last = set(target.stop_ids)
    while len(sequence) - len(prompt) < answer and sequence[-1] not in last:
        drafted: list[int] = []
        whole = captured(target, "", "", sequence, 1)
        for _ in range(steps):
            drafted.append(next_draft(draft, whole, sequence, drafted))
        accepted = 0
        while accepted < steps:
            if greedy_answer(target, [*sequence, *drafted[:accepted]], 1)[-1] != drafted[accepted]:
                break
            accepted += 1
        rounds.append(accepted)
        for token in greedy_answer_unstopped(target, sequence, accepted + 1):
            if len(sequence) - len(prompt) < answer and sequence[-1] not in last:
                sequence.append(token)
    return rounds


def greedy_answer_unstopped(target: Target, ids: list[int], count: int) -> list[int]:
    return continuation(target, ids, count)


def next_draft(draft: Draft, whole: Sample, sequence: list[int], drafted: list[int]) -> int:
    """The token after `drafted`, by dense causal attention over real rows, then self-fed rows."""
    ids = [*sequence[1:], *drafted]
    real = len(sequence) - 1
    state_TH = draft.fuse(whole.taps_TA[None, :real])[0]
    keys: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append((key, value))
        key, value = (torch.cat(list(states), dim=2) for states in zip(*keys, strict=True))
        causal = query.shape[2] > 1
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    hidden = draft(torch.tensor([ids[:real]]), state_TH[None], draft.rope(torch.arange(real)[None]), attend)[:, -1:]
    for place in range(real, real + len(drafted)):
        rope = draft.rope(torch.tensor([[place]]))
        hidden = draft(torch.tensor([[ids[place]]]), draft.feedback(hidden), rope, attend)
    return int(draft.target_ids(draft.logits(hidden)[0, -1].argmax()))


def walked(target: Target, draft: Draft, sample: Sample, steps: int) -> list[int]:
    tally = Tally(steps)
    add_sample(tally, draft, sample, Teacher(target, target_ids(draft.d2t), "before"))
    return tally.rounds[-1]


@pytest.mark.parametrize("steps", [1, 4])
def test_the_walk_is_decoding_without_any_cache(
    target: Target, draft: Draft, folders: tuple[Path, Path], steps: int
) -> None:
    reader = CaptureReader(folders[0])
    accepted = 0
    for index in (0, 1, 12, 13):
        sample, prompt = reader.read(index), reader.samples[index].prompt_tokens
        ids = sample.ids_T.tolist()
        wanted = brute_force_rounds(target, draft, ids[:prompt], len(ids) - prompt, steps)
        assert walked(target, draft, sample, steps) == wanted
        accepted += sum(wanted)
    assert accepted > 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_walk_is_the_engines_rounds_on_every_prompt(
    target: Target, draft: Draft, folders: tuple[Path, Path], steps: int
) -> None:
    reader = CaptureReader(folders[0])
    engine = Engine(target, draft, num_steps=steps, kernels="torch", announce=False)
    got, finishes = [], set()
    try:
        for index, entry in enumerate(reader.samples):
            ids = reader.read(index).ids_T.tolist()
            made = engine.generate(ids[: entry.prompt_tokens], len(ids) - entry.prompt_tokens, num_steps=steps)
            assert list(made.ids) == ids[entry.prompt_tokens :]
            got.append(list(made.rounds))
            finishes.add(made.finish)
    finally:
        engine.close()
    assert got == [walked(target, draft, reader.read(index), steps) for index in range(len(reader.samples))]
    assert max(max(rounds, default=0) for rounds in got) >= min(steps, 3), "long chains occur"


def test_an_answer_that_stops_is_walked_beyond_its_end(target: Target, draft: Draft) -> None:
    """The engine counts what it accepts after the stop token; the captures end there, so the target is asked."""
    sample = make_samples(target, 1, 0, limit=12)[0]
    found = chains(draft, sample, sample.ids_T.roll(-1), 3)
    assert found is not None
    assert found.known_RS[-1].tolist() == [True, True, False] and found.inside_RS[-1].tolist() == [True, False, False]
    asked = chains(draft, sample, sample.ids_T.roll(-1), 3, beyond=[5, 6, 7])
    assert asked is not None and asked.known_RS.all()


def test_evaluate_gives_its_keys_and_reads_no_other_split(folders: tuple[Path, Path], tiny_target: Path) -> None:
    captures, draft = folders
    named = TargetSettings(name=str(tiny_target))
    result = evaluate(draft, captures, EvaluateSettings(steps=4), named)
    assert result["samples"] == 6 and result["split"] == "heldout" and result["walk_exact"] is True
    assert all(len(result[key]) == 4 for key in ("accuracy", "conditional_acceptance", "survival", "walk_by_steps"))
    assert result["accept_length"] == pytest.approx(1 + sum(result["survival"]), abs=1e-5)
    assert result["accept_length_walk"] == pytest.approx(1 + sum(result["walk_survival"]), abs=1e-5)
    assert result["accuracy"][0] == result["survival"][0] == result["conditional_acceptance"][0]
    with pytest.raises(InputError, match="nowhere"):
        evaluate(draft, captures, EvaluateSettings(), named, split="nowhere")
    counts = {
        one: evaluate(draft, captures, EvaluateSettings(), named, split=one)["samples"] for one in ("train", "all")
    }
    assert counts == {"train": 12, "all": 18}


def test_the_walk_over_sampled_answers_is_marked(
    folders: tuple[Path, Path], target: Target, tiny_target: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [
        captured(target, str(i), "heldout", torch.randint(3, 259, (20,), generator=generator).tolist(), 8)
        for i in range(3)
    ]
    sampled = write_captures(tmp_path / "captures", target, samples, greedy=False)
    result = evaluate(folders[1], sampled, EvaluateSettings(steps=2), TargetSettings(name=str(tiny_target)))
    assert result["walk_exact"] is False and result["off_path"] > 0


def test_a_sample_of_two_answers_is_refused_by_its_name(
    folders: tuple[Path, Path], target: Target, tiny_target: Path, tmp_path: Path
) -> None:
    samples = make_samples(target, 1, 2)
    other = write_captures(tmp_path / "captures", target, [*samples[:2], with_two_answers(samples[2])])
    with pytest.raises(InputError, match="one answer, at the end of its sample") as caught:
        evaluate(folders[1], other, EvaluateSettings(), TargetSettings(name=str(tiny_target)))
    prompt = int((~samples[2].loss_mask_T).sum())
    assert caught.value.got == f"{prompt - 3} unmarked tokens after the first marked one, in sample-2"


@pytest.mark.parametrize("part", ["taps_TA", "last_hidden_TH"])
def test_states_that_are_not_finite_are_not_scored(
    folders: tuple[Path, Path], target: Target, tiny_target: Path, tmp_path: Path, part: str
) -> None:
    samples = make_samples(target, 1, 2)
    other = write_captures(tmp_path / "captures", target, [*samples[:2], poisoned(samples[2], part)])
    with pytest.raises(InputError) as caught:
        evaluate(folders[1], other, EvaluateSettings(), TargetSettings(name=str(tiny_target)))
    assert caught.value.got == "states that are not finite in: sample-2"


@pytest.mark.parametrize("field", ["boundaries", "tokenizer_hash", "weights_hash"])
def test_captures_of_another_draft_are_refused(
    folders: tuple[Path, Path], target: Target, tiny_target: Path, tmp_path: Path, field: str
) -> None:
    facts: dict[str, object] = {field: "other"}
    if field == "boundaries":
        facts = {field: [1, 4, 5]}
    elif field == "weights_hash":
        facts = {"target": {**target.identity.model_dump(), field: "other"}}
    assert BOUNDARIES == (2, 4, 5)
    other = write_captures(tmp_path / "captures", target, make_samples(target, 1, 1), **facts)
    with pytest.raises(InputError, match=field):
        evaluate(folders[1], other, EvaluateSettings(), TargetSettings(name=str(tiny_target)))
