"""`metrics.jsonl`, one line an optimiser step: the source of curves, of the best step, and of when to stop.

TensorBoard's file beside it (`tensorboard --logdir DRAFT`) is made of the same lines. A resume drops the lines of steps
that it computes again, and a line cut by a kill.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.formats.events import first_record, scalars_record
from eyas.progress import say
from eyas.run import disk_error, write_atomic
from eyas.stage import HELD_OUT, METRICS, metric_lines
from eyas.training.loss import Sums

EVENTS = "events.out.tfevents.eyas"
Line = dict[str, Any]


class Metrics:
    """The lines of the run in `folder`, up to `step`, and those that follow. Only who `writes` touches the files.

    Raises InputError for a line that cannot be read, other than the last.
    """

    def __init__(self, folder: Path, step: int, writes: bool = True) -> None:
        self.path, self.events, self.writes = folder / METRICS, folder / EVENTS, writes
        self.lines = metric_lines(self.path, step)
        self.gone = {line["step"] for line in self.measured if not (folder / f"step-{line['step']}").is_dir()}
        """Measured steps of before whose checkpoints are no more: they cannot be the draft."""
        best = highest(self.measured)
        if best is not None and best["step"] in self.gone:
            say(
                f"train: the checkpoint of step {best['step']}, the best so far, is gone: another one will be the draft"
            )
        if not writes:
            return
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        begun = self.lines[0].get("time", 0.0) if self.lines else 0.0
        write_atomic(self.events, first_record(begun) + b"".join(map(scalars_record, self.lines)))

    def append(self, line: Line) -> None:
        """Raises InputError on a full disk."""
        self.lines.append(line)
        if not self.writes:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            with self.events.open("ab") as file:
                file.write(scalars_record(line))
        except OSError as error:
            raise disk_error(self.path, error) from error

    @property
    def measured(self) -> list[Line]:
        """The lines with a held-out accept length."""
        return [line for line in self.lines if HELD_OUT in line]

    @property
    def best(self) -> Line | None:
        """The line of the highest held-out accept length, the later of equals, of steps whose checkpoints are kept."""
        return highest([line for line in self.measured if line["step"] not in self.gone])

    def overtrained(self, patience: int) -> bool:
        """Whether the last `patience` measurements (0: never) are below the best while the loss is below its own.

        Losses are means over the steps since the measurement before. A loss that rises too is no over-training.
        """
        measured, best = self.measured, highest(self.measured)
        if best is None or patience == 0:
            return False
        place = measured.index(best)
        if len(measured) - 1 - place < patience:
            return False
        before = measured[place - 1]["step"] if place else 0
        recent = measured[-patience - 1]["step"]
        return self._loss(recent, measured[-1]["step"]) < self._loss(before, best["step"])

    def _loss(self, after: int, to: int) -> float:
        losses = [line["loss"] for line in self.lines if after < line["step"] <= to]
        return sum(losses) / len(losses)


def highest(measured: Sequence[Line]) -> Line | None:
    return max(measured, key=lambda line: (line[HELD_OUT], line["step"]), default=None)


def metrics(step: int, tokens: int, loss: float, sums: Sums, rate: float, norm: float) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": tokens,
        "loss": round(loss, 5),
        "loss_per_step": [round(value, 5) for value in sums.mean_loss()],
        "accuracy": [round(value, 5) for value in sums.accuracy()],
        "rows": [int(value) for value in sums.rows],
        "learning_rate": rate,
        "gradient_norm": round(norm, 4),
    }


def note(line: dict[str, Any]) -> str:
    accuracy = " ".join(f"{value:.2f}" for value in line["accuracy"])
    held = f", held-out accept length {line[HELD_OUT]:.3f}" if HELD_OUT in line else ""
    return f"step {line['step']}, loss {line['loss']:.3f}, accuracy {accuracy}{held}"
