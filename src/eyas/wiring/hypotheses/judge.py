"""Every wiring measured, compared with the declared one, and what follows: a finding, nothing, or 'cannot be told'."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.progress import Progress
from eyas.wiring.findings import Finding
from eyas.wiring.hypotheses.compare import NATS, Effect, level, paired
from eyas.wiring.hypotheses.measure import Outcome, Rig
from eyas.wiring.hypotheses.wirings import ANEW, DECLARED, Wiring

TELLING = "token_shift"
"""A draft that does not mind which token it embeds is too weak, or too broken, for any wiring to be told by it."""

SAME = 1e-3
"""Nats below which two wirings are one, save for rounding."""


LEARNED = 0.1
"""A draft that is right in fewer rows than this under every wiring has not learned any: no finding rests on it."""


@dataclass(frozen=True)
class Trial:
    """One wiring that was tried."""

    wiring: Wiring
    outcome: Outcome
    effect: Effect
    """Over the declared wiring; of taps computed anew also over the declared ones computed anew, whichever is less."""

    @property
    def same(self) -> bool:
        """Whether it computes what the declared wiring does: rotary attention sees differences of positions only."""
        return self.effect.high - self.effect.low < SAME and abs(self.effect.nats) < SAME

    @property
    def as_dict(self) -> dict[str, Any]:
        outcome, effect = self.outcome, self.effect
        return {
            "wiring": self.wiring.name,
            "code": self.wiring.code,
            "loss": [round(value, 4) for value in outcome.mean_loss],
            "accuracy": [round(value, 4) for value in outcome.accuracy],
            "accept_length": round(outcome.accept_length, 4),
            "effect": round(effect.nats, 4),
            "low": round(effect.low, 4),
            "high": round(effect.high, 4),
            "told": "better" if effect.better else "worse" if effect.worse else "no",
        }


@dataclass(frozen=True)
class Verdict:
    """What the trials show together."""

    declared: Trial
    others: list[Trial]
    documents: int
    rows: int
    best: Trial | None = None
    """The wiring the draft was made for, where that is not the declared one."""
    rivals: list[Trial] = field(default_factory=list)
    """Wirings that explain the rows as well as the best."""

    @property
    def untold(self) -> list[Trial]:
        """Wirings that the loss cannot tell from the declared one; those that compute the same are not among them."""
        return [one for one in self.others if one.effect.untold and one.wiring.name != ANEW and not one.same]

    @property
    def telling(self) -> bool:
        """Whether this draft can show anything: it must mind the token that it embeds."""
        shifted = [trial for trial in self.others if trial.wiring.token]
        return self.best is not None or all(trial.effect.worse for trial in shifted)


def judge(rig: Rig, wirings: Sequence[Wiring]) -> Verdict:
    """Measure `wirings`, the declared one first, and name the one that explains the rows best."""
    outcomes = {}
    with Progress("check: hypotheses", len(wirings), "wirings") as bar:
        for wiring in wirings:
            outcomes[wiring.name] = rig.measure(wiring)
            bar.advance(1)
    return weigh(wirings, outcomes, rig.document, math.log(rig.parts.config.vocab_size))


def weigh(
    wirings: Sequence[Wiring], outcomes: dict[str, Outcome], document: list[torch.Tensor], guess: float
) -> Verdict:
    """The verdict over measured outcomes; `document` [R[s]] a step says whose row each is; `guess`: log vocabulary."""
    assert wirings[0].name == DECLARED, "the declared wiring comes first"
    steps = range(len(document))
    leveled = [level({name: outcome.loss[step] for name, outcome in outcomes.items()}, guess) for step in steps]

    def effect(over: str, wiring: Wiring, every_step: bool = False) -> Effect:
        steps = slice(wiring.from_step, None if wiring.from_step else 1) if not every_step else slice(None)
        loss = [torch.cat([step[name] for step in leveled[steps]]) for name in (over, wiring.name)]
        return paired(loss[0], loss[1], torch.cat(document[steps]))

    trials = []
    for wiring in wirings:
        found = effect(DECLARED, wiring)
        if wiring.blocks is not None and wiring.name != ANEW and ANEW in outcomes:
            found = min(found, effect(ANEW, wiring), key=lambda one: one.nats)
        trials.append(Trial(wiring, outcomes[wiring.name], found))
    declared, others = trials[0], trials[1:]
    better = [
        trial
        for trial in others
        if trial.effect.better and more_hits(trial, declared) and leans_on_its_token(trial, others)
    ]
    rows, documents = len(document[0]), len(document[0].unique())
    if not better:
        return Verdict(declared, others, documents, rows)
    first = max(better, key=lambda trial: effect(DECLARED, trial.wiring, every_step=True).nats)

    def as_good(trial: Trial) -> bool:
        return not effect(trial.wiring.name, first.wiring, every_step=True).better

    equals = sorted((trial for trial in better if trial is first or as_good(trial)), key=plainest)
    return Verdict(declared, others, documents, rows, equals[0], equals[1:])


def plainest(trial: Trial) -> tuple[int, float]:
    """Of wirings that explain the rows as well, what needs no other states is likelier, then what is better."""
    wiring = trial.wiring
    return (0 if wiring.blocks is None else 1 if wiring.name == ANEW else 2), -trial.effect.nats


def more_hits(trial: Trial, declared: Trial) -> bool:
    """A wiring the draft was made for drafts better too. A weak draft's loss may fall where its drafts get worse."""
    step = trial.wiring.from_step
    accuracy = trial.outcome.accuracy[step]
    return accuracy >= LEARNED and accuracy > declared.outcome.accuracy[step]


def leans_on_its_token(trial: Trial, others: Sequence[Trial]) -> bool:
    """Whether later states are more than a peep at the answer.

    The state of token t + 1 knows token t + 2 better whatever a draft has learned, most of all one that started from
    the target's own head. Of a draft made for other states its token still matters more than what they bring.
    """
    if trial.wiring.hidden <= 0:
        return True
    costs = [-other.effect.nats for other in others if other.wiring.token and not other.wiring.hidden]
    return all(cost >= trial.effect.nats for cost in costs)


def describe(trial: Trial) -> str:
    """A wiring's figures in a line; those of the steps that tell it."""
    outcome, step = trial.outcome, trial.wiring.from_step
    return (
        f"{trial.wiring.name}: loss {outcome.mean_loss[step]:.2f} nats, accuracy {outcome.accuracy[step]:.2f}, "
        f"accept length {outcome.accept_length:.2f}"
    )


def finding_of(verdict: Verdict, name_captures: Callable[[], list[Finding]]) -> list[Finding]:
    """The finding of the best wiring. `name_captures` says what captured taps are that the target does not give."""
    best = verdict.best
    if best is None:
        return []
    if best.wiring.name == ANEW:
        return name_captures() or [captures_finding(verdict, best)]
    assert best.wiring.code is not None, "a near-miss has a code"
    at = Trial(verdict.declared.wiring, verdict.declared.outcome, best.effect)
    step = best.wiring.from_step
    figures = (verdict.declared.outcome.mean_loss[step], verdict.declared.outcome.accuracy[step])
    also = f" As good: {', '.join(one.wiring.name for one in verdict.rivals)}." if verdict.rivals else ""
    return [
        Finding(
            code=best.wiring.code,
            severity="error",
            where=best.wiring.where,
            expected=describe(best),
            found=f"{DECLARED}: loss {figures[0]:.2f} nats, accuracy {figures[1]:.2f}, "
            f"accept length {at.outcome.accept_length:.2f}",
            fix=best.wiring.fix,
            message=f"Over {verdict.rows} rows of {verdict.documents} documents the draft was made for "
            f"{best.wiring.name}: {best.effect.words()} better a row than as declared.{also}",
        )
    ]


def captures_finding(verdict: Verdict, best: Trial) -> Finding:
    """The target's own states serve the draft better than the captured ones, and nothing names those."""
    return Finding(
        code="quantization_mismatch",
        severity="error",
        where="captures: taps",
        expected=describe(best),
        found=describe(verdict.declared),
        fix="capture again from the target, weights and precision that will be served",
        message=f"The target's own states give {best.effect.words()} a row over the captured ones.",
    )


def evidence(verdict: Verdict) -> str:
    """What was tried, in a line or two."""
    ruled_out = [trial for trial in verdict.others if trial.effect.worse]
    parts = [
        f"{verdict.rows} rows of {verdict.documents} documents, {len(verdict.others)} other wirings tried",
        describe(verdict.declared),
    ]
    if verdict.best is not None:
        parts.append(f"better: {describe(verdict.best)}")
    if ruled_out:
        nearest = max(ruled_out, key=lambda trial: trial.effect.nats)
        costs = f"{len(ruled_out)} cost {-nearest.effect.nats:.2f} nats ({nearest.wiring.name}) or more"
        parts.append(costs)
    if verdict.untold:
        names = ", ".join(trial.wiring.name for trial in verdict.untold)
        parts.append(f"loss cannot tell (under {NATS} nats, or unsure): {names}")
    return "; ".join(parts)
