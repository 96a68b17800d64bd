"""Engine arguments passed through: contradictions of the derived ones are refused by name, unknown flags said."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import InputError
from eyas.launch.arguments import EMBEDDED_FLAGS, SGLANG_FLAGS, VLLM_FLAGS
from eyas.launch.known_flags import known_flags, nearest_flag

Pair = tuple[str, tuple[str, ...]]
"""A flag and the words after it."""
RELEASES = {"sglang": "sglang 0.5.23", "vllm": "vllm 0.33", "embedded": "the embedded server"}
NAMES = {
    "embedded": {**EMBEDDED_FLAGS, "--host": "host"},
    "sglang": {**SGLANG_FLAGS, "--host": "host"},
    "vllm": {**VLLM_FLAGS, "--host": "host"},
}
SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
"""vLLM's own flags for keys of --speculative-config."""
DRAFT_ONLY = ("algorithm", "draft", "num_steps", "topk", "num_draft_tokens")


def split_flags(words: Sequence[str]) -> list[Pair]:
    """Words as flags with what follows them; `--flag=value` is split. Raises InputError for a word before any flag."""
    pairs: list[Pair] = []
    for word in words:
        if word.startswith("-") and not _is_number(word):
            flag, equals, value = word.partition("=")
            pairs.append((flag, (value,) if equals else ()))
        elif pairs:
            pairs[-1] = (pairs[-1][0], (*pairs[-1][1], word))
        else:
            raise InputError(
                wanted="engine arguments that begin with a flag",
                got=repr(word),
                where="--engine-args",
                next="name the target with --target; flags as in --engine-args '--max-model-len 8192'",
            )
    return pairs


def _is_number(word: str) -> bool:
    try:
        float(word)
        return True
    except ValueError:
        return False


def pass_through(
    engine: str, words: Sequence[str], derived: Sequence[Pair], draft: str | None
) -> tuple[list[Pair], list[Pair]]:
    """(passed-through pairs without repetitions of derived ones, derived pairs with vLLM's JSON merged)."""
    names, own = NAMES[engine], {}
    for flag, values in derived:
        own[names.get(flag, flag)] = (flag, values)
    passed: list[Pair] = []
    for flag, values in split_flags(words):
        full = _full(engine, names, flag)
        name = names.get(full, flag)
        text = _speculative_json(full, values) if engine == "vllm" else None
        if text is not None:
            merged = _merge(flag, own.get("speculative"), text, draft)
            own["speculative"] = ("--speculative-config", (merged,))
        elif name in own:
            if own[name][1] != values:
                raise _contradiction(flag, " ".join(values), own[name][0], " ".join(own[name][1]), name)
        elif name in DRAFT_ONLY and engine != "vllm" and not _other_method(names, words):
            raise _contradiction(flag, " ".join(values), "no draft", "a server without speculation", name)
        else:
            passed.append((flag, values))
    return passed, list(own.values())


def _full(engine: str, names: Mapping[str, str], flag: str) -> str:
    """A flag under its whole name: argparse takes `_` for `-`, and a beginning that only one flag has."""
    head, dot, key = flag.partition(".")
    head = head.replace("_", "-") if head.startswith("--") else head
    known = known_flags(engine) if engine in RELEASES else frozenset()
    if head not in names and head not in known and head.startswith("--"):
        meant = [one for one in (*names, *known) if one.startswith(head)]
        if len({names.get(one, one) for one in meant}) == 1:
            head = meant[0]
    return head + dot + key


def _speculative_json(flag: str, values: tuple[str, ...]) -> str | None:
    """What one of vLLM's flags says of speculation, as JSON; None: nothing. `--speculative-config.method ngram` and
    `--spec-method ngram` are keys of it (vLLM 0.33 utils/argparse_utils.py, engine/arg_utils.py)."""
    head, _, key = flag.partition(".")
    key = SHORT.get(head, key)
    text = " ".join(values)
    if VLLM_FLAGS.get(head) != "speculative" and head not in SHORT:
        return None
    if not key:
        return text
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for part in reversed(key.split(".")):
        value = {part: value}
    return json.dumps(value)


def _other_method(names: Mapping[str, str], words: Sequence[str]) -> bool:
    """Speculation that needs no EAGLE-3 draft (NGRAM and the like) is the person's own affair."""
    chosen = [values for flag, values in split_flags(words) if names.get(flag) == "algorithm"]
    return bool(chosen) and not any("EAGLE" in value.upper() for values in chosen for value in values)


def _merge(flag: str, own: Pair | None, text: str, draft: str | None) -> str:
    """vLLM's speculative JSON of the person's over ours: further keys are kept, contradicting ones refused."""
    try:
        theirs: Any = json.loads(text)
    except ValueError as error:
        raise InputError(wanted=f"JSON for {flag}", got=text, where="--engine-args", next=f"{flag} '{{}}'") from error
    if not isinstance(theirs, dict):
        raise InputError(
            wanted=f"a JSON object for {flag}", got=str(theirs), where="--engine-args", next=f"{flag} {{}}"
        )
    ours: dict[str, Any] = json.loads(own[1][0]) if own is not None else {}
    if draft is None and "eagle" in str(theirs.get("method", theirs.get("model", ""))).lower():
        raise _contradiction(flag, json.dumps(theirs), "no draft", "a server without speculation", "draft")
    for key, value in ours.items():
        if key in theirs and theirs[key] != value:
            raise _contradiction(f"{flag} {key}", str(theirs[key]), f'"{key}"', str(value), key)
    return json.dumps(ours | theirs)


SETTING = {
    "target": "--target",
    "draft": "--draft",
    "model": "--draft",
    "tp": "--tensor-parallel",
    "num_steps": "--num-steps",
    "num_speculative_tokens": "--num-steps",
    "topk": "--topk",
    "num_draft_tokens": "--num-draft-tokens",
    "port": "--port",
    "host": "--host",
}
"""Which setting of ours decides what a flag of the engine says."""


def _contradiction(flag: str, got: str, ours: str, value: str, name: str) -> InputError:
    setting = SETTING.get(name)
    always = (
        "an EAGLE-3 draft is never started with another algorithm"
        if name in ("algorithm", "method", "parallel_drafting")
        else None
    )
    return InputError(
        wanted=f"{ours} {value}".strip() + (f": {always}" if always else ""),
        got=f"{flag} {got}".strip(),
        where="--engine-args",
        next=f"leave {flag.split()[0]} out" + (f"; say it by {setting} {got}" if setting and not always else ""),
    )


def unknown_flags(engine: str, flags: Sequence[str]) -> list[str]:
    """A note for each flag that the read release's parser does not have; another release may."""
    known, notes = known_flags(engine) if engine in RELEASES else frozenset(), []
    for flag in flags:
        plain = flag.replace("_", "-").partition(".")[0]
        positive = plain.replace("--no-", "--", 1)
        abbreviated = any(name.startswith(plain) for name in known)  # argparse takes a beginning for the whole
        if known and plain.startswith("--") and not abbreviated and positive not in known:
            notes.append(
                f"{flag} is no flag of {RELEASES[engine]}{nearest_flag(engine, plain)}: the engine will refuse it"
            )
    return notes
