"""The draft that comes with Eyas, for the default target: where it lies, what is known of it, when it is used.

`eagle3/` beside this module, as `make shipped` leaves it (shipping/pack_draft.py): `draft/`, an export that SGLang and
vLLM load as it is; `evaluate/result.json`, what a server's acceptance is held against; `card.json`, `recipe.toml`,
`log.jsonl`. A copy of Eyas made before a draft was trained has none of it, and says so where one is asked for.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import InputError
from eyas.formats.draft_config import TargetIdentity
from eyas.recipe import TargetSettings
from eyas.run import JSON

NAMES = {"shipped": "eagle3"}
"""What is typed where a draft's folder goes, to the folder beside this module."""
SHIPPED = "shipped"
"""The one that is used where none is named."""
DRAFT, CARD, RECIPE, LOG = "draft", "card.json", "recipe.toml", "log.jsonl"
MAKE_IT = "make shipped, in a checkout of Eyas; meanwhile eyas run demo, then --draft runs/demo/export"


class Figures(BaseModel):
    """Acceptance over one set of greedy answers, drafted in chains of `steps`, by the walk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accept_length: float
    """Tokens gained a round."""
    by_steps: list[float]
    """The same for chains of 1, 2, ..."""
    survival: list[float]
    steps: int
    samples: int
    tokens: int
    rounds: int
    exact: bool
    """Whether every answer is the target's argmax throughout, so that an engine takes these very rounds."""


class Card(BaseModel):
    """What is known of a shipped draft: what it is for, how it was made, how good it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    name: str
    target: TargetIdentity
    tokenizer_hash: str
    template_hash: str | None
    form: str
    """In words: block, taps, norms, vocabulary, precision."""
    figures: dict[str, Figures]
    """`heldout`: topics and tasks of the bank that training never saw. `test`: the test set (docs/prompts.md)."""
    prompts: JSON
    """Where the questions come from, the bank's seeds among it, and how many."""
    answers: JSON
    """How many, their tokens, sampling, the checksum of responses.jsonl."""
    training: JSON
    """The step that is shipped (`of_step`), tokens until there, the run's steps, seconds, settings and precision."""
    bench: JSON | None = None
    """Plain against speculative decoding on the test set, with its machine; None where not measured."""
    commit: str
    """Of Eyas, that it was made with."""
    created: str
    """UTC, ISO 8601."""
    machine: JSON
    versions: dict[str, str]
    bytes: int
    """Of the weights."""
    sha256: dict[str, str]
    """File of `draft/` to its checksum."""

    @property
    def words(self) -> str:
        """How good it is, in half a line."""
        lengths = [f"{self.figures[key].accept_length:.2f} on {where}" for key, where in FIGURES.items()]
        return f"accept length {', '.join(lengths)}, chains of {self.figures['test'].steps}"


FIGURES = {"test": "the test set", "heldout": "held-out topics"}


def shipped_root(name: str = SHIPPED) -> Path:
    """Where the shipped draft `name` lies, or would."""
    return Path(str(resources.files(__name__))) / NAMES[name]


def draft_folder(given: str | Path) -> Path:
    """What was given where a draft's folder goes, as a folder: a shipped draft's name gives its own.

    Raises InputError for the name of one that this copy of Eyas does not hold. A folder of that name is `./shipped`.
    """
    if str(given) not in NAMES:
        return Path(given).expanduser()
    folder = shipped_root(str(given)) / DRAFT
    if not (folder / "config.json").is_file():
        raise InputError(
            wanted=f"the {given} draft of {TargetSettings().name}",
            got="none in this copy of Eyas",
            where=str(folder),
            next=MAKE_IT,
        )
    return folder


def is_here(name: str = SHIPPED) -> bool:
    """Whether this copy of Eyas holds the draft."""
    return (shipped_root(name) / DRAFT / "config.json").is_file()


def default_draft(target: str) -> tuple[Path | None, str | None]:
    """(the draft to use where none is named, what to say of it): the shipped one, for the target that it is for."""
    if target != TargetSettings().name:
        return None, None
    if not is_here():
        return None, f"no draft comes with this copy of Eyas: {MAKE_IT}"
    card = read_card(draft_folder(SHIPPED))
    known = "" if card is None else f" ({card.words})"
    return draft_folder(SHIPPED), f"with the draft that comes with Eyas{known}; --plain goes without"


def chosen_draft(given: str | Path | None, plain: bool, target: str) -> tuple[Path | None, str | None]:
    """(the draft to use, what to say of it): none under `plain`, else the one given, else the target's default.

    Raises InputError for a draft given under `plain`.
    """
    if plain and given is not None:
        raise InputError(
            wanted="--plain or --draft",
            got=f"both, with {given}",
            where="the command line",
            next="leave one of them out",
        )
    if plain:
        return None, None
    return default_draft(target) if given is None else (draft_folder(given), None)


def read_card(draft: Path) -> Card | None:
    """The card beside a draft's folder; None where there is none. Raises InputError for one that cannot be read."""
    path = draft.parent / CARD
    if not path.is_file():
        return None
    try:
        return Card.model_validate(json.loads(path.read_text("utf-8")))
    except (ValueError, ValidationError) as error:
        raise InputError(
            wanted="a draft's card",
            got=str(error).splitlines()[0],
            where=str(path),
            next="pip install --force-reinstall eyas",
        ) from error


def shipped_facts() -> dict[str, dict[str, Any]]:
    """Of every name: whether the draft is here, and its figures and provenance."""
    return {name: _facts(name) for name in NAMES}


def _facts(name: str) -> dict[str, Any]:
    facts = {"target": TargetSettings().name, "here": is_here(name)}
    if not is_here(name):
        return {**facts, "next": MAKE_IT}
    folder = draft_folder(name)
    card = read_card(folder)
    return {**facts, "folder": str(folder), **({} if card is None else _known(card))}


def _known(card: Card) -> dict[str, Any]:
    return {
        "figures": card.words,
        "form": card.form,
        "answers": card.answers.get("samples"),
        "answer_tokens": card.answers.get("answer_tokens"),
        "steps": card.training.get("of_step"),
        "training_tokens": card.training.get("tokens"),
        "commit": card.commit,
        "created": card.created,
    }
