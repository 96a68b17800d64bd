"""Loading, stuck, dead or ready: decided from evidence that agrees, by a pure function, on the test's own clock."""

from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.clients.health import Health
from eyas.launch.evidence import Evidence, Port, Processes
from eyas.launch.history import Expectation, PhaseTime
from eyas.launch.log_state import LogState
from eyas.launch.movement import CPU_SHARE
from eyas.launch.phases import Engine
from eyas.launch.process import Exit
from eyas.launch.state import IDLE_S, Memory, Status, decide, phase_times

T0 = 1_800_000_000.0
LOADING = LogState(engine="sglang", state="loading", phase="weights", lines=9, bytes_read=900, last_lines=("a line",))
ALIVE = Processes(True, pids=(10,), cpu_s=5.0, read_bytes=1000, resident=1 << 30)
REFUSED, OK, BUSY = Health(0.0, None, "ConnectError"), Health(0.0, 200), Health(0.0, 503)
OURS = Port(8000, True, True, 10, "python")


def watch(evidence: list[Evidence], expected: Expectation | None = None) -> list[Status]:
    memory, found = Memory(begun=T0), []
    for seen in evidence:
        memory, status = decide(memory, seen, expected)
        found.append(status)
    return found


def silence(seconds: int, every: int = 1, log: LogState = LOADING, processes: Processes = ALIVE) -> list[Evidence]:
    return [Evidence(T0 + at, log, processes, health=REFUSED) for at in range(0, seconds, every)]


def test_silent_and_idle_is_stuck_two_minutes_after_the_last_movement_where_history_knows_nothing() -> None:
    found = watch(silence(200))
    assert [status.state for status in found[:120]] == ["loading"] * 120
    assert [status.state for status in found[120:]] == ["stuck"] * 80
    assert found[120].cause == "no_progress" and "nothing moved for 120 s" in str(found[120].evidence)


def test_history_allows_a_phase_its_longest_time_and_two_minutes_more() -> None:
    expected = Expectation((PhaseTime("weights", 300.0),), {"weights": 300.0}, "one start")
    found = watch(silence(500), expected)
    states = [status.state for status in found]
    assert states.index("stuck") == 300 + IDLE_S
    assert set(states[:420]) == {"loading"}


MOVES = st.sampled_from(["line", "cpu", "read", "resident", "gpu", "child"])


@given(st.lists(MOVES, min_size=3, max_size=40), st.integers(1, 119))
def test_never_stuck_while_anything_moves(moves: list[str], seconds: int) -> None:
    log, processes, gpu, memory = LOADING, ALIVE, 0, Memory(begun=T0)
    for index, move in enumerate(moves):
        if move == "line":
            log = replace(log, lines=log.lines + 1, bytes_read=log.bytes_read + 20)
        elif move == "cpu":
            processes = replace(processes, cpu_s=processes.cpu_s + CPU_SHARE * seconds * 1.01)
        elif move == "read":
            processes = replace(processes, read_bytes=processes.read_bytes + 4096)
        elif move == "resident":
            processes = replace(processes, resident=processes.resident + (2 << 20))
        elif move == "gpu":
            gpu += 2 << 20
        else:
            processes = replace(processes, pids=(*processes.pids, 100 + index))
        for second in range(0, seconds, max(seconds // 4, 1)):
            now = T0 + index * seconds + second
            memory, status = decide(memory, Evidence(now, log, processes, gpu_bytes=gpu, health=REFUSED))
            assert status.state == "loading", (move, status)


@given(st.lists(st.floats(0.0, CPU_SHARE * 0.9), min_size=130, max_size=180))
def test_an_event_loop_that_waits_is_no_movement(shares: list[float]) -> None:
    processes, memory, states = ALIVE, Memory(begun=T0), []
    for second, share in enumerate(shares):
        processes = replace(processes, cpu_s=processes.cpu_s + share)
        memory, status = decide(memory, Evidence(T0 + second, LOADING, processes, health=REFUSED))
        states.append(status.state)
    assert states[119] == "loading" and states[121] == "stuck"


def test_a_loader_silent_for_ten_minutes_that_reads_is_loading_throughout() -> None:
    evidence = [
        Evidence(T0 + at, LOADING, replace(ALIVE, read_bytes=1000 + at * 4096), health=REFUSED) for at in range(600)
    ]
    assert {status.state for status in watch(evidence)} == {"loading"}


def test_what_moves_is_told_with_its_rate_over_the_last_seconds() -> None:
    evidence = []
    for second in range(30):
        working = min(second, 15)  # a core and 4 MB a second, then nothing
        processes = replace(ALIVE, cpu_s=5.0 + working, read_bytes=working * 4_000_000, resident=working * 8_000_000)
        evidence.append(Evidence(T0 + second, LOADING, processes, gpu_bytes=0, health=REFUSED))
    found = watch(evidence)
    assert found[0].moving == ()
    assert found[14].moving == ("1.0 cores", "4 MB/s read", "memory +8 MB/s")
    assert found[29].moving == () and found[29].idle_s == 14


def test_what_was_stuck_and_moves_again_is_loading_again() -> None:
    moving = Evidence(T0 + 201, LOADING, replace(ALIVE, cpu_s=50.0), health=REFUSED)
    assert [status.state for status in watch([*silence(200), moving])][-2:] == ["stuck", "loading"]


def test_access_lines_of_probes_are_no_movement() -> None:
    probe = 'INFO:     127.0.0.1:1 - "GET /ready HTTP/1.1" 503 Service Unavailable'
    warm = LogState(engine="sglang", state="warming", phase="warmup", lines=20, last_lines=(probe,) * 20)
    evidence = [
        Evidence(T0 + at, replace(warm, lines=20 + at, bytes_read=80 * at), ALIVE, health=BUSY) for at in range(200)
    ]
    assert watch(evidence)[-1].state == "stuck"
    spoken = (*((probe,) * 19), "Prefill batch, #new-seq: 1")
    evidence = [
        Evidence(T0 + at, replace(warm, lines=20 + at, bytes_read=80 * at, last_lines=spoken), ALIVE, health=BUSY)
        for at in range(200)
    ]
    assert watch(evidence)[-1].state == "warming"


@pytest.mark.parametrize(
    ("engine", "phase"), [("embedded", "http"), ("vllm", "warmup"), ("sglang", "warmup"), ("llamacpp", "warmup")]
)
def test_a_log_ahead_of_its_port_is_in_its_engines_last_phase(engine: Engine, phase: str) -> None:
    log = replace(LOADING, engine=engine, state="ready", phase="ready")
    status = watch([Evidence(T0, log, ALIVE, health=REFUSED)])[0]
    assert (status.state, status.phase) == ("warming", phase)


@pytest.mark.parametrize("said", ["ready", "loading", "unknown", "warming"])
def test_dead_is_crashed_whatever_the_log_says(said: str) -> None:
    log = replace(LOADING, state=said)
    dead = Processes(False, Exit(code=1))
    status = watch([Evidence(T0, log, ALIVE, health=OK, port=OURS), Evidence(T0 + 0.25, log, dead, health=OK)])[1]
    assert (status.state, status.cause, status.evidence) == ("crashed", "exited", "exit code 1")


def test_an_end_that_was_asked_for_is_stopped() -> None:
    for ended in (Exit(code=0), Exit(signal=15), Exit(code=1, asked=True), Exit(signal=9, asked=True)):
        assert watch([Evidence(T0, LOADING, Processes(False, ended))])[0].state == "stopped"


def test_signal_9_says_whose_hand_it_was() -> None:
    kernel = watch([Evidence(T0, LOADING, Processes(False, Exit(signal=9, oom=True)))])[0]
    assert (kernel.state, kernel.cause) == ("crashed", "host_oom")
    assert kernel.evidence == "killed by signal 9 (SIGKILL) by the kernel, for lack of memory"
    other = watch([Evidence(T0, LOADING, Processes(False, Exit(signal=9, oom=False)))])[0]
    assert (other.cause, other.evidence) == ("killed", "killed by signal 9 (SIGKILL), not by the kernel for memory")
    unknown = watch([Evidence(T0, LOADING, Processes(False, Exit(signal=9)))])[0]
    assert unknown.cause == "killed" and "may not be read" in str(unknown.evidence)


def test_the_logs_cause_of_a_death_comes_before_its_exit_status() -> None:
    log = replace(LOADING, state="crashed", cause="port_busy", evidence="[Errno 98]", advice="--port 30001")
    status = watch([Evidence(T0, log, Processes(False, Exit(code=1)))])[0]
    assert (status.cause, status.evidence, status.advice) == ("port_busy", "[Errno 98]", "--port 30001")
    assert "exit code 1" in status.notes


def test_an_error_in_the_log_of_a_process_that_works_is_told_and_not_believed() -> None:
    log = replace(LOADING, state="crashed", cause="oom", evidence="CUDA out of memory")
    evidence = [Evidence(T0 + at, log, replace(ALIVE, cpu_s=5.0 + at), health=REFUSED) for at in range(300)]
    found = watch(evidence)
    assert {status.state for status in found} == {"loading"}
    assert "CUDA out of memory" in found[-1].notes[0]
    idle = watch([Evidence(T0 + at, log, ALIVE, health=REFUSED) for at in range(200)])[-1]
    assert (idle.state, idle.cause, idle.evidence) == ("stuck", "oom", "CUDA out of memory")


def test_ready_is_a_status_from_the_servers_own_port() -> None:
    said = replace(LOADING, state="ready", phase="ready")
    assert watch([Evidence(T0, said, ALIVE, health=REFUSED)])[0].state == "warming"
    assert watch([Evidence(T0, said, ALIVE, health=BUSY)])[0].state == "warming"
    assert watch([Evidence(T0, LOADING, ALIVE, health=OK, port=OURS)])[0].state == "ready"
    assert watch([Evidence(T0, LOADING, ALIVE, health=OK)])[0].state == "ready"


def test_a_port_answered_by_another_process_is_said_and_makes_nothing_ready() -> None:
    other = Port(8000, True, False, 77, "nginx")
    status = watch([Evidence(T0, LOADING, ALIVE, health=OK, port=other)])[0]
    assert status.state == "loading"
    assert status.notes[0] == "port 8000 is answered by pid 77 (nginx), not by this server"


def test_a_ready_server_that_works_and_answers_late_is_ready_and_one_that_does_neither_is_stuck() -> None:
    ready = Evidence(T0, LOADING, ALIVE, health=OK, port=OURS)
    late = Health(0.0, None, "ReadTimeout")
    busy = [Evidence(T0 + at, LOADING, replace(ALIVE, cpu_s=5.0 + at), health=late) for at in range(1, 200)]
    assert {status.state for status in watch([ready, *busy])} == {"ready"}
    dead = [Evidence(T0 + at, LOADING, ALIVE, health=late) for at in range(1, 100)]
    found = watch([ready, *dead])
    assert (found[30].state, found[-1].state, found[-1].cause) == ("ready", "stuck", "no_answer")


def test_a_process_that_a_signal_stopped_and_a_port_of_another_protocol_are_said() -> None:
    halted = watch([Evidence(T0, LOADING, replace(ALIVE, halted=(10,)), health=REFUSED)])[0]
    assert (halted.state, halted.notes) == (
        "loading",
        ("stopped by a signal (SIGSTOP, Ctrl-Z), not by an error; to go on: kill -CONT 10",),
    )
    for odd in (Health(0.0, None, "RemoteProtocolError"), Health(0.0, 302), Health(0.0, None, "ReadTimeout")):
        assert odd.words in watch([Evidence(T0, LOADING, ALIVE, health=odd, port=OURS)])[0].notes[0]
    for usual in (REFUSED, BUSY, OK):
        assert watch([Evidence(T0, LOADING, ALIVE, health=usual, port=OURS)])[0].notes == ()


def test_what_a_log_notes_is_noted_of_its_server() -> None:
    log = LogState(engine="sglang", state="loading", phase="weights", note="no log there now")
    _, status = decide(Memory(), Evidence(1.0, log, Processes(True, pids=(1,))))
    assert "no log there now" in status.notes


def test_time_ends_with_a_dead_server_and_with_the_last_line_of_a_log_alone() -> None:
    dead = Evidence(T0 + 9000, LOADING, Processes(False, Exit(code=1, time=T0 + 30)))
    assert watch([dead])[0].elapsed_s == 30.0
    first, last = datetime.fromtimestamp(T0 - 500), datetime.fromtimestamp(T0 - 460)
    log = replace(LOADING, phase_starts={"weights": first}, last_time=last)
    assert decide(Memory(), Evidence(T0, log))[1].elapsed_s == 40.0
    assert decide(Memory(), Evidence(T0, LOADING))[1].elapsed_s is None


def test_the_seconds_before_the_first_line_belong_to_the_first_phase() -> None:
    memory = Memory(begun=T0)
    for at, log in ((1, LogState()), (6, replace(LOADING, phase="weights"))):
        memory, _ = decide(memory, Evidence(T0 + at, log, ALIVE, health=REFUSED))
    times = phase_times(memory, T0 + 8)
    assert [(one.phase, one.seconds) for one in times] == [("args", 6.0), ("weights", 2.0)]


def test_a_probes_line_is_not_a_dead_servers_last_word() -> None:
    log = replace(LOADING, last_lines=("the last word", 'INFO:     127.0.0.1:1 - "GET /ready HTTP/1.1" 503'))
    assert watch([Evidence(T0, log, Processes(False, Exit(code=1)))])[0].notes == ("last line: the last word",)


def test_a_log_alone_never_says_stuck() -> None:
    assert {status.state for status in watch([Evidence(T0 + at, LOADING) for at in range(0, 10_000, 100)])} == {
        "loading"
    }


def test_a_url_alone_is_ready_by_status_and_unknown_where_nobody_answers() -> None:
    states = [watch([Evidence(T0, None, None, health=health)])[0].state for health in (OK, BUSY, REFUSED)]
    assert states == ["ready", "warming", "unknown"]


def test_phases_are_timed_by_the_clock_where_met_at_once_and_by_the_log_where_met_late() -> None:
    memory = Memory(begun=T0)
    steps = [
        (0.0, "args", None),
        (2.0, "weights", 0.0),
        (6.0, "weights", 0.5),
        (10.0, "weights", 1.0),
        (13.0, "graphs", None),
    ]
    for at, phase, progress in steps:
        log = LogState(engine="sglang", state="loading", phase=phase, progress=progress, lines=int(at))
        memory, _ = decide(memory, Evidence(T0 + at, log, ALIVE, health=REFUSED))
    memory, status = decide(memory, Evidence(T0 + 20, log, ALIVE, health=OK, port=OURS))
    assert status.elapsed_s == 20.0
    times = phase_times(memory, T0 + 20)
    assert [(one.phase, one.seconds) for one in times] == [("args", 2.0), ("weights", 11.0), ("graphs", 7.0)]
    assert times[1].curve == ((0.0, 0.0), (0.5, 4.0), (1.0, 8.0))
    late = replace(LOADING, phase_starts={"weights": datetime.fromtimestamp(T0 - 100)})
    memory, _ = decide(Memory(), Evidence(T0, late, ALIVE))
    assert memory.phases == (("weights", T0 - 100),)
