"""What `eyas watch --once` saw of a process the last time: one look alone shows neither movement nor silence."""

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.launch.process import SAME_START_S
from eyas.launch.state import Memory
from eyas.run import cache_folder, write_atomic

FOLDER = "looks"
KEPT_S = 7 * 86400.0


class Look(BaseModel):
    """One server's memory; `created` guards against a pid that was taken again."""

    model_config = ConfigDict(frozen=True)

    created: float
    memory: Memory


def recall(pid: int, created: float) -> Memory | None:
    """The memory after the last look at this process; None: there was none, or it is another process."""
    try:
        look = Look.model_validate_json(_path(pid).read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    last = look.memory.last
    ahead = last is not None and last.time > time.time()  # the clock was set back
    return None if ahead or abs(look.created - created) > SAME_START_S else look.memory


def remember(pid: int, created: float, memory: Memory) -> None:
    """Keep the memory for the next look; what is a week old is removed."""
    path = _path(pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("*.json"):
        if time.time() - old.stat().st_mtime > KEPT_S:
            old.unlink(missing_ok=True)
    write_atomic(path, Look(created=created, memory=memory).model_dump_json() + "\n")


def _path(pid: int) -> Path:
    return cache_folder() / FOLDER / f"{pid}.json"
