"""What identified blocks mean: declared boundaries against found ones, as findings with the line to change."""

from collections.abc import Sequence

from eyas.wiring.findings import Finding
from eyas.wiring.identify import MATCH_BELOW, NORMED, Match, name_of, reordered, shifted


def tap_findings(
    matches: Sequence[Match],
    declared: Sequence[int],
    num_hidden_layers: int,
    where: str = "captures: taps",
    by: str = "declared",
) -> list[Finding]:
    """Findings of blocks that are known and not as declared; an unknown block is no finding. `by`: who says so, the
    captures themselves (`declared`), or a draft (`read by the draft`) of captures that may well be what they say.

    One for all blocks where they only lie in another order, or are shifted alike; else one a block.
    """
    assert len(matches) == len(declared), f"{len(matches)} blocks for {len(declared)} declared boundaries"
    found = [] if not reordered(matches, declared) else [order_finding(matches, declared, where)]
    if not found:
        wrong = [(b, m) for b, m in zip(declared, matches, strict=True) if m.known and m.boundary != b]
        line = change_line(declared, matches) if by == "declared" else capture_again(declared)
        found = [boundary_finding(boundary, match, num_hidden_layers, where, line, by) for boundary, match in wrong]
    shifts = {match.shift for match in matches if match.known}
    if len(shifts) == 1 and shifts != {0}:
        return [*found, shift_finding(declared, shifts.pop(), matches, where)]
    moved = [(b, m) for b, m in zip(declared, matches, strict=True) if m.known and m.shift]
    return found + [shift_finding([boundary], match.shift, [match], where) for boundary, match in moved]


def capture_again(boundaries: Sequence[int]) -> str:
    return f"eyas capture --boundaries {','.join(map(str, boundaries))} again"


def change_line(declared: Sequence[int], matches: Sequence[Match]) -> str:
    """What to type, or what to write down instead, where the captured blocks are boundaries that a list can name."""
    again = capture_again(declared)
    found = [match.boundary for match in matches if match.boundary is not None]
    nameable = len(found) == len(declared) and found == sorted(set(found)) and found[0] != NORMED
    return f"{again}, or declare what was captured: boundaries {found}" if nameable else again


def boundary_finding(
    declared: int, match: Match, num_hidden_layers: int, where: str, fix: str, by: str = "declared"
) -> Finding:
    """A block that is another boundary: its distance to that one, and to the one it was declared to be."""
    assert match.boundary is not None, "only what is known can be wrong"
    code = "tap_post_norm" if match.normed else "tap_embedding" if 0 in (match.boundary, declared) else "tap_offset"
    found = name_of(match.boundary)
    return Finding(
        code=code,
        severity="error",
        where=where,
        expected=f"boundary {declared} of {num_hidden_layers}",
        found=found,
        fix=fix,
        message=f"The block {by} as boundary {declared} lies {match.score:.3f} from {found}{shifted(match.shift)}, "
        f"and {match.scores.get(declared, float('inf')):.2f} from boundary {declared}, in units of a layer's change "
        f"(a match is below {MATCH_BELOW}).",
    )


def order_finding(matches: Sequence[Match], declared: Sequence[int], where: str) -> Finding:
    """The declared boundaries, all there, in another order."""
    found = [match.boundary for match in matches]
    return Finding(
        code="tap_order",
        severity="error",
        where=where,
        expected=f"blocks in the order {list(declared)}",
        found=f"{found}",
        fix=f"concatenate the blocks as {list(declared)}, or declare {found}",
        message="fc reads each block through weights of its own: "
        + "; ".join(match.words() for match in matches)
        + ".",
    )


def shift_finding(declared: Sequence[int], shift: int, matches: Sequence[Match], where: str) -> Finding:
    """Blocks whose row t is the reference's row t + shift."""
    rows = "row" if abs(shift) == 1 else "rows"
    cause = (
        f"the first {shift} {rows} of states were dropped" if shift > 0 else f"{-shift} {rows} came before the first"
    )
    return Finding(
        code="token_shift",
        severity="error",
        where=where,
        expected="row t holds the states of token t",
        found=f"row t holds the states of token t{shift:+d}",
        fix=f"pair states and ids of the same position: {cause}",
        message=f"Blocks declared as {', '.join(map(str, declared))}: {words(matches)}."
        if declared
        else "The teacher's states are the target's, of other tokens than the ids beside them.",
    )


def words(matches: Sequence[Match]) -> str:
    return "; ".join(match.words() for match in matches)
