"""What is particular to drafts with latent attention: their rope, and a model_type that vLLM takes for something else.

Sources, as read: SGLang 0.5.12 to 0.5.23 models/deepseek_v2.py, vLLM 0.20 to 0.33 models/deepseek_{v2,eagle3}.py and
config/speculative.py `hf_config_override`. No torch.
"""

from collections.abc import Iterator

from eyas.formats.latent_rope import unlike
from eyas.formats.problem import Problem
from eyas.wiring.loaders.case import Case

MTP_TYPES = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa"})
"""A draft of these model_types becomes DeepSeek's multi-token-prediction module, and its class a name nobody has."""


def latent_problems(case: Case) -> Iterator[Problem]:
    """Problems of an MLA draft; none for another block."""
    if case.view.block != "mla":
        return
    kind, engine = case.view.config.get("model_type"), case.view.engine
    if not case.sglang and kind in MTP_TYPES:
        found = f"{kind}: vLLM puts its DeepSeekMTPModel in the place of the class, and does not start"
        yield Problem("architecture_unknown", "model_type", "deepseek_v2", found, "model_type = deepseek_v2", "error")
    for words in unlike(case.view.get("rope_scaling")):
        fix = "train with DeepSeek's YaRN or without scaling"
        yield Problem("rope_scaling", "rope_scaling", "a scaling that MLA drafts compute", words, fix)
    if not case.sglang and case.raw.get("rope_interleave") is False:
        found = "not read: pairs are interleaved, always"
        fix = "serve with SGLang, or reorder the rotated rows of q_b_proj and kv_a_proj_with_mqa into pairs"
        yield Problem("rope_scaling", "rope_interleave", "halves, as the key says", found, fix)
    if not case.sglang and not engine.since("0.32"):
        expected, found = "the rope of config.json", "rewritten as deepseek_yarn or default, the base lost"
        yield Problem("rope_theta", "rope", expected, found, "use vllm@0.32 or newer", "warning")
