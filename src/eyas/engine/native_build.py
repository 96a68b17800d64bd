"""native.cpp, compiled once for this machine into the cache, and loaded.

No torch headers, so it takes seconds; one OpenMP runtime, torch's own, which the loader finds loaded already. Whatever
goes wrong is a reason to give, never an error: the engine then runs its plain path.
"""

import atexit
import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime must be loaded before the library asks for one)

from eyas.progress import say
from eyas.run import cache_folder, hash_bytes

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = tuple(SOURCE.with_name(f"{name}.hpp") for name in ("attention", "products", "lanes"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
CPU = Path("/proc/cpuinfo")
OFF = "EYAS_NATIVE"
"""Set to 0, this environment variable keeps the engine on its plain path."""


@cache
def load_native() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if os.environ.get(OFF) == "0":
        return f"{OFF}=0"
    if platform.system() != "Linux":
        return f"{platform.system()} is not tried"
    named = os.environ.get("CXX")
    compiler = next((path for name in ([named] if named else COMPILERS) if (path := shutil.which(name))), None)
    if compiler is None:
        return f"no C++ compiler ({named or ', '.join(COMPILERS)})"
    try:
        library = cache_folder() / "native" / f"{_key(compiler)}.so"
        return _kept(library) or _declared(ctypes.CDLL(str(_compile(compiler, library))))
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None)
        return f"{compiler}: {(output or str(error)).strip().splitlines()[0]}"
    except OSError as error:
        return str(error)


def _kept(library: Path) -> ctypes.CDLL | None:
    """An earlier start's library; None where there is none that loads."""
    try:
        return _declared(ctypes.CDLL(str(library))) if library.is_file() else None
    except (OSError, AttributeError) as error:  # a disk that was full, a file cut short, a folder that is not ours
        say(f"engine: {library} cannot be loaded ({error}): compiled again")
        return None


def _compile(compiler: str, library: Path) -> Path:
    """The library, in the cache; where that cannot be written, in a folder that goes with this process, aloud."""
    started, folder = time.perf_counter(), _workplace(library)
    built = folder / library.name
    try:
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        seconds = f"engine: compiled its kernels ({time.perf_counter() - started:.1f} s)"
        try:
            _keep(built, library)
        except OSError as error:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            say(
                f"{seconds}, for this process only: they cannot be kept in {library.parent} ({error.strerror or error})"
            )
            return built
    except subprocess.SubprocessError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{seconds} once, kept in {library.parent}")
    return library


def _workplace(library: Path) -> Path:
    """A new folder to compile in: the system's temporary one, else beside the library."""
    try:
        return Path(tempfile.mkdtemp(prefix="eyas-"))
    except OSError:
        library.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".eyas-", dir=library.parent))


def _keep(built: Path, library: Path) -> None:
    """Copy it into the cache at one stroke, so that no other process loads half of it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_name(f".{library.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(built, temporary)
        temporary.replace(library)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _key(compiler: str) -> str:
    """What the library depends on: source, flags, compiler, and the processor that -march=native sees."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    first = CPU.read_text().split("\n\n")[0] if CPU.is_file() else platform.processor()
    facts = [line for line in first.splitlines() if line.split(":")[0].strip() in ("flags", "Features", "model name")]
    return hash_bytes(
        "\n".join([*facts, version, *FLAGS]).encode() + b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    )[:16]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.eyas_scratch.argtypes, library.eyas_scratch.restype = [pointer, size, size, size], size
    library.eyas_forward.argtypes, library.eyas_forward.restype = [pointer, pointer], None
    library.eyas_multiply.argtypes, library.eyas_multiply.restype = [pointer, pointer, size, pointer, size], None
    library.eyas_norm.argtypes, library.eyas_norm.restype = [pointer, pointer, size, size, number, pointer], None
    library.eyas_read.argtypes, library.eyas_read.restype = [pointer, size, size], size
    return library
