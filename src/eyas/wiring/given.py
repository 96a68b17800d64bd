"""What `eyas check` was given, and what several checks make of it, made once."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from eyas.data.shards import CaptureReader, Sample
from eyas.errors import InputError
from eyas.formats.target_config import stop_ids
from eyas.models.checkpoint import has_info, load_draft
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget
from eyas.models.streaming.ends import Ends
from eyas.models.target import Target
from eyas.wiring.reference import reference_boundaries

PROBE_SAMPLES, PROBE_MIN, PROBE_MAX = 2, 24, 256
FLOAT = torch.float32
NO_PROBE = f"no captured sample of {PROBE_MIN} tokens or more"


@dataclass(frozen=True, eq=False)
class Given:
    """What the person gave; each check takes what it needs."""

    target: Target | None
    """None where it is not given, or larger than memory."""
    reference: Target | Path | None
    """The target, or the folder to stream it from."""
    captures: CaptureReader | None
    draft_folder: Path | None
    export_folder: Path | None
    device: torch.device | str = "cpu"
    """Where a streamed reference is computed."""
    _boundaries: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict, repr=False)

    def probe(self) -> list[Sample]:
        """A few captured samples long enough to tell boundaries apart, cut to the probe's length."""
        if self.captures is None:
            return []
        long = [number for number, sample in enumerate(self.captures.samples) if sample.length >= PROBE_MIN]
        return [self.captures.read(number).cut(PROBE_MAX) for number in long[:PROBE_SAMPLES]]

    def boundaries(self, sample: Sample, up_to: int | None = None) -> list[Tensor]:
        """The reference's boundaries over a sample's ids, computed once."""
        assert self.reference is not None, "only where there is a reference"
        ids = sample.ids_T.tolist()
        if (key := tuple(ids)) not in self._boundaries:
            self._boundaries[key] = reference_boundaries(self.reference, ids, up_to, self.device)
        return self._boundaries[key]

    def ends(self) -> Ends | None:
        """Embedding, final norm and head of a target that is streamed; None of any other."""
        return Ends.open(self.reference) if isinstance(self.reference, Path) else None

    def stop_ids(self) -> tuple[int, ...]:
        """The reference's; () where there is none."""
        if self.target is not None:
            return self.target.stop_ids
        return stop_ids(self.reference) if isinstance(self.reference, Path) else ()

    def draft(self) -> Draft | None:
        """The draft with the target's embedding, in float32: half precision would hide what differs.

        None where it is not given, or its target is not in memory.

        Raises InputError for a folder that is no draft of this target.
        """
        if self.draft_folder is None or self.target is None:
            return None
        captured = None if self.captures is None else self.captures.boundaries
        foreign = NamedTarget(self.target.identity, self.target.context_length, self.target.embedding)
        return load_draft(self.draft_folder, self.target.embedding, FLOAT, foreign, captured)[0]

    def bare_draft(self) -> Draft | None:
        """The draft, its embedding left out where that is the target's and the target is not in memory.

        None where it is not given, or where only its target could say what it is (a draft made elsewhere).
        """
        if self.draft_folder is None or self.target is not None:
            return self.draft()
        return load_draft(self.draft_folder, dtype=FLOAT)[0] if has_info(self.draft_folder) else None

    def draft_or_none(self) -> Draft | None:
        """The draft; None too where it cannot be loaded, which the vocabulary check reports."""
        try:
            return self.draft()
        except InputError:
            return None
