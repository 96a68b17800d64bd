"""A draft folder: `config.json` (the Llama keys engines read, and an `eyas` block) and `model.safetensors`.

The folder is written file by file, each atomically, `config.json` last: a folder with a config is whole. No pickle.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from eyas.errors import InputError
from eyas.formats.draft_config import FORMAT, DraftConfig, TargetIdentity, invalid
from eyas.formats.headers import INDEX, read_headers
from eyas.formats.names import canonical_name, expected_tensors, twin
from eyas.formats.target_config import read_json
from eyas.formats.tensor_values import value_problems
from eyas.models.draft import Draft, make_draft
from eyas.models.foreign import NamedTarget, read_foreign
from eyas.models.vocab import check_vocab
from eyas.progress import say
from eyas.run import versions, write_atomic
from eyas.stage import chosen_step

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class DraftInfo(BaseModel):
    """The `eyas` block: everything about a draft that its tensors do not say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    draft: DraftConfig
    target: TargetIdentity
    tokenizer_hash: str
    """Empty for a draft that Eyas did not train."""
    template_hash: str | None
    last_hidden_norm: Literal["before", "after"] = "before"
    """Whether the captured last hidden (the teacher's) was `before` or `after` the target's final norm."""
    loss_on: Literal["assistant", "all"] = "assistant"
    mask: str = "l[t+1] and l[t+2]"
    """Which tokens must be supervised for row t to be, at step 0."""
    ttt_length: int | None
    """Steps unrolled in training; None for a draft that Eyas did not train."""
    versions: dict[str, str]


def save_draft(folder: Path, draft: Draft, info: DraftInfo, tensors: dict[str, Tensor] | None = None) -> None:
    """Write `draft` into `folder` in its own dtype; `tensors` are its own, where they had to be put together from
    several processes. Raises InputError on a full disk; nothing half-written is left."""
    assert info.draft == draft.config, "the eyas block describes this draft"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or draft_tensors(draft)).items()}
    write_atomic(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(config_json(info, str(draft.fc.weight.dtype)), indent=1) + "\n")


def draft_tensors(draft: Draft) -> dict[str, Tensor]:
    """The tensors a draft folder holds, by name: no shared embedding, no vocabulary tables where nothing is reduced."""
    state = draft.state_dict()
    return {name: state[name] for name in expected_tensors(draft.config)}


def config_json(info: DraftInfo, dtype: str) -> dict[str, Any]:
    """Eyas's own config.json; the engines' dialects are written by export."""
    config = info.draft
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": dtype.removeprefix("torch."),
        "eyas": info.model_dump(mode="json"),
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
    }


def load_draft(
    folder: Path,
    target_embedding: Tensor | None = None,
    dtype: torch.dtype | None = None,
    foreign: NamedTarget | None = None,
    boundaries: Sequence[int] | None = None,
) -> tuple[Draft, DraftInfo]:
    """The draft in `folder` (or the step a draft stage hands on), in evaluation mode, and its `eyas` block.

    Tensor names may be in any writer's spelling (formats/names.py), so an export loads back as well.

    `target_embedding` [V, H] is shared with the draft (without it, `share_embedding` must be called before use).
    `dtype` None keeps the file's. A folder that Eyas did not write needs `foreign`, its target, and `boundaries` where
    its layer ids do not say theirs (models/foreign.py). Raises InputError for a missing or truncated file, a config
    without an `eyas` block, and tensors that are missing, unexpected, of another shape, or hold NaN or infinity.
    """
    folder = chosen_step(folder)
    if foreign is not None and not has_info(folder):
        info, tensors = _load_foreign(folder, foreign, boundaries)
        target_embedding = foreign.embedding if target_embedding is None else target_embedding
    else:
        info = read_info(folder)
        tensors = canonical_tensors(_read_tensors(folder))
    with torch.random.fork_rng(devices=[]):  # building a module draws numbers: not the caller's
        draft = make_draft(info.draft)
    _check_tensors(draft_tensors(draft), tensors, folder / WEIGHTS)
    if info.draft.reduced_vocabulary:
        check_vocab(tensors["d2t"], tensors["t2d"], info.draft.vocab_size, where=f"{folder / WEIGHTS}: d2t, t2d")
    else:
        draft.t2d.fill_(True)
    draft.to(dtype or tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors, strict=False)
    if target_embedding is not None:
        draft.share_embedding(target_embedding)
    return draft.eval().requires_grad_(False), info


def look_at(folder: Path, num_steps: int | None = None) -> None:
    """Raise InputError for what is wrong with a draft folder by itself: asked before a target is loaded for it.

    Says where it is to draft `num_steps` deep and was not trained so far (ttt_mismatch).
    """
    folder = chosen_step(folder)
    trained = read_info(folder).ttt_length if has_info(folder) else None
    if num_steps is not None and trained is not None and num_steps > trained:
        say(
            f"warning: ttt_mismatch: num_steps {num_steps}, and the draft is trained for {trained}: "
            f"--num-steps {trained}, or measure whether more helps (eyas bench)"
        )
    _whole_files(folder)


def has_info(folder: Path) -> bool:
    """Whether Eyas wrote this folder's config.json."""
    path = chosen_step(folder) / CONFIG
    return not path.is_file() or read_json(path).get("eyas") is not None


def _load_foreign(
    folder: Path, target: NamedTarget, boundaries: Sequence[int] | None
) -> tuple[DraftInfo, dict[str, Tensor]]:
    """What an `eyas` block would say of a draft that Eyas did not write, and its tensors."""
    raw = read_json(folder / CONFIG)
    config, tensors = read_foreign(raw, _read_tensors(folder), target, str(folder), boundaries)
    info = DraftInfo(
        draft=config,
        target=target.identity,
        tokenizer_hash="",
        template_hash=None,
        ttt_length=None,
        versions=versions(),
    )
    return info, tensors


def canonical_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of `models/draft.py`, without the second names that an export gives some."""
    return {canonical_name(name): tensor for name, tensor in tensors.items() if twin(canonical_name(name)) is None}


def read_info(folder: Path) -> DraftInfo:
    """The `eyas` block of a draft folder, without reading a tensor."""
    path = chosen_step(folder) / CONFIG
    next_step = "eyas inspect DRAFT says what the folder is"
    if not path.is_file():
        raise InputError(
            wanted="a draft folder with config.json",
            got="no such file" if folder.is_dir() else "no such folder",
            where=str(path),
            next="name a draft there is: RUN/draft, RUN/export, or shipped",
        )
    block = read_json(path).get("eyas")
    if not isinstance(block, dict):
        got, code = ("no `eyas` block", None) if block is None else (f"`eyas`: {block!r}", "config_key_wrong")
        next_step = "eyas export --draft DRAFT --target TARGET --out OUT takes over a draft made elsewhere"
        raise InputError(wanted="a draft made by Eyas", got=got, where=str(path), next=next_step, code=code)
    if block.get("format", FORMAT) != FORMAT:
        got = f"format {block['format']!r}"
        raise InputError(wanted=f"format {FORMAT}", got=got, where=str(path), next="pip install --upgrade eyas")
    try:
        return DraftInfo.model_validate(block)
    except ValidationError as error:
        raise invalid(error, "a draft's config.json", f"{path}: eyas", next_step) from error


def make_info(
    draft: Draft,
    target: TargetIdentity,
    *,
    tokenizer_hash: str,
    template_hash: str | None,
    ttt_length: int,
    **facts: Any,
) -> DraftInfo:
    """The `eyas` block of a draft made here, with the versions in use."""
    return DraftInfo(
        draft=draft.config,
        target=target,
        tokenizer_hash=tokenizer_hash,
        template_hash=template_hash,
        ttt_length=ttt_length,
        versions=versions(),
        **facts,
    )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's `model.safetensors`, or of the shards its index names."""
    files = _whole_files(folder)
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        where, next_step = str(folder / WEIGHTS), "copy or train the draft again"
        raise InputError(wanted="a whole safetensors file", got=str(error), where=where, next=next_step) from error


def _whole_files(folder: Path) -> list[Path]:
    """The weights' files. Raises InputError for one that is absent, cut short, or holds what is no number."""
    index, path = folder / INDEX, folder / WEIGHTS
    files = {folder / header.file for header in read_headers(folder).values()} if index.is_file() else {path}
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        pickles = sorted(item.name for item in folder.glob("*.bin"))
        raise InputError(
            wanted="the draft's weights in safetensors",
            got=f"only {', '.join(pickles)}, which runs code when loaded" if pickles else "no such file",
            where=str(missing),
            next="convert it where you trust its source" if pickles else "give a whole draft folder",
        )
    for problem in value_problems(folder, read_headers(folder)):
        wanted = f"{problem.expected} in every tensor"
        raise InputError(wanted=wanted, got=problem.found, where=str(path), next=problem.fix, code=problem.code)
    return sorted(files)


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(found[name].shape)} for {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    kinds = [
        f"{name} {str(found[name].dtype).removeprefix('torch.')}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].is_floating_point() != expected[name].is_floating_point()
    ]
    problems = [
        f"{label} {', '.join(names)}"
        for label, names in (
            ("missing:", missing),
            ("unexpected:", unexpected),
            ("shapes:", wrong),
            ("dtypes:", kinds),
        )
        if names
    ]
    if problems:
        raise InputError(
            wanted="exactly the tensors that config.json describes",
            got="; ".join(problems),
            where=str(path),
            next="eyas inspect DRAFT lists them",
            code=_tensor_code(missing, unexpected, wrong),
        )


def _tensor_code(missing: list[str], unexpected: list[str], wrong: list[str]) -> str:
    if "d2t" in missing:
        return "d2t_missing"
    named = (("tensor_missing", missing), ("tensor_unexpected", unexpected), ("shape_mismatch", wrong))
    return next((code for code, names in named if names), "dtype_mismatch")
