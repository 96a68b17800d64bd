"""The bench: figures from literal timings, the choice of a depth, and the whole on a tiny target."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.measure.bench import bench
from eyas.measure.prompts import BenchPrompt, bench_prompts, conversations, spread
from eyas.measure.stats import Timing, accept_length, choose_num_steps, predict, rates, speedup, survival
from eyas.models.checkpoint import make_info, save_draft
from eyas.models.draft import Draft
from eyas.models.target import load_target
from eyas.recipe import BenchSettings, TargetSettings
from tiny import save_tiny_target


def test_survival_counts_all_rounds_and_sums_to_the_accept_length() -> None:
    rounds = [0, 1, 2, 2, 0, 3, 0, 0]
    assert survival(rounds, 3) == [0.5, 0.375, 0.125]
    assert accept_length(rounds) == 2.0
    assert accept_length([]) == 1.0
    assert survival([], 2) == [0.0, 0.0]


def test_a_speedup_is_the_ratio_of_seconds_per_token_and_paired() -> None:
    # Prompts differ by a hundred times, the two ways by exactly two: the interval has no width.
    pairs = [(Timing(10, 10.0 * scale), Timing(10, 5.0 * scale)) for scale in (0.1, 1.0, 10.0)]
    found = speedup(pairs)
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_speedup_interval_holds_the_ratio_of_all_and_widens_with_disagreement() -> None:
    pairs = [(Timing(10, 10.0), Timing(10, seconds)) for seconds in (4.0, 5.0, 6.0, 8.0)]
    found = speedup(pairs)
    assert found.low < 10 / 5.75 < found.high
    assert 1.25 <= found.low < found.median < found.high <= 2.5
    assert speedup(pairs) == found


def test_a_text_that_ended_at_its_first_token_counts_for_nothing() -> None:
    pairs = [(Timing(0, 0.0), Timing(0, 0.0)), (Timing(4, 2.0), Timing(4, 1.0))]
    assert speedup(pairs).median == 2.0
    with pytest.raises(InputError, match="a token after its first"):
        speedup(pairs[:1])


def test_rates_leave_the_prefill_and_its_token_out() -> None:
    assert rates([Timing(10, 1.0, 0.5), Timing(30, 1.0, 0.1)]) == {
        "output_tok_s": 20.0,
        "ttft_ms": 300.0,
        "tpot_ms": 50.0,
        "output_tokens": 40,
        "n": 2,
    }


def test_the_depth_is_that_with_the_most_tokens_a_second() -> None:
    found = choose_num_steps([0.5, 0.3, 0.1], plain=10.0, round_seconds={1: 12.0, 2: 13.0, 3: 20.0})
    assert (found.num_steps, found.accept_length) == (2, pytest.approx(1.8))
    assert found.seconds_per_token == pytest.approx(13 / 1.8)
    assert found.speedup == pytest.approx(18 / 13)
    depths = predict([0.5, 0.3], 10.0, {1: 12.0, 2: 13.0, 3: 20.0})
    assert [depth.num_steps for depth in depths] == [1, 2]
    assert choose_num_steps([0.0, 0.0], 10.0, {1: 12.0, 2: 12.0}).num_steps == 1


def test_a_limit_spreads_over_the_whole_source() -> None:
    prompts = [BenchPrompt(str(i), (1,)) for i in range(240)]
    chosen = [int(prompt.id) for prompt in spread(prompts, 24)]
    assert chosen == list(range(0, 240, 10))
    assert spread(prompts, None) == prompts
    assert [prompt.id for prompt in spread(prompts[:3], 5)] == ["0", "1", "2"]


def test_a_file_of_prompts_is_read_up_to_its_last_question(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
        '{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}\n{"prompt": "e"}\n'
    )
    found = [[turn["content"] for turn in messages] for _, messages in conversations(str(path))]
    assert found == [["a", "b", "c"], ["e"]]
    assert len(conversations("test")) >= 200


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("bench") / "target")


@pytest.fixture(scope="module")
def draft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load_target(str(target_folder))
    torch.manual_seed(3)
    draft = Draft(
        DraftConfig(
            boundaries=(2, 4, 5),
            target_num_hidden_layers=8,
            target_hidden_size=64,
            target_model_type="llama",
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=259,
            draft_vocab_size=259,
            max_position_embeddings=1024,
        )
    )
    draft.share_embedding(target.embedding)
    folder = tmp_path_factory.mktemp("bench") / "draft"
    hashes = {"tokenizer_hash": target.tokenizer_hash, "template_hash": target.template_hash or ""}
    save_draft(folder, draft, make_info(draft, target.identity, ttt_length=3, **hashes))
    return folder


SMALL = BenchSettings(limit=4, max_new_tokens=10, equality_limit=2)


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_a_bench_gives_every_promised_figure(target_folder: Path, draft_folder: Path, precision: str) -> None:
    settings = SMALL.model_copy(update={"precision": precision, "num_steps": 2 if precision == "bfloat16" else None})
    result = bench(TargetSettings(name=str(target_folder)), draft_folder, settings, survival=[0.5, 0.2, 0.1])
    assert result["identical_outputs"] is True
    for way in ("baseline", "speculative"):
        assert result[way]["n"] == 4
        assert {"output_tok_s", "ttft_ms", "tpot_ms"} <= result[way].keys()
    fast = result["speculative"]
    assert fast["accept_length"] == pytest.approx(1 + sum(fast["survival"]), abs=1e-3)
    assert len(fast["survival"]) == fast["num_steps"] == result["num_steps"]
    assert all(a >= b for a, b in pairwise(fast["survival"]))
    assert result["speedup"]["low"] <= result["speedup"]["median"] <= result["speedup"]["high"]
    assert 0 <= result["divergence"] <= 1
    assert result["precision"] in ("float32", "bfloat16")
    assert result["machine"]["cores"] >= 1
    assert result["engine"]["lossless"]


def test_a_bench_without_survival_measures_its_own(target_folder: Path, draft_folder: Path) -> None:
    settings = SMALL.model_copy(update={"precision": "float32", "equality_limit": 0, "repeats": 2})
    result = bench(TargetSettings(name=str(target_folder)), draft_folder, settings)
    assert 1 <= result["num_steps"] <= 4
    assert result["identical_outputs"] is None
    assert result["baseline"]["n"] == 4
    assert result["divergence"] == 0 or result["baseline_path"] == "single rows"


def test_a_bench_refuses_a_draft_of_another_target(draft_folder: Path, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=9)
    with pytest.raises(InputError) as caught:
        bench(TargetSettings(name=str(other)), draft_folder, SMALL)
    assert str(draft_folder) in caught.value.where


def test_a_file_without_a_prompt_is_not_called_too_long(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="wanted a prompt; got none"):
        bench_prompts(str(tmp_path / "empty.jsonl"), load_target(str(target_folder)), 3, 8)


def test_prompts_longer_than_the_context_are_refused(target_folder: Path, draft_folder: Path) -> None:
    settings = SMALL.model_copy(update={"max_new_tokens": 1020})
    with pytest.raises(InputError, match="1020 tokens"):
        bench(TargetSettings(name=str(target_folder)), draft_folder, settings)
