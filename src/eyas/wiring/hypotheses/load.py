"""A draft's config and all its tensors, also where they do not fit each other: what is too many may be the explanation.

Shapes: V target vocabulary, H hidden, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.formats.names import expected_tensors
from eyas.models.checkpoint import WEIGHTS, canonical_tensors, has_info, load_draft, read_info
from eyas.models.draft import Draft, llama_config, make_draft
from eyas.models.foreign import NamedTarget
from eyas.stage import chosen_step

TABLES = frozenset({"d2t", "t2d"})


@dataclass(frozen=True, eq=False)
class Parts:
    """What a draft folder holds, nothing refused but what no wiring can do without."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    """Float tensors in float32, by canonical name."""

    @classmethod
    def of(cls, folder: Path, foreign: NamedTarget | None = None, boundaries: Sequence[int] | None = None) -> "Parts":
        """Raises InputError for a folder that is no draft, or lacks a tensor that no near-miss can replace.

        A draft that Eyas did not write needs `foreign`, its target, and is loaded as `load_draft` does.
        """
        folder = chosen_step(folder)
        if foreign is not None and not has_info(folder):
            draft, info = load_draft(folder, dtype=torch.float32, foreign=foreign, boundaries=boundaries)
            state = draft.state_dict()
            return cls(info.draft, {name: state[name].detach() for name in expected_tensors(info.draft)})
        info = read_info(folder)
        try:
            found = canonical_tensors(load_file(folder / WEIGHTS))
        except (SafetensorError, OSError) as error:
            raise InputError(
                wanted="the draft's weights, a whole safetensors file",
                got=str(error),
                where=str(folder / WEIGHTS),
                next="copy or train the draft again",
            ) from error
        expected = expected_tensors(info.draft)
        lacking = [name for name, shape in expected.items() if not fits(name, shape, found)]
        if lacking:
            raise InputError(
                wanted="the tensors that config.json describes",
                got=f"missing or of another shape: {', '.join(sorted(lacking))}",
                where=str(folder / WEIGHTS),
                next="eyas inspect DRAFT lists them",
            )
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
        return cls(info.draft, tensors)

    def build(self, config: DraftConfig, embedding_VH: Tensor, head_DH: Tensor | None = None) -> Draft:
        """The draft under `config`, its tensors shared, not copied. Norms that are not stored start at ones."""
        with torch.device("meta"):
            draft = make_draft(config)
        wanted = draft.state_dict().keys() - {"embed_tokens.weight"} - TABLES
        state = {name: self._norm(name, config) if name not in self.tensors else self.tensors[name] for name in wanted}
        if head_DH is not None:
            state["lm_head.weight"] = head_DH
        state["embed_tokens.weight"] = embedding_VH
        state["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        draft.load_state_dict(state, assign=True)
        draft.rotary = LlamaRotaryEmbedding(llama_config(config))
        return draft.eval().requires_grad_(False)

    def _norm(self, name: str, config: DraftConfig) -> Tensor:
        """One norm over all taps from one a tap: the same gains, another mean square."""
        assert name == "input_norm.weight", f"{name} is stored"
        return torch.cat([self.tensors[f"fc_norm.{index}.weight"] for index in range(len(config.boundaries))])


def fits(name: str, shape: tuple[int, ...], found: dict[str, Tensor]) -> bool:
    """Whether a tensor is there as described; tables may be absent, and are judged elsewhere."""
    return name in TABLES or (name in found and tuple(found[name].shape) == shape)
