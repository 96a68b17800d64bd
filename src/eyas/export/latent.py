"""What both engines leave out of a draft with latent attention.

Source: SGLang 0.5.12 to 0.5.23 models/kimi_k25_eagle3.py and deepseek_v2.py, vLLM 0.20 to 0.33 deepseek_eagle3.py and
deepseek_v2.py, as read.
"""

from eyas.formats.draft_config import DraftConfig

YARN_KEYS = frozenset(
    {
        *("type", "rope_type", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
"""What DeepSeek's YaRN takes; other keys of a scaling change nothing there."""


def cannot(config: DraftConfig) -> list[str]:
    """Reasons why neither engine would serve this draft as it is; none for a draft of another block."""
    if config.latent is None:
        return []
    scaling = config.rope_scaling or {}
    kind, unread = scaling.get("rope_type", "yarn"), sorted(scaling.keys() - YARN_KEYS)
    mscale = scaling.get("mscale")
    reasons = [
        (config.norm_before_fc, "norm_before_fc: its MLA draft has no input_norm"),
        (kind != "yarn", f"rope_scaling: its MLA draft takes {kind} for DeepSeek's YaRN"),
        (kind == "yarn" and bool(unread), f"rope_scaling: its MLA draft does not read {', '.join(unread)}"),
        (
            bool(mscale) != bool(scaling.get("mscale_all_dim")) and mscale != 1,
            "rope_scaling: one of mscale and mscale_all_dim alone scales the angles otherwise than in training",
        ),
    ]
    return [reason for true, reason in reasons if true]
