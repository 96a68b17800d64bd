"""A target: any causal language model that transformers loads, with the parts the rest of Eyas needs, found once.

Shapes: B batch, T rows, H hidden, V vocabulary.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from eyas.errors import InputError
from eyas.formats.draft_config import TargetIdentity
from eyas.formats.headers import read_headers
from eyas.formats.taps import check_boundaries
from eyas.formats.target_config import layer_prefix, read_config, text_config
from eyas.models.gguf import DEFAULT_TARGET
from eyas.models.resolve import resolve_target
from eyas.run import hash_bytes, hash_json

LAYER_LISTS = ("layers", "h", "blocks")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "ln_out")
CONTEXT_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len", "context_length")
ENDLESS = 2**20
"""Taken as the context length of a state that any text goes through."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ChooseDtype = Callable[[Any], torch.dtype]
"""Which precision to load a target in, by its text model's config."""


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: evaluation mode, no gradients. `layers`, `final_norm`, `head` are its own modules."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    identity: TargetIdentity
    dtype: torch.dtype

    @cached_property
    def config(self) -> Any:
        """The text model's config, also where it is nested in a multimodal one."""
        return self.model.config.get_text_config()

    @cached_property
    def backbone(self) -> nn.Module:
        """The decoder without the head: `backbone(input_ids=...)` gives `last_hidden_state`, after the final norm."""
        return _backbone(self.model)

    @cached_property
    def layers(self) -> nn.ModuleList:
        return _part(self.backbone, LAYER_LISTS, nn.ModuleList)

    @cached_property
    def final_norm(self) -> nn.Module:
        return _part(self.backbone, FINAL_NORMS, nn.Module)

    def to(self, device: torch.device) -> "Target":
        """Its weights moved there."""
        nn.Module.to(self.model, device)
        return self

    @property
    def head(self) -> nn.Linear:
        return _head(self.model)

    @property
    def embedding(self) -> Tensor:
        """The input embedding table [V, H]."""
        return _embedding(self.model)

    @property
    def num_hidden_layers(self) -> int:
        return self.identity.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.identity.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may exceed the tokenizer's length."""
        return self.identity.vocab_size

    @property
    def context_length(self) -> int:
        """Raises InputError for a config that names none, unless the target keeps a state, which no length ends."""
        lengths = (getattr(self.config, name, None) for name in CONTEXT_LENGTHS)
        length = next((length for length in lengths if isinstance(length, int)), None)
        if length is None and self.model._is_stateful:
            return ENDLESS
        if length is None:
            raise InputError(
                wanted="a target with a context length (max_position_embeddings)",
                got=f"none in the config of {type(self.model).__name__}",
                where="target",
                next='add "max_position_embeddings" to its config.json, as many tokens as it is to see',
            )
        return length

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """generation_config's list; else the config's; else the tokenizer's."""
        generation = self.model.generation_config
        for found in (
            None if generation is None else generation.eos_token_id,
            getattr(self.config, "eos_token_id", None),
            self.tokenizer.eos_token_id,
        ):
            if found is not None:
                return tuple(found) if isinstance(found, list | tuple) else (int(found),)
        return ()

    @cached_property
    def tokenizer_hash(self) -> str:
        """sha256 of what turns text into ids (vocabulary, merges, normalisers, added tokens)."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return hash_json(self.tokenizer.get_vocab())
        parts = json.loads(backend.to_str())
        return hash_json({name: part for name, part in parts.items() if name not in ("padding", "truncation")})

    @cached_property
    def template_hash(self) -> str | None:
        """sha256 of the chat template; None where the target has none."""
        template = self.tokenizer.chat_template
        if template is None:
            return None
        return hash_bytes(template.encode()) if isinstance(template, str) else hash_json(template)

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """What `ids` spell; special tokens only where asked for."""
        tokenizer: Any = self.tokenizer
        return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def logits(self, normed_BTH: Tensor) -> Tensor:
        """Logits [..., V] of final-normed states, with the target's own scale and soft-cap."""
        return self.scaled(self.head(normed_BTH))

    def scaled(self, logits: Tensor) -> Tensor:
        """Raw head outputs with the target's own scale and soft-cap."""
        return scale_logits(self.config, logits)


def scale_logits(config: Any, logits: Tensor) -> Tensor:
    """Raw head outputs with the scale and soft-cap of `config`: element by element, so a slice may be given."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


@dataclass
class Recorder:
    """Boundaries of the latest forward: number to state [B, T, H], the model's own tensors, uncopied."""

    states: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def record_boundaries(target: Target, boundaries: Sequence[int]) -> Generator[Recorder, None, None]:
    """Record `boundaries` of every forward inside the block; nothing else of the forward is kept.

    Boundary b < n is the input of layer b, boundary n the output of the last layer (before the final norm, which
    Hugging Face's hidden_states never show). Raises InputError for boundaries out of range or unsorted.
    """
    n = target.num_hidden_layers
    check_boundaries(boundaries, n, where="the boundaries to record")
    recorder = Recorder()

    def before(boundary: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.states[boundary] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        recorder.states[n] = output if isinstance(output, Tensor) else output[0]

    handles = [
        target.layers[n - 1].register_forward_hook(after)
        if boundary == n
        else target.layers[boundary].register_forward_pre_hook(before(boundary), with_kwargs=True)
        for boundary in boundaries
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def load_target(
    name: str, *, dtype: torch.dtype | str | ChooseDtype = "float32", trust_remote_code: bool = False
) -> Target:
    """Load a target for inference, in `dtype` ("auto" measures which is fastest here; a function chooses).

    Raises InputError for a folder that is no safetensors checkpoint of a causal language model.
    """
    folder = resolve_target(name, trust_remote_code=trust_remote_code)
    wanted = _dtype(dtype) if isinstance(dtype, torch.dtype | str) else None
    _check_files(folder, trust_remote_code)
    transformers_logging.disable_progress_bar()
    try:
        nested = {} if trust_remote_code else _nested(folder)
        config = {"config": nested["config"]} if nested else {"trust_remote_code": trust_remote_code}
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **config)
        # In the checkpoint's own precision first: the identity hash must not depend on what we compute in.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **(nested or config)
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unloadable(folder, str(error).strip().splitlines()[0]) from error
    if info["missing_keys"]:
        raise _unloadable(folder, f"tensors missing: {', '.join(sorted(info['missing_keys'])[:5])}")
    model.eval().requires_grad_(False)
    identity = _identity(name, folder, model, _weights_hash(model))
    if wanted is None:
        assert not isinstance(dtype, torch.dtype | str), "what names a precision is one"
        wanted = dtype(model.config.get_text_config())
    _cast(model, wanted)
    return Target(model, tokenizer, folder, identity, wanted)


def outline_target(name: str, *, trust_remote_code: bool = False) -> Target:
    """A target's config and tokenizer around a model without weights: what follows from its shape, in the time and
    memory of a small file. Its tensors are on the meta device, its identity has no hash, and stop tokens that only a
    generation_config.json names are not known.

    Raises InputError as `load_target` does, but for what is wrong with the weights.
    """
    folder = resolve_target(name, trust_remote_code=trust_remote_code)
    _check_files(folder, trust_remote_code)
    try:
        nested = {} if trust_remote_code else _nested(folder)
        remote = {} if nested else {"trust_remote_code": trust_remote_code}
        config = nested["config"] if nested else AutoConfig.from_pretrained(folder, **remote)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **({"config": config} if nested else remote))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **remote)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unloadable(folder, str(error).strip().splitlines()[0]) from error
    return Target(model.eval(), tokenizer, folder, _identity(name, folder, model, ""), torch.float32)


def _nested(folder: Path) -> dict[str, Any]:
    """How to load a language model nested in another (Kimi-K2.5), or under a name transformers lacks (Kimi-K2).

    Its own config, and the prefixes of its tensor names to take off; empty where transformers knows the folder itself.
    """
    declared = read_config(folder)
    text = text_config(declared)
    if declared.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text["model_type"] not in CONFIG_MAPPING:
        return {}
    names = read_headers(folder)
    heads = [name.removesuffix("weight") for name in names if name.endswith("lm_head.weight")]
    prefixes = {layer_prefix(names, folder): "model.", **dict.fromkeys(heads, "lm_head.")}
    return {
        "config": CONFIG_MAPPING[text["model_type"]].from_dict(text),
        "key_mapping": {f"^{re.escape(found)}": ours for found, ours in prefixes.items()},
    }


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return fastest_dtype(256)
    if dtype not in DTYPES:
        raise InputError(
            wanted="a precision: auto, float32 or bfloat16", got=repr(dtype), where="precision", next="precision=auto"
        )
    return DTYPES[dtype]


def _check_files(folder: Path, trust_remote_code: bool) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise _unloadable(folder, "no config.json")
    try:
        remote = "auto_map" in json.loads(config.read_text())
    except ValueError as error:
        raise _unloadable(folder, f"config.json is not JSON: {error}") from error
    if remote and not trust_remote_code and not list(folder.glob("*.safetensors")):
        raise _unloadable(folder, "a model of its own Python code and no safetensors")
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        raise InputError(
            wanted="weights in safetensors",
            got=f"only pickles, which run code when loaded: {', '.join(pickles)}" if pickles else "no weights",
            where=str(folder),
            next="convert them where you trust their source: model.save_pretrained(folder) writes safetensors",
        )


def _unloadable(folder: Path, got: str) -> InputError:
    return InputError(
        wanted="a Hugging Face folder of a causal language model (config, safetensors, tokenizer)",
        got=got,
        where=str(folder),
        next="give a complete folder; if it needs Python code of its own that you have read, trust_remote_code=true",
    )


def _backbone(model: PreTrainedModel) -> nn.Module:
    decoder = model.get_decoder()
    if decoder is model:  # Llama 4's text model goes by another name than its class says
        decoder = model.get_submodule("model")
    assert isinstance(decoder, nn.Module), f"{type(model).__name__} has a decoder"
    return decoder


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), f"{type(model).__name__} has a linear head"
    return head


def _embedding(model: PreTrainedModel) -> Tensor:
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor), f"{type(model).__name__} has an embedding table"
    return table


def _part(module: nn.Module, names: Sequence[str], kind: type[nn.Module]) -> Any:
    children = dict(module.named_children())
    found = next((children[name] for name in names if isinstance(children.get(name), kind)), None)
    if found is None:
        raise InputError(
            wanted=f"one of {', '.join(names)} in the target's decoder",
            got=f"{type(module).__name__} with {', '.join(children)}",
            where="target",
            next="this architecture is not known to Eyas yet: report it with its config.json",
        )
    return found


def _weights_hash(model: PreTrainedModel) -> str:
    norm: nn.Module = _part(_backbone(model), FINAL_NORMS, nn.Module)
    digest = hashlib.sha256()
    for tensor in (_embedding(model), *norm.parameters(), _head(model).weight):
        for rows in tensor.detach().split(8192):  # in pieces: a float32 copy of a large table would be gigabytes
            digest.update(rows.to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _identity(name: str, folder: Path, model: PreTrainedModel, weights_hash: str) -> TargetIdentity:
    config = model.config.get_text_config()
    is_snapshot = folder.parent.name == "snapshots"
    return TargetIdentity(
        name=name if is_snapshot or name == DEFAULT_TARGET else folder.name,
        revision=folder.name if is_snapshot else None,
        weights_hash=weights_hash,
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=_head(model).weight.shape[0],
    )


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters, not the buffers (`model.to` would round the rotary frequencies), and not those that the
    architecture itself keeps in a wider type, unless all is to be float32."""
    checkpoint = model.dtype
    for parameter in model.parameters():
        if parameter.dtype == checkpoint or dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


@cache
def fastest_dtype(rows: int) -> torch.dtype:
    """float32 or bfloat16, whichever multiplies `rows` rows faster here: measured, for no CPU flag tells.

    Half a second, once a process. On a CPU without bfloat16 dot products it loses by four times, on one with them it
    wins by two. A tie within 10 % goes to float32.
    """
    seconds = {dtype: _linear_seconds(rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.9 * seconds[torch.float32] else torch.float32


def _linear_seconds(rows: int, dtype: torch.dtype, budget: float = 0.2) -> float:
    """Best time of one [rows, 576] x [576, 1536] product within `budget` seconds."""
    x, weight = torch.randn(rows, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < budget:
        before = time.perf_counter()
        F.linear(x, weight)
        best = min(best, time.perf_counter() - before)
    return best
