"""Which rotary scalings the engines' MLA drafts compute: DeepSeek's YaRN and none other, whatever the type says.

Sources, as read: SGLang 0.5.12 to 0.5.23 models/deepseek_v2.py (every scaling becomes `deepseek_yarn`) and its
rotary_embedding, vLLM 0.32 and 0.33 models/deepseek_v2.py and deepseek_scaling_rope.py; transformers 5
modeling_rope_utils.py for what training computes.
"""

from collections.abc import Mapping
from typing import Any

READ = frozenset(
    {
        *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)


def unlike(scaling: Mapping[str, Any] | None) -> list[str]:
    """Where an engine's MLA draft would rotate otherwise than training under this scaling, in words; empty: nowhere."""
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if not scaling or kind == "default":
        return []
    if kind not in ("yarn", "deepseek_yarn"):
        return [f"{kind} is taken for DeepSeek's YaRN"]
    unread, mscale = sorted(scaling.keys() - READ), scaling.get("mscale")
    found = [f"{', '.join(unread)}: not read"] if unread else []
    # DeepSeek takes mscale 1 and mscale_all_dim 0 for absent ones, transformers leaves both aside unless both are there
    if bool(mscale) != bool(scaling.get("mscale_all_dim")) and mscale != 1:
        found.append("one of mscale and mscale_all_dim without the other stretches the angles otherwise")
    return found
