"""What vLLM cannot serve of a draft. Source: vLLM 0.20 to 0.33 model_executor/models/{llama,qwen3,deepseek}_eagle3.py,
as read."""

from eyas.formats.draft_config import DraftConfig
from eyas.formats.engines import Engine, parse_engine
from eyas.formats.yarn import unlike


def cannot(config: DraftConfig, engine: Engine | None = None) -> list[str]:
    """Reasons why vLLM would serve something other than this draft; empty: it can."""
    engine = engine or parse_engine("vllm")
    reasons = [
        (config.fc_bias, "fc_bias: it drops fc.bias in silence"),
        (config.block == "mla" and not engine.since("0.32"), "block = mla: before 0.32 it rewrites the draft's rope"),
        (
            config.block == "mla" and config.method == "peagle",
            "method = peagle: its MLA draft has no place for mask_hidden",
        ),
        (config.block == "mla" and config.norm_before_fc, "norm_before_fc: its MLA draft has no input_norm"),
        (
            config.sliding_window is not None and config.block == "mla",
            "sliding_window: its MLA draft attends to everything",
        ),
        (config.block == "qwen3" and not engine.since("0.24"), "block = qwen3: 0.20 has no norms of queries and keys"),
        (
            config.sliding_window is not None and config.block == "qwen3" and not engine.since("0.32"),
            "sliding_window: its Qwen3 draft attends to everything before 0.32",
        ),
        (
            not engine.since("0.24") and (config.fc_norm or config.norm_output),
            "fc_norm and norm_output: it knows them from 0.24",
        ),
        (not engine.since("0.24") and len(config.boundaries) != 3, "taps: before 0.24 fc is always three states wide"),
    ]
    rope = [f"rope_scaling: {words}" for words in unlike(config.rope_scaling, config.block, engine)]
    return [reason for true, reason in reasons if true] + rope
