"""A stage folder has one writer: the second is told who the first is, and a dead one is no hindrance."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.lock import LOCK, lock_folder
from eyas.stage import begin

HOLD = """
import sys, time
from pathlib import Path
from eyas.stage import begin
stage = begin(Path(sys.argv[1]), "responses", {}, {})
print("held", flush=True)
time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process, at work in `folder`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_writer_is_told_the_first_one_s_pid_and_takes_over_when_it_is_dead(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(InputError) as error:
            begin(tmp_path, "responses", {}, {})
        assert f"process {process.pid} on " in error.value.got
        assert error.value.where == str(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    stage = begin(tmp_path, "responses", {}, {})
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    stage.finish(files={}, facts={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json"]


def test_a_process_does_not_stand_in_its_own_way(tmp_path: Path) -> None:
    first = begin(tmp_path, "responses", {}, {})
    again = begin(tmp_path, "responses", {}, {})
    assert again.lock is first.lock


def test_a_lock_that_nothing_refers_to_is_free(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert (tmp_path / LOCK).is_file()
    del lock
    assert not (tmp_path / LOCK).exists()
    process = holder(tmp_path)
    process.kill()
    process.communicate()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        begin(tmp_path / "file" / "out", "responses", {}, {})
