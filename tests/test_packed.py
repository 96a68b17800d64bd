"""Packed answers: unpacking gives the same bytes, later stages take them, and what is torn or another's is refused."""

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.captures import capture
from eyas.data.packed import jsonl, lay, pack, read_packed, unpack
from eyas.data.prompts import PROMPTS, make_prompts
from eyas.data.responses import RESPONSES, read_responses, respond, response_line
from eyas.errors import InputError
from eyas.models.target import Target, load_target
from eyas.recipe import PromptsSettings, RespondSettings, TargetSettings
from eyas.run import hash_file, read_manifest, write_manifest
from test_captures import quick, write_responses
from tiny import save_tiny_target

SETTINGS = RespondSettings(max_new_tokens=6, batch_size=4, precision="float32")


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def named(tiny_target: Path) -> TargetSettings:
    return TargetSettings(name=str(tiny_target))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, named: TargetSettings) -> Path:
    """A run's prompts (two of them with a second turn) and their responses."""
    root = tmp_path_factory.mktemp("answered")
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"word {n}"}] * (1 + n % 2)} for n in range(5)]
    (root / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_prompts(root / "prompts", PromptsSettings(source=str(root / "source.jsonl"), train=4, heldout=1))
    respond(root / "prompts", root / "responses", SETTINGS, named)
    return root


LINE = st.builds(
    response_line,
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8),
    st.integers(0, 3),
    st.sampled_from(["train", "heldout"]),
    st.lists(st.integers(0, 200_000), min_size=2, max_size=9),
    st.just(1),
    st.sampled_from(["stop", "length"]),
)


@given(lines=st.lists(LINE, min_size=1, max_size=6, unique_by=lambda line: line["id"]))
def test_any_lines_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, lines: list[dict]) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / RESPONSES).write_bytes(jsonl(lines))
    files = {RESPONSES: hash_file(root / RESPONSES)}
    write_manifest(root, "responses", settings={}, inputs={}, files=files, facts={"greedy": True}, seconds=0.0)
    header = pack([root], root / "a.xz")
    assert jsonl(read_packed(root / "a.xz").lines) == (root / RESPONSES).read_bytes()
    assert header.bytes_per_id == (4 if max(max(line["input_ids"]) for line in lines) >= 65536 else 2)


def test_a_responses_folder_comes_back_bit_for_bit_and_is_captured_as_it_was(
    tmp_path: Path, answered: Path, target: Target, named: TargetSettings
) -> None:
    responses = answered / "responses"
    pack([responses], tmp_path / "a.xz")
    unpack(tmp_path / "a.xz", tmp_path / "back", target)
    assert (tmp_path / "back" / RESPONSES).read_bytes() == (responses / RESPONSES).read_bytes()
    ours, theirs = (read_manifest(folder).facts for folder in (tmp_path / "back", responses))
    assert ours == {**theirs, "sources": ours["sources"]}
    assert ours["sources"][0]["answers"] == 7 and ours["sources"][0]["settings"]["max_new_tokens"] == 6
    shards = []
    for name, folder in (("a", responses), ("b", tmp_path / "back")):
        capture(folder, tmp_path / name, quick(), named)
        shards.append((tmp_path / name / "shard-00000.safetensors").read_bytes())
    assert shards[0] == shards[1]


def test_folders_are_packed_one_after_the_other_and_an_answer_held_twice_once(tmp_path: Path, target: Target) -> None:
    one = write_responses(tmp_path / "one", target, [12, 20])
    two = write_responses(tmp_path / "two", target, [12, 20, 31])
    lines = list(read_responses(one / RESPONSES))
    more = [line for line in read_responses(two / RESPONSES) if line["id"] == "p002/0"]
    header = pack([one, two], tmp_path / "a.xz")
    assert read_packed(tmp_path / "a.xz").lines == lines + more
    assert [source.answers for source in header.sources] == [2, 1]
    pack([one], tmp_path / "b.xz")
    pack([two], tmp_path / "c.xz", earlier=tmp_path / "b.xz")
    assert read_packed(tmp_path / "c.xz").lines == lines + more
    assert header.facts["counts"] == {
        "samples": 3, "tokens": 63, "answer_tokens": 48, "stop": 0, "length": 3, "train": 3, "heldout": 0,
    }  # fmt: skip


def test_an_unfinished_folder_is_packed_as_far_as_it_came(tmp_path: Path, answered: Path, target: Target) -> None:
    lines = (answered / "responses" / RESPONSES).read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / RESPONSES).write_bytes(b"".join(lines[:3]) + lines[3][:25])
    manifest = read_manifest(answered / "responses")
    state = {"settings": manifest.settings, "inputs": manifest.inputs, "decided": {"precision": "float32"}}
    (cut / "progress.json").write_text(json.dumps(state | {"seconds": 1.0}))
    header = pack([cut], tmp_path / "a.xz", target)
    assert jsonl(read_packed(tmp_path / "a.xz").lines) == b"".join(lines[:3])
    assert not header.sources[0].complete
    whole = {key: value for key, value in manifest.facts.items() if key not in ("counts", "skipped")}
    assert {key: header.facts[key] for key in whole} == whole


def test_what_was_packed_is_not_answered_again(
    tmp_path: Path, answered: Path, target: Target, named: TargetSettings
) -> None:
    lines = list(read_responses(answered / "responses" / RESPONSES))
    first = [line for line in lines if line["id"] in ("q1/0", "q3/1", "q2/0")]  # q3/1 without q3/0 is of no use
    assert len(first) == 3
    some = tmp_path / "some"
    some.mkdir()
    (some / RESPONSES).write_bytes(jsonl(first))
    manifest = read_manifest(answered / "responses")
    files = {RESPONSES: hash_file(some / RESPONSES)}
    write_manifest(
        some, "responses", settings=manifest.settings, inputs={}, files=files, facts=manifest.facts, seconds=0.0
    )
    pack([some], tmp_path / "a.xz")
    prompts, out = answered / "prompts", tmp_path / "r"
    assert lay(tmp_path / "a.xz", prompts, out, SETTINGS, target, named) == 2
    laid = (out / RESPONSES).read_bytes()
    done = respond(prompts, out, SETTINGS, named)
    assert (out / RESPONSES).read_bytes().startswith(laid) and done.inputs == manifest.inputs
    assert {line["id"]: line for line in read_responses(out / RESPONSES)} == {line["id"]: line for line in lines}
    assert lay(tmp_path / "a.xz", prompts, out, SETTINGS, target, named) == 0


def test_answers_cut_at_another_length_are_left_to_be_made_anew(
    tmp_path: Path, answered: Path, target: Target, named: TargetSettings
) -> None:
    pack([answered / "responses"], tmp_path / "a.xz")
    longer = SETTINGS.model_copy(update={"max_new_tokens": 9})
    whole = [line for line in read_responses(answered / "responses" / RESPONSES) if line["finish"] == "stop"]
    assert lay(tmp_path / "a.xz", answered / "prompts", tmp_path / "r", longer, target, named) <= len(whole)


def test_what_is_torn_changed_or_anothers_is_refused_in_words(
    tmp_path: Path, answered: Path, target: Target, named: TargetSettings
) -> None:
    good = tmp_path / "a.xz"
    pack([answered / "responses"], good)
    data = good.read_bytes()
    for name, bad, words in (
        ("cut", data[:-9], "ended before"),
        ("changed", lzma.compress(lzma.decompress(data)[:-1] + b"\x01"), "other answers"),
        ("short", lzma.compress(lzma.decompress(data)[:-1]), "bytes of ids"),
        ("no xz", b"nothing", "format not supported"),
        ("no header", lzma.compress(b"{}\n"), "validation errors"),
    ):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(InputError, match=words) as caught:
            unpack(tmp_path / name, tmp_path / "x")
        assert caught.value.code == "data_corrupt" and not (tmp_path / "x" / RESPONSES).exists()
    with pytest.raises(InputError, match="No such file"):
        unpack(tmp_path / "none", tmp_path / "y")
    header = json.loads(lzma.decompress(data).partition(b"\n")[0]) | {"format": 2}
    (tmp_path / "newer").write_bytes(lzma.compress(json.dumps(header).encode() + b"\n"))
    with pytest.raises(InputError, match="format 2"):
        read_packed(tmp_path / "newer")
    other = load_target(str(save_tiny_target(tmp_path / "other", seed=5)))
    with pytest.raises(InputError) as caught:
        unpack(good, tmp_path / "z", other)
    assert caught.value.code == "target_revision" and not (tmp_path / "z" / RESPONSES).exists()
    with pytest.raises(InputError) as caught:
        lay(good, answered / "prompts", tmp_path / "z2", SETTINGS, other, named)
    assert caught.value.code == "target_revision"
    warm = SETTINGS.model_copy(update={"temperature": 1.0})
    with pytest.raises(InputError, match="sampling"):
        lay(good, answered / "prompts", tmp_path / "z3", warm, target, named)


def test_answers_of_two_targets_or_to_other_words_do_not_mix(
    tmp_path: Path, answered: Path, target: Target, named: TargetSettings
) -> None:
    one = write_responses(tmp_path / "one", target, [12])
    two = write_responses(tmp_path / "two", load_target(str(save_tiny_target(tmp_path / "other", seed=5))), [12])
    with pytest.raises(InputError, match="target"):
        pack([one, two], tmp_path / "a.xz")
    rows = [json.loads(line) for line in (answered / "prompts" / PROMPTS).read_text().splitlines()]
    changed = tmp_path / "changed.jsonl"
    changed.write_text(
        "".join(
            json.dumps({"id": row["id"], "messages": [{"role": "user", "content": f"other {row['id']}"}]}) + "\n"
            for row in rows
        )
    )
    make_prompts(tmp_path / "prompts", PromptsSettings(source=str(changed), train=4, heldout=1))
    pack([answered / "responses"], tmp_path / "b.xz")
    with pytest.raises(InputError, match="an answer to other words"):
        lay(tmp_path / "b.xz", tmp_path / "prompts", tmp_path / "r", SETTINGS, target, named)
    with pytest.raises(InputError, match="answers to pack"):
        pack([], tmp_path / "c.xz")
