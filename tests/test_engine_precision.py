"""`auto` takes the precision that the engine's own products are faster in, on the path that the engine takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eyas.engine import precision
from eyas.engine.generate import Engine
from eyas.engine.native import Matrix
from eyas.engine.native_build import load_native
from eyas.engine.precision import engine_dtype, load_to_decode, products_of
from eyas.engine.server import start
from eyas.engine.server.arguments import parse
from eyas.models.target import load_target
from eyas.pipeline import chat_engine
from eyas.recipe import ChatSettings, TargetSettings

CONFIG = SimpleNamespace(
    model_type="llama",
    hidden_act="silu",
    rope_parameters=None,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
)


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [(2.0, 1.0, torch.bfloat16), (1.0, 4.0, torch.float32), (1.0, 0.95, torch.float32), (1.0, 1.0, torch.float32)],
)
def test_the_faster_is_chosen_and_a_tie_is_float32(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(precision, "best_seconds", lambda work, sizes, tries: {0: float32, 1: bfloat16})
    assert engine_dtype(CONFIG) is chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_is_what_the_engine_multiplies_by(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(load_native(), str):
        compiled = products_of(CONFIG, dtype)
        assert [width for width, _ in compiled] == [64, 96] * 3
        assert all(isinstance(product, Matrix) and product.weight.dtype is dtype for _, product in compiled)
    other = SimpleNamespace(**{**vars(CONFIG), "model_type": "gpt2", "intermediate_size": None})
    plain = products_of(other, dtype)
    assert [width for width, _ in plain] == [64, 256] * 3
    assert all(isinstance(product, nn.Linear) and product.weight.dtype is dtype for _, product in plain)
    monkeypatch.setattr(precision, "load_native", lambda: "no compiler")
    assert all(isinstance(product, nn.Linear) for _, product in products_of(CONFIG, dtype))


def test_every_product_is_timed_with_a_decoders_rows_in_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, int, int]] = []
    monkeypatch.setattr(precision, "TRIES", 1)
    monkeypatch.setattr(
        precision,
        "products_of",
        lambda config, dtype: [(width, lambda x: seen.append((x.dtype, *x.shape[1:]))) for width in (64, 96)],
    )
    engine_dtype(CONFIG)
    assert seen == [
        (dtype, rows, width) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 4) for width in (64, 96)
    ]


@pytest.mark.parametrize("chosen", [torch.float32, torch.bfloat16])
def test_chat_and_server_decode_in_the_engines_choice(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(precision, "engine_dtype", lambda config: chosen)
    chat = chat_engine.EngineChat(TargetSettings(name=str(tiny_target)), ChatSettings())
    assert chat.target.dtype is chosen and chat.engine.forward.cache.dtype is chosen
    chat.close()
    engine = start.load(parse(["--target", str(tiny_target)]))
    assert engine.target.dtype is chosen
    engine.close()


def test_a_precision_that_is_named_is_not_measured(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "engine_dtype", None)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.bfloat16)):
        assert load_to_decode(str(tiny_target), name).dtype is dtype


def test_a_target_loaded_by_the_choice_is_the_one_loaded_by_name(tiny_target: Path) -> None:
    chosen = load_target(str(tiny_target), dtype=lambda config: torch.bfloat16)
    named = load_target(str(tiny_target), dtype="bfloat16")
    assert chosen.identity == named.identity and chosen.dtype is torch.bfloat16
    for ours, theirs in zip(chosen.model.parameters(), named.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    engine = Engine(chosen, announce=False)
    assert len(engine.generate([5, 6, 7], 4, ignore_eos=True).ids) == 4
    engine.close()
