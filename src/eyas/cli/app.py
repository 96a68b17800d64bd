"""What every command shares: the app, the flags, how a plan or a result is printed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, Token
from rich.console import Console

from eyas import __version__
from eyas.pipeline.plan import Plan
from eyas.pipeline.show import show
from eyas.progress import muted
from eyas.recipe import TargetSettings
from eyas.run import Manifest
from eyas.settings import parts_of
from eyas.shipped import draft_folder

app = App(
    name="eyas",
    version=__version__,
    help="Raise EAGLE-3 drafts: data, training, wiring checks, export, measurement.",
    help_format="markdown",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)

Flat = Parameter(name="*")
"""A section's fields are the command's flags."""


@Parameter(name="*", group=Group("Every command", sort_key=100))
@dataclass(frozen=True)
class Common:
    """Flags of every command."""

    json: bool = False
    """Print exactly one JSON object on stdout; progress stays on stderr."""
    plan: bool = False
    """Print what would be read, written and run, and do nothing."""


@Parameter(name="*")
@dataclass(frozen=True)
class TargetFlags:
    """Which target."""

    target: str = TargetSettings().name
    """The default target's name, a Hugging Face folder, or a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def settings(self) -> TargetSettings:
        return TargetSettings(name=self.target, trust_remote_code=self.trust_remote_code)


FLAGS, TARGET = Common(), TargetFlags()


def finish(common: Common, plan: Plan, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Print the plan, or do the work and print its result (unless another process prints the same)."""
    result = plan.as_dict if common.plan else work()
    if muted():
        return result
    if common.json:
        print(json.dumps(result))
    else:
        show(Console(highlight=False), result)
    return result


def staged(folder: Path, manifest: Manifest) -> dict[str, Any]:
    return {"folder": str(folder.absolute()), **manifest.model_dump(mode="json")}


def integers(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """`2,15,27`, or the flag repeated, as numbers."""
    parts = parts_of([token.value for token in tokens])
    wrong = [part for part in parts if not part.strip().isdecimal()]
    if wrong:
        raise ValueError(f"numbers with commas, as in 2,15,27, not {wrong[0]!r}")
    return tuple(int(part) for part in parts)


def draft_path(kind: Any, tokens: Sequence[Token]) -> Path:
    """A draft's folder as typed, or that of a shipped draft's name."""
    return draft_folder(tokens[0].value)


def written_folder(kind: Any, tokens: Sequence[Token]) -> Path:
    """A folder as typed; an empty word (a variable of the shell that is not set) is not the current one."""
    if not tokens[0].value.strip():
        raise ValueError("a folder's name, not an empty word")
    return Path(tokens[0].value)


DRAFT = Parameter(converter=draft_path, n_tokens=1, negative="", help="The draft's folder, or `shipped`.")
DraftPath = Annotated[Path | None, DRAFT]
NamedDraft = Annotated[Path, DRAFT]
Integers = Annotated[tuple[int, ...] | None, Parameter(converter=integers, n_tokens=1, negative="")]
OUT = Parameter(converter=written_folder, n_tokens=1, help="The folder to write.")
Out = Annotated[Path, OUT]
RecipeName = Annotated[str, Parameter(help="A TOML file, or a packaged recipe's name (`eyas recipe list`).")]
Overrides = Annotated[
    list[str] | None,
    Parameter(name="--set", negative="", help="SECTION.KEY=VALUE, laid over the recipe; may be repeated."),
]
Captures = Annotated[Path, Parameter(help="The folder that `eyas capture` wrote.")]
Responses = Annotated[Path, Parameter(help="The folder that `eyas respond` wrote.")]
Engines = Annotated[
    list[str] | None,
    Parameter(negative="", help="A release's rules: sglang@0.5.23, vllm@0.33.0, vllm@0.33.0/v1, ...; may be repeated."),
]
NamedTarget = Annotated[str | None, Parameter(help="The target: a name, a Hugging Face folder, or a hub id.")]
Trust = Annotated[bool, Parameter(help="Run Python code that comes with the model.")]
