"""The workers of one precision: what they are given, started, asked, stopped, and why some ways have none."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.formats.draft_config import DraftConfig
from eyas.measure.prompts import BenchPrompt
from eyas.progress import say
from peers.answers import Answers, Way
from peers.convert import ConvertError, Models, convert, models
from peers.engines import ENGINES, Engine, Shape
from peers.process import Worker, WorkerError

JSON = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What is run, and where it lies."""

    target: Path
    draft: Path
    config: DraftConfig
    prompts: list[BenchPrompt]
    stop_ids: list[int]
    tokens: int
    threads: int
    eager: bool
    chain: Shape
    scan: list[Shape]
    work: Path
    answers: Answers

    @property
    def room(self) -> int:
        """Longest text, prompt and all, with a round to spare."""
        return -(-(max(len(prompt.ids) for prompt in self.prompts) + self.tokens + 64) // 64) * 64

    @property
    def ids(self) -> list[str]:
        return [prompt.id for prompt in self.prompts]

    @property
    def export(self) -> Path:
        return self.work / "export"

    def models(self, engine: Engine, precision: str) -> Models:
        return models(engine, precision, self.target, self.export, self.config.boundaries, self.work)


@dataclass
class Crew:
    """The workers of one precision, and why ways have none."""

    bench: Bench
    precision: str
    workers: dict[Way, Worker] = field(default_factory=dict)
    voids: dict[Way, str] = field(default_factory=dict)

    def start(self, way: Way) -> None:
        """Convert, start and warm up; a reason in `voids` where that fails."""
        engine, name = ENGINES[way.engine], f"{way.engine}-{way.precision}-{way.shape}"
        reason = refusal(engine, way.shape, self.bench.config)
        if reason:
            self.voids[way] = reason
            return
        try:
            command = self.command(engine, way)
            say(f"peers: starting {way}")
            log = self.bench.work / "logs" / f"{name}.log"
            self.workers[way] = Worker(command, engine.variables(self.bench.threads, self.bench.work / "compiled"), log)
        except (ConvertError, WorkerError) as error:
            self.voids[way] = str(error)
            say(f"peers: {way} is void: {error}")

    def command(self, engine: Engine, way: Way, *, plan: bool = False) -> list[str | Path]:
        """The worker's command line, once what it loads is made."""
        made = self.bench.models(engine, way.precision)
        if not plan:
            convert(made, self.bench.work / "logs" / f"{engine.name}-convert.log")
        shape = way.shape
        job = {
            "target": str(made.target),
            "draft": str(made.draft) if shape.num_steps else None,
            "precision": way.precision,
            "shape": {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens},
            "threads": self.bench.threads,
            "eager": self.bench.eager,
            "room": self.bench.room,
            "stop_ids": self.bench.stop_ids,
        }
        return [engine.python, engine.script, json.dumps(job)]

    def ask(self, way: Way, prompt: BenchPrompt, tokens: int, *, scan: bool = False) -> None:
        """One answer kept; a worker that fails is void from here on."""
        try:
            answer = self.workers[way].ask(prompt.ids, tokens)
        except WorkerError as error:
            self.voids[way] = str(error)
            say(f"peers: {way} is void: {error}")
            self.stop([way])
            return
        self.bench.answers.add(way, prompt.id, answer | {"facts": self.workers[way].facts}, scan=scan)

    def stop(self, ways: Iterable[Way]) -> None:
        for way in list(ways):
            self.workers.pop(way).stop()


def refusal(engine: Engine, shape: Shape, config: DraftConfig) -> str | None:
    """Why a way cannot be run, known before anything is started."""
    if shape.num_steps and (reason := engine.cannot(config)):
        return reason
    return engine.missing()
