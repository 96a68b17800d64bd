"""Plant every wiring fault that can be planted and see each named; see nothing in right wirings.

    python benchmarks/wiring_table.py            (make wiring-table; at most half an hour on two cores)

Tiny targets of four architectures read the prompt bank for a minute, drafts train on what they say; both are kept in
the cache. Each row of the table is written as it is done (bench/out/wiring.rows.jsonl), so that the same command goes
on where it was stopped; rows of other code are made anew. Writes bench/out/wiring.json (`planted`: fault, architecture,
precision, expected, found, named; `right`: case, false_findings) and, without --only, docs/wiring-table.md.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from wiring_plants import ARCHITECTURES, PRECISIONS, Lab, faults, make_lab, rights, run
from wiring_static import (
    BOTH,
    DTYPES,
    RIGHT_ENGINES,
    RIGHT_EXPORTS,
    UPGRADES,
    Static,
    busy_gpu,
    launches,
    right_launches,
    run_launch,
    run_static,
    statics,
    upgrade,
)

from eyas.progress import say
from eyas.run import hash_bytes, processor_name, versions, write_atomic

ROOT = Path(__file__).parents[1]
OUT, PAGE = Path("bench/out"), ROOT / "docs" / "wiring-table.md"
RIGHT_PRECISIONS = 2
"""In how many precisions each right wiring is checked, of each architecture."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Plant:
    """One row to make."""

    name: str
    architecture: str
    precision: str
    expected: str | None
    """None: a right wiring."""
    work: Callable[[Path], list[str]]

    @property
    def key(self) -> str:
        return f"{self.name} | {self.architecture} | {self.precision}"


def plants(names: list[str], lab: Callable[[str], Lab]) -> Iterator[Plant]:
    """Every row of these architectures; `lab` is asked only when a row is made."""
    for name in names:
        turn = list(ARCHITECTURES).index(name)  # each architecture meets a fault in another precision
        for number, case in enumerate(faults()):
            if name in case.only:
                precision = PRECISIONS[(number + turn) % len(PRECISIONS)]
                yield numeric(case, name, precision, lab)
        for number, case in enumerate(rights()):
            for step in range(RIGHT_PRECISIONS):
                yield numeric(case, name, PRECISIONS[(number + turn + step) % len(PRECISIONS)], lab)
        if name in BOTH:
            yield from static_plants(name, turn, lab)
    for words, expected, engine, ids, boundaries in UPGRADES:
        work = lambda _, engine=engine, ids=ids, boundaries=boundaries: upgrade(engine, ids, boundaries)  # noqa: E731
        yield Plant(f"{words} ({engine})", "kimi_k25", "config alone", expected, work)
    yield Plant("a GPU that another process holds", "any", "no weights", "gpu_busy", lambda _: busy_gpu())


def numeric(case: Any, name: str, precision: str, lab: Callable[[str], Lab]) -> Plant:
    return Plant(case.name, name, precision, case.expected, lambda folder: run(lab(name), case, precision, folder))


def static_plants(name: str, turn: int, lab: Callable[[str], Lab]) -> Iterator[Plant]:
    """Exports and launches of one target; an export's dtype takes turns."""

    def dtype_of(number: int) -> str:
        return list(DTYPES)[(number + turn) % len(DTYPES)]

    for number, case in enumerate(statics()):
        words = f"{case.name} ({case.engine or 'inspect'})"
        yield plant_of(words, name, dtype_of(number), case.expected, run_static, case, lab)
    for number, case in enumerate([*launches(), *right_launches()]):
        yield plant_of(f"launch: {case.name}", name, dtype_of(number), case.expected, run_launch, case, lab)
    for number, engine in enumerate(RIGHT_ENGINES):
        for variant in RIGHT_EXPORTS:
            case = Static(f"export of the {variant} draft", None, engine, variant=variant)
            yield plant_of(f"{case.name}, {engine}", name, dtype_of(number), None, run_static, case, lab)


def plant_of(
    words: str, name: str, dtype: str, expected: str | None, make: Any, case: Any, lab: Callable[[str], Lab]
) -> Plant:
    return Plant(words, name, dtype, expected, lambda folder: make(lab(name), case, dtype, folder))


class Journal:
    """Rows that are done, a line each, under the fingerprint of the code that made them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        head = {"code": fingerprint()}
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole and whole[0] == head:
            self.rows = {row["key"]: row for row in whole[1:]}
        elif whole:
            say("wiring: other code made the rows that are there; all are made anew")
        kept = "".join(json.dumps(row) + "\n" for row in (head, *self.rows.values()))
        write_atomic(path, kept)

    def add(self, row: Row) -> None:
        self.rows[row["key"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def fingerprint() -> str:
    """Of the code that decides a row."""
    files = [*ROOT.glob("src/eyas/**/*.py"), *ROOT.glob("benchmarks/wiring_*.py"), ROOT / "tests" / "wiring_lab.py"]
    return hash_bytes(b"".join(path.read_bytes() for path in sorted(files)))


def make_rows(chosen: list[Plant], journal: Journal) -> list[Row]:
    """The rows of `chosen`, those that were made before read back."""
    waiting = [plant for plant in chosen if plant.key not in journal.rows]
    say(f"wiring: {len(chosen)} rows, {len(chosen) - len(waiting)} done before")
    started = time.monotonic()
    for number, plant in enumerate(waiting, 1):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = plant.work(Path(folder))
        seconds = time.monotonic() - begun
        journal.add({"key": plant.key, "found": found, "seconds": round(seconds, 2)})
        left = (time.monotonic() - started) / number * (len(waiting) - number)
        wrong = plant.expected not in found if plant.expected else bool(found)
        told = f"  WRONG, expected {plant.expected or 'nothing'}" if wrong else ""
        say(f"{number}/{len(waiting)} {plant.key}: {', '.join(found) or 'nothing'}{told} (ETA {left:.0f} s)")
    return [journal.rows[plant.key] for plant in chosen]


def result_of(chosen: list[Plant], rows: list[Row]) -> dict[str, Any]:
    planted, right = [], []
    for plant, row in zip(chosen, rows, strict=True):
        if plant.expected is None:
            case = f"{plant.architecture}, {plant.name}, {plant.precision}"
            right.append({"case": case, "false_findings": row["found"]})
            continue
        named = plant.expected in row["found"]
        facts = {"fault": plant.name, "architecture": plant.architecture, "precision": plant.precision}
        planted.append({**facts, "expected": plant.expected, "found": row["found"], "named": named})
    return {"planted": planted, "right": right, "seconds": round(sum(row["seconds"] for row in rows), 1)}


def page(result: dict[str, Any], architectures: list[str]) -> str:
    """docs/wiring-table.md: one row a fault: how often it was planted and named, and what else was found beside it."""
    planted, right = result["planted"], result["right"]
    missed = sum(not row["named"] for row in planted)
    false = [row for row in right if row["false_findings"]]
    codes = {row["expected"] for row in planted}
    faults_planted = list(dict.fromkeys(row["fault"] for row in planted))
    lines = [
        "# Planted faults",
        "",
        "Written by `make wiring-table` (benchmarks/wiring_table.py). Tiny targets that have read the prompt bank,",
        "drafts of them, and in each case one thing wired wrong; `eyas check`, `inspect` or preflight must name it.",
        "Precisions: of the stored states (fp8 with one scale a token and block; int8: the target's weights rounded,",
        "one scale a row), of exports that of their tensors. Any error or warning beside the expected code is listed.",
        "",
        f"Targets: {', '.join(architectures)}.",
        f"{len(faults_planted)} faults planted {len(planted)} times, {len(codes)} codes: {missed} missed. "
        f"{len(right)} right wirings: {len(false)} with a finding.",
        f"{result['seconds'] / 60:.0f} minutes on one core, {result['machine']}; torch {result['versions']['torch']}, "
        f"transformers {result['versions']['transformers']}.",
        "",
        "| planted | expected | named | in | also found |",
        "|---|---|---|---|---|",
    ]
    for fault in faults_planted:
        rows = [row for row in planted if row["fault"] == fault]
        also = sorted({code for row in rows for code in row["found"]} - {rows[0]["expected"]})
        named = sum(row["named"] for row in rows)
        where = ", ".join(f"{row['architecture']} {row['precision']}" for row in rows)
        lines.append(f"| {fault} | `{rows[0]['expected']}` | {named} of {len(rows)} | {where} | {', '.join(also)} |")
    lines += ["", "| right | times | with a finding |", "|---|---|---|"]
    kinds: dict[str, list[Row]] = {}
    for row in right:
        kinds.setdefault(row["case"].split(", ", 1)[1].rsplit(", ", 1)[0], []).append(row)
    for kind, rows in kinds.items():
        lines.append(f"| {kind} | {len(rows)} | {sum(bool(row['false_findings']) for row in rows)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="rows with this in their key (fault | architecture | precision)")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    chosen = [one for one in plants(arguments.architectures, cache(make_lab)) if arguments.only in one.key]
    rows = make_rows(chosen, Journal(arguments.out / "wiring.rows.jsonl"))
    result = {**result_of(chosen, rows), "machine": processor_name(), "versions": versions()}
    write_atomic(arguments.out / "wiring.json", json.dumps(result, indent=1) + "\n")
    if not arguments.only:
        write_atomic(PAGE, page(result, arguments.architectures))
    wrong = [row for row in result["planted"] if not row["named"]] + [r for r in result["right"] if r["false_findings"]]
    say(f"wiring: {len(result['planted'])} planted, {len(result['right'])} right, {len(wrong)} wrong answers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
