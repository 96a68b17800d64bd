"""What an engine settles at start: kernels, and the smallest row bucket in which a row keeps its bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from eyas.engine.forward import TargetForward
from eyas.engine.linear import fastest_kernels, install
from eyas.engine.selftest import check_rows
from eyas.models.target import Target
from eyas.progress import say


@dataclass(frozen=True)
class EngineFacts:
    """What was settled, and why a text of this engine can be trusted."""

    precision: str
    most: int
    """Rows of the longest verify forward: the last token and num_steps drafted ones."""
    rows: int | None
    """The row bucket; None where a row's bits do not depend on its company, and nothing is padded."""
    lossless: bool
    """Every grouping of rows that the self-test tried gave bit-equal rows."""
    layer_kernels: dict[int, str]
    """Rows to kernel, for the layers' linears; F.linear for all other row counts."""
    head_kernels: dict[int, str]

    def describe(self) -> str:
        """The start-up line."""
        rows = f"bucket of {self.rows} rows" if self.rows else "no row padding"
        why = (
            "every row bit-equal in the self-test" if self.lossless else "ROWS DIFFER IN THE SELF-TEST: not lossless"
        )
        busiest = self.rows or self.most
        return (
            f"engine: {self.precision}, {rows} ({why}); linears {self.layer_kernels.get(busiest, 'torch')}, "
            f"head {self.head_kernels.get(busiest, 'torch')} (fastest measured)"
        )


def settle(forward: TargetForward, most: int, kernels: str = "auto") -> EngineFacts:
    """Install kernels for forwards of up to `most` rows and set `forward.rows`.

    Tried in order of cost: no padding, a bucket of `most`, of the next power of two; then the same with F.linear
    only. If every one fails it says so aloud and decodes all the same.
    """
    groups = (layer_linears(forward.target), [forward.target.head])
    powers = 2 ** (most - 1).bit_length()
    tables: list[dict[int, str]] = [{}, {}]
    for choice in dict.fromkeys((kernels, "torch")):
        counts = sorted({1, most, powers})
        fastest = [
            fastest_kernels(group, counts) if choice == "auto" else dict.fromkeys(counts, choice) for group in groups
        ]
        for rows in dict.fromkeys((None, most, powers)):
            tables = [kernel_table(names, rows, most) for names in fastest]
            for group, table in zip(groups, tables, strict=True):
                install(group, table)
            forward.rows = rows
            if check_rows(forward, rows or most):
                return _facts(forward, most, True, tables)
    say(
        "engine: WARNING: on this machine a row's bits depend on the forward that computes it, padded or not; "
        "plain and speculative texts may part at near ties"
    )
    return _facts(forward, most, False, tables)


def kernel_table(fastest: Mapping[int, str], rows: int | None, most: int) -> dict[int, str]:
    """Without a bucket one kernel must serve every row count; with one, single rows are the other baseline's."""
    if rows is None:
        return dict.fromkeys(range(1, most + 1), fastest[most])
    return {1: fastest[1], rows: fastest[rows]}


def layer_linears(target: Target) -> list[nn.Linear]:
    return [module for module in target.layers.modules() if isinstance(module, nn.Linear)]


def _facts(forward: TargetForward, most: int, lossless: bool, tables: Sequence[dict[int, str]]) -> EngineFacts:
    precision = str(forward.target.dtype).removeprefix("torch.")
    return EngineFacts(precision, most, forward.rows, lossless, tables[0], tables[1])
