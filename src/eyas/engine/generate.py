"""The embedded engine: a text is begun, goes on round by round, and ends.

A round is: propose, verify in one forward of the target, judge, keep the rows that stand, tell the proposer. Plain
decoding is the same round with nothing drafted: both run the same forward over the same row bucket, so a row's logits
have the same bits in both and so has the text (docs/engine.md).
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.compose import compose
from eyas.engine.costs import RoundCosts
from eyas.engine.forward import Forward
from eyas.engine.graphed_draft import GraphedDraft
from eyas.engine.graphed_forward import GraphedForward
from eyas.engine.graphs import Recording, recording_for
from eyas.engine.linear import KERNELS, uninstall
from eyas.engine.propose import Proposer
from eyas.engine.rows import Verified
from eyas.engine.sampling import Sampler
from eyas.engine.settle import layer_linears
from eyas.engine.spans import NoSpans
from eyas.engine.start import start
from eyas.engine.text import Generation, Text
from eyas.engine.trace import EngineTrace
from eyas.engine.tree import Tree
from eyas.engine.verify import CurveJudge, TargetJudge, Verdict, cut
from eyas.errors import InputError
from eyas.formats.trace import TraceRequest
from eyas.models.draft import Draft
from eyas.models.target import DTYPES, Target
from eyas.progress import say
from eyas.settings import DraftingSettings, SamplingSettings

GREEDY = SamplingSettings()


class Engine:
    """A target, and a draft if any, ready to generate.

    `drafting` says what is drafted and how deep at most, which fixes the row bucket (None: a chain of `num_steps`, by
    the draft if there is one). `costs` are what an adaptive depth is chosen by (None: measured here). `draft_dtype`
    None is the target's; `int8` and `draft_int8` round weights to eight bits. `kernels` "auto" compiles or measures,
    "torch" is the plain path with F.linear. `cache_rows` bounds the caches (None: as large as a text needs). `trace`
    (None: as EYAS_TRACE says) records every stage, of the plain path, until close(). `recording` says how steps of the
    plain path are recorded and replayed (None: as CUDA graphs on CUDA, else not). The target's modules are used in
    place (attention and linears may be exchanged), so one engine at a time owns a target: close() gives it back. Raises
    InputError for a draft that does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        num_steps: int = 1,
        drafting: DraftingSettings | None = None,
        kernels: str = "auto",
        int8: bool = False,
        draft_int8: bool = False,
        announce: bool = True,
        trace: TraceRequest | None = None,
        cache_rows: int | None = None,
        draft_dtype: torch.dtype | None = None,
        costs: RoundCosts | None = None,
        recording: Recording | None = None,
    ) -> None:
        _check_choices(kernels, draft_dtype, cache_rows)
        self.target, self.cache_rows = target, cache_rows
        drafting = drafting or DraftingSettings(num_steps=num_steps)
        self.num_steps = drafting.num_steps or num_steps
        self.drafting = drafting.model_copy(update={"num_steps": self.num_steps})
        self.rows = drafting.rows(self.num_steps)
        request = trace or TraceRequest.from_environment()
        boundaries = () if draft is None else draft.config.boundaries
        plain = None if request is None else "a trace hooks on modules"
        self._linears = [*layer_linears(target), target.head]
        self.trace: EngineTrace | None = None
        self.spans = NoSpans()
        self.forward: Forward
        recording = None if plain else recording or recording_for(target.model.device, cache_rows)
        with torch.inference_mode():
            self.forward, self.facts = start(
                target, boundaries, self.rows, kernels=kernels, int8=int8, plain=plain, recording=recording
            )
        try:
            with torch.inference_mode():
                made = compose(self.forward, draft, self.drafting, kernels, costs, draft_dtype, draft_int8, recording)
            runner = None if made.draft is None else made.draft.forward
            self.proposer: Proposer | None = made.proposer
            self.costs = made.costs
            self._linears += made.linears
            graphs = [part.graphs for part in (self.forward, runner) if isinstance(part, GraphedForward | GraphedDraft)]
            self.graphs = [found for found in graphs if found is not None]
            """Recorded steps of target and draft; `on` rests them."""
            self.trace = None if request is None else EngineTrace(request, self.forward, made.draft)
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
        sampling: SamplingSettings = GREEDY,
    ) -> Generation:
        """Continue `prompt_ids`; `num_steps` levels drafted a round at most, 0 for plain decoding.

        `padded` False lets plain decoding run single rows whatever the bucket: the other baseline, whose text may part
        at near ties. Raises InputError for an empty prompt, one that fills the context or the cache, no new tokens,
        drafting without a draft or deeper than the engine was made for.
        """
        bucket = self.forward.rows
        try:
            if not padded and num_steps == 0:
                self.forward.rows = None
            text = self.begin(prompt_ids, max_new_tokens, num_steps, ignore_eos, sampling)
            while text.finish is None:
                self.round(text)
            return text.generation()
        finally:
            self.forward.rows = bucket

    @torch.inference_mode()
    def begin(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        num_steps: int = 0,
        ignore_eos: bool = False,
        sampling: SamplingSettings = GREEDY,
    ) -> Text:
        """Prefill, and the first token. What is raised is generate's."""
        text = self.prepare(prompt_ids, max_new_tokens, num_steps, ignore_eos, sampling)
        if self.trace is not None:
            self.trace.begin()
        self._reserve(self.rows_of(text))
        state, taps = self.forward.prefill(text.prompt)
        self.first(text, self.forward.logits(state), taps)
        return text

    def prepare(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        num_steps: int = 0,
        ignore_eos: bool = False,
        sampling: SamplingSettings = GREEDY,
    ) -> Text:
        """A text that nothing was computed for yet. What is raised is generate's."""
        self._check(prompt_ids, max_new_tokens, num_steps)
        left = self.target.context_length - len(prompt_ids)
        simulate = self.drafting.simulate if num_steps else None
        sampler = Sampler(sampling, prompt_ids, self.target.vocab_size)
        return Text(
            prompt=tuple(prompt_ids),
            limit=min(max_new_tokens, left),
            end="length" if max_new_tokens <= left else "context",
            stop_ids=frozenset() if ignore_eos or simulate else frozenset(self.target.stop_ids),
            judge=CurveJudge(simulate, sampling.seed) if simulate else TargetJudge(sampler),
            proposer=self.proposer if num_steps else None,
            num_steps=num_steps,
            clock=[time.perf_counter()],
        )

    def rows_of(self, text: Text) -> int:
        """Cache rows that `text` may need: prompt, all it may become, and a round."""
        return len(text.prompt) + text.limit + self.rows

    @torch.inference_mode()
    def first(self, text: Text, logits_RV: Tensor, taps: Tensor | None) -> Verdict:
        """The prefill's own token, from the logits of the prompt's last row; `taps` [1, T, A] of the whole prompt."""
        verdict = cut(text.judge.walk(Tree(), logits_RV[-1:]), text.stop_ids, text.limit)
        text.take(verdict)
        text.clock += [time.perf_counter()] * 2
        if text.proposer is not None and text.finish is None:
            text.proposer.begin()
            self._observe(text.proposer, taps, [*text.prompt[1:], text.last], 0)
        return verdict

    @torch.inference_mode()
    def round(self, text: Text) -> Verdict:
        """One forward of the target takes `text` further by one token or more."""
        self.spans.start()
        tree = self.draft(text)
        self.spans.lap("draft")
        states = self.forward.verify([text.last, *tree.tokens], text.position, tree.row_parents)
        logits_RV = self.forward.logits(states)
        self.spans.lap("verify")
        return self.decide(text, tree, logits_RV, self.forward)

    def draft(self, text: Text) -> Tree:
        """What the next round of `text` verifies; an empty tree is a plain step."""
        return Tree() if text.proposer is None else text.proposer.propose(text.num_steps)

    def decide(self, text: Text, tree: Tree, logits_RV: Tensor, verified: Verified) -> Verdict:
        """`text` takes what the target's logits of its last token and of `tree` say; rows that stand are kept."""
        walk = text.judge.walk(tree, logits_RV)
        verdict = cut(walk, text.stop_ids, text.limit - len(text.ids))
        self.spans.lap("sampling")
        if self.trace is not None:
            self.trace.judged(tree, walk, text.position)
        if text.proposer is not None and verdict.finish is None:
            verified.keep(walk.rows)
            taps = verified.taps(walk.rows) if self.forward.boundaries else None
            self._observe(text.proposer, taps, walk.tokens, text.position)
        self.spans.lap("cache")
        text.take(verdict)
        text.rounds.append(verdict)
        text.depths.append(tree.depth)
        text.clock[-1] = time.perf_counter()
        self.spans.lap("host")
        return verdict

    def _observe(self, proposer: Proposer, taps: Tensor | None, ids: Sequence[int], start: int) -> None:
        if self.trace is not None and taps is not None:
            self.trace.observing(taps, start)
        proposer.observe(taps, ids, start)

    def _reserve(self, rows: int) -> None:
        self.forward.cache.reserve(rows)
        if self.proposer is not None:
            self.proposer.reserve(rows)

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int, num_steps: int) -> None:
        context = self.target.context_length
        for name, number in (("max_new_tokens", max_new_tokens), ("num_steps", num_steps)):
            if type(number) is not int:
                raise InputError(wanted="a whole number", got=repr(number), where=name, next=f"{name}=8")
        if max_new_tokens < 1:
            raise InputError(
                wanted="1 new token or more", got=str(max_new_tokens), where="max_new_tokens", next="max_new_tokens=64"
            )
        if not 0 < len(prompt_ids) < context:
            raise InputError(
                wanted=f"a prompt of 1 to {context - 1} tokens (the target's context is {context})",
                got=f"{len(prompt_ids)} tokens",
                where="the prompt",
                next="shorten it" if prompt_ids else "give it at least one token",
            )
        if odd := [token for token in prompt_ids if type(token) is not int]:
            raise InputError(
                wanted="token ids, whole numbers",
                got=f"{type(odd[0]).__name__} ({odd[0]!r})",
                where="the prompt",
                next="tokenizer(text).input_ids, a list; tensor.tolist() of a tensor [T]",
            )
        known = self.target.embedding.shape[0]
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < known:
            raise InputError(
                wanted=f"token ids from 0 to {known - 1}, those that the target has embeddings of",
                got=f"{min(prompt_ids)} to {max(prompt_ids)}",
                where="the prompt",
                next="use the target's own tokenizer (a token added to it later has no embedding)",
            )
        needed = min(len(prompt_ids) + max_new_tokens, context) + self.rows
        if self.cache_rows is not None and needed > self.cache_rows:
            raise InputError(
                wanted=f"a cache of {needed} rows for prompt, new tokens and a round of {self.rows} rows",
                got=f"{self.cache_rows} rows",
                where="the engine's cache",
                next="fewer new tokens, a shorter prompt, or a larger cache_rows",
            )
        if num_steps and self.proposer is None:
            raise InputError(
                wanted="a draft", got="an engine without one", where=f"num_steps={num_steps}", next="--draft DRAFT"
            )
        if not 0 <= num_steps <= self.num_steps:
            raise InputError(
                wanted=f"0 (plain decoding) to {self.num_steps} levels, as deep as this engine was made for",
                got=str(num_steps),
                where="num_steps",
                next=f"num_steps={self.num_steps}, or an engine made with num_steps={max(1, num_steps)}",
            )


def _check_choices(kernels: str, draft_dtype: torch.dtype | None, cache_rows: int | None) -> None:
    if kernels not in ("auto", *KERNELS):
        raise InputError(
            wanted=f"auto, {', '.join(KERNELS)}", got=repr(kernels), where="Engine: kernels", next='kernels="auto"'
        )
    if draft_dtype not in (None, *DTYPES.values()):
        raise InputError(
            wanted=f"{', '.join(DTYPES)}, or None: the target's",
            got=str(draft_dtype),
            where="Engine: draft_dtype",
            next="draft_dtype=torch.bfloat16",
        )
    if cache_rows is not None and cache_rows < 1:
        raise InputError(
            wanted="1 row or more, or None", got=str(cache_rows), where="Engine: cache_rows", next="leave it out"
        )
