"""Captures that are damaged, masked wrongly or made with something else are findings, each by its own code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.models.target import Target
from eyas.wiring.check import attempt, check
from eyas.wiring.given import Given
from eyas.wiring.static_checks import Check
from made_captures import made
from wiring_lab import rewrite_shard


@pytest.fixture
def captures(tiny_target: Path, tmp_path: Path) -> tuple[Path, Target]:
    return made(tmp_path / "captures", tiny_target, train=4, heldout=2, limit=30)


def found(folder: Path, target: Target, **options: Path) -> list[tuple[str, str]]:
    result = check(str(target.folder), folder, **options)
    return [(one["code"], one["severity"]) for one in result["findings"]]


def test_whole_captures_of_this_target_raise_nothing(captures: tuple[Path, Target]) -> None:
    assert found(*captures) == []


def flip(folder: Path) -> None:
    path = folder / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(bytes(data))


def cut(folder: Path) -> None:
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()


def shorten(folder: Path) -> None:
    rewrite_shard(folder, lambda held: {name: tensor[:-3] for name, tensor in held.items()})


@pytest.mark.parametrize(
    ("damage", "code"),
    [(flip, "data_corrupt"), (cut, "data_corrupt"), (lose, "capture_incomplete"), (shorten, "capture_incomplete")],
)
def test_damage_is_a_finding_and_the_rest_is_skipped(
    damage: Callable[[Path], None], code: str, captures: tuple[Path, Target]
) -> None:
    damage(captures[0])
    assert found(*captures) == [(code, "error")]


def marked(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda folder: rewrite_shard(folder, lambda held: held | {"loss_mask": change(held["loss_mask"])})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda mask: mask.roll(1), ("mask_shift", "warning")),
        (lambda mask: mask.roll(2), ("mask_shift", "error")),
        (lambda mask: mask.roll(-1), ("mask_shift", "error")),
        (torch.zeros_like, ("mask_empty", "error")),
    ],
)
def test_masks_that_are_not_the_answers_are_named(
    change: Callable[[Tensor], Tensor], wanted: tuple[str, str], captures: tuple[Path, Target]
) -> None:
    marked(change)(captures[0])
    assert found(*captures) == [wanted]


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("tokenizer_hash", ("tokenizer_mismatch", "error")),
        ("template_hash", ("template_mismatch", "warning")),
        ("weights_hash", ("target_revision", "error")),
    ],
)
def test_what_was_made_with_something_else_is_named(
    key: str, wanted: tuple[str, str], captures: tuple[Path, Target]
) -> None:
    path = captures[0] / "manifest.json"
    raw = json.loads(path.read_text())
    holder = raw["facts"]["target"] if key == "weights_hash" else raw["facts"]
    holder[key] = "0" * 64
    path.write_text(json.dumps(raw))
    assert found(*captures) == [wanted]


def test_the_heat_map_is_drawn_where_it_was_asked_for(captures: tuple[Path, Target], tmp_path: Path) -> None:
    folder, target = captures
    result = check(str(target.folder), folder, heatmap=tmp_path / "map.svg")
    assert ElementTree.parse(tmp_path / "map.svg").getroot().tag.endswith("svg")
    (taps,) = [one for one in result["checks"] if one["name"] == "tap identity"]
    assert [(one["declared"], one["boundary"]) for one in taps["facts"]["blocks"]] == [(2, "2"), (4, "4"), (5, "5")]
    assert taps["facts"]["blocks"][0]["scores"]["2"] == 0.0
    json.dumps(result, allow_nan=False)
    with pytest.raises(InputError, match=r"--heatmap .*map\.svg"):
        check(str(target.folder), folder, heatmap=tmp_path / "map.png")


def test_a_device_that_is_not_there_is_bad_input(captures: tuple[Path, Target]) -> None:
    with pytest.raises(InputError, match="--device cpu"):
        check(str(captures[1].folder), captures[0], device="cuda:9")


def test_a_refused_input_that_has_a_code_is_a_finding() -> None:
    def refuse(_: Given) -> Check:
        raise InputError(wanted="w", got="g", where="x", next="n", code="shape_mismatch")

    refusal = attempt("one", refuse, Given(None, None, None, None, None)).refusal
    assert refusal is not None and (refusal.code, refusal.found, refusal.fix) == ("shape_mismatch", "g", "n")


def test_nothing_to_check_is_said_before_torch_is_loaded() -> None:
    for args in ([], ["--captures", "nowhere"], ["--trace", "nowhere"]):
        code = (
            "import sys; from eyas.cli import main\n"
            f"try: main(['check', *{args}])\n"
            "except SystemExit as e: sys.exit(e.code + 10 * ('torch' in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2
