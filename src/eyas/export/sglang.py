"""What SGLang cannot serve of a draft. Source: SGLang 0.5.11 to 0.5.23 models/llama_eagle3.py and kimi_k25_eagle3.py,
as read."""

from eyas.formats.draft_config import DraftConfig
from eyas.formats.engines import Engine, parse_engine
from eyas.formats.methods import METHODS
from eyas.formats.yarn import unlike


def cannot(config: DraftConfig, engine: Engine | None = None) -> list[str]:
    """Reasons why SGLang would serve something other than this draft; empty: it can."""
    engine = engine or parse_engine("sglang")
    mla = config.block == "mla"
    norms_since = "0.5.13" if mla else "0.5.12"
    method = METHODS[config.method]
    reasons = [
        (method.sglang is None, f"method = {config.method}: it has no {method.words}"),
        (config.norm_before_residual, "norm_before_residual: it always takes the residual before the norm"),
        (config.block == "qwen3", "block = qwen3: it has no draft class that norms queries and keys"),
        (mla and not engine.since("0.5.12"), "block = mla: 0.5.11 has no MLA draft"),
        (mla and config.norm_before_fc, "norm_before_fc: its MLA draft has no input_norm"),
        (mla and config.num_hidden_layers > 1, "several layers: its MLA draft has exactly one"),
        (config.attention_bias, "attention_bias: it drops the biases of q, k and v in silence"),
        (
            config.own_embedding and config.target_hidden_size == config.hidden_size,
            "own_embedding: it always puts the target's embedding in its place",
        ),
        (
            config.taps_width == config.hidden_size,
            "taps as wide as the draft (a single tap): it skips fc in silence",
        ),
        (
            config.sliding_window is not None,
            "sliding_window: its MLA draft attends to everything"
            if mla
            else "sliding_window: the window is a server flag there, not the draft's",
        ),
        (
            not engine.since(norms_since) and (config.fc_norm or config.norm_output),
            f"fc_norm and norm_output: its {config.block} draft knows them from {norms_since}",
        ),
        (
            not engine.since("0.5.12") and config.num_hidden_layers > 1,
            "several layers: before 0.5.12 it reads midlayer.* only",
        ),
        (
            not engine.since("0.5.12") and len(config.boundaries) != 3,
            "taps: before 0.5.12 fc is always three states wide",
        ),
        (not engine.since("0.5.17") and config.norm_before_fc and not mla, "norm_before_fc: it knows it from 0.5.17"),
    ]
    rope = [f"rope_scaling: {words}" for words in unlike(config.rope_scaling, config.block, engine)]
    return [reason for true, reason in reasons if true] + rope
