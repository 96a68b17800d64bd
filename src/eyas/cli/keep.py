"""What Eyas keeps: packaged recipes and the cache."""

from cyclopts import App

from eyas.cli.app import FLAGS, Common, Overrides, RecipeName, app, finish
from eyas.pipeline.doctor import cache_clear, cache_list
from eyas.pipeline.plan import Plan
from eyas.recipe import load_recipe, packaged_recipes, recipe_reference

recipes = App(name="recipe", help="Recipes: what `eyas run` needs, in one TOML.")
cache = App(name="cache", help="The cache: converted targets.")
app.command(recipes)
app.command(cache)


@recipes.command(name="show")
def recipe_show(
    recipe: RecipeName = "demo",
    *,
    set_: Overrides = None,
    common: Common = FLAGS,
) -> None:
    """Every key of a recipe, its value, its default and its meaning."""
    loaded = load_recipe(recipe, tuple(set_ or ()))
    result = {"recipe": recipe, "keys": recipe_reference(loaded)}
    finish(common, Plan("recipe show", [recipe], []), lambda: result)


@recipes.command(name="list")
def recipe_list(*, common: Common = FLAGS) -> None:
    """The packaged recipes."""
    finish(common, Plan("recipe list", [], []), lambda: {"recipes": packaged_recipes()})


@cache.default
def cache_show(*, common: Common = FLAGS) -> None:
    """What the cache holds, with sizes in bytes."""
    finish(common, Plan("cache", [], []), cache_list)


@cache.command(name="clear")
def cache_empty(*, common: Common = FLAGS) -> None:
    """Empty the cache; all of it can be made again."""
    finish(common, Plan("cache clear", [], [], more={"removes": cache_list()["cache"]}), cache_clear)
