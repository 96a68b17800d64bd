"""A draft before an engine: what is known of both. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.formats.config_problems import Config
from eyas.formats.draft_config import DraftConfig, TargetIdentity
from eyas.formats.headers import TensorHeader
from eyas.formats.read_config import DraftFile
from eyas.formats.taps import Capture
from eyas.formats.target_config import TEXT_CONFIGS, text_config
from eyas.wiring.loaders.parameters import Fates
from eyas.wiring.loaders.view import View


@dataclass(frozen=True)
class TargetFacts:
    """What the rules ask of a target; None: not known."""

    model_type: str | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None

    @classmethod
    def of(cls, config: Config) -> "TargetFacts":
        """From a model's config.json, its text part where it is multimodal."""
        text = text_config(config)
        nested = any(isinstance(config.get(name), Mapping) for name in TEXT_CONFIGS)
        outer, inner = config.get("model_type"), text.get("model_type")
        return cls(
            model_type=str(outer if nested and outer in WHOLE_CLASSES else inner or outer),
            num_hidden_layers=integer(text.get("num_hidden_layers")),
            hidden_size=integer(text.get("hidden_size")),
            vocab_size=integer(text.get("vocab_size")),
            context_length=integer(text.get("max_position_embeddings")),
        )

    @classmethod
    def of_identity(cls, target: TargetIdentity, context_length: int | None = None) -> "TargetFacts":
        return cls(target.model_type, target.num_hidden_layers, target.hidden_size, target.vocab_size, context_length)


WHOLE_CLASSES = frozenset({"minimax_m3_vl"})
"""Multimodal classes whose rule is not that of their text part."""


def integer(value: Any) -> int | None:
    """A JSON value that is an integer; None for anything else."""
    return value if type(value) is int else None


@dataclass(frozen=True)
class Case:
    """A draft before an engine, and what is known of both."""

    view: View
    declared: DraftFile
    target: TargetFacts
    capture: Capture
    fates: Fates | None
    headers: Mapping[str, TensorHeader] | None

    @property
    def raw(self) -> Config:
        return self.view.config

    @property
    def sglang(self) -> bool:
        return self.view.engine.name == "sglang"

    @property
    def eyas(self) -> DraftConfig | None:
        """The draft's own config where an eyas block holds it."""
        return self.declared.config if self.declared.format == "eyas" else None
