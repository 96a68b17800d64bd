"""Errors have four parts; recipes refuse what they do not know and say what is nearest."""

import pytest

from eyas.errors import CheckFailed, EyasError, InputError, MissingDependency, ServerDied, did_you_mean
from eyas.recipe import Recipe, load_recipe, packaged_recipes, recipe_of, recipe_reference


def test_every_error_has_four_parts_and_the_exit_status_of_its_kind() -> None:
    parts = {"wanted": "a", "got": "b", "where": "c", "next": "d"}
    kinds = {InputError: 2, MissingDependency: 2, CheckFailed: 1, ServerDied: 3}
    for kind, status in kinds.items():
        error = kind(**parts)
        assert isinstance(error, EyasError)
        assert error.as_dict() == parts
        assert error.exit_code == status


def test_did_you_mean_names_the_nearest_word_or_nothing() -> None:
    assert did_you_mean("epoch", ["epochs", "seed"]) == ' (did you mean "epochs"?)'
    assert did_you_mean("xyzzy", ["epochs", "seed"]) == ""


def test_the_demo_is_packaged_and_loads() -> None:
    assert "demo" in packaged_recipes()
    assert load_recipe("demo").name == "demo"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.epoch=2", '(did you mean "epochs"?)'),
        ("tran.epochs=2", '(did you mean "train"?)'),
        ("train.epochs=-1", "greater than 0"),
        ("train.epochs=many", "valid number"),
        ("train.epochs=inf", "train.epochs: Input should be a finite number"),
        ("train.clip_norm=inf", "train.clip_norm: Input should be a finite number"),
        ("train.learning_rate=nan", "train.learning_rate: Input should be a finite number"),
        ("train.step_weights=1,nan,1", "train.step_weights.1: Input should be a finite number"),
        ("train.betas=[0.9, 1.5]", "train.betas.1: Input should be less than 1"),
        ("train.betas=[2, 3]", "train.betas.0: Input should be less than 1"),
        ("train.seed=99999999999999999999", "train.seed: Input should be less than or equal to 8796093022208"),
        ("draft.rope_theta=-1", "draft.rope_theta: Input should be greater than 0"),
        ("draft.rope_theta=0", "draft.rope_theta: Input should be greater than 0"),
        ("draft.intermediate_size=-5", "draft.intermediate_size: Input should be greater than or equal to 1"),
        ("draft.intermediate_size=0", "draft.intermediate_size: Input should be greater than or equal to 1"),
        ("serve.give_up_s=inf", "serve.give_up_s: Input should be a finite number"),
        ("train.epochs", "--set section.key=value"),
        ("name.x=1", "a section before the dot"),
        ("port=3", '(did you mean "serve.port"?)'),
        ("seed=3", '(did you mean "prompts.seed" or "respond.seed" or "train.seed" or "bench.seed"?)'),
    ],
)
def test_a_bad_override_is_refused_with_what_would_fit(override: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("demo", (override,))
    assert part in str(caught.value)


def test_overrides_take_toml_and_python_spellings() -> None:
    recipe = load_recipe(
        "demo",
        (
            "train.epochs=1.5",
            "draft.fc_norm=false",
            "bench.limit=none",
            "capture.boundaries=[1, 2, 3]",
            "prompts.source=my file.jsonl",
            "bench.simulate=0.7,0.4",
        ),
    )
    assert recipe.train.epochs == 1.5
    assert recipe.draft.fc_norm is False
    assert recipe.bench.limit is None
    assert recipe.capture.boundaries == (1, 2, 3)
    assert recipe.prompts.source == "my file.jsonl"
    assert recipe.bench.simulate == (0.7, 0.4)


def test_a_recipe_file_with_bad_toml_or_no_file_is_named(tmp_path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\nepochs = 1")
    for typed in (str(bad), bad):
        with pytest.raises(InputError, match=r"bad\.toml"):
            load_recipe(typed)
    bad.write_bytes(b"name = '\xff'")
    with pytest.raises(InputError, match="UTF-8"):
        load_recipe(str(bad))
    with pytest.raises(InputError, match="no such file"):
        load_recipe(str(tmp_path / "absent.toml"))
    with pytest.raises(InputError, match=r'did you mean "demo"'):
        load_recipe("dema")


def test_every_key_has_a_meaning() -> None:
    rows = recipe_reference(Recipe())
    assert len(rows) > 40
    assert [row["key"] for row in rows if not row["meaning"]] == []


@pytest.mark.parametrize("typed", ["vllm", "vllm, sglang@0.5.23", '["vllm"]'])
def test_engines_are_typed_with_commas_or_as_a_list(typed: str) -> None:
    engines = recipe_of((f"export.engines={typed}",)).export.engines
    assert engines == (("vllm", "sglang@0.5.23") if "," in typed else ("vllm",))
