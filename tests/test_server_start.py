"""What the embedded server refuses before it serves: flags, addresses, drafts that are not there, a cache that does not
fit; each in four parts, on the line that launch/ reads, with status 2."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.engine.batching import Scheduler
from eyas.engine.generate import Engine
from eyas.engine.server import program, start
from eyas.engine.server.arguments import parse
from eyas.errors import InputError
from eyas.launch import own_lines
from eyas.launch.log_state import read_log
from eyas.models.target import load_target


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a start that ends with status 2."""
    assert program.main(words) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--port 99999", "a whole number from 1 to 65535; got '99999'; at --port; next: --port 8000"),
        ("--port 0", "a whole number from 1 to 65535; got '0'; at --port; next: --port 8000"),
        ("--port abc", "a whole number from 1 to 65535; got 'abc'; at --port; next: --port 8000"),
        ("--ngram -1", "a value greater than or equal to 0; got -1; at --ngram; next: leave --ngram out"),
        ("--ngram 17", "a value less than or equal to 16; got 17; at --ngram; next: leave --ngram out"),
        ("--topk 0", "a value greater than or equal to 1; got 0; at --topk; next: leave --topk out"),
        ("--num-steps x", "a whole number; got 'x'; at --num-steps; next: --num-steps 3"),
        (
            "--num-steps 4 --num-draft-tokens 2",
            "a chain (topk 1) of 4 steps has 5 num_draft_tokens; got 2; at --num-draft-tokens; "
            "next: leave --num-draft-tokens out",
        ),
        ("--stop-below nan", "a number; got 'nan'; at --stop-below; next: --stop-below 0.0"),
        ("--stop-below 1", "a value less than 1; got 1.0; at --stop-below; next: leave --stop-below out"),
        ("--grace-s inf", "a number from 0 to 86400.0; got 'inf'; at --grace-s; next: --grace-s 10.0"),
        ("--max-running 0", "a whole number from 1 to 1024; got '0'; at --max-running; next: --max-running 16"),
        (
            "--cache-rows 10",
            "256 rows or more: the warm-up's text and a round; got 10; at --cache-rows; "
            "next: --cache-rows 256, or leave it out",
        ),
        ("--host=", "a word; got ''; at --host; next: leave --host out"),
        ("--api-key=", "a word; got ''; at --api-key; next: leave --api-key out"),
        ("--draft=", "a word; got ''; at --draft; next: leave --draft out"),
        (
            "--max-runing 3",
            'flags that this server has; got unrecognized arguments: --max-runing 3 (did you mean "--max-running"?); '
            "at --max-runing; next: python -m eyas.engine.server --help",
        ),
        (
            "--dtype float16",
            "flags that this server has; got argument --dtype: invalid choice: 'float16' (choose from 'auto', "
            "'float32', 'bfloat16', 'int8'); at --dtype; next: python -m eyas.engine.server --help",
        ),
    ],
)
def test_a_flag_that_cannot_be_is_refused_in_four_parts(
    words: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(words.split(), capsys)
    assert told == f"[eyas] failed=wrong_flag error=wanted {line}"
    (tmp_path / "log").write_text(told + "\n")
    state = read_log(tmp_path / "log")
    assert (state.engine, state.state, state.cause) == ("embedded", "crashed", "wrong_flag")
    assert state.advice == line.rpartition("; next: ")[2]


def test_zero_may_wait() -> None:
    assert parse(["--max-waiting", "0"]).max_waiting == 0


def test_a_draft_that_is_not_there_is_named_before_weights_are_loaded(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    for name, code, got in (("nope", "model_absent", "no such folder"), ("half", "unexplained", "no such file")):
        words = ["--target", str(tiny_target), "--port", str(free_port()), "--draft", str(tmp_path / name)]
        assert program.main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "[eyas] phase=args" and len(lines) == 2
        assert f"failed={code} " in lines[1] and got in lines[1] and f"at {tmp_path / name}" in lines[1]
        (tmp_path / "log").write_text("\n".join(lines))
        assert read_log(tmp_path / "log").advice == lines[1].rpartition("; next: ")[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_port_belongs_to_one_server_from_its_first_moment(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with program.bind("127.0.0.1", port) as loading:
        line = refused(["--port", str(port)], capsys)
        assert line == (
            f"[eyas] failed=port_busy error=wanted a free port; got 127.0.0.1:{port}, which is taken (port_busy); "
            f"at --port; next: --port {port + 1}, or stop what holds it: ss -ltnp"
        )
        program.listen(loading)
        assert "failed=port_busy" in refused(["--port", str(port)], capsys)
        with socket.create_connection(("127.0.0.1", port)):
            loading.accept()[0].close()  # who closes first keeps the address a minute
    with program.bind("127.0.0.1", port) as again, program.bind("127.0.0.1", port) as beside:
        program.listen(again)
        with pytest.raises(InputError, match="port_busy"):
            program.listen(beside)


def test_an_address_that_is_not_this_machines_is_told_apart_from_a_busy_port(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(["--host", "192.0.2.1", "--port", "8000"], capsys)
    assert line == (
        "[eyas] failed=wrong_flag error=wanted an address of this machine, and a port that may be listened on; "
        "got 192.0.2.1:8000: Cannot assign requested address; at --host, --port; next: --host 127.0.0.1 --port 8000"
    )


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Iterator[Engine]:
    made = Engine(load_target(str(tiny_target)), announce=False)
    yield made
    made.close()


def test_more_cache_rows_than_memory_are_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="memory for 1000000000 cache rows") as refusal:
        start.rows_for(engine, parse(["--cache-rows", "1000000000"]))
    assert refusal.value.code == "memory_short" and refusal.value.next.startswith("--cache-rows ")
    assert start.rows_for(engine, parse(["--cache-rows", "300"])) == 300
    assert start.rows_for(engine, parse(["--max-running", "2"])) == 2 * 1280, "1024 tokens and a round, in blocks"


def test_texts_are_as_long_as_the_cache_holds(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scheduler(engine, cache_rows=600, most=1)
    assert start.context_for(scheduler, None) == 512 - engine.rows
    assert "600 cache rows hold no more" in capsys.readouterr().err
    assert start.context_for(scheduler, 200) == 200 and not capsys.readouterr().err
    scheduler = Scheduler(engine, cache_rows=4096, most=1)
    assert start.context_for(scheduler, 5000) == 1024
    assert "texts have 1024 tokens at most, prompt included: the target's own" in capsys.readouterr().err


def test_a_failed_start_without_a_code_gives_its_own_advice(tmp_path: Path) -> None:
    line = own_lines.failed_line("unexplained", "wanted a; got b; at c; next: eyas inspect D")
    (tmp_path / "log").write_text(own_lines.phase_line("args") + "\n" + line)
    assert (read_log(tmp_path / "log").cause, read_log(tmp_path / "log").advice) == ("unexplained", "eyas inspect D")
