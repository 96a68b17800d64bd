"""A draft that fits the target it is loaded beside: of its weights, and of one mind about itself."""

from pathlib import Path

from eyas.errors import InputError
from eyas.formats.config_problems import key_disagreements
from eyas.formats.draft_config import DraftConfig, TargetIdentity
from eyas.formats.target_config import read_json
from eyas.models.checkpoint import CONFIG, DraftInfo, has_info, load_draft
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget
from eyas.models.target import Target
from eyas.run import check_same
from eyas.stage import chosen_step

IDENTITY = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "weights_hash")


def load_fitting(folder: Path, target: Target) -> tuple[Draft, DraftInfo]:
    """`load_draft` for an engine over `target`, in the target's dtype.

    Takes drafts of any writer. Raises InputError, with its finding code, for a draft of another target or of other
    weights, and for a config.json whose keys contradict its `eyas` block: an engine would read the former.
    """
    foreign = NamedTarget(target.identity, target.context_length, target.embedding)
    draft, info = load_draft(folder, target.embedding, target.dtype, foreign)
    check_identity(target.identity, info.target, folder, "give --target, the draft's own")
    if has_info(folder):
        _check_keys(chosen_step(folder) / CONFIG, info.draft)
    return draft, info


def check_identity(wanted: TargetIdentity, got: TargetIdentity, where: Path, next: str) -> None:
    """Raise InputError at the first field in which two targets differ (names may differ: weights decide)."""
    for name in IDENTITY:
        check_same(f"the target's {name}", getattr(wanted, name), getattr(got, name), where, next, "target_revision")


def _check_keys(path: Path, config: DraftConfig) -> None:
    problems = key_disagreements(read_json(path), config)
    if problems:
        first = problems[0]
        raise InputError(
            wanted=f"{first.where}: {first.expected}",
            got=first.found + (f", and {len(problems) - 1} keys more that differ" if len(problems) > 1 else ""),
            where=str(path),
            next=f"{first.fix}; eyas inspect {path.parent} lists what differs",
            code=first.code,
        )
