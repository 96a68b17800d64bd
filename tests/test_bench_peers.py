"""The peers' bench with fake engines: turns, resuming, voids, and figures by hand. No engine."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_peers
from peers import convert, figures, openvino_export
from peers.answers import Answers, Way
from peers.crew import Bench
from peers.engines import ENGINES, PLAIN, Engine, Shape
from peers.process import Worker, WorkerError

from eyas.formats.draft_config import DraftConfig
from eyas.measure.prompts import BenchPrompt

PEERS = Path(convert.__file__).parent
CONFIG = DraftConfig(
    boundaries=(2, 15, 27),
    target_num_hidden_layers=30,
    target_hidden_size=576,
    target_model_type="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=8192,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    fc_norm=False,
)
FAKE = """
import json, os, sys, time
sys.path.insert(0, {here!r})
from worker import Answer, Running, serve

def start(job):
    if {fails!r}:
        raise RuntimeError("no such kernel")
    def answer(ids, max_tokens):
        print("noise on stdout")
        if ids[0] == {dies_at!r}:
            os._exit(7)
        with open({turns!r}, "a") as file:
            file.write({name!r} + " " + str(job["shape"]["num_steps"]) + " " + str(ids[0]) + "\\n")
        rounds = {rounds} if job["draft"] else 12
        return Answer(list(range(13)), rounds, 0.5, {seconds})
    return Running(answer, {{"name": {name!r}}})

serve(start)
"""


@dataclass(frozen=True)
class Fake(Engine):
    """An engine whose worker is a script of this test."""

    place: Path = Path()

    @property
    def script(self) -> Path:
        return self.place


def fake(folder: Path, name: str, *, rounds: int = 8, seconds: float = 1.0, fails: bool = False, dies_at: int = -1):
    script = folder / f"{name}.py"
    values = {"here": str(PEERS), "turns": str(folder / "turns")}
    script.write_text(
        FAKE.format(name=name, rounds=rounds, seconds=seconds, fails=fails, dies_at=dies_at, **values),
    )
    return Fake(name, None, whole_config=True, place=script)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(
        target=tmp_path,
        draft=tmp_path,
        config=CONFIG,
        prompts=[BenchPrompt(f"p{number}", (number, 5)) for number in (10, 20, 30)],
        stop_ids=[2],
        tokens=16,
        threads=1,
        eager=True,
        chain=Shape(5),
        scan=[],
        work=tmp_path / "work",
        answers=Answers(tmp_path / "answers.jsonl"),
    )


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    yield lambda engines: [monkeypatch.setitem(ENGINES, engine.name, engine) for engine in engines]


def turns(folder: Path) -> list[str]:
    """What was asked, warm-ups (first token 1) left out."""
    lines = (folder / "turns").read_text().splitlines()
    return [line for line in lines if not line.endswith(" 1")]


def test_engines_take_turns_prompt_by_prompt_and_who_goes_first_rotates(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas"), fake(tmp_path, "peer")]
    use(engines)
    bench_peers.run(bench, "float32", engines)
    assert turns(tmp_path) == [
        *("eyas 0 10", "eyas 5 10", "peer 0 10", "peer 5 10"),
        *("eyas 5 20", "peer 0 20", "peer 5 20", "eyas 0 20"),
        *("peer 0 30", "peer 5 30", "eyas 0 30", "eyas 5 30"),
    ]


def test_rows_are_those_of_the_contract(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas", seconds=0.5), fake(tmp_path, "peer"), replace(fake(tmp_path, "hf"), void="none")]
    use(engines)
    found = bench_peers.report(bench, engines, {"float32": bench_peers.run(bench, "float32", engines)})
    assert list(found) == ["plain_fp32", "eagle3_fp32", "eagle3_fp32_best"]
    ours, theirs = found["eagle3_fp32"]["eyas"], found["eagle3_fp32"]["peer"]
    assert (ours["tok_s"], ours["accept_length"], ours["void"]) == (24.0, 1.5, None)
    assert (theirs["tok_s"], theirs["accept_length"], theirs["void"]) == (12.0, 1.5, None)
    assert theirs["eyas_over"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["plain_fp32"]["peer"]["accept_length"] == 1.0
    assert found["plain_fp32"]["peer"]["facts"] == {"name": "peer"}
    assert found["plain_fp32"]["hf"]["tok_s"] == 12.0
    assert found["eagle3_fp32"]["hf"]["void"] == "none"
    assert found["eagle3_fp32"]["hf"]["tok_s"] is None


def test_a_peer_that_serves_another_draft_is_void_in_every_precision(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas", rounds=8), fake(tmp_path, "peer", rounds=11)]
    use(engines)
    done = {precision: bench_peers.run(bench, precision, engines) for precision in ("float32", "bfloat16")}
    found = bench_peers.report(bench, engines, done)
    for name in ("eagle3_fp32", "eagle3_bf16"):
        assert "mis-wired draft: float32 accept length 1.091 against 1.500" in found[name]["peer"]["void"]
    assert found["plain_fp32"]["peer"]["void"] is None
    assert found["eagle3_fp32"]["eyas"]["void"] is None


@pytest.mark.parametrize(("theirs", "void"), [(1.50, False), (1.43, False), (1.42, True), (1.57, False), (1.58, True)])
def test_five_percent_either_way_is_the_line(theirs: float, void: bool) -> None:
    rows = {
        "eyas": {"accept_length": 1.5, "void": None},
        "peer": {"accept_length": theirs, "void": None},
        "gone": {"accept_length": None, "void": "no environment"},
    }
    assert list(figures.miswired(rows)) == (["peer"] if void else [])


def test_a_run_that_was_cut_asks_only_what_is_left(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas"), fake(tmp_path, "peer")]
    use(engines)
    bench_peers.run(bench, "float32", engines)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    (tmp_path / "answers.jsonl").write_text("\n".join(lines[:6]) + "\n" + lines[6][:40])
    (tmp_path / "turns").unlink()
    again = replace(bench, answers=Answers.read(tmp_path / "answers.jsonl"))
    bench_peers.run(again, "float32", engines)
    asked = turns(tmp_path)
    assert {line.split()[2] for line in asked} == {"20", "30"}, "p10 was whole; p20 is asked again beside all"
    assert len(asked) == 8
    assert len(again.answers.found) == 12
    assert len(Answers.read(tmp_path / "answers.jsonl").found) == 12


def test_nothing_is_started_where_all_is_answered(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas")]
    use(engines)
    bench_peers.run(bench, "float32", engines)
    (tmp_path / "turns").unlink()
    crew, _ = bench_peers.run(bench, "float32", engines)
    assert not (tmp_path / "turns").exists()
    assert crew.voids == {}


def test_an_engine_that_fails_at_start_or_midway_is_void_and_the_others_go_on(
    bench: Bench, use, tmp_path: Path
) -> None:
    engines = [fake(tmp_path, "eyas"), fake(tmp_path, "broken", fails=True), fake(tmp_path, "dying", dies_at=20)]
    use(engines)
    found = bench_peers.report(bench, engines, {"float32": bench_peers.run(bench, "float32", engines)})
    assert found["plain_fp32"]["eyas"]["prompts"] == 3
    assert found["plain_fp32"]["broken"]["void"] == "RuntimeError: no such kernel"
    assert found["plain_fp32"]["dying"]["void"].startswith("it ended with 7")
    assert found["plain_fp32"]["dying"]["prompts"] == 1
    (tmp_path / "turns").unlink()
    bench_peers.run(bench, "float32", engines[:2])
    assert not turns(tmp_path), "what cannot start is tried again, and nobody is asked again for it"


def test_a_missing_environment_voids_its_rows_with_the_command_to_make_it(bench: Bench, use, tmp_path: Path) -> None:
    gone = replace(fake(tmp_path, "gone"), environment="nowhere/at-all", made_by="make setup-bench-peers")
    engines = [fake(tmp_path, "eyas"), gone]
    use(engines)
    found = bench_peers.report(bench, engines, {"float32": bench_peers.run(bench, "float32", engines)})
    for name in ("plain_fp32", "eagle3_fp32"):
        assert "make setup-bench-peers, or EYAS_GONE_PYTHON=PYTHON" in found[name]["gone"]["void"]
    assert found["eagle3_fp32"]["eyas"]["accept_length"] == 1.5


def test_the_fastest_shape_of_the_scan_is_run_on_all_prompts(bench: Bench, use, tmp_path: Path) -> None:
    engines = [fake(tmp_path, "eyas")]
    script = engines[0].place
    script.write_text(script.read_text().replace("0.5, 1.0)", "0.5, 2.0 if job['shape']['num_steps'] == 5 else 1.0)"))
    use(engines)
    crew, best = bench_peers.run(replace(bench, scan=[Shape(2), Shape(4, 2, 8)]), "float32", engines)
    assert best == {"eyas": Shape(2)}, "this one has no trees"
    found = bench_peers.report(bench, engines, {"float32": (crew, best)})
    assert found["eagle3_fp32"]["eyas"]["tok_s"] == 6.0
    assert found["eagle3_fp32_best"]["eyas"]["tok_s"] == 12.0
    assert found["eagle3_fp32_best"]["eyas"]["shape"] == "2"


def test_a_worker_stands_still_between_answers_and_is_gone_after_stop(tmp_path: Path) -> None:
    engine = fake(tmp_path, "one")
    job = {"shape": {"num_steps": 0}, "draft": None}
    worker = Worker([sys.executable, engine.script, json.dumps(job)], os.environ, tmp_path / "log")
    assert worker.facts == {"name": "one"}
    for _ in range(2):
        assert state(worker.process.pid) == "T"
        answer = worker.ask([7, 8], 4)
        assert (answer["ids"], answer["forwards"]) == (list(range(13)), 12)
        assert answer["seconds_wall"] > 0
    worker.stop()
    assert worker.process.returncode == 0
    assert "noise on stdout" in (tmp_path / "log").read_text()


def state(pid: int) -> str:
    """T is stopped by a signal, which takes a moment to arrive."""
    found = ""
    for _ in range(100):
        found = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if found == "T":
            break
        time.sleep(0.01)
    return found


def test_a_worker_that_will_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="it ended with 1"):
        Worker([sys.executable, "-c", "raise SystemExit(1)"], os.environ, tmp_path / "log")


@pytest.mark.parametrize(("text", "shape"), [("5", Shape(5)), ("4x2x8", Shape(4, 2, 8)), ("0", PLAIN)])
def test_shapes_are_written_as_they_are_read(text: str, shape: Shape) -> None:
    assert Shape.parse(text) == shape
    assert str(shape) == text


def test_a_shape_of_two_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="a chain is one number, a tree three"):
        Shape.parse("4x2")


def test_accept_length_is_tokens_emitted_over_forwards_without_the_prefills() -> None:
    answers = [{"ids": [1] * 11, "forwards": 5}, {"ids": [1] * 4, "forwards": 3}, {"ids": [1], "forwards": 0}]
    assert figures.accept_length(answers) == 13 / 8
    assert figures.accept_length([{"ids": [1], "forwards": 0}]) is None


def test_who_reads_plain_drafts_only_says_what_it_would_drop() -> None:
    for name in ("openvino", "llamacpp"):
        assert ENGINES[name].cannot(CONFIG) is None
        reason = ENGINES[name].cannot(CONFIG.model_copy(update={"fc_norm": True}))
        assert reason == "it reads plain EAGLE-3 drafts only, and this one has fc_norm"
    assert ENGINES["vllm"].cannot(CONFIG.model_copy(update={"fc_norm": True})) is None
    assert "no EAGLE-3" in (ENGINES["hf"].cannot(CONFIG) or "")


def test_conversions_are_made_once_and_a_failure_says_its_last_line(tmp_path: Path) -> None:
    writes = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('made')"
    step = convert.Step(tmp_path / "a" / "out", [sys.executable, "-c", writes, convert.OUT])
    made = convert.Models(tmp_path, tmp_path, (step,))
    convert.convert(made, tmp_path / "logs" / "log")
    assert step.out.read_text() == "made"
    step.out.write_text("kept")
    convert.convert(made, tmp_path / "logs" / "log")
    assert step.out.read_text() == "kept"
    bad = convert.Step(tmp_path / "b", [sys.executable, "-c", "raise SystemExit('no such layer')", convert.OUT])
    with pytest.raises(convert.ConvertError, match="ended with 1: no such layer"):
        convert.convert(convert.Models(tmp_path, tmp_path, (bad,)), tmp_path / "log")
    assert not bad.out.exists()


def test_openvino_is_told_the_layers_whose_outputs_the_taps_are(tmp_path: Path) -> None:
    made = convert.models(ENGINES["openvino"], "float32", tmp_path, tmp_path / "export", (2, 15, 27), tmp_path)
    command = [str(part) for part in made.steps[1].command]
    assert command[2:4] == ["1,14,26", convert.OUT]
    xml = tmp_path / "openvino_model.xml"
    xml.write_text('<rt_info><eagle3_mode value="True" /></rt_info>')
    openvino_export.tell(xml, "1 14 26")
    assert xml.read_text() == '<rt_info><eagle3_mode value="True" /><hidden_layers_list value="1 14 26" /></rt_info>'
    xml.write_text("<rt_info></rt_info>")
    with pytest.raises(ValueError, match="not marked as an EAGLE-3 draft"):
        openvino_export.tell(xml, "1 14 26")


def test_ways_are_told_apart_on_disk(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.jsonl")
    ways = [Way("eyas", "float32", shape) for shape in (PLAIN, Shape(2), Shape(2, 2, 4))]
    for number, way in enumerate(ways):
        answers.add(way, "p", {"ids": [number]})
        answers.add(way, "p", {"ids": [number + 10]}, scan=True)
    again = Answers.read(tmp_path / "answers.jsonl")
    assert [again.of(way, ["p"])["p"]["ids"] for way in ways] == [[0], [1], [2]]
    assert [again.of(way, ["p"], scan=True)["p"]["ids"] for way in ways] == [[10], [11], [12]]
