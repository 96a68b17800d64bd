"""Which boundaries tell most of the next token, before any draft is trained: least squares over a target's own states.

    python benchmarks/probe_taps.py --responses RUN/responses [--target NAME] [--candidates 8,15,21,28,29] [--count 3]

A draft's row knows the taps of token t and the embedding of token t+1, and has to tell the target's next choice. The
best linear map from them to the target's normed last state (training/least_squares.py) is fitted on answers of the
train split for every candidate alone, for the default taps, and for sets grown one boundary at a time and then bettered
one by one. Told of each on held-out answers: `right`, how often the map's state gives the target's own next token, and
`unexplained`, the share of what logits feel of that state that it misses. It ranks what is linearly there; a trained
draft, which also attends to earlier rows, finds more. Writes bench/out/taps.json.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas.data.online import TargetSamples
from eyas.errors import InputError
from eyas.formats.taps import default_boundaries
from eyas.models.target import Target, load_target
from eyas.progress import Progress
from eyas.recipe import CaptureSettings, Recipe
from eyas.run import machine, read_manifest, versions, write_atomic
from eyas.training.batches import spread
from eyas.training.initialise import gain
from eyas.training.least_squares import damped
from eyas.training.teacher import Teacher

OUT = Path("bench/out/taps.json")


@dataclass(frozen=True)
class Rows:
    """States of C candidates and the token's embedding [R, (C + 1) * H], and the last state to come [R, H]."""

    known: Tensor
    wanted: Tensor


@dataclass(frozen=True)
class Probe:
    """What sets of boundaries are judged by."""

    candidates: tuple[int, ...]
    product: Tensor
    """Mean products of [known, wanted] over train rows."""
    rows: int
    heldout: Rows
    choice: Tensor
    """The target's own next token of every held-out row."""
    target: Target
    gain_H: Tensor
    metric_HH: Tensor

    def guess(self, boundaries: Sequence[int]) -> Tensor:
        """The held-out rows' last states by the best linear map."""
        hidden = len(self.metric_HH)
        places = [self.candidates.index(boundary) for boundary in boundaries] + [len(self.candidates)]
        columns = torch.cat([torch.arange(place * hidden, (place + 1) * hidden) for place in places])
        product = self.product[columns][:, columns]
        ridge = 0.125 * len(columns) / self.rows
        weight = torch.linalg.solve(damped(product, ridge), self.product[columns, -hidden:])
        return self.heldout.known[:, columns] @ weight

    def unexplained(self, boundaries: Sequence[int]) -> float:
        missed = self.guess(boundaries) - self.heldout.wanted
        spread = self.heldout.wanted - self.heldout.wanted.mean(0)
        return float(((missed @ self.metric_HH) * missed).sum() / ((spread @ self.metric_HH) * spread).sum())

    def right(self, boundaries: Sequence[int]) -> float:
        return float((chosen(self.target, self.guess(boundaries) * self.gain_H) == self.choice).double().mean())

    def figures(self, boundaries: Sequence[int]) -> dict[str, object]:
        right, unexplained = self.right(boundaries), self.unexplained(boundaries)
        return {"boundaries": list(boundaries), "right": round(right, 4), "unexplained": round(unexplained, 4)}


def chosen(target: Target, normed_RH: Tensor) -> Tensor:
    return torch.cat([target.logits(rows).argmax(-1) for rows in normed_RH.split(256)])


def rows_of(samples: TargetSamples, teacher: Teacher, gain_H: Tensor, groups: list[list[int]], bar: Progress) -> Rows:
    """Of the rows before a supervised token of these samples."""
    embedding, hidden = teacher.target.embedding, len(gain_H)
    known, wanted = [], []
    for group in groups:
        for sample in samples.read_all(group):
            keep = sample.loss_mask_T[1:].nonzero().flatten()
            token = embedding[sample.ids_T[1:][keep].long()].float()
            token = token / token.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
            known.append(torch.cat([sample.taps_TA[keep].float(), token], dim=1))
            wanted.append(teacher.normed(sample.last_hidden_TH[1:][keep]).float() / gain_H)
            bar.advance(1)
    assert known and known[0].shape[1] % hidden == 0, "taps are whole states"
    return Rows(torch.cat(known), torch.cat(wanted))


@torch.no_grad()
def prepare(options: argparse.Namespace) -> Probe:
    target = load_target(options.target, dtype="float32")
    candidates = tuple(sorted({*options.candidates, *default_boundaries(target.num_hidden_layers)}))
    settings = CaptureSettings(boundaries=candidates, precision="float32", store="float32", batch_tokens=2048)
    samples = TargetSamples(options.responses, read_manifest(options.responses, "responses"), target, settings)
    splits = (("train", options.rows), ("heldout", 4096))
    groups = [spread(samples, samples.of_split(split), rows) for split, rows in splits]
    if not groups[1]:
        raise InputError(
            wanted="held-out answers to judge by",
            got="none in these responses",
            where=str(options.responses),
            next="eyas prompts --heldout 24, then respond again",
        )
    teacher = Teacher(target, torch.arange(0), "before")
    gain_H = gain(target.final_norm, target.embedding[0].float())
    gain_H = torch.where(gain_H.abs() < 1e-3, 1.0, gain_H)
    with Progress("taps", sum(len(group) for some in groups for group in some), "samples") as bar:
        train, heldout = (rows_of(samples, teacher, gain_H, some, bar) for some in groups)
    unit = train.known.std(0).clamp(min=1e-6)
    joined = torch.cat([train.known / unit, train.wanted], dim=1)
    weight_VH = target.head.weight.float() * gain_H
    return Probe(
        candidates=candidates,
        product=joined.T @ joined / len(joined),
        rows=len(joined),
        heldout=Rows(heldout.known / unit, heldout.wanted),
        choice=chosen(target, heldout.wanted * gain_H),
        target=target,
        gain_H=gain_H,
        metric_HH=weight_VH.T @ weight_VH / len(weight_VH),
    )


@torch.no_grad()
def grown(probe: Probe, count: int) -> list[int]:
    """The set that is left when no boundary of it can be changed for a better one."""
    found: list[int] = []
    while len(found) < count:
        found = min(
            ([*found, other] for other in probe.candidates if other not in found), key=lambda s: probe.unexplained(s)
        )
    while True:
        changed = [
            [other if place == index else kept for index, kept in enumerate(found)]
            for place in range(count)
            for other in probe.candidates
            if other not in found
        ]
        best = min([found, *changed], key=probe.unexplained)
        if best is found:
            return sorted(found)
        found = best


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--target", default=Recipe().target.name)
    parser.add_argument("--candidates", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000, help="tokens of train samples that are read, about")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    probe = prepare(options)
    default = default_boundaries(probe.target.num_hidden_layers)
    alone = [probe.figures([boundary]) for boundary in probe.candidates]
    best = probe.figures(grown(probe, options.count))
    report = {"alone": alone, "default": probe.figures(default), "best": best, "rows": probe.rows}
    report |= {"heldout_rows": len(probe.choice), "machine": machine(), "versions": versions()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    for name, row in (*(("alone", row) for row in alone), ("default", report["default"]), ("best", best)):
        print(f"{name:8} {row['boundaries']!s:14} right {row['right']:.3f}  unexplained {row['unexplained']:.3f}")


if __name__ == "__main__":
    main()
