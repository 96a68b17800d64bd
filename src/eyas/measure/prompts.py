"""The prompts a bench runs on: the built-in test set, a prompts folder's held-out part, or any JSONL file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.data.bank import load_test_set
from eyas.data.prompts import read_prompts
from eyas.data.records import Message, read_records
from eyas.data.samples import render
from eyas.errors import InputError
from eyas.models.target import Target
from eyas.run import is_complete


@dataclass(frozen=True)
class BenchPrompt:
    """A rendered prompt, up to the header of the assistant's turn."""

    id: str
    ids: tuple[int, ...]


def bench_prompts(source: str, target: Target, limit: int | None, room: int) -> list[BenchPrompt]:
    """`limit` prompts spread evenly over the source (kinds lie together in it), each leaving `room` tokens of context.

    Raises InputError for a source that cannot be read or holds no usable prompt.
    """
    rendered = [
        BenchPrompt(name, tuple(render(target.tokenizer, messages).ids)) for name, messages in conversations(source)
    ]
    if not rendered:
        raise InputError(wanted="a prompt", got="none", where=source, next="--prompts test, or a file that holds some")
    fitting = [prompt for prompt in rendered if len(prompt.ids) + room <= target.context_length]
    if not fitting:
        raise InputError(
            wanted=f"prompts that leave {room} tokens of the target's context of {target.context_length}",
            got=f"none among {len(rendered)}",
            where=source,
            next="--max-new-tokens with a smaller number, or shorter prompts",
        )
    return spread(fitting, limit)


def spread(prompts: Sequence[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """At most `limit` of `prompts`, at even distances, in order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def conversations(source: str) -> list[tuple[str, list[Message]]]:
    """(id, messages ending with the user's) of `test`, a prompts stage's file or folder, or a JSONL file."""
    if source == "test":
        return [(row["id"], row["messages"]) for row in load_test_set()]
    path = Path(source)
    if source == "heldout" and not path.exists():
        raise InputError(
            wanted="a prompts folder: `heldout` means the held-out part of a run, inside `eyas run`",
            got="'heldout', and there is no such file",
            where="bench.prompts",
            next="--prompts RUN/prompts",
        )
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name == "prompts.jsonl") and is_complete(folder):
        rows = read_prompts(folder)
        heldout = [row for row in rows if row["split"] == "heldout"]
        return [(row["id"], row["messages"]) for row in heldout or rows]
    records, _ = read_records(path)
    return [(record.id, _to_last_question(record.messages)) for record in records]


def _to_last_question(messages: Sequence[Message]) -> list[Message]:
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return list(messages[: last + 1])
