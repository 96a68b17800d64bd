"""Both ends of a target larger than memory: rows of its embedding, its final norm, and its head piece by piece.

What a teacher and a draft need of the target, without a layer of it.

Shapes: T tokens, H hidden, V vocabulary, K rows of the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.streaming.backbone import Streamed, embed, fill_module, open_streamed
from eyas.models.target import scale_logits

PIECE = 16_384
"""Rows of the head in float32 at once: half a gigabyte of a target 7,168 wide."""


@dataclass(frozen=True, eq=False)
class Ends:
    """A streamed target's embedding, final norm and head."""

    streamed: Streamed
    final_norm: nn.Module

    @classmethod
    def open(cls, folder: Path) -> "Ends":
        """Raises InputError for an architecture or a quantisation that is not supported."""
        streamed = open_streamed(folder)
        fill_module(streamed.decoder.norm, streamed.checkpoint, f"{streamed.prefix}norm.", "cpu")
        return cls(streamed, streamed.decoder.norm)

    @property
    def config(self) -> Any:
        return self.streamed.config

    def embedding_rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the embedding [K, H], float32."""
        return embed(self.streamed, list(ids))

    @property
    def head_name(self) -> str:
        """The head's tensor, or the embedding's where the two are one."""
        names = self.streamed.checkpoint.headers
        own = next((name for name in names if name == "lm_head.weight" or name.endswith(".lm_head.weight")), None)
        return own or f"{self.streamed.prefix}embed_tokens.weight"

    @torch.inference_mode()
    def log_probabilities(self, normed_TH: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Of final-normed states: the log-probability of `ids_T` after each row, and the argmax, both [T].

        The head is read once, a piece at a time: no logits of the whole vocabulary are held.
        """
        total_T = torch.full((len(normed_TH),), -torch.inf)
        best_T, chosen_T = total_T.clone(), total_T.clone()
        argmax_T = torch.zeros_like(ids_T)
        start = 0
        for piece_PH in self.streamed.checkpoint.pieces(self.head_name, PIECE):
            logits_TP = scale_logits(self.config, normed_TH.float() @ piece_PH.T)
            total_T = torch.logaddexp(total_T, logits_TP.logsumexp(dim=-1))
            highest_T, at_T = logits_TP.max(dim=-1)
            argmax_T = torch.where(highest_T > best_T, at_T + start, argmax_T)
            best_T = torch.maximum(best_T, highest_T)
            inside_T = (ids_T >= start) & (ids_T < start + len(piece_PH))
            picked_T = logits_TP.gather(1, (ids_T - start).clamp(0, len(piece_PH) - 1)[:, None])[:, 0]
            chosen_T = torch.where(inside_T, picked_T, chosen_T)
            start += len(piece_PH)
        return chosen_T - total_T, argmax_T
