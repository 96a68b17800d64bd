"""Sections of what runs a draft: bench, chat, trace, server."""

from typing import Literal

from pydantic import Field, field_validator

from eyas.formats.engines import parse_engine
from eyas.settings import DraftingSettings, SamplingSettings, Section, section


class BenchSettings(DraftingSettings, SamplingSettings):
    """Plain against speculative decoding, paired."""

    prompts: str = "test"
    """`test` (the built-in natural test set), `heldout`, or a JSONL file."""
    limit: int | None = Field(default=24, ge=1)
    """Prompts used; none means all."""
    max_new_tokens: int = Field(default=96, ge=2)
    """Tokens generated a prompt; the first comes from the prefill and is not timed."""
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """`auto` measures which of float32 and bfloat16 is faster; `int8` rounds bfloat16 weights once more, a scale an
    output. Equality of outputs is measured in float32 whatever this says."""
    draft_precision: Literal["target", "float32", "bfloat16", "int8"] = "target"
    """The precision of the draft's weights; `target` is the target's."""
    repeats: int = Field(default=1, ge=1)
    """Times each prompt is decoded each way, order alternating."""
    equality_limit: int = Field(default=8, ge=0)
    """Prompts whose float32 outputs are compared token for token."""

    @property
    def drafting(self) -> DraftingSettings:
        return section(DraftingSettings, self)

    @property
    def sampling(self) -> SamplingSettings:
        return section(SamplingSettings, self)


class ChatSettings(SamplingSettings):
    """A conversation in the terminal."""

    draft: str | None = None
    """The draft's folder, or `shipped`; none takes the draft that comes with Eyas on the target that it is for, and
    else drafts by n-grams alone."""
    plain: bool = False
    """The target alone: nothing drafts, unless --ngram says so."""
    system: str | None = None
    """The system message; none leaves it to the target's template."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens of one answer at most."""
    temperature: float = Field(default=0.7, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Draw among the fewest most likely tokens whose probabilities reach this sum."""
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Of the engine in this process."""
    num_steps: int = Field(default=3, ge=0, le=64)
    """Levels drafted a round at most; how many pay is measured. 0 decodes plainly."""
    ngram: int | None = Field(default=None, ge=0, le=16)
    """Also draft what followed so many of the last tokens before; 0 is off, none means 4, or 0 where plain."""
    marks: bool = False
    """Underline the text whose tokens were drafted and stood."""

    @property
    def ngrams(self) -> int:
        """The longest n-gram that drafts; 0: none does."""
        return self.ngram if self.ngram is not None else 0 if self.plain else 4

    @property
    def sampling(self) -> SamplingSettings:
        return section(SamplingSettings, self)


class TraceSettings(Section):
    """How the embedded engine is traced."""

    prompt: str | None = None
    """What the target is asked; None: the prompts of a file."""
    prompts: str = "test"
    """`test` (the built-in test set), a prompts folder, or a JSONL file, where no prompt is given."""
    limit: int = Field(default=1, ge=1)
    """Prompts traced, spread evenly over the file."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Answer length limit in tokens."""
    num_steps: int = Field(default=3, ge=1, le=64)
    """Drafted tokens a round."""
    tensors: bool = False
    """Keep the tensors too, not only their statistics: what `eyas check --trace` compares."""
    calls: int = Field(default=64, ge=1)
    """Forwards of the target after which nothing more is recorded."""

    @field_validator("prompt")
    @classmethod
    def _has_words(cls, prompt: str | None) -> str | None:
        if prompt is not None and not prompt.strip():
            raise ValueError("a prompt with words in it")
        return prompt


class ServeSettings(Section):
    """A server: which engine, in which Python, with which draft and flags."""

    engine: str = "embedded"
    """`embedded`, `sglang` or `vllm`; `sglang@0.5.23` to hold preflight to a release other than the installed one."""
    python: str | None = None
    """The interpreter that has the engine; none means the one that runs Eyas."""
    draft: str | None = None
    """The draft's export folder, hub id, or `shipped`; none means runs/NAME/export where it is complete, else the draft
    that comes with Eyas on the target that it is for."""
    plain: bool = False
    """Serve the target without a draft: the baseline."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port; none means the engine's own (SGLang 30000, others 8000)."""
    num_steps: int | None = Field(default=None, ge=1, le=64)
    """Drafted tokens in depth; none means the draft's trained length (its `eyas` block), else 3."""
    topk: int = Field(default=1, ge=1)
    """Branches a step: 1 is a chain; vLLM knows chains only."""
    num_draft_tokens: int | None = Field(default=None, ge=2)
    """Tokens verified a round; none means num_steps + 1 for a chain and as many as fit, at most 8, for a tree."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs the target is split over."""
    engine_args: tuple[str, ...] = ()
    """Passed through as they are; what contradicts the settings above is refused by name."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment added for the engine."""
    trace: bool = False
    """Record what the engine captures and feeds its draft (docs/trace.md); disables graphs, so it is slow."""
    give_up_s: float = Field(default=600.0, gt=0)
    """Seconds a start may stay stuck before it is stopped and the command fails."""

    @field_validator("engine")
    @classmethod
    def _known(cls, name: str) -> str:
        if name != "embedded" and parse_engine(name).name not in ("sglang", "vllm"):
            raise ValueError(f"{name} cannot be served: embedded, sglang or vllm")
        return name
