"""What a draft is: the one record every stage shares. Engine dialects of it are made and read in this folder only."""

import reprlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eyas.errors import InputError
from eyas.formats import taps
from eyas.formats.methods import MethodName

FORMAT = 1
"""Of the `eyas` block."""


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


class LatentShape(BaseModel):
    """The widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), named as config.json names them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: int = Field(ge=1)
    """Width of the queries' latent. SGLang's draft has no place for queries without one."""
    kv_lora_rank: int = Field(ge=1)
    """Width of the latent that keys and values share; what an engine caches, beside the rotated part."""
    qk_nope_head_dim: int = Field(ge=1)
    """A head's part of query and key that is not rotated."""
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    """The rotated part: one for all key heads, rotated in interleaved pairs."""
    v_head_dim: int = Field(ge=1)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


LATENT_KEYS = tuple(LatentShape.model_fields)


def invalid(error: ValidationError, wanted: str, where: str, next: str) -> InputError:
    """pydantic's first complaint of a config.json, with the key it is about and what stands there."""
    first = error.errors()[0]
    key, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    got = f"{key}: absent" if first["type"] == "missing" else f"{key}: {reprlib.repr(first['input'])} ({said})"
    return InputError(wanted=wanted, got=got, where=where, next=next, code="config_key_wrong")


Size = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DraftConfig(BaseModel):
    """A draft's shape and wiring. Boundaries are the only layer numbering (docs/words.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: MethodName = "eagle3"
    """How tokens are drafted: one after another, or all of a chain in one forward (P-EAGLE)."""
    mask_token_id: int | None = None
    """P-EAGLE: the token id that stands for tokens not known yet; none for any other method."""

    boundaries: tuple[int, ...]
    """The taps: sorted, unique boundaries of the target whose states feed `fc`, concatenated in this order."""
    target_num_hidden_layers: Size
    target_hidden_size: Size
    target_model_type: str
    hidden_size: int
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: Size
    """With block `mla` the rotated width, qk_rope_head_dim, as transformers' DeepSeek configs say it."""
    vocab_size: Size
    """The target's vocabulary."""
    draft_vocab_size: Size
    rms_norm_eps: Rate = 1e-5
    rope_theta: Rate = 10_000.0
    rope_scaling: dict[str, float | int | str | bool] | None = None
    max_position_embeddings: Size
    """The target's context length: a smaller one is refused by SGLang (serving.md 1.1)."""
    block: Literal["llama", "qwen3", "mla"] = "llama"
    latent: LatentShape | None = None
    """The widths of block `mla`; none for any other."""
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm per tap before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: the next step is fed norm(h) instead of h."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated taps before `fc` (tensor `input_norm`)."""
    norm_before_residual: bool = False
    attention_bias: bool = False
    """Biases of q, k and v, and in a Llama block of o: vLLM's Qwen3 draft has none there."""
    fc_bias: bool = False
    sliding_window: Size | None = None
    own_embedding: bool = False
    """The draft carries an embedding of its own instead of sharing the target's."""
    initializer_range: Rate = 0.02

    @field_validator("rope_scaling")
    @classmethod
    def _modern(cls, scaling: dict[str, float | int | str | bool] | None) -> dict[str, float | int | str | bool] | None:
        """`type`, the older spelling, is what transformers 5 looks for under `rope_type`."""
        return scaling if scaling is None or "type" not in scaling else {"rope_type": scaling["type"], **scaling}

    @model_validator(mode="after")
    def _check(self) -> "DraftConfig":
        wrong, where = "config_key_wrong", "draft config: boundaries"
        taps.check_boundaries(self.boundaries, self.target_num_hidden_layers, where, wrong)
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                wanted=f"draft_vocab_size at most the target's vocabulary ({self.vocab_size})",
                got=str(self.draft_vocab_size),
                where="draft config: draft_vocab_size",
                next=f"--set draft.vocab_size={self.vocab_size} or smaller",
            )
        self._check_heads()
        if (self.block == "mla") != (self.latent is not None):
            raise InputError(
                wanted=f"{', '.join(LATENT_KEYS)} with block mla, and with no other",
                got=f"block = {self.block} and {'none' if self.latent is None else self.latent}",
                where="draft config: latent",
                next="--set draft.block=mla, or leave those widths out",
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_method()
        return self

    def _check_method(self) -> None:
        """A placeholder's id exactly where there is one to place; nothing for a next step where there is none."""
        parallel, token = self.method == "peagle", self.mask_token_id
        if parallel != (token is not None) or not 0 <= (token or 0) < self.vocab_size:
            raise InputError(
                wanted=f"mask_token_id, a token of the target's {self.vocab_size}, with method peagle and no other",
                got=f"method {self.method}, mask_token_id {token}",
                where="draft config: mask_token_id",
                next="write the id that the draft was trained with",
            )
        if parallel and self.norm_output:
            raise InputError(
                wanted="norm_output with a method that feeds states back",
                got="method peagle, whose tokens are drafted in one forward",
                where="draft config: norm_output",
                next="leave norm_output out: it changes nothing there",
            )

    def _check_heads(self) -> None:
        """What transformers, and so every engine that reads the file with it, refuses of a Llama block."""
        hidden, heads, keys = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if min(hidden, heads, keys) < 1 or hidden % heads or heads % keys:
            raise InputError(
                wanted="hidden_size a multiple of num_attention_heads, and these of num_key_value_heads",
                got=f"{hidden}, {heads}, {keys}",
                where="draft config: num_attention_heads",
                next="mend the heads in the draft's config.json; a new draft takes them from its target",
                code="shape_mismatch",
            )

    def _check_latent(self, latent: LatentShape) -> None:
        """What no engine's latent attention can be: fewer key heads, another rotated width, biases."""
        heads, wanted = self.num_attention_heads, (self.num_attention_heads, latent.qk_rope_head_dim, False)
        got = (self.num_key_value_heads, self.head_dim, self.attention_bias)
        if got != wanted:
            raise InputError(
                wanted=f"num_key_value_heads {heads}, head_dim {wanted[1]} (qk_rope_head_dim), no attention_bias",
                got=f"{got[0]}, {got[1]}, attention_bias {str(got[2]).lower()}",
                where="draft config: block mla",
                next="make them agree: every head of latent attention has its own key",
            )

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def taps_width(self) -> int:
        """Width of the concatenated taps: len(boundaries) * target_hidden_size."""
        return len(self.boundaries) * self.target_hidden_size
