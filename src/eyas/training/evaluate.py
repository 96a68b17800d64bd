"""`eyas evaluate`: how much of a draft the target would accept, from captures alone.

A drafted token is a *hit* when it is the target's full-vocabulary argmax. Step s of row t drafts token t + 2 + s from
the true tokens up to t + 1 + s: for as long as every earlier step was a hit that is the chain a server drafts, so the
joint prefix of hits is the number of tokens it would accept (a product of per-step accuracies is not).

Over *rows*, step s counts the rows of which tokens t + 1 .. t + 2 + s belong to the answer. The *walk* takes the rounds
that the engine takes on greedy answers: a round starts at the last emitted token (the first at the answer's first,
which the prefill emits and no round counts), gains accepted + 1 tokens, and ends when the answer's last token is out.
Acceptance is counted before the stop token or the length limit cuts the round, so the last round may accept tokens
beyond the answer; what the target says there is asked of the target, for the few samples whose chain gets so far.

Shapes: T a sample's rows, A width of the taps, R its rounds' possible rows, S steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.shards import CaptureReader, Sample
from eyas.errors import InputError
from eyas.models.checkpoint import has_info, load_draft, look_at, read_info
from eyas.models.draft import Draft
from eyas.models.fitting import check_identity
from eyas.models.target import Target, load_target
from eyas.models.vocab import target_ids
from eyas.progress import Progress
from eyas.recipe import EvaluateSettings, TargetSettings
from eyas.run import read_manifest
from eyas.training.inputs import check_draft, finite
from eyas.training.loss import unroll
from eyas.training.rows import Rows
from eyas.training.teacher import Teacher

Continue = Callable[[list[int], int], list[int]]
"""(ids, how many): the target's own greedy continuation."""


@dataclass(frozen=True)
class Chains:
    """The drafts from every row of one sample at which a round may start: `first` .. the last but one answer token."""

    first: int
    hits_RS: Tensor
    """Whether the drafted token is the target's argmax."""
    onward_RS: Tensor
    """Whether, after it, the true path goes on as the target's argmax (always, on greedy answers)."""
    known_RS: Tensor
    """Whether the target's argmax is known there: beyond the answer it is once the target was asked."""
    inside_RS: Tensor
    """Whether the drafted token is one of the answer's: what the means over rows count."""

    def joint(self) -> Tensor:
        """Whether this and every earlier step of the row is a hit on the true path, [R, S]."""
        clear_RS = torch.cat([torch.ones_like(self.onward_RS[:, :1]), self.onward_RS[:, :-1]], dim=1)
        return (self.hits_RS & clear_RS).int().cumprod(dim=1).bool()


@torch.no_grad()
def chains(
    draft: Draft, sample: Sample, argmax_T: Tensor, steps: int, beyond: list[int] | None = None
) -> Chains | None:
    """Draft `steps` tokens from every possible row of `sample`; None where no round can start.

    `argmax_T` [T] is the target's prediction after each row; `beyond`, where the target was asked, what follows the
    token after the answer. Raises InputError for a mask that is not one answer, at the end of its sample.
    """
    answer = sample.loss_mask_T.bool().nonzero()[:, 0]
    ids, length = sample.ids_T.to(torch.int64), len(sample.ids_T)
    if len(answer) < 2:
        return None
    if len(answer) != length - int(answer[0]):
        raise InputError(
            wanted="one answer, at the end of its sample: chains are drafted as a server drafts them, from a prompt on",
            got=f"{length - int(answer[0]) - len(answer)} unmarked tokens after the first marked one, in {sample.id}",
            where="captures: loss_mask",
            next="capture each turn as a sample of its own, as eyas respond and eyas capture do",
        )
    rows_R = torch.arange(int(answer[0]) - 1, length - 2)
    rows_R = rows_R[rows_R >= 0]
    after = [int(argmax_T[-1]), *(beyond or [])]
    following = torch.tensor(after + [0] * steps)
    path = torch.cat([ids, following])
    truth = torch.cat([argmax_T, following[1:]])
    at_RS = rows_R[:, None] + 1 + torch.arange(steps)
    rows = Rows((0, length), torch.arange(length), (rows_R,) * steps, (torch.arange(len(rows_R)),) * steps)
    device = draft.fc.weight.device
    hidden = unroll(draft, sample.taps_TA.float().to(device), path.to(device), rows.to(device))
    drafted_RS = torch.stack([draft.target_ids(draft.logits(states).argmax(-1)) for states in hidden], dim=1).cpu()
    known_RS = at_RS < length + len(after) - 1
    hits_RS = (drafted_RS == truth[at_RS]) & known_RS
    return Chains(
        first=int(rows_R[0]),
        hits_RS=hits_RS,
        onward_RS=truth[at_RS] == path[at_RS + 1],
        known_RS=known_RS,
        inside_RS=at_RS + 1 < length,
    )


def walk(found: Chains, steps: int) -> list[int] | None:
    """Accepted tokens of each round with chains of `steps`; None where a chain outran what is known."""
    accepted_R = found.joint()[:, :steps].sum(dim=1).tolist()
    known_R = found.known_RS[:, :steps].sum(dim=1).tolist()
    rounds: list[int] = []
    row = 0
    while row < len(accepted_R):
        if accepted_R[row] == known_R[row] < steps:
            return None
        rounds.append(accepted_R[row])
        row += accepted_R[row] + 1
    return rounds


@torch.no_grad()
def continuation(target: Target, ids: list[int], count: int) -> list[int]:
    """`count` tokens that the target itself would go on with."""
    ids = list(ids)
    for _ in range(count):
        states = target.backbone(input_ids=torch.tensor([ids], device=target.model.device)).last_hidden_state
        ids.append(int(target.logits(states[:, -1:]).float().argmax()))
    return ids[len(ids) - count :]


EDGES = torch.tensor([256 << power for power in range(16)])
"""Context lengths at which a bucket of `by_length` begins; the first is what lies below 256."""


class ByLength:
    """Acceptance by how long the context was, in tokens, when a chain was drafted from it."""

    def __init__(self, steps: int) -> None:
        buckets = len(EDGES) + 1
        self.rows, self.joint = (torch.zeros(buckets, steps, dtype=torch.int64) for _ in range(2))
        self.rounds, self.accepted = (torch.zeros(buckets, dtype=torch.int64) for _ in range(2))

    def add(self, found: Chains, rounds: list[int]) -> None:
        """One sample's chains, and its rounds at the longest chain."""
        bucket_R = torch.bucketize(found.first + 2 + torch.arange(len(found.hits_RS)), EDGES, right=True)
        self.rows.index_add_(0, bucket_R, found.inside_RS.long())
        self.joint.index_add_(0, bucket_R, (found.joint() & found.inside_RS).long())
        accepted = torch.tensor(rounds, dtype=torch.int64)
        at = bucket_R[(accepted + 1).cumsum(0) - accepted - 1]
        self.rounds.index_add_(0, at, torch.ones_like(at))
        self.accepted.index_add_(0, at, accepted)

    def result(self) -> list[dict[str, Any]]:
        """The buckets that hold a row, shortest first: `from` tokens up to but not `to`."""
        return [
            {
                "from": 0 if bucket == 0 else int(EDGES[bucket - 1]),
                "to": int(EDGES[bucket]) if bucket < len(EDGES) else None,
                "rows": int(self.rows[bucket, 0]),
                "accept_length": round(1 + sum(_shares(self.joint[bucket], self.rows[bucket])), 6),
                "rounds": int(self.rounds[bucket]),
                "accept_length_walk": round(1 + int(self.accepted[bucket]) / int(self.rounds[bucket]), 6)
                if self.rounds[bucket]
                else None,
            }
            for bucket in self.rows[:, 0].nonzero()[:, 0].tolist()
        ]


class Tally:
    """Sums over samples, and the figures made of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.samples = self.tokens = self.off_path = 0
        self.rows, self.hits, self.joint, self.eligible = (torch.zeros(steps, dtype=torch.int64) for _ in range(4))
        self.rounds: list[list[int]] = [[] for _ in range(steps)]
        self.by_length = ByLength(steps)

    def add(self, sample: Sample, found: Chains | None, rounds: list[list[int]]) -> None:
        """Add one sample: its chains, and its rounds for chains of 1..steps."""
        self.samples += 1
        self.tokens += int(sample.loss_mask_T.sum())
        if found is None:
            return
        joint, inside = found.joint() & found.inside_RS, found.inside_RS
        before = torch.cat([torch.ones_like(joint[:, :1]), joint[:, :-1]], dim=1)
        self.rows += inside.sum(0)
        self.hits += (found.hits_RS & inside).sum(0)
        self.joint += joint.sum(0)
        self.eligible += (before & inside).sum(0)
        self.off_path += int((~found.onward_RS[:, 0]).sum())
        for all_rounds, some in zip(self.rounds, rounds, strict=True):
            all_rounds.extend(some)
        self.by_length.add(found, rounds[-1])

    def merge(self, other: "Tally") -> None:
        """Add what another process counted over other samples."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.off_path += other.off_path
        for mine, theirs in zip(self.counts, other.counts, strict=True):
            mine += theirs
        for mine, theirs in zip(self.rounds, other.rounds, strict=True):
            mine.extend(theirs)

    @property
    def counts(self) -> tuple[Tensor, ...]:
        by = self.by_length
        return self.rows, self.hits, self.joint, self.eligible, by.rows, by.joint, by.rounds, by.accepted

    def result(self, greedy: bool) -> dict[str, Any]:
        """The figures of docs/commands.md."""
        survival = _shares(self.joint, self.rows)
        longest = self.rounds[-1]
        return {
            "accuracy": _shares(self.hits, self.rows),
            "conditional_acceptance": _shares(self.joint, self.eligible),
            "survival": survival,
            "accept_length": round(1 + sum(survival), 6),
            "accept_length_walk": _accept_length(longest),
            "walk_by_steps": [_accept_length(rounds) for rounds in self.rounds],
            "walk_survival": [
                round(sum(accepted > step for accepted in longest) / max(1, len(longest)), 6)
                for step in range(self.steps)
            ],
            "walk_exact": greedy and self.off_path == 0,
            "off_path": self.off_path,
            "rounds": len(longest),
            "rows": int(self.rows[0]),
            "by_length": self.by_length.result(),
            "samples": self.samples,
            "steps": self.steps,
            "tokens": self.tokens,
        }


def _shares(part: Tensor, whole: Tensor) -> list[float]:
    return [round(value, 6) for value in (part / whole.clamp(min=1)).tolist()]


def _accept_length(rounds: list[int]) -> float | None:
    return 1 + sum(rounds) / len(rounds) if rounds else None


def evaluate(
    draft: Path,
    captures: Path,
    settings: EvaluateSettings | None = None,
    target: TargetSettings | None = None,
    split: str = "heldout",
) -> dict[str, Any]:
    """Acceptance of `draft` on the `split` samples of `captures` (`heldout`, `train`, or `all` of them), no engine.

    Per step `accuracy` (hits), `conditional_acceptance` (hits where every earlier step hit), `survival` (joint
    prefixes); `accept_length` = 1 + sum of survival, over rows; `accept_length_walk`, over the engine's rounds
    (`walk_exact` false, and so an estimate, on sampled answers and where the answer left the target's argmax, as often
    as `off_path` says); `walk_by_steps`, the same for chains of 1, 2, ...; `by_length`, both by context length; counts.
    Raises InputError for captures of another target, boundaries, tokenizer or template, and for a split without
    samples.
    """
    settings, named = settings or EvaluateSettings(), target or TargetSettings()
    refuse_early(draft, captures)
    manifest, reader = read_manifest(captures, "captures"), CaptureReader(captures)
    loaded = load_target(named.name, trust_remote_code=named.trust_remote_code)
    module, info = load_draft(draft, loaded.embedding, torch.float32)
    check_draft(info, reader.boundaries, manifest.facts, captures)
    check_identity(loaded.identity, info.target, draft, "give --target, the draft's own")
    chosen = [index for index, sample in enumerate(reader.samples) if split in ("all", sample.split)]
    if not chosen:
        raise InputError(
            wanted=f"captured samples of the {split} split",
            got=f"none among {len(reader.samples)}",
            where=str(captures),
            next="--split train, or make prompts with prompts.heldout of at least 1",
        )
    teacher = Teacher(loaded, target_ids(module.d2t), reader.last_hidden_norm)
    tally = Tally(settings.steps)
    with Progress("evaluate", len(chosen), "samples") as bar:
        for index in chosen:
            add_sample(tally, module, reader.read(index), teacher)
            bar.advance(1)
    return {"split": split, **tally.result(reader.greedy)}


def refuse_early(draft: Path, captures: Path) -> None:
    """Raise InputError where `evaluate` would for what the draft and the captures say of themselves."""
    manifest = read_manifest(captures, "captures")
    look_at(draft)
    if has_info(draft):
        check_draft(read_info(draft), manifest.facts["boundaries"], manifest.facts, captures)


@dataclass
class Truth:
    """What the target says along one sample: asked once, however many drafts are held against it."""

    argmax_T: Tensor
    beyond: list[int] | None = None
    """What follows the token after the answer; None until a chain gets there."""


@torch.no_grad()
def truth_of(sample: Sample, teacher: Teacher) -> Truth:
    """Raises InputError for a sample whose states are not finite."""
    finite([sample])
    return Truth(teacher.argmax(sample.last_hidden_TH))


def add_sample(tally: Tally, draft: Draft, sample: Sample, teacher: Teacher, truth: Truth | None = None) -> None:
    """Chains and rounds of one sample; the target is asked beyond the answer only where a chain gets there."""
    steps = tally.steps
    truth = truth or truth_of(sample, teacher)
    found = chains(draft, sample, truth.argmax_T, steps, truth.beyond)
    if found is None:
        tally.add(sample, None, [])
        return
    rounds = [walk(found, depth) for depth in range(1, steps + 1)]
    if any(some is None for some in rounds):
        truth.beyond = continuation(teacher.target, [*sample.ids_T.tolist(), int(truth.argmax_T[-1])], steps)
        asked = chains(draft, sample, truth.argmax_T, steps, truth.beyond)
        assert asked is not None, "the same sample"
        found, rounds = asked, [walk(asked, depth) for depth in range(1, steps + 1)]
    complete = [some for some in rounds if some is not None]
    assert len(complete) == steps, "the target was asked far enough"
    tally.add(sample, found, complete)
