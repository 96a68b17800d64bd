"""Where the rope that an engine takes is not the draft's, and what is particular to drafts with latent attention.

Sources, as read: SGLang 0.5.12 to 0.5.23 models/deepseek_v2.py, vLLM 0.20 to 0.33 models/deepseek_{v2,eagle3}.py and
config/speculative.py `hf_config_override`; `formats/yarn.py`. No torch.
"""

from collections.abc import Iterator

from eyas.formats.problem import Problem
from eyas.formats.yarn import unlike
from eyas.wiring.loaders.case import Case

MTP_TYPES = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa"})
"""vLLM puts its DeepSeekMTPModel in the place of the class of a draft of these model_types."""


def rope_problems(case: Case) -> Iterator[Problem]:
    theta = case.view.reads["rope_theta"]
    if not isinstance(theta.value, int | float) or isinstance(theta.value, bool):
        expected, fix = "the base of training", "rope_theta = the target's, or the one of training"
        found = f"{theta.value!r} in {theta.where}: no base, the server stops or takes 10000"
        yield Problem("rope_theta", where=theta.where, expected=expected, found=found, fix=fix)
    elif theta.where.startswith("absent"):
        found = "absent: 10000 is taken"
        yield Problem("rope_theta", "rope_theta", "the base of training", found, "write rope_theta", "warning")
    elif case.eyas is not None and theta.value != case.eyas.rope_theta:
        found = f"{theta.value!r} ({theta.where})"
        yield Problem("rope_theta", "rope_theta", repr(case.eyas.rope_theta), found, "export the draft again")
    elif case.raw.get("rope_theta") not in (None, theta.value):
        found = f"{case.raw['rope_theta']!r} beside {theta.where} = {theta.value!r}, which is read"
        yield Problem("rope_theta", "rope_theta", "one base", found, "make both spellings say the same", "warning")
    severity = "error" if case.eyas is not None else "warning"  # another trainer may have computed what the engine does
    for words in unlike(case.view.get("rope_scaling"), case.view.block, case.view.engine):
        fix = "train with a scaling that it reads, or without one; or another release"
        yield Problem("rope_scaling", "rope_scaling", "the scaling of training", words, fix, severity)


def latent_problems(case: Case) -> Iterator[Problem]:
    """Problems of an MLA draft; none for another block."""
    if case.view.block != "mla" or case.sglang:
        return
    kind = str(case.view.config.get("model_type"))
    if kind in MTP_TYPES:
        found = f"{kind}: DeepSeekMTPModel is put in the place of the class, and vLLM does not start"
        yield Problem("architecture_unknown", "model_type", "deepseek_v2", found, "model_type = deepseek_v2", "error")
    if case.raw.get("rope_interleave") is False:
        found = "not read: the rotated parts are interleaved pairs, always"
        fix = "serve with SGLang, or reorder the rotated rows of q_b_proj and kv_a_proj_with_mqa into pairs"
        yield Problem("rope_scaling", "rope_interleave", "halves, as the key says", found, fix)
    if not case.view.engine.since("0.32"):
        expected, found = "the rope of config.json", "rewritten as deepseek_yarn or default, the base lost"
        yield Problem("rope_theta", "rope", expected, found, "use vllm@0.32 or newer", "warning")
