"""Prometheus text, as `/metrics` of every engine gives it."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Metrics:
    """Samples by name; each is (labels, value)."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, name: str) -> float | None:
        """Sum of a metric over its labels (ranks, models); None where it is absent."""
        found = self.samples.get(name)
        return None if not found else sum(value for _, value in found)

    def mean(self, name: str) -> float | None:
        """Mean of a gauge over its labels; None where it is absent."""
        found = self.samples.get(name)
        return None if not found else sum(value for _, value in found) / len(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric for each value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums


def parse_metrics(text: str) -> Metrics:
    """Prometheus text format; comments and lines that are no sample are passed over."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _samples(text.splitlines()):
        samples.setdefault(name, []).append((labels, value))
    return Metrics(samples)


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, str], float]]:
    for line in lines:
        match = None if line.startswith("#") else SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue  # a gauge without a sample yet is NaN; a last bucket's bound stands in a label, not here
        labels = {key: re.sub(r"\\.", _unescape, raw) for key, raw in LABEL.findall(match["labels"] or "")}
        yield match["name"], labels, value


def _unescape(match: re.Match[str]) -> str:
    return ESCAPED.get(match[0], match[0])
