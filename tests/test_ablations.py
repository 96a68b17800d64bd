"""The ablation script's own logic: what is left to run and by whom, what a table says. No run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eyas.recipe import recipe_of
from made_captures import made

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ablations.py"


@pytest.fixture(scope="module")
def ablations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablations", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, seed: int, length: float) -> dict:
    return {"base": "b", "name": name, "seed": seed, "accept_length": length, "seconds": 10.0}


def test_every_change_is_a_recipe(ablations: ModuleType) -> None:
    for changes in ablations.CHANGES.values():
        recipe_of(changes)


def test_all_are_screened_then_the_best_and_the_default_have_more_seeds(ablations: ModuleType) -> None:
    names = ["default", "a", "b", "c"]
    rows = [row("default", 0, 1.5), row("a", 0, 1.4), row("b", 0, 1.7)]
    assert list(ablations.left(rows, names, 2, 3)) == [("c", 0)]
    rows.append(row("c", 0, 1.6))
    assert list(ablations.left(rows, names, 2, 3)) == [
        ("default", 1), ("b", 1), ("c", 1), ("default", 2), ("b", 2), ("c", 2)
    ]  # fmt: skip
    assert list(ablations.left([*rows, row("b", 1, 1.7)], names, 1, 2)) == [("default", 1)]


def test_the_table_pairs_seeds_and_shows_intervals(ablations: ModuleType) -> None:
    rows = [row("default", seed, 1.5 + 0.01 * seed) for seed in range(3)] + [row("a", 1, 1.61), row("a", 2, 1.62)]
    first, second = ablations.table(rows).splitlines()[2:]
    assert first == "| a | 2 | 1.6150 ± 0.0635 | 0.1000 ± 0.0000 | 10 |"
    assert second.startswith("| default | 3 | 1.5100 ± 0.0248 |  |")


def test_a_row_counts_while_its_settings_are_what_its_change_means(
    ablations: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ("train.epochs=0.8",)

    def made(name: str, seed: int = 0, online: bool = False) -> dict:
        settings = ablations.settings_of(recipe_of((*shared, *ablations.CHANGES[name])), seed, online)
        return row(name, seed, 1.5) | {"settings": json.loads(json.dumps(settings)), "survival": [0.5] * 5}

    default, adamw = made("default"), made("AdamW", 1)
    assert (adamw["settings"]["train"]["optimiser"], adamw["settings"]["train"]["seed"]) == ("adamw", 1)
    assert ablations.valid(default, shared, False) and ablations.valid(adamw, shared, False)
    assert not ablations.valid(default, shared, True) and ablations.valid(made("default", online=True), shared, True)
    assert not ablations.valid(default, ("train.epochs=2",), False)
    assert not ablations.valid(default | {"survival": [0.5] * 4}, shared, False)
    assert not ablations.valid(default | {"name": "a change that was taken out"}, shared, False)
    earlier = default["settings"] | {"train": default["settings"]["train"] | {"learning_rate": 5e-4}}
    assert not ablations.valid(default | {"settings": earlier}, shared, False)
    monkeypatch.setitem(ablations.CHANGES, "AdamW", ("train.optimiser=adamw", "train.learning_rate=2e-3"))
    assert ablations.valid(default, shared, False) and not ablations.valid(adamw, shared, False)


def test_the_next_run_is_expected_to_take_what_the_last_three_took_with_their_judge(ablations: ModuleType) -> None:
    rows = [row("a", 0, 1.5) | {"seconds": float(seconds)} for seconds in (1000, 10, 20, 30)]
    rows[-1]["judge_seconds"] = 30.0
    assert ablations.needed(rows) == 30.0 and ablations.needed([]) == 0.0


def test_a_row_cut_by_a_kill_is_none_and_the_next_begins_a_line(ablations: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "ablations.jsonl"
    path.write_text(json.dumps(row("a", 0, 1.5)) + "\n" + json.dumps(row("b", 0, 1.5))[:-4] + "}")
    assert ablations.rows_of(path, "b") == [row("a", 0, 1.5)] and ablations.torn(path)
    assert ablations.rows_of(path, "other") == []


def test_two_processes_never_share_a_run(ablations: ModuleType, tmp_path: Path) -> None:
    def folder(name: str, seed: int) -> Path:
        return tmp_path / f"{name}-{seed}"

    def claims(todo: list[tuple[str, int]]) -> tuple[str, int] | None:
        """What another process would take."""
        code = (
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
            "from pathlib import Path; import ablations\n"
            f"folder = Path({str(tmp_path)!r})\n"
            f"with ablations.claim({todo!r}, lambda name, seed: folder / f'{{name}}-{{seed}}') as mine:\n"
            "    print(mine)"
        )
        return eval(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    todo = [("0.1 of it", 0), ("0.3 of it", 0)]
    with ablations.claim(todo, folder) as mine:
        assert mine == ("0.1 of it", 0)
        assert claims(todo) == ("0.3 of it", 0)
        assert claims(todo[:1]) is None
    assert claims(todo) == ("0.1 of it", 0)


def test_rows_hold_on_another_machine_and_not_for_other_answers(
    ablations: ModuleType, tiny_target: Path, tmp_path: Path
) -> None:
    captures = made(tmp_path / "captures", tiny_target)[0]
    base = ablations.base_of((), captures, None)
    manifest = json.loads((captures / "manifest.json").read_text())
    changed = manifest | {"created": "2030-01-01T00:00:00Z", "machine": {"system": "another"}, "seconds": 1.0}
    (captures / "manifest.json").write_text(json.dumps(changed))
    assert ablations.base_of((), captures, None) == base
    assert ablations.base_of(("train.epochs=2",), captures, None) != base
    (captures / "manifest.json").write_text(json.dumps(changed | {"facts": changed["facts"] | {"computed_in": "int4"}}))
    assert ablations.base_of((), captures, None) != base
