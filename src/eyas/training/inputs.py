"""Whether captures belong to a target, and to a draft: refused by the name of the first field that differs; and whether
their states are numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.data.shards import Sample, Samples
from eyas.errors import InputError
from eyas.formats.draft_config import TargetIdentity
from eyas.models.checkpoint import DraftInfo
from eyas.models.fitting import check_identity
from eyas.models.target import Target
from eyas.run import Manifest, check_same

ANOTHER = "capture again with this target, or give the target of the captures (eyas inspect CAPTURES names it)"


def check_captures(manifest: Manifest, reader: Samples, target: Target, where: Path) -> None:
    """Raise InputError unless `reader`'s states are this target's, of its tokenizer, and hold a train sample."""
    check_maker(manifest, target, where)
    if not any(sample.split == "train" for sample in reader.samples):
        raise InputError(
            wanted="captured samples of the train split",
            got=f"{len(reader.samples)} samples, none of them train",
            where=str(where),
            next="make prompts with prompts.train of at least 1",
        )
    (first,) = reader.read_all([0])
    width = len(reader.boundaries) * target.hidden_size
    check_same("the width of the taps", width, first.taps_TA.shape[1], where, ANOTHER)
    check_same("the width of the last hidden", target.hidden_size, first.last_hidden_TH.shape[1], where, ANOTHER)


def check_maker(manifest: Manifest, target: Target, where: Path) -> None:
    """Raise InputError unless captures or responses are of this target and its tokenizer; of a target's outline, which
    has no weights, the shape alone is compared."""
    facts, made_by = manifest.facts, TargetIdentity.model_validate(manifest.facts["target"])
    identity = target.identity
    if not identity.weights_hash:
        identity = identity.model_copy(update={"weights_hash": made_by.weights_hash})
    check_identity(identity, made_by, where, ANOTHER)
    check_same("tokenizer_hash", target.tokenizer_hash, facts["tokenizer_hash"], where, ANOTHER, "tokenizer_mismatch")
    check_same("template_hash", target.template_hash, facts["template_hash"], where, ANOTHER, "template_mismatch")


def finite(samples: Sequence[Sample]) -> Sequence[Sample]:
    """These samples. Raises InputError, with their names, where some have states that are not finite in any row: the
    rows after it read its taps."""
    bad = [one.id for one in samples if not (one.taps_TA.isfinite().all() and one.last_hidden_TH.isfinite().all())]
    if bad:
        raise InputError(
            wanted="finite states in every sample",
            got=f"states that are not finite in: {', '.join(bad)}",
            where="captures",
            next="capture those samples again (eyas capture --precision float32), or leave them out",
        )
    return samples


def check_draft(info: DraftInfo, boundaries: Sequence[int], facts: dict[str, Any], where: Path) -> None:
    """Raise InputError unless a draft belongs to captures of these boundaries and facts."""
    advice = "give the captures of the draft's own target (eyas inspect DRAFT names it)"
    check_identity(info.target, TargetIdentity.model_validate(facts["target"]), where, advice)
    check_taps(info.draft.boundaries, boundaries, where)
    check_same("tokenizer_hash", info.tokenizer_hash, facts["tokenizer_hash"], where, advice, "tokenizer_mismatch")
    check_same("template_hash", info.template_hash, facts["template_hash"], where, advice, "template_mismatch")


def check_taps(drafts: Sequence[int], captured: Sequence[int], where: Path) -> None:
    """Raise InputError unless what is captured is what the draft reads."""
    if tuple(drafts) != tuple(captured):
        raise InputError(
            wanted=f"captures of the draft's boundaries {list(drafts)}",
            got=f"captures of {list(captured)}",
            where=str(where),
            next=f"eyas capture --responses RESPONSES --boundaries {','.join(map(str, drafts))} --out OTHER; beside "
            f"training --capture.boundaries, in a recipe capture.boundaries = {list(drafts)}",
            code="tap_offset",
        )
