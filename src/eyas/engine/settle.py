"""What an engine settles at start: kernels, and the smallest row bucket in which a row keeps its bits.

Running as many rows as there are, unpadded, is not among the candidates even where a self-test passes it: attention
kernels were seen to agree at one cache length and part at another (docs/decisions/0020-one-row-bucket.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from eyas.engine.forward import ModuleForward
from eyas.engine.linear import fastest_kernels, install, install_int8
from eyas.engine.selftest import check_rows
from eyas.errors import InputError
from eyas.models.target import Target
from eyas.progress import say


@dataclass(frozen=True)
class EngineFacts:
    """What was settled, and why a text of this engine can be trusted."""

    precision: str
    most: int
    """Rows of the longest verify forward: the last token and num_steps drafted ones."""
    rows: int | None
    """The row bucket: what every plain step and every verify forward computes, padded or not. None: no bucket, for
    compiled kernels sum each row by itself."""
    lossless: bool
    """Every grouping of rows that the self-test tried gave bit-equal rows."""
    layer_kernels: dict[int, str] = field(default_factory=dict)
    """Rows to kernel, for the plain path's linears; F.linear for all other row counts, int8 for all in int8."""
    head_kernels: dict[int, str] = field(default_factory=dict)
    path: str = "plain"
    """`compiled` (native.cpp); through transformers' modules `plain`, `own attention` or `own state`."""
    why: str = ""
    """Why no faster path runs."""
    graphs: str = ""
    """`used`: steps are recorded and replayed as CUDA graphs; else why not. Empty where the device has none."""

    def describe(self) -> str:
        """The start-up line."""
        why = "every row bit-equal in the self-test" if self.lossless else "ROWS DIFFER IN THE SELF-TEST: not lossless"
        if self.path == "compiled":
            return f"engine: {self.precision}, compiled kernels, no row bucket ({why})"
        path = f"{self.path} path ({self.why})" if self.why else f"{self.path} path"
        rows, bucket = self.rows or 1, f"bucket of {self.rows} rows ({why})"
        if self.path == "own state":
            bucket = "one row at a time: it decodes, and nothing can be drafted for it"
        elif self.path == "own attention":
            bucket += ", trees verified path by path: draft chains"
        if self.graphs:
            path += f", CUDA graphs {self.graphs}" if self.graphs == "used" else f", no CUDA graphs ({self.graphs})"
        return (
            f"engine: {self.precision}, {path}, {bucket}; linears {self.layer_kernels[rows]}, "
            f"head {self.head_kernels[rows]}"
        )


def settle(
    forward: ModuleForward, most: int, kernels: str = "auto", *, int8: bool = False, why: str = ""
) -> EngineFacts:
    """Install kernels for forwards of up to `most` rows and set `forward.rows`.

    Tried in order of cost: a bucket of `most`, of the next power of two; then the same with F.linear only. If every
    one fails it says so aloud and decodes all the same.
    """
    groups = (layer_linears(forward.target), [forward.target.head])
    if int8 and not groups[0]:
        raise InputError(
            wanted="linear layers, whose weights int8 rounds",
            got=f"none in the layers of {type(forward.target.model).__name__}, which multiply by modules of their own",
            where="precision int8",
            next="--precision bfloat16",
        )
    most = most if forward.rolls_back else 1
    powers = 2 ** (most - 1).bit_length()
    tables: list[dict[int, str]] = [{}, {}]
    for choice in ("int8",) if int8 else dict.fromkeys((kernels, "torch")):
        counts = sorted({1, most, powers})
        fastest = [
            fastest_kernels(group, counts) if choice == "auto" else dict.fromkeys(counts, choice) for group in groups
        ]
        for rows in dict.fromkeys((most, powers)):
            # Single rows are the other baseline's: unpadded plain decoding, by its own fastest kernel.
            tables = [{1: names[1], rows: names[rows]} for names in fastest]
            for group, table in zip(groups, tables, strict=True):
                install_int8(group) if int8 else install(group, table)
            forward.rows = rows if forward.rolls_back else None
            if not forward.rolls_back or check_rows(forward, rows):
                return _facts(forward, most, True, tables, int8, why)
    say(
        "engine: WARNING: on this machine a row's bits depend on the forward that computes it, padded or not; "
        "plain and speculative texts may part at near ties"
    )
    return _facts(forward, most, False, tables, int8, why)


def layer_linears(target: Target) -> list[nn.Linear]:
    """Those that multiply as nn.Linear does: some architectures' routers are linears that give something else."""
    modules = target.layers.modules()
    return [module for module in modules if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward]


def precision_name(target: Target, int8: bool) -> str:
    return "int8" if int8 else str(target.dtype).removeprefix("torch.")


def _facts(
    forward: ModuleForward, most: int, lossless: bool, tables: Sequence[dict[int, str]], int8: bool, why: str
) -> EngineFacts:
    return EngineFacts(
        precision=precision_name(forward.target, int8),
        most=most,
        rows=forward.rows,
        lossless=lossless,
        layer_kernels=tables[0],
        head_kernels=tables[1],
        path=forward.name,
        why=why,
    )
