"""Where a target's files are: the default's, converted once; a folder; what the hub has, fetched."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.errors import InputError, did_you_mean
from eyas.models.gguf import DEFAULT_TARGET, converted_target, default_target_folder

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_target(name: str, *, trust_remote_code: bool = False) -> Path:
    """The local folder of a target: the default's name (converted once), a folder, or a hub id (fetched).

    Raises InputError with what to type where it cannot be had.
    """
    if name == DEFAULT_TARGET:
        return default_target_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if _is_hub_id(name):
        return _fetch(name, trust_remote_code)
    raise InputError(
        wanted=f"{DEFAULT_TARGET}, a Hugging Face folder, or a hub id (owner/name)",
        got=f"{name!r}{did_you_mean(name, [DEFAULT_TARGET])}",
        where="target",
        next=f"--target {DEFAULT_TARGET}, or the folder's path",
    )


def local_folder(name: str) -> Path | None:
    """The folder of a target that is on this machine, the default's converted already: nothing is fetched or made to
    tell, as a plan may not. Raises InputError for a name that can lead to none."""
    if name == DEFAULT_TARGET:
        return converted_target()
    if not _is_hub_id(name):
        return resolve_target(name)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _is_hub_id(name: str) -> bool:
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
    return bool(named) and not Path(name).is_dir()


def _fetch(name: str, trust_remote_code: bool) -> Path:
    patterns = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(
            wanted=f"the target {name}: no such folder here, so from the Hugging Face hub",
            got=str(error).splitlines()[0],
            where="target",
            next="check the name and the network (HF_HUB_OFFLINE, HF_TOKEN for gated models), or give a local folder",
        ) from error
