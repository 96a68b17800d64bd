"""Whose are they? Captures, draft and export against the target given, or against each other, by their hashes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.data.shards import CaptureReader
from eyas.formats.draft_config import TargetIdentity
from eyas.formats.target_config import read_config, text_config
from eyas.models.checkpoint import has_info, read_info
from eyas.models.target import Target
from eyas.wiring.findings import CODES, Finding
from eyas.wiring.given import Given
from eyas.wiring.static_checks import Check

SHOWN = 12
"""Digits of a hash that are printed."""


@dataclass(frozen=True)
class Maker:
    """What something was made with; None: it does not say."""

    what: str
    target: TargetIdentity | None
    tokenizer_hash: str | None
    template_hash: str | None


def check_origin(given: Given) -> Check:
    """Made with this target, this tokenizer, this chat template: by hash, so that a re-release shows."""
    name = "origin"
    makers = list(makers_of(given))
    if len(makers) < 2:
        return Check(name, "skipped", "needs captures or a draft, and the target or the other one")
    first, others = makers[0], makers[1:]
    found = [one for other in others for one in differences(first, other)]
    failed = any(one.severity == "error" for one in found)
    named = first.target.name if first.target else "a target larger than memory"
    evidence = f"{', '.join(one.what for one in others)} against {first.what} ({named})"
    return Check(name, "fail" if failed else "pass", evidence, found)


def makers_of(given: Given) -> Iterator[Maker]:
    """The target first, then captures, draft and export."""
    if given.target is not None:
        yield of_target(given.target)
    elif isinstance(given.reference, Path):
        yield Maker("the target", of_folder(given.reference), None, None)
    if given.captures is not None:
        yield of_captures(given.captures)
    for what, folder in (("draft", given.draft_folder), ("export", given.export_folder)):
        if folder is not None and folder.is_dir() and has_info(folder):
            info = read_info(folder)
            yield Maker(what, info.target, info.tokenizer_hash or None, info.template_hash)


def of_target(target: Target) -> Maker:
    return Maker("the target", target.identity, target.tokenizer_hash, target.template_hash)


def of_folder(folder: Path) -> TargetIdentity:
    """Of a target that is streamed its sizes are known, not the hash of its weights."""
    text = text_config(read_config(folder))
    return TargetIdentity(
        name=folder.name,
        weights_hash="",
        model_type=text["model_type"],
        num_hidden_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
    )


def of_captures(captures: CaptureReader) -> Maker:
    facts = captures.manifest.facts
    return Maker("captures", captures.identity, facts.get("tokenizer_hash"), facts.get("template_hash"))


def differences(first: Maker, other: Maker) -> Iterator[Finding]:
    """Where `other` was made with something else than `first`; what one of them does not know is no difference."""
    if first.target is not None and other.target is not None and unlike(first.target, other.target):
        fix = f"give --target {other.target.name}, or make the {other.what} again with this target"
        expected, found = words(first.target), words(other.target)
        message = "Other weights, other states: a draft learns the states of one set of weights."
        yield finding("target_revision", other.what, expected, found, fix, message)
    for code, mine, theirs, message in (
        ("tokenizer_mismatch", first.tokenizer_hash, other.tokenizer_hash, "The same ids are other text."),
        (
            "template_mismatch",
            first.template_hash,
            other.template_hash,
            "Prompts are wrapped otherwise than in training: acceptance falls a little, most in the first tokens.",
        ),
    ):
        if mine and theirs and mine != theirs:
            what = "tokenizer" if code == "tokenizer_mismatch" else "chat template"
            fix = f"serve with the {what} of the {other.what}, or make the {other.what} again"
            yield finding(code, other.what, f"{what} {mine[:SHOWN]}", f"{what} {theirs[:SHOWN]}", fix, message)


def unlike(one: TargetIdentity, other: TargetIdentity) -> bool:
    if one.weights_hash and other.weights_hash:
        return one.weights_hash != other.weights_hash
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    sizes = [(getattr(one, name), getattr(other, name)) for name in names]
    return any(mine and theirs and mine != theirs for mine, theirs in sizes)


def words(target: TargetIdentity) -> str:
    told = f"weights {target.weights_hash[:SHOWN]}" if target.weights_hash else f"{target.num_hidden_layers} layers"
    return f"{target.name}, {told}, {target.hidden_size} wide"


def finding(code: str, what: str, expected: str, found: str, fix: str, message: str) -> Finding:
    severity = CODES[code].severity
    return Finding(code=code, severity=severity, where=what, expected=expected, found=found, fix=fix, message=message)
