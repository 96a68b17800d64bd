"""The embedded server under Eyas: started, watched, measured and stopped like any other engine."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from eyas.clients.openai import OpenAI
from eyas.errors import ServerDied
from eyas.launch.find import of_folder
from eyas.launch.process import read_server, start
from eyas.launch.stop import Doomed, stop
from eyas.launch.watch import Watch
from eyas.pipeline.check_url import check_url
from eyas.pipeline.serve import Launch, prepare, serve
from eyas.pipeline.watch import watch_once
from eyas.recipe import recipe_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(15 * 60)]

QUESTIONS = ("Why is the sky blue?", "Write a short poem about rivers.", "Explain how a bicycle stays upright.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(folder: Path, draft: Path, port: int | None = None) -> Launch:
    words = {
        "engine": "embedded",
        "draft": str(draft),
        "port": port or free_port(),
        "num_steps": 2,
        "engine_args": ["--fixed-depth"],  # else it drafts less, or nothing, where that is faster
    }
    return prepare(recipe_of(tuple(f"serve.{name}={value!r}" for name, value in words.items())), folder)


def test_the_embedded_server_is_started_watched_measured_and_stopped(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "serve"
    ready = serve(launch(folder, export), detach=True)
    try:
        assert ready["state"] == "ready" and ready["phases"]
        with OpenAI(ready["url"]) as server:
            for question in QUESTIONS:
                assert server.chat([{"role": "user", "content": question}], max_tokens=48).text
        seen = watch_once(of_folder(folder))
        assert (seen["engine"], seen["state"]) == ("embedded", "ready")
        acceptance = seen["acceptance"]
        assert acceptance["exact"] and len(acceptance["survival"]) == 2
        assert acceptance["accept_length"] == pytest.approx(1 + sum(acceptance["survival"]), abs=1e-3)
        assert 1.05 < acceptance["accept_length"] <= 3
        checked = check_url(ready["url"])
        assert checked["engine"] == "embedded" and checked["verdict"] != "fail"
    finally:
        ended = stop(Doomed.of(read_server(folder)))
    assert (ended["stopped"], ended["port_free"], ended["killed"]) == (True, True, [])
    assert watch_once(of_folder(folder))["state"] == "stopped"


def test_a_taken_port_and_a_kill_are_named(export: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ServerDied) as died:
            serve(launch(tmp_path / "taken", export, holder.getsockname()[1]), detach=True, force=True)
        assert died.value.facts["cause"] == "port_busy"
    one = launch(tmp_path / "killed", export)
    server = start(one.command, one.folder, one.key)
    watch = Watch(of_folder(one.folder))
    while watch.look().phase != "weights":
        time.sleep(0.05)
    os.kill(server.pid, signal.SIGKILL)
    while (status := watch.look()).state != "crashed":
        time.sleep(0.05)
    watch.close()
    assert (status.cause, status.phase) == ("killed", "weights")
