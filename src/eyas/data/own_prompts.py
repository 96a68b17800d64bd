"""Questions that the target wrote itself: more voices than the bank's, on topics that the bank trains on. Torch-free.

The target is asked for questions and tasks about a topic, its answers sampled; their lines are cleaned, and what is no
question or task, said before, on a held-out topic or near a test prompt is dropped, counted under its reason.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from random import Random
from typing import Any

from eyas.data.bank import Topic, load_bank, load_test_set

Row = dict[str, Any]

ASKED = (
    "Write {count} different questions that somebody might ask about {topic}. Put each question on a line of its own.",
    "Write {count} short tasks about {topic} that one could give to an assistant. One task a line, nothing else.",
    "What would people want to know about {topic}? Write {count} questions, each from a different person, one a line.",
    "Write {count} requests that begin with a verb and have to do with {topic}. One a line.",
    "Write {count} unusual questions about {topic}, one a line, without answers.",
)
TOPICS = {
    "things": "{thing}",
    "deeds": "how to {deed}",
    "choices": "{choice}",
    "matters": "{matter}",
    "lists": "{list}",
    "scenes": "{scene}",
    "pairs": "{a} and {b}",
    "dishes": "cooking {dish}",
}
"""Kind of topic to how it is spoken of; kinds that are no subject of a question are left out."""
COUNTS = (5, 6, 8, 10)
MARKS = re.compile(r"^\W*(?:(?:question|task|request|q)?\s*\d{1,2}\s*[.):\]-]|[-*•–]|[a-z][.):])?[\s\"'*_]*", re.I)
FEWEST, MOST = 4, 40
"""Words of a prompt."""
ALIKE = 0.5
"""Share of words in common, of those in either, from which a prompt is near another."""
ASKING = "what how why when where who whose which can could do does did is are was were should would will have has if"
DOING = (
    "tell explain describe write list name give compare suggest help make create show find plan recommend summarize "
    "define discuss imagine draw design draft prepare compose outline identify choose translate rewrite calculate "
    "teach invent sketch rank review propose"
)
OPENINGS = frozenset([*ASKING.split(), *DOING.split()])
"""First words of a question or a task: a small target's other lines are mostly talk."""
HOLES = re.compile(r"[\[\]{}<>_|\\]|\.\.\.|\bxx+\b", re.I)
TWICE = re.compile(r"\b([a-z]{3,})\b \1\b", re.I)


def requests(count: int, seed: int) -> list[Row]:
    """What the target is asked, as rows of a JSONL file of prompts: distinct train topics in turn, shuffled anew."""
    rng = Random(f"eyas own prompts {seed}")
    topics = [topic for topic in load_bank().topics if not topic.heldout and topic.kind in TOPICS]
    topics = [topic for topic in topics if not on_heldout_topic(spoken_of(topic))]
    rows, deck = list[Row](), list[Topic]()
    for number in range(count):
        if not deck:
            deck = sorted(topics, key=lambda topic: (rng.random(), topic.name))
        spoken = spoken_of(deck.pop())
        ask = ASKED[int(rng.random() * len(ASKED))].format(count=COUNTS[int(rng.random() * len(COUNTS))], topic=spoken)
        rows.append({"id": f"ask-{seed}-{number:05d}", "messages": [{"role": "user", "content": ask}]})
    return rows


def spoken_of(topic: Topic) -> str:
    """A topic as it stands after "about"."""
    return TOPICS[topic.kind].format(**topic.fields)


def harvest(answers: Iterable[str]) -> tuple[list[Row], dict[str, int]]:
    """(prompts found in the answers, in their order, as rows of a JSONL file; lines dropped, by reason)."""
    rows, dropped, seen = list[Row](), Counter[str](), set[str]()
    for answer in answers:
        for line in answer.splitlines():
            text = cleaned(line)
            if not text:
                continue
            reason = unfit(text) or ("said before" if said(text) in seen else None)
            if reason is not None:
                dropped[reason] += 1
                continue
            seen.add(said(text))
            name = "own-" + hashlib.sha256(text.encode()).hexdigest()[:12]
            rows.append({"id": name, "messages": [{"role": "user", "content": text}]})
    return rows, dict(sorted(dropped.items()))


def cleaned(line: str) -> str:
    """A line without its number, bullet, bold marks and quotes."""
    return MARKS.sub("", line.strip(), count=1).rstrip("\"'*_ ")


def unfit(text: str) -> str | None:
    """Why a line is no prompt to train on; None where it is one."""
    count = len(words(text))
    if not FEWEST <= count <= MOST:
        return "too short or too long"
    if text[-1] not in "?.!" or not text[0].isupper() or not text.isascii():
        return "no whole sentence"
    if words(text)[0] not in OPENINGS or re.search(r"[.!?]\s", text):
        return "no question, no task, or more than one"
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
    topics = (topic for topic in load_bank().topics if topic.heldout and topic.kind in TOPICS)
    return tuple(f" {said(value)} " for topic in topics for value in topic.fields.values())
