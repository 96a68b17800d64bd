"""Captured rows under a wiring: the draft's loss and hits at every step, row by row, so that wirings can be paired.

The loss is the divergence from the teacher in nats (cross-entropy less the teacher's own entropy): it compares across
vocabulary tables and teachers, and differs between wirings of one table as cross-entropy does.

Shapes: T packed rows, A width of the taps, H hidden, P teacher rows, R[s] rows supervised at step s,
D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.data.shards import CaptureReader, NormState, Sample
from eyas.models.draft import Draft
from eyas.models.target import Target, record_boundaries
from eyas.models.vocab import target_ids
from eyas.training.loss import unroll
from eyas.training.rows import Rows, supervise
from eyas.training.teacher import Teacher
from eyas.wiring.hypotheses.load import Parts
from eyas.wiring.hypotheses.wirings import Table, Wiring
from eyas.wiring.identify import NORMED

CHUNK = 256
STEPS = 3
MOST_TOKENS, MOST_ROWS, MOST_LENGTH = 3000, 1000, 1024
"""Tokens and supervised rows looked at: half a minute for thirty wirings on two cores with the default target."""
DOCUMENTS = 20
"""As many, where there are: the interval comes from them."""
MOST_LOGITS = 2**26
"""Teacher probabilities kept, in numbers: a quarter of a gigabyte."""


@dataclass(frozen=True)
class Outcome:
    """What one wiring gives. Lists are over steps, each [R[s]]."""

    loss: list[Tensor]
    """Nats; NaN where the teacher's argmax is outside the draft vocabulary."""
    hits: list[Tensor]
    survival: list[float]

    @property
    def accuracy(self) -> list[float]:
        return [float(hits.float().mean()) for hits in self.hits]

    @property
    def mean_loss(self) -> list[float]:
        return [float(loss.nanmean()) for loss in self.loss]

    @property
    def accept_length(self) -> float:
        """To expect of chains of as many steps, over rows (docs/commands.md, `evaluate`)."""
        return 1 + sum(self.survival)


@dataclass(frozen=True)
class Taught:
    """The teacher over one vocabulary table: probabilities [P, D] and their entropy [P]."""

    probabilities_PD: Tensor
    entropy_P: Tensor


@dataclass(eq=False)
class Rig:
    """Captured documents, packed, with everything that wirings share."""

    target: Target
    parts: Parts
    samples: list[Sample]
    last_hidden_norm: NormState
    rows: Rows = field(init=False)
    document: list[Tensor] = field(init=False)
    """Per step the document of each supervised row."""
    argmax_T: Tensor = field(init=False)
    states: list[dict[int, Tensor]] = field(default_factory=list)
    """Per document the boundaries that were computed anew."""
    taught: dict[Table, Taught] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = [len(sample.ids_T) for sample in self.samples]
        self.rows = supervise(torch.cat([sample.loss_mask_T for sample in self.samples]), lengths, STEPS)
        starts = torch.tensor(self.rows.starts[1:])
        self.document = [torch.searchsorted(starts, index, right=True) for index in self.rows.index]
        self.last_TH = torch.cat([sample.last_hidden_TH for sample in self.samples])
        self.argmax_T = torch.full((len(self.last_TH),), -1)
        at_P = self.rows.index[0] + 1
        with torch.no_grad():
            teacher = Teacher(self.target, torch.zeros(1, dtype=torch.int64), self.last_hidden_norm)
            self.argmax_T[at_P] = teacher.argmax(self.last_TH[at_P])

    @torch.no_grad()
    def compute_anew(self, boundaries: Sequence[int]) -> None:
        """Run the target once over every document and keep these boundaries."""
        n = self.target.num_hidden_layers
        wanted = sorted({n if boundary == NORMED else boundary for boundary in boundaries})
        for sample in self.samples:
            with record_boundaries(self.target, wanted) as recorder:
                self.target.backbone(input_ids=sample.ids_T[None].to(self.target.embedding.device), use_cache=False)
                found = {boundary: recorder.states[boundary][0].float().cpu() for boundary in wanted}
            if NORMED in boundaries:
                found[NORMED] = self.target.final_norm(found[n].to(self.target.dtype)).float()
            self.states.append(found)

    def ids_of(self, table: Table) -> Tensor:
        """The target id of each draft id, [D], as a table is read; ids outside the vocabulary are held inside it."""
        config, tensors = self.parts.config, self.parts.tensors
        straight = torch.arange(config.draft_vocab_size)
        if not config.reduced_vocabulary or table == "identity":
            return straight
        if table == "mask":
            marked = tensors["t2d"].nonzero()[:, 0]
            return F.pad(marked, (0, max(0, len(straight) - len(marked))))[: len(straight)]
        stored = tensors.get("d2t", torch.zeros_like(straight)).to(torch.int64)
        ids = stored if table == "absolute" else target_ids(stored)
        return ids.clamp(0, config.vocab_size - 1)

    @torch.no_grad()
    def teach(self, table: Table) -> Taught:
        """The teacher over a table, computed once."""
        if table not in self.taught:
            teacher = Teacher(self.target, self.ids_of(table), self.last_hidden_norm)
            kept = self.last_TH[self.rows.index[0] + 1]
            probabilities = torch.cat([teacher.probabilities(chunk) for chunk in kept.split(CHUNK)])
            entropy = torch.special.entr(probabilities).sum(dim=-1)
            self.taught[table] = Taught(probabilities, entropy)
        return self.taught[table]

    def draft(self, wiring: Wiring) -> Draft:
        """The draft as this wiring builds it."""
        config = self.parts.config.model_copy(update=dict(wiring.config))
        embedding = self.target.embedding.float()
        if wiring.embedding == "stored" or (wiring.embedding == "declared" and config.own_embedding):
            embedding = self.parts.tensors["embed_tokens.weight"]
        elif wiring.embedding == "scaled":
            embedding = embedding * config.hidden_size**0.5
        head = None
        if wiring.head != "declared":
            source = self.target.head.weight if wiring.head == "target" else self.target.embedding
            head = source.float()[self.ids_of(wiring.table)]
        return self.parts.build(config, embedding, head)

    def taps_TA(self, wiring: Wiring) -> Tensor:
        """The packed taps as this wiring reads them."""
        return torch.cat([self._taps(number, sample, wiring) for number, sample in enumerate(self.samples)])

    def _taps(self, number: int, sample: Sample, wiring: Wiring) -> Tensor:
        width = self.parts.config.target_hidden_size
        blocks = list(sample.taps_TA.float().split(width, dim=-1))
        if wiring.blocks is not None:
            blocks = [self.states[number][boundary] for boundary in wiring.blocks]
        if wiring.order is not None:
            blocks = [blocks[index] for index in wiring.order]
        return moved(torch.cat(blocks, dim=-1), wiring.hidden)

    @torch.no_grad()
    def measure(self, wiring: Wiring) -> Outcome:
        """The draft under `wiring` over every row."""
        draft = self.draft(wiring)
        ids_T = torch.cat([moved(sample.ids_T.to(torch.int64), wiring.token) for sample in self.samples])
        rows = replace(self.rows, positions_T=self.rows.positions_T + wiring.position)
        hidden = unroll(draft, self.taps_TA(wiring), ids_T, rows, pace=wiring.pace)
        ids_D, taught = self.ids_of(wiring.table), self.teach(wiring.table)
        known_V = torch.zeros(self.parts.config.vocab_size, dtype=torch.bool)
        known_V[ids_D] = True
        at_P = self.rows.index[0] + 1
        losses, hits = [], []
        for step, (states, index) in enumerate(zip(hidden, self.rows.index, strict=True)):
            truth = self.argmax_T[index + 1 + step]
            loss, drafted = self._rows(draft, states, taught, torch.searchsorted(at_P, index + 1 + step))
            losses.append(loss.where(known_V[truth], float("nan")))
            hits.append(ids_D[drafted] == truth)
        return Outcome(losses, hits, self.survival(hits))

    def _rows(self, draft: Draft, states_RH: Tensor, taught: Taught, where_R: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence from the teacher and argmax of each row, [R] both, the logits a chunk at a time."""
        losses, drafted = [], []
        for states, where in zip(states_RH.split(CHUNK), where_R.split(CHUNK), strict=True):
            logits = draft.logits(states).float()
            expected = torch.linalg.vecdot(taught.probabilities_PD[where], logits)
            losses.append(logits.logsumexp(dim=-1) - expected - taught.entropy_P[where])
            drafted.append(logits.argmax(dim=-1))
        return torch.cat(losses), torch.cat(drafted)

    def survival(self, hits: list[Tensor]) -> list[float]:
        """Share of rows whose first s + 1 drafts are hits and, before the last, lie on the captured text."""
        ids_T = torch.cat([sample.ids_T for sample in self.samples])
        shares, alive = [], torch.ones(len(hits[0]), dtype=torch.bool)
        for step, (hit, index, inside) in enumerate(zip(hits, self.rows.index, self.rows.inside, strict=True)):
            alive = hit if step == 0 else alive[inside] & hit
            shares.append(float(alive.float().mean()) if len(alive) else 0.0)
            alive = alive & (self.argmax_T[index + 1 + step] == ids_T[index + 2 + step])
        return shares


def moved(rows_T: Tensor, shift: int) -> Tensor:
    """Row t becomes row t + shift; the ends repeat. First dimension T."""
    if shift == 0:
        return rows_T
    at_T = (torch.arange(len(rows_T)) + shift).clamp(0, len(rows_T) - 1)
    return rows_T[at_T]


def choose(reader: CaptureReader, draft_vocab_size: int) -> list[Sample]:
    """Captured samples to look at, held-out ones first, each cut so that many documents fit within the limits."""
    most_rows = max(64, min(MOST_ROWS, MOST_LOGITS // draft_vocab_size))
    order = sorted(range(len(reader)), key=lambda number: (reader.samples[number].split != "heldout", number))
    a_document = max(STEPS + 1, most_rows // max(1, min(DOCUMENTS, len(order))))
    chosen: list[Sample] = []
    tokens = rows = 0
    for number in order:
        sample = reader.read(number)
        supervised = sample.loss_mask_T.bool().cumsum(dim=0)
        sample = sample.cut(min(MOST_LENGTH, int((supervised <= a_document).sum())))
        added = int(sample.loss_mask_T.sum())
        if added < STEPS + 1 or not sample.taps_TA.isfinite().all() or not sample.last_hidden_TH.isfinite().all():
            continue
        if chosen and (tokens + len(sample.ids_T) > MOST_TOKENS or rows + added > most_rows):
            break
        chosen.append(sample)
        tokens, rows = tokens + len(sample.ids_T), rows + added
    return chosen
