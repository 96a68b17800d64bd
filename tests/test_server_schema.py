"""The server's OpenAPI description is true: schemathesis finds nothing that contradicts it (make test-server)."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from eyas.clients.health import probe
from tiny import save_tiny_target

RULES = ("--exclude-checks", "positive_data_acceptance")
"""Rules between fields, and a prompt's length in tokens, are said in words: no schema tells them."""
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = save_tiny_target(tmp_path_factory.mktemp("served") / "tiny")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ["--target", str(target), "--served-model-name", "tiny", "--dtype", "float32", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "eyas.engine.server", *words, "--max-output", "8"])
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while not probe(url).ready:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    yield url
    assert process.poll() is None, "nothing that is asked ends the server"
    process.terminate()
    assert process.wait(30) == 0


def test_schemathesis_finds_nothing(url: str) -> None:
    words = ["run", f"{url}/openapi.json", "--max-examples", "100", "--seed", "1", "--no-color"]
    # The examples of one test case leave nothing behind for the next: there is no state to walk through.
    done = subprocess.run(
        [shutil.which("schemathesis") or "schemathesis", *words, "--phases", "examples,coverage,fuzzing", *RULES],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
