"""The script that trains beside speculators: what is left to run, what its table says. No run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eyas.recipe import recipe_of

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location("bench_recipes", SCRIPTS / "bench_recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, budget: int, seed: int, length: float) -> dict:
    return {"name": name, "budget": budget, "seed": seed, "accept_length": length, "steps": 100 + seed}


def test_runs_are_taken_in_pairs_and_a_row_is_not_run_again(recipes: ModuleType) -> None:
    rows = [row("eyas", 40, 0, 1.3), row("speculators", 40, 1, 1.2)]
    assert list(recipes.left(rows, [40, 100], 2)) == [
        (40, 0, "speculators"),
        (40, 1, "eyas"),
        (100, 0, "eyas"),
        (100, 0, "speculators"),
        (100, 1, "eyas"),
        (100, 1, "speculators"),
    ]


def test_the_table_pairs_seeds_and_leaves_out_what_has_no_pair(recipes: ModuleType) -> None:
    rows = [row("eyas", 40, seed, 1.3 + 0.01 * seed) for seed in range(3)] + [row("eyas", 100, 0, 1.5)]
    rows += [row("speculators", 40, seed, 1.2) for seed in range(2)]
    (line,) = recipes.table(rows).splitlines()[2:]
    assert line == "| 40 | 100 to 101 | 2 | 1.3050 ± 0.0635 | 1.2000 ± 0.0000 | 0.1050 ± 0.0635 |"


def test_speculators_runs_hang_on_what_both_take_said_or_a_default_and_on_nothing_else(recipes: ModuleType) -> None:
    def theirs(*sets: str) -> tuple[str, ...]:
        return recipes.peers_settings(recipe_of(sets))

    said = theirs("train.batch_tokens=512")
    assert "train.batch_tokens=512" in said
    assert said == theirs() == theirs("train.optimiser=adamw", "draft.norm_output=false", "train.precision=bfloat16")
    assert theirs("train.batch_tokens=256") != said != theirs("draft.vocab_size=4096")
