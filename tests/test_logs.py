"""A server's log: the state, phase, progress and cause that it shows, whatever else it holds."""

import json
import os
import re
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import InputError
from eyas.launch import own_lines
from eyas.launch.keeper import stamp
from eyas.launch.lines import MAX_LINE_BYTES, LineSplitter
from eyas.launch.log_state import LogReader, LogState, read_log

CASES = Path(__file__).parents[1].parent / "shared" / "cases"


def state(tmp_path: Path, text: str | bytes) -> LogState:
    path = tmp_path / "server.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path)


def sglang(*messages: str, rank: str = "") -> str:
    return "".join(f"[2026-05-01 10:00:{i:02}{rank}] {message}\n" for i, message in enumerate(messages))


def vllm(*messages: str, process: str = "EngineCore pid=7") -> str:
    return "".join(f"({process}) INFO 06-27 17:12:{i:02} [core.py:1] {message}\n" for i, message in enumerate(messages))


SGLANG_START = (
    "server_args=ServerArgs(model_path='/m')",
    "Init torch distributed begin.",
    "Load weight begin. avail mem=78.00 GB",
)
TARGET_GRAPHS = (
    "Load weight end. type=LlamaForCausalLM, avail mem=9.00 GB",
    "KV Cache is allocated. #tokens: 9000, K size: 2.00 GB, V size: 2.00 GB",
    "Memory pool end. avail mem=5.00 GB",
    "Capture cuda graph begin. This can take up to several minutes. avail mem=5.00 GB",
    "Capture cuda graph end. Time elapsed: 4.00 s",
)
FIRED_UP = "The server is fired up and ready to roll!"


def cases() -> list[tuple[Path, dict[str, object]]]:
    return [
        (folder / name, want)
        for folder in (CASES / "startup", CASES / "logs")
        if (folder / "expect.json").exists()
        for name, want in json.loads((folder / "expect.json").read_text()).items()
    ]


@pytest.mark.skipif(not cases(), reason="the shared cases are not beside the repository")
def test_every_case_is_what_its_expectation_says() -> None:
    wrong = []
    for path, want in cases():
        got = read_log(path)
        assert isinstance(want, dict)
        if "engine" in want and got.engine != want["engine"]:
            wrong.append((path.name, "engine", got.engine))
        if got.state not in want["state"]:
            wrong.append((path.name, "state", got.state))
        if "phase" in want and got.phase not in want["phase"]:
            wrong.append((path.name, "phase", got.phase))
        if "evidence" in want and got.state != "unknown" and not re.search(want["evidence"], got.evidence or ""):
            wrong.append((path.name, "evidence", got.evidence))
        if got.state in ("crashed", "stopped") and not (got.cause and got.advice):
            wrong.append((path.name, "cause", got.cause))
    assert wrong == []


def test_the_phases_of_an_sglang_start_come_in_order_with_their_times(tmp_path: Path) -> None:
    text = sglang(
        *SGLANG_START, *TARGET_GRAPHS, "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)"
    )
    seen = []
    for end in range(len(text.splitlines())):
        got = state(tmp_path, "\n".join(text.splitlines()[: end + 1]) + "\n")
        seen.append((got.state, got.phase))
    assert seen == [
        ("starting", "args"),
        ("starting", "distributed"),
        ("loading", "weights"),
        ("loading", "weights"),
        ("warming", "kv_cache"),
        ("warming", "kv_cache"),
        ("warming", "graphs"),
        ("warming", "graphs"),
        ("warming", "http"),
    ]
    assert got.phase_starts == {
        "args": datetime(2026, 5, 1, 10, 0, 0),
        "distributed": datetime(2026, 5, 1, 10, 0, 1),
        "weights": datetime(2026, 5, 1, 10, 0, 2),
        "kv_cache": datetime(2026, 5, 1, 10, 0, 4),
        "graphs": datetime(2026, 5, 1, 10, 0, 6),
        "http": datetime(2026, 5, 1, 10, 0, 8),
    }
    assert got.last_time == datetime(2026, 5, 1, 10, 0, 8)


def test_the_open_port_is_not_readiness_of_sglang_but_is_of_vllm(tmp_path: Path) -> None:
    up = "INFO:     Application startup complete.\n"
    assert state(tmp_path, sglang(SGLANG_START[0]) + "[2026-05-01 10:01:00] " + up).state == "warming"
    health = '[2026-05-01 10:01:00] INFO:     10.0.0.2:3 - "GET /health HTTP/1.1" {}\n'
    assert state(tmp_path, sglang(SGLANG_START[0]) + health.format("503 Service Unavailable")).state == "starting"
    assert state(tmp_path, sglang(SGLANG_START[0]) + health.format("200 OK")).state == "ready"
    assert state(tmp_path, sglang(SGLANG_START[0], FIRED_UP)).state == "ready"
    started = vllm("non-default args: {'model': '/m'}", process="APIServer pid=1")
    assert state(tmp_path, started + "(APIServer pid=1) " + up).state == "ready"
    assert state(tmp_path, started + "(APIServer pid=1) INFO:     Waiting for application startup.\n").phase == "http"


def test_shards_are_counted_per_model_and_a_bar_of_something_else_is_not(tmp_path: Path) -> None:
    bar = "Loading safetensors checkpoint shards:  {}% Completed | {}/{} [00:12<00:19,  2.14it/s]\n"
    text = vllm("Starting to load model /m...") + bar.format(36, 23, 64)
    got = state(tmp_path, text)
    assert (got.phase, got.shards, got.progress) == ("weights", (23, 64), 23 / 64)
    text += bar.format(100, 64, 64) + vllm("Loading weights took 9.1 seconds", "Loading drafter model...")
    got = state(tmp_path, text)
    assert (got.phase, got.shards, got.progress) == ("draft_weights", None, None)
    got = state(tmp_path, text + bar.format(50, 1, 2) + "Fetching 15 files:  10%|█         | 1/15 [00:01<00:10]\n")
    assert (got.phase, got.shards, got.progress) == ("draft_weights", (1, 2), 0.5)
    got = state(tmp_path, text + bar.format(300, 9, 3) + bar.format(0, 0, 0))
    assert (got.shards, got.progress) == (None, None)


def test_a_second_bar_from_zero_is_the_drafts_where_no_line_says_so(tmp_path: Path) -> None:
    bar = "Loading safetensors checkpoint shards: {}% Completed | {}/{} [00:12<00:19,  2.14it/s]\r"
    text = (
        vllm("Loading model from scratch...") + bar.format(100, 4, 4) + "\n" + vllm("Loading weights took 2.5 seconds")
    )
    got = state(tmp_path, text + bar.format(0, 0, 1))
    assert (got.phase, got.shards) == ("draft_weights", (0, 1))


def test_graph_capture_counts_named_and_nameless_bars(tmp_path: Path) -> None:
    got = state(tmp_path, sglang(*SGLANG_START, *TARGET_GRAPHS[:4]) + " 50%|█████     | 4/8 [00:13<00:00,  2.05it/s]\r")
    assert (got.phase, got.progress) == ("graphs", 0.5)
    text = (
        vllm("Available KV cache memory: 6.1 GiB")
        + "Capturing CUDA graphs (decode, FULL):  25%|██▌  | 1/4 [00:00<?, ?it/s]\n"
    )
    got = state(tmp_path, text)
    assert (got.phase, got.progress) == ("graphs", 0.25)


def test_a_flood_moves_no_phase_and_an_older_draft_start_does(tmp_path: Path) -> None:
    text = sglang(*SGLANG_START, *TARGET_GRAPHS)
    assert state(tmp_path, text + "  torch._dynamo.utils.warn_once(msg)\n" * 300).phase == "graphs"
    again = sglang("Load weight begin. avail mem=5.00 GB")
    assert state(tmp_path, text + again).phase == "draft_weights"
    assert (
        state(tmp_path, text + again + sglang("KV Cache is allocated. #tokens: 9, K size: 1.00 GB")).phase == "kv_cache"
    )


def test_ranks_that_lag_do_not_move_the_phase_back(tmp_path: Path) -> None:
    text = sglang(*SGLANG_START, *TARGET_GRAPHS[:2], rank=" TP0") + sglang("Load weight end. type=X", rank=" TP1")
    assert state(tmp_path, text).phase == "kv_cache"
    text += sglang("Load weight begin. avail mem=5.00 GB", rank=" TP2")
    assert state(tmp_path, text).phase == "kv_cache"


def test_the_first_rank_explains_not_what_it_did_to_the_others(tmp_path: Path) -> None:
    def crash(rank: int, error: str) -> str:
        return (
            f"[2026-05-01 10:01:0{rank} TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
            f'  File "/env/sglang/srt/managers/scheduler.py", line {rank}, in run\n    scheduler = X()\n'
            f"{error}\n\n"
        )

    text = sglang(*SGLANG_START, rank=" TP0") + crash(3, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB")
    text += crash(0, "RuntimeError: NCCL error: remote process exited or there was a network error")
    got = state(tmp_path, text + sglang("Received sigquit from a child process. It usually means the child failed."))
    assert (got.state, got.phase, got.cause) == ("crashed", "weights", "oom_weights")
    assert got.evidence == "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"


def test_a_warning_that_the_server_lived_with_explains_no_later_crash(tmp_path: Path) -> None:
    crash = "[2026-05-01 10:01:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    crash += '  File "/env/sglang/srt/b.py", line 22, in inner\n    raise ValueError("odd")\nValueError: odd\n'
    for warning in (
        "Ignore import error when loading sglang.srt.models.x: ModuleNotFoundError: No module named 'x'",
        "Failed to load deep_gemm: libcudart.so.12: cannot open shared object file: No such file or directory",
    ):
        assert state(tmp_path, sglang(*SGLANG_START, warning) + crash).cause == "unexplained"
    caught = sglang(*SGLANG_START, "Failed to load: libcudart.so.12: cannot open shared object file")
    assert state(tmp_path, caught + sglang("Received sigquit from a child process.")).cause == "library_missing"


def test_a_server_that_dies_at_work_is_crashed_with_the_workers_error(tmp_path: Path) -> None:
    error = "({} pid=9) ERROR 06-27 17:13:00 [x.py:9] "
    worker, core = error.format("Worker_TP1"), error.format("EngineCore")
    text = vllm("Starting to load model /m...") + "(APIServer pid=1) INFO:     Application startup complete.\n"
    text += f"{worker}WorkerProc hit an exception.\n{worker}Traceback (most recent call last):\n"
    text += f'{worker}  File "/env/vllm/v1/worker/x.py", line 9, in run\n{worker}    x()\n'
    text += f"{worker}torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    text += f"{core}EngineCore encountered a fatal error.\n{core}Traceback (most recent call last):\n"
    text += (
        f'{core}  File "/env/vllm/v1/engine/core.py", line 9, in run\n{core}RuntimeError: Worker failed with error\n'
    )
    got = state(tmp_path, text + "(APIServer pid=1) INFO:     Shutting down\n")
    assert (got.state, got.phase, got.cause) == ("crashed", "ready", "illegal_access")


def test_a_compilers_line_above_the_traceback_explains_it(tmp_path: Path) -> None:
    error = "(EngineCore pid=7) ERROR 06-27 17:13:00 [core.py:9] "
    text = (
        vllm("Dynamo bytecode transform time: 7.05 s")
        + "/tmp/x.c:7:10: fatal error: Python.h: No such file or directory\n"
    )
    text += f"{error}EngineCore failed to start.\n{error}Traceback (most recent call last):\n"
    text += f'{error}  File "/env/vllm/v1/engine/core.py", line 9, in run\n{error}    x()\n'
    text += f"{error}torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x.c']'\n"
    text += "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
    got = state(tmp_path, text)
    assert (got.engine, got.state, got.phase, got.cause) == ("vllm", "crashed", "compile", "python_headers")
    assert got.advice is not None and "python3-dev" in got.advice


def test_a_failure_that_no_row_fits_shows_its_exception_with_the_innermost_frame(tmp_path: Path) -> None:
    text = (
        sglang(*SGLANG_START)
        + "[2026-05-01 10:01:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    )
    text += '  File "/env/sglang/srt/a.py", line 1, in outer\n    inner()\n'
    text += '  File "/env/sglang/srt/b.py", line 22, in inner\n    raise ValueError("odd")\nValueError: odd\n'
    got = state(tmp_path, text)
    assert (got.state, got.cause, got.evidence) == ("crashed", "unexplained", "ValueError: odd [b.py:22 inner]")


def test_an_exception_while_another_is_handled_is_what_happened(tmp_path: Path) -> None:
    text = (
        vllm("Starting to load model /m...")
        + 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    x[1]\n'
    )
    text += "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text += 'Traceback (most recent call last):\n  File "/a.py", line 3, in f\n    y\nLookupError: no such thing\n'
    assert state(tmp_path, text).evidence == "LookupError: no such thing [a.py:3 f]"


def test_an_exception_that_somebody_caught_or_that_the_server_survived_is_no_crash(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    x()\nValueError: odd\n'
    loading = sglang(*SGLANG_START)
    assert state(tmp_path, loading + trace).state == "crashed"
    assert state(tmp_path, loading + trace + sglang(*TARGET_GRAPHS[:2])).state == "warming"
    warned = (
        vllm("Starting to load model /m...")
        + "  warnings.warn(\n"
        + vllm("Found ulimit of 20000, failed with an error")
    )
    assert state(tmp_path, warned + trace).state == "crashed"  # raw after vLLM's record: nobody caught it
    assert state(tmp_path, loading + "Exception in thread Thread-3:\n" + trace).state == "loading"
    ready = loading + sglang(FIRED_UP)
    assert state(tmp_path, ready + "ERROR:    Exception in ASGI application\n" + trace).state == "ready"
    assert state(tmp_path, ready + trace).state == "ready"


def test_a_survived_exception_does_not_explain_a_later_death(tmp_path: Path) -> None:
    text = sglang(*SGLANG_START)
    text += 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    x()\nValueError: odd\n'
    text += sglang(*TARGET_GRAPHS) + "busy\n" * 600
    text += 'Traceback (most recent call last):\n  File "/b.py", line 9, in g\n    y()\nLookupError: the end\n'
    got = state(tmp_path, text)
    assert (got.state, got.evidence) == ("crashed", "LookupError: the end [b.py:9 g]")


def test_words_in_a_requests_text_are_neither_ready_nor_a_crash(tmp_path: Path) -> None:
    loading = sglang(*SGLANG_START)
    said = f"{FIRED_UP} Application startup complete. Received sigquit from a child process CUDA out of memory"
    for line in (
        f"Receive: obj=GenerateReqInput(text='{said}')",
        f"some text: {said}",
        f'INFO:     10.0.0.1:5 - "GET /x?q={said.replace(" ", "+")} HTTP/1.1" 200 OK',
    ):
        assert state(tmp_path, loading + sglang(line)).state == "loading"
    assert state(tmp_path, loading + f"{FIRED_UP}\n{said}\nApplication startup complete.\n").state == "loading"


def test_a_text_that_is_no_server_start_is_unknown(tmp_path: Path) -> None:
    got = state(
        tmp_path,
        'Epoch 3 100%|████| 53/53 [00:08<00:00]\nTraceback (most recent call last):\n  File "x"\nValueError: n\n',
    )
    assert (got.engine, got.state, got.cause, got.lines) == (None, "unknown", None, 4)
    assert state(tmp_path, "[2026-05-01 10:00:00] Decode batch. #running-req: 3, token us").state == "unknown"
    assert state(tmp_path, "").state == "unknown"


def test_a_log_whose_start_was_rotated_away_is_ready_by_its_decode_lines(tmp_path: Path) -> None:
    line = (
        "Decode batch, #running-req: 1, #token: 353, accept len: 1.05, gen throughput (token/s): 42.10, #queue-req: 0,"
    )
    assert state(tmp_path, sglang(line)).state == "ready"
    assert state(tmp_path, sglang(*SGLANG_START, line)).state == "loading"


def test_a_new_start_in_the_same_file_forgets_the_crash_before_it(tmp_path: Path) -> None:
    crashed = sglang(*SGLANG_START, "Port is already in use. dist_init_port=1 port_base=2")
    assert state(tmp_path, crashed).cause == "port_busy"
    got = state(tmp_path, crashed + sglang(*SGLANG_START[:2]))
    assert (got.state, got.phase, got.cause) == ("starting", "distributed", None)


def test_being_told_to_end_is_stopped_not_crashed(tmp_path: Path) -> None:
    ready = sglang(*SGLANG_START, FIRED_UP)
    got = state(
        tmp_path, ready + sglang("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
    )
    assert (got.state, got.cause) == ("stopped", "terminated")
    got = state(tmp_path, ready + "[2026-05-01 10:01:00] INFO:     Shutting down\n")
    assert (got.state, got.cause) == ("stopped", None)
    crashed = ready + sglang("Received sigquit from a child process.", "INFO:     Shutting down")
    assert state(tmp_path, crashed).state == "crashed"


def test_a_wrong_flag_is_named_with_the_nearest_valid_one(tmp_path: Path) -> None:
    got = state(tmp_path, "usage: vllm [-h]\nvllm: error: unrecognized arguments: --gpu-memory-utilisation 0.8\n")
    assert (got.engine, got.state, got.cause) == ("vllm", "crashed", "wrong_flag")
    assert got.advice == 'leave --gpu-memory-utilisation out (did you mean "--gpu-memory-utilization"?)'
    assert state(tmp_path, "tool: error: unrecognized arguments: --x\n").state == "unknown"


def test_our_own_servers_lines_are_read_as_they_are_written(tmp_path: Path) -> None:
    lines = [own_lines.phase_line("args"), own_lines.phase_line("weights", 3, 64)]
    assert lines[1] == "[eyas] phase=weights progress=3/64"
    got = state(tmp_path, "\n".join(lines))
    assert (got.engine, got.state, got.phase, got.shards) == ("embedded", "loading", "weights", (3, 64))
    got = state(tmp_path, "\n".join([*lines, own_lines.ready_line("http://127.0.0.1:1")]))
    assert (got.state, got.phase) == ("ready", "ready")
    assert state(tmp_path, "\n".join([*lines, own_lines.stopped_line("SIGTERM")])).state == "stopped"
    order = ["args", "weights", "draft_weights", "compile", "kv_cache", "warmup", "http"]  # engine/server/start.py
    assert list(state(tmp_path, "\n".join(map(own_lines.phase_line, order))).phase_starts) == order
    got = state(tmp_path, "\n".join([*lines, own_lines.failed_line("unexplained", "ValueError: odd")]))
    assert (got.state, got.phase, got.cause) == ("crashed", "weights", "unexplained")
    got = state(
        tmp_path, "\n".join([*lines, own_lines.failed_line("port_busy", "127.0.0.1:8000: Address already in use")])
    )
    assert (got.cause, str(got.advice)[:12]) == ("port_busy", "--port 30100")
    got = state(
        tmp_path, "\n".join([*lines, own_lines.failed_line("tensor_missing", "wanted a; got b; next: eyas export")])
    )
    assert (got.state, got.cause, got.advice) == ("crashed", "tensor_missing", "eyas export")


def test_llama_cpps_server_is_read_too(tmp_path: Path) -> None:
    text = "0.00.198.817 I srv    load_model: loading model '/m.gguf'\n"
    assert (state(tmp_path, text).engine, state(tmp_path, text).phase) == ("llamacpp", "weights")
    assert (
        state(tmp_path, text + "0.05.583.301 I srv  main: server is listening on http://127.0.0.1:8080\n").state
        == "ready"
    )
    text += "0.11.299.993 E llama_model_load: error loading model: unknown model architecture: 'new'\n"
    got = state(tmp_path, text + "0.11.300.000 E srv  load_model: failed to load model, '/m.gguf'\n")
    assert (got.state, got.cause) == ("crashed", "unknown_arch")


HEADS = [
    stamp(1_790_000_000.25).decode(),
    "2026-11-29T18:20:01.250123456Z ",
    "sglang-1  | ",
    "Nov 29 18:20:01 host python[77]: ",
]


@pytest.mark.parametrize("head", HEADS)
def test_what_eyas_docker_compose_and_journald_put_before_a_line_hides_nothing(tmp_path: Path, head: str) -> None:
    text = "".join(head + line + "\n" for line in sglang(*SGLANG_START, FIRED_UP).splitlines())
    assert state(tmp_path, text).state == "ready"


def test_stamps_without_a_year_cross_new_year(tmp_path: Path) -> None:
    text = "(EngineCore pid=7) INFO 12-31 23:59:58 [a.py:1] Starting to load model /m...\n"
    text += "(EngineCore pid=7) INFO 01-01 00:00:03 [a.py:1] Available KV cache memory: 6.1 GiB\n"
    starts = state(tmp_path, text).phase_starts
    before, after = starts["weights"], starts["kv_cache"]
    assert before is not None and after is not None and (after - before).total_seconds() == 5


def test_escapes_control_characters_and_megabyte_lines_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = (
        "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 06-27 17:12:00 [a.py:1] \x1b[31mStarting to load model /m\x1b[0m\n"
    )
    text += "\x1b]0;title\x07\x1b[2Jevil\x08\x9b1m\x00 line\u202e\n" + "x" * 3_000_000 + "\n" + "last"
    got = state(tmp_path, text.encode() + b"\xff\xfe\n")
    assert got.phase == "weights"
    assert all(line.isprintable() and len(line) <= 400 for line in got.last_lines)
    assert got.last_lines[-3] == "evil line" and got.lines == 4


def test_utf_16_and_latin_1_are_read(tmp_path: Path) -> None:
    text = sglang(*SGLANG_START, "Mémoire", FIRED_UP)
    assert state(tmp_path, text.encode("utf-16")).state == "ready"
    assert state(tmp_path, text.encode("latin-1")).state == "ready"


def test_a_bars_updates_count_once_among_the_last_lines(tmp_path: Path) -> None:
    bar = "Loading safetensors checkpoint shards: {0}% Completed | {0}/100 [00:12<00:19,  2.14it/s]\r"
    got = state(tmp_path, sglang(*SGLANG_START) + "".join(bar.format(i) for i in range(60)))
    assert len(got.last_lines) == 4 and got.shards == (59, 100)


def test_a_rotated_file_is_read_to_its_end_and_a_truncated_one_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(sglang(*SGLANG_START))
    reader = LogReader(path)
    assert reader.poll().phase == "weights"
    with path.open("a") as file:
        file.write(sglang(TARGET_GRAPHS[1]))
    path.rename(tmp_path / "server.log.1")
    assert reader.poll().phase == "kv_cache"  # moved away, nothing new yet
    path.write_text(sglang(TARGET_GRAPHS[3]))
    assert reader.poll().phase == "graphs"
    path.write_text(sglang("INFO:     Uvicorn running on http://x"))  # copytruncate
    assert reader.poll().phase == "http"
    with path.open("a") as file:
        file.write(sglang(FIRED_UP)[:-5])
    assert reader.poll().phase == "http"  # the line is not complete
    with path.open("a") as file:
        file.write(sglang(FIRED_UP)[-5:])
    assert reader.poll().phase == "ready"
    reader.close()


def test_what_takes_a_logs_place_and_is_none_is_noted_until_a_log_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(sglang(*SGLANG_START))
    reader = LogReader(path)
    assert (reader.poll().phase, reader.poll().note) == ("weights", None)
    path.rename(tmp_path / "server.log.1")
    path.mkdir()
    got = reader.poll()
    assert got.phase == "weights" and got.note is not None and "not a regular file" in got.note
    path.rmdir()
    path.write_text(sglang(TARGET_GRAPHS[3]))
    got = reader.poll()
    assert (got.phase, got.note) == ("graphs", None)
    reader.close()


def test_a_poll_may_be_limited_and_says_how_far_behind_it_is(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(sglang(*SGLANG_START, FIRED_UP))
    reader = LogReader(path)
    assert reader.poll(limit=60).phase == "args" and reader.behind == path.stat().st_size - 60
    while reader.behind:
        got = reader.poll(limit=7)
    assert got == read_log(path)
    reader.close()


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_log_file_is_bad_input(tmp_path: Path, make) -> None:
    path = tmp_path / "server.log"
    make(path)
    with pytest.raises(InputError):
        LogReader(path)


PIECES = [
    sglang(*SGLANG_START),
    sglang(*TARGET_GRAPHS),
    sglang(FIRED_UP),
    vllm("Starting to load model /m..."),
    vllm("Using auxiliary layers from speculative config: (2, 18, 33)"),
    "Loading safetensors checkpoint shards:  50% Completed | 4/8 [00:03<00:03,  1.21it/s]\r",
    "Traceback (most recent call last):\n",
    '  File "/vllm/a.py", line 1, in f\n',
    "ValueError: CUDA out of memory\n",
    "During handling of the above exception, another exception occurred:\n",
    "(EngineCore pid=7) ERROR 06-27 17:13:00 [c.py:9] ",
    "[2026-05-01 10:01:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n",
    "vllm: error: unrecognized arguments: --x\n",
    "[eyas] phase=weights progress=3/64\n",
    "Terminated\n",
    "\r\n",
    "\x1b[31m",
    "é",
]
ANY_TEXT = st.lists(st.sampled_from([piece.encode() for piece in PIECES]) | st.binary(max_size=40), max_size=25)


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT, st.lists(st.integers(0, 3000), max_size=8))
def test_any_bytes_in_any_chunking_give_the_state_of_reading_them_at_once(pieces: list[bytes], cuts: list[int]) -> None:
    text = b"".join(pieces)
    marks = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        path.write_bytes(b"")
        reader = LogReader(path)
        with path.open("ab", buffering=0) as file:
            for start, stop in pairwise(marks):
                file.write(text[start:stop])
                reader.poll()
        assert reader.poll() == read_log(path)
        reader.close()


@given(st.lists(st.binary(max_size=30) | st.just(b"y" * 5000), max_size=20))
def test_lines_are_those_of_the_whole_text(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    got = [line for piece in pieces for line in splitter.feed(piece)]
    whole = b"".join(pieces).replace(b"\0", b"").replace(b"\r", b"\n").split(b"\n")
    want = [line[:MAX_LINE_BYTES].decode(errors="replace") for line in whole]
    assert got == [line for line in want[:-1] if line]
    assert splitter.rest() == want[-1]
