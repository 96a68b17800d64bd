"""Sections of what is asked, answered and captured."""

from typing import Any, Literal

from pydantic import Field, field_validator

from eyas.formats.taps import check_boundaries, default_boundaries
from eyas.settings import Section, parts_of

Precision = Literal["auto", "float32", "bfloat16"]


class TargetSettings(Section):
    """The model to be accelerated."""

    name: str = "smollm2-135m-instruct-q4"
    """The embedded default target's name, a Hugging Face folder, or a hub id where there is a network."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


def recorded(settings: Section, target: TargetSettings) -> dict[str, Any]:
    """What a stage that runs the target records of its settings: a resume must share them."""
    return {**settings.model_dump(mode="json"), "target": target.model_dump()}


class PromptsSettings(Section):
    """What the target is asked."""

    source: str = "bank"
    """`bank` (built in), or a JSONL file of messages, conversations (ShareGPT too) or prompts."""
    train: int = Field(default=720, ge=1)
    """Prompts whose answers are trained on."""
    heldout: int = Field(default=64, ge=0)
    """Prompts whose answers are only evaluated; from the bank, neither topic nor task family is shared with train."""
    seed: int = 0
    """The bank's seed, and that of the split of a file."""
    on_error: Literal["skip", "stop"] = "skip"
    """What to do at a line that cannot be used: count it under its reason and go on, or stop with its number."""


class RespondSettings(Section):
    """How the target answers."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Answer length limit in tokens; a cut answer has no end token and none is supervised."""
    batch_size: int = Field(default=64, ge=1)
    """Answers decoded together."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy; the walk (accept length without an engine) needs greedy answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of a sampled answer."""
    seed: int = 0
    """Seed of sampled answers, mixed with the prompt's id: the answer does not depend on its batch's order."""
    precision: Precision = "auto"
    """`auto` measures which is faster on this machine."""


class CaptureSettings(Section):
    """Which hidden states are kept."""

    boundaries: tuple[int, ...] | None = None
    """The taps, as 2,15,27; none means [2, n//2, n-3]."""
    max_length: int = Field(default=2048, ge=8)
    """Longer samples are cut here; one left without a supervised token is skipped and counted."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Tokens in one forward of the target."""
    shard_tokens: int = Field(default=32768, ge=1)
    """Tokens in one shard file; the unit lost by a kill."""
    split: Literal["all", "train", "heldout"] = "all"
    """Which samples: `heldout` is all that evaluation and checks need beside online training."""
    precision: Precision = "auto"
    """The target's arithmetic; `auto` measures."""
    store: Literal["float32", "bfloat16"] = "bfloat16"
    """The stored dtype of the states."""

    @field_validator("boundaries", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return value if value is None else parts_of(value)

    def boundaries_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """The taps: as set, or the default of a target of so many layers. Raises InputError for what it has not."""
        if self.boundaries is None:
            return default_boundaries(num_hidden_layers)
        check_boundaries(self.boundaries, num_hidden_layers, where="capture.boundaries")
        return self.boundaries
