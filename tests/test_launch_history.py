"""What earlier starts say of the next: within a quarter, from a third of the way on, on a clock of the test's own."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.clients.health import Health
from eyas.launch.evidence import Evidence, Processes
from eyas.launch.history import Expectation, PhaseTime, expect, rate_only, record_start, start_key
from eyas.launch.log_state import LogState
from eyas.launch.state import Memory, decide, phase_times

KEY = {"model": "m", "engine": "sglang@0.5.23", "machine": "x", "flags": "f"}
PHASES = (
    ("args", 4.0),
    ("distributed", 6.0),
    ("weights", 120.0),
    ("kv_cache", 5.0),
    ("graphs", 60.0),
    ("warmup", 10.0),
)
SHARDS = 64


def start(pace: float, seed: int, tail_s: float = 30.0) -> list[tuple[float, str, float | None]]:
    """A start as (second, phase, share of shards): shard times vary threefold, and the last shard is not the end."""
    noise, at, looks = random.Random(seed), 0.0, []
    for phase, usual in PHASES:
        length = usual * pace * noise.uniform(0.85, 1.15)
        if phase != "weights":
            looks += [(at + length * part / 10, phase, None) for part in range(10)]
            at += length
            continue
        weights = [noise.uniform(0.5, 1.5) for _ in range(SHARDS)]
        for shard in range(SHARDS):
            looks.append((at, phase, shard / SHARDS))
            at += (length - tail_s) * weights[shard] / sum(weights)
        looks += [(at + tail_s * part / 10, phase, 1.0) for part in range(10)]
        at += tail_s
    return [*looks, (at, "ready", None)]


def play(
    looks: list[tuple[float, str, float | None]], expected: Expectation
) -> tuple[Memory, list[tuple[float, float | None]]]:
    """(memory, (second, predicted seconds left) of each look)."""
    memory, predicted = Memory(begun=0.0), []
    for index, (at, phase, share) in enumerate(looks):
        log = LogState(engine="sglang", state="loading", phase=phase, progress=share, lines=index)
        ready = phase == "ready"
        health = Health(0.0, 200) if ready else Health(0.0, 503)
        memory, status = decide(
            memory, Evidence(at, log, Processes(True, pids=(1,), cpu_s=at), health=health), expected
        )
        if not ready:
            predicted.append((at, status.eta_s))
    return memory, predicted


def record(looks: list[tuple[float, str, float | None]], path: Path) -> None:
    memory, _ = play(looks, Expectation())
    record_start(KEY, phase_times(memory, looks[-1][0]), path)


@given(recorded=st.floats(0.8, 1.25), now=st.floats(0.8, 1.25), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_after_one_start_the_eta_is_within_a_quarter_from_a_third_of_the_way_on(
    tmp_path_factory: pytest.TempPathFactory, recorded: float, now: float, seed: int
) -> None:
    path = tmp_path_factory.mktemp("history") / "starts.jsonl"
    record(start(recorded, seed), path)
    looks = start(now, seed + 1)
    _, predicted = play(looks, expect(KEY, path))
    end = looks[-1][0]
    for at, left in predicted:
        if at >= end / 3:
            assert left is not None
            assert abs(at + left - end) <= 0.25 * end, (at, left, end)


def test_the_bars_own_eta_is_not_the_loads(tmp_path: Path) -> None:
    record(start(1.0, 3), tmp_path / "h")
    looks = start(1.0, 4)
    _, predicted = play(looks, expect(KEY, tmp_path / "h"))
    full = next(index for index, (_, phase, share) in enumerate(looks) if phase == "weights" and share == 1.0)
    at, left = predicted[full]
    assert left is not None and left == pytest.approx(looks[-1][0] - at, rel=0.25)
    assert left > 60  # the bar says 0


def test_without_history_there_is_an_eta_of_the_phase_by_its_bar_and_none_of_the_whole(tmp_path: Path) -> None:
    expected = expect(KEY, tmp_path / "none")
    assert expected.remaining("weights", 30.0, 0.25) == (90.0, None)
    assert expected.remaining("graphs", 30.0, None) == (None, None)
    assert "no start of this model on this machine" in expected.source
    assert rate_only(0.0, 0.0) is None and rate_only(10.0, None) is None


def test_a_start_under_other_flags_counts_where_none_under_these_is_known(tmp_path: Path) -> None:
    path = tmp_path / "h"
    record_start(KEY | {"flags": "g"}, [PhaseTime("weights", 50.0)], path)
    found = expect(KEY, path)
    assert found.phases == (PhaseTime("weights", 50.0),) and "other flags" in found.source
    record_start(KEY, [PhaseTime("weights", 70.0, ((1.0, 60.0),))], path)
    found = expect(KEY, path)
    assert found.phases == (PhaseTime("weights", 70.0, ((1.0, 60.0),)),) and "same flags" in found.source
    assert expect(KEY | {"model": "other"}, path).phases == ()
    assert expect(KEY | {"machine": "other"}, path).phases == ()


def test_several_starts_give_the_median_and_the_longest(tmp_path: Path) -> None:
    for seconds in (50.0, 90.0, 60.0):
        record_start(KEY, [PhaseTime("weights", seconds)], tmp_path / "h")
    found = expect(KEY, tmp_path / "h")
    assert found.phases[0].seconds == 60.0 and found.allowed("weights") == 90.0 and found.allowed("graphs") == 0.0


def test_a_phase_that_the_latest_start_did_without_is_expected_by_an_older_one(tmp_path: Path) -> None:
    cold = [PhaseTime("weights", 50.0), PhaseTime("compile", 40.0), PhaseTime("http", 2.0)]
    warm = [PhaseTime("weights", 50.0), PhaseTime("http", 2.0)]
    for phases in (cold, warm):
        record_start(KEY, phases, tmp_path / "h")
    found = expect(KEY, tmp_path / "h")
    assert found.remaining("weights", 50.0, None) == (0.0, 2.0)  # compiled already, as it was the last time
    assert found.remaining("compile", 10.0, None, before=50.0) == (30.0, 32.0)
    assert found.says("weights") == found.source and "compile by an older one" in found.says("compile")
    other = expect(KEY | {"flags": "g"}, tmp_path / "h")
    assert other.remaining("compile", 10.0, None, before=50.0) == (30.0, 32.0)


def test_a_phase_that_no_start_went_through_has_no_eta_and_that_is_said(tmp_path: Path) -> None:
    record_start(KEY, [PhaseTime("weights", 50.0)], tmp_path / "h")
    looks = [(1.0, "weights", None), (60.0, "graphs", None)]
    memory, expected = Memory(begun=0.0), expect(KEY, tmp_path / "h")
    for at, phase, _ in looks:
        log = LogState(engine="sglang", state="warming", phase=phase)
        memory, status = decide(memory, Evidence(at, log, Processes(True, pids=(1,), cpu_s=at)), expected)
    assert status.eta_s is None and "none went through graphs" in str(status.eta_source)


@given(st.lists(st.sampled_from(["", "{", "null", "[]", '{"key": 1}', '{"key": {}, "phases": [[1]]}', "\ufffd\x00"])))
def test_cut_and_foreign_lines_are_passed_over(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("history") / "h"
    path.write_text("\n".join(lines) + "\n")
    record_start(KEY, [PhaseTime("weights", 50.0)], path)
    assert expect(KEY, path).phases == (PhaseTime("weights", 50.0),)


def test_the_key_leaves_out_addresses_and_nothing_else() -> None:
    words = ["python", "-m", "vllm", "serve", "m", "--port", "8000", "--max-model-len", "8192"]
    moved = ["python", "-m", "vllm", "serve", "m", "--port", "9000", "--max-model-len", "8192"]
    other = ["python", "-m", "vllm", "serve", "m", "--port", "8000", "--max-model-len", "4096"]
    keys = [start_key(model="m", engine="vllm@0.33", argv=argv)["flags"] for argv in (words, moved, other)]
    assert keys[0] == keys[1] != keys[2]
