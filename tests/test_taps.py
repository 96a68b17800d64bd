"""Every numbering of layers against serving.md's worked table, and back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import InputError
from eyas.formats.engines import KNOWN, parse_engine, releases, version_key
from eyas.formats.taps import (
    OFFSETS,
    TapKeys,
    captures,
    check_boundaries,
    default_boundaries,
    from_dialect,
    ids_for,
    to_dialect,
)
from eyas.formats.targets import FIRST_ID_RULE, OUTPUT_IDS

DEFAULT_61 = (2, 30, 58)
# nested ids: SGLang llama/qwen, deepseek_v2/Kimi, gpt_oss rule; vLLM with the ids honoured; vLLM V2, nested only
WORKED_TABLE = [
    ((2, 30, 58), (3, 31, 59), (2, 30, 58), (3, 31, 59), (2, 30, 58), DEFAULT_61),
    ((1, 29, 57), (2, 30, 58), (2, 30, 58), (2, 30, 58), (1, 29, 57), DEFAULT_61),
    (None, DEFAULT_61, DEFAULT_61, DEFAULT_61, DEFAULT_61, DEFAULT_61),
    ((-1, 29, 57), (0, 30, 58), (29, 57), (0, 30, 58), (29, 57), DEFAULT_61),
    ((0, 30, 58), (1, 31, 59), (0, 30, 58), (1, 31, 59), (0, 30, 58), DEFAULT_61),
    ((1, 29, 60), (2, 30), (2, 30), (2, 30, 61), (1, 29, 60), DEFAULT_61),
    ((2, 30, 61), (3, 31), (2, 30), (2, 30, 61), (2, 30, 61), DEFAULT_61),
    ((58, 2, 30), (3, 31, 59), (2, 30, 58), (3, 31, 59), (2, 30, 58), DEFAULT_61),
]


def codes(found):
    return {problem.code for problem in found.problems}


@pytest.mark.parametrize(("ids", "llama", "deepseek", "gpt_oss", "vllm", "vllm_v2"), WORKED_TABLE)
def test_the_worked_table_holds_for_five_readers(ids, llama, deepseek, gpt_oss, vllm, vllm_v2):
    nested = TapKeys(nested=ids)
    sglang = parse_engine("sglang@0.5.23")
    assert captures(sglang, nested, "llama", 61).boundaries == llama
    assert captures(sglang, nested, "kimi_k25", 61).boundaries == deepseek
    assert captures(sglang, nested, "deepseek_v3", 61).boundaries == deepseek
    assert captures(sglang, nested, "gpt_oss", 61).boundaries == gpt_oss
    assert captures(parse_engine("vllm@0.33/v1"), nested, "llama", 61).boundaries == vllm
    assert captures(parse_engine("vllm@0.33/v2"), TapKeys(top=ids), "llama", 61).boundaries == vllm
    assert captures(parse_engine("vllm@0.33/v2"), nested, "llama", 61).boundaries == vllm_v2


def test_the_page_on_dialects_shows_what_the_code_does():
    page = (Path(__file__).parents[1] / "docs" / "dialects.md").read_text()
    for ids, *_ in WORKED_TABLE:
        keys, sglang = TapKeys(nested=ids), parse_engine("sglang@0.5.23")
        readers = [(sglang, "llama"), (sglang, "kimi_k25"), (sglang, "gpt_oss"), (parse_engine("vllm/v1"), "llama")]
        cells = [captures(engine, keys, target, 61).boundaries for engine, target in readers]
        cells.append(captures(parse_engine("vllm/v2"), keys, "llama", 61).boundaries)
        words = ["absent" if ids is None else str(list(ids)), *(", ".join(map(str, cell)) for cell in cells)]
        assert f"| {' | '.join(words)} |" in page


def test_fewer_states_than_ids_is_said():
    sglang = parse_engine("sglang")
    assert codes(captures(sglang, TapKeys(nested=(-1, 29, 57)), "kimi_k2", 61)) == {"tap_missing"}
    assert codes(captures(sglang, TapKeys(nested=(1, 29, 60)), "llama", 61)) == {"tap_missing"}
    assert codes(captures(sglang, TapKeys(nested=(1, 29, 60)), "gpt_oss", 61)) == set()
    assert codes(captures(sglang, TapKeys(nested=(2, 2, 30)), "llama", 61)) == {"tap_missing"}


def test_an_unsorted_list_is_a_warning_about_order():
    assert codes(captures(parse_engine("sglang"), TapKeys(nested=(58, 2, 30)), "llama", 61)) == {"tap_order"}


def test_absent_ids_and_unread_ids_are_told_apart():
    v2, v1, sglang = parse_engine("vllm/v2"), parse_engine("vllm/v1"), parse_engine("sglang")
    nested, top = TapKeys(nested=(1, 21, 40)), TapKeys(top=(1, 21, 40))
    assert codes(captures(v2, nested, "llama", 43)) == {"ids_ignored"}
    assert codes(captures(sglang, top, "llama", 43)) == {"ids_ignored"}
    assert codes(captures(parse_engine("llamacpp"), nested, "llama", 43)) == {"ids_ignored"}
    assert captures(parse_engine("llamacpp"), nested, "llama", 43).boundaries == (2, 21, 40)
    assert captures(v1, nested, "llama", 43).boundaries == (1, 21, 40)
    assert codes(captures(v2, TapKeys(), "llama", 43)) == {"config_key_missing"}
    assert captures(v2, TapKeys(layer_ids=(1, 21, 40)), "llama", 43).boundaries == (1, 21, 40)


def test_the_top_level_list_wins_in_vllm():
    both = TapKeys(top=(2, 30, 58), nested=(1, 29, 57))
    for engine in ("vllm/v1", "vllm/v2"):
        assert captures(parse_engine(engine), both, "llama", 61).boundaries == (2, 30, 58)
    assert captures(parse_engine("sglang"), both, "llama", 61).boundaries == (2, 30, 58)


def test_upgrading_sglang_rewires_a_kimi_draft():
    kept = TapKeys(nested=(2, 30, 58))
    by_release = {e.release: captures(e, kept, "kimi_k25", 61).boundaries for e in releases("sglang")}
    assert by_release == {
        "0.5.11": (3, 31, 59),
        "0.5.12": (3, 31, 59),
        "0.5.12.post1": (3, 31, 59),
        "0.5.13": (2, 30, 58),
        "0.5.16": (2, 30, 58),
        "0.5.17": (2, 30, 58),
        "0.5.23": (2, 30, 58),
    }
    assert ids_for(parse_engine("sglang@0.5.13"), (3, 31, 59), "kimi_k25", 61) == [3, 31, 59]
    assert ids_for(parse_engine("sglang@0.5.12"), (3, 31, 59), "kimi_k25", 61) == [2, 30, 58]


def test_the_embedding_of_a_kimi_draft_is_lost_on_upgrade():
    ids = TapKeys(nested=(-1, 2, 30))
    before = captures(parse_engine("sglang@0.5.12.post1"), ids, "kimi_k25", 61)
    after = captures(parse_engine("sglang@0.5.13"), ids, "kimi_k25", 61)
    assert before.boundaries == (0, 3, 31) and codes(before) == set()
    assert after.boundaries == (2, 30) and codes(after) == {"tap_missing"}


def test_glm4_moe_lite_follows_the_first_id_rule_from_0_5_13():
    ids = TapKeys(nested=(2, 23, 44))
    assert captures(parse_engine("sglang@0.5.12"), ids, "glm4_moe_lite", 47).boundaries == (3, 24, 45)
    assert captures(parse_engine("sglang@0.5.13"), ids, "glm4_moe_lite", 47).boundaries == (2, 23, 44)


def test_gpt_oss_reaches_the_last_boundary_from_0_5_17():
    ids = TapKeys(nested=(24, 30, 36))
    old = captures(parse_engine("sglang@0.5.16"), ids, "gpt_oss", 36)
    assert old.boundaries == (25, 31) and codes(old) == {"tap_missing"}
    assert captures(parse_engine("sglang@0.5.17"), ids, "gpt_oss", 36).boundaries == (24, 30, 36)
    assert captures(parse_engine("vllm"), TapKeys(top=(24, 30, 36)), "gpt_oss", 36).boundaries == (24, 30, 36)


def test_minimax_m3_vl_shifts_its_default_too():
    assert captures(parse_engine("sglang"), TapKeys(), "minimax_m3_vl", 61).boundaries == (3, 31, 59)


def test_vllm_cannot_take_the_embedding_of_a_deepseek():
    found = captures(parse_engine("vllm"), TapKeys(top=(0, 30, 58)), "deepseek_v3", 61)
    assert found.boundaries is None and codes(found) == {"tap_embedding"}


def test_without_aux_states_there_are_no_taps():
    found = captures(parse_engine("sglang"), TapKeys(nested=(1, 2, 3), use_aux=False), "gpt_oss", 36)
    assert found.boundaries == () and codes(found) == {"fc_skipped"}


def test_an_unknown_target_class_is_not_guessed_for_sglang():
    keys = TapKeys(top=(2, 30, 58), nested=(1, 29, 57))
    assert captures(parse_engine("sglang"), keys, "mystery", 61).boundaries is None
    assert captures(parse_engine("sglang"), keys, None, 61).boundaries is None
    assert captures(parse_engine("vllm"), keys, None, None).boundaries is None


@pytest.mark.parametrize(
    ("engine", "boundaries", "target_type"),
    [
        ("sglang", (2, 30, 61), "llama"),
        ("sglang", (2, 30, 61), "kimi_k25"),
        ("sglang@0.5.16", (2, 30, 61), "gpt_oss"),
        ("sglang", (1, 30, 58), "deepseek_v3"),
        ("sglang", (2, 30, 58), "mystery"),
        ("vllm", (0, 30, 58), "deepseek_v2"),
        ("llamacpp", (2, 30), "llama"),
        ("llamacpp", (2, 30, 61), "llama"),
    ],
)
def test_what_an_engine_cannot_represent_is_refused(engine, boundaries, target_type):
    with pytest.raises(InputError, match="no such list"):
        ids_for(parse_engine(engine), boundaries, target_type, 61)


@pytest.mark.parametrize(
    ("engine", "boundaries", "target_type", "ids"),
    [
        ("sglang", (2, 30, 58), "llama", [1, 29, 57]),
        ("sglang", (0, 30, 58), "llama", [-1, 29, 57]),
        ("sglang", (0, 30, 58), "kimi_k25", [0, 30, 58]),
        ("sglang", (3, 31, 59), "kimi_k25", [3, 31, 59]),
        ("sglang", (2, 30, 61), "gpt_oss", [1, 29, 60]),
        ("sglang", (2, 30, 58), "minimax_m3_vl", [1, 29, 57]),
        ("vllm", (2, 30, 61), "llama", [2, 30, 61]),
        ("vllm/v1", (0, 30, 58), "llama", [0, 30, 58]),
        ("llamacpp", (2, 30, 58), "llama", [2, 30, 58]),
    ],
)
def test_ids_written_for_an_engine(engine, boundaries, target_type, ids):
    assert ids_for(parse_engine(engine), boundaries, target_type, 61) == ids


def test_default_taps_of_a_kimi_draft_mean_the_same_in_every_release():
    ids = ids_for(parse_engine("sglang"), (2, 30, 58), "kimi_k25", 61)
    assert {captures(e, TapKeys(nested=tuple(ids)), "kimi_k25", 61).boundaries for e in releases("sglang")} == {
        (2, 30, 58)
    }


ENGINES = [f"sglang@{r}" for r in KNOWN["sglang"]]
ENGINES += [f"vllm@{r}/{runner}" for r in KNOWN["vllm"] for runner in ("v1", "v2")] + ["llamacpp"]
TARGETS = sorted({"gpt_oss", "minimax_m3_vl"} | FIRST_ID_RULE | OUTPUT_IDS)


@st.composite
def taps_of_a_target(draw):
    n = draw(st.integers(2, 80))
    return n, tuple(sorted(draw(st.sets(st.integers(0, n), min_size=1, max_size=5))))


@given(st.sampled_from(ENGINES), st.sampled_from(TARGETS), taps_of_a_target())
def test_ids_for_then_captures_is_the_identity_where_it_does_not_refuse(engine, target_type, taps):
    n, boundaries = taps
    reader = parse_engine(engine)
    try:
        ids = tuple(ids_for(reader, boundaries, target_type, n))
    except InputError:
        return
    keys = TapKeys(nested=ids) if reader.name == "sglang" else TapKeys(top=ids)
    found = captures(reader, keys, target_type, n)
    assert found.boundaries == boundaries and codes(found) == set()


@given(st.sampled_from(sorted(OFFSETS)), taps_of_a_target())
def test_trainers_numberings_go_there_and_back(dialect, taps):
    n, boundaries = taps
    if dialect == "huggingface" and n in boundaries:
        with pytest.raises(InputError, match="final norm"):
            to_dialect(dialect, boundaries, n)
        return
    assert from_dialect(dialect, to_dialect(dialect, boundaries, n), n) == boundaries


def test_trainers_defaults_are_the_same_three_boundaries():
    for dialect in ("specforge", "torchspec", "modelopt", "nemo", "angelslim"):
        assert from_dialect(dialect, [1, 29, 57], 61) == (2, 30, 58)
    for dialect in ("huggingface", "eagle", "speculators"):
        assert from_dialect(dialect, [2, 30, 58], 61) == (2, 30, 58)
    with pytest.raises(InputError, match="specforge"):
        from_dialect("specforg", [1], 61)


def test_default_taps_need_seven_layers():
    assert default_boundaries(7) == (2, 3, 4)
    assert default_boundaries(30) == (2, 15, 27)
    with pytest.raises(InputError, match="at least 7 layers"):
        default_boundaries(6)


@pytest.mark.parametrize("wrong", [[], [3, 2], [2, 2], [-1, 2], [2, 31]])
def test_taps_out_of_range_or_unsorted_are_refused(wrong):
    with pytest.raises(InputError):
        check_boundaries(wrong, 30, where="test")


def test_releases_are_ordered_as_published():
    order = ["0.5.11", "0.5.12rc1", "0.5.12", "0.5.12.post1", "0.5.13", "0.20", "0.24.0", "0.33"]
    assert [version_key(v) for v in order] == sorted(version_key(v) for v in order)
    assert version_key("0.33") == version_key("0.33.0") == version_key("v0.33.0+cu128")


def test_engines_are_parsed_and_unknown_releases_follow_the_nearest_older():
    assert parse_engine("sglang").release == "0.5.23"
    assert str(parse_engine("vllm@0.33.0/v1")) == "vllm@0.33/v1"
    assert parse_engine("vllm").runner == "v2" and parse_engine("vllm@0.24").runner == "v1"
    assert parse_engine("vllm-cpu@0.32.0").runner == "v1"
    assert str(parse_engine("llamacpp")) == "llamacpp"
    between = parse_engine("sglang@0.5.14")
    assert between.release == "0.5.13"
    assert [problem.code for problem in between.problems] == ["version_unsupported"]
    assert parse_engine("sglang@0.4.6").release == "0.5.11"
    assert parse_engine("sglang@0.5.12").problems == ()


@pytest.mark.parametrize("wrong", ["", "slang", "sglang@new", "sglang/v1", "vllm/v3", "vllm@0.33/v1/x"])
def test_malformed_engines_are_refused(wrong):
    with pytest.raises(InputError):
        parse_engine(wrong)
