"""A log's lines, one after another, as the story of one server start; what a server said before is forgotten."""

import re
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from eyas.formats.engines import Runner
from eyas.launch import own_lines, phases, tracebacks
from eyas.launch.causes import engine_named, find
from eyas.launch.explain import DETAIL_CHARACTERS, Clue, Clues, clue, exception_clue, own_clue
from eyas.launch.lines import BAR, Line, parse, when
from eyas.launch.phases import Engine, Milestone
from eyas.launch.said_taps import SaidTaps, runner_of, said_taps
from eyas.launch.tracebacks import Traceback, Tracebacks

KEPT_LINES = 20
MAX_RANKS = 256
VLLM_PROCESS = re.compile(r"(?:APIServer|ApiServer|EngineCore|Worker|VllmWorker|DPCoordinator)")
LAUNCHED: dict[Engine, re.Pattern[str]] = {
    "vllm": re.compile(r"\bvllm serve\b|vllm\.entrypoints|vLLM on port"),
    "sglang": re.compile(r"sglang(?:\.launch_server| serve)"),
}
"""A launcher's own words: no proof of an engine's log, but a clue to whose end an end is."""
SURVIVED = re.compile(r"\b(?:[Ii]gnor|[Ff]all(?:ing|s)? ?back|[Ss]kip|[Rr]etry|optional)")
"""Words of a record or a raw line that says itself that the server goes on without."""
OWN_FRAMES: dict[Engine, str] = {"sglang": "/sglang/srt/", "vllm": "/vllm/"}


@dataclass
class Reading:
    """What one start said so far. Small, and copied for every look at a line that is not complete."""

    today: datetime
    lines: int = 0
    kept: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    bar: str | None = None
    """The name of the bar that the last line kept is an update of."""
    engine: Engine | None = None
    hint: Engine | None = None
    phase: str | None = None
    place: tuple[int, int] = (-1, 0)
    """Of the phase: which part of the start, and which phase in it (`_place`)."""
    progress: float | None = None
    shards: tuple[int, int] | None = None
    taps: SaidTaps | None = None
    """What the last line that told them told."""
    runner: Runner | None = None
    """vLLM's."""
    phase_starts: dict[str, datetime | None] = field(default_factory=dict)
    moment: datetime | None = None
    """Of the last milestone."""
    time: str = ""
    """The last time stamp, as written."""
    end: str | None = None
    soft: bool = False
    """The end is an exception that nobody caught: a milestone after it says that it was no end."""
    clues: Clues = field(default_factory=Clues)
    traces: Tracebacks = field(default_factory=Tracebacks)
    loads: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Of each rank: how many times it began to load weights, and whether it is through."""
    chained: Clue | None = None
    joined: Clue | None = None

    def read(self, text: str) -> None:
        """Take in one line."""
        line = parse(text)
        self.lines += 1
        bar = BAR.match(line.message) if "%" in line.message else None
        self._keep(line, bar)
        if line.time:
            self.time = line.time
        if self.engine is None:
            self._whose(line)
        trace = self.traces.at(line) if self.traces.open else None
        if trace is not None and self._goes_on(line, trace):
            return
        if tracebacks.OPENS in line.message:
            self._opens(line)
            return
        ending = False
        if bar:
            self._bar(line, bar)
        elif not (line.message.startswith(own_lines.MARK) and self._own(line)) and not self._milestone(line):
            ending = self._failing(line, trace)
        if line.message:
            self.traces.went_by(line, ending)

    def last_time(self) -> datetime | None:
        """When the last line with a time was written."""
        return when(self.time, self.moment, self.today)

    def _keep(self, line: Line, bar: re.Match[str] | None) -> None:
        """A bar's update takes the place of the one before it."""
        what = bar["what"] if bar else None
        if what is not None and what == self.bar:
            self.kept.pop()
        if line.message and not line.message.isspace():
            self.kept.append(line.text)
            self.bar = what

    def _whose(self, line: Line) -> None:
        if line.source and VLLM_PROCESS.match(line.source):
            self.engine = "vllm"
        elif self.hint is None and ("vllm" in line.text or "sglang" in line.text or "vLLM" in line.text):
            self.hint = next((e for e, words in LAUNCHED.items() if words.search(line.text)), None)

    # Milestones

    def _milestone(self, line: Line) -> bool:
        """Whether `line` was a milestone, or the access log's; both explain no failure."""
        if line.headed == "uvicorn" and line.message == phases.STARTUP_COMPLETE:
            self._enter("ready" if self.engine == "vllm" else "http", line)
            return True
        if line.level == "INFO" and "HTTP/1" in line.message and (access := phases.ACCESS.match(line.message)):
            self._access(access, line)
            return True
        if self.engine in (None, "vllm") and line.headed == "vllm" and phases.BANNER.match(line.message):
            self._start("vllm", line)
            return True
        found = phases.milestone(line.message)
        if found is None or not self._credible(found, line):
            return False
        self._pass(found, line)
        return True

    def _credible(self, found: Milestone, line: Line) -> bool:
        """Only a record of that engine's logger counts: a request's text may hold any words."""
        if found.engine in ("sglang", "vllm") and line.headed != found.engine:
            return False
        if found.engine is None:
            return line.headed == "uvicorn"
        return self.engine in (None, found.engine) or found.act == "start"

    def _pass(self, found: Milestone, line: Line) -> None:
        if found.act == "stop":
            self._end("stopped")
            return
        if found.act == "start":
            assert found.engine is not None, "a start is an engine's"
            self._start(found.engine, line)
            return
        if found.engine is not None:
            self.engine = found.engine
        if found.act == "serve":
            if self.phase is None:
                self._enter("ready", line)
        elif found.act in ("done", "taps"):
            if found.act == "taps":
                self.taps = said_taps(line.message) or self.taps
            self._done(found.phase, line)
        elif found.act == "load":
            times, _ = self.loads.get(line.source, (0, False))
            self._load(line.source, times + 1)
            self._enter("weights" if times == 0 else "draft_weights", line)
        elif found.phase != "warmup" or self.phase == "http":
            if found.engine == "vllm":
                self.runner = runner_of(line.message) or self.runner
            self._enter(found.phase, line)

    def _load(self, rank: str, times: int, through: bool = False) -> None:
        if rank in self.loads or len(self.loads) < MAX_RANKS:
            self.loads[rank] = (times, through)

    def _done(self, phase: str, line: Line) -> None:
        if phase == "weights":
            self._load(line.source, max(1, self.loads.get(line.source, (1, False))[0]), through=True)
        if self.phase == phase or (phase == "weights" and self.phase == "draft_weights"):
            self.progress = 1.0
            self._goes_well()
        elif self.phase is None or phase in ("kv_cache", "graphs"):
            self._enter(phase, line)

    def _start(self, engine: Engine, line: Line) -> None:
        """Another server's log begins here, unless this one has only begun."""
        if self.phase not in (None, "args") or self.end or self.engine not in (None, engine):
            self.phase = self.progress = self.shards = self.taps = self.runner = self.end = self.moment = None
            self.place, self.soft = (-1, 0), False
            self.phase_starts, self.loads, self.clues, self.traces = {}, {}, Clues(), Tracebacks()
        self.engine = engine
        self._enter("args", line)

    def _enter(self, phase: str, line: Line) -> None:
        """`phase` begins, unless a later one has: ranks are mixed, and floods hold old words."""
        if self.end and not self.soft:
            return
        if (place := self._place(phase, line)) > self.place:
            self.phase, self.place, self.progress, self.shards = phase, place, None, None
            if phase not in self.phase_starts:
                self.moment = when(line.time, self.moment, self.today) or self.last_time()
                self.phase_starts[phase] = self.moment
        self._goes_well()

    def _place(self, phase: str, line: Line) -> tuple[int, int]:
        """SGLang before 0.5.16 starts over for the draft: its weights come after the target's graphs."""
        times, _ = self.loads.get(line.source, (0, False))
        last = phase in ("http", "warmup", "ready")
        return 2 if last else int(times > 1), phases.ORDERS[self.engine or "sglang"].index(phase)

    def _goes_well(self) -> None:
        if self.soft:
            self.end, self.soft = None, False
            self.clues.forgive()

    def _bar(self, line: Line, bar: re.Match[str]) -> None:
        done, total = int(bar["done"]), int(bar["total"])
        what = bar["what"].strip()
        if not 0 <= done <= total or total == 0 or (self.end and not self.soft):
            return
        if phases.WEIGHT_BARS.match(what):
            if done == 0 and self.phase == "weights" and any(through for _, through in self.loads.values()):
                self._enter("draft_weights", line)
            if self.phase in (None, "args", "distributed"):
                self._enter("weights", line)
            if self.phase in ("weights", "draft_weights"):
                self.shards, self.progress = (done, total), done / total
        elif what.startswith("Capturing") and self.phase is not None:
            self._enter("graphs", line)
        if self.phase == "graphs" and phases.GRAPH_BARS.match(what):
            self.progress = done / total

    def _access(self, access: re.Match[str], line: Line) -> None:
        if access["status"] != "200":
            return
        if access["path"] in ("/model_info", "/get_model_info") and self.engine is None:
            self.engine = "sglang"
        if self.engine is None:
            return
        if access["path"] in ("/health", "/health_generate"):
            self._enter("ready", line)
        elif self.engine == "sglang" and self.phase == "http":
            self._enter("warmup", line)

    def _own(self, line: Line) -> bool:
        """A line of our own engine server (launch/own_lines.py)."""
        said = own_lines.LINE.match(line.message)
        if said is None:
            return False
        value = said["value"] or ""
        if said["word"] == "phase" and value == "args":
            self._start("embedded", line)
        elif said["word"] == "phase" and value in phases.STATES:
            self.engine = "embedded"
            self._enter(value, line)
            if said["total"] and value == self.phase and int(said["done"]) <= int(said["total"]) > 0:
                self.progress = int(said["done"]) / int(said["total"])
                if value in ("weights", "draft_weights"):
                    self.shards = int(said["done"]), int(said["total"])
        elif said["word"] == "ready":
            self.engine = "embedded"
            self._enter("ready", line)
        elif said["word"] == "stopped":
            self._end("stopped")
        elif said["word"] == "failed":
            self.engine = "embedded"
            if not self._failing(line, None):
                self.clues.add(own_clue(self.lines, value, line.text))
            self._end("crashed")
        return True

    # Failures

    def _opens(self, line: Line) -> None:
        """A traceback begins, perhaps in the record that says why it is shown."""
        ending = not line.message.startswith(tracebacks.OPENS) and self._failing(line, None)
        self.traces.begin(line, ending)

    def _goes_on(self, line: Line, trace: Traceback) -> bool:
        """Whether `line` is a frame or the exception of `trace`; more of its message is also read for itself."""
        message = line.message
        if trace.ended:
            trace.details += 1
            if trace.details > tracebacks.MAX_DETAILS:
                self.traces.open = {key: t for key, t in self.traces.open.items() if t is not trace}
                self.joined = None
            elif self.joined and len(self.joined.evidence) + len(message) < DETAIL_CHARACTERS:
                self.joined.evidence += " " + message.strip()
            return False
        if message[:1] in (" ", ""):
            if frame := tracebacks.FRAME.match(message):
                trace.frame = f"{frame['file'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name'] or ''}".strip()
                if self.engine is None:
                    self.engine = next((e for e, path in OWN_FRAMES.items() if path in frame["file"]), None)
            trace.frames += 1
            return trace.frames < tracebacks.MAX_FRAMES
        if not tracebacks.EXCEPTION.match(message):
            return False
        trace.ended = True
        self._exception(line, trace)
        return True

    def _exception(self, line: Line, trace: Traceback) -> None:
        tight = not trace.caught
        if found := find(line.message, self.engine, self.phase, raw=False):
            new = clue(self.lines, found[0], found[0].advise(found[1]), tight, line.text)
            if found[0].fatal and tight:
                self._end(found[0].state)
        else:
            new = exception_clue(self.lines, tight, line.text, trace.frame)
        if trace.chained and self.chained and self.chained.code == new.code:
            self.clues.replace(self.chained, new)
        else:
            self.clues.add(new)
        self.chained = new
        if trace.fatal:
            self._end("crashed")
        elif tight and self.phase != "ready" and not self.end:
            self._end("crashed")
            self.soft = not (found and found[0].fatal)

    def _failing(self, line: Line, trace: Traceback | None) -> bool:
        """Whether `line` says that the server is gone. A row that it fits is a clue."""
        if line.level in ("DEBUG", "INFO", "WARNING"):
            return False
        raw = trace is None and not (line.headed or line.level or line.source)
        found = find(line.message, self.engine, self.phase, raw)
        if found is None:
            return False
        row, match = found
        named = engine_named(row, match)
        if row.fatal and "prog" in match.groupdict() and named is None and self.engine is None:
            return False
        tight = row.fatal or (trace is not None and not trace.caught)
        new = clue(self.lines, row, row.advise(match), tight, line.text)
        if not tight and trace is None and line.level == "":
            if SURVIVED.search(line.message):
                return False
            if line.headed:  # SGLang's records have no level: a warning looks like an error, so it explains less
                new.kind = "symptom"
        self.clues.add(new)
        self.joined = new if trace is not None and line.message[:1] == " " else None
        if row.fatal:
            if self.engine is None:
                self.engine = named or self.hint
            self._end(row.state)
        return row.fatal

    def _end(self, state: str) -> None:
        """The first end counts; one that a later milestone could undo is made lasting by a second."""
        if self.end is None:
            self.end, self.clues.ended_at = state, self.lines
        self.soft = False
