"""One command line for three engines: what follows from the draft is derived, contradictions are refused by name."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from eyas.engine.server.arguments import parse
from eyas.errors import InputError
from eyas.launch.arguments import parse_launch, split_words
from eyas.launch.command import Command, build_command
from eyas.launch.known_flags import known_flags
from eyas.launch.passed import split_flags, unknown_flags
from eyas.recipe import Recipe, ServeSettings, TargetSettings, load_recipe, packaged_recipes, recipe_of

OUT = Path("runs/x/serve")
TARGET = TargetSettings(name="org/target")


def build(draft: str | None = "org/draft", **settings: object) -> Command:
    return build_command(TARGET, draft, ServeSettings.model_validate(settings), OUT)


def draft_folder(folder: Path, **more: object) -> str:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sglang_is_started_with_eagle3_and_the_chain_the_draft_was_trained_for(tmp_path: Path) -> None:
    draft = draft_folder(tmp_path, eyas={"format": 1, "ttt_length": 5})
    assert build(draft, engine="sglang", python="/env/bin/python", tensor_parallel=8).argv == (
        *("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "org/target", "--host", "127.0.0.1"),
        *("--port", "30000", "--tp-size", "8", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", draft, "--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "6", "--enable-metrics"),
    )


@pytest.mark.parametrize("engine", ["embedded", "sglang", "vllm"])
def test_a_draft_folder_that_is_not_there_is_noted_and_a_hub_id_is_not(engine: str, tmp_path: Path) -> None:
    absent = str(tmp_path / "none")
    assert build(absent, engine=engine).notes == (f"the draft's folder {absent} is not there",)
    assert build("org/draft", engine=engine).notes == ()


def test_vllm_is_told_the_method_and_a_chain() -> None:
    command = build(engine="vllm", python="python3.11", port=8001, num_steps=4)
    assert command.argv[:5] == ("python3.11", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/target")
    assert command.argv[5:11] == ("--host", "127.0.0.1", "--port", "8001", "--tensor-parallel-size", "1")
    assert command.argv[11] == "--speculative-config"
    assert json.loads(command.argv[12]) == {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 4}
    assert command.url == "http://127.0.0.1:8001"


def test_the_embedded_engine_is_started_like_any_other() -> None:
    assert build(topk=4, num_steps=3, engine="embedded").argv == (
        *(
            sys.executable,
            "-m",
            "eyas.engine.server",
            "--target",
            "org/target",
            "--host",
            "127.0.0.1",
            "--port",
            "8000",
        ),
        *("--draft", "org/draft", "--num-steps", "3", "--topk", "4", "--num-draft-tokens", "8"),
    )


def test_without_a_draft_nothing_of_speculation_is_said() -> None:
    for engine in ("sglang", "vllm", "embedded"):
        assert not any("spec" in word or "draft" in word for word in build(None, engine=engine).argv)


@pytest.mark.parametrize(
    ("engine", "words", "said"),
    [
        ("sglang", "--speculative-algorithm EAGLE", "an EAGLE-3 draft is never started with another algorithm"),
        ("sglang", "--speculative-algo NEXTN", "an EAGLE-3 draft is never started with another algorithm"),
        ("sglang", "--speculative-num-steps 7", "--speculative-num-steps 3"),
        ("sglang", "--speculative-draft-model other/draft", "--speculative-draft-model-path org/draft"),
        ("sglang", "--model other/target", "--model-path org/target"),
        ("sglang", "--tensor-parallel-size 4", "--tp-size 1"),
        ("sglang", "--port=30001", "--port 30000"),
        ("vllm", '--speculative-config {"method":"ngram"}', "an EAGLE-3 draft is never started with another algorithm"),
        ("vllm", '-sc {"num_speculative_tokens":7}', "num_speculative_tokens"),
        ("vllm", "-tp 2", "--tensor-parallel-size 1"),
        ("vllm", "--speculative-config.method ngram", "an EAGLE-3 draft is never started with another algorithm"),
        ("vllm", "--spec-method ngram", "an EAGLE-3 draft is never started with another algorithm"),
        ("vllm", "--spec-tokens 7", "num_speculative_tokens"),
        ("vllm", "--tensor-par 2", "--tensor-parallel-size 1"),
        ("sglang", "--speculative-alg NGRAM", "an EAGLE-3 draft is never started with another algorithm"),
        ("sglang", "--speculative_num_steps 7", "--speculative-num-steps 3"),
        ("embedded", "--num-steps 9", "--num-steps 3"),
    ],
)
def test_what_contradicts_the_derived_arguments_is_refused_by_name(engine: str, words: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        build(engine=engine, engine_args=tuple(words.split(" ")))
    error = refused.value
    assert (
        said in error.wanted and words.split(" ")[0].partition("=")[0] in error.got and error.where == "--engine-args"
    )


def test_repeating_what_is_derived_is_no_contradiction_and_says_it_once() -> None:
    words = build(engine="sglang", engine_args=("--speculative-algorithm", "EAGLE3", "--page-size", "1")).argv
    assert words.count("--speculative-algorithm") == 1
    assert words[-2:] == ("--page-size", "1")


def test_further_keys_of_vllms_speculative_json_are_kept() -> None:
    given = ("--speculative-config", '{"draft_tensor_parallel_size": 1, "method": "eagle3"}')
    argv = build(engine="vllm", engine_args=given).argv
    assert argv.count("--speculative-config") == 1
    merged = json.loads(argv[argv.index("--speculative-config") + 1])
    assert merged == {
        "method": "eagle3",
        "model": "org/draft",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    dotted = ("--speculative-config.draft_tensor_parallel_size", "1", "--spec-method", "eagle3")
    assert build(engine="vllm", engine_args=dotted).argv == argv


def test_speculation_that_needs_no_draft_of_ours_may_be_passed_and_a_draft_may_not() -> None:
    ngram = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    assert build(None, engine="sglang", engine_args=ngram).argv[-4:] == ngram
    with pytest.raises(InputError, match="--draft"):
        build(None, engine="sglang", engine_args=("--speculative-draft-model-path", "d"))
    with pytest.raises(InputError, match="no draft"):
        build(None, engine="vllm", engine_args=("--speculative-config", '{"method": "eagle3", "model": "d"}'))


def test_a_folder_that_is_no_eagle3_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}')
    with pytest.raises(InputError, match="an EAGLE-3 draft"):
        build(str(tmp_path), engine="sglang")


def test_trees_and_chains_verify_what_they_draft() -> None:
    with pytest.raises(InputError, match="vLLM drafts chains only"):
        build(engine="vllm", topk=4)
    with pytest.raises(InputError, match="num_draft_tokens 4"):
        build(engine="sglang", num_draft_tokens=9)
    with pytest.raises(InputError, match="of 7 or less"):
        build(engine="sglang", topk=2, num_steps=2, num_draft_tokens=8)
    assert build(engine="sglang", topk=2, num_steps=2).shape == build(topk=2, num_steps=2, num_draft_tokens=7).shape


def test_trace_puts_the_engine_side_on_the_path_disables_graphs_and_says_what_it_costs() -> None:
    command = build(engine="vllm", trace=True, env={"PYTHONPATH": "/mine"})
    side, mine = command.env["PYTHONPATH"].split(os.pathsep)
    assert Path(side, "eyas_trace").is_dir() and mine == "/mine"
    assert command.env["EYAS_TRACE"] == "1" and command.env["EYAS_TRACE_OUT"] == str(OUT.absolute() / "trace")
    assert command.argv[-2:] == ("--enforce-eager", "--no-enable-prefix-caching")
    assert "measure nothing" in command.notes[0]
    assert "--disable-cuda-graph" in build(engine="sglang", trace=True).argv
    assert build(trace=True).env["EYAS_TRACE"] == "1" and "PYTHONPATH" not in build(trace=True).env


def test_every_flag_that_is_derived_is_one_of_the_parser() -> None:
    for engine in ("sglang", "vllm"):
        argv = build(engine=engine, trace=True).argv
        flags = [flag for flag, _ in split_flags(argv[argv.index("--host") :])]
        assert unknown_flags(engine, flags) == []
        assert {flag for flag in flags if flag.startswith("--") and not flag.startswith("--no-")} <= known_flags(engine)


def test_an_unknown_flag_is_told_before_the_engine_refuses_it() -> None:
    notes = build(engine="sglang", engine_args=("--mem-fraction-statc", "0.8")).notes
    said = '--mem-fraction-statc is no flag of sglang 0.5.23 (did you mean "--mem-fraction-static"?)'
    assert notes == (f"{said}: the engine will refuse it",)
    fine = ("--no-enable-chunked-prefill", "--compilation-config.mode", "3", "--max_model_len", "100", "-O3")
    assert build(engine="vllm", engine_args=fine).notes == ()


def test_the_embedded_servers_flags_are_those_of_its_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert known_flags("embedded") == set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    notes = build(engine="embedded", engine_args=("--max-runing", "3", "--grace-s", "1")).notes
    assert notes == (
        '--max-runing is no flag of the embedded server (did you mean "--max-running"?): the engine will refuse it',
    )


def test_a_quote_that_is_not_closed_is_said() -> None:
    assert split_words("""--a '{"b": 1}'""") == ["--a", '{"b": 1}']
    for read in (split_words, lambda text: parse_launch("vllm@0.33.0", text)):
        with pytest.raises(InputError, match="close the quote"):
            read("--model 'x")


def test_engine_arguments_begin_with_a_flag_and_keep_negative_numbers_as_values() -> None:
    assert split_flags(["--a", "-1", "--b=x=y", "--c", "1", "2"]) == [
        ("--a", ("-1",)),
        ("--b", ("x=y",)),
        ("--c", ("1", "2")),
    ]
    with pytest.raises(InputError, match="begin with a flag"):
        split_flags(["model", "--a"])


def test_the_packaged_recipes_serve_the_three_cases() -> None:
    assert {"own-cpu", "8b-vllm", "kimi-sglang"} <= set(packaged_recipes())
    kimi = load_recipe("kimi-sglang")
    argv = build_command(kimi.target, "d", kimi.serve, OUT).argv
    for words in ("--tp-size 8", "--speculative-algorithm EAGLE3", "--speculative-draft-attention-backend fa3"):
        flag, value = words.split()
        assert argv[argv.index(flag) + 1] == value
    assert "--trust-remote-code" in argv
    small = load_recipe("8b-vllm")
    assert json.loads(build_command(small.target, small.serve.draft, small.serve, OUT).argv[-5])["method"] == "eagle3"
    assert load_recipe("own-cpu").serve.engine == "embedded"


def test_settings_name_an_engine_that_can_be_served() -> None:
    assert recipe_of(("serve.engine=sglang@0.5.17",)).serve.engine == "sglang@0.5.17"
    for name in ("llamacpp", "sglnag", "sglang@latest"):
        with pytest.raises(InputError):
            recipe_of((f"serve.engine={name}",))
    assert recipe_of(()) == Recipe()
