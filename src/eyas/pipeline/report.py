"""`report.md`: the run in one page, a pure function of its results."""

import shlex
from pathlib import Path
from typing import Any

from eyas.formats.methods import METHODS
from eyas.recipe import Recipe
from eyas.run import machine, versions, write_atomic

JSON = dict[str, Any]


def write_report(path: Path, recipe: Recipe, result: JSON) -> None:
    """Write the report of one run; `result` is what `eyas run --json` prints."""
    write_atomic(path, report_text(recipe, result))


def report_text(recipe: Recipe, result: JSON) -> str:
    sections = [
        f"# {recipe.name}: {METHODS[recipe.draft.method].words} draft for {recipe.target.name}",
        table(result["bench"]),
        acceptance(result),
        wiring(result),
        places(result),
        conditions(recipe, result),
    ]
    return "\n\n".join(sections) + "\n"


def table(bench: JSON) -> str:
    """Plain against speculative decoding, the speed-up with its interval, and equality of outputs."""
    plain, fast, speed = bench["baseline"], bench["speculative"], bench["speedup"]
    same = {True: "equal, token for token, in float32", False: "NOT EQUAL in float32", None: "not measured"}
    lines = [
        "| | tokens/s | ms a token | accept length |",
        "|---|---|---|---|",
        f"| plain | {plain['output_tok_s']:.1f} | {plain['tpot_ms']:.1f} | 1 |",
        f"| speculative | {fast['output_tok_s']:.1f} | {fast['tpot_ms']:.1f} | {fast['accept_length']:.2f} |",
        "",
        f"Speed-up {speed['median']:.2f} (95 % interval {speed['low']:.2f} to {speed['high']:.2f}), "
        f"outputs {same[bench['identical_outputs']]}.",
    ]
    return "\n".join(lines)


def acceptance(result: JSON) -> str:
    """Evaluator against engine, and survival per position."""
    evaluated, bench = result["evaluate"], result["bench"]
    lines = [
        "## Acceptance",
        "",
        f"Evaluated on held-out answers ({evaluated['tokens']:,} tokens): accept length "
        f"{evaluated['accept_length']:.2f} (mean over rows), {evaluated['accept_length_walk']:.2f} (walk).",
        "",
        "| first i drafted tokens accepted | held-out, evaluated | test prompts, engine |",
        "|---|---|---|",
    ]
    engine = bench["speculative"]["survival"]
    for i, share in enumerate(evaluated["survival"]):
        served = f"{engine[i]:.3f}" if i < len(engine) else "not drafted"
        lines.append(f"| {i + 1} | {share:.3f} | {served} |")
    return "\n".join(lines)


def wiring(result: JSON) -> str:
    """What was checked and what was found."""
    check = result["check"]
    lines = ["## Wiring", "", f"Verdict: {check['verdict']}.", "", "| check | status | evidence |", "|---|---|---|"]
    lines += [f"| {one['name']} | {one['status']} | {one['evidence']} |" for one in check["checks"]]
    lines += [
        f"\n{finding['severity']}: {finding['code']}: {finding['message']} Fix: {finding['fix']}"
        for finding in [*check["findings"], *result["findings"]]
    ]
    return "\n".join(lines)


def places(result: JSON) -> str:
    """Where each file lies and how long its stage took."""
    run = Path(result["run"])
    lines = ["## Files", "", "| stage | seconds | folder |", "|---|---|---|"]
    for stage in result["stages"]:
        before = " (done before)" if stage["skipped"] else ""
        lines.append(f"| {stage['name']} | {stage['seconds']:.1f}{before} | {run / stage['name']} |")
    return "\n".join([*lines, "", f"The draft to serve: {result['draft']}"])


def conditions(recipe: Recipe, result: JSON) -> str:
    """What the figures hold for."""
    bench = result["bench"]
    where = machine()
    lines = [
        "## Conditions",
        "",
        f"{where['processor']}, {where['cores']} cores, {where['memory_gb']} GB; "
        + ", ".join(f"{name} {number}" for name, number in versions().items())
        + ".",
        f"Prompts: {bench['prompts']}; {bench['speculative']['n']} of them, up to {recipe.bench.max_new_tokens} tokens "
        f"each, greedy, chain of {bench['num_steps']}, {bench['precision']}.",
        f"Command: `{shlex.join(result['command'])}`.",
    ]
    return "\n".join(lines)
