"""SGLang's debug tensor dump: what leaf modules gave, pass by pass, and the boundaries in it.

`DIR/target/TP{t}_PP{p}_Rank{r}_pid{pid}/Pass00000.pt`, module name to output, a list where there are several. SGLang's
norms take the residual and give [normed, residual]: the residual beside layer b's input norm is boundary b, the one
beside the final norm boundary n; the embedding's output is boundary 0. A norm fused into another kernel leaves a gap.
The top module's file is written before its own output, and before what is called after it, is added: those lie in the
next pass's file. Source: sglang 0.5.23 debug_utils/tensor_dump_forward_hook.py.

Shapes: T rows, H hidden.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, cat

from eyas.errors import InputError

INPUT_NORM = re.compile(r"(?:.*\.)?layers\.(\d+)\.input_layernorm")
BATCH = ".forward_batch_info."
Pass = dict[str, Any]


def read_tensor_dump(
    folder: Path, load: Callable[[Path], Any]
) -> tuple[dict[int, Tensor], tuple[int, ...], Tensor | None]:
    """Boundaries [T, H] of the first text, its ids, and its last states after the final norm.

    Rank 0 of `target/`, or of `folder` itself. Passes are joined while they go on where the last one ended. Raises
    InputError for a folder without passes, or passes without ids or states.
    """
    passes = [_checked(load(path), path) for path in _passes(folder)]
    states: dict[int, list[Tensor]] = {}
    ids: list[int] = []
    normed: list[Tensor] = []
    for number, one in enumerate(passes):
        batch = {name.rpartition(BATCH)[2]: value for name, value in one.items() if BATCH in name}
        if not {"input_ids", "positions"} <= batch.keys():
            raise _bad(folder, f"pass {number} without forward_batch_info", "input_ids and positions in every pass")
        positions = batch["positions"].flatten().tolist()
        if positions != list(range(len(ids), len(ids) + len(positions))):
            if ids:
                break
            raise _bad(folder, f"rows at positions {positions[:4]}...", "a first pass that begins at position 0")
        found, last = boundaries_of(one)
        if ids and found.keys() != states.keys():
            break
        ids += batch["input_ids"].flatten().tolist()
        for boundary, state in found.items():
            states.setdefault(boundary, []).append(state)
        normed += [] if last is None else [last]
    whole = {boundary: cat(parts) for boundary, parts in states.items()}
    wrong = {tuple(state.shape) for state in whole.values() if state.dim() != 2 or len(state) != len(ids)}
    if wrong or not whole:
        raise _bad(folder, f"states of shapes {sorted(wrong)} for {len(ids)} ids" if wrong else "no residual", "states")
    return whole, tuple(ids), cat(normed) if sum(map(len, normed)) == len(ids) else None


def boundaries_of(one: Pass) -> tuple[dict[int, Tensor], Tensor | None]:
    """The boundaries that one pass's outputs show, and its states after the final norm."""
    found: dict[int, Tensor] = {}
    last = None
    layers = [int(match[1]) for name in one if (match := re.match(r"(?:.*\.)?layers\.(\d+)\.", name))]
    for name, value in one.items():
        if name.rpartition(".")[2] == "embed_tokens" and isinstance(value, Tensor):
            found[0] = value
        residual = value[1] if isinstance(value, list) and len(value) == 2 else None
        if (match := INPUT_NORM.fullmatch(name)) and residual is not None:
            found[int(match[1])] = residual
        if re.fullmatch(r"(?:.*\.)?model\.norm", name) and residual is not None and layers:
            found[max(layers) + 1], last = residual, value[0]
    return found, last


def _passes(folder: Path) -> list[Path]:
    roots = [root for root in (folder / "target", folder) if root.is_dir()]
    for root in roots:
        ranks = sorted(
            {path.parent for path in root.glob("**/Pass*.pt") if "draft" not in path.relative_to(root).parts}
        )
        if ranks:
            first = [rank for rank in ranks if rank.name.startswith("TP0_PP0_")] or ranks
            return sorted(first[0].glob("Pass*.pt"))
    raise _bad(folder, "none", "target/TP0_PP0_Rank0_pid*/Pass00000.pt, ...")


def _checked(found: Any, path: Path) -> Pass:
    if not isinstance(found, dict):
        raise _bad(path, f"a {type(found).__name__}", "a dict of module names and outputs")
    return found


def _bad(where: Path, got: str, wanted: str) -> InputError:
    return InputError(
        wanted=wanted, got=got, where=str(where), next="dump again: --debug-tensor-dump-output-folder, one request"
    )
