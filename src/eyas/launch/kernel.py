"""What the kernel did: kills for lack of memory, by control group and kernel log. Standard library only."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = "/dev/kmsg"
RECORDS = 20_000


def oom_kills(pid: int, cgroups: Path = CGROUPS, proc: Path = Path("/proc")) -> int | None:
    """Kernel kills so far in the control group of `pid` for want of memory; None where it cannot be read.

    cgroup 2: memory.events; cgroup 1: memory.oom_control. Inside a container the path may be seen from outside, so
    the group's own root is tried last.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    candidates = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            candidates.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            candidates.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    candidates += [cgroups / "memory.events", cgroups / "memory" / "memory.oom_control"]
    for candidate in candidates:
        count = _count(candidate)
        if count is not None:
            return count
    return None


def memory_limit(cgroups: Path = CGROUPS) -> tuple[int | None, int]:
    """(bytes that the control group at the root may hold, bytes it holds); None: no limit that can be read."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((cgroups / limit).read_text()), int((cgroups / used).read_text())
        except (OSError, ValueError):  # not this kind of group, or "max"
            continue
    return None, 0


def _count(path: Path) -> int | None:
    try:
        words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        return int(words["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def oom_killed(pid: int, log: str = KERNEL_LOG) -> bool | None:
    """Whether the kernel log says that `pid` was killed for memory; None where it may not be read."""
    wanted = f"Killed process {pid} "
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for _ in range(RECORDS):
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                return False
            except OSError:
                continue  # overwritten while it was read
            if not record:
                return False
            if wanted in record.decode(errors="replace"):
                return True
        return False
    finally:
        os.close(descriptor)
