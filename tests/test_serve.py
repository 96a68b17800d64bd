"""A server as a process: started, seen, explained and stopped, with a scripted engine in the place of a real one."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cli import main
from eyas.errors import CheckFailed, InputError, ServerDied
from eyas.launch.evidence import port_of
from eyas.launch.find import all_servers, of_folder, of_pid, of_url
from eyas.launch.interpreter import installed
from eyas.launch.keeper import StampedLog
from eyas.launch.kernel import oom_killed, oom_kills
from eyas.launch.movement import Mark
from eyas.launch.process import is_same, read_server, start, tree
from eyas.launch.recall import recall, remember
from eyas.launch.state import Memory
from eyas.launch.stop import Doomed, by_pid, stop
from eyas.launch.watch import Watch, steady_clock
from eyas.pipeline.interrupts import Signalled, interrupts
from eyas.pipeline.serve import Launch, prepare, serve
from eyas.pipeline.watch import targets, watch_once
from eyas.recipe import recipe_of

FAKE = Path(__file__).with_name("fake_engine.py")
Fated = Callable[..., Launch]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers as an interpreter with SGLang 0.5.23 would, and serves as the scripted engine."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "fake-python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}')
    return program


@pytest.fixture
def fated(interpreter: Path, tmp_path: Path) -> Iterator[Fated]:
    """Decides a start whose end is known; what is left of it is killed after the test."""
    made: list[Path] = []

    def decide(fate: str = "ready", *, args: tuple[str, ...] = (), port: int | None = None, **more: Any) -> Launch:
        words = {
            "engine": "sglang",
            "plain": True,
            "python": str(interpreter),
            "port": port or free_port(),
            "engine_args": list(args),
            "env": {"FAKE": json.dumps({"fate": fate, **more})},
        }
        recipe = recipe_of((*(f"serve.{name}={value!r}" for name, value in words.items()), "target.name=target"))
        made.append(tmp_path / f"serve-{len(made)}")
        return prepare(recipe, made[-1])

    yield decide
    for folder in made:
        if (folder / "server.json").is_file():
            stop(Doomed.of(read_server(folder)), grace_s=0.1)


def test_what_a_plain_start_leaves_without_effect_is_said() -> None:
    recipe = recipe_of(("serve.plain=true", "serve.draft=d", "serve.num_steps=3"))
    (note,) = prepare(recipe, planning=True).command.notes
    assert note == "served without a draft (plain): the baseline; draft, num_steps without effect"
    assert prepare(recipe_of(("serve.plain=true",)), planning=True).command.notes[0].endswith("the baseline")


def test_a_server_is_started_watched_measured_and_stopped(fated: Fated) -> None:
    launch = fated(child="deaf")
    ready = serve(launch, detach=True)
    assert ready["state"] == "ready" and ready["url"] == launch.command.url and ready["pid"] == ready["pgid"]
    assert os.getpgid(ready["pid"]) == ready["pid"] != os.getpgid(0)
    assert Path(ready["log"]).read_text().count("Loading safetensors checkpoint shards") == 8
    seen = watch_once(of_url(ready["url"]))
    assert (seen["state"], seen["pid"], seen["folder"]) == ("ready", ready["pid"], str(launch.folder))
    assert {"engine", "phase", "progress", "eta_s", "cause", "evidence", "advice"} <= seen.keys()
    hits = httpx2.get(f"{ready['url']}/hits", trust_env=False).json()
    assert hits["overlaps"] == 0
    assert not [hit for hit in hits["hits"] if hit.startswith("/health")]  # it would cost a token each time
    assert len(seen["pids"]) == 2
    ended = stop(Doomed.of(read_server(launch.folder)), grace_s=0.3)
    assert (ended["stopped"], ended["port_free"], ended["holders"], ended["remaining"]) == (True, True, [], [])
    assert sorted(ended["pids"]) == sorted(seen["pids"])
    assert ended["killed"] == [pid for pid in seen["pids"] if pid != ready["pid"]]  # the child heeds no TERM
    assert watch_once(of_folder(launch.folder))["state"] == "stopped"


@pytest.mark.parametrize("pid", [-5, 0, 2**31, 10**30])
def test_a_number_that_is_no_pid_is_wrong_usage(pid: int) -> None:
    for ask in (of_pid, by_pid):
        with pytest.raises(InputError, match="no process"):
            ask(pid)


def test_a_recorded_start_is_expected_next_time(fated: Fated) -> None:
    launch = fated(warmup_s=0.0)
    assert launch.expected.phases == ()
    serve(launch, detach=True)
    again = fated()
    assert again.key == launch.key and "same flags" in again.expected.source


def test_the_live_accept_length_near_one_is_a_warning_that_names_the_check(fated: Fated) -> None:
    ready = serve(fated(), detach=True)
    found = of_url(ready["url"])
    seen = watch_once(type(found)(found.pid, found.created, found.engine, found.url, found.log))
    assert seen["acceptance"]["accept_length"] == 1.03 and seen["acceptance"]["rounds"] == 1000
    assert any("accept length 1.03" in note and "eyas check --url" in note for note in seen["notes"])


class Other(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def other_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


def test_a_taken_port_is_refused_before_the_start_and_named_after_it(fated: Fated, other_server: int) -> None:
    launch = fated(port=other_server)
    with pytest.raises(CheckFailed, match="port_busy"):
        serve(launch)
    assert not launch.folder.exists()
    with pytest.raises(ServerDied) as died:
        serve(launch, detach=True, force=True)
    assert died.value.facts["state"] == "crashed" and died.value.exit_code == 3
    said = " ".join(map(str, [died.value.got, *died.value.facts["last_lines"]]))
    assert "ddress already in use" in said or "port_busy" in said


def test_a_port_answered_by_another_process_makes_nothing_ready(fated: Fated, other_server: int) -> None:
    launch = fated("silent", port=other_server)
    start(launch.command, launch.folder, launch.key)
    seen = watch_once(of_folder(launch.folder))
    assert seen["state"] in ("starting", "loading")
    assert any(f"pid {os.getpid()}" in note and "not by this server" in note for note in seen["notes"])


def test_a_wrong_flag_is_told_before_and_named_after(fated: Fated) -> None:
    launch = fated(args=("--mem-fraction-statc", "0.8"))
    assert 'did you mean "--mem-fraction-static"' in launch.command.notes[0]
    with pytest.raises(ServerDied) as died:
        serve(launch, detach=True)
    assert died.value.facts["state"] == "crashed"
    assert "unrecognized arguments: --mem-fraction-statc" in str(died.value.facts["last_lines"])


def test_killed_while_loading_is_crashed_with_its_signal(fated: Fated) -> None:
    launch = fated("silent")
    server = start(launch.command, launch.folder, launch.key)
    watch = Watch(of_folder(launch.folder))
    assert watch.once().state in ("starting", "loading", "unknown")
    os.kill(server.pid, signal.SIGKILL)
    while (status := watch.look()).state != "crashed":
        time.sleep(0.02)
    assert status.cause in ("killed", "host_oom") and "signal 9 (SIGKILL)" in str(status.evidence)
    watch.close()


def test_a_kill_by_the_kernel_for_memory_is_told_from_any_other(fated: Fated) -> None:
    launch = fated("silent")
    server = start(launch.command, launch.folder, launch.key)
    os.kill(server.pid, signal.SIGKILL)
    exit_file = launch.folder / "exit.json"
    while not exit_file.exists():
        time.sleep(0.02)
    ended = json.loads(exit_file.read_text())
    assert (ended["signal"], ended["code"]) == (9, None) and ended["oom"] is not True
    exit_file.write_text(json.dumps(ended | {"oom": True}))
    seen = watch_once(of_folder(launch.folder))
    assert (seen["state"], seen["cause"]) == ("crashed", "host_oom")


def halfway(launch: Launch, clock: Callable[[], float]) -> Watch:
    """A watch of a server that has said half of its shards and falls silent."""
    start(launch.command, launch.folder, launch.key)
    watch = Watch(of_folder(launch.folder), clock=clock)
    while "4/8" not in str(watch.log):
        watch.look()
        time.sleep(0.02)
    return watch


def test_silent_and_idle_is_stuck(fated: Fated) -> None:
    now = [time.time()]
    watch = halfway(fated("silent"), lambda: now[0])
    for _ in range(30):  # 150 s of the test's own clock
        now[0] += 5.0
        status = watch.look()
    assert (status.state, status.phase, status.cause) == ("stuck", "weights", "no_progress")
    assert status.shards == (4, 8)
    watch.close()


def test_a_look_goes_on_from_the_last_one_so_that_a_script_is_told_of_a_stuck_server_too(
    fated: Fated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = fated("silent")
    halfway(launch, time.time).close()
    begun = time.time()
    for later, state, exit_code in ((0, "loading", 0), (60, "loading", 0), (150, "stuck", 3)):
        monkeypatch.setattr("eyas.launch.watch.steady_clock", lambda at=begun + later: lambda: at)
        monkeypatch.setattr("eyas.launch.recall.time.time", lambda at=begun + later: at)
        code, seen = shown(capsys, "watch", str(launch.folder), "--once")
        assert (code, seen["state"], seen["phase"], seen["idle_s"]) == (exit_code, state, "weights", later)
    assert seen["cause"] == "no_progress"


def test_the_last_look_at_another_process_of_that_pid_or_a_damaged_one_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    memory = Memory(begun=1.0, last=Mark(2.0, pids=frozenset({7})), curves={"weights": ((0.5, 3.0),)})
    remember(7, 1000.0, memory)
    assert recall(7, 1000.5) == memory and recall(7, 1003.0) is None and recall(8, 1000.0) is None
    monkeypatch.setattr("eyas.launch.recall.time.time", lambda: 1.5)
    assert recall(7, 1000.0) is None  # the clock was set back
    monkeypatch.undo()
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    for damage in ("", "{", '{"created": 1000.0, "memory": {"last": 3}}'):
        (tmp_path / "looks" / "7.json").write_text(damage)
        assert recall(7, 1000.0) is None
    old = tmp_path / "looks" / "9.json"
    old.write_text("")
    os.utime(old, (0, 0))
    remember(7, 1000.0, memory)
    assert not old.exists()


def test_a_clock_that_is_set_makes_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= clock() - before < 60


def test_of_a_process_without_log_or_port_nothing_but_its_life_is_told() -> None:
    sleeper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        seen = watch_once(of_pid(sleeper.pid))
        assert (seen["state"], seen["log"], seen["url"]) == ("unknown", None, None)
        assert "neither its log nor its port" in seen["notes"][0]
        os.kill(sleeper.pid, signal.SIGSTOP)
        assert stop(by_pid(sleeper.pid), grace_s=10.0)["killed"] == []  # it is let go on to heed the TERM
    finally:
        sleeper.kill()
        sleeper.wait()


def test_silent_and_computing_is_loading(fated: Fated) -> None:
    watch = halfway(fated("busy"), time.time)
    idle = []
    for _ in range(6):
        time.sleep(0.05)
        watch.refresh()
        idle.append(watch.look().idle_s)
    assert max(one for one in idle[1:] if one is not None) < 0.2
    watch.close()


def test_a_detached_server_is_nobodys_child_and_its_log_goes_on(fated: Fated) -> None:
    ready = serve(fated(), detach=True)
    server = read_server(Path(ready["folder"]))
    assert os.getpid() not in [parent.pid for parent in psutil.Process(server.keeper).parents()]
    before = Path(ready["log"]).stat().st_size
    httpx2.get(f"{ready['url']}/ready", trust_env=False)
    for _ in range(100):
        if Path(ready["log"]).stat().st_size > before:
            break
        time.sleep(0.01)
    last = Path(ready["log"]).read_text().splitlines()[-1]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} .*GET /ready", last)


def test_a_server_is_found_by_pid_url_and_among_all(fated: Fated) -> None:
    ready = serve(fated(), detach=True)
    for found in (of_pid(ready["pid"]), of_url(ready["url"]), of_folder(Path(ready["folder"]))):
        assert (found.pid, found.url, str(found.log)) == (ready["pid"], ready["url"], ready["log"])
    assert ready["pid"] in [found.pid for found in all_servers()]
    assert port_of(int(ready["url"].rpartition(":")[2]), [ready["pid"]]).ours is True
    assert targets((), (ready["pid"],), ())[0].folder == Path(ready["folder"])


def test_a_folder_with_a_running_server_is_not_taken_again(fated: Fated) -> None:
    launch = fated()
    serve(launch, detach=True)
    with pytest.raises(InputError, match="eyas stop"):
        serve(launch, detach=True, force=True)


def test_a_pid_that_was_taken_by_another_since_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        ended = stop(Doomed(bystander.pid, created=1.0), grace_s=0.1)
        assert ended["pids"] == [] and is_same(bystander.pid, None)
        named = stop(by_pid(bystander.pid), grace_s=2.0)
        assert named["stopped"] and named["pids"] == [bystander.pid] and named["port_free"] is None
    for pid in (os.getpid(), 2**22 + 1):
        with pytest.raises(InputError):
            by_pid(pid)


def test_what_a_dead_root_that_nobody_buried_left_behind_is_stopped_too() -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as root:
        assert root.stdout is not None
        created = psutil.Process(root.pid).create_time()
        child = psutil.Process(int(root.stdout.readline()))
        while psutil.Process(root.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        ended = stop(Doomed(root.pid, created), grace_s=5.0)
        assert ended["stopped"] and child.pid in ended["pids"] and ended["killed"] == []
        assert not is_same(child.pid, None)


def test_an_interpreter_without_the_engine_is_wrong_usage(fated: Fated, interpreter: Path) -> None:
    recipe = recipe_of(("serve.engine=sglang", "serve.plain=true", "serve.python=/no/python", "target.name=target"))
    with pytest.raises(InputError, match="interpreter that has the engine"):
        prepare(recipe)
    assert any("sglang-env" in note for note in prepare(recipe, planning=True).command.notes)
    recipe = recipe_of(("serve.engine=sglang", "serve.plain=true", f"serve.python={sys.executable}"))
    with pytest.raises(InputError, match="no module sglang"):
        prepare(recipe)


def test_an_interpreter_that_hangs_is_given_up_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hangs"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("eyas.launch.interpreter.ASK_S", 0.5)
    with pytest.raises(InputError, match="no answer within") as refused:
        installed("sglang", str(program))
    assert "import" not in refused.value.got  # the question's own text is no answer
    group = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(group, 0)
            time.sleep(0.02)


def test_a_start_without_a_draft_says_how_to_give_one(interpreter: Path) -> None:
    recipe = recipe_of(("serve.engine=sglang", f"serve.python={interpreter}", "target.name=target"))
    with pytest.raises(InputError, match="--draft FOLDER, or --plain"):
        prepare(recipe)


def test_a_training_folder_is_served_by_its_step_or_named_with_the_export_to_make(
    interpreter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    for step in (3, 12):
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    own = recipe_of((f"serve.draft={folder}", "target.name=owner/target"))
    assert prepare(own, planning=True).command.draft == str(folder / "step-12")
    theirs = recipe_of((f"serve.draft={folder}", "serve.engine=sglang@0.5.23", f"serve.python={interpreter}"))
    with pytest.raises(InputError, match="the folder of a training run") as caught:
        prepare(theirs)
    assert caught.value.next == f"eyas export --draft {folder} --out EXPORT --for sglang, then --draft EXPORT"


HEEDING = (
    "import signal, sys; signal.signal(signal.SIGINT, {}); signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "from eyas.cli import main; main(sys.argv[1:])"
)
"""`eyas` under signals of its own: a shell's background job ignores SIGINT, nohup SIGHUP: this suite may be both."""
HEEDED, IGNORED = HEEDING.format("signal.default_int_handler"), HEEDING.format("signal.SIG_IGN")
ASKED = (b"loading, phase weights", signal.SIGTERM)
INTERRUPT, AGAIN = (b"loading, phase weights", signal.SIGINT), (b"asking 2 process(es)", signal.SIGINT)
HUNG_UP = (b"", signal.SIGHUP)


@pytest.mark.parametrize(
    ("program", "child", "sent", "code"),
    [
        (HEEDED, "heeds", [(b"Ctrl-C stops it", signal.SIGINT)], 0),
        (HEEDED, "heeds", [INTERRUPT], 130),
        (HEEDED, "deaf", [INTERRUPT, AGAIN], 130),  # the second one ends the grace of 20 s
        (HEEDED, "heeds", [ASKED], 143),
        (IGNORED, "heeds", [INTERRUPT, HUNG_UP], 129),
        (IGNORED, "heeds", [(b"; kill ", signal.SIGTERM)], 0),
    ],
)
def test_a_signal_to_serve_stops_the_whole_tree_and_an_ignored_one_stays_ignored(
    interpreter: Path, tmp_path: Path, program: str, child: str, sent: list[tuple[bytes, signal.Signals]], code: int
) -> None:
    words = ["serve", "--engine", "sglang", "--plain", "--python", str(interpreter), "--json"]
    words += ["--target", str(tmp_path / "target"), "--port", str(free_port())]
    environment = os.environ | {"FAKE": json.dumps({"fate": "silent" if code else "ready", "child": child})}
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        members: list[psutil.Process] = []
        for said, number in sent:
            assert not said or any(said in line for line in running.stderr)
            members = members or tree(read_server(tmp_path / "runs" / "run" / "serve-plain").pid)
            running.send_signal(number)
        out, _ = running.communicate()
    result = json.loads(out)
    assert running.returncode == code and len(members) == 2
    if code == 0:
        assert (result["state"], result["stopped"], result["port_free"]) == ("stopped", True, True)
    else:
        assert result["error"]["got"] == {130: "an interrupt", 129: "SIGHUP", 143: "SIGTERM"}[code]
    assert not any(is_same(one.pid, None) for one in members)


def test_a_signal_while_a_server_is_half_started_waits_until_it_can_be_stopped() -> None:
    with pytest.raises(Signalled, match="SIGTERM"), interrupts() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.release()
        pytest.fail("the signal is raised by now")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as done:
        main([*words, "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("own-cpu", "-m eyas.engine.server --target smollm2-135m-instruct-q4"),
        ("8b-vllm", "vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-8B-Instruct"),
        ("kimi-sglang", "--tp-size 8 --trust-remote-code --speculative-algorithm EAGLE3"),
    ],
)
def test_the_packaged_recipes_can_be_planned_without_their_engines(
    recipe: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    code, plan = shown(capsys, "serve", recipe, "--plan")
    assert code == 0 and all(word in plan["command_line"] for word in words.split(" ")), plan["command_line"]
    assert plan["preflight"]["verdict"] in ("pass", "unknown", "fail") and plan["expected"]["phases"] == {}
    assert not list(tmp_path.iterdir())


def test_watch_and_stop_refuse_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (
        ("watch", "--log", str(tmp_path / "none.log"), "--once"),
        ("watch", "--pid", str(2**22 + 1), "--once"),
        ("watch", "--url", "nonsense", "--once"),
        ("watch", str(tmp_path), "--once"),
        ("watch", "--once"),
        ("stop", "--pid", str(2**22 + 1)),
        ("stop", str(tmp_path)),
        ("serve", "--engine", "sglang@latest"),
    ):
        for planning in ((), ("--plan",)):
            code, answer = shown(capsys, *words, *planning)
            assert code == 2 and set(answer["error"]) >= {"wanted", "got", "where", "next"}, words


def test_the_plan_of_watch_and_stop_names_what_is_there(fated: Fated, capsys: pytest.CaptureFixture[str]) -> None:
    launch = fated()
    server = start(launch.command, launch.folder, launch.key)
    for words in (("watch", "--pid", str(server.pid)), ("stop", "--pid", str(server.pid)), ("stop", server.folder)):
        code, plan = shown(capsys, *words, "--plan")
        assert code == 0 and server.folder.rpartition("/")[0] in plan["reads"][0]
        assert server.pid in (plan.get("pid"), *plan.get("pids", ()))
    assert is_same(server.pid, server.created)


def test_watch_once_exits_3_for_what_crashed(fated: Fated, capsys: pytest.CaptureFixture[str]) -> None:
    launch = fated("traceback")
    with pytest.raises(ServerDied):
        serve(launch, detach=True)
    code, seen = shown(capsys, "watch", str(launch.folder), "--once")
    assert (code, seen["state"]) == (3, "crashed")


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=30))
def test_a_kept_log_holds_every_line_once_in_whatever_pieces_it_came(text: bytes, cuts: list[int]) -> None:
    kept, rest = io.BytesIO(), text
    log = StampedLog(kept)
    for cut in cuts:
        log.write(rest[:cut], 0.0)
        rest = rest[cut:]
    log.write(rest, 0.0)
    wanted = [line for line in re.split(rb"\r\n|\n|\r", text) if line]
    lines = [line for line in kept.getvalue().split(b"\n") if line]
    assert [line[24:] for line in lines] == wanted
    assert all(re.match(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)


def test_kernel_kills_are_counted_in_both_kinds_of_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("0::/user/x\n")
    assert oom_kills(7, groups, proc) is None
    (groups / "user" / "x").mkdir(parents=True)
    (groups / "user" / "x" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_kills(7, groups, proc) == 3
    (proc / "7" / "cgroup").write_text("5:cpu:/a\n4:memory:/a\n")
    (groups / "memory" / "a").mkdir(parents=True)
    (groups / "memory" / "a" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(7, groups, proc) == 2
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;Out of memory: Killed process 77 (python) total-vm:1kB\n")
    assert oom_killed(77, str(log)) is True and oom_killed(7, str(log)) is False
    assert oom_killed(77, str(tmp_path / "none")) is None
