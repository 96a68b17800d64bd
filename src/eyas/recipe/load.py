"""A recipe: one TOML, one section a stage, and how it is read."""

import ast
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eyas.errors import InputError, did_you_mean
from eyas.recipe.data import CaptureSettings, PromptsSettings, RespondSettings, TargetSettings
from eyas.recipe.serving import BenchSettings, ServeSettings
from eyas.recipe.training import DraftSettings, EvaluateSettings, ExportSettings, TrainSettings
from eyas.settings import Section

Model = TypeVar("Model", bound=BaseModel)


class Recipe(Section):
    """Everything `eyas run` needs."""

    name: str = "run"
    """Names the run folder, runs/NAME."""
    target: TargetSettings = TargetSettings()
    prompts: PromptsSettings = PromptsSettings()
    respond: RespondSettings = RespondSettings()
    capture: CaptureSettings = CaptureSettings()
    draft: DraftSettings = DraftSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings = ExportSettings()
    bench: BenchSettings = BenchSettings()
    serve: ServeSettings = ServeSettings()


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("eyas.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a TOML file or a packaged name, with `section.key=value` overrides laid over it.

    Raises InputError for a missing file, bad TOML, an unknown key (naming the nearest known one) or a bad value.
    """
    name, path = str(recipe), Path(recipe)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise InputError(wanted="a recipe file", got="no such file", where=name, next="eyas recipe list")
        text, where = _read_text(path), str(path)
    elif name in packaged_recipes():
        text, where = resources.files("eyas.recipes").joinpath(f"{name}.toml").read_text(), f"packaged recipe {name}"
    else:
        raise InputError(
            wanted="a recipe file or a packaged recipe",
            got=f"{name!r}{did_you_mean(name, packaged_recipes())}",
            where="the command line",
            next="eyas recipe list",
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(wanted="a TOML recipe", got=str(error), where=where, next="mend that line") from error
    for override in overrides:
        _override(values, override)
    return validate(Recipe, values, where)


def recipe_of(overrides: Sequence[str]) -> Recipe:
    """A recipe of defaults with `section.key=value` laid over them."""
    values: dict[str, Any] = {}
    for override in overrides:
        _override(values, override)
    return validate(Recipe, values, "the command line")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            wanted="a TOML recipe in UTF-8", got=str(error), where=str(path), next="save the file as UTF-8"
        ) from error


def recipe_reference(recipe: Recipe) -> list[dict[str, Any]]:
    """Every key of a recipe: section, key, value, default and meaning."""
    rows: list[dict[str, Any]] = []
    for name, field in Recipe.model_fields.items():
        value = getattr(recipe, name)
        if not isinstance(value, BaseModel):
            rows.append({"key": name, "value": value, "default": field.default, "meaning": field.description or ""})
            continue
        for key, inner in type(value).model_fields.items():
            rows.append(
                {
                    "key": f"{name}.{key}",
                    "value": getattr(value, key),
                    "default": inner.get_default(call_default_factory=True),
                    "meaning": inner.description or "",
                }
            )
    return rows


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise InputError(
            wanted="--set section.key=value", got=override, where="--set", next="eyas recipe show lists every key"
        )
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InputError(wanted="a section before the dot", got=override, where="--set", next="eyas recipe show")
    values[parts[-1]] = _literal(text)


def _literal(text: str) -> Any:
    """TOML's and Python's spellings of a value; what is neither is a string."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def validate(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """`model` from `values`, pydantic's complaint turned into one InputError that names key, value and what fits."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, first["loc"][:-1])
            nearest = _in_a_section(model, place) or did_you_mean(str(first["loc"][-1]), known)
            raise InputError(
                wanted=f"a known key, one of: {', '.join(known)}",
                got=f"{place!r}{nearest}",
                where=where,
                next="eyas recipe show lists every key with its meaning",
            ) from error
        raise InputError(
            wanted=f"{place}: {first['msg'].removeprefix('Value error, ')}",
            got=repr(first["input"]),
            where=where,
            next="eyas recipe show",
        ) from error


def _in_a_section(model: type[BaseModel], key: str) -> str:
    """' (did you mean "serve.port"?)' for a key that sections have; an empty string for any other."""
    sections = {name: field.annotation for name, field in model.model_fields.items()}
    places = [
        f'"{name}.{key}"'
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields
    ]
    return f" (did you mean {' or '.join(places)}?)" if places else ""


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel), f"{part} is a section"
        model = annotation
    return list(model.model_fields)
