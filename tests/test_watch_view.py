"""What a person sees of a server: state, shards with their rate, ETA, why, what to do, the last lines."""

import io
from dataclasses import replace

from rich.console import Console

from eyas.clients.acceptance import Acceptance
from eyas.launch.gpus import Gpu
from eyas.launch.log_state import LogState
from eyas.launch.state import Status
from eyas.pipeline.watch_view import Screen, acceptance_words, headline, panel, seconds

LOADING = Status(
    "sglang", "loading", "weights", 0.25, (16, 64), rate=2.0, eta_s=185.0, phase_eta_s=24.0, eta_source="one start"
)
CRASHED = Status(
    "vllm", "crashed", "graphs", cause="oom", evidence="CUDA out of memory", advice="lower it", notes=("n",)
)


def drawn(status: Status, **more: object) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    log = LogState(last_lines=("2026-11-29T18:00:01.250 a line\x1b[31m",))
    gpus = [Gpu(0, "H200", 141 << 30, 70 << 30)]
    console.print(panel(status, "http://127.0.0.1:8000", log, gpus, ["more"]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_loading_server_shows_shards_rate_and_both_etas() -> None:
    shown = drawn(LOADING)
    for words in ("sglang at http://127.0.0.1:8000: loading, phase weights, 16/64 shards", "ready in about 3:05"):
        assert words in shown.replace("\n", " ")
    for words in ("25%", "2 shards/s", "phase 24 s more; ETA: one start", "GPU 0", "70.0 / 141 GiB", "18:00:01 a line"):
        assert words in shown


def test_a_dead_server_shows_cause_evidence_advice_and_notes() -> None:
    shown = drawn(CRASHED)
    for words in ("cause:    oom", "evidence: CUDA out of memory", "advice:   lower it", "note:     n", "more"):
        assert words in shown


def test_elsewhere_a_line_is_said_at_each_change_and_not_at_each_look() -> None:
    said: list[str] = []
    screen = Screen(Console(file=io.StringIO(), force_terminal=False), said.append)
    with screen:
        for _ in range(5):
            screen.show(LOADING, None, None, None)
        for _ in range(5):
            screen.show(CRASHED, None, None, None)
    assert [line.split(":")[0] for line in said] == ["ETA", "sglang", "vllm", "cause", "evidence", "advice", "note"]


def test_times_and_acceptance_in_words() -> None:
    assert [seconds(value) for value in (None, 5.0, 65.0, 3725.0)] == ["-", "5 s", "1:05", "1:02:05"]
    assert headline(LOADING).startswith("sglang: loading")
    assert headline(replace(LOADING, eta_s=0.2)).endswith("later than recorded")
    moving = headline(replace(LOADING, moving=("1.0 cores", "4 MB/s read"), idle_s=0.0))
    assert moving.endswith("ready in about 3:05, moving: 1.0 cores; 4 MB/s read")
    assert headline(replace(LOADING, idle_s=70.0)).endswith("nothing moves for 1:10")
    found = Acceptance(1.85, "/metrics", 1000, (0.5, 0.25, 0.1), 120.0)
    words = "accept length 1.85, survival 0.50 0.25 0.10, 1000 rounds, 120.0 tokens/s, steady (/metrics)"
    assert acceptance_words(found, "steady") == words
