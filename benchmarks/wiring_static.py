"""What the wiring table plants in exports and launches: faults an engine would pass over, or stop on, in silence.

No model runs: the rules of each release are held against a right export with one thing changed. Exports are of the
table's own targets that both engines know; the precision is that of the export's tensors.
"""

import json
import math
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from wiring_plants import BOUNDARIES, LAST, Lab

from eyas.export.folder import export_draft, exported_tensors
from eyas.formats.config_json import to_json
from eyas.formats.draft_config import DraftConfig
from eyas.formats.taps import IDS_KEY
from eyas.models.checkpoint import DraftInfo, load_draft, read_info
from eyas.models.vocab import target_ids
from eyas.pipeline.inspect import inspect_path
from eyas.recipe import ExportSettings
from eyas.wiring.findings import findings
from eyas.wiring.loaders import TargetFacts, loader_report
from eyas.wiring.preflight import parse_launch, preflight
from eyas.wiring.preflight.machine import Gpu, gpu_problems
from eyas.wiring.static_checks import check_static
from wiring_lab import write_draft

BOTH = ("llama", "qwen3")
"""Targets that both engines capture states of."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 2**30
GENERIC = [boundary - 1 for boundary in BOUNDARIES]
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
KIMI = TargetFacts("kimi_k25", 61, 7168, 163840, 262144)
Config = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Static:
    """One thing changed in a right export, and the engine it is held before."""

    name: str
    expected: str | None
    engine: str | None = None
    """None: what `inspect` finds, whatever the engine."""
    config: Callable[[Config], Any] | None = None
    """Changes config.json in place."""
    tensors: Callable[[Tensors], Tensors] | None = None
    variant: str = "plain"
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of the draft that no lab draft has: the export is then written without asking whether it may be."""
    target: tuple[tuple[str, Any], ...] = ()
    """What is otherwise about the target it is served with."""


@dataclass(frozen=True)
class Launched:
    """An argument list. `{target}` and `{draft}` stand for the folders."""

    name: str
    expected: str | None
    engine: str
    args: str
    gpu_gib: int = 80
    gpus: int = 1
    target: tuple[tuple[str, Any], ...] = ()
    """Keys of the target's config.json that differ."""


def drop(*path: str) -> Callable[[Config], Any]:
    """Remove a key."""

    def change(config: Config) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


def put(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config.update(values)


def nested_ids(*ids: int) -> Callable[[Config], Any]:
    return lambda config: config["eagle_config"].update({IDS_KEY: list(ids)})


def no_ids(config: Config) -> None:
    del config[IDS_KEY], config["eagle_config"][IDS_KEY]


def foreign(config: Config) -> None:
    """As another trainer leaves it: nested ids alone, and nothing that says in which numbering they are."""
    del config["eyas"], config[IDS_KEY]
    config["eagle_config"][IDS_KEY] = [2, 4, 6]


def only(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {name: change(held[name])}


def with_nan(weight: Tensor) -> Tensor:
    return weight.index_fill(0, torch.tensor([3]), math.nan)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name: tensor for name, tensor in held.items() if name not in names}


def with_bias(held: Tensors) -> Tensors:
    return held | {"midlayer.self_attn.q_proj.bias": torch.zeros(len(held["midlayer.self_attn.q_proj.weight"]))}


def statics() -> list[Static]:
    sglang, vllm, v1 = "sglang@0.5.23", "vllm@0.33.0", "vllm@0.33.0/v1"
    far = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    return [
        Static("nested ids one too high", "tap_offset", sglang, nested_ids(2, 4, 5)),
        Static("top-level ids one too low", "tap_offset", vllm, put(**{IDS_KEY: GENERIC})),
        Static("the embedding among the nested ids", "tap_embedding", sglang, nested_ids(-1, 3, 4)),
        Static("an id beyond the last layer", "tap_missing", sglang, nested_ids(1, 3, 44)),
        Static("ids at the top level alone", "ids_ignored", sglang, drop("eagle_config", IDS_KEY)),
        Static("nested ids alone", "ids_ignored", vllm, drop(IDS_KEY)),
        Static("no ids at all", "config_key_missing", sglang, no_ids),
        Static("ids of an unknown numbering", "ids_ambiguous", None, foreign),
        Static("draft_vocab_size absent", "config_key_missing", sglang, drop("draft_vocab_size")),
        Static("target_hidden_size null", "config_key_wrong", sglang, put(target_hidden_size=None)),
        Static("a class no engine has", "architecture_unknown", vllm, put(architectures=["Eagle3ForCausalLM"])),
        Static("a context of 512", "context_too_short", sglang, put(max_position_embeddings=512)),
        Static("a release between two known ones", "version_unsupported", "sglang@0.5.14"),
        Static("a vocabulary of another target", "vocab_mismatch", vllm, put(vocab_size=300)),
        Static("tie_word_embeddings true", "tied_head", sglang, put(tie_word_embeddings=True)),
        Static("a target of other depth", "target_revision", sglang, target=(("num_hidden_layers", 12),)),
        Static("a rope base beside the trained one", "rope_theta", None, put(rope_theta=1e6)),
        Static("a rope scaling beside the trained one", "rope_scaling", None, put(rope_parameters=far)),
        Static("the residual declared after the norm", "residual_norm", vllm, put(norm_before_residual=True)),
        Static("norm_output lost", "feedback_norm", vllm, drop("norm_output"), variant="eagle31"),
        Static("fc_norm lost", "fc_norm", sglang, drop("fc_norm"), variant="eagle31"),
        Static("an embedding of its own", "embed_mismatch", sglang, variant="own", options=(("own_embedding", True),)),
        Static("a single tap as wide as the draft", "fc_skipped", sglang, options=(("boundaries", (4,)),)),
        Static("a window that the engine has by a flag", "sliding_window", sglang, options=(("sliding_window", 64),)),
        Static("a bias of q_proj", "bias_dropped", sglang, tensors=with_bias),
        Static("fc.weight absent", "tensor_missing", vllm, tensors=without("fc.weight")),
        Static("a tensor nobody reads", "tensor_unexpected", sglang,
               tensors=lambda held: held | {"midlayer.mlp.extra.weight": torch.zeros(4, 4)}),
        Static("fc transposed", "shape_mismatch", vllm, tensors=only("fc.weight", lambda fc: fc.T)),
        Static("d2t as int32", "dtype_mismatch", sglang, tensors=only("d2t", lambda d2t: d2t.int())),
        Static("d2t absent", "d2t_missing", sglang, tensors=without("d2t")),
        Static("d2t holds target ids, before an engine", "d2t_absolute", sglang, tensors=only("d2t", target_ids)),
        Static("d2t beyond the vocabulary, before an engine", "d2t_out_of_range", vllm,
               tensors=only("d2t", lambda d2t: d2t + 200)),
        Static("a NaN in fc, before an engine", "tensor_not_finite", vllm, tensors=only("fc.weight", with_nan)),
        Static("a NaN in fc, looked at", "tensor_not_finite", None, tensors=only("fc.weight", with_nan)),
        Static("nested ids alone, on the V1 runner", "tap_offset", v1, drop(IDS_KEY)),
    ]  # fmt: skip


def launches() -> list[Launched]:
    served = "--model-path {target} --speculative-draft-model-path {draft} --max-running-requests 48"
    eagle3 = f"{served} --speculative-algorithm EAGLE3"
    deepseek = (("model_type", "deepseek_v3"),)
    whole = f"{eagle3} {CHAIN}"
    spec = '--speculative-config \'{{"model": "{draft}", "method": "eagle3", "num_speculative_tokens": 3%s}}\''
    vllm = f"serve {{target}} {spec}"
    return [
        Launched("EAGLE for EAGLE3", "algorithm_mismatch", "sglang", f"{served} --speculative-algorithm EAGLE {CHAIN}"),
        Launched("no draft path", "flag_conflict", "sglang",
                 f"--model-path {{target}} --max-running-requests 48 --speculative-algorithm EAGLE3 {CHAIN}"),
        Launched("five draft tokens for three steps", "flag_conflict", "sglang", f"{eagle3} {CHAIN[:-1]}5"),
        Launched("a tree on pages", "flag_conflict", "sglang",
                 f"{eagle3} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
                 " --page-size 64 --attention-backend flashmla"),
        Launched("two pipeline stages", "flag_conflict", "sglang", f"{whole} --pp-size 2", gpus=2),
        Launched("a latent-attention backend for the draft", "flag_conflict", "sglang", whole, target=deepseek),
        Launched("no cap beside a plain server's", "flag_conflict", "sglang",
                 whole.replace(" --max-running-requests 48", "")),
        Launched("draft over two GPUs, target over four", "flag_conflict", "vllm",
                 vllm % ', "draft_tensor_parallel_size": 2' + " -tp 4", gpus=4),
        Launched("fp8 passed on to the draft", "quantization_inherited", "sglang", f"{whole} --quantization fp8"),
        Launched("a chain of seven", "ttt_mismatch", "vllm",
                 vllm.replace('tokens": 3', 'tokens": 7') % ""),
        Launched("a window that was not trained", "sliding_window", "sglang",
                 f"{whole} --speculative-draft-window-size 32"),
        Launched("a GPU of nothing", "memory_short", "vllm", vllm % "", gpu_gib=0),
        Launched("a port that is taken", "port_busy", "vllm", vllm % "" + " --port {port}"),
    ]  # fmt: skip


def right_launches() -> list[Launched]:
    whole = f"--model-path {{target}} --speculative-draft-model-path {{draft}} --max-running-requests 48 {CHAIN}"
    spec = '--speculative-config \'{{"model": "{draft}", "method": "eagle3", "num_speculative_tokens": 3}}\''
    return [
        Launched("a launch of SGLang", None, "sglang", f"{whole} --speculative-algorithm EAGLE3"),
        Launched("a launch of vLLM", None, "vllm", f"serve {{target}} {spec}"),
    ]


RIGHT_ENGINES = (
    *("sglang@0.5.12", "sglang@0.5.12.post1", "sglang@0.5.13", "sglang@0.5.16", "sglang@0.5.17", "sglang@0.5.23"),
    *("vllm@0.32.0", "vllm@0.33.0", "vllm@0.33.0/v1"),
)
RIGHT_EXPORTS = ("plain", "eagle31", "weak")


def write_export(lab: Lab, variant: str, options: dict[str, Any], dtype: str, folder: Path) -> Path:
    """An export as `eyas export` writes it; with `options`, one that it would refuse."""
    draft = write_draft(folder / "trained", lab.drafts[variant].to(DTYPES[dtype]), lab.target)
    lab.drafts[variant].float()
    if not options:
        export_draft(draft, folder / "export", ExportSettings())
        return folder / "export"
    info = read_info(draft)
    config = DraftConfig.model_validate(info.draft.model_dump() | options)
    block = DraftInfo.model_validate(info.model_dump() | {"draft": config}).model_dump(mode="json")
    tensors = exported_tensors(load_draft(draft, lab.target.embedding)[0])
    tensors["fc.weight"] = tensors["fc.weight"][:, : config.taps_width].contiguous()
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text(json.dumps(to_json(config, block, dtype=dtype)))
    save_file(tensors, folder / "export" / "model.safetensors")
    return folder / "export"


def codes_of(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(one["code"] for one in found if one["severity"] != "info"))


def run_static(lab: Lab, case: Static, dtype: str, folder: Path) -> list[str]:
    """Codes of what is found in a changed export."""
    export = write_export(lab, case.variant, dict(case.options), dtype, folder)
    path, weights = export / "config.json", export / "model.safetensors"
    if case.config is not None:
        raw = json.loads(path.read_text())
        case.config(raw)
        path.write_text(json.dumps(raw))
    if case.tensors is not None:
        save_file({name: one.contiguous() for name, one in case.tensors(load_file(weights)).items()}, weights)
    (export / "manifest.json").unlink(missing_ok=True)
    target = folder / "target.json"
    raw = json.loads((lab.target.folder / "config.json").read_text())
    target.write_text(json.dumps(raw | dict(case.target)))
    if case.engine is None:
        return codes_of(inspect_path(export)["findings"])
    return codes_of(check_static(export, [case.engine], str(target))["findings"])


def run_launch(lab: Lab, case: Launched, dtype: str, folder: Path) -> list[str]:
    """Codes of what preflight finds in an argument list."""
    export, target = write_export(lab, "plain", {}, dtype, folder), folder / "target"
    target.mkdir()
    for file in lab.target.folder.iterdir():
        (target / file.name).symlink_to(file)
    if case.target:
        raw = json.loads((target / "config.json").read_text())
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(raw | dict(case.target)))
    with closing(socket.socket()) as taken, closing(socket.socket()) as free:
        taken.bind(("", 0))
        taken.listen()
        free.bind(("", 0))
        open_port = free.getsockname()[1]
        free.close()
        args = case.args.format(target=target, draft=export, port=taken.getsockname()[1])
        args += "" if "--port" in args else f" --port {open_port}"
        sizes = [max(case.gpu_gib * GIB, 1_000)] * case.gpus
        seen = preflight(parse_launch(case.engine, args), gpu_bytes=sizes)
    return codes_of([one.model_dump() for one in seen.findings])


def busy_gpu() -> list[str]:
    """Codes of a machine whose first GPU another process holds."""
    held = [Gpu(0, "H100", 80 * GIB, 70 * GIB, (4711,)), Gpu(1, "H100", 80 * GIB, 0)]
    return codes_of([one.model_dump() for one in findings(gpu_problems(held, 2))])


def upgrade(engine: str, ids: list[int], boundaries: tuple[int, ...]) -> list[str]:
    """Codes of Kimi-K2.5's published list before one release: a draft trained on `boundaries`."""
    config = DraftConfig(
        boundaries=boundaries,
        target_num_hidden_layers=61,
        target_hidden_size=7168,
        target_model_type="kimi_k25",
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=163840,
        draft_vocab_size=32000,
        max_position_embeddings=262144,
    )
    block = {"format": 1, "draft": config.model_dump(mode="json"), "target": None}
    raw = to_json(config, block) | {"eagle_config": {"use_aux_hidden_state": True, IDS_KEY: ids}}
    return codes_of([one.model_dump() for one in loader_report(raw, engine, KIMI).findings])


UPGRADES: tuple[tuple[str, str | None, str, list[int], tuple[int, ...]], ...] = (
    ("Kimi-K2.5's list after the upgrade", "tap_offset", "sglang@0.5.13", [2, 30, 58], (3, 31, 59)),
    ("Kimi-K2.5's list with the embedding, after the upgrade", "tap_missing", "sglang@0.5.13", [-1, 2, 30], (0, 3, 31)),
    ("Kimi-K2.5's list before the upgrade", None, "sglang@0.5.12.post1", [2, 30, 58], (3, 31, 59)),
    ("Kimi-K2.5's list mended for the upgrade", None, "sglang@0.5.13", [3, 31, 59], (3, 31, 59)),
)
assert LAST == 8, "nested ids here are of targets of eight layers"
