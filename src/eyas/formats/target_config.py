"""A target's config.json and tensor names as published: nested text configs, architectures under two names, prefixes.

Torch-free, for preflight and plans as much as for loading.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.errors import InputError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that are another's architecture under a name of their own."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is. Raises InputError where it is absent or no JSON object."""
    return read_json(folder / "config.json")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own config, also where it is nested in a multimodal one; `kimi_k2` reads as DeepSeek-V3.

    `auto_map` (remote code) and the quantisation are left out: neither is ours to run.
    """
    nested = next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping)), config)
    text = {name: value for name, value in nested.items() if name not in ("auto_map", "quantization_config")}
    model_type = str(text.get("model_type"))
    return text | {"model_type": SAME_AS.get(model_type, model_type)}


def layer_prefix(names: Mapping[str, Any], folder: Path) -> str:
    """What stands before `layers.0.` and `embed_tokens.` of the language model: `model.`, `language_model.model.` ...

    A vision tower has layers but no token embedding. Raises InputError where no name fits, or several do.
    """
    found = sorted(set(_prefixes(names)))
    if len(found) == 1:
        return found[0]
    raise InputError(
        wanted="one decoder: PREFIX.embed_tokens.weight and PREFIX.layers.0.input_layernorm.weight",
        got=f"prefixes {found}" if found else f"names such as {', '.join(sorted(names)[:3])}",
        where=str(folder),
        next="this architecture is not known to Eyas yet: report it with its tensor names",
    )


def _prefixes(names: Mapping[str, Any]) -> Iterator[str]:
    suffix = "embed_tokens.weight"
    for name in names:
        prefix = name.removesuffix(suffix)
        if prefix != name and f"{prefix}layers.0.input_layernorm.weight" in names:
            yield prefix


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: generation_config's list, else the text config's; () where neither says."""
    generation = folder / "generation_config.json"
    told = read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = text_config(read_config(folder)).get("eos_token_id") if told is None else told
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError where the file is absent, no JSON, or no object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise _not_json(path, got) from error
    if not isinstance(value, dict):
        raise _not_json(path, f"JSON that is no object: {'null' if value is None else type(value).__name__}")
    return value


def _not_json(path: Path, got: str) -> InputError:
    next_line = "give a folder that holds config.json, or that file"
    return InputError(wanted="a JSON object", got=got, where=str(path.absolute()), next=next_line)
