"""What a draft is: the one record every stage shares. Engine dialects of it are made and read in this folder only."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.errors import InputError
from eyas.formats import taps


class TargetIdentity(BaseModel):
    """Which target a draft, a capture or a response set belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Folder name or hub id, for people."""
    revision: str | None = None
    weights_hash: str
    """sha256 over embedding, final norm and head, as float32 bytes: tells re-quantised or re-released weights apart."""
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


class DraftConfig(BaseModel):
    """An EAGLE-3 draft's shape and wiring. Boundaries are the only layer numbering (docs/words.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boundaries: tuple[int, ...]
    """The taps: sorted, unique boundaries of the target whose states feed `fc`, concatenated in this order."""
    target_num_hidden_layers: int
    target_hidden_size: int
    target_model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, float | int | str | bool] | None = None
    max_position_embeddings: int
    """The target's context length: a smaller one is refused by SGLang (serving.md 1.1)."""
    block: Literal["llama", "qwen3", "mla"] = "llama"
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm per tap before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: the next step is fed norm(h) instead of h."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated taps before `fc` (tensor `input_norm`)."""
    norm_before_residual: bool = False
    attention_bias: bool = False
    fc_bias: bool = False
    sliding_window: int | None = None
    own_embedding: bool = False
    """The draft carries an embedding of its own instead of sharing the target's."""
    initializer_range: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "DraftConfig":
        taps.check_boundaries(self.boundaries, self.target_num_hidden_layers, where="draft config: boundaries")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                wanted=f"draft_vocab_size at most the target's vocabulary ({self.vocab_size})",
                got=str(self.draft_vocab_size),
                where="draft config: draft_vocab_size",
                next=f"--set draft.vocab_size={self.vocab_size} or smaller",
            )
        return self

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def taps_width(self) -> int:
        """Width of the concatenated taps: len(boundaries) * target_hidden_size."""
        return len(self.boundaries) * self.target_hidden_size
