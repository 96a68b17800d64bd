"""Sections of the draft: its shape, its training, its evaluation, its export."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from eyas.errors import InputError
from eyas.formats.engines import parse_engine
from eyas.formats.methods import MethodName
from eyas.recipe.data import CaptureSettings, Precision, TargetSettings
from eyas.settings import Section, parts_of

Momentum = Annotated[float, Field(ge=0, lt=1)]
SEEDS = 2**43
"""Up to here, below zero too, a seed makes the order of every epoch (batches.order) within torch's 64 bits."""


class DraftSettings(Section):
    """The draft's method and shape; what is none comes from the target."""

    method: MethodName = "eagle3"
    """How tokens are drafted: `eagle3`, one forward each, or `peagle` (P-EAGLE), a whole chain in one forward. SGLang
    has no `peagle`."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Method peagle: the token id that stands for tokens not known yet; none means the tokenizer's mask token, else one
    that no text holds."""
    vocab_size: int = Field(default=8192, ge=1)
    """Draft vocabulary: the answers' most frequent tokens. The target's size means no reduction."""
    fc_norm: bool = True
    """EAGLE-3.1: one norm a tap before `fc`."""
    norm_output: bool | None = None
    """EAGLE-3.1: feed norm(h) to the next step; none means wherever the method feeds h back (`eagle3`)."""
    norm_before_fc: bool = False
    """One norm over all taps before `fc`."""
    norm_before_residual: bool = False
    """Residual from the normed state; SGLang cannot serve it."""
    block: Literal["llama", "qwen3", "mla"] = "llama"
    """The decoder block; `qwen3` norms queries and keys and is refused for SGLang; `mla` is multi-head latent
    attention, for targets that have it."""
    num_hidden_layers: int = Field(default=1, ge=1)
    """Draft layers."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a draft row looks back on; none means all. SGLang cannot serve it (its window is a server flag)."""
    q_lora_rank: int | None = Field(default=None, ge=1)
    """Block mla: width of the queries' latent; none means the target's, else DeepSeek-V3's 1536 or a small target's
    width."""
    kv_lora_rank: int | None = Field(default=None, ge=1)
    """Block mla: width of the latent of keys and values; none means the target's, else 512 or half a small target's
    width."""
    qk_nope_head_dim: int | None = Field(default=None, ge=1)
    """Block mla: a head's part that is not rotated; none means the target's, else its head width, at most 128."""
    qk_rope_head_dim: int | None = Field(default=None, ge=2)
    """Block mla: the rotated part; none means the target's, else its head width, at most 64."""
    v_head_dim: int | None = Field(default=None, ge=1)
    """Block mla: width of a value; none means the target's, else its head width, at most 128."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """MLP width; none means the target's."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Rotary base; none means the target's."""

    @model_validator(mode="after")
    def _feeds_back(self) -> "DraftSettings":
        if self.method == "peagle" and self.norm_output:
            raise ValueError(
                "norm_output with method peagle, which drafts a chain in one forward and feeds nothing back: wanted "
                "one of them"
            )
        if self.method != "peagle" and self.mask_token_id is not None:
            raise ValueError(f"mask_token_id with method {self.method}: wanted with method peagle only")
        return self


class TrainSettings(Section):
    """How the draft is trained."""

    online: bool = False
    """Run the target beside the trainer: no states on disk, but its forward anew in every epoch."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the captured samples."""
    ttt_length: int = Field(default=3, ge=1)
    """Unrolled steps of training-time test (method peagle: tokens of a chain); serve no longer chain than this."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak, after warm-up."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps spent warming up; cosine decay to `final_learning_rate` after it."""
    final_learning_rate: float = Field(default=0.05, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    optimiser: Literal["adamw", "muon"] = "muon"
    """`muon` moves the matrices inside the draft by Muon, scaled to AdamW's size; norms and a trained head stay with
    AdamW. It is ahead on the same tokens; on a CPU without bfloat16 products its steps take half as long again at the
    default batch."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """AdamW."""
    head: Literal["frozen", "trained"] = "frozen"
    """Whether the head moves, or stays as it began: the target's own rows (scaled, where `norm_output` feeds norm(h)
    back). Frozen, a third of its products, its gradient and its moments are saved."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices only."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradient norm limit; 0 clips nothing, and the norm is told all the same."""
    batch_tokens: int = Field(default=512, ge=1)
    """Tokens in one packed forward. Little data needs many optimiser steps, and so small batches."""
    accumulate: int = Field(default=1, ge=1)
    """Packed forwards in one optimiser step."""
    step_decay: float = Field(default=1.0, gt=0, le=1)
    """TTT step s weighs step_decay ** s."""
    step_weights: tuple[float, ...] | None = None
    """A weight for each TTT step in place of step_decay, as 1,0.5,0.25."""
    loss: Literal["soft_cross_entropy", "reverse_kl", "total_variation", "lk_alpha", "lk_lambda", "accept_length"] = (
        "soft_cross_entropy"
    )
    """What a row is scored by. Of p (teacher) and q (draft): cross-entropy, KL(q, p), 1 - alpha, -log alpha, or
    KL(p, q) that gives way to 1 - alpha, with alpha = sum min(p, q), the chance of acceptance under sampling; or 1 less
    the chance that the chain survives the step, whose sum is the accept length lost (step_weights 1,1,1)."""
    lk_decay: float = Field(default=1.0, ge=0)
    """Of lk_lambda: the divergence weighs exp(-lk_decay alpha)."""
    on_policy: bool = False
    """Train a later step only where the draft's own tokens so far are the text's: the rows that a server which decodes
    greedily drafts from. Method eagle3."""
    denominator: Literal["supervised", "all"] = "supervised"
    """What the summed loss is divided by: supervised rows, or all rows (EAGLE, SpecForge)."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are supervised."""
    start_from: str | None = None
    """A draft folder to go on from, of Eyas (`shipped` is its own), EAGLE, SpecForge, speculators or ModelOpt: its
    shape and vocabulary map are kept, and the captures must be of its target and taps. None trains a new draft."""
    initialise: Literal["least_squares", "target", "random"] = "least_squares"
    """Start from an attention that reads the own token (`target`); with the best linear guess of the captured states
    beside that (`least_squares`; latent attention has `target` in its place); or from noise. Head and final norm are
    the target's in each."""
    seed: int = Field(default=0, ge=-SEEDS, le=SEEDS)
    """Seed of initialisation and order."""
    save_every: int = Field(default=50, ge=1)
    """Optimiser steps between checkpoints; Ctrl-C saves at once."""
    evaluate_every: int = Field(default=100, ge=0)
    """Optimiser steps between measurements of the held-out accept length, and at the end; the best step is the draft
    handed on. 0 measures nothing: the last step is."""
    evaluate_samples: int = Field(default=16, ge=1)
    """Held-out samples measured each time, spread evenly over the split."""
    patience: int = Field(default=4, ge=0)
    """Stop when so many measurements in a row are below the best while the loss still falls; 0 never stops."""
    precision: Precision = "auto"
    """Of the matrix products (weights and optimiser are float32); `auto` measures which is faster on this machine."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every process holds the whole draft (`ddp`), or weights, gradients and moments are in shards
    (`fsdp`). Alone it says nothing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto`: the GPU with the process's number on its machine, the CPU where there is none."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Under torchrun: how long processes wait for one that is silent before they end, in seconds."""

    @field_validator("step_weights", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return value if value is None else parts_of(value)

    @model_validator(mode="after")
    def _one_a_step(self) -> "TrainSettings":
        given = self.step_weights
        if given is not None and (len(given) != self.ttt_length or min(given) < 0 or given[0] <= 0):
            raise ValueError(
                f"step_weights {given}: wanted {self.ttt_length} (ttt_length), the first above 0, none below"
            )
        return self

    def check_method(self, method: str, where: str) -> None:
        """Raise InputError for what a draft of this method cannot be trained by."""
        if self.on_policy and method != "eagle3":
            raise InputError(
                wanted="method eagle3 for train.on_policy: a draft that is fed its own tokens",
                got=f"{method}, of {where}",
                where="train.on_policy",
                next="--set train.on_policy=false",
            )

    @model_validator(mode="after")
    def _weighed_once(self) -> "TrainSettings":
        if self.on_policy and self.loss == "accept_length":
            raise ValueError(
                "on_policy with loss accept_length, which weighs each step by the chance to get there already: wanted "
                "one of them"
            )
        return self

    def weights(self, steps: int) -> tuple[float, ...]:
        """What each of `steps` TTT steps weighs."""
        return self.step_weights or tuple(self.step_decay**step for step in range(steps))


NOT_COMPARED = {"parallel", "device", "rank_timeout_s"}
"""Settings that change where and by how many a step is computed, not which: a resume may have others."""


def recorded_training(
    settings: TrainSettings, shape: DraftSettings, target: TargetSettings, capture: CaptureSettings | None
) -> dict[str, Any]:
    """What a training records of its settings, by section: a resume must share them. `capture` where it is online."""
    sections = {"train": settings.model_dump(mode="json", exclude=NOT_COMPARED)}
    rest = {"draft": shape, "target": target} | ({"capture": capture} if capture else {})
    return sections | {name: section.model_dump(mode="json") for name, section in rest.items()}


class EvaluateSettings(Section):
    """Acceptance without an engine."""

    steps: int = Field(default=5, ge=1)
    """Chain length that is evaluated."""


class ExportSettings(Section):
    """The folder for the engines."""

    engines: tuple[str, ...] = Field(default=("sglang", "vllm"), min_length=1)
    """Whom the folder must serve (`sglang`, `vllm`, or a release as in `vllm@0.24`); what one cannot represent is
    refused."""

    @field_validator("engines", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return [part.strip() if isinstance(part, str) else part for part in parts_of(value)]

    @field_validator("engines")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if parse_engine(name).name not in ("sglang", "vllm"):
                raise ValueError(f"{name} has no export of its own: sglang or vllm")
        return names
