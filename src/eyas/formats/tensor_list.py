"""Is a set of tensor names and shapes an EAGLE-3 draft? Judged with its config where there is one, else by itself.

A Llama or Qwen3 draft needs `fc`, `hidden_norm`, a layer over [embedding, state] (2H wide), a norm and a head, and d2t
where the head is smaller than the vocabulary. An MLA draft has its own projections. Sources: SGLang 0.5.23, vLLM 0.33,
ModelOpt hf_spec_export.py, as read.
"""

from collections.abc import Mapping
from typing import Any

from eyas.errors import InputError
from eyas.formats.config_problems import layer_of
from eyas.formats.draft_config import DraftConfig
from eyas.formats.headers import TensorHeader
from eyas.formats.names import Shape, canonical_name, check_tensors, spelling_of
from eyas.formats.problem import Problem
from eyas.formats.taps import TapKeys

Headers = Mapping[str, TensorHeader]

COMMON = (
    "fc.weight",
    "norm.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
)
GQA = (*(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"), "lm_head.weight")
MLA = tuple(
    f"layers.0.self_attn.{name}.weight"
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
)
DTYPES = {"d2t": "I64", "t2d": "BOOL"}
INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


def read_list(raw: Mapping[str, Any], where: str) -> dict[str, TensorHeader]:
    """A tensor list: {"tensors": {name: shape or null}, "dtypes": {"default": ..., name: ...}}.

    Raises InputError for a shape that is none.
    """
    given = raw.get("dtypes")
    dtypes = given if isinstance(given, Mapping) else {}
    headers = {}
    for name, shape in raw["tensors"].items():
        if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
            raise InputError(
                wanted="a tensor list: name to shape, or to null",
                got=f"{name!r} with the shape {shape!r}",
                where=where,
                next='{"tensors": {"fc.weight": [4096, 12288]}}',
            )
        dtype = dtypes.get(name, dtypes.get("default"))
        headers[name] = TensorHeader(None if shape is None else tuple(shape), dtype, where)
    return headers


def config_of(headers: Headers, hint: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What tensors alone say of a draft's config.json, under `hint`; sizes that they do not tell are left out."""
    hint = hint or {}
    shapes = {canonical_name(name): header.shape for name, header in headers.items()}
    hidden, fan_in = _size(shapes, "norm.weight", 0), _size(shapes, "fc.weight", 1)
    width = _int(hint.get("target_hidden_size")) or hidden
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": _size(shapes, "layers.0.mlp.gate_proj.weight", 0),
        "num_hidden_layers": len(layers) or None,
        "vocab_size": _size(shapes, "embed_tokens.weight", 0) or _size(shapes, "t2d", 0),
        "draft_vocab_size": _size(shapes, "lm_head.weight", 0) or _size(shapes, "d2t", 0),
        "num_aux_hidden_states": fan_in // width if width and fan_in and fan_in % width == 0 else None,
    }
    options = {
        "bias": "fc.bias" in shapes,
        "fc_norm": "fc_norm.0.weight" in shapes,
        "norm_before_fc": "input_norm.weight" in shapes,
    }
    known = {key: value for key, value in sizes.items() if value} | {key: True for key, on in options.items() if on}
    kind = "deepseek_v2" if block_of(shapes) == "mla" else "llama"
    return {"model_type": kind, "draft_vocab_size": None, "tie_word_embeddings": False, **known, **hint}


def block_of(names: Mapping[str, Any]) -> str:
    """`mla`, `qwen3` or `llama`, by canonical names."""
    if any(".kv_b_proj." in name or ".q_a_proj." in name for name in names):
        return "mla"
    return "qwen3" if any(".q_norm." in name for name in names) else "llama"


def layout_of(headers: Headers, raw: Mapping[str, Any]) -> dict[str, Any]:
    """How names are spelt, which block they make, and how many layers."""
    names = {canonical_name(name): None for name in headers}
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    shapes = {canonical_name(name): header.shape for name, header in headers.items()}
    width = _int(raw.get("target_hidden_size")) or _size(shapes, "norm.weight", 0)
    fan_in = _size(shapes, "fc.weight", 1)
    return {
        "spelling": spelling_of(headers),
        "block": block_of(names),
        "layers": len(layers),
        "taps": fan_in // width if width and fan_in and fan_in % width == 0 else None,
    }


def check_layout(headers: Headers, raw: Mapping[str, Any], config: DraftConfig | None) -> list[Problem]:
    """What is missing, unexpected or mis-shaped. `raw` is the config.json ({} without one)."""
    found = {canonical_name(name): header for name, header in headers.items()}
    problems = _dtypes(found, raw) + _spelling(headers)
    # an MLA draft without a head takes the target's, in both engines, where draft_vocab_size is null or the whole
    if config is not None and (config.block != "mla" or "lm_head.weight" in found):
        return problems + check_tensors(config, {name: header.shape for name, header in found.items()}, "tensors")
    shapes = {name: header.shape for name, header in found.items()}
    return problems + _missing(shapes, raw) + _shapes(shapes, raw) + _block(shapes, raw)


def _size(shapes: Mapping[str, Shape | None], name: str, axis: int) -> int | None:
    """One dimension of a tensor; None where the tensor, its shape or that axis is not known."""
    shape = shapes.get(name)
    return shape[axis] if shape is not None and len(shape) > axis else None


def _int(value: Any) -> int | None:
    """A config's positive integer; None for anything else."""
    return value if type(value) is int and value > 0 else None


def _problem(code: str, where: str, expected: str, got: str, fix: str, severity: str | None = None) -> Problem:
    return Problem(code, where=where, expected=expected, found=got, fix=fix, severity=severity)


def _dtypes(found: Headers, raw: Mapping[str, Any]) -> list[Problem]:
    """Tables of another dtype than engines read; weights in integers that nothing says how to read."""
    tables = [
        _problem("dtype_mismatch", name, dtype, str(found[name].dtype), f"store {name} as {dtype}")
        for name, dtype in DTYPES.items()
        if name in found and found[name].dtype not in (None, dtype)
    ]
    if raw.get("quantization_config"):
        return tables
    fix = "store it as a float, or name the quantization_config that it was packed by"
    return tables + [
        _problem("dtype_mismatch", name, "floating-point numbers", str(header.dtype), fix)
        for name, header in found.items()
        if name.endswith((".weight", ".bias")) and header.dtype in INTEGERS
    ]


def _spelling(headers: Headers) -> list[Problem]:
    """Names that one of the engines does not find, whatever their shapes."""
    fix = "eyas export writes un-prefixed midlayer.*, which every known release reads"
    spelled = spelling_of(headers)
    if any(name.startswith("draft_model.") for name in headers):
        got = "draft_model.*: SGLang drops every tensor in silence"
        return [_problem("tensor_unexpected", "names", "names without a prefix", got, fix)]
    if spelled.startswith("model."):
        got = "model.*: vLLM refuses them, SGLang's MLA draft does not find them"
        return [_problem("tensor_unexpected", "names", "names without a prefix", got, fix)]
    if spelled == "layers":
        got = "layers.0.*: SGLang 0.5.11 drops them in silence, from 0.5.12 they are read"
        return [_problem("tensor_unexpected", "names", "midlayer.*", got, fix, "info")]
    return []


def _missing(shapes: Mapping[str, Shape | None], raw: Mapping[str, Any]) -> list[Problem]:
    mla = block_of(shapes) == "mla"
    required = [name for name in (*COMMON, *(MLA if mla else GQA)) if name not in shapes]
    if not TapKeys.of(raw).use_aux and "fc.weight" in required:
        required.remove("fc.weight")
    got = "absent: engines load without a word and leave it random"
    fix = "export the draft again; random weights are no substitute"
    problems = [_problem("tensor_missing", name, f"tensor {name}", got, fix) for name in required]
    # without any of them the layout is EAGLE-1's: that d2t is absent too is the same statement once more
    if "d2t" not in shapes and not mla and _reduced(shapes, raw):
        got = "absent: draft ids pass for target ids, acceptance near zero"
        problems.append(_problem("d2t_missing", "d2t", "the table of the reduced vocabulary", got, fix))
    return problems


def _reduced(shapes: Mapping[str, Shape | None], raw: Mapping[str, Any]) -> bool:
    """Whether the draft vocabulary is smaller than the target's; a file without a head says nothing, so it is."""
    total = _int(layer_of(raw).get("vocab_size")) or _size(shapes, "embed_tokens.weight", 0)
    rows = _size(shapes, "lm_head.weight", 0) or _int(raw.get("draft_vocab_size"))
    if rows is None:
        return "lm_head.weight" not in shapes
    return total is not None and rows < total


def _shapes(shapes: Mapping[str, Shape | None], raw: Mapping[str, Any]) -> list[Problem]:
    """Widths that must agree among the tensors and with the config."""
    hidden, fan_in = _size(shapes, "norm.weight", 0), _size(shapes, "fc.weight", 1)
    if not hidden or not fan_in:
        return []
    target_hidden, keys = _int(raw.get("target_hidden_size")) or hidden, TapKeys.of(raw)
    ids = keys.top or keys.nested or ()
    taps, rest = divmod(fan_in, target_hidden)
    pairs: list[tuple[str, str, int | None, int | None]] = [
        ("fc.weight", "rows: the draft's width", hidden, _size(shapes, "fc.weight", 0)),
        ("fc.weight", "states, as config.json names", len(ids) or None, None if rest else taps),
        ("fc.weight", f"columns beyond a multiple of the target's width {target_hidden}", 0, rest),
        ("d2t", "entries: the head's rows", _size(shapes, "lm_head.weight", 0), _size(shapes, "d2t", 0)),
    ]
    if block_of(shapes) != "mla":
        name = "layers.0.self_attn.q_proj.weight"
        pairs.append((name, "columns: embedding and state", 2 * hidden, _size(shapes, name, 1)))
    fix = "make config.json and tensors agree (target_hidden_size, layer ids, vocabulary)"
    problems = [
        _problem("shape_mismatch", name, f"{wanted} {what}", str(got), fix)
        for name, what, wanted, got in pairs
        if wanted is not None and got is not None and wanted != got
    ]
    if target_hidden != hidden and "embed_tokens.weight" not in shapes:
        found = f"absent; the target's is {target_hidden} wide and cannot be shared"
        fix = "store the draft's own embedding"
        problems.append(_problem("embed_mismatch", "embed_tokens.weight", f"one {hidden} wide", found, fix))
    return problems


def _block(shapes: Mapping[str, Shape | None], raw: Mapping[str, Any]) -> list[Problem]:
    """Tensors that only some engines or releases read."""
    problems = []
    extra = sorted(name for name in shapes if name.endswith((".q_norm.weight", ".k_norm.weight")))
    if extra:
        got = f"{', '.join(extra)}: SGLang and vLLM 0.20 have no place for them"
        fix = "serve with vLLM 0.24 or newer and architectures Eagle3Qwen3ForCausalLM; another block needs training"
        problems.append(_problem("tensor_unexpected", "layers.0.self_attn", "a Llama block", got, fix))
    biases = sorted(name for name in shapes if name.endswith(".bias"))
    if biases:
        got = f"{', '.join(biases)}: SGLang drops biases of q, k, v, vLLM that of fc"
        problems.append(_problem("bias_dropped", biases[0], "no bias", got, "train without it"))
    named = layer_of(raw).get("num_hidden_layers")
    layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    if isinstance(named, int) and layers and named != layers:
        fix = f"write num_hidden_layers {layers}"
        problems.append(_problem("config_key_wrong", "num_hidden_layers", f"{layers}, as stored", str(named), fix))
    return problems
