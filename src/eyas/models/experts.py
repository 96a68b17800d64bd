"""A layer of experts whose weights pass through memory one group at a time.

transformers' own module of the family, built for one expert, computes each; the loop around it visits experts and
rows in the order of transformers' eager loop, so the sum is the same to the last bit. The router is not touched.

Shapes: T tokens, H hidden, I intermediate, K experts a token, E experts.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

LoadExpert = Callable[[int], dict[str, Tensor]]
"""Parameters of one expert by the module's own names, each with a leading axis of length 1."""


class StreamedExperts(nn.Module):
    """Takes the place of a family's experts module. Holds no parameters: `load` brings those of one expert.

    Experts that no token chose are never read. `group` of them are read at once, each by a
    thread of its own, and held at once.
    """

    def __init__(self, one: nn.Module, load: LoadExpert, group: int) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule: the layer's state has no place for it.
        self.one = (one,)
        self.load, self.group = load, group

    def forward(self, hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        total_TH = torch.zeros_like(hidden_TH)
        hit = chosen_TK.unique().tolist()
        with ThreadPoolExecutor(self.group) as pool:
            for start in range(0, len(hit), self.group):
                group = hit[start : start + self.group]
                for expert, state in zip(group, pool.map(self.load, group), strict=True):
                    slot, token = torch.where(expert == chosen_TK.T)
                    state = {name: parameter.to(hidden_TH.device) for name, parameter in state.items()}
                    out_MH = run_one(self.one[0], state, hidden_TH[token], weight_TK[token, slot, None])
                    total_TH.index_add_(0, token, out_MH)
        return total_TH


def run_one(one: nn.Module, state: dict[str, Tensor], rows_MH: Tensor, weights_M1: Tensor) -> Tensor:
    """The M rows that chose this expert, through it and times their router weight [M, H]."""
    chosen = torch.zeros(len(rows_MH), 1, dtype=torch.long, device=rows_MH.device)
    return torch.func.functional_call(one, state, (rows_MH, chosen, weights_M1), strict=True)


def one_expert(experts: Any) -> nn.Module:
    """A module of `experts`' own class and config with a single expert, its parameters on the meta device."""
    config = copy.deepcopy(experts.config)
    config.num_local_experts = 1
    config._experts_implementation = "eager"
    with torch.device("meta"):
        one = type(experts)(config)
    assert one.num_experts == 1, f"{type(experts).__name__} counts its experts by num_local_experts"
    return one.eval().requires_grad_(False)
