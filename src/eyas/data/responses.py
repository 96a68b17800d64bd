"""The target answers the prompts: token ids with the prompt boundary, one durable line an answer.

`responses.jsonl`: {"id", "prompt_id", "turn", "split", "input_ids", "prompt_tokens", "finish"}. The answer is
`input_ids[prompt_tokens:]`, ends with the stop token iff finish is "stop", and alone is supervised.
"""

import bisect
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from eyas.data.decode import Answer, Request, decode
from eyas.data.samples import Message, answerable_turns, render, template_facts
from eyas.data.sampling import Sampler
from eyas.errors import InputError
from eyas.models.target import DTYPES, Target, fastest_dtype, load_target
from eyas.progress import Progress, say
from eyas.recipe import RespondSettings, TargetSettings, recorded
from eyas.run import JSON, Manifest, disk_error, hash_file, read_manifest
from eyas.stage import Stage, begin, check_file

RESPONSES, PROMPTS = "responses.jsonl", "prompts.jsonl"
SYNC_EVERY_S = 3.0


@dataclass
class Conversation:
    """A prompt and how far its answers have come."""

    id: str
    split: str
    turns: list[list[Message]]
    messages: list[Message]
    answered: int = 0

    @property
    def left(self) -> int:
        return len(self.turns) - self.answered


def respond(prompts: Path, out: Path, settings: RespondSettings, target: TargetSettings = TargetSettings()) -> Manifest:
    """Answer every user turn of every prompt in `prompts` (a prompts folder) into the responses folder `out`.

    Resumes after a kill: whole lines are kept, a torn last one is cut off. Returns at once where `out` is complete.
    Raises InputError for other settings or prompts than `out` was begun with, a bad prompts line, a target without a
    chat template, a full disk.
    """
    asked = read_manifest(prompts, "prompts")
    stage = begin(out, "responses", recorded(settings, target), {"prompts": prompts})
    if stage.complete is not None:
        return stage.complete
    lines = check_file(prompts, PROMPTS, asked)
    conversations = read_conversations(lines)
    loaded = load_target(target.name, dtype=_precision(stage, settings), trust_remote_code=target.trust_remote_code)
    facts = answer_facts(loaded, settings)
    skipped = _answer_all(stage, conversations, loaded, settings)
    answered = sum(len(c.turns) for c in conversations) - skipped.total()
    left_out = "".join(f"; {count} skipped: {reason}" for reason, count in sorted(skipped.items()))
    if conversations and not answered:
        raise InputError(
            wanted=f"at least one prompt within the target's context of {loaded.context_length} tokens",
            got=f"no answer{left_out}",
            where=str(lines),
            next="make prompts from shorter records",
        )
    say(f"responses: {answered} answers in {out}{left_out}")
    return stage.finish(
        files={RESPONSES: hash_file(out / RESPONSES)},
        facts={
            **facts,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "counts": count_lines(read_responses(out / RESPONSES)),
            "skipped": dict(skipped),
        },
    )


def answer_facts(target: Target, settings: RespondSettings) -> JSON:
    """What holds for every answer that `target` gives under these settings.

    Raises InputError for a target without a chat template.
    """
    return {
        "target": target.identity.model_dump(),
        "tokenizer_hash": target.tokenizer_hash,
        "template_hash": target.template_hash,
        "stop_ids": list(target.stop_ids),
        "sampling": {"temperature": settings.temperature, "top_p": settings.top_p, "seed": settings.seed},
        "greedy": settings.temperature == 0.0,
        **asdict(template_facts(target.tokenizer)),
    }


def _precision(stage: Stage, settings: RespondSettings) -> torch.dtype:
    """What `auto` measured at the first start holds for every resumption."""
    if "precision" not in stage.decided:
        auto = settings.precision == "auto"
        chosen = fastest_dtype(settings.batch_size) if auto else DTYPES[settings.precision]
        stage.save(precision=str(chosen).removeprefix("torch."))
    return DTYPES[stage.decided["precision"]]


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a prompts.jsonl. Raises InputError with the line's number for one that is none."""
    found: list[Conversation] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                raw = json.loads(line)
                turns = answerable_turns(raw["messages"])
                found.append(Conversation(str(raw["id"]), str(raw["split"]), turns, []))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    wanted="a prompt: id, split and messages of role and content",
                    got=f"{type(error).__name__}: {error}",
                    where=f"{path}:{number}",
                    next="run `eyas prompts` again: it checks and converts every line",
                ) from error
    return found


class Waiting:
    """The queue of turns to answer, sorted by prompt length so that cohorts need little padding."""

    def __init__(self, target: Target, settings: RespondSettings, skipped: Counter[str]) -> None:
        self.target, self.settings, self.skipped = target, settings, skipped
        self.requests: list[Request] = []

    def fill(self, conversations: list[Conversation]) -> None:
        for conversation in conversations:
            self.push(conversation)

    def push(self, conversation: Conversation) -> None:
        """Queue the conversation's next turn, if it has one that fits the target's context."""
        if not conversation.left:
            return
        conversation.messages.extend(conversation.turns[conversation.answered])
        ids = render(self.target.tokenizer, conversation.messages).ids
        room = self.target.context_length - len(ids)
        if room < 1:
            self.skipped["prompt longer than the target's context"] += conversation.left
            return
        key = f"{conversation.id}/{conversation.answered}"
        request = Request(key, ids, min(self.settings.max_new_tokens, room), conversation)
        bisect.insort(self.requests, request, key=lambda waiting: len(waiting.ids))

    def take(self, count: int) -> list[Request]:
        """The longest waiting prompts: what needs most memory comes first."""
        taken = self.requests[-count:]
        del self.requests[-count:]
        return taken


def _answer_all(
    stage: Stage, conversations: list[Conversation], target: Target, settings: RespondSettings
) -> Counter[str]:
    path = stage.folder / RESPONSES
    done = resume(path, conversations, target)
    skipped: Counter[str] = Counter()
    waiting = Waiting(target, settings, skipped)
    waiting.fill(conversations)
    sampler = Sampler(settings.temperature, settings.top_p, settings.seed)
    total, tokens = sum(len(c.turns) for c in conversations), 0
    try:
        with path.open("a", encoding="utf-8") as file, Progress("respond", total, "answers", done=done) as bar:

            def count(new: int) -> None:
                nonlocal tokens
                tokens += new

            synced, began = time.monotonic(), time.monotonic()
            for answer in decode(target, waiting, sampler, settings.batch_size, count):
                conversation: Conversation = answer.request.tag
                _write(file, answer, conversation)
                conversation.answered += 1
                conversation.messages.append(_as_message(target, answer.ids))
                waiting.push(conversation)
                if time.monotonic() - synced > SYNC_EVERY_S:
                    os.fsync(file.fileno())
                    stage.save()
                    synced = time.monotonic()
                bar.advance(1, f"{tokens / (time.monotonic() - began):,.0f} tokens/s")
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(path, error) from error
    return skipped


def _write(file: IO[str], answer: Answer, conversation: Conversation) -> None:
    ids, prompt = answer.request.ids + answer.ids, len(answer.request.ids)
    line = response_line(conversation.id, conversation.answered, conversation.split, ids, prompt, answer.finish)
    file.write(json.dumps(line) + "\n")
    file.flush()


def response_line(prompt_id: str, turn: int, split: str, ids: list[int], prompt_tokens: int, finish: str) -> JSON:
    """A line of responses.jsonl, its keys in their order."""
    return {
        "id": f"{prompt_id}/{turn}",
        "prompt_id": prompt_id,
        "turn": turn,
        "split": split,
        "input_ids": ids,
        "prompt_tokens": prompt_tokens,
        "finish": finish,
    }


def _as_message(target: Target, answer_ids: list[int]) -> Message:
    """What later turns of the conversation see of an answer: its text, as a server would be sent it."""
    text: Any = target.tokenizer.decode(answer_ids, skip_special_tokens=True)
    return {"role": "assistant", "content": text}


def resume(path: Path, conversations: list[Conversation], target: Target) -> int:
    """Cut off a torn last line of `path`, move each conversation past its answers; the number of those."""
    if not path.is_file():
        return 0
    cut_torn_line(path)
    known = {conversation.id: conversation for conversation in conversations}
    done = 0
    for line in read_responses(path):
        conversation = known.get(line["prompt_id"])
        if conversation is None or line["turn"] != conversation.answered:
            raise InputError(
                wanted="answers to these prompts, each once and in turn order",
                got=f"{line['id']}",
                where=str(path),
                next=f"remove {path.parent} and run again",
            )
        conversation.messages.extend(conversation.turns[conversation.answered])
        conversation.messages.append(_as_message(target, line["input_ids"][line["prompt_tokens"] :]))
        conversation.answered += 1
        done += 1
    return done


def cut_torn_line(path: Path) -> None:
    """A kill in the middle of a write leaves bytes after the last newline."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def read_responses(path: Path, *, unfinished: bool = False) -> Iterator[JSON]:
    """The lines of a responses.jsonl, one at a time. Raises InputError with the line's number for a bad one.

    `unfinished`: a last line without its end is what a kill left, and no line.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if unfinished and not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
                ids, prompt = line["input_ids"], line["prompt_tokens"]
                good = 0 < prompt < len(ids) and line["finish"] in ("stop", "length") and {"id", "split"} <= line.keys()
            except (ValueError, KeyError, TypeError) as error:
                raise _bad_response(path, number, f"{type(error).__name__}: {error}") from error
            if not good:
                raise _bad_response(
                    path, number, f"prompt_tokens {prompt} of {len(ids)} tokens, finish {line['finish']!r}"
                )
            yield line


def _bad_response(path: Path, number: int, got: str) -> InputError:
    return InputError(
        wanted="a response: id, prompt_id, turn, split, input_ids, prompt_tokens (1 to all but one), finish",
        got=got,
        where=f"{path}:{number}",
        next="run the respond stage again into another folder",
    )


def count_lines(lines: Iterable[JSON]) -> dict[str, int]:
    """Answers and their tokens, in all, by how they ended and by split."""
    counts: Counter[str] = Counter(samples=0, tokens=0, answer_tokens=0, stop=0, length=0, train=0, heldout=0)
    for line in lines:
        tokens = len(line["input_ids"])
        counts.update({"samples": 1, "tokens": tokens, "answer_tokens": tokens - line["prompt_tokens"]})
        counts.update({line["finish"]: 1, line["split"]: 1})
    return dict(counts)
