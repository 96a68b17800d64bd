"""What both engines leave out of a draft with latent attention.

Source: SGLang 0.5.12 to 0.5.23 models/kimi_k25_eagle3.py, vLLM 0.20 to 0.33 deepseek_eagle3.py, as read.
"""

from eyas.formats.draft_config import DraftConfig
from eyas.formats.latent_rope import unlike


def cannot(config: DraftConfig) -> list[str]:
    """Reasons why neither engine would serve this draft as it is; none for a draft of another block."""
    if config.latent is None:
        return []
    normed = ["norm_before_fc: its MLA draft has no input_norm"] if config.norm_before_fc else []
    return normed + [f"rope_scaling: in its MLA draft {words}" for words in unlike(config.rope_scaling)]
