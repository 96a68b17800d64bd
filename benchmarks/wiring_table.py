"""Plant every wiring fault in tiny targets of several architectures and see each named; see nothing in right wirings.

    python benchmarks/wiring_table.py            (make wiring-table; at most half an hour on two cores)

Targets read the prompt bank for a minute, drafts train on what they say; both are kept in the cache. Writes
bench/out/wiring.json (`planted`: fault, architecture, precision, expected, found, named; `right`: case,
false_findings) and bench/out/wiring.md, the table of docs/wiring.md.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from eyas.data.shards import CaptureReader, Sample
from eyas.models.checkpoint import load_draft
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target
from eyas.models.vocab import target_ids
from eyas.progress import say
from eyas.run import cache_folder, processor_name, versions
from eyas.wiring.check import CHECKS, Given, attempt
from wiring_lab import (
    Document,
    documents,
    draft_config,
    samples_of,
    save_taught_target,
    taught_draft,
    write_draft,
    write_lab_captures,
)

LAB = 2
"""Of the recipe below: another number makes everything anew."""
OUT = Path("bench/out")
BOUNDARIES = (2, 4, 5)
LAST = 8
PRECISIONS = ("float32", "bfloat16", "fp8")
RUN = ("tap identity", "teacher", "vocabulary", "hypotheses")
SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAST,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, query_pre_attn_scalar=16, final_logit_softcapping=30.0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=2.0, attention_multiplier=0.25, residual_multiplier=0.8),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "residual": {"norm_before_residual": True},
    "whole": {"norm_before_fc": True},
    "own": {"own_embedding": True},
}


@dataclass(frozen=True, eq=False)
class Lab:
    """One architecture: its target, its drafts, and texts neither was trained on."""

    architecture: str
    target: Target
    drafts: dict[str, Draft]
    held: list[Document]


@dataclass(frozen=True)
class Case:
    """A draft folder and captures: what is wrong with them, if anything."""

    name: str
    expected: str | None
    variant: str = "plain"
    declared: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that say something else than was trained."""
    tensors: Callable[[Lab], dict[str, Tensor]] | None = None
    boundaries: tuple[int, ...] = BOUNDARIES
    """What the captured blocks are."""
    says: tuple[int, ...] = BOUNDARIES
    """What captures and draft say they are."""
    hidden: int = 0
    token: int = 0
    change: Callable[[Lab, Sample], Sample] | None = None
    last_hidden_norm: str = "before"


def labs(names: list[str]) -> Iterator[Lab]:
    """Targets and drafts, made or read back."""
    for name in names:
        folder = cache_folder() / "wiring" / f"{LAB}-{name}"
        if not (folder / "target" / "config.json").is_file():
            say(f"wiring: teaching a {name} target")
            save_taught_target(folder / "target", ARCHITECTURES[name], steps=400, uneven=True)
        target = load_target(str(folder / "target"))
        learned: list[Document] = []
        drafts = {}
        for variant, options in VARIANTS.items():
            place = folder / variant
            if not (place / "config.json").is_file():
                say(f"wiring: teaching a {variant} draft of {name}")
                learned = learned or documents(target, 800, seed=1)
                draft = taught_draft(target, learned, draft_config(target, BOUNDARIES, **options), steps=250)
                write_draft(place, draft, target)
            drafts[variant] = load_draft(place, target.embedding)[0]
        yield Lab(name, target, drafts, documents(target, 24, seed=2))


def normed_last_tap(lab: Lab, sample: Sample) -> Sample:
    """The last block through the final norm: what Hugging Face calls hidden_states[n]."""
    width = lab.target.hidden_size
    normed = lab.target.final_norm(sample.taps_TA[:, -width:])
    return remade(sample, taps=torch.cat([sample.taps_TA[:, :-width], normed], dim=-1))


def normed_teacher(lab: Lab, sample: Sample) -> Sample:
    return remade(sample, last=lab.target.final_norm(sample.last_hidden_TH))


def remade(sample: Sample, taps: Tensor | None = None, last: Tensor | None = None) -> Sample:
    return Sample(
        sample.id,
        sample.split,
        sample.taps_TA if taps is None else taps.detach(),
        sample.last_hidden_TH if last is None else last.detach(),
        sample.ids_T,
        sample.loss_mask_T,
    )


def embedding_rows(lab: Lab) -> dict[str, Tensor]:
    return {"lm_head.weight": lab.target.embedding[target_ids(lab.drafts["plain"].d2t)].contiguous()}


def other_embedding(lab: Lab) -> dict[str, Tensor]:
    noise = torch.randn(lab.target.embedding.shape, generator=torch.Generator().manual_seed(0))
    return {"embed_tokens.weight": noise * lab.target.embedding.std()}


def table(make: Callable[[Tensor], Tensor]) -> Callable[[Lab], dict[str, Tensor]]:
    return lambda lab: {"d2t": make(lab.drafts["plain"].d2t)}


def faults() -> list[Case]:
    """What is planted in every architecture."""
    slipped, down, others = (0, 2, 4), (1, 3, 4), (4, 6, 7)
    last = (2, 5, LAST)
    far = {"rope_type": "linear", "factor": 8.0}
    return [
        Case("embedding slipped in: [0, t0, t1]", "tap_embedding", boundaries=slipped, says=slipped),
        Case("all taps one down", "tap_offset", boundaries=down, says=down),
        Case("the default taps lost", "tap_offset", boundaries=others, says=others),
        Case("captured one tap one layer off", "tap_offset", boundaries=(2, 3, 5)),
        Case("captured all taps one down", "tap_offset", boundaries=down),
        Case("captured the embedding for the first tap", "tap_embedding", boundaries=(0, 4, 5)),
        Case(
            "captured the last tap after the final norm",
            "tap_post_norm",
            "none",
            {},
            None,
            last,
            last,
            change=normed_last_tap,
        ),
        Case("captured all taps later", "tap_offset", boundaries=others),
        Case("captured in descending order", "tap_order", boundaries=(5, 4, 2)),
        Case("captured with two taps swapped", "tap_order", boundaries=(2, 5, 4)),
        Case("states one row late", "token_shift", hidden=-1),
        Case("states one row early", "token_shift", hidden=1),
        Case("ids one row early", "token_shift", token=1),
        Case("ids one row late", "token_shift", token=-1),
        Case("teacher stored normed, declared un-normed", "teacher_double_normed", change=normed_teacher),
        Case("teacher stored un-normed, declared normed", "teacher_not_normed", last_hidden_norm="after"),
        Case("residual declared after the norm", "residual_norm", declared={"norm_before_residual": True}),
        Case("residual declared before the norm", "residual_norm", "residual", {"norm_before_residual": False}),
        Case("feedback declared after the norm", "feedback_norm", declared={"norm_output": True}),
        Case("feedback declared before the norm", "feedback_norm", "eagle31", {"norm_output": False}),
        Case("norms before fc undeclared", "fc_norm", "eagle31", {"fc_norm": False}),
        Case("norm over all taps undeclared", "fc_norm", "whole", {"norm_before_fc": False}),
        Case("rope base lost", "rope_theta", declared={"rope_theta": 1_000_000.0}),
        Case("rope scaling added", "rope_scaling", declared={"rope_scaling": far}),
        Case("d2t all zero", "d2t_missing", tensors=table(torch.zeros_like)),
        Case("d2t holds target ids", "d2t_absolute", tensors=table(target_ids)),
        Case("d2t beyond the vocabulary", "d2t_out_of_range", tensors=table(lambda d2t: d2t + 200)),
        Case("head replaced by the embedding", "head_mismatch", tensors=embedding_rows),
        Case(
            "an embedding of its own, of another model",
            "embed_mismatch",
            "plain",
            {"own_embedding": True},
            other_embedding,
        ),
    ]


def rights() -> list[Case]:
    return [Case(f"{variant} draft", None, variant) for variant in VARIANTS]


def run(lab: Lab, case: Case, precision: str, folder: Path) -> list[str]:
    """Codes of every error found, each once."""
    samples = samples_of(lab.held, case.boundaries, precision, case.hidden, case.token)
    if case.change is not None:
        samples = [case.change(lab, sample) for sample in samples]
    captures = write_lab_captures(
        folder / "captures", lab.target, samples, case.says, last_hidden_norm=case.last_hidden_norm
    )
    draft = None
    if case.variant in lab.drafts:
        declared = dict(case.declared)
        if case.says != BOUNDARIES:
            declared["boundaries"] = case.says
        draft = write_draft(folder / "draft", lab.drafts[case.variant], lab.target, **declared)
        if case.tensors is not None:
            weights = draft / "model.safetensors"
            save_file(load_file(weights) | case.tensors(lab), weights)
    given = Given(lab.target, lab.target, CaptureReader(captures), draft, None)
    checks = [attempt(name, CHECKS[name], given) for name in RUN]
    found = [one.code for check in checks for one in check.findings if one.severity == "error"]
    return list(dict.fromkeys(found))


def measure(names: list[str], only: str) -> dict[str, list[dict[str, Any]]]:
    planted, right = [], []
    for lab in labs(names):
        turn = list(ARCHITECTURES).index(lab.architecture)  # each meets a fault in another precision
        for number, case in enumerate(faults()):
            precision = PRECISIONS[(number + turn) % len(PRECISIONS)]
            if only not in case.name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = run(lab, case, precision, Path(folder))
            row = {"fault": case.name, "architecture": lab.architecture, "precision": precision}
            planted.append({**row, "expected": case.expected, "found": found, "named": case.expected in found})
            say(
                f"{lab.architecture} {precision}: {case.name}: {', '.join(found) or 'nothing'}"
                + ("" if case.expected in found else f"  NOT {case.expected}")
            )
        for case in rights() if not only else []:
            for precision in PRECISIONS:
                with tempfile.TemporaryDirectory() as folder:
                    found = run(lab, case, precision, Path(folder))
                name = f"{lab.architecture}, {case.name}, {precision}"
                right.append({"case": name, "false_findings": found})
                if found:
                    say(f"RIGHT, yet found: {name}: {', '.join(found)}")
    return {"planted": planted, "right": right}


def markdown(result: dict[str, list[dict[str, Any]]]) -> str:
    """One row a fault: how many plants were named, in which architectures and precisions."""
    lines = ["| planted | expected | named | also found |", "|---|---|---|---|"]
    for fault in dict.fromkeys(row["fault"] for row in result["planted"]):
        rows = [row for row in result["planted"] if row["fault"] == fault]
        also = sorted({code for row in rows for code in row["found"]} - {rows[0]["expected"]})
        named = sum(row["named"] for row in rows)
        lines.append(f"| {fault} | `{rows[0]['expected']}` | {named} of {len(rows)} | {', '.join(also)} |")
    right = result["right"]
    false = sum(bool(row["false_findings"]) for row in right)
    return "\n".join([*lines, "", f"Right wirings: {len(right)}, with a false finding: {false}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    started = time.perf_counter()
    result = measure(arguments.architectures, arguments.only)
    facts = {"seconds": round(time.perf_counter() - started, 1), "machine": processor_name(), "versions": versions()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "wiring.json").write_text(json.dumps({**result, **facts}, indent=1) + "\n")
    (arguments.out / "wiring.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
