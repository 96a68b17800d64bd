"""The reference: every boundary of the target over a probe, in float32, kept for comparison.

Shapes: T tokens, H hidden size, n layers.
"""

import torch
from torch import Tensor

from eyas.models.target import Target, record_boundaries


@torch.inference_mode()
def reference_boundaries(target: Target, ids: list[int]) -> list[Tensor]:
    """Boundaries 0..n of `target` over `ids`: n + 1 float32 tensors [T, H]; the last is before the final norm."""
    everything = range(target.num_hidden_layers + 1)
    with record_boundaries(target, tuple(everything)) as recorder:
        target.backbone(input_ids=torch.tensor([ids], device=target.embedding.device), use_cache=False)
        return [recorder.states[boundary][0].float() for boundary in everything]


@torch.inference_mode()
def final_normed(target: Target, boundary_n_TH: Tensor) -> Tensor:
    """The last boundary through the target's own final norm: what Hugging Face calls `hidden_states[n]` [T, H]."""
    return target.final_norm(boundary_n_TH.to(target.dtype)).float()
