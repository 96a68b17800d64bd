"""One writer a folder. The operating system holds the lock for a process and frees it when the process ends, however it
ends: a dead holder's lock is simply taken. Torch-free.
"""

import errno
import os
import socket
import sys
import weakref
from pathlib import Path

from eyas.errors import InputError
from eyas.progress import say

LOCK = ".lock"
"""In the folder, while it is written; holds the writer's process id and host, for people."""
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
"""What file systems without locks answer."""
AFAR = 1 << 30
"""Windows locks bytes, and nobody else may read them: one far behind the text."""

if sys.platform == "win32":
    import msvcrt

    def take(descriptor: int) -> None:
        """Lock or raise OSError, at once."""
        os.lseek(descriptor, AFAR, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def take(descriptor: int) -> None:
        """Lock or raise OSError, at once."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """Held until `release`, or until nothing refers to it. One process may hold it as often as it likes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.release = weakref.finalize(self, let_go, path, descriptor)


held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()
"""This process's own: a stage that failed and is begun again must not meet itself."""


def lock_folder(folder: Path) -> FolderLock | None:
    """Lock `folder` (made if need be) for this process; None where its file system has no locks, which is said.

    Raises InputError naming the process that writes it, and OSError for a folder that cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / LOCK
    if (mine := held.get(path)) is not None and mine.release.alive:
        return mine
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            take(descriptor)
        except OSError as error:
            told = os.pread(descriptor, 200, 0) if sys.platform != "win32" else path.read_bytes()
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                say(f"{folder}: no locks on this file system; let no other process write it")
                return None
            raise busy(folder, told) from error
        if still_there(path, descriptor):
            break
        os.close(descriptor)  # its holder finished and removed it in between
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    held[path] = lock = FolderLock(path, descriptor)
    return lock


def busy(folder: Path, told: bytes) -> InputError:
    holder = told.decode(errors="replace").strip() or "another process"
    return InputError(
        wanted="a folder that no other process is writing",
        got=f"{holder} is writing it",
        where=str(folder),
        next="wait for it to end (the same command then goes on or skips), stop it, or give another --out",
    )


def still_there(path: Path, descriptor: int) -> bool:
    """Whether the locked file is the one that a newcomer would open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def let_go(path: Path, descriptor: int) -> None:
    """Remove the file while it is ours, then free it; Windows removes no open file."""
    if sys.platform == "win32":
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return
    path.unlink(missing_ok=True)
    os.close(descriptor)
