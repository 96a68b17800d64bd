"""What was answered so far: a line an answer, so that a run that was cut goes on."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.engines import Shape

JSON = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One engine decoding one way."""

    engine: str
    precision: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.engine} {self.precision} " + (f"draft {self.shape}" if self.shape.num_steps else "plain")


@dataclass
class Answers:
    """The answers in `path`, by (scan or not, way, prompt id)."""

    path: Path
    found: dict[tuple[bool, Way, str], JSON] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Answers":
        """Those of an earlier run; a line cut off by its end is left out."""
        answers = cls(path)
        if not path.is_file():
            return answers
        *lines, cut = path.read_text().split("\n")
        for line in lines:
            row = json.loads(line)
            way = Way(row["engine"], row["precision"], Shape.parse(row["shape"]))
            answers.found[row["scan"], way, row["prompt"]] = row
        if cut:
            path.write_text("".join(f"{line}\n" for line in lines))
        return answers

    def add(self, way: Way, prompt: str, answer: JSON, *, scan: bool = False) -> None:
        """Keep one, on disk too."""
        row = {"scan": scan, "engine": way.engine, "precision": way.precision, "shape": str(way.shape)}
        row |= {"prompt": prompt, **answer}
        self.found[scan, way, prompt] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, way: Way, prompts: Sequence[str], *, scan: bool = False) -> dict[str, JSON]:
        """Prompt id to answer, of the prompts that have one."""
        return {prompt: self.found[scan, way, prompt] for prompt in prompts if (scan, way, prompt) in self.found}

    def whole(self, ways: Iterable[Way], prompt: str) -> bool:
        """Whether all of `ways` answered `prompt`: one that did not is asked again beside all the others."""
        return all((False, way, prompt) in self.found for way in ways)
