"""The shipped draft's training on one CUDA GPU in ten minutes, from answers made beforehand. NEVER YET RUN ON A GPU.

    python shipping/gpu.py split --out .gpu                # here: the target's GGUF (98 MB) in parts, .gpu/0, .gpu/1
    python shipping/gpu.py train --parts .gpu --seconds 480 --out OUT      # there, once all parts have arrived
    python shipping/gpu.py join OUT --out runs/gpu/draft   # here again: a draft stage's folder

`train` wants the checkout, shipping/answers.xz and the parts, no network. It measures tokens a second on a few first
steps, takes as many epochs as fit the seconds, and leaves pieces under 16 MB: weights, config, metrics, manifest. What
`join` makes goes to shipping/pack_draft.py. Settings: --set train.batch_tokens=4096 and so on; --dry-run goes through
all of it on a CPU.
"""

import argparse
import io
import json
import os
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from eyas.data.packed import unpack
from eyas.errors import EyasError, InputError
from eyas.failures import report
from eyas.models.checkpoint import CONFIG, WEIGHTS
from eyas.models.gguf import GGUF_NAME, default_target_folder, find_gguf
from eyas.progress import say
from eyas.recipe import Recipe, load_recipe
from eyas.run import MANIFEST, hash_bytes, is_complete, read_manifest, write_atomic
from eyas.stage import PROGRESS, chosen_step
from eyas.training.loop import train
from eyas.training.metrics import METRICS

HERE = Path(__file__).parent
PIECE = 15_000_000
"""Bytes; what comes back from such a machine may be limited to 16 MB a file."""
TRIAL = 0.02
"""Share of an epoch that is trained to measure the speed, at least TRIAL_STEPS steps."""
TRIAL_STEPS = 40
SPENT = 0.85
"""Of the seconds that are left, how many the run is planned for: held-out measurements and checkpoints take some."""
SETTINGS = ("train.batch_tokens=2048", "train.save_every=1000", "train.evaluate_every=500")
"""Laid over the recipe: a GPU wants more rows at a time than a CPU. Not measured."""


# Pieces ---------------------------------------------------------------------------------------------------------------


def write_pieces(data: bytes, name: str, folder: Path, size: int) -> list[str]:
    """`data` as folder/NAME.0, .1, ... of at most `size` bytes, and folder/NAME.json that says what they are."""
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    names = [f"{name}.{number}" for number in range(len(pieces))]
    for piece_name, piece in zip(names, pieces, strict=True):
        write_atomic(folder / piece_name, piece)
    listed = {one: hash_bytes(piece) for one, piece in zip(names, pieces, strict=True)}
    write_atomic(folder / f"{name}.json", json.dumps({"sha256": hash_bytes(data), "pieces": listed}) + "\n")
    return names


def read_pieces(name: str, folder: Path) -> bytes:
    """The data again, from wherever below `folder` its pieces lie. Raises InputError for a missing or changed one."""
    found = {path.name: path for path in sorted(folder.rglob(f"{name}.*"))}
    if f"{name}.json" not in found:
        raise InputError(
            wanted=f"{name}.json, the list of pieces", got="none", where=str(folder), next=f"bring {name}.json"
        )
    listed = json.loads(found[f"{name}.json"].read_text())
    pieces = []
    for piece, checksum in listed["pieces"].items():
        data = found[piece].read_bytes() if piece in found else None
        if data is None or hash_bytes(data) != checksum:
            got = "no such file" if data is None else "other bytes"
            raise InputError(wanted=f"the piece {piece}", got=got, where=str(folder), next=f"bring {piece} again")
        pieces.append(data)
    return b"".join(pieces)


def split(options: argparse.Namespace) -> None:
    """Each part in a folder of its own, for they may have to travel one at a time; the list goes with the first."""
    data = find_gguf().read_bytes()
    names = write_pieces(data, GGUF_NAME, options.out / "0", -(-len(data) // options.parts))
    for number, name in enumerate(names[1:], start=1):
        (options.out / str(number)).mkdir(exist_ok=True)
        (options.out / "0" / name).replace(options.out / str(number) / name)
    say(f"gpu: {len(names)} parts of {len(data) / len(names) / 1e6:.0f} MB in {options.out}")


def joined_target(parts: Path) -> None:
    """The default target in the cache, from its parts."""
    path = parts / GGUF_NAME
    if not path.is_file():
        write_atomic(path, read_pieces(GGUF_NAME, parts))
    default_target_folder(path)


# Training -------------------------------------------------------------------------------------------------------------


def go(options: argparse.Namespace) -> None:
    """Everything on the machine with the GPU."""
    started = time.monotonic()
    if not options.dry_run and not torch.cuda.is_available():
        raise InputError(wanted="a CUDA GPU", got="none that torch sees", where="this machine", next="--dry-run")
    recipe = load_recipe(str(options.recipe), (*SETTINGS, "train.online=true", *options.sets))
    if options.parts is not None:
        joined_target(options.parts)
    unpack(options.answers, options.work / "responses")
    say(f"gpu: ready to train after {time.monotonic() - started:.0f} s")
    out, decided = options.work / "draft", options.work / "epochs.json"
    if not decided.is_file():  # a second start goes on with what the first decided
        epochs = epochs_for(recipe, options, speed(recipe, options), options.seconds - (time.monotonic() - started))
        write_atomic(decided, json.dumps(epochs))
    epochs = json.loads(decided.read_text())
    with stopped_after(options.seconds - (time.monotonic() - started)):
        learn(recipe, options, out, epochs)
    data = packed_draft(out)
    write_pieces(data, "draft.zip", options.out, options.piece)
    write_atomic(options.out / METRICS, (out / METRICS).read_bytes())
    say(f"gpu: done in {time.monotonic() - started:.0f} s; {len(data) / 1e6:.1f} MB in {options.out}")


def learn(recipe: Recipe, options: argparse.Namespace, out: Path, epochs: float, measured: bool = True) -> None:
    changed = {"epochs": epochs} if measured else {"epochs": epochs, "evaluate_every": 0}
    settings = recipe.train.model_copy(update=changed)
    train(options.work / "responses", out, settings, recipe.draft, recipe.target, recipe.capture)


def speed(recipe: Recipe, options: argparse.Namespace) -> float:
    """Tokens a second of a short run that is thrown away, its slow beginning left out."""
    epochs = max(TRIAL, TRIAL_STEPS * recipe.train.batch_tokens / train_tokens(options))
    learn(recipe, options, options.work / "trial", epochs, measured=False)
    rows = [json.loads(line) for line in (options.work / "trial" / METRICS).read_text().splitlines()]
    half = rows[len(rows) // 2 :]
    gains = [(b["tokens"] - a["tokens"]) / max(1e-3, b["time"] - a["time"]) for a, b in pairwise(half)]
    return median(gains) if gains else rows[-1]["tokens_per_s"]


def train_tokens(options: argparse.Namespace) -> int:
    return read_manifest(options.work / "responses").facts["counts"]["tokens"]


def epochs_for(recipe: Recipe, options: argparse.Namespace, rate: float, left: float) -> float:
    """As many as fit, the recipe's at most."""
    epochs = round(min(recipe.train.epochs, max(0.01, SPENT * left * rate / train_tokens(options))), 3)
    say(f"gpu: {rate:,.0f} tokens/s and {left:.0f} s left: {epochs} epochs of {recipe.train.epochs}")
    return epochs


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Ctrl-C by the clock: the step at work is finished and saved. The draft is then the step measured
    best until there, the newest where none was."""
    timer = threading.Timer(max(1.0, seconds), lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        say("gpu: the time is up; the step measured best is taken, the newest where none was")
    finally:
        timer.cancel()


def packed_draft(out: Path) -> bytes:
    """The folder's manifest, metrics and the step it hands on, without the optimiser's state, as a zip."""
    step = chosen_step(out)
    if not (step / CONFIG).is_file():
        raise InputError(
            wanted="a checkpoint",
            got="none: the time was up before",
            where=str(out),
            next="--seconds, with more of them",
        )
    paths = [step / CONFIG, step / WEIGHTS, out / METRICS, out / (MANIFEST if is_complete(out) else PROGRESS)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in paths:
            archive.write(path, path.relative_to(out))
    return buffer.getvalue()


def join(options: argparse.Namespace) -> None:
    with zipfile.ZipFile(io.BytesIO(read_pieces("draft.zip", options.folder))) as archive:
        archive.extractall(options.out)
    say(f"gpu: {chosen_step(options.out)}" + ("" if is_complete(options.out) else ", of a run that the clock cut"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split")
    splitting.add_argument("--parts", type=int, default=2)
    splitting.add_argument("--out", type=Path, default=Path(".gpu"))
    training = commands.add_parser("train")
    add = training.add_argument
    add("--parts", type=Path, help="where the GGUF's parts are; without it the target is here already")
    add("--answers", type=Path, default=HERE / "answers.xz")
    add("--recipe", type=Path, default=HERE / "shipped.toml")
    add("--seconds", type=float, default=480.0, help="from start to the end of training")
    add("--work", type=Path, default=Path("runs/gpu"), help="scratch; a second start resumes there")
    add("--out", type=Path, required=True, help="where the pieces go")
    add("--piece", type=int, default=PIECE)
    add("--set", dest="sets", action="append", default=[])
    add("--dry-run", action="store_true", help="on a CPU, to see that it holds together")
    joining = commands.add_parser("join")
    joining.add_argument("folder", type=Path)
    joining.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        {"split": split, "train": go, "join": join}[options.command](options)
    except EyasError as error:
        sys.exit(report(error, []))


if __name__ == "__main__":
    main()
