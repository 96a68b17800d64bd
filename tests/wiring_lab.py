"""Tiny targets that have learned something, and drafts trained under any wiring: to plant faults and see them named.

A random target's text hangs on its last token alone; one that has read the prompt bank for a few seconds, byte by byte,
needs its states, and so does a draft of it. Shapes: B documents, T tokens, H hidden, A width of the taps.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from eyas.data.bank import generate
from eyas.data.shards import Sample, shard_name
from eyas.formats.draft_config import DraftConfig
from eyas.models.checkpoint import make_info, save_draft
from eyas.models.draft import Draft
from eyas.models.target import Target, record_boundaries
from eyas.models.vocab import build_vocab, target_ids
from eyas.run import hash_file
from eyas.training.initialise import copy_head, gain
from eyas.training.loss import unroll
from eyas.training.rows import supervise
from eyas.training.teacher import Teacher
from eyas.wiring.hypotheses.measure import moved
from eyas.wiring.hypotheses.wirings import DECLARED, Wiring
from made_captures import write_captures
from tiny import tiny_tokenizer

LENGTH, PROMPT = 64, 8
"""Tokens of a document, and of them the prompt's."""
STEPS, BATCH = 3, 16
DRAFT_VOCAB = 80
RIGHT = Wiring(DECLARED)


@dataclass(frozen=True, eq=False)
class Document:
    """A text and every boundary of the target over it, [T, H] each."""

    ids_T: Tensor
    states: tuple[Tensor, ...]


def texts(count: int, seed: int, length: int = LENGTH) -> Tensor:
    """Ids [B, T] of the bank's prompts, strung together and cut."""
    tokenizer = tiny_tokenizer()
    joined = "\n".join(turn for prompt in generate(count, seed, "train") for turn in prompt.turns)
    ids = torch.tensor(tokenizer(joined)["input_ids"])
    rows = min(count, len(ids) // length)
    assert rows == count, f"{rows} texts of {length} tokens"
    return ids[: rows * length].view(rows, length)


def save_taught_target(
    folder: Path, config: PreTrainedConfig, steps: int = 250, seed: int = 0, uneven: bool = False
) -> Path:
    """A target of `config` that has read `steps` batches of the bank, as a Hugging Face folder.

    `uneven`: its final norm weighs channels differently from the start, so that one norm more is seen.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).train()
    roughen(model)
    if uneven:
        unevened(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=1e-4)
    ids_BT = texts(steps * BATCH, seed)
    for batch in ids_BT.split(BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def roughen(model: torch.nn.Module) -> None:
    """Weights sized so that every layer moves the residual by a third: neighbouring boundaries differ."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 1.0 if "embed_tokens" in name else 0.8 / parameter.shape[1] ** 0.5
            parameter.normal_(0.0, scale)


@torch.no_grad()
def unevened(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("model.norm.weight"):
            parameter.add_(torch.randn_like(parameter) * 0.4)


@torch.no_grad()
def documents(target: Target, count: int, seed: int, length: int = LENGTH) -> list[Document]:
    """Texts with every boundary of the target over them."""
    found = []
    everything = range(target.num_hidden_layers + 1)
    for ids_BT in texts(count, seed, length).split(BATCH):
        with record_boundaries(target, list(everything)) as recorder:
            target.backbone(input_ids=ids_BT, use_cache=False)
            states = [recorder.states[boundary].clone() for boundary in everything]
        found += [Document(ids, tuple(state[row] for state in states)) for row, ids in enumerate(ids_BT)]
    return found


def draft_config(target: Target, boundaries: Sequence[int], **options: Any) -> DraftConfig:
    """A draft as wide as its target."""
    hidden = target.hidden_size
    shape = {
        "boundaries": tuple(boundaries),
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_hidden_size": hidden,
        "target_model_type": target.identity.model_type,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": target.context_length,
    }
    return DraftConfig(**{**shape, **options})


def taps_of(document: Document, boundaries: Sequence[int]) -> Tensor:
    return torch.cat([document.states[boundary] for boundary in boundaries], dim=-1)


def start_from_last_layer(draft: Draft, target: Target) -> None:
    """The draft starts as the target's last layer over its last tap: it then leans on positions, as a good draft does.

    A draft that starts otherwise learns these small targets without looking where tokens are, and no rope base shows.
    """
    for layer, source in zip(draft.layers, target.layers[-draft.config.num_hidden_layers :], strict=True):
        found = source.state_dict()
        for name, parameter in layer.named_parameters():
            weight = found.get(name)
            if weight is None or "layernorm" in name:
                continue
            if weight.shape == parameter.shape:
                parameter.copy_(weight)
            elif weight.dim() == 2 and parameter.shape == (weight.shape[0], 2 * weight.shape[1]):
                parameter[:, weight.shape[1] :] = weight
                parameter[:, : weight.shape[1]].normal_(0.0, 0.02)
        if layer.first:
            layer.hidden_norm.weight.copy_(gain(source.input_layernorm, layer.hidden_norm.weight))
        norm = layer.post_attention_layernorm.weight
        norm.copy_(gain(source.post_attention_layernorm, norm))
    width = draft.config.target_hidden_size
    if draft.config.hidden_size == width:
        draft.fc.weight[:, -width:] += torch.eye(width)


def taught_draft(
    target: Target,
    learned: Sequence[Document],
    config: DraftConfig,
    wiring: Wiring = RIGHT,
    steps: int = 250,
    seed: int = 0,
) -> Draft:
    """A draft trained under `wiring` (its shifts and pace; `config` holds the rest) on `learned` documents."""
    torch.manual_seed(seed)
    draft = Draft(config).train()
    counts_V = torch.bincount(torch.cat([one.ids_T for one in learned]), minlength=config.vocab_size)
    draft.d2t, draft.t2d = build_vocab(counts_V, config.draft_vocab_size, target.stop_ids)
    draft.share_embedding(target.embedding)
    with torch.no_grad():
        if config.own_embedding:
            draft.embed_tokens.weight.normal_(0.0, float(target.embedding.std()))
        copy_head(draft, target)
        start_from_last_layer(draft, target)
    teacher = Teacher(target, target_ids(draft.d2t), "before")
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=1e-4)
    order = torch.randint(len(learned), (steps, BATCH))
    for numbers in order.tolist():
        draft_loss(draft, teacher, [learned[number] for number in numbers], wiring).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
    return draft.eval().requires_grad_(False)


def draft_loss(draft: Draft, teacher: Teacher, batch: Sequence[Document], wiring: Wiring) -> Tensor:
    """Soft cross-entropy over every step, the rows wired as `wiring` says."""
    lengths = [len(one.ids_T) for one in batch]
    rows = supervise(torch.ones(sum(lengths)), lengths, STEPS)
    taps = torch.cat([moved(taps_of(one, draft.config.boundaries), wiring.hidden) for one in batch])
    ids = torch.cat([moved(one.ids_T, wiring.token) for one in batch])
    last = torch.cat([one.states[-1] for one in batch])
    with torch.no_grad():
        wanted = teacher.probabilities(last)
    hidden = unroll(draft, taps, ids, rows, pace=wiring.pace)
    losses = [
        0.8**step * F.cross_entropy(draft.logits(states), wanted[index + 1 + step])
        for step, (states, index) in enumerate(zip(hidden, rows.index, strict=True))
    ]
    return torch.stack(losses).sum()


def stored(states: Tensor, precision: str) -> Tensor:
    """States as a capture of that precision gives them back: `fp8` is e4m3 with one scale a token."""
    if precision == "float32":
        return states
    if precision in ("bfloat16", "float16"):
        return states.to(getattr(torch, precision))
    scale = (states.abs().amax(dim=-1, keepdim=True) / 448).clamp_min(1e-12)
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


def samples_of(
    held: Sequence[Document],
    boundaries: Sequence[int],
    precision: str = "float32",
    hidden: int = 0,
    token: int = 0,
) -> list[Sample]:
    """Captures of documents: taps moved by `hidden` rows, ids by `token`, as a broken pipeline leaves them."""
    found = []
    for number, one in enumerate(held):
        blocks = [stored(one.states[boundary], precision) for boundary in boundaries]
        mask = torch.arange(len(one.ids_T)) >= PROMPT
        taps = moved(torch.cat(blocks, dim=-1), hidden)
        last = stored(one.states[-1], precision)
        found.append(Sample(f"text-{number}", "heldout", taps, last, moved(one.ids_T, token), mask))
    return found


def write_draft(folder: Path, draft: Draft, target: Target, **options: Any) -> Path:
    """A draft folder; `options` are fields of the config that is written, whatever the draft was trained with."""
    info = make_info(
        draft,
        target.identity,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        ttt_length=STEPS,
    )
    save_draft(folder, draft, info)
    if options:
        mislabel(folder, **options)
    return folder


def mislabel(folder: Path, **options: Any) -> None:
    """Change the declared config of a written draft, and nothing else."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["eyas"]["draft"].update(options)
    path.write_text(json.dumps(raw))


def write_lab_captures(
    folder: Path,
    target: Target,
    samples: list[Sample],
    boundaries: Sequence[int],
    precision: str = "float32",
    **facts: Any,
) -> Path:
    """Captures of `samples`; in `fp8` the shard holds codes and a scale for each token and block."""
    dtype = str(samples[0].taps_TA.dtype).removeprefix("torch.")
    known: dict[str, Any] = {"boundaries": list(boundaries), "dtype": dtype, "greedy": False}
    write_captures(folder, target, samples, **(known | facts))
    if precision == "fp8":
        rewrite_shard(folder, lambda tensors: fp8_shard(tensors, len(boundaries)))
    return folder


def rewrite_shard(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """The first shard with other tensors, and its checksum in the manifest: what another writer would have left."""
    path, manifest = folder / shard_name(0), folder / "manifest.json"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)
    raw = json.loads(manifest.read_text())
    raw["files"][path.name] = hash_file(path)
    manifest.write_text(json.dumps(raw))


def fp8_shard(tensors: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """States as e4m3 codes with their scales beside them: `taps_scale` [T, k], `last_hidden_scale` [T, 1]."""
    made = dict(tensors)
    for name, count in (("taps", blocks), ("last_hidden", 1)):
        states = tensors[name].float().unflatten(1, (count, -1))
        scale = (states.abs().amax(dim=-1) / 448).clamp_min(1e-12)
        made[name] = (states / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
        made[f"{name}_scale"] = scale
    return made
