"""The built-in prompt bank: hand-written topics times hand-written task families, drawn from a seed.

`topics/DOMAIN.toml` holds a domain's topics by kind (KINDS); `families.toml` says which kind a family takes and how its
requests read. Domains and families marked `heldout` are only ever used with each other, so train and held-out
prompts share neither a topic nor a task. The same seed gives the same prompts on every platform: all choices come from
`Random.random()`, the one generator method whose sequence Python promises to keep.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import islice
from random import Random
from typing import Any, Literal, TypeVar

from eyas.errors import InputError

Split = Literal["train", "heldout"]
Item = TypeVar("Item")

KINDS = {
    "things": ("thing",),
    "choices": ("choice",),
    "deeds": ("deed",),
    "pairs": ("a", "b"),
    "matters": ("matter",),
    "scenes": ("scene",),
    "lists": ("list",),
    "talks": ("talk",),
    "passages": ("passage",),
    "dishes": ("dish",),
    "programs": ("program",),
    "bugs": ("code", "symptom"),
    "queries": ("schema", "ask"),
    "sums": ("sum",),
}
"""Kind of topic to the slots that one of its topics fills."""

FOLLOW_UP_SHARE = 0.1
"""Share of a family's prompts that get a second user turn where the family has follow-ups: about 5% of all prompts."""
MISSES = 200
"""A family that deals so many known prompts in a row is used up."""
SLOT = re.compile(r"\{([a-z]+|\d+-\d+)\}")


@dataclass(frozen=True)
class Topic:
    domain: str
    kind: str
    fields: Mapping[str, str]
    heldout: bool

    @property
    def name(self) -> str:
        """Unique and readable: domain/kind/text."""
        return f"{self.domain}/{self.kind}/{' | '.join(self.fields.values())}"


@dataclass(frozen=True)
class Family:
    name: str
    kind: str
    phrasings: tuple[str, ...]
    endings: tuple[str, ...] = ("",)
    follow_ups: tuple[str, ...] = ()
    heldout: bool = False


@dataclass(frozen=True)
class Bank:
    topics: tuple[Topic, ...]
    families: tuple[Family, ...]
    slots: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class BankPrompt:
    """One drawn prompt: one user turn, or two (the target answers each)."""

    turns: tuple[str, ...]
    topic: str
    family: str
    split: Split

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": turn} for turn in self.turns]

    @property
    def id(self) -> str:
        """From the text alone: the same prompt has the same id under any seed."""
        return "bank-" + hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:12]


def data_folder() -> Traversable:
    """The package data beside this module."""
    return resources.files("eyas.data")


@cache
def load_bank() -> Bank:
    """The packaged topics and families."""
    tables = tomllib.loads(data_folder().joinpath("families.toml").read_text("utf-8"))
    slots = {name: tuple(values) for name, values in tables.pop("slots").items()}
    families = tuple(_family(name, table) for name, table in tables.items())
    files = sorted(data_folder().joinpath("topics").iterdir(), key=lambda file: file.name)
    topics = [topic for file in files if file.name.endswith(".toml") for topic in _domain(file)]
    return Bank(tuple(topics), families, slots)


def _family(name: str, table: dict[str, Any]) -> Family:
    unknown = set(table) - {"kind", "phrasings", "endings", "follow_ups", "heldout"}
    assert not unknown, f"families.toml, {name}: unknown {unknown}"
    return Family(
        name,
        table["kind"],
        tuple(table["phrasings"]),
        tuple(table.get("endings", [""])),
        tuple(table.get("follow_ups", [])),
        table.get("heldout", False),
    )


def _domain(file: Traversable) -> Iterator[Topic]:
    domain = file.name.removesuffix(".toml")
    table = tomllib.loads(file.read_text("utf-8"))
    heldout = table.pop("heldout", False)
    for kind, entries in table.items():
        for entry in entries:
            values = [entry] if isinstance(entry, str) else entry
            yield Topic(domain, kind, dict(zip(KINDS[kind], values, strict=True)), heldout)


def iter_prompts(seed: int, split: Split, bank: Bank | None = None) -> Iterator[BankPrompt]:
    """Distinct prompts of one split until the bank is used up; the first n do not depend on how many are taken.

    Families take turns, and each deals its topics like a shuffled deck, so that even a few prompts cover both.
    """
    bank = bank or load_bank()
    rng = Random(f"eyas bank {seed} {split}")
    heldout = split == "heldout"
    dealers = [_Dealer(family, bank, rng) for family in bank.families if family.heldout == heldout]
    seen: set[str] = set()
    while dealers:
        for dealer in _shuffled(rng, dealers):
            prompt = dealer.deal(split, seen)
            if prompt is None:
                dealers.remove(dealer)
            else:
                yield prompt


def generate(count: int, seed: int, split: Split, bank: Bank | None = None) -> list[BankPrompt]:
    """The first `count` prompts of `iter_prompts`. Raises InputError where the bank has fewer, saying how many."""
    prompts = list(islice(iter_prompts(seed, split, bank), count))
    if len(prompts) < count:
        raise InputError(
            wanted=f"{count:,} distinct {split} prompts",
            got=f"{len(prompts):,}, all that the built-in bank has",
            where="prompts.source = 'bank'",
            next=f"set prompts.{split}={len(prompts)} or less, or give a JSONL file as prompts.source",
        )
    return prompts


class _Dealer:
    """One family's side of the draw."""

    def __init__(self, family: Family, bank: Bank, rng: Random) -> None:
        self.family, self.slots, self.rng = family, bank.slots, rng
        self.topics = [topic for topic in bank.topics if (topic.kind, topic.heldout) == (family.kind, family.heldout)]
        assert self.topics, f"family {family.name} has topics in its split"
        self.deck: list[Topic] = []

    def deal(self, split: Split, seen: set[str]) -> BankPrompt | None:
        """A prompt whose first turn is not in `seen`, adding it; None where the family seems used up."""
        for _ in range(MISSES):
            self.deck = self.deck or _shuffled(self.rng, self.topics)
            topic = self.deck.pop()
            ask = self._ask(topic)
            if ask in seen:
                continue
            seen.add(ask)
            turns = [ask]
            if self.family.follow_ups and self.rng.random() < FOLLOW_UP_SHARE:
                turns.append(_pick(self.rng, self.family.follow_ups))
            return BankPrompt(tuple(turns), topic.name, self.family.name, split)
        return None

    def _ask(self, topic: Topic) -> str:
        phrasing, ending = _pick(self.rng, self.family.phrasings), _pick(self.rng, self.family.endings)
        text = self._fill(f"{phrasing} {ending}".strip(), dict(topic.fields))
        return text[0].upper() + text[1:]

    def _fill(self, text: str, chosen: dict[str, str]) -> str:
        """Slots replaced, also inside values; within a prompt a named slot keeps its value, a range does not."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name[0].isdigit():
                low, high = map(int, name.split("-"))
                return str(low + int(self.rng.random() * (high - low + 1)))
            if name not in chosen:
                chosen[name] = _pick(self.rng, self.slots[name])
            return self._fill(chosen[name], chosen)

        return SLOT.sub(value, text)


def _pick(rng: Random, items: Sequence[Item]) -> Item:
    return items[int(rng.random() * len(items))]


def _shuffled(rng: Random, items: Sequence[Item]) -> list[Item]:
    order = sorted((rng.random(), index) for index in range(len(items)))
    return [items[index] for _, index in order]


def load_test_set() -> list[dict[str, Any]]:
    """The fixed, hand-written test set: {"id", "kind", "messages"} each, in file order. No bank prompt is like it."""
    text = data_folder().joinpath("test_prompts.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]
