"""Target classes as the engines have them: which can capture states for EAGLE-3, from which release, by which rule.

Keys are `model_type`s, of the whole model or of its text part. Read from the model files of the wheels: SGLang 0.5.11
to 0.5.23 `set_eagle3_layers_to_capture` (inherited ones too), vLLM 0.20 to 0.33 `SupportsEagle3`.
"""

FIRST_ID_RULE = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "sarvam_mla"),
        "glm4_moe_lite",
    }
)
"""SGLang's deepseek_v2 class, what inherits it or delegates to it, and glm4_moe_lite."""

OUTPUT_IDS_SINCE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral3", "phi3", "internlm3", "llama4", "llama4_text", "apertus"),
            *("qwen2", "qwen2_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_next"),
            *("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_thinker"),
            *("glm4_moe", "minimax_m2", "longcat", "longcat_flash", "exaone_moe"),
            *("bailing_moe", "bailing_moe_v2", "sarvam_moe"),
        ),
        "0.5.11",
    ),
    **dict.fromkeys(("gemma3", "gemma3_text", "gemma4", "gemma4_text"), "0.5.12"),
    "gemma4_unified": "0.5.13",
    **dict.fromkeys(("minimax_m3", "mellum"), "0.5.16"),
    **dict.fromkeys(("glm5_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "0.5.23"),
}
"""SGLang classes that always add 1, and the first known release in which they capture."""
OUTPUT_IDS = frozenset(OUTPUT_IDS_SINCE)
OWN_RULE_SINCE = {"gpt_oss": "0.5.11", "minimax_m3_vl": "0.5.23"}
REACHES_LAST = frozenset({"gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified"})
"""Classes of the id+1 rule that take boundary n too (gemma3_causal.py and gemma4_causal.py, after the layer loop)."""
NO_SETTER = frozenset({"kimi_linear", "kimi_k3", "deepseek_v4"})
"""SGLang classes without set_eagle3_layers_to_capture: the server refuses to start."""
UNPROVEN = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
"""They inherit a setter before 0.5.23 as well, but what their layers then do with it was not worked out."""


def sglang_since(model_type: str) -> str | None:
    """The first known SGLang release that captures states of this class; None for a class that was not read."""
    if model_type in FIRST_ID_RULE:
        return "0.5.11"
    return OUTPUT_IDS_SINCE.get(model_type) or OWN_RULE_SINCE.get(model_type)


MLA = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe_lite"})
"""Targets with multi-head latent attention."""

VLLM_DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "sarvam_mla"})
"""Targets of vLLM's deepseek_v2.py, which sets its layers in a loop of its own."""
VLLM_KNOWN = VLLM_DEEPSEEK | frozenset(
    {
        *("afmoe", "apertus", "cohere2_moe", "ernie4_5", "exaone", "exaone4_5", "gemma4", "gemma4_text", "gpt_oss"),
        *("granite", "granitemoe", "granitemoeshared", "internlm3", "laguna", "llama", "llama4", "llama4_text"),
        *("llava", "mimo_v2_flash", "minicpm3", "minimax_m2", "mistral", "mistral3", "nemotron_h", "phi3"),
        *("qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_text", "qwen2_moe"),
        *("qwen3_vl_moe_text", "hunyuan_v1_dense", "glm_moe_dsa"),
    }
)
VLLM_020_NAMES = (
    *("llama", "qwen", "minicpm", "gpt_oss", "hunyuan_vl", "hunyuan_v1_dense", "afmoe", "nemotron_h"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "minimax_m2", "gemma4"),
)
"""vLLM 0.20 config/speculative.py: the target's model_type must contain one of these, or it does not start."""
V2_IN_024 = frozenset({"qwen3", "deepseek_v2", "qwen2_moe", "granitemoe", "llama", "mistral"})
"""Targets that vLLM 0.24 runs on Model Runner V2 without being told (config/vllm.py); the others on V1."""
