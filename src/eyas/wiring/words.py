"""`eyas check` in words: what is wrong, the two numbers that prove it, the line to change, what to expect after, and
what could not be looked at and why. Torch-free.
"""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 100
HEADS = {
    "fail": "Something is wired wrong",
    "pass": "Nothing is wired wrong, as far as could be looked",
    "unknown": "Nothing was found wrong, and not enough could be looked at to say that all is right",
}
ORDER = ("error", "warning", "info")
SHOWN = 6
"""Wirings of the hypotheses' table that are printed; the rest are in --json."""


def check_words(result: Mapping[str, Any]) -> str:
    """The text of a check's result (`verdict`, `checks`, `findings`)."""
    findings = sorted(result["findings"], key=lambda found: ORDER.index(found["severity"]))
    checks: Sequence[Mapping[str, Any]] = result["checks"]
    lines = [f"{head(result['verdict'], findings)}.", ""]
    for number, found in enumerate(findings, 1):
        lines += [*finding_words(number, found), *after_words(found, checks), ""]
    ran = [check for check in checks if check["status"] in ("pass", "fail")]
    left = [check for check in checks if check["status"] not in ("pass", "fail")]
    for title, some in (("Looked at", ran), ("Could not be settled", left)):
        if some:
            lines += [f"{title}:", *(line for check in some for line in check_lines(check)), ""]
    return "\n".join(lines).rstrip()


def head(verdict: str, findings: Sequence[Mapping[str, Any]]) -> str:
    errors = sum(found["severity"] == "error" for found in findings)
    milder = len(findings) - errors
    counts = [counted(errors, "error")] if errors else []
    counts += [counted(milder, "remark")] if milder else []
    return HEADS[verdict] + (f": {' and '.join(counts)}" if counts else "")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def finding_words(number: int, found: Mapping[str, Any]) -> list[str]:
    """A finding as four labelled paragraphs under its head."""
    title = f"{number}. {found['code']} ({found['severity']}), {found['where']}"
    parts = (("", found["message"]), ("wanted", found["expected"]), ("got", found["found"]), ("change", found["fix"]))
    return [title, *(line for label, text in parts for line in labelled(label, text))]


def after_words(found: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What acceptance to expect, where a check measured it for this finding."""
    for check in checks:
        facts = check.get("facts", {})
        if found["code"] == facts.get("code") and "accept_length_after" in facts:
            text = (
                f"accept length {facts['accept_length_after']:.2f} instead of {facts['accept_length']:.2f} "
                f"at chains of {facts['steps']}, on these texts, trained ones too"
            )
            return labelled("expect", text)
    return []


def labelled(label: str, text: str, width: int = WIDTH) -> list[str]:
    """A paragraph, its label in the margin: `change   ...`."""
    margin = f"   {label:<9}" if label else "   "
    return wrap(text, width, initial_indent=margin, subsequent_indent=" " * len(margin), break_on_hyphens=False) or [
        margin.rstrip()
    ]


def check_lines(check: Mapping[str, Any]) -> Iterator[str]:
    """One check: its status, its name, what it saw; of the hypotheses the nearest wirings too."""
    margin = f"   {check['status']:<9}{check['name']}: "
    yield from wrap(
        check["evidence"], WIDTH, initial_indent=margin, subsequent_indent=" " * 12, break_on_hyphens=False
    ) or [margin.rstrip(": ")]
    yield from table_lines(check.get("facts", {}).get("wirings", []))


def table_lines(wirings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The wirings nearest to the declared one, which comes first, as a table."""
    if not wirings:
        return
    declared, *others = wirings
    nearest = sorted(others, key=lambda one: -one["effect"])
    told = [one for one in nearest if one["told"] != "no"][:SHOWN]
    yield f"            {'wiring':<46}{'nats':>8}{'accuracy':>10}{'accept length':>15}"
    for one in (declared, *told):
        nats = "" if one is declared else f"{one['effect']:+.2f}"
        yield f"            {one['wiring']:<46}{nats:>8}{one['accuracy'][0]:>10.2f}{one['accept_length']:>15.2f}"
    hidden = len(others) - len(told)
    if hidden:
        yield f"            ({hidden} more in --json; nats: better + or worse - a row than as declared)"
