"""Prompts that the target wrote itself: given its chat template up to where a user speaks, it goes on as the user.

An instructed model has learned its users' turns too (Magpie, arXiv 2406.08464). What is no
prompt, was said before, is on a held-out topic or near a test prompt is dropped, counted under its reason.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from eyas.data.bank import load_bank, load_test_set
from eyas.data.decode import Request, decode
from eyas.data.responses import cut_torn_line
from eyas.data.samples import template_facts
from eyas.data.sampling import Sampler
from eyas.errors import InputError
from eyas.models.target import Target
from eyas.progress import Progress
from eyas.run import JSON, Manifest, disk_error, hash_file
from eyas.stage import begin

Row = dict[str, Any]

TURNS = "turns.jsonl"
WARMTH, NUCLEUS = 1.0, 0.9
"""Temperature and top-p: of 1,498 turns of the default target so drawn 89 % were kept, most of which make sense."""
LONGEST = 160
"""Tokens of a turn at most; one that goes on is dropped."""
BATCH = 256
NAMING = frozenset(["things", "deeds", "choices", "matters", "lists", "scenes", "pairs", "dishes"])
"""Kinds of topic whose words are a subject that a prompt may name; a held-out one of these must not be named."""
FEWEST, MOST = 4, 100
"""Words of a prompt."""
ALIKE = 0.5
"""Share of words in common, of those in either, from which a prompt is near another."""
HOLES = re.compile(r"[\[\]{}<>_|\\]{2}|<[a-z]+>|\bxx+\b|\ufffd", re.I)
TWICE = re.compile(r"\b([a-z]{3,})\b \1\b", re.I)


def write_turns(target: Target, out: Path, count: int, seed: int) -> Manifest:
    """Sample `count` user turns into `out/turns.jsonl`, {"id", "text", "finish"} a line; resumes after a kill.

    Which turns come depends on `seed` alone, each on its own number, so a longer draw holds the shorter one. Raises
    InputError for a target without a chat template, or whose template puts nothing before a user's words.
    """
    stage = begin(out, "turns", {"count": count, "seed": seed, "target": target.identity.model_dump()}, {})
    if stage.complete is not None:
        return stage.complete
    preamble = template_facts(target.tokenizer).preamble
    if not preamble:
        raise InputError(
            wanted="a chat template that opens a user's turn",
            got="nothing before the user's words",
            where="the target's chat template",
            next="ask the bank (ask = 0), or give prompts in a file",
        )
    ids = target.tokenizer.encode(preamble, add_special_tokens=False)
    path = out / TURNS
    done = {line["id"] for line in _turns(path)}
    names = [name for number in range(count) if (name := f"own-{seed}-{number:06d}") not in done]
    waiting = _Waiting([Request(name, ids, LONGEST) for name in reversed(names)])
    tokens, began = 0, time.monotonic()

    def on_step(new: int) -> None:
        nonlocal tokens
        tokens += new

    try:
        with path.open("a", encoding="utf-8") as file, Progress("turns", count, "turns", done=len(done)) as bar:
            for answer in decode(target, waiting, Sampler(WARMTH, NUCLEUS, seed), BATCH, on_step):
                text = target.tokenizer.decode(answer.ids, skip_special_tokens=True)
                file.write(json.dumps({"id": answer.request.key, "text": text, "finish": answer.finish}) + "\n")
                file.flush()
                bar.advance(1, f"{tokens / (time.monotonic() - began):,.0f} tokens/s")
    except OSError as error:
        raise disk_error(path, error) from error
    return stage.finish(files={TURNS: hash_file(path)}, facts={"preamble": preamble})


class _Waiting:
    """Requests in their order; all begin alike, so none need to be sorted."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests

    def take(self, count: int) -> list[Request]:
        taken = self.requests[-count:]
        del self.requests[-count:]
        return taken


def _turns(path: Path) -> list[JSON]:
    """What an earlier start has written, a torn last line cut off."""
    if not path.is_file():
        return []
    cut_torn_line(path)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_turns(folder: Path) -> list[str]:
    """The turns that came to an end, in the order of their numbers."""
    lines = sorted(_turns(folder / TURNS), key=lambda line: line["id"])
    return [line["text"] for line in lines if line["finish"] == "stop"]


def harvest(turns: Iterable[str]) -> tuple[list[Row], dict[str, int]]:
    """(turns that are fit to be asked, in their order, as rows of a JSONL file of prompts; the others, by reason)."""
    rows, dropped, seen = list[Row](), Counter[str](), set[str]()
    for turn in turns:
        text = turn.strip()
        reason = unfit(text) or ("said before" if said(text) in seen else None)
        if reason is not None:
            dropped[reason] += 1
            continue
        seen.add(said(text))
        name = "own-" + hashlib.sha256(text.encode()).hexdigest()[:12]
        rows.append({"id": name, "messages": [{"role": "user", "content": text}]})
    return rows, dict(sorted(dropped.items()))


def unfit(text: str) -> str | None:
    """Why a turn is no prompt to train on; None where it is one."""
    if not FEWEST <= len(words(text)) <= MOST:
        return "too short or too long"
    if HOLES.search(text) or TWICE.search(text):
        return "a hole or a stutter"
    if on_heldout_topic(text):
        return "a held-out topic"
    return "near the test set" if near_test_set(text) else None


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[\w'-]+", text.lower()))


def said(text: str) -> str:
    """What is compared to tell whether a prompt was there before."""
    return " ".join(words(text))


def near_test_set(text: str) -> bool:
    """Whether a prompt opens with a test prompt's first four words, holds one or lies in one, or shares half its words
    with a turn of one."""
    mine = words(text)
    for theirs in _test_words():
        common = set(mine) & set(theirs)
        if len(common) >= ALIKE * len(set(mine) | set(theirs)):
            return True
        if min(len(mine), len(theirs)) >= FEWEST and (mine[:FEWEST] == theirs[:FEWEST] or _holds(mine, theirs)):
            return True
    return False


def _holds(mine: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    short, long = sorted((f" {' '.join(mine)} ", f" {' '.join(theirs)} "), key=len)
    return short in long


@cache
def _test_words() -> tuple[tuple[str, ...], ...]:
    return tuple(words(turn["content"]) for row in load_test_set() for turn in row["messages"])


def on_heldout_topic(text: str) -> bool:
    """Whether a prompt names a topic that the bank holds out."""
    spoken = f" {said(text)} "
    return any(topic in spoken for topic in _heldout_topics())


@cache
def _heldout_topics() -> tuple[str, ...]:
    topics = (topic for topic in load_bank().topics if topic.heldout and topic.kind in NAMING)
    return tuple(f" {said(value)} " for topic in topics for value in topic.fields.values())
