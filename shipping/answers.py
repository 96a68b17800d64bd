"""Answers kept in git: responses folders to one compact file, and back.

    python shipping/answers.py pack RESPONSES... --out shipping/answers.xz   # adds to what the file holds already
    python shipping/answers.py unpack shipping/answers.xz --out RESPONSES
    python shipping/answers.py show shipping/answers.xz

An unfinished folder is packed as far as it has come. Ids of the default target's greedy answers take about 0.6 bytes an
answer token.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from eyas.data.packed import pack, read_packed, unpack
from eyas.errors import EyasError
from eyas.failures import report
from eyas.models.target import load_target
from eyas.progress import say
from eyas.recipe import TargetSettings
from eyas.run import is_complete

LIMIT_MB = 30


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TargetSettings().name, help="whose answers they are")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folders", type=Path, nargs="+")
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--anew", action="store_true", help="leave out what the file holds already")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("--out", type=Path, required=True)
    commands.add_parser("show").add_argument("file", type=Path)
    options = parser.parse_args(argv)
    try:
        print(json.dumps({"pack": packed, "unpack": unpacked, "show": shown}[options.command](options)))
    except EyasError as error:
        sys.exit(report(error, []))


def packed(options: argparse.Namespace) -> dict[str, Any]:
    unfinished = [folder for folder in options.folders if not is_complete(folder)]
    target = load_target(options.target) if unfinished else None
    earlier = options.out if options.out.is_file() and not options.anew else None
    pack(options.folders, options.out, target, earlier)
    found = shown(argparse.Namespace(file=options.out))
    if found["bytes"] > LIMIT_MB * 1e6:
        say(f"answers: {found['bytes'] / 1e6:.1f} MB, over the {LIMIT_MB} MB that git is to hold")
    return found


def unpacked(options: argparse.Namespace) -> dict[str, Any]:
    return unpack(options.file, options.out, load_target(options.target)).model_dump(mode="json")


def shown(options: argparse.Namespace) -> dict[str, Any]:
    found = read_packed(options.file)
    counts = found.facts["counts"]
    size = options.file.stat().st_size
    return {
        "file": str(options.file.absolute()),
        "bytes": size,
        "bytes_per_answer_token": round(size / max(1, counts["answer_tokens"]), 3),
        "counts": counts,
        "target": found.facts["target"]["name"],
        "sources": [source.model_dump(exclude={"settings"}) for source in found.header.sources],
        "sha256": found.header.sha256,
    }


if __name__ == "__main__":
    main()
