"""What a command would read, write and run: the answer to --plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Plan:
    """One command's plan; nothing in it has happened."""

    command: str
    reads: Sequence[Path | str | None]
    writes: Sequence[Path]
    settings: BaseModel | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else is known before anything happens: a command line, a preflight."""

    @property
    def as_dict(self) -> dict[str, Any]:
        known = list(self.more.get("notes", ()))
        absent = [item for item in self.reads if isinstance(item, Path) and not item.exists()]
        absent = [item for item in absent if not any(note.startswith(str(item)) for note in known)]
        notes = [*(f"{item} is not there yet" for item in absent), *known]
        return {
            "plan": self.command,
            "reads": [
                str(item.absolute()) if isinstance(item, Path) else item for item in self.reads if item is not None
            ],
            "writes": [str(item.absolute()) for item in self.writes],
            "settings": {} if self.settings is None else self.settings.model_dump(mode="json"),
            "changed": {} if self.settings is None else changed(self.settings),
            **self.more,
            **({"notes": notes} if notes else {}),
        }


def changed(settings: BaseModel, prefix: str = "") -> dict[str, Any]:
    """The settings that are not as they come, by name: `{"train.epochs": 6.0}`."""
    found: dict[str, Any] = {}
    for name, declared in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            found |= changed(value, f"{prefix}{name}.")
        elif value != declared.get_default(call_default_factory=True):
            found[prefix + name] = settings.model_dump(mode="json", include={name})[name]
    return found
