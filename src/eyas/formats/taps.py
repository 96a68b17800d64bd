"""Boundaries, and every other numbering of layers, converted at the edge and only here."""

from collections.abc import Sequence

from eyas.errors import InputError


def default_boundaries(num_hidden_layers: int, where: str = "recipe: draft.boundaries") -> tuple[int, int, int]:
    """`[2, n//2, n-3]`, the default of EAGLE, SGLang and vLLM. Needs n >= 7."""
    n = num_hidden_layers
    if n < 7:
        raise InputError(
            wanted="explicit taps: the default [2, n//2, n-3] needs a target of at least 7 layers",
            got=f"a target of {n} layers and no taps",
            where=where,
            next=f"--set draft.boundaries=[{', '.join(map(str, sorted({min(1, n), n // 2, max(n - 1, 0)})))}]",
        )
    return (2, n // 2, n - 3)


def check_boundaries(boundaries: Sequence[int], num_hidden_layers: int, where: str) -> None:
    """Raise InputError unless `boundaries` are sorted, unique, and within 0..n."""
    ordered = sorted(set(boundaries))
    if not boundaries or list(boundaries) != ordered:
        raise InputError(
            wanted="at least one tap, sorted and unique (engines concatenate in ascending order whatever the list says)",
            got=str(list(boundaries)),
            where=where,
            next=f"write {ordered or '[2, n//2, n-3]'}",
        )
    if ordered[0] < 0 or ordered[-1] > num_hidden_layers:
        raise InputError(
            wanted=f"boundaries between 0 (embedding) and {num_hidden_layers} (after the last layer, before the final norm)",
            got=str(list(boundaries)),
            where=where,
            next="eyas inspect TARGET shows its layers",
        )
