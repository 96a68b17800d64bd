"""The command line of `python -m eyas.engine.server`. What `eyas serve` derives from a draft is typed the same here."""

import argparse
import os
from collections.abc import Sequence

from eyas.engine.server.service import MEGABYTE, Limits
from eyas.models.target import DEFAULT_TARGET

PROG = "eyas.engine.server"
DTYPE = "auto measures which of float32 and bfloat16 is faster; int8 rounds the weights of target and draft"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Exits with status 2 and a usage line for flags that are unknown or wrong."""
    parser = argparse.ArgumentParser(PROG, description="The embedded engine as an OpenAI-compatible server.")
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET, help="a Hugging Face folder or a hub id (%(default)s)")
    add("--draft", help="a draft's folder, or `shipped`; none decodes plainly, or by --ngram")
    add("--served-model-name", help="the name /v1/models lists (the target's as it was given)")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_positive, default=8000)
    add("--api-key", default=os.environ.get("EYAS_API_KEY"), help="asked for under /v1; also EYAS_API_KEY")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add("--dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto", help=DTYPE)
    drafting = parser.add_argument_group("drafting")
    drafting.add_argument("--num-steps", type=_positive, default=3, help="levels drafted a round at most")
    drafting.add_argument("--topk", type=_positive, default=1, help="branches a node; 1 drafts a chain")
    drafting.add_argument("--num-draft-tokens", type=_positive, help="rows of a verify forward at most")
    drafting.add_argument("--stop-below", type=float, default=0.0, help="draft no path less probable than this")
    drafting.add_argument("--ngram", type=int, default=0, help="also draft what followed so many tokens before")
    drafting.add_argument(
        "--fixed-depth", action="store_true", help="draft num_steps levels always, also where plain decoding is faster"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-model-len", type=_positive, help="tokens of prompt and answer (the target's context)")
    limits.add_argument("--max-running", type=_positive, default=Limits.running, help="texts worked on at a time")
    limits.add_argument("--max-waiting", type=_positive, default=Limits.waiting, help="texts that may wait; then 429")
    limits.add_argument("--max-output", type=_positive, default=Limits.output_tokens, help="tokens of one answer")
    limits.add_argument("--max-body", type=_positive, default=MEGABYTE, help="bytes of a request; then 413")
    limits.add_argument("--cache-rows", type=_positive, help="cache rows in all (what half the free memory holds)")
    limits.add_argument("--grace-s", type=float, default=10.0, help="seconds for running answers at the end")
    return parser.parse_args(list(words))


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
