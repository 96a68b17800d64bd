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
        return {
            "plan": self.command,
            "reads": [
                str(item.absolute()) if isinstance(item, Path) else item for item in self.reads if item is not None
            ],
            "writes": [str(item.absolute()) for item in self.writes],
            "settings": {} if self.settings is None else self.settings.model_dump(mode="json"),
            **self.more,
        }
