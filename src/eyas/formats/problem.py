"""A fact worth telling: what a format or an engine's rule expected and what it found.

The formats state problems; `wiring/findings.py` gives each code its severity and its line of meaning.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """`code` is one of `wiring.findings.CODES`; `severity` overrides the code's own where the case is another."""

    code: str
    where: str
    expected: str
    found: str
    fix: str
    severity: str | None = None
