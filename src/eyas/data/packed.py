"""Answers in one small file, to be kept in git: what cost hours of decoding is not decoded twice.

An xz stream (any `xz -d` opens it) of one line of JSON, the header, and then every token id of every line of
responses.jsonl, one after another, little-endian, two bytes each where the vocabulary allows. Greedy answers come to
about 0.6 bytes an answer token. Folders are packed whole or as far as they have come; unpacking gives the bytes of
their responses.jsonl back, under a manifest that any later stage takes.
"""

import json
import lzma
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.data.captures import check_target
from eyas.data.responses import (
    PROMPTS,
    RESPONSES,
    answer_facts,
    count_lines,
    read_conversations,
    read_responses,
    response_line,
)
from eyas.data.samples import render
from eyas.errors import InputError
from eyas.models.target import Target
from eyas.recipe import RespondSettings, TargetSettings, recorded, validate
from eyas.run import JSON, Manifest, check_same, hash_bytes, hash_file, is_complete, read_manifest, write_atomic
from eyas.stage import PROGRESS, Stage, begin, check_file

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]
"""Ids are pairs of bytes: lp and pb say so, and save a hundredth."""
OWN_FACTS = ("counts", "skipped", "dtype", "sources")
"""Facts of a responses folder that need not be the same for answers to be packed together."""
KEYS = list(response_line("", 0, "", [], 0, ""))
AGAIN = "pack the responses folders again (python shipping/answers.py pack), or take the file from git"


class Source(BaseModel):
    """Where some of the answers come from, or `{}` for what is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: JSON
    """The respond stage's, the target's among them."""
    dtype: str | None
    versions: dict[str, str]
    complete: bool
    answers: int
    """Of those packed; an answer that several folders hold counts for the first."""


class Header(BaseModel):
    """The first line of a packed file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    kind: str
    facts: JSON
    """What a responses manifest says of its answers: target, tokenizer and template hashes, whether greedy, counts."""
    sources: list[Source]
    sha256: str
    """Of the responses.jsonl that unpacking gives."""
    bytes_per_id: int
    prompt_id: list[str]
    turn: list[int]
    split: list[str]
    finish: list[str]
    prompt_tokens: list[int]
    tokens: list[int]
    """Ids of each line, prompt and answer."""


@dataclass(frozen=True)
class Packed:
    """A packed file, read."""

    path: Path
    header: Header
    lines: list[JSON]

    @property
    def facts(self) -> JSON:
        return self.header.facts


def pack(folders: Sequence[Path], out: Path, target: Target | None = None, earlier: Path | None = None) -> Header:
    """Pack the answers of responses folders into the file `out`, those of the packed file `earlier` first.

    An unfinished folder gives the whole lines that it has, and needs the loaded `target`, whose answers they are. Of
    answers to the same turn of the same prompt the first is kept. Raises InputError where two of them differ in target,
    tokenizer, template, sampling or what the template inserts, and for lines that are not Eyas's.
    """
    held = None if earlier is None else read_packed(earlier)
    parts = [] if held is None else [(held.facts, held.lines)]
    sources = [] if held is None else list(held.header.sources)
    known = set() if held is None else {line["id"] for line in held.lines}
    for folder in folders:
        facts, source, lines = _folder(folder, target)
        fresh = [line for line in lines if line["id"] not in known]
        known.update(line["id"] for line in fresh)
        if parts:
            _check_alike(parts[0][0], facts, folder)
        parts.append((facts, fresh))
        if fresh:
            sources.append(source.model_copy(update={"answers": len(fresh)}))
    lines = [line for _, some in parts for line in some]
    if not lines:
        names = ", ".join(map(str, folders))
        raise InputError(wanted="answers to pack", got="none", where=names or str(out), next="eyas respond writes them")
    header, ids = _columns(lines, parts[0][0], sources)
    write_atomic(out, _compressed(header, ids))
    assert read_packed(out).lines == lines, "what was packed is what was given"
    return header


def read_packed(path: Path) -> Packed:
    """The answers of a packed file, compared with its checksum. Raises InputError for one that is cut or changed, of a
    newer format, or no such file."""
    try:
        data = lzma.decompress(path.read_bytes())
        first, _, rest = data.partition(b"\n")
        raw = json.loads(first)
        newer = isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > 1
        header = None if newer else Header.model_validate(raw)
    except (OSError, lzma.LZMAError, ValueError, ValidationError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise _unreadable(path, words or type(error).__name__) from error
    if header is None:
        raise InputError(
            wanted="format 1", got=f"format {raw['format']}", where=str(path), next="pip install --upgrade eyas"
        )
    if len(rest) != sum(header.tokens) * header.bytes_per_id:
        raise _unreadable(path, f"{len(rest)} bytes of ids for {sum(header.tokens)} tokens")
    ids = np.frombuffer(rest, f"<u{header.bytes_per_id}").tolist()
    lines, start = list[JSON](), 0
    columns = (header.prompt_id, header.turn, header.split, header.finish, header.prompt_tokens, header.tokens)
    for prompt, turn, split, finish, boundary, tokens in zip(*columns, strict=True):
        lines.append(response_line(prompt, turn, split, ids[start : start + tokens], boundary, finish))
        start += tokens
    if hash_bytes(jsonl(lines)) != header.sha256:
        raise _unreadable(path, "other answers than its checksum says")
    return Packed(path, header, lines)


def unpack(path: Path, out: Path, target: Target | None = None) -> Manifest:
    """The packed answers as a complete responses folder `out`.

    Raises InputError where they are not `target`'s (where one is given), or `out` holds something else.
    """
    stage = begin(out, "responses", {"packed": path.name, "sha256": hash_file(path) if path.is_file() else ""}, {})
    if stage.complete is not None:
        return stage.complete
    packed = read_packed(path)
    if target is not None:
        packed_of(packed, target)
    write_atomic(out / RESPONSES, jsonl(packed.lines))
    sources = [source.model_dump() for source in packed.header.sources]
    facts = {**packed.facts, "sources": sources}
    return stage.finish(files={RESPONSES: hash_file(out / RESPONSES)}, facts=facts)


def lay(path: Path, prompts: Path, out: Path, settings: RespondSettings, target: Target, named: TargetSettings) -> int:
    """Begin the responses folder `out` with the packed answers to `prompts`, so that `respond` makes only the others.

    Returns how many were laid. Left out, and so answered anew: answers to other prompts, later turns whose earlier ones
    are not there, and answers cut at another length than `settings.max_new_tokens`. Raises InputError for answers of
    another target, sampled otherwise, or to other words under the same id.
    """
    if is_complete(out) or (out / RESPONSES).is_file():
        return 0
    packed = read_packed(path)
    packed_of(packed, target)
    asked = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": settings.seed}
    check_same(
        "sampling", asked, packed.facts["sampling"], path, "set [respond] as these answers were made, or leave them"
    )
    conversations = read_conversations(check_file(prompts, PROMPTS, read_manifest(prompts, "prompts")))
    openings = {one.id: one.turns[0] for one in conversations}
    turns = Counter[str]()
    kept = list[JSON]()
    for line in packed.lines:
        prompt = line["prompt_id"]
        if prompt not in openings or line["turn"] != turns[prompt] or not _of_length(line, settings.max_new_tokens):
            continue
        if line["turn"] == 0 and render(target.tokenizer, openings[prompt]).ids != _prompt(line):
            raise InputError(
                wanted="answers to these prompts",
                got=f"an answer to other words under the id {prompt}",
                where=str(path),
                next="leave out --packed to answer the prompts anew",
            )
        turns[prompt] += 1
        kept.append(line)
    stage = Stage(out, "responses", recorded(settings, named), {"prompts": prompts})
    write_atomic(out / RESPONSES, jsonl(kept))
    stage.save()
    return len(kept)


def packed_of(packed: Packed, target: Target) -> None:
    """Raise InputError unless `target` wrote these answers."""
    check_target(target, packed.facts, packed.path)


def jsonl(lines: Iterable[JSON]) -> bytes:
    """The bytes of a responses.jsonl."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _prompt(line: JSON) -> list[int]:
    return line["input_ids"][: line["prompt_tokens"]]


def _of_length(line: JSON, limit: int) -> bool:
    """Whether an answer is the one that this limit gives."""
    length = len(line["input_ids"]) - line["prompt_tokens"]
    return length == limit if line["finish"] == "length" else length <= limit


def _unreadable(path: Path, got: str) -> InputError:
    return InputError(
        wanted="a whole file of packed answers", got=got, where=str(path), next=AGAIN, code="data_corrupt"
    )


def _folder(folder: Path, target: Target | None) -> tuple[JSON, Source, list[JSON]]:
    """Facts, where they come from, and the lines of a responses folder."""
    if is_complete(folder):
        manifest = read_manifest(folder, "responses")
        facts, settings, versions = manifest.facts, manifest.settings, manifest.versions
        lines = list(read_responses(check_file(folder, RESPONSES, manifest)))
    else:
        facts, settings, versions = _begun(folder, target)
        lines = list(read_responses(folder / RESPONSES, unfinished=True))
    for number, line in enumerate(lines, start=1):
        if list(line) != KEYS or line["id"] != f"{line['prompt_id']}/{line['turn']}":
            raise InputError(
                wanted="a line as `eyas respond` writes it",
                got=f"{line['id']!r} with the keys {sorted(line)}",
                where=f"{folder / RESPONSES}:{number}",
                next="pack folders of `eyas respond`",
            )
    source = Source(
        settings=settings, dtype=facts.get("dtype"), versions=versions, complete=is_complete(folder), answers=len(lines)
    )
    return facts, source, lines


def _begun(folder: Path, target: Target | None) -> tuple[JSON, JSON, dict[str, str]]:
    """Facts and settings of a folder that `respond` has not finished."""
    path = folder / PROGRESS
    if not path.is_file() or not (folder / RESPONSES).is_file():
        raise InputError(
            wanted="a responses folder",
            got="no manifest, and no answers begun",
            where=str(folder),
            next="eyas respond --prompts PROMPTS --out " + str(folder),
        )
    assert target is not None, "an unfinished folder is packed with its target at hand"
    state = json.loads(path.read_text())
    named = state["settings"]["target"]["name"]
    check_same("target", target.identity.name, Path(named).name, folder, f"--target {named}", "target_revision")
    told = {key: value for key, value in state["settings"].items() if key != "target"}
    settings = validate(RespondSettings, told, str(path))
    dtype = state["decided"].get("precision")
    return answer_facts(target, settings) | {"dtype": dtype}, state["settings"], {}


def _check_alike(first: JSON, other: JSON, folder: Path) -> None:
    advice = "pack it into a file of its own"
    for key in sorted((first.keys() | other.keys()) - set(OWN_FACTS)):
        check_same(key, first.get(key), other.get(key), folder, advice)


def _columns(lines: list[JSON], facts: JSON, sources: list[Source]) -> tuple[Header, list[int]]:
    ids = [token for line in lines for token in line["input_ids"]]
    dtypes = sorted({source.dtype for source in sources if source.dtype})
    shared = {key: value for key, value in facts.items() if key not in OWN_FACTS}
    header = Header(
        format=1,
        kind="answers",
        facts={**shared, "dtype": ", ".join(dtypes), "counts": count_lines(lines), "skipped": {}},
        sources=sources,
        sha256=hash_bytes(jsonl(lines)),
        bytes_per_id=2 if max(ids) < 2**16 else 4,
        prompt_id=[line["prompt_id"] for line in lines],
        turn=[line["turn"] for line in lines],
        split=[line["split"] for line in lines],
        finish=[line["finish"] for line in lines],
        prompt_tokens=[line["prompt_tokens"] for line in lines],
        tokens=[len(line["input_ids"]) for line in lines],
    )
    return header, ids


def _compressed(header: Header, ids: list[int]) -> bytes:
    data = header.model_dump_json().encode() + b"\n" + np.array(ids, f"<u{header.bytes_per_id}").tobytes()
    return lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=FILTERS)
