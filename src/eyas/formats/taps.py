"""Boundaries, and every other numbering of layers, converted at the edge and only here.

Boundary b is the residual stream entering decoder layer b; n (the number of layers) is the output of the last layer
before the final norm. Trainers number with a fixed offset (`OFFSETS`). Engines read one of several keys and apply a
rule of their own, by target class and release: `captures` says what an engine takes from given keys, `ids_for` writes
the ids that make it take given boundaries. Rules: SGLang 0.5.11 to 0.5.23, vLLM 0.20 to 0.33, llama.cpp b11434, as
read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyas.errors import InputError, did_you_mean
from eyas.formats.engines import Engine
from eyas.formats.problem import Problem
from eyas.formats.targets import (
    FIRST_ID_RULE,
    NO_SETTER,
    REACHES_LAST,
    UNPROVEN,
    VLLM_020_NAMES,
    VLLM_DEEPSEEK,
    sglang_since,
)

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
TapSource = Literal["config", "model"]
"""Where an engine has its layer ids from: the draft's config, or the default of the target's class."""


def default_boundaries(num_hidden_layers: int, where: str = "capture.boundaries") -> tuple[int, int, int]:
    """`[2, n//2, n-3]`, the default of EAGLE, SGLang and vLLM. Needs n >= 7."""
    n = num_hidden_layers
    if n < 7:
        raise InputError(
            wanted="explicit taps: the default [2, n//2, n-3] needs a target of at least 7 layers",
            got=f"a target of {n} layers and no taps",
            where=where,
            next=f"--set capture.boundaries=[{', '.join(map(str, sorted({min(1, n), n // 2, max(n - 1, 0)})))}]",
        )
    return (2, n // 2, n - 3)


def check_boundaries(boundaries: Sequence[int], num_hidden_layers: int, where: str, code: str | None = None) -> None:
    """Raise InputError unless `boundaries` are sorted, unique, and within 0..n."""
    ordered = sorted(set(boundaries))
    if not boundaries or list(boundaries) != ordered:
        raise InputError(
            wanted="at least one tap, sorted and unique (engines concatenate in ascending order whatever the list)",
            got=str(list(boundaries)),
            where=where,
            next=f"write {ordered or '[2, n//2, n-3]'}",
            code=code,
        )
    if ordered[0] < 0 or ordered[-1] > num_hidden_layers:
        raise InputError(
            wanted=f"boundaries from 0 (embedding) to {num_hidden_layers} (last layer's output, before the final norm)",
            got=str(list(boundaries)),
            where=where,
            next="eyas inspect TARGET shows its layers",
            code=code,
        )


# Trainers and libraries -------------------------------------------------------------------------------------------

OFFSETS: dict[str, int] = {
    "huggingface": 0,  # index into output_hidden_states; index n is after the final norm, so it is no boundary
    "eagle": 0,  # idx is tested before layer idx runs
    "speculators": 0,
    "specforge": 1,  # "output of layer k", 0-based
    "torchspec": 1,
    "modelopt": 1,
    "nemo": 1,
    "angelslim": 1,
    "deepspec": 1,
}
"""Boundary = id + offset, whatever the target."""


def from_dialect(dialect: str, ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The boundaries that a trainer's ids mean. Raises InputError for an unknown trainer or an id that means none."""
    boundaries = tuple(layer + _offset(dialect) for layer in ids)
    check_boundaries(boundaries, num_hidden_layers, where=f"{dialect} ids {list(ids)}")
    if dialect == "huggingface":
        _refuse_post_norm(boundaries, num_hidden_layers)
    return boundaries


def to_dialect(dialect: str, boundaries: Sequence[int], num_hidden_layers: int) -> list[int]:
    """A trainer's ids for `boundaries` (-1 is its spelling of the embedding where it counts outputs of layers)."""
    check_boundaries(boundaries, num_hidden_layers, where="boundaries")
    if dialect == "huggingface":
        _refuse_post_norm(boundaries, num_hidden_layers)
    return [boundary - _offset(dialect) for boundary in boundaries]


def _offset(dialect: str) -> int:
    if dialect not in OFFSETS:
        raise InputError(
            wanted=f"a numbering, one of {', '.join(OFFSETS)}",
            got=f"{dialect!r}{did_you_mean(dialect, OFFSETS)}",
            where="the dialect of layer ids",
            next="specforge",
        )
    return OFFSETS[dialect]


def _refuse_post_norm(boundaries: Iterable[int], num_hidden_layers: int) -> None:
    if num_hidden_layers in boundaries:
        raise InputError(
            wanted="a boundary that Hugging Face's hidden_states holds",
            got=f"boundary {num_hidden_layers}; hidden_states[{num_hidden_layers}] is after the final norm",
            where="taps",
            next="capture it by a hook after the last layer (eyas capture does)",
        )


# Engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TapKeys:
    """Where a draft's config.json carries layer ids. None: the key is absent or unreadable."""

    top: tuple[int, ...] | None = None
    """Top-level `eagle_aux_hidden_state_layer_ids`."""
    nested: tuple[int, ...] | None = None
    """`eagle_config.eagle_aux_hidden_state_layer_ids`."""
    layer_ids: tuple[int, ...] | None = None
    """`eagle_config.layer_ids`."""
    use_aux: bool = True
    """`eagle_config.use_aux_hidden_state`; false feeds the last, normed state and no taps."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "TapKeys":
        """The keys of a config.json; what is no list of integers counts as absent, as it does for the engines."""
        nested = config.get("eagle_config")
        nested = nested if isinstance(nested, Mapping) else {}
        return cls(
            top=_int_list(config.get(IDS_KEY)),
            nested=_int_list(nested.get(IDS_KEY)),
            layer_ids=_int_list(nested.get("layer_ids")),
            use_aux=nested.get("use_aux_hidden_state", True) is not False,
        )


def _int_list(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        return None
    return tuple(value)


@dataclass(frozen=True)
class Capture:
    """What an engine takes: boundaries in the order it concatenates them (None where it cannot be said or fails)."""

    boundaries: tuple[int, ...] | None
    rule: str
    problems: tuple[Problem, ...] = ()
    unbounded: tuple[int, ...] | None = None
    """Where only the target's depth is unknown: the boundaries, if it is deep enough."""


def captures(engine: Engine, keys: TapKeys, target_type: str | None, num_hidden_layers: int | None) -> Capture:
    """The boundaries `engine` captures from `keys` on a target of that model_type and depth, and by which rule."""
    read = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}[engine.name]
    found = read(engine, keys, target_type, num_hidden_layers)
    return replace(found, problems=engine.problems + found.problems)


def said(
    engine: Engine,
    ids: Sequence[int],
    source: TapSource,
    keys: TapKeys,
    target_type: str | None,
    num_hidden_layers: int | None,
) -> Capture:
    """The boundaries that `engine` captures where its own log says that it reads layers `ids`; `keys` are the draft's.

    vLLM only, the one engine that says so: its log and a top-level list of ids are in one numbering.
    """
    assert engine.name == "vllm" and ids, "only vLLM tells its layers, and at least one"
    found = captures(replace(engine, problems=()), TapKeys(top=tuple(ids)), target_type, num_hidden_layers)
    words, problems = "the draft's config", found.problems
    if source == "model":
        words = "the default of the target's class"
        unread = keys.top or keys.nested or keys.layer_ids
        absent = f"{list(unread)} is in the config, and not read" if unread else "no ids"
        code = "ids_ignored" if unread else "config_key_missing"
        problems = (_absent(code, IDS_KEY, f"{absent}: {words}, {list(ids)}, is taken"), *problems)
    return replace(found, rule=f"its log: layers {list(ids)}, from {words}", problems=problems)


def unsaid(engine: Engine, keys: TapKeys, target_type: str | None, num_hidden_layers: int | None) -> Capture:
    """The same where its log names no layers: vLLM's V1 runner does so at the default of the target's class."""
    default = captures(replace(engine, problems=()), TapKeys(), target_type, num_hidden_layers).boundaries
    rule = "its log names no layers, as the V1 runner does at the default of the target's class"
    if not default or not keys.use_aux:
        return Capture(None, rule)
    return replace(said(engine, default, "model", keys, target_type, num_hidden_layers), rule=rule)


def ids_for(engine: Engine, boundaries: Sequence[int], target_type: str | None, num_hidden_layers: int) -> list[int]:
    """The ids to write in the key `engine` reads, such that it captures exactly `boundaries`.

    Where two lists would do, the one that means the same in older releases too is taken. Raises InputError where the
    engine cannot represent the boundaries, or its rule for this target class is not known.
    """
    check_boundaries(boundaries, num_hidden_layers, where="boundaries")
    wanted, reasons = tuple(boundaries), []
    for candidate in (tuple(b - 1 for b in wanted), wanted):
        keys = TapKeys(nested=candidate) if engine.name == "sglang" else TapKeys(top=candidate)
        found = captures(engine, keys, target_type, num_hidden_layers)
        if found.boundaries == wanted:
            return list(candidate)
        reasons.append(f"{list(candidate)} captures {found.boundaries and list(found.boundaries)} ({found.rule})")
    raise InputError(
        wanted=f"layer ids that make {engine} capture boundaries {list(wanted)} of a {target_type} target"
        f" of {num_hidden_layers} layers",
        got="no such list: " + "; ".join(reasons),
        where="taps",
        next=f"train with other taps, such as {[2, num_hidden_layers // 2, num_hidden_layers - 3]}, or another engine",
    )


def _default(n: int | None, plus: int = 0) -> tuple[int, ...] | None:
    return None if n is None else tuple(sorted({2 + plus, n // 2 + plus, n - 3 + plus}))


def _unbounded(rule: str, boundaries: Iterable[int]) -> Capture:
    reached = tuple(sorted({boundary for boundary in boundaries if boundary >= 0}))
    return Capture(None, rule + "; the target's depth is unknown", unbounded=reached)


def _collect(ids: tuple[int, ...], shift: int, allowed: Callable[[int], bool], n: int, key: str, rule: str) -> Capture:
    """Membership test in a loop over layers: ascending, duplicates once, ids that name no layer missing in silence."""
    got = tuple(boundary for boundary in sorted({layer + shift for layer in ids}) if allowed(boundary))
    problems = []
    if len(got) < len(ids) or not ids:
        problems.append(
            Problem(
                "tap_missing",
                where=key,
                expected=f"{len(ids)} states from {list(ids)}" if ids else "layer ids",
                found=f"{len(got) if ids else 'an empty list'}: boundaries {list(got)} of a {n}-layer target",
                fix="name distinct layers that this engine can capture",
            )
        )
    if list(ids) != sorted(ids):
        problems.append(
            Problem(
                "tap_order",
                where=key,
                expected=f"ascending ids: {sorted(ids)}",
                found=str(list(ids)),
                fix="the engine concatenates in ascending order: make sure training did, and sort the list",
                severity="warning",
            )
        )
    return Capture(got, rule, tuple(problems))


def _absent(code: str, key: str, found: str) -> Problem:
    return Problem(
        code,
        where=key,
        expected="the layer ids the draft was trained with",
        found=found,
        fix=f"write {key}",
        severity="error" if code == "ids_ignored" else None,
    )


def _sglang(engine: Engine, keys: TapKeys, target_type: str | None, n: int | None) -> Capture:
    key = f"eagle_config.{IDS_KEY}"
    if not keys.use_aux:
        return _no_taps()
    since = None if target_type is None else sglang_since(target_type)
    if target_type is None or since is None or not engine.since(since):
        unknown = _unknown_class(engine, target_type, since)
        absent = () if keys.nested is not None else _sglang_default(keys, None, key).problems
        return Capture(None, unknown.rule, unknown.problems + absent)
    if keys.nested is None:
        plus = 1 if target_type == "minimax_m3_vl" else 0
        return _sglang_default(keys, _default(n, plus), key, "[3, n//2+1, n-2]" if plus else "[2, n//2, n-3]")
    shift, rule = _sglang_shift(engine, keys.nested, target_type, n)
    if n is None:
        return _unbounded(rule, [layer + shift for layer in keys.nested])
    reaches = target_type in REACHES_LAST or (target_type == "gpt_oss" and engine.since("0.5.17"))
    deepest = n if reaches else n - 1
    return _collect(keys.nested, shift, lambda boundary: 0 <= boundary <= deepest, n, key, rule)


def _sglang_default(keys: TapKeys, default: tuple[int, ...] | None, key: str, words: str = "[2, n//2, n-3]") -> Capture:
    return _defaulted(default, words, key, bool(keys.top or keys.layer_ids), "SGLang reads no other key")


def _sglang_shift(engine: Engine, ids: tuple[int, ...], target_type: str, n: int | None) -> tuple[int, str]:
    if target_type in FIRST_ID_RULE and engine.since("0.5.13"):
        shift = 1 if ids[:1] == (1,) else 0
        return shift, f"{target_type}: id+1 if the first id is 1, else the id itself (here +{shift})"
    if target_type == "gpt_oss" and engine.since("0.5.17"):
        shift = 0 if ids and max(ids) == n else 1
        return shift, f"gpt_oss: the id itself if the largest is the number of layers, else id+1 (here +{shift})"
    return 1, f"{target_type}: id+1, always"


def _no_taps() -> Capture:
    problem = Problem(
        "fc_skipped",
        where="eagle_config.use_aux_hidden_state",
        expected="taps",
        found="false: the last hidden state, after the final norm, is fed and fc is skipped",
        fix="right only for a draft trained that way; else remove the key",
        severity="warning",
    )
    return Capture((), "use_aux_hidden_state is false: no taps, the last normed state", (problem,))


def _unknown_class(engine: Engine, target_type: str | None, since: str | None = None) -> Capture:
    if target_type is None:
        return Capture(None, f"{engine.name}'s rule depends on the target class, which is unknown: --target names it")
    refused = target_type in NO_SETTER or (since is not None and target_type not in UNPROVEN)
    words = f"{target_type}, which cannot capture states" + (f" before {since}" if since else "")
    problem = Problem(
        "architecture_unknown",
        where="target model_type",
        expected=f"a target class whose rule in {engine} is known",
        found=words if refused else target_type,
        fix=f"use {engine.name}@{since} or newer" if since else "measure what the engine captures (eyas check --trace)",
        severity="error" if refused else "warning",
    )
    return Capture(None, f"no known rule for a {target_type} target", (problem,))


def _defaulted(default: tuple[int, ...] | None, words: str, key: str, other: bool, why: str) -> Capture:
    problem = (
        _absent("ids_ignored", key, f"ids elsewhere, which are not read ({why}); default {words} taken")
        if other
        else _absent("config_key_missing", key, f"no ids: the engine's default {words}")
    )
    return Capture(default, f"no ids where it looks: the default {words}, as boundaries", (problem,))


def _vllm(engine: Engine, keys: TapKeys, target_type: str | None, n: int | None) -> Capture:
    runner = "Model Runner V2" if engine.runner == "v2" else "V1 runner"
    if not keys.use_aux:
        return _no_taps()
    if target_type is not None and not engine.since("0.24") and not any(part in target_type for part in VLLM_020_NAMES):
        return _unknown_class(engine, target_type, "0.24")
    fallback, name = _vllm_fallback(engine, keys)
    ids, key = (keys.top, IDS_KEY) if keys.top else (fallback, f"eagle_config.{name}")
    if not ids:
        unread = keys.layer_ids if name == IDS_KEY else keys.nested if name else keys.nested or keys.layer_ids
        why = f"{runner} reads the top level" + (f" and eagle_config.{name}" if name else " only")
        return _defaulted(_default(n), "[2, n//2, n-3]", IDS_KEY, bool(unread), why)
    rule = f"{runner}: {key}, the id itself"
    if n is None:
        return _unbounded(rule, ids)
    own_loop = target_type in VLLM_DEEPSEEK
    if 0 in ids and own_loop:
        problem = Problem(
            "tap_embedding",
            where=key,
            expected="boundaries of 1 or more on vLLM's deepseek_v2 class",
            found="0: it adds a residual that does not exist yet (TypeError)",
            fix="train without the embedding as a tap, or serve with SGLang",
        )
        return Capture(None, rule + "; boundary 0 fails on the deepseek_v2 class", (problem,))
    deepest = n - 1 if own_loop and not engine.since("0.32") else n
    return _collect(ids, 0, lambda boundary: 0 <= boundary <= deepest, n, key, rule)


def _vllm_fallback(engine: Engine, keys: TapKeys) -> tuple[tuple[int, ...] | None, str | None]:
    """The nested ids this runner falls back to, and their key; (None, None) where it reads the top level only."""
    if engine.runner == "v2":
        return (keys.layer_ids, "layer_ids") if engine.since("0.32") else (None, None)
    return (keys.nested, IDS_KEY) if engine.since("0.24") else (None, None)


def _llamacpp(engine: Engine, keys: TapKeys, target_type: str | None, n: int | None) -> Capture:
    if keys.top is None:
        other = bool(keys.nested or keys.layer_ids)
        return _defaulted(_default(n), "[2, n//2, n-3]", IDS_KEY, other, "its converter reads the top level only")
    rule = f"llama.cpp: {IDS_KEY}, the id itself, exactly three"
    if len(keys.top) != 3:
        problem = Problem(
            "tap_missing",
            where=IDS_KEY,
            expected="exactly 3 ids",
            found=str(list(keys.top)),
            fix="llama.cpp serves drafts with three taps only",
        )
        return Capture(None, rule, (problem,))
    if n is None:
        return _unbounded(rule, keys.top)
    return _collect(keys.top, 0, lambda boundary: 0 <= boundary < n, n, IDS_KEY, rule)
