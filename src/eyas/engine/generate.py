"""The embedded engine, first form: batch 1, greedy, a chain of drafted tokens verified in one target forward.

Plain decoding is the same loop with nothing drafted: both run the same forward over the same row bucket, so a row's
logits have the same bits in both and so has the text (docs/engine.md).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.forward import TargetForward
from eyas.engine.linear import uninstall
from eyas.engine.propose import ChainProposer, Proposer, prepared
from eyas.engine.settle import layer_linears, settle
from eyas.engine.trace import EngineTrace
from eyas.engine.verify import Finish, judge
from eyas.errors import InputError
from eyas.formats.trace import TraceRequest
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.progress import say


@dataclass(frozen=True)
class Generation:
    """A finished text. The first of `ids` is the prefill's own token; it belongs to no round."""

    ids: tuple[int, ...]
    finish: Finish
    rounds: tuple[int, ...]
    """Drafted tokens accepted in each round, before a stop token or length limit cut it."""
    rounds_kept: tuple[int, ...]
    """The same after the cut: accepted drafted tokens that were emitted."""
    seconds_prefill: float
    """Until the first token is known."""
    seconds_decode: float
    """All the rest, the draft's own prefill included."""

    @property
    def accept_length(self) -> float | None:
        """Tokens gained a round, bonus included; None where the prefill's token ended the text."""
        return 1 + sum(self.rounds) / len(self.rounds) if self.rounds else None


class Engine:
    """A target, and a draft if any, ready to generate.

    `num_steps` is the longest chain it will be asked for: it fixes the row bucket. `kernels` "auto" measures, "torch"
    keeps F.linear. The target's modules are used in place (attention and linears are exchanged), so one engine at a
    time owns a target: close() gives it back. `trace` (None: as EYAS_TRACE says) records every stage until close().
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        num_steps: int = 1,
        kernels: str = "auto",
        announce: bool = True,
        trace: TraceRequest | None = None,
    ) -> None:
        self.target, self.num_steps = target, num_steps
        boundaries = () if draft is None else draft.config.boundaries
        self.forward = TargetForward(target, boundaries)
        chain = None if draft is None else ChainProposer(prepared(draft, target))
        self.proposer: Proposer | None = chain
        self._linears = [*layer_linears(target), target.head]
        self.trace: EngineTrace | None = None
        try:
            with torch.inference_mode():
                self.facts = settle(self.forward, num_steps + 1, kernels)
                if chain is not None:
                    self._linears += chain.settle(num_steps + 1, kernels)
            request = trace or TraceRequest.from_environment()
            self.trace = None if request is None else EngineTrace(request, self.forward, chain)
        except InputError:
            self.close()
            raise
        if announce:
            say(self.facts.describe())

    def close(self) -> None:
        """Give target and draft their own attention and linears back; complete the trace, if there is one."""
        if self.trace is not None:
            self.trace.close()
            self.trace = None
        self.forward.close()
        uninstall(self._linears)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        num_steps: int = 0,
        ignore_eos: bool = False,
        padded: bool = True,
    ) -> Generation:
        """Continue `prompt_ids` greedily; `num_steps` drafted tokens a round, 0 for plain decoding.

        `padded` False lets plain decoding run single rows whatever the bucket: the other baseline, whose text may part
        at near ties. Raises InputError for an empty prompt, one that fills the context, or a chain without a draft.
        """
        self._check(prompt_ids, max_new_tokens, num_steps)
        room = min(max_new_tokens, self.target.context_length - len(prompt_ids))
        stop_ids = frozenset() if ignore_eos else frozenset(self.target.stop_ids)
        bucket = self.forward.rows
        self._reserve(len(prompt_ids) + room + self.num_steps + 1)
        try:
            if not padded and num_steps == 0:
                self.forward.rows = None
            return self._generate(list(prompt_ids), room, num_steps, stop_ids)
        finally:
            self.forward.rows = bucket

    def _generate(self, prompt: list[int], room: int, num_steps: int, stop_ids: frozenset[int]) -> Generation:
        if self.trace is not None:
            self.trace.begin()
        started = time.perf_counter()
        state, taps = self.forward.prefill(prompt)
        first = int(self.forward.logits(state)[-1].argmax())
        verdict = judge((), (first,), stop_ids, room)
        ids, finish = [first], verdict.finish
        prefilled = time.perf_counter()
        if num_steps and finish is None:
            self._observe(taps, [*prompt[1:], first], 0)
        rounds, kept = [], []
        while finish is None:
            start = len(prompt) + len(ids) - 1
            drafted = self.proposer.propose(num_steps) if self.proposer and num_steps else []
            chosen = self._choose([ids[-1], *drafted], start)
            verdict = judge(drafted, chosen, stop_ids, room - len(ids))
            if self.trace is not None:
                self.trace.judged(drafted, chosen, verdict)
            if drafted and verdict.finish is None:
                stand = verdict.accepted + 1
                self._observe(self.forward.taps()[:, :stand], chosen[:stand], start)
            ids.extend(verdict.tokens)
            rounds.append(verdict.accepted)
            kept.append(min(verdict.accepted, len(verdict.tokens)))
            finish = verdict.finish
        ended = time.perf_counter()
        return Generation(tuple(ids), finish, tuple(rounds), tuple(kept), prefilled - started, ended - prefilled)

    def _choose(self, ids: list[int], start: int) -> list[int]:
        """The target's token after each of `ids`; ties go to the lowest id (torch's argmax)."""
        logits_RV = self.forward.logits(self.forward.verify(ids, start))
        return logits_RV.argmax(dim=-1)[: len(ids)].tolist()

    def _observe(self, taps: Tensor | None, ids: list[int], start: int) -> None:
        assert self.proposer is not None and taps is not None, "drafting needs a draft and its taps"
        if self.trace is not None:
            self.trace.observing(taps, start)
        self.proposer.observe(taps, ids, start)

    def _reserve(self, rows: int) -> None:
        self.forward.cache.reserve(rows)
        if self.proposer is not None:
            self.proposer.cache.reserve(rows)

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int, num_steps: int) -> None:
        context = self.target.context_length
        if not 0 < len(prompt_ids) < context:
            raise InputError(
                wanted=f"a prompt of 1 to {context - 1} tokens (the target's context is {context})",
                got=f"{len(prompt_ids)} tokens",
                where="the prompt",
                next="shorten it",
            )
        if num_steps and self.proposer is None:
            raise InputError(
                wanted="a draft", got="an engine without one", where=f"num_steps={num_steps}", next="--draft DRAFT"
            )
        assert num_steps <= self.num_steps, f"this engine was made for chains of at most {self.num_steps}"
        assert max_new_tokens >= 1, "at least one new token"
