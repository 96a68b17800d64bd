"""Where an engine's draft would rotate otherwise than training under a scaled rope: what it reads of YaRN.

Sources, as read: rotary_embedding of SGLang 0.5.11 to 0.5.23 and vLLM 0.20 to 0.33, models/deepseek_v2.py of both (an
MLA draft takes every scaling for `deepseek_yarn`); transformers 5 modeling_rope_utils.py for what training computes.
"""

from collections.abc import Mapping
from typing import Any

from eyas.formats.engines import Engine

READ_BY_MLA = frozenset(
    {
        *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
MSCALE_SINCE = {"sglang": "0.5.16", "vllm": "0.32"}
"""The first known releases whose plain YaRN (Llama and Qwen3 drafts) reads mscale and mscale_all_dim."""


def unlike(scaling: Mapping[str, Any] | None, block: str, engine: Engine) -> list[str]:
    """Where `engine`'s draft of this block differs from training under `scaling`, in words; empty: nowhere known."""
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if not scaling or kind == "default":
        return []
    return _latent(scaling, kind) if block == "mla" else _plain(scaling, kind, engine)


def _latent(scaling: Mapping[str, Any], kind: object) -> list[str]:
    if kind not in ("yarn", "deepseek_yarn"):
        return [f"an MLA draft takes {kind} for DeepSeek's YaRN"]
    unread, mscale = sorted(scaling.keys() - READ_BY_MLA), scaling.get("mscale")
    found = [f"an MLA draft does not read {', '.join(unread)}"] if unread else []
    # DeepSeek takes mscale 1 and mscale_all_dim 0 for absent ones, transformers leaves both aside unless both are there
    if bool(mscale) != bool(scaling.get("mscale_all_dim")) and mscale != 1:
        found.append("an MLA draft with one of mscale and mscale_all_dim alone stretches the angles otherwise")
    return found


def _plain(scaling: Mapping[str, Any], kind: object, engine: Engine) -> list[str]:
    since = MSCALE_SINCE.get(engine.name)
    if kind != "yarn" or since is None:
        return []
    found = []
    if scaling.get("mscale") and scaling.get("mscale_all_dim") and not engine.since(since):
        found.append(f"mscale and mscale_all_dim are read from {since} on, before that angles are stretched by factor")
    if scaling.get("attention_factor") is not None and (engine.name == "sglang" or not engine.since(since)):
        found.append("attention_factor is not read")
    return found
