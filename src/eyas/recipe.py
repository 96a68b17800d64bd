"""A recipe: one TOML, one section a stage. The docstring under a field is its help and its reference page."""

import ast
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from eyas.errors import InputError, did_you_mean
from eyas.formats.engines import parse_engine
from eyas.settings import DraftingSettings, SamplingSettings, Section, section

Precision = Literal["auto", "float32", "bfloat16"]


def parts_of(value: Any) -> list[Any]:
    """`"2,15"`, `["2,15", 27]` or `[[2, 15], 27]`, one by one: lists as people type them, and as flags are repeated."""
    if isinstance(value, str):
        return [part for part in value.strip("[] ").split(",")]
    return [part for item in value for part in parts_of(item)] if isinstance(value, list | tuple) else [value]


class TargetSettings(Section):
    """The model to be accelerated."""

    name: str = "smollm2-135m-instruct-q4"
    """The embedded default target's name, a Hugging Face folder, or a hub id where there is a network."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


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


class DraftSettings(Section):
    """The draft's shape; what is none comes from the target."""

    vocab_size: int = Field(default=8192, ge=1)
    """Draft vocabulary: the answers' most frequent tokens. The target's size means no reduction."""
    fc_norm: bool = True
    """EAGLE-3.1: one norm a tap before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: feed norm(h) to the next step."""
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
    intermediate_size: int | None = None
    """MLP width; none means the target's."""
    rope_theta: float | None = None
    """Rotary base; none means the target's."""


class TrainSettings(Section):
    """How the draft is trained."""

    online: bool = False
    """Run the target beside the trainer: no states on disk, but its forward anew in every epoch."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the captured samples."""
    ttt_length: int = Field(default=3, ge=1)
    """Unrolled steps of training-time test; serve no longer chain than this."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak, after warm-up."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps spent warming up; cosine decay to `final_learning_rate` after it."""
    final_learning_rate: float = Field(default=0.05, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    optimiser: Literal["adamw", "muon"] = "adamw"
    """`muon` moves the matrices inside the draft by Muon, scaled to AdamW's size; head and norms stay with AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices only."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm limit."""
    batch_tokens: int = Field(default=256, ge=1)
    """Tokens in one packed forward. Little data needs many optimiser steps, and so small batches."""
    accumulate: int = Field(default=1, ge=1)
    """Packed forwards in one optimiser step."""
    step_decay: float = Field(default=0.8, gt=0, le=1)
    """TTT step s weighs step_decay ** s."""
    step_weights: tuple[float, ...] | None = None
    """A weight for each TTT step in place of step_decay, as 1,0.5,0.25."""
    loss: Literal["soft_cross_entropy", "reverse_kl", "total_variation", "lk_alpha", "lk_lambda"] = "soft_cross_entropy"
    """What a row is scored by. Of p (teacher) and q (draft): cross-entropy, KL(q, p), 1 - alpha, -log alpha, or
    KL(p, q) that gives way to 1 - alpha, with alpha = sum min(p, q), the chance of acceptance under sampling."""
    lk_decay: float = Field(default=1.0, ge=0)
    """Of lk_lambda: the divergence weighs exp(-lk_decay alpha)."""
    denominator: Literal["supervised", "all"] = "supervised"
    """What the summed loss is divided by: supervised rows, or all rows (EAGLE, SpecForge)."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are supervised."""
    start_from: str | None = None
    """A draft folder to go on from, of Eyas, EAGLE, SpecForge, speculators or ModelOpt: its shape and vocabulary map
    are kept, and the captures must be of its target and taps. None trains a new draft."""
    initialise: Literal["target", "random"] = "target"
    """Start from the target's head slice and final norm, with an attention that reads the own token; or from noise."""
    seed: int = 0
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

    def weights(self, steps: int) -> tuple[float, ...]:
        """What each of `steps` TTT steps weighs."""
        return self.step_weights or tuple(self.step_decay**step for step in range(steps))


class EvaluateSettings(Section):
    """Acceptance without an engine."""

    steps: int = Field(default=5, ge=1)
    """Chain length that is evaluated."""


class ExportSettings(Section):
    """The folder for the engines."""

    engines: tuple[str, ...] = Field(default=("sglang", "vllm"), min_length=1)
    """Whom the folder must serve (`sglang`, `vllm`, or a release as in `vllm@0.24`); what one cannot represent is
    refused."""

    @field_validator("engines")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if parse_engine(name).name not in ("sglang", "vllm"):
                raise ValueError(f"{name} has no export of its own: sglang or vllm")
        return names


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
    """The draft's folder; none talks to the target alone."""
    system: str | None = None
    """The system message; none leaves it to the target's template."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens of one answer at most."""
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Draw among the fewest most likely tokens whose probabilities reach this sum."""
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Of the engine in this process."""
    num_steps: int = Field(default=3, ge=0, le=64)
    """Levels drafted a round at most; how many pay is measured. 0 decodes plainly."""
    ngram: int = Field(default=4, ge=0, le=16)
    """Also draft what followed the last tokens before; 0 is off."""
    marks: bool = False
    """Underline the text whose tokens were drafted and stood."""

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


class ServeSettings(Section):
    """A server: which engine, in which Python, with which draft and flags."""

    engine: str = "embedded"
    """`embedded`, `sglang` or `vllm`; `sglang@0.5.23` to hold preflight to a release other than the installed one."""
    python: str | None = None
    """The interpreter that has the engine; none means the one that runs Eyas."""
    draft: str | None = None
    """The draft's export folder or hub id; none means runs/NAME/export where it is complete."""
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


class Recipe(Section):
    """Everything `eyas run` needs."""

    name: str = "run"
    """Names the run folder, runs/NAME."""
    target: TargetSettings = TargetSettings()
    prompts: PromptsSettings = PromptsSettings()
    respond: RespondSettings = RespondSettings()
    capture: CaptureSettings = CaptureSettings()
    draft: DraftSettings = DraftSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings = ExportSettings()
    bench: BenchSettings = BenchSettings()
    serve: ServeSettings = ServeSettings()


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("eyas.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(name: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """A recipe from a TOML file or a packaged name, with `section.key=value` overrides laid over it.

    Raises InputError for a missing file, bad TOML, an unknown key (naming the nearest known one) or a bad value.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise InputError(wanted="a recipe file", got="no such file", where=name, next="eyas recipe list")
        text, where = _read_text(path), str(path)
    elif name in packaged_recipes():
        text, where = resources.files("eyas.recipes").joinpath(f"{name}.toml").read_text(), f"packaged recipe {name}"
    else:
        raise InputError(
            wanted="a recipe file or a packaged recipe",
            got=f"{name!r}{did_you_mean(name, packaged_recipes())}",
            where="the command line",
            next=f"eyas run {packaged_recipes()[0]}",
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(wanted="a TOML recipe", got=str(error), where=where, next="mend that line") from error
    for override in overrides:
        _override(values, override)
    return validate(Recipe, values, where)


def recipe_of(overrides: tuple[str, ...]) -> Recipe:
    """A recipe of defaults with `section.key=value` laid over them."""
    values: dict[str, Any] = {}
    for override in overrides:
        _override(values, override)
    return validate(Recipe, values, "the command line")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            wanted="a TOML recipe in UTF-8", got=str(error), where=str(path), next="save the file as UTF-8"
        ) from error


def recipe_reference(recipe: Recipe) -> list[dict[str, Any]]:
    """Every key of a recipe: section, key, value, default and meaning."""
    rows: list[dict[str, Any]] = []
    for name, field in Recipe.model_fields.items():
        value = getattr(recipe, name)
        if not isinstance(value, BaseModel):
            rows.append({"key": name, "value": value, "default": field.default, "meaning": field.description or ""})
            continue
        for key, inner in type(value).model_fields.items():
            rows.append(
                {
                    "key": f"{name}.{key}",
                    "value": getattr(value, key),
                    "default": inner.get_default(call_default_factory=True),
                    "meaning": inner.description or "",
                }
            )
    return rows


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise InputError(
            wanted="--set section.key=value", got=override, where="--set", next="eyas recipe show lists every key"
        )
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InputError(wanted="a section before the dot", got=override, where="--set", next="eyas recipe show")
    values[parts[-1]] = _literal(text)


def _literal(text: str) -> Any:
    """TOML's and Python's spellings of a value; what is neither is a string."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """`model` from `values`, pydantic's complaint turned into one InputError that names key, value and what fits."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, first["loc"][:-1])
            raise InputError(
                wanted=f"a known key, one of: {', '.join(known)}",
                got=f"{place!r}{did_you_mean(str(first['loc'][-1]), known)}",
                where=where,
                next="eyas recipe show lists every key with its meaning",
            ) from error
        raise InputError(
            wanted=f"{place}: {first['msg'].removeprefix('Value error, ')}",
            got=repr(first["input"]),
            where=where,
            next="eyas recipe show",
        ) from error


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel), f"{part} is a section"
        model = annotation
    return list(model.model_fields)
