"""The built-in bank and the fixed test set."""

import re
from collections import Counter
from itertools import islice

import pytest

from eyas.data.bank import (
    FOLLOW_UP_SHARE,
    KINDS,
    SLOT,
    Bank,
    Family,
    Topic,
    generate,
    iter_prompts,
    load_bank,
    load_test_set,
)
from eyas.errors import InputError

GOLDEN_IDS = ["bank-f4146d85e70e", "bank-9f887f8646d4", "bank-ce6d94c33064"]


def opening(text: str) -> tuple[str, ...]:
    """The first four words, lower case."""
    return tuple(re.findall(r"[\w'-]+", text.lower())[:4])


def test_the_train_split_holds_more_than_a_hundred_thousand_distinct_prompts():
    prompts = generate(101_000, seed=0, split="train")
    assert len({prompt.turns[0] for prompt in prompts}) == 101_000
    assert len({prompt.id for prompt in prompts}) == 101_000


def test_the_bank_is_as_broad_as_promised():
    bank = load_bank()
    assert len({topic.domain for topic in bank.topics}) >= 12
    assert len(bank.topics) >= 500
    assert len(bank.families) >= 24
    assert len({topic.name for topic in bank.topics}) == len(bank.topics)


def test_train_and_heldout_share_neither_topics_nor_domains_nor_families():
    bank = load_bank()
    heldout_topics = {topic.name for topic in bank.topics if topic.heldout}
    heldout_families = {family.name for family in bank.families if family.heldout}
    train, heldout = generate(20_000, 3, "train"), generate(5_000, 3, "heldout")
    assert {prompt.topic for prompt in heldout} <= heldout_topics
    assert {prompt.family for prompt in heldout} == heldout_families
    assert not {prompt.topic for prompt in train} & heldout_topics
    assert not {prompt.family for prompt in train} & heldout_families
    assert not {topic.domain for topic in bank.topics if topic.heldout} & {
        topic.domain for topic in bank.topics if not topic.heldout
    }
    assert not {prompt.turns[0] for prompt in train} & {prompt.turns[0] for prompt in heldout}


def test_the_same_seed_gives_the_same_prompts_and_a_longer_draw_only_adds_to_a_shorter_one():
    assert generate(50, 7, "train") == generate(200, 7, "train")[:50]
    assert generate(50, 7, "train") != generate(50, 8, "train")


def test_the_draw_is_the_same_on_every_platform():
    assert [prompt.id for prompt in generate(3, 0, "train")] == GOLDEN_IDS


def test_a_small_draw_covers_every_family_evenly_and_does_not_repeat_topics_early():
    counts = Counter(prompt.family for prompt in generate(720, 0, "train"))
    assert len(counts) == sum(not family.heldout for family in load_bank().families)
    assert max(counts.values()) - min(counts.values()) <= 1
    explain = [prompt.topic for prompt in islice(iter_prompts(0, "train"), 720) if prompt.family == "explain"]
    assert len(set(explain)) == len(explain)


def test_some_prompts_have_a_second_turn():
    share = sum(len(prompt.turns) == 2 for prompt in generate(5_000, 0, "train")) / 5_000
    assert 0.03 < share < FOLLOW_UP_SHARE


def test_prompts_are_clean():
    for prompt in generate(30_000, 0, "train") + generate(10_000, 0, "heldout"):
        for turn in prompt.turns:
            prose = re.sub(r"```.*?```", "", turn, flags=re.DOTALL)
            assert turn == turn.strip() and turn[0].upper() == turn[0], turn
            assert turn[-1] in ".?!`:" or turn.endswith(prompt.topic.split("/", 2)[-1]), turn
            assert not SLOT.search(prose), turn
            assert not re.search(r"  |\.\.(?!\.)|\?\.| ,| \.|,\.|!\.", prose), turn
            assert not re.search(r"\b(a (?!one)[aeio][a-z]|an (?!sql)[bcdfgjklmnpqrstvwxyz][a-z])", prose.lower()), turn
            assert not re.search(r"\b([A-Za-z]+) \1\b", prose), turn
            assert turn.isascii(), turn


def test_every_slot_of_every_family_can_be_filled():
    bank = load_bank()
    for family in bank.families:
        for text in (*family.phrasings, *family.endings):
            names = {name for name in SLOT.findall(text) if not name[0].isdigit()}
            assert names <= set(KINDS[family.kind]) | set(bank.slots), (family.name, text)
        for text in family.phrasings:
            assert set(SLOT.findall(text)) & set(KINDS[family.kind]), f"{family.name} names its topic: {text}"


def test_asking_for_more_than_the_bank_has_says_how_many_there_are():
    topics = tuple(Topic("home", "deeds", {"deed": deed}, heldout=False) for deed in ("paint a wall", "mend a tap"))
    family = Family("how_to", "deeds", ("How do I {deed}?", "Teach {audience} to {deed}."), ("", "Be brief."))
    bank = Bank(topics, (family,), {"audience": ("a child", "a cook")})
    everything = generate(12, 0, "train", bank)  # 2 topics x (1 + 2 audiences) x 2 endings
    assert len({prompt.turns for prompt in everything}) == 12
    with pytest.raises(InputError, match="13 distinct train prompts; got 12, all that the built-in bank has"):
        generate(13, 0, "train", bank)


def test_the_test_set_is_large_varied_and_well_formed():
    rows = load_test_set()
    assert len(rows) >= 210
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({str(row["messages"]) for row in rows}) == len(rows)
    assert len({row["kind"] for row in rows}) >= 15
    assert sum(len(row["messages"]) > 1 for row in rows) >= 10
    for row in rows:
        assert set(row) == {"id", "kind", "messages"}
        assert all(turn["role"] == "user" and turn["content"].strip() for turn in row["messages"])


def test_the_bank_cannot_produce_a_test_prompt():
    """No test prompt fits a phrasing with anything in its slots, opens with a phrasing's fixed words (three or more),
    or shares its first four words with a drawn prompt."""
    bank = load_bank()
    phrasings = [text for family in bank.families for text in family.phrasings if text != "{sum}"]
    patterns = [re.compile("(.+)".join(map(re.escape, re.split(r"\{[a-z]+\}", text))), re.I) for text in phrasings]
    fixed = [text.split("{")[0].lower() for text in phrasings]
    fixed = [text for text in fixed if len(text.split()) >= 3]
    drawn = {opening(prompt.turns[0]) for split in ("train", "heldout") for prompt in generate(20_000, 5, split)}
    for row in load_test_set():
        text = row["messages"][0]["content"]
        assert not any(text.lower().startswith(words) for words in fixed), text
        assert not any(pattern.fullmatch(text) for pattern in patterns), text
        assert len(opening(text)) < 4 or opening(text) not in drawn, text
