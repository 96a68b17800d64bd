"""Settings that recipe and engine share: the base of every section, how tokens are drafted, how they are chosen."""

from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A frozen section whose unknown keys are errors, as are numbers that JSON has no word for (infinity, nan)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Help and reference pages break lines where they want."""
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


Kind = TypeVar("Kind", bound=Section)


def section(kind: type[Kind], settings: Section) -> Kind:
    """The part of `settings` that belongs to `kind`, which it extends."""
    return kind(**{name: getattr(settings, name) for name in kind.model_fields})


def parts_of(value: Any) -> list[Any]:
    """`"2,15"`, `["2,15", 27]` or `[[2, 15], 27]`, one by one: lists as people type them, and as flags are repeated."""
    if isinstance(value, str):
        return [part for part in value.strip("[] ").split(",")]
    return [part for item in value for part in parts_of(item)] if isinstance(value, list | tuple) else [value]


Share = Annotated[float, Field(ge=0, le=1)]


class DraftingSettings(Section):
    """How tokens are drafted: chain or tree, how deep, by whom."""

    num_steps: int | None = Field(default=None, ge=1, le=64)
    """Levels drafted a round, the depth of chain or tree; none picks it from measured survival and step costs."""
    topk: int = Field(default=1, ge=1, le=64)
    """Branches a node: 1 drafts a chain, more a tree."""
    num_draft_tokens: int | None = Field(default=None, ge=2, le=256)
    """Rows of a verify forward, the last verified token included (as SGLang counts). A chain has num_steps + 1; none
    gives a tree at most 8."""
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """Tokens whose path is less probable than this, by the draft's own word, are neither verified nor drafted on."""
    adaptive: bool = False
    """Let the depth follow what was lately accepted and what rounds cost, from num_steps down to plain decoding."""
    ngram: int = Field(default=0, ge=0, le=16)
    """Also draft what followed the latest earlier occurrence of the last tokens, up to this many of them, and 2 at the
    least (but 1 looks for single tokens): used where it was lately the better guess. 0 is off."""
    simulate: tuple[Share, ...] | None = None
    """Accept drafted tokens by this survival curve and not by the target: what a draft so good would bring, as
    0.7,0.4,0.2. THE TEXTS ARE INVALID. Stop tokens are ignored."""

    @field_validator("simulate", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return value if value is None else parts_of(value)

    @model_validator(mode="after")
    def _fits(self) -> "DraftingSettings":
        if self.topk == 1 and self.num_draft_tokens and not self.num_steps:
            raise ValueError(
                "a chain (topk 1) is as long as num_steps says; num_draft_tokens shapes a tree (topk 2 or more)"
            )
        if self.topk == 1 and self.num_steps and self.num_draft_tokens not in (None, self.num_steps + 1):
            raise ValueError(f"a chain (topk 1) of {self.num_steps} steps has {self.num_steps + 1} num_draft_tokens")
        if self.topk > 1 and self.num_steps and self.num_draft_tokens:
            most = 1 + self.topk + (self.num_steps - 1) * self.topk**2
            if self.num_draft_tokens > most:
                raise ValueError(
                    f"a tree of topk {self.topk} and {self.num_steps} steps has {most} num_draft_tokens at most, the "
                    "last verified token included (as in SGLang)"
                )
        if any(later > earlier for earlier, later in pairwise(self.simulate or ())):
            raise ValueError(f"a survival curve never rises: {self.simulate}")
        return self

    def rows(self, num_steps: int) -> int:
        """Rows of a verify forward at a depth, the last verified token's included."""
        if self.topk == 1:
            return num_steps + 1
        candidates = self.topk + (num_steps - 1) * self.topk**2
        return 1 + min(candidates, (self.num_draft_tokens or 8) - 1)


class SamplingSettings(Section):
    """Which token is chosen, in Hugging Face's order: bias, penalties, temperature, top-k, top-p, min-p, draw."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy (ties go to the lowest id); the filters below it are then without effect."""
    top_k: int = Field(default=0, ge=0)
    """Draw among the k most likely tokens, with those equal to the k-th; 0 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the fewest most likely tokens whose probabilities reach this sum."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Draw among tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive and multiplies negative logits of the tokens of prompt and text so far."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token of the text so far."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as the text so far holds it."""
    logit_bias: dict[str, float] = {}
    """Token id (text, as keys of TOML and JSON are) to what is added to its logit, before anything else."""
    seed: int = 0
    """The same seed gives the same text for a prompt, drafted or not."""

    @field_validator("logit_bias")
    @classmethod
    def _of_tokens(cls, biases: dict[str, float]) -> dict[str, float]:
        for token in biases:
            if not token.isdecimal():
                raise ValueError(f"{token!r} is no token id")
        return biases

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def biases(self) -> dict[int, float]:
        return {int(token): bias for token, bias in self.logit_bias.items()}

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the choice, so that the plain argmax is not the greedy token."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)
