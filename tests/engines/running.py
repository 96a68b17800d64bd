"""How a test runs vLLM in its own interpreter: a job of cases, or a server."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.formats.draft_config import DraftConfig
from eyas.formats.read_config import read_config
from eyas.formats.target_config import read_json

JSON = dict[str, Any]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Parameters that nothing fills are torch.empty: fresh pages, so zeros, and never an earlier engine's weights.
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Engines one after the other in one process: a start costs seconds, where processes of their own cost a minute."""
IN_PROCESS = {"distributed_executor_backend": "uni"}
LONGEST = 20 * 60


def environment(**more: str) -> dict[str, str]:
    """This process's own without what is Eyas's or Python's path, no hub."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("EYAS_") and name != "PYTHONPATH"}
    return {**own, **OFFLINE, **more}


def run_job(
    python: Path, folder: Path, target: Path, cases: Sequence[JSON], options: JSON, variables: Mapping[str, str]
) -> dict[str, JSON]:
    """Run `cases` (vllm_runs.py) in `folder`; case name to what it found. The engine's log is `folder`/log."""
    folder.mkdir(parents=True, exist_ok=True)
    job, out, log = folder / "job.json", folder / "out.jsonl", folder / "log"
    job.write_text(json.dumps({"target": str(target), "out": str(out), "options": options, "cases": list(cases)}))
    with log.open("w") as stream:
        done = subprocess.run(
            [python, Path(__file__).with_name("vllm_runs.py"), job],
            cwd=folder,
            env=environment(**variables),
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=LONGEST,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["name"] for one in found] == [case["name"] for case in cases]
    return {one.pop("name"): one for one in found}


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, body: JSON) -> JSON:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def ready(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


@contextmanager
def server(python: Path, folder: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Server]:
    """vLLM's API server on a free port of this machine until the block ends; its log is `folder`/log.

    `vllm serve` is the same, but in vllm-cpu 0.32 that command asks for the version of a package `vllm` and fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    command = [python, *module, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**variables),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = Server(f"http://127.0.0.1:{port}", log)
    try:
        started = time.monotonic()
        while not found.ready():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() - started < LONGEST, log.read_text()[-4000:]
            time.sleep(1)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)


def declared(export: Path) -> DraftConfig:
    """What an export of Eyas says of its draft."""
    config = read_config(read_json(export / "config.json")).config
    assert config is not None, f"{export} is no export of Eyas"
    return config
