"""A recipe: one TOML, one section a stage. The docstring under a field is its help and its reference page."""

from eyas.recipe.data import CaptureSettings, PromptsSettings, RespondSettings, TargetSettings, recorded
from eyas.recipe.load import Recipe, load_recipe, packaged_recipes, recipe_of, recipe_reference, validate
from eyas.recipe.serving import BenchSettings, ChatSettings, ServeSettings, TraceSettings
from eyas.recipe.training import (
    NOT_COMPARED,
    DraftSettings,
    EvaluateSettings,
    ExportSettings,
    TrainSettings,
    recorded_training,
)

__all__ = [
    "NOT_COMPARED",
    "BenchSettings",
    "CaptureSettings",
    "ChatSettings",
    "DraftSettings",
    "EvaluateSettings",
    "ExportSettings",
    "PromptsSettings",
    "Recipe",
    "RespondSettings",
    "ServeSettings",
    "TargetSettings",
    "TraceSettings",
    "TrainSettings",
    "load_recipe",
    "packaged_recipes",
    "recipe_of",
    "recipe_reference",
    "recorded",
    "recorded_training",
    "validate",
]
