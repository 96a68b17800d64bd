"""A stock vLLM, the plug-in on its path: a right export passes, and what is planted is named from the trace alone.

One process runs every engine, one after the other, each over one prompt; then each trace is held against its export.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.formats.trace import ENGINE_SIDE
from eyas.models.checkpoint import load_draft
from eyas.models.target import Target
from eyas.wiring.findings import Finding
from eyas.wiring.static_checks import Check
from eyas.wiring.trace_draft import trace_checks
from planted import Change, both, ids, nested_only, planted, setting, unchanged, uneven, untrained, without
from running import IN_PROCESS, ONE_PROCESS, declared, run_job

pytestmark = [pytest.mark.engines, pytest.mark.timeout(45 * 60)]

ONE_DOWN = {("tap_offset", f"boundary {b} of 30", f"boundary {b - 1}") for b in (2, 15, 27)}
ONE_UP = {("tap_offset", f"boundary {b} of 30", f"boundary {b + 1}") for b in (2, 15, 27)}
FC_NORMS = ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")
SLOW_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
TAPS: dict[str, tuple[Change, set[tuple[str, str, str]]]] = {
    "right": (unchanged, set()),
    "ids in another order": (ids(27, 2, 15), set()),
    "embedding slipped in": (ids(0, 15, 27), {("tap_embedding", "boundary 2 of 30", "boundary 0")}),
    "all one down": (ids(1, 14, 26), ONE_DOWN),
    "all one up": (ids(3, 16, 28), ONE_UP),
    "one off by one": (ids(2, 16, 27), {("tap_offset", "boundary 15 of 30", "boundary 16")}),
    "last layer": (ids(2, 15, 30), {("tap_offset", "boundary 27 of 30", "boundary 30")}),
    "only the list for SGLang": (nested_only, ONE_DOWN),
    "states last first": (unchanged, {("tap_order", "blocks in the order [2, 15, 27]", "[27, 15, 2]")}),
}
"""Name to plant, and each finding's code and two numbers. vLLM sorts its ids, so their order is no fault; the last
plant is in the engine, and stays in its process."""
DRAFTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "norms before fc off": (both(setting("fc_norm", False), without(*FC_NORMS)), ("parity_mismatch taps",)),
    "norm_output on": (setting("norm_output", True), ("parity_mismatch layer",)),
    "residual from the normed state": (setting("norm_before_residual", True), ("parity_mismatch layer",)),
    "rope base": (
        both(setting("rope_theta", 10_000.0), setting("rope_parameters", SLOW_ROPE)),
        ("parity_mismatch layer",),
    ),
    "table lost": (without("d2t"), ("d2t_missing",)),
    "projection lost": (without("midlayer.self_attn.o_proj.weight"), ("parity_mismatch layer",)),
    "norm of the state lost": (without("midlayer.hidden_norm.weight"), ("parity_mismatch layer",)),
    "fc lost": (without("fc.weight"), ("parity_mismatch fc",)),
    "last norm lost": (without("norm.weight"), ("parity_mismatch logits",)),
    "head lost": (without("lm_head.weight"), ("parity_mismatch logits",)),
}
"""What vLLM 0.32 loads without a word and is another draft: its first finding."""
REFUSED: dict[str, Change] = {
    "unknown tensor": lambda config, tensors: tensors.update(extra=tensors["norm.weight"] + 0)
}
WIRINGS: dict[str, dict[str, Any]] = {
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm before fc, two layers": {"norm_before_fc": True, "num_hidden_layers": 2},
    "Qwen3 block, normed residual": {"block": "qwen3", "norm_before_residual": True},
    "sliding window, other heads": {
        "sliding_window": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "biases": {"attention_bias": True},
    "Qwen3 block, biases": {"block": "qwen3", "attention_bias": True},
    "four taps from first to last, own embedding": {"boundaries": (0, 5, 15, 30), "own_embedding": True},
    "one tap, rope scaled": {
        "boundaries": (30,),
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


@dataclass(frozen=True)
class Lab:
    """Every engine has run; what it answered and where its trace lies."""

    folder: Path
    target: Target
    export: Path
    answers: dict[str, dict[str, Any]]

    def checks(self, name: str) -> list[Check]:
        """`eyas check --trace` of a case, against the draft that it should have been."""
        assert "error" not in self.answers[name], self.answers[name]
        draft, _ = load_draft(
            self.folder / "untrained" / name / "draft" if name in WIRINGS else self.export, self.target.embedding
        )
        return trace_checks([self.folder / "traces" / name], self.target, None, draft)

    def findings(self, name: str) -> list[Finding]:
        return [finding for check in self.checks(name) for finding in check.findings]


@pytest.fixture(scope="module")
def lab(
    vllm_python: Path,
    target: Target,
    target_folder: Path,
    export: Path,
    prompt: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    config = declared(export)
    if config.boundaries != (2, 15, 27) or not config.fc_norm:
        pytest.skip("faults are planted in the demo's form of a draft: boundaries 2, 15, 27, norms before fc")
    folder = tmp_path_factory.mktemp("vllm")
    export = planted(export, folder / "export", uneven)
    changes = {name: change for table in (DRAFTS, TAPS) for name, (change, _) in table.items()}
    drafts = {name: untrained(folder / "untrained" / name, target, **options) for name, options in WIRINGS.items()}
    drafts |= {name: planted(export, folder / "drafts" / name, change) for name, change in (REFUSED | changes).items()}
    cases = [
        {
            "name": name,
            "draft": str(draft),
            "num_steps": 3,
            "prompts": [prompt],
            "max_tokens": 12,
            "environment": {"EYAS_TRACE_OUT": str(folder / "traces" / name)},
            "last_first": name == "states last first",
        }
        for name, draft in drafts.items()
    ]
    variables = {**ONE_PROCESS, "PYTHONPATH": str(ENGINE_SIDE), "EYAS_TRACE": "1", "EYAS_TRACE_TENSORS": "1"}
    return Lab(folder, target, export, run_job(vllm_python, folder, target_folder, cases, IN_PROCESS, variables))


@pytest.mark.parametrize("name", TAPS)
def test_each_block_is_named_by_its_numbers(lab: Lab, name: str) -> None:
    checks = lab.checks(name)
    taps, _, rows, draft, tokens = checks
    found = {(one.code, one.expected, one.found) for one in taps.findings}
    assert found == TAPS[name][1] and len(taps.findings) == len(found), taps.evidence
    assert [taps.status, rows.status, draft.status, tokens.status] == ["fail" if found else "pass", *["pass"] * 3]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_is_not_the_folders_is_named_by_its_first_stage(lab: Lab, name: str) -> None:
    first = lab.findings(name)[0]
    stage = [first.where.rpartition(": ")[2]] if first.code == "parity_mismatch" else []
    assert (" ".join([first.code, *stage]),) == DRAFTS[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_it_refuses_by_itself(lab: Lab, name: str) -> None:
    assert "ValueError" in lab.answers[name]["error"] and "extra" in lab.answers[name]["error"]


@pytest.mark.parametrize("name", WIRINGS)
def test_an_exported_draft_of_any_wiring_is_the_same_draft_there(lab: Lab, name: str) -> None:
    """fc's input, fc, layer and logits within 0.1 % of our module's, in float32; ids as the table says."""
    checks = lab.checks(name)
    assert [(check.name.split()[1], check.status) for check in checks if check.status != "skipped"] == [
        (one, "pass") for one in ("taps", "rows", "draft", "tokens")
    ], [check.evidence for check in checks]
    assert all(stage in checks[3].evidence for stage in ("taps ", "fc ", "layer ", "logits "))
