"""Acceptance of a running server, interval by interval, with what a low one most likely means."""

import time
from pathlib import Path

from eyas.clients.acceptance import FEW_ROUNDS, NEAR_ONE, Acceptance, Counters, Trend, from_line, read_counters
from eyas.clients.background import Background
from eyas.errors import InputError
from eyas.launch.find import Found
from eyas.launch.log_state import LogState
from eyas.wiring.loaders import loader_report
from eyas.wiring.static_checks import find_target

EVERY_S = 10.0
USUAL = (
    "the usual causes, likeliest first: other layers captured than trained on, no d2t beside a reduced vocabulary, "
    "tensors that no name matched, another chat template than trained on"
)


class LiveAcceptance:
    """Reads a ready server's counters every few seconds; its log's lines where it counts nothing."""

    def __init__(
        self,
        url: str | None,
        draft: str | None = None,
        target: str | None = None,
        engine: str | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.url, self.draft, self.target, self.engine = url, draft, target, engine
        self.latest: Acceptance | None = None
        self.trend = Trend()
        self._asking = None if url is None else Background(lambda: (read_counters(url, time.time()),), every_s)
        self._counters: Counters | None = None
        self._seen = 0
        self._lines = 0

    def look(self, log: LogState | None) -> Acceptance | None:
        """The latest interval's acceptance; None until a round was counted. Never waits."""
        if self._asking is not None:
            self._asking.poll()
        return self._take(log)

    def once(self, log: LogState | None) -> Acceptance | None:
        """Acceptance since the server's start, asked for and waited for."""
        if self._asking is not None:
            self._asking.wait()
        return self._take(log)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.join()

    def _take(self, log: LogState | None) -> Acceptance | None:
        found = self._from_log(log)
        if self._asking is not None and self._asking.count > self._seen:
            self._seen = self._asking.count
            answer = self._asking.poll()
            counters = None if answer is None else answer[0]
            if counters is not None:
                found = counters.since(self._counters) or found
                self._counters = counters
        if found is not None:
            self.latest = found
            self.trend = self.trend.add(found.accept_length)
        return self.latest

    def _from_log(self, log: LogState | None) -> Acceptance | None:
        if log is None:
            return None
        fresh = log.lines - self._lines
        self._lines = log.lines
        lines = log.last_lines[-fresh:] if 0 < fresh <= len(log.last_lines) else log.last_lines if fresh else ()
        found = [acceptance for line in lines if (acceptance := from_line(line)) is not None]
        return found[-1] if found else None

    def warning(self) -> str | None:
        """What to think of an accept length near 1; None where there is nothing to say."""
        found = self.latest
        if found is None or found.accept_length >= NEAR_ONE:
            return None
        if found.rounds is not None and found.rounds < FEW_ROUNDS:
            return None
        named = likeliest(self.draft, self.engine, self.target)
        check = f"eyas check --url {self.url}" if self.url else "eyas check --url URL"
        check += f" --draft {self.draft}" if self.draft else " --draft DRAFT"
        return f"accept length {found.accept_length:.2f}: the draft gains nothing; {named or USUAL}; see {check}"


def acceptance_of(found: Found) -> LiveAcceptance:
    """The acceptance of a server that was found; of one known to serve without a draft nothing is asked."""
    server = found.server
    if server is None:
        return LiveAcceptance(found.url, engine=found.engine)
    return LiveAcceptance(server.url if server.draft is not None else None, server.draft, server.target, server.engine)


def likeliest(draft: str | None, engine: str | None, target: str | None = None) -> str | None:
    """The first thing that this engine's rules say is wrong with the draft's folder; None where they say nothing."""
    if draft is None or engine is None or not Path(draft).exists() or engine.partition("@")[0] == "embedded":
        return None
    try:
        facts = None if target is None else find_target(target)
        report = loader_report(Path(draft), engine, facts)
    except InputError:
        return None
    wrong = [one for one in report.findings if one.severity == "error"] or [
        one for one in report.findings if one.severity == "warning"
    ]
    return f"{wrong[0].code}: {wrong[0].message} ({wrong[0].fix})" if wrong else None
