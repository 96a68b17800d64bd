"""`make shipped` on a tiny target: every step, once; answers that are kept are not made again."""

import json
import lzma
from pathlib import Path

import pytest

import eyas.data.own_prompts as own_prompts
from eyas.data.bank import generate, load_test_set
from eyas.data.own_prompts import TURNS, harvest, near_test_set, read_turns, unfit, write_turns
from eyas.data.packed import read_packed
from eyas.data.responses import read_responses
from eyas.models.target import load_target
from eyas.run import read_manifest
from eyas.shipped import Card

SHIPPING = Path(__file__).parents[1] / "shipping"
RECIPE = """
name = "shipped"
[target]
name = "{target}"
[respond]
max_new_tokens = 12
batch_size = 16
precision = "float32"
[capture]
precision = "float32"
[draft]
vocab_size = 128
fc_norm = false
norm_output = false
[train]
online = true
epochs = 1
ttt_length = 2
batch_tokens = 512
precision = "float32"
evaluate_samples = 4
[evaluate]
steps = 3
[bench]
num_steps = 2
limit = 2
max_new_tokens = 6
equality_limit = 1
precision = "float32"
"""
ASKED = "seeds = [1, 2]\neach = 8\nheldout = 4\nheldout_seed = 0\nask = 3\nask_seed = 0\n"
STEPS = ["own-turns", "prompts", "responses", "draft", "bench", "captures", "test-prompts",
         "test-responses", "test-captures"]  # fmt: skip


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SHIPPING))
    import make

    monkeypatch.setattr(make, "load_test_set", lambda: load_test_set()[:4])
    written = ["What do lentils taste of in autumn?", "How do people paint a tall wall?", "Sure!"]
    monkeypatch.setattr(make, "harvest", lambda turns: harvest(written if isinstance(turns, list) else []))
    return make


def test_every_step_is_made_once_and_what_is_kept_is_not_made_again(
    make, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(target=tiny_target))
    (tmp_path / "asked.toml").write_text(ASKED)
    flags = ["--recipe", str(tmp_path / "recipe.toml"), "--asked", str(tmp_path / "asked.toml")]
    flags += ["--answers", str(tmp_path / "kept" / "answers.xz"), "--into", str(tmp_path / "into")]
    made = [*flags, "--out", str(tmp_path / "run")]
    make.main([*made, "--until", "answers"])
    assert not (tmp_path / "run" / "draft").exists()
    make.main(made)
    card = Card.model_validate_json((tmp_path / "into" / "card.json").read_text())
    assert card.prompts["by_source"] == {"bank": 20, "own": 2} and card.bench is not None
    assert card.figures["test"].samples >= 4 and card.figures["heldout"].samples >= 4
    assert card.form.startswith("plain EAGLE-3")
    capsys.readouterr()
    make.main(made)
    told = capsys.readouterr().err
    assert all(f"{step}: done before" in told for step in STEPS[1:]), told
    assert "making" not in told
    # another run, begun from what is kept: nothing is decoded
    kept = read_packed(tmp_path / "kept" / "answers.xz")
    assert len(lzma.decompress((tmp_path / "kept" / "own.jsonl.xz").read_bytes()).splitlines()) == 2
    monkeypatch.setattr("eyas.data.responses.decode", lambda *_: pytest.fail("an answer was made again") or iter(()))
    monkeypatch.setattr(
        "eyas.data.responses.decode",
        lambda target, waiting, *rest: iter(()) if not waiting.requests else pytest.fail("decoded again"),
    )
    make.main([*flags, "--out", str(tmp_path / "again"), "--until", "answers"])
    again = tmp_path / "again" / "responses"
    lines = {line["id"]: line for line in read_responses(again / "responses.jsonl")}
    assert lines == {line["id"]: line for line in kept.lines} and read_manifest(again).facts["greedy"]
    assert read_packed(tmp_path / "kept" / "answers.xz").lines == kept.lines
    # more is asked for, but only what has an answer: still nothing is decoded
    (tmp_path / "asked.toml").write_text(ASKED.replace("each = 8", "each = 30"))
    make.main([*flags, "--out", str(tmp_path / "only"), "--until", "answers", "--kept"])
    only = read_responses(tmp_path / "only" / "responses" / "responses.jsonl")
    assert {line["id"] for line in only} == lines.keys()


def test_the_recipe_and_what_is_asked_are_read(make) -> None:
    recipe = make.load_recipe(str(SHIPPING / "shipped.toml"))
    assert (recipe.draft.fc_norm, recipe.draft.norm_output, recipe.draft.block) == (False, False, "llama")
    assert recipe.capture.boundaries == (8, 28, 29)  # every engine gives them: below the last
    assert (recipe.train.ttt_length, recipe.evaluate.steps) == (3, 5)
    asked = make.validate(make.Asked, make.tomllib.loads((SHIPPING / "prompts.toml").read_text()), "prompts.toml")
    assert len(set(asked.seeds)) == len(asked.seeds)


def test_an_error_has_its_four_parts(make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asked.toml").write_text(ASKED + "more = 1\n")
    with pytest.raises(SystemExit) as caught:
        make.main(["--asked", str(tmp_path / "asked.toml")])
    assert caught.value.code == 2 and "wanted: a known key" in capsys.readouterr().err


# Questions of the target's own -------------------------------------------------------------------------------------


def test_a_draw_of_turns_resumes_and_holds_the_shorter_one(tiny_target: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target))
    write_turns(target, tmp_path / "short", 3, 7)
    whole = tmp_path / "whole"
    write_turns(target, whole, 6, 7)
    lines = (whole / TURNS).read_text().splitlines(keepends=True)
    found = {json.loads(line)["id"]: json.loads(line) for line in lines}
    assert sorted(found) == [f"own-7-{number:06d}" for number in range(6)]
    short = [json.loads(line) for line in (tmp_path / "short" / TURNS).read_text().splitlines()]
    assert all(found[line["id"]] == line for line in short) and len(short) == 3
    other = tmp_path / "other"
    write_turns(target, other, 3, 8)
    assert set(read_turns(other)) != set(read_turns(tmp_path / "short"))

    (whole / "manifest.json").unlink()
    (whole / "progress.json").write_text(
        json.dumps({"settings": read_manifest(tmp_path / "short").settings | {"count": 6}, "inputs": {}, "decided": {},
                    "seconds": 1.0})
    )  # fmt: skip
    (whole / TURNS).write_text("".join(lines[:2]) + lines[2][:9])  # as a kill leaves it
    write_turns(target, whole, 6, 7)
    again = [json.loads(line) for line in (whole / TURNS).read_text().splitlines()]
    assert len(again) == 6 and {line["id"]: line for line in again} == found


def test_a_turn_that_did_not_end_is_no_prompt(tmp_path: Path) -> None:
    told = {"own-0-000001": ("two", "stop"), "own-0-000000": ("one", "stop"), "own-0-000002": ("cut", "length")}
    lines = [{"id": name, "text": text, "finish": finish} for name, (text, finish) in told.items()]
    (tmp_path / TURNS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_turns(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Why rain?", "too short or too long"),
        ("Why does it rain, " + "and where, " * 50 + "and how?", "too short or too long"),
        ("Write a letter to <name> about the rain.", "a hole or a stutter"),
        ("Write a letter about the rain to [[name]].", "a hole or a stutter"),
        ("Why does does the rain fall here?", "a hole or a stutter"),
        ("Why does the rain fall on the plain?", None),
    ],
)
def test_what_is_no_prompt_is_dropped_under_its_reason(text: str, reason: str | None) -> None:
    assert unfit(text) == reason


def test_questions_are_kept_once_in_order_and_drops_are_counted() -> None:
    rows, dropped = harvest(
        [" Why does the rain fall here?", "Why?", "Why does the RAIN fall here?", "When do owls sleep?"]
    )
    assert [row["messages"][0]["content"] for row in rows] == ["Why does the rain fall here?", "When do owls sleep?"]
    assert dropped == {"said before": 1, "too short or too long": 1}
    assert rows[0]["id"] == harvest(["Why does the rain fall here?"])[0][0]["id"]


def test_every_test_prompt_and_its_neighbours_are_refused_and_the_banks_are_not() -> None:
    for row in load_test_set():
        for turn in row["messages"]:
            text = turn["content"]
            assert near_test_set(text) and near_test_set(text.upper() + " ")
            opening = own_prompts.words(text)[:4]
            if len(opening) == 4:
                assert near_test_set(" ".join(opening) + " and something else entirely, far from it")
    drawn = [prompt.turns[0] for prompt in generate(300, 3, "train")]
    assert sum(map(near_test_set, drawn)) <= 6


def test_a_held_out_topic_is_refused() -> None:
    topic = next(t for t in own_prompts.load_bank().topics if t.heldout and t.kind == "things").fields["thing"]
    assert unfit(f"What should people know about {topic} today?") == "a held-out topic"
