"""What an engine would do with a draft, said before it is started: `loader_report`. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eyas.errors import InputError
from eyas.formats.config_problems import Config
from eyas.formats.draft_config import TargetIdentity
from eyas.formats.engines import Engine, parse_engine
from eyas.formats.headers import INDEX, WEIGHTS, TensorHeader, read_headers
from eyas.formats.names import canonical_name
from eyas.formats.problem import Problem
from eyas.formats.read_config import DraftFile, is_draft, read_config
from eyas.formats.taps import Capture, captures
from eyas.formats.target_config import read_json
from eyas.formats.targets import V2_IN_024
from eyas.formats.tensor_list import block_of, config_of, read_list
from eyas.stage import chosen_step
from eyas.wiring.findings import Finding, findings
from eyas.wiring.loaders.case import Case, TargetFacts, integer
from eyas.wiring.loaders.judge import judge
from eyas.wiring.loaders.parameters import Fates, fates
from eyas.wiring.loaders.view import View, is_speculators, view_of

JSON = dict[str, Any]
CONFIG = "config.json"


def read_target(path: Path) -> TargetFacts:
    """A target's folder or bare config.json. Raises InputError where it is no model's."""
    path = path / CONFIG if path.is_dir() else path
    facts = TargetFacts.of(read_json(path))
    if facts.num_hidden_layers is None:
        raise InputError(
            wanted="a model's config.json",
            got="JSON without num_hidden_layers",
            where=str(path),
            next="give the target's folder or its config.json",
        )
    return facts


@dataclass(frozen=True)
class LoaderReport:
    """What `engine` would do with one draft. `boundaries` are those it captures, None where that cannot be said."""

    engine: Engine
    class_name: str | None
    block: str | None
    declared: DraftFile
    capture: Capture
    view: View
    fates: Fates | None
    """None for a bare config.json."""
    problems: tuple[Problem, ...]
    target: TargetFacts
    """As given, and as the draft's own file says where nothing was."""
    words: dict[str, str] = field(default_factory=dict)
    """What it does about the embedding, head, vocabulary, residual, window, context and algorithm, in words."""
    gpu_default: Capture | None = None
    """For vLLM's V1 runner: what Model Runner V2, the default on GPUs, would capture instead."""

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        return self.capture.boundaries

    @property
    def findings(self) -> list[Finding]:
        return findings(self.problems, str(self.engine))

    @property
    def verdict(self) -> Literal["pass", "fail", "unknown"]:
        """fail with any error; unknown where the taps of training or of serving are not known; else pass."""
        if any(found.severity == "error" for found in self.findings):
            return "fail"
        known = self.boundaries is not None and self.declared.boundaries is not None
        ids = self.declared.format == "eyas" or bool(self.declared.keys.top or self.declared.keys.nested)
        return "pass" if known and ids else "unknown"

    @property
    def scope(self) -> str:
        """What a pass is a pass for."""
        if self.engine.runner != "v1" or self.declared.method == "peagle":
            return str(self.engine)
        return f"{self.engine}: the V1 runner (CPU, or VLLM_USE_V2_MODEL_RUNNER=0) only, not the default on GPUs"

    @property
    def as_dict(self) -> JSON:
        """JSON for `inspect` and `check`."""
        declared = self.declared.boundaries
        return {
            "engine": str(self.engine),
            "verdict": self.verdict,
            "scope": self.scope,
            "class": self.class_name,
            "class_known": self.view.known,
            "block": self.block,
            "captures": _list(self.boundaries),
            "rule": self.capture.rule,
            "declared": _list(declared),
            "gpu_default": None if self.gpu_default is None else _capture(self.gpu_default),
            "keys": {name: {"value": read.value, "from": read.where} for name, read in self.view.reads.items()},
            "tensors": None if self.fates is None else _fates(self.fates),
            "does": self.words,
            "findings": [found.model_dump(mode="json") for found in self.findings],
        }


def _list(boundaries: tuple[int, ...] | None) -> list[int] | None:
    return None if boundaries is None else list(boundaries)


def _capture(capture: Capture) -> JSON:
    return {"captures": _list(capture.boundaries), "rule": capture.rule}


def _fates(fates: Fates) -> JSON:
    return {
        "renamed": {name: parameter for name, parameter in fates.loaded.items() if name != parameter},
        "loaded": sorted(name for name, parameter in fates.loaded.items() if name == parameter),
        "ignored": sorted(fates.skipped + fates.dropped),
        "refused": sorted(fates.refused),
        "missing": sorted(fates.missing),
        "defaulted": fates.defaulted,
    }


def loader_report(
    draft: Path | Config,
    engine: str | Engine,
    target: TargetFacts | TargetIdentity | Path | None = None,
    headers: Mapping[str, TensorHeader] | None = None,
) -> LoaderReport:
    """What `engine` would do with a draft folder, a bare config.json or its content, on `target`.

    A draft with an `eyas` block brings its target along. `headers` are the tensors of a config given as a mapping.
    Raises InputError for a path that is no draft and for an unknown engine.
    """
    reader = parse_engine(engine) if isinstance(engine, str) else engine
    raw, headers = _read(draft) if isinstance(draft, Path) else (draft, headers)
    facts = _facts(target)
    declared = read_config(raw, _identity(facts, raw))
    facts = _fill(facts, declared)
    reader = _runner(reader, facts, asked=engine if isinstance(engine, str) else "")
    v1_only = reader.name == "vllm" and declared.method == "peagle"  # V2 has no parallel drafting for EAGLE (0.24 on)
    reader = replace(reader, runner="v1") if v1_only else reader
    view = view_of(raw if "architectures" in raw or is_speculators(raw) else _named(raw, headers, reader), reader)
    capture = _captures(reader, raw, view, facts)
    placed = None if headers is None else fates(view, headers)
    case = Case(view, declared, facts, capture, placed, headers)
    problems, words = judge(case)
    gpu = replace(reader, runner="v2") if reader.runner == "v1" and reader.since("0.32") and not v1_only else None
    return LoaderReport(
        engine=reader,
        class_name=view.class_name,
        block=view.block,
        declared=declared,
        capture=capture,
        view=view,
        fates=placed,
        problems=tuple(dict.fromkeys((*capture.problems, *problems))),
        target=facts,
        words=words,
        gpu_default=None if gpu is None else _captures(gpu, raw, view_of(raw, gpu), facts),
    )


def _named(raw: Config, headers: Mapping[str, TensorHeader] | None, engine: Engine) -> Config:
    """Tensors without a config.json: the class of `engine` that their names would need."""
    if headers is None or "eyas" in raw:
        return raw
    block = block_of({canonical_name(name): None for name in headers})
    qwen3 = block == "qwen3" and engine.name == "vllm" and engine.since("0.24")
    name = {"mla": "Eagle3DeepseekV2ForCausalLM"}.get(block, "LlamaForCausalLMEagle3")
    return {**raw, "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else name]}


def _read(path: Path) -> tuple[JSON, dict[str, TensorHeader] | None]:
    """A draft's config.json and, of a folder, its tensors' headers."""
    path = chosen_step(path)
    if path.name.endswith((".safetensors", ".index.json")):
        headers = read_headers(path)
        return config_of(headers), headers
    if not path.is_dir():
        raw = read_json(path)
        return _listed(raw, path) if isinstance(raw.get("tensors"), Mapping) else (_checked(raw, path), None)
    if not (path / CONFIG).is_file():
        headers = read_headers(path)
        return config_of(headers), headers
    has_weights = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return _checked(read_json(path / CONFIG), path), read_headers(path) if has_weights else None


def _listed(raw: JSON, path: Path) -> tuple[JSON, dict[str, TensorHeader]]:
    """A tensor list, with the config it hints at (`config_hint`: keys, or `ref`, another file) over what shapes say."""
    headers, hint = read_list(raw, path.name), raw.get("config_hint")
    hint = dict(hint) if isinstance(hint, Mapping) else {}
    reference = hint.pop("ref", None)
    if isinstance(reference, str):
        return read_json(path.parent.parent / reference), headers
    return config_of(headers, hint), headers


def _checked(raw: JSON, path: Path) -> JSON:
    if not is_draft(raw):
        raise InputError(
            wanted="a draft's folder or config.json",
            got="JSON without any key that only drafts have",
            where=str(path),
            next="eyas inspect says what it is",
        )
    return raw


def _facts(target: TargetFacts | TargetIdentity | Path | None) -> TargetFacts:
    if isinstance(target, Path):
        return read_target(target)
    if isinstance(target, TargetIdentity):
        return TargetFacts.of_identity(target)
    return target or TargetFacts()


def _identity(facts: TargetFacts, raw: Config) -> TargetIdentity | None:
    """An identity good enough to read a foreign config by: of the weights nothing is known here."""
    layer = raw.get("transformer_layer_config") if is_speculators(raw) else raw
    layer = layer if isinstance(layer, Mapping) else {}
    hidden = facts.hidden_size or integer(raw.get("target_hidden_size")) or integer(layer.get("hidden_size"))
    vocab = facts.vocab_size or integer(layer.get("vocab_size"))
    if facts.model_type is None or facts.num_hidden_layers is None:
        return None
    return TargetIdentity(
        name="target",
        weights_hash="",
        model_type=facts.model_type,
        num_hidden_layers=facts.num_hidden_layers,
        hidden_size=hidden or 0,
        vocab_size=vocab or 0,
    )


def _fill(facts: TargetFacts, declared: DraftFile) -> TargetFacts:
    """What the draft's own file says of its target, where nothing better was given."""
    known = TargetFacts.of_identity(declared.target) if declared.target and declared.format == "eyas" else TargetFacts()
    config = declared.config if declared.format == "eyas" else None
    context = config.max_position_embeddings if config else None  # the target's, by definition of the field
    return TargetFacts(
        model_type=facts.model_type or known.model_type or declared.target_type,
        num_hidden_layers=facts.num_hidden_layers or known.num_hidden_layers or declared.target_layers,
        hidden_size=facts.hidden_size or known.hidden_size,
        vocab_size=facts.vocab_size or known.vocab_size,
        context_length=facts.context_length or context,
    )


def _runner(engine: Engine, facts: TargetFacts, asked: str) -> Engine:
    """vLLM 0.24 without a runner named: V2 for a few target classes, V1 for the rest."""
    unnamed = engine.name == "vllm" and engine.release == "0.24" and "/" not in asked and "cpu" not in asked
    return replace(engine, runner="v2") if unnamed and asked and facts.model_type in V2_IN_024 else engine


def _captures(engine: Engine, raw: Config, view: View, facts: TargetFacts) -> Capture:
    if engine.name == "sglang" and is_speculators(raw) and not view.known:
        return Capture(None, "SGLang does not read the speculators format")
    return captures(engine, view.keys, facts.model_type, facts.num_hidden_layers)
