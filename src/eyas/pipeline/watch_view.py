"""A server's status for people: a live panel on a terminal, a line at each change elsewhere."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eyas.clients.acceptance import Acceptance
from eyas.launch.gpus import Gpu
from eyas.launch.log_state import LogState
from eyas.launch.movement import PROBE_LINE
from eyas.launch.state import WORKING, Status
from eyas.pipeline.said_taps import TapsLook

LINE_EVERY_S = 10.0
QUIET_S = 10.0
SHOWN_LINES = 6
WRONG = "error:"
KEPT_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d{3} ")
COLOURS = {
    "ready": "green",
    "crashed": "red",
    "stuck": "red",
    "stopped": "yellow",
    "warming": "cyan",
    "loading": "cyan",
}


def seconds(value: float | None) -> str:
    """12 s, 3:05, 1:02:03; a dash where it is not known."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def headline(status: Status, url: str | None = None) -> str:
    """One line: engine, state, phase, shards, times."""
    parts = [f"{status.engine or 'server'}{f' at {url}' if url else ''}: {status.state}"]
    if status.phase is not None and status.phase != status.state:
        parts.append(f"phase {status.phase}")
    if status.shards is not None:
        parts.append(f"{status.shards[0]}/{status.shards[1]} shards")
    elif status.progress is not None:
        parts.append(f"{status.progress:.0%}")
    if status.elapsed_s is not None:
        parts.append(f"after {seconds(status.elapsed_s)}")
    if status.eta_s is not None:
        late = status.eta_s < 0.5
        parts.append("later than recorded" if late else f"ready in about {seconds(status.eta_s)}")
    elif status.phase_eta_s is not None:
        parts.append(f"this phase {seconds(status.phase_eta_s)} more")
    if status.moving:
        parts.append(f"moving: {'; '.join(status.moving)}")
    elif status.idle_s is not None and status.idle_s >= QUIET_S and status.state in WORKING:
        parts.append(f"nothing moves for {seconds(status.idle_s)}")
    return ", ".join(parts)


def acceptance_words(found: Acceptance, trend: str | None = None) -> str:
    """Accept length, survival and speed in a line."""
    parts = [f"accept length {found.accept_length:.2f}"]
    if found.survival is not None:
        parts.append("survival " + " ".join(f"{share:.2f}" for share in found.survival))
    if found.rounds is not None:
        parts.append(f"{found.rounds} rounds")
    if found.tokens_s is not None:
        parts.append(f"{found.tokens_s:.1f} tokens/s")
    if trend is not None:
        parts.append(trend)
    return f"{', '.join(parts)} ({found.source})"


def explain(status: Status) -> list[str]:
    """Why, and what to do: cause, evidence, advice, notes."""
    lines = []
    if status.cause is not None:
        lines.append(f"cause:    {status.cause}")
    if status.evidence is not None:
        lines.append(f"evidence: {status.evidence}")
    if status.advice is not None:
        lines.append(f"advice:   {status.advice}")
    return lines + [f"note:     {note}" for note in status.notes]


def taps_words(look: TapsLook | None) -> list[str]:
    """Which layers the engine reads, and what is wrong with them."""
    return [] if look is None else _taps(look.as_dict, [one.model_dump(mode="json") for one in look.findings])


def _taps(taps: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[str]:
    default = "the default of the target's class"
    if taps["ids"] is None:
        words = f"{taps['engine']} names no layers, as its V1 runner does at {default}"
    else:
        whose = "its draft's config" if taps["source"] == "config" else f"{default}, not the draft's"
        words = f"{taps['engine']} says that it reads layers {taps['ids']}, from {whose}"
    words += "" if taps["boundaries"] is None else f": boundaries {taps['boundaries']}"
    if taps["agrees"] is None:
        words += f"; not compared: {taps['unknown']}"
    else:
        words += ", as the draft was trained on" if taps["agrees"] else f"; the draft was trained on {taps['declared']}"
    lines = [f"taps:     {words}"]
    for one in found:
        lines.append(f"{one['severity'] + ':':<9} {one['code']}: expected {one['expected']}; found {one['found']}")
        lines.append(f"fix:      {one['fix']}")
    return lines


def look_words(look: Mapping[str, Any]) -> str:
    """One look at a server (`eyas watch --once`) as a person reads it."""
    shards = look["shards"]
    status = Status(
        engine=look["engine"],
        state=look["state"],
        phase=look["phase"],
        progress=look["progress"],
        shards=None if shards is None else (shards[0], shards[1]),
        eta_s=look["eta_s"],
        phase_eta_s=look["phase_eta_s"],
        cause=look["cause"],
        evidence=look["evidence"],
        advice=look["advice"],
        notes=tuple(look["notes"]),
        elapsed_s=look["elapsed_s"],
        idle_s=look["idle_s"],
        moving=tuple(look["moving"]),
    )
    lines = [headline(status, look["url"]), *explain(status)]
    lines += [] if look["taps"] is None else _taps(look["taps"], look["findings"])
    if look["eta_source"] is not None:
        lines.append(f"ETA:      {look['eta_source']}")
    if look["acceptance"] is not None:
        found = look["acceptance"]
        shares = " ".join(f"{one:.2f}" for one in found["survival"] or ())
        survival = f", survival {shares}" if shares else ""
        lines.append(f"accept length {found['accept_length']:.2f}{survival} ({found['source']})")
    places = [f"{name} {look[name]}" for name in ("pid", "log", "folder") if look[name] is not None]
    lines += [", ".join(places)] if places else []
    lines += [f"GPU {gpu['index']}: {gpu['used_bytes'] / 2**30:.1f} GiB used" for gpu in look["gpus"] or ()]
    if look["stack"] is not None:
        lines += ["where it stands (py-spy):", look["stack"].rstrip()]
    if look["state"] not in ("ready", "stopped"):
        lines += [f"  {line}" for line in look["last_lines"][-SHOWN_LINES:]]
    return "\n".join(lines)


def panel(
    status: Status, url: str | None, log: LogState | None, gpus: Sequence[Gpu] | None, more: Sequence[str] = ()
) -> Group:
    """The live view: headline, bar, rate, memory per GPU, why, last lines."""
    rows: list[Text | Table] = [Text(headline(status, url), style=COLOURS.get(status.state, ""))]
    if status.progress is not None and status.state not in ("ready", "stopped"):
        rows.append(_bar(status, status.progress))
    if status.state in WORKING and status.eta_source is not None:
        rows.append(Text(f"phase {seconds(status.phase_eta_s)} more; ETA: {status.eta_source}", style="dim"))
    if gpus:
        table = Table.grid(padding=(0, 2))
        for gpu in gpus:
            table.add_row(f"GPU {gpu.index}", f"{gpu.used / 2**30:.1f} / {gpu.total / 2**30:.0f} GiB", gpu.name)
        rows.append(table)
    rows += [Text(line, style="red" if line.startswith(WRONG) else "") for line in (*explain(status), *more)]
    if log is not None:
        own = [line for line in log.last_lines if not PROBE_LINE.search(line)]
        lines = [KEPT_STAMP.sub(r"\1 ", line) for line in own[-SHOWN_LINES:]]
        rows += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*rows)


def _bar(status: Status, progress: float) -> Table:
    """Share of the phase, shards, their rate."""
    grid = Table.grid(padding=(0, 2))
    shards = "" if status.shards is None else f"{status.shards[0]}/{status.shards[1]} shards"
    rate = "" if status.rate is None else f"{status.rate:.2g} shards/s"
    grid.add_row(ProgressBar(total=1.0, completed=progress, width=40), f"{progress:.0%}", shards, rate)
    return grid


class Screen:
    """Where a status goes: a live panel, or lines where nobody watches a terminal."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        self.say = say
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._said: tuple[str, str | None, tuple[str, ...]] | None = None
        self._last = float("-inf")
        self._source: str | None = None
        self._told: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def show(
        self,
        status: Status,
        url: str | None,
        log: LogState | None,
        gpus: Sequence[Gpu] | None,
        more: Sequence[str] = (),
        told: Sequence[str] = (),
    ) -> None:
        """Show one look; where lines are said, `told` is said once."""
        if self.live is not None:
            self.live.update(panel(status, url, log, gpus, (*told, *more)))
            return
        if tuple(told) != self._told:
            self._told = tuple(told)
            for line in told:
                self.say(line)
        now, key = time.monotonic(), (status.state, status.phase, tuple(more))
        waiting = status.state in WORKING
        if key == self._said and not (waiting and now - self._last >= LINE_EVERY_S):
            return
        self._said, self._last = key, now
        if waiting and status.eta_source not in (None, self._source):
            self._source = status.eta_source
            self.say(f"ETA: {status.eta_source}")
        for line in (headline(status, url), *(explain(status) if status.state in ("stuck", "crashed") else ()), *more):
            self.say(line)
