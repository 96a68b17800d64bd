"""Reading prompt files, and the prompts stage."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.prompts import make_prompts, read_prompts
from eyas.data.records import Tally, iter_records, read_records
from eyas.errors import InputError
from eyas.recipe import PromptsSettings
from eyas.run import verify_files

CASES = Path(__file__).parents[1].parent / "shared" / "cases" / "jsonl" / "open_records.jsonl"
needs_cases = pytest.mark.skipif(not CASES.is_file(), reason="the shared cases are not beside this repository")


def write(folder: Path, *lines: object, name: str = "prompts.jsonl") -> Path:
    """A JSONL file; a string is a raw line."""
    path = folder / name
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: object) -> dict[str, object]:
    return {"role": "assistant", "content": text}


@needs_cases
def test_every_shared_case_is_treated_as_its_expectation_says():
    records, tally = read_records(CASES)
    kept = {record.line: record for record in records}
    assert sorted(kept) == [1, 2, 3, 4, 5, 8, 9, 10, 14, 17, 18]
    assert [problem.line for problem in tally.problems] == [6, 7, 11, 12, 13, 15]
    assert tally.skipped == {
        "empty conversation": 1,
        "no user turn": 1,
        "preformatted text": 2,
        "empty assistant answer": 1,
        "bad JSON": 1,
        "duplicate": 1,
    }
    assert tally.repaired == {
        "leading assistant turn dropped": 2,
        "unknown role read as assistant": 1,
        "number made text": 1,
    }
    assert tally.warnings == ["unknown role 'laguna_s' (1 turn) was read as assistant"]
    assert kept[4].messages[0] == user("go on")
    assert kept[5].messages == (user("2+2?"), assistant("4"))
    assert kept[9].prompt == [user("a"), user("b")]
    assert kept[10].prompt == [user("a"), user("c")]
    assert kept[14].messages[1]["content"] == "杭州是浙江省会。西湖很美。🍵 Ｆｕｌｌ－ｗｉｄｔｈ, naïve café, שלום"
    assert kept[17].messages[0]["content"] == "12"


@needs_cases
def test_preformatted_text_is_kept_byte_for_byte_where_it_is_asked_for():
    records, _ = read_records(CASES, preformatted=True)
    texts = [record.text for record in records if record.text is not None]
    assert texts == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n",
        "<|im_start|>user\r\nhi<|im_end|>\r\n<|im_start|>assistant\r\nHello!<|im_end|>\r\n",
    ]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [user("hi")]},
        {"conversations": [user("hi"), assistant("yes")]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "hi"},
        {"prompt": [user("hi")]},
        {"messages": None, "prompt": "hi"},
        {"messages": [{"role": "USER", "content": "hi"}]},
        {"messages": [user([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}])]},
        {"messages": [user("hi"), assistant(None), user("hi"), assistant("x")], "expect": 2},
    ],
)
def test_every_common_shape_gives_the_same_prompt(tmp_path, line):
    (record,), tally = read_records(write(tmp_path, line))
    assert record.prompt == [user("hi")] * line.get("expect", 1)
    assert tally.kept == 1 and not tally.skipped


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "bad JSON"),
        ("[" * 100_000, None),
        ('{"messages": ' + "[" * 100_000, "bad JSON"),
        ("7", "not an object"),
        ({"question": "hi"}, "no known key"),
        ({}, "no known key"),
        ({"messages": "hi"}, None),
        ({"messages": {"role": "user"}}, "turns are not a list"),
        ({"messages": ["hi"]}, "turn is not an object"),
        ({"messages": [{"content": "hi"}]}, "turn without a role"),
        ({"messages": [user(None)]}, "content is not text"),
        ({"messages": [user({"text": "hi"})]}, "content is not text"),
        ({"messages": [user([{"type": "image_url"}])]}, "content is not text"),
        ({"messages": [user(" \n")]}, "empty user turn"),
        ({"messages": [user("hi"), {"role": "tool", "content": "3"}]}, "tool turn"),
        ({"messages": [user("\ud800")]}, "broken Unicode"),
        ({"id": "\udfff", "messages": [user("hi")]}, "broken Unicode"),
    ],
)
def test_an_unusable_line_is_skipped_under_its_reason_or_stops_with_its_number(tmp_path, line, reason):
    path = write(tmp_path, {"prompt": "first"}, line, {"prompt": "last"})
    records, tally = read_records(path)
    if reason is None:
        assert set(tally.skipped) <= {"bad JSON"}
        return
    assert [record.prompt[0]["content"] for record in records] == ["first", "last"]
    assert tally.skipped == {reason: 1}
    with pytest.raises(InputError, match=f"{reason}.*line 2"):
        read_records(path, on_error="stop")


def test_an_unknown_role_is_warned_of_once_however_often_it_occurs(tmp_path):
    lines = [{"messages": [user(f"{n}?"), {"role": "k2", "content": "x"}]} for n in range(5)]
    records, tally = read_records(write(tmp_path, *lines))
    assert len(records) == 5
    assert tally.warnings == ["unknown role 'k2' (5 turns) was read as assistant"]


def test_ids_are_unique_whatever_the_file_says(tmp_path):
    names = ["x", "x", "x-2", None, 7, "7", "x"]
    lines = [{"id": name, "prompt": f"question {index}"} for index, name in enumerate(names)]
    records, tally = read_records(write(tmp_path, *lines))
    assert [record.id for record in records] == ["x", "x-2", "x-2-2", "line-4", "7", "7-2", "x-3"]
    assert tally.repaired == {"repeated id renamed": 4}


def test_blank_lines_a_byte_order_mark_and_odd_separators_do_no_harm(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b\xe2\x80\xa8c"}')
    records, tally = read_records(path)
    assert [(record.line, record.prompt[0]["content"]) for record in records] == [(1, "a"), (4, "b\u2028c")]
    assert not tally.skipped


def test_a_file_that_cannot_be_read_at_all_is_a_clear_error(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="a folder"):
        read_records(tmp_path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "ok"}\n{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(InputError, match=r"0xe9.*line 2, byte 16"):
        read_records(latin)
    with pytest.raises(InputError, match="a JSON array"):
        read_records(write(tmp_path, "[", '{"prompt": "a"}', "]", name="array.jsonl"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "gpt", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["id", "messages", "conversations", "prompt", "text", "role", "from", "content", "value"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
lines_of_json = st.lists(json_values.map(lambda value: json.dumps(value).encode()), max_size=5).map(b"\n".join)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200) | lines_of_json, preformatted=st.booleans(), stop=st.booleans())
def test_no_bytes_give_anything_but_records_or_an_input_error(tmp_path, data, preformatted, stop):
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    tally = Tally()
    try:
        records = list(iter_records(path, tally, on_error="stop" if stop else "skip", preformatted=preformatted))
    except InputError:
        return
    blank = sum(not line.decode().removeprefix("\ufeff").strip() for line in data.split(b"\n"))
    assert len(records) + tally.skipped.total() + blank == len(data.split(b"\n"))
    assert tally.kept == len(records) == len({record.id for record in records})
    for record in records:
        json.dumps([record.id, record.text, *record.messages], ensure_ascii=False).encode()
        assert record.text is not None or any(turn["role"] == "user" for turn in record.prompt)


def test_the_stage_writes_both_splits_of_the_bank_and_does_no_work_twice(tmp_path):
    wanted = PromptsSettings(train=40, heldout=8, seed=3)
    manifest = make_prompts(tmp_path / "prompts", wanted)
    rows = read_prompts(tmp_path / "prompts")
    assert Counter(row["split"] for row in rows) == {"train": 40, "heldout": 8}
    assert len({row["id"] for row in rows}) == 48
    assert all(row["topic"] and row["family"] and row["messages"][-1]["role"] == "user" for row in rows)
    assert verify_files(tmp_path / "prompts") == []
    assert make_prompts(tmp_path / "prompts", wanted) == manifest


def test_a_complete_folder_under_other_settings_stops_with_the_fields_name(tmp_path):
    make_prompts(tmp_path / "prompts", PromptsSettings(train=4, heldout=1))
    with pytest.raises(InputError, match=r"prompts\.seed = 9"):
        make_prompts(tmp_path / "prompts", PromptsSettings(train=4, heldout=1, seed=9))


def test_a_file_source_is_split_by_seed_and_its_order_does_not_matter(tmp_path):
    lines = [{"id": f"q{n}", "prompt": f"question {n}"} for n in range(30)]
    wanted = PromptsSettings(source=str(write(tmp_path, *lines)), train=20, heldout=5)
    make_prompts(tmp_path / "a", wanted)
    backwards = str(write(tmp_path, *lines[::-1], name="b.jsonl"))
    make_prompts(tmp_path / "b", wanted.model_copy(update={"source": backwards, "train": 25}))
    make_prompts(tmp_path / "c", wanted.model_copy(update={"seed": 1}))
    heldout = {
        name: [row["id"] for row in read_prompts(tmp_path / name) if row["split"] == "heldout"] for name in "abc"
    }
    assert heldout["a"] == heldout["b"] and len(heldout["a"]) == 5
    assert heldout["a"] != heldout["c"]


@needs_cases
def test_the_manifest_counts_what_was_skipped_and_why(tmp_path):
    facts = make_prompts(tmp_path / "p", PromptsSettings(source=str(CASES), train=8, heldout=3)).facts
    assert facts["usable"] == 11
    assert facts["skipped"]["preformatted text"] == 2 and facts["skipped"]["duplicate"] == 1
    assert any(problem.startswith("line 15: bad JSON: ") for problem in facts["problems"])


def test_too_few_prompts_say_how_many_there_are(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"})
    with pytest.raises(InputError, match=r"2 usable distinct prompts.*1 duplicate"):
        make_prompts(tmp_path / "p", PromptsSettings(source=str(path), train=2, heldout=1))
    assert not (tmp_path / "p").exists()


def test_a_source_that_changed_since_is_not_taken_for_the_same(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    wanted = PromptsSettings(source=str(path), train=1, heldout=1)
    make_prompts(tmp_path / "p", wanted)
    write(tmp_path, {"prompt": "a"}, {"prompt": "c"})
    with pytest.raises(InputError, match=r"sha256 of prompts\.source"):
        make_prompts(tmp_path / "p", wanted)


def test_a_misspelt_bank_is_named(tmp_path):
    with pytest.raises(InputError, match='did you mean "bank"'):
        make_prompts(tmp_path / "p", PromptsSettings(source="bnak"))
