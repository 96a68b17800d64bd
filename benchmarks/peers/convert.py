"""Target and draft in each engine's own format, by its own converter, once: what is there is taken as it is."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.engines import HERE, OFFLINE, Engine, dropped

GGUF = {"float32": "f32", "bfloat16": "bf16"}
IR = {"float32": "fp32", "bfloat16": "fp16"}
"""optimum has no bfloat16 weights: 16-bit ones are rounded on, where the CPU has bfloat16 instructions."""
LONGEST_S = 900


class ConvertError(Exception):
    """A converter that failed: the reason that voids the engine's rows."""


@dataclass(frozen=True)
class Step:
    """A command that writes `out` (a file or a folder) by the name that stands for OUT in it."""

    out: Path
    command: Sequence[str | Path]


@dataclass(frozen=True)
class Models:
    """What a worker is given, and the steps that make it."""

    target: Path
    draft: Path
    steps: tuple[Step, ...] = ()


OUT = "OUT"


def models(engine: Engine, precision: str, target: Path, export: Path, boundaries: Sequence[int], work: Path) -> Models:
    """Of `engine`, from the target's Hugging Face folder and the draft's export. Makes nothing."""
    if engine.name == "openvino":
        return _openvino(engine, IR[precision], target, export, boundaries, work)
    if engine.name == "llamacpp":
        return _llamacpp(engine, GGUF[precision], target, export, work)
    return Models(target, export)


def _openvino(engine: Engine, kind: str, target: Path, export: Path, boundaries: Sequence[int], work: Path) -> Models:
    made = Models(work / f"openvino-target-{kind}", work / f"openvino-draft-{kind}")
    tool = [engine.python.with_name("optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
    tool += ["--weight-format", kind]
    ids = ",".join(str(boundary - 1) for boundary in boundaries)
    draft = [engine.python, HERE / "openvino_export.py", ids, OUT, *tool, "-m", export]
    draft += ["--trust-remote-code", "--disable-convert-tokenizer"]
    return Models(made.target, made.draft, (Step(made.target, [*tool, "-m", target, OUT]), Step(made.draft, draft)))


def _llamacpp(engine: Engine, kind: str, target: Path, export: Path, work: Path) -> Models:
    made = Models(work / f"target-{kind}.gguf", work / f"draft-{kind}.gguf")
    tool = [engine.python, converter(engine), "--outtype", kind, "--outfile", OUT]
    draft = [*tool, export, "--target-model-dir", target]
    return Models(made.target, made.draft, (Step(made.target, [*tool, target]), Step(made.draft, draft)))


def converter(engine: Engine) -> Path:
    """convert_hf_to_gguf.py of the source tree that lies in llama.cpp's environment."""
    found = sorted(engine.python.parents[1].glob("src/*/llama.cpp/convert_hf_to_gguf.py"))
    return found[-1] if found else engine.python.parents[1] / "src/llama.cpp/convert_hf_to_gguf.py"


def convert(wanted: Models, log: Path) -> None:
    """Run the steps whose output is not there. Raises ConvertError with the last line of what the converter said."""
    variables = {name: value for name, value in os.environ.items() if not dropped(name)} | OFFLINE
    for step in wanted.steps:
        if step.out.exists():
            continue
        for folder in (step.out.parent, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        partial = step.out.with_name(f"partial-{step.out.name}")
        if partial.is_dir():
            shutil.rmtree(partial)
        command = [str(partial if part == OUT else part) for part in step.command]
        with log.open("a") as stream:
            done = subprocess.run(
                command, env=variables, stdout=stream, stderr=stream, check=False, timeout=LONGEST_S
            ).returncode
        if done:
            last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            raise ConvertError(f"{Path(command[1]).name} ended with {done}: {last[:300]} ({log})")
        partial.replace(step.out)
