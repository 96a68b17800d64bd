"""Block by boundary: the scores of an identification as one SVG, written by hand.

Dark is near; the boundary each block was declared to be is outlined, so a right capture is dark inside every outline.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from eyas.errors import InputError
from eyas.progress import say
from eyas.run import write_atomic
from eyas.wiring.identify import NORMED, Match, name_of
from eyas.wiring.static_checks import Check

CELL, ROW, LEFT, TOP, RIGHT = 16, 26, 120, 56, 330
NEAR, FAR = (8, 48, 107), (247, 251, 255)
"""RGB of score 0 and of score 1 or more."""
STYLE = "font-family:system-ui,sans-serif;font-size:11px"


def check_ending(path: Path) -> None:
    """Raise InputError for a heat map that would be no SVG."""
    if path.suffix != ".svg":
        raise InputError(
            wanted="a heat map's file, an SVG (any browser turns it into a PNG)",
            got=path.name,
            where="--heatmap",
            next=f"--heatmap {path.with_suffix('.svg')}",
        )


def write_heatmap(path: Path, checks: Sequence[Check]) -> None:
    """Every check's identified blocks, one map under the other. Says so where no block was identified."""
    maps = [
        heatmap([match for _, match in one.blocks], [boundary for boundary, _ in one.blocks], one.name)
        for one in checks
        if one.blocks
    ]
    if not maps:
        say("heat map: nothing to draw, no block was compared with a target")
        return
    try:
        write_atomic(path, maps[0] if len(maps) == 1 else stacked(maps))
    except InputError as error:
        error.next = "--heatmap FILE.svg in a folder where you may write"
        raise
    say(f"heat map: {path}")


def stacked(maps: Sequence[str]) -> str:
    """SVGs one under the other in one."""
    sizes = [size_of(one) for one in maps]
    width, height = max(size[0] for size in sizes), sum(size[1] for size in sizes)
    body, y = [], 0
    for one, size in zip(maps, sizes, strict=True):
        body.append(f'<g transform="translate(0,{y})">{one.rstrip()}</g>')
        y += size[1]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return head + "".join(body) + "</svg>\n"


def size_of(svg: str) -> tuple[int, int]:
    """Width and height, as `heatmap` writes them."""
    found = re.search(r' width="(\d+)" height="(\d+)"', svg)
    assert found is not None, "an SVG of this module"
    return int(found[1]), int(found[2])


def heatmap(
    matches: Sequence[Match], declared: Sequence[int | None], title: str = "Which boundary each block is"
) -> str:
    """A self-contained SVG: one row a block, one column a boundary (the final-normed state last)."""
    assert len(matches) == len(declared), f"{len(matches)} blocks for {len(declared)} declared boundaries"
    columns = sorted({b for match in matches for b in match.scores}, key=lambda b: (b == NORMED, b))
    width, height = LEFT + CELL * len(columns) + RIGHT, TOP + ROW * len(matches) + 34
    body = [f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>', *axis(columns)]
    for row, (match, boundary) in enumerate(zip(matches, declared, strict=True)):
        body += block_row(match, boundary, columns, TOP + ROW * row)
    body.append(legend(height - 12))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="{STYLE}" role="img" aria-label="{escape(title)}"><rect width="100%" height="100%" fill="white"/>'
        + "".join(body)
        + "</svg>\n"
    )


def axis(columns: Sequence[int]) -> list[str]:
    """Boundary numbers above the columns: every fifth, and the final-normed state."""
    return [
        f'<text x="{LEFT + CELL * index + CELL / 2}" y="{TOP - 6}" text-anchor="middle">'
        f"{'normed' if boundary == NORMED else boundary}</text>"
        for index, boundary in enumerate(columns)
        if boundary == NORMED or boundary % 5 == 0
    ]


def block_row(match: Match, declared: int | None, columns: Sequence[int], y: int) -> list[str]:
    """One block: its declaration, a cell for each boundary, and what it was found to be."""
    said = "undeclared" if declared is None else f"declared {declared}"
    cells = [f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{said}</text>']
    for index, boundary in enumerate(columns):
        score = match.scores.get(boundary, float("inf"))
        outline = "#d62728" if boundary == declared else "none"
        cells.append(
            f'<rect x="{LEFT + CELL * index + 1}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 4}" '
            f'fill="{colour(score)}" stroke="{outline}" stroke-width="2">'
            f"<title>{name_of(boundary)}: {score:.3f}</title></rect>"
        )
    cells.append(f'<text x="{LEFT + CELL * len(columns) + 10}" y="{y + 16}">{escape(match.words())}</text>')
    return cells


def colour(score: float) -> str:
    """Dark blue at 0 to near white at 1 and beyond."""
    share = min(max(score, 0.0), 1.0)
    return "#" + "".join(f"{round(near + (far - near) * share):02x}" for near, far in zip(NEAR, FAR, strict=True))


def legend(y: int) -> str:
    words = "dark: near (0); white: a layer's own change away, or more (1); red: declared"
    return f'<text x="8" y="{y}" fill="#555">{words}</text>'
