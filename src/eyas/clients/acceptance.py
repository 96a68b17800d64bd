"""Accept length in one definition, from whatever a server gives.

Accept length: tokens gained per round (one verify forward of one request), bonus token included, so 1 + accepted /
rounds, never below 1 nor above num_steps + 1. survival[i]: share of all rounds whose first i + 1 drafted tokens were
accepted; accept length = 1 + sum of survival. Rounds that drafted nothing are no rounds of speculation.

| source | gives | exact |
|---|---|---|
| vLLM, embedded: /metrics `spec_decode_num_drafts`, `_accepted_tokens`, `_accepted_tokens_per_pos` | all | yes |
| SGLang: /generate `meta_info.spec_correct_drafts_histogram` | all of one answer | yes |
| SGLang: /metrics `generation_tokens` / `spec_verify_calls` | accept length | counts the prefills' tokens too |
| SGLang: /metrics `spec_accept_length`, /server_info `avg_spec_accept_length` | accept length | an interval; lifetime |
| logs: SGLang `accept len`, vLLM `Mean acceptance length` | accept length (vLLM: survival too) | per interval |

Formulas as read: SGLang 0.5.23 observability/metrics_reporter.py, managers/tokenizer_manager.py; vLLM 0.33
v1/spec_decode/metrics.py. `Avg Draft acceptance rate` and `accept rate` divide by drafted tokens (a tree's whole), so
they are not survival.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.clients.health import client, get, get_json
from eyas.clients.metrics import Metrics, parse_metrics

NEAR_ONE = 1.1
"""Below it, wiring is the first suspect: right wiring with a poor draft gives 1.2 and more (docs/serving.md)."""
FEW_ROUNDS = 50
"""Under so many rounds nothing is said of a low accept length."""
PREFIXES = ("vllm:", "eyas:")


@dataclass(frozen=True)
class Acceptance:
    """What speculation gained. None: the source does not say."""

    accept_length: float
    source: str
    rounds: int | None = None
    survival: tuple[float, ...] | None = None
    tokens_s: float | None = None
    """Emitted tokens a second over the interval."""
    exact: bool = True
    drafted: float | None = None
    """Drafted tokens a round: the depth of a chain that was not always drafted to its end."""

    def __post_init__(self) -> None:
        assert self.accept_length >= 1 - 1e-9, f"an accept length includes the bonus token: {self.accept_length}"

    @property
    def conditional(self) -> tuple[float, ...] | None:
        """Acceptance of token i where the ones before it were accepted."""
        if self.survival is None:
            return None
        before = (1.0, *self.survival)
        return tuple(now / was if was else 0.0 for was, now in zip(before, self.survival, strict=False))

    @property
    def as_dict(self) -> dict[str, object]:
        return {
            "accept_length": round(self.accept_length, 4),
            "survival": None if self.survival is None else [round(share, 4) for share in self.survival],
            "rounds": self.rounds,
            "tokens_s": None if self.tokens_s is None else round(self.tokens_s, 2),
            "source": self.source,
            "exact": self.exact,
        }


@dataclass(frozen=True)
class Counters:
    """Sums since a server's start; differences of two are an interval's."""

    time: float
    rounds: float = 0.0
    accepted: float | None = None
    per_position: tuple[float, ...] | None = None
    tokens: float | None = None
    gauge: float | None = None
    """An accept length the server computed itself (SGLang's last interval)."""
    source: str = "/metrics"
    drafted: float | None = None

    def since(self, earlier: "Counters | None") -> Acceptance | None:
        """The interval from `earlier` (None: the server's start) to now; None where no round fell into it."""
        before = earlier if earlier is not None and earlier.rounds <= self.rounds else Counters(self.time)
        seconds = self.time - before.time
        rounds = self.rounds - before.rounds
        tokens = None if self.tokens is None else self.tokens - (before.tokens or 0.0)
        speed = tokens / seconds if tokens is not None and seconds > 0 else None
        if rounds <= 0:
            return None if self.gauge is None or earlier is not None else _gauge(self, speed)
        if self.accepted is None:
            if tokens is None:
                return None if self.gauge is None else _gauge(self, speed)
            words = f"{self.source}: generated tokens / verify calls (prefill tokens counted)"
            return Acceptance(max(tokens / rounds, 1.0), words, int(rounds), None, speed, exact=False)
        length = 1 + (self.accepted - (before.accepted or 0.0)) / rounds
        old = before.per_position or ()
        survival = None
        if self.per_position is not None:
            padded = (*old, *([0.0] * (len(self.per_position) - len(old))))
            survival = tuple((now - was) / rounds for now, was in zip(self.per_position, padded, strict=False))
        drafted = None if self.drafted is None else (self.drafted - (before.drafted or 0.0)) / rounds
        return Acceptance(length, self.source, int(rounds), survival, speed, drafted=drafted)


def _gauge(counters: Counters, speed: float | None) -> Acceptance | None:
    if counters.gauge is None or counters.gauge < 1:
        return None  # SGLang's gauge stands at 0 until a first decode line
    return Acceptance(counters.gauge, f"{counters.source}: last interval", None, None, speed, exact=False)


def counters_of(metrics: Metrics, time: float) -> Counters | None:
    """A server's counters from its `/metrics`; None where it does not speculate or counts nothing."""
    for prefix in PREFIXES:
        rounds = metrics.total(f"{prefix}spec_decode_num_drafts_total")
        if rounds is not None:
            positions = metrics.by(f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", "position")
            ordered = tuple(positions[key] for key in sorted(positions, key=int)) if positions else None
            return Counters(
                time,
                rounds,
                metrics.total(f"{prefix}spec_decode_num_accepted_tokens_total"),
                ordered,
                metrics.total(f"{prefix}generation_tokens_total"),
                drafted=metrics.total(f"{prefix}spec_decode_num_draft_tokens_total"),
            )
    calls = metrics.total("sglang:spec_verify_calls_total")
    gauge = metrics.mean("sglang:spec_accept_length")
    if calls is None and not gauge:
        return None
    return Counters(time, calls or 0.0, None, None, metrics.total("sglang:generation_tokens_total"), gauge)


def read_counters(url: str, time: float) -> Counters | None:
    """Counters from /metrics, else from SGLang's /server_info. Generates nothing."""
    with client(url) as http:
        status, body, _ = get(http, "/metrics")
        found = counters_of(parse_metrics(body), time) if status == 200 else None
        if found is not None:
            return found
        states = get_json(http, "/server_info").get("internal_states")
    told = [state.get("avg_spec_accept_length") for state in states or () if isinstance(state, dict)]
    lengths = [length for length in told if isinstance(length, int | float) and length >= 1]
    return Counters(time, gauge=sum(lengths) / len(lengths), source="/server_info") if lengths else None


def from_histogram(histogram: Sequence[int], source: str = "spec_correct_drafts_histogram") -> Acceptance | None:
    """histogram[j]: rounds with j accepted tokens (SGLang's meta_info; vLLM's acceptance_histogram)."""
    rounds = sum(histogram)
    if rounds == 0:
        return None
    survival = tuple(sum(histogram[i:]) / rounds for i in range(1, len(histogram)))
    return Acceptance(1 + sum(survival), source, rounds, survival)


def from_drafted(drafts: int, draft_tokens: int, accepted: int, source: str = "counts") -> Acceptance | None:
    """From sums of rounds, drafted and accepted tokens; what divides by `draft_tokens` is no accept length."""
    if drafts <= 0:
        return None
    if not 0 <= accepted <= draft_tokens:
        raise ValueError(f"accepted {accepted} of {draft_tokens} drafted tokens")
    return Acceptance(1 + accepted / drafts, source, drafts)


SGLANG_LINE = re.compile(r"accept len: (?P<length>[\d.]+).*?gen throughput \(token/s\): (?P<speed>[\d.]+)")
VLLM_LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+).*?Accepted: (?P<accepted>\d+) tokens, "
    r"Drafted: (?P<drafted>\d+) tokens(?:, Per-position acceptance rate: (?P<survival>[\d., ]+\d))?"
)


def from_line(line: str) -> Acceptance | None:
    """A log line's interval: SGLang's `Decode batch`, vLLM's `SpecDecoding metrics`; None for any other line."""
    if (match := SGLANG_LINE.search(line)) is not None and float(match["length"]) >= 1:
        return Acceptance(float(match["length"]), "log: accept len", None, None, float(match["speed"]), exact=False)
    if (match := VLLM_LINE.search(line)) is not None and float(match["length"]) >= 1:
        shares = tuple(float(share) for share in (match["survival"] or "").split(",") if share.strip())
        length, accepted = float(match["length"]), int(match["accepted"])
        rounds = round(accepted / (length - 1)) if length > 1 else None
        return Acceptance(length, "log: SpecDecoding metrics", rounds, shares or None, exact=False)
    return None


@dataclass(frozen=True)
class Trend:
    """Accept length over the last intervals against those before them."""

    lengths: tuple[float, ...] = ()

    def add(self, length: float) -> "Trend":
        return Trend((*self.lengths, length)[-60:])

    @property
    def change(self) -> float | None:
        """Mean of the later half minus mean of the earlier half; None under four intervals."""
        half = len(self.lengths) // 2
        if half < 2:
            return None
        return sum(self.lengths[-half:]) / half - sum(self.lengths[:half]) / half

    @property
    def words(self) -> str:
        change = self.change
        if change is None:
            return "no trend yet"
        return "steady" if abs(change) < 0.05 else f"{'rising' if change > 0 else 'falling'} by {abs(change):.2f}"
