"""A draft goes beside its own target, with its own weights, and says one thing of itself; all else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cli import main
from eyas.engine.server.arguments import parse
from eyas.engine.server.start import load
from eyas.errors import InputError
from eyas.formats.headers import read_headers
from eyas.formats.tensor_values import not_finite
from eyas.measure.bench import bench
from eyas.models.draft import make_draft
from eyas.models.fitting import load_fitting
from eyas.models.target import Target, load_target
from eyas.pipeline.chat_engine import EngineChat
from eyas.pipeline.inspect import inspect_path
from eyas.pipeline.trace import trace
from eyas.recipe import BenchSettings, ChatSettings, TargetSettings, TraceSettings
from eyas.wiring.check import check
from eyas.wiring.static_checks import check_static
from tiny import save_tiny_target
from wiring_lab import draft_config, write_draft

EVERY = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_nan_and_infinity_are_counted_in_every_dtype_and_large_numbers_are_not(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    largest = torch.finfo(dtype).max
    rows = {"good": [largest, -largest, 0.0, -0.0, 1.0], "bad": [torch.nan, 1.0, -torch.nan, torch.nan, 2.0]}
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        rows["bad"][2:4] = [torch.inf, -torch.inf]
    tensors = {name: torch.tensor(row, dtype=torch.float64).to(dtype) for name, row in rows.items()}
    tensors |= {"empty": torch.zeros(0, 3, dtype=dtype), "no numbers": torch.ones(3, dtype=torch.bool)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert not_finite(tmp_path, read_headers(tmp_path)) == {"bad": 3}


@pytest.fixture
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    draft = make_draft(draft_config(target, (1, 2, 3), draft_vocab_size=target.vocab_size))
    draft.share_embedding(target.embedding)
    return write_draft(tmp_path / "draft", draft, target)


def with_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return folder


def with_nan(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, :5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_draft_of_this_target_is_loaded_in_its_dtype(target: Target, folder: Path) -> None:
    draft, info = load_fitting(folder, target)
    assert draft.fc.weight.dtype == target.dtype and info.target == target.identity


def test_a_draft_of_other_weights_is_refused_by_its_code(target: Target, folder: Path) -> None:
    with_config(folder, lambda raw: raw["eyas"]["target"].update(weights_hash="0" * 64))
    with pytest.raises(InputError, match="the target's weights_hash") as caught:
        load_fitting(folder, target)
    assert caught.value.code == "target_revision" and caught.value.next == "give --target, the draft's own"


def test_keys_that_contradict_the_eyas_block_are_refused_by_their_code(target: Target, folder: Path) -> None:
    with_config(folder, lambda raw: raw.update(rope_theta=0, rms_norm_eps=1e-3))
    with pytest.raises(InputError, match="rms_norm_eps") as caught:
        load_fitting(folder, target)
    assert caught.value.code == "config_key_wrong" and "1 keys more" in caught.value.got


def test_a_nan_is_refused_by_every_reader_of_a_draft(
    target: Target, tiny_target: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_nan(folder)
    with pytest.raises(InputError, match=r"5 of 12,288 in fc\.weight") as caught:
        load_fitting(folder, target)
    assert caught.value.code == "tensor_not_finite"
    told = [
        inspect_path(folder)["findings"],
        check_static(folder, ["sglang@0.5.23"])["findings"],
        check(str(tiny_target), draft=folder)["findings"],
        check(None, export=folder)["findings"],
        *(served(capsys, engine, folder) for engine in ("embedded", "vllm@0.33.0", "sglang@0.5.23")),
    ]
    assert ["tensor_not_finite" in [found["code"] for found in findings] for findings in told] == [True] * len(told)


def served(capsys: pytest.CaptureFixture[str], engine: str, draft: Path) -> list[dict[str, Any]]:
    """What preflight finds before a start."""
    with pytest.raises(SystemExit):
        main(["serve", "8b-vllm", "--engine", engine, "--draft", str(draft), "--plan", "--json"])
    return json.loads(capsys.readouterr().out)["preflight"]["findings"]


@pytest.mark.parametrize(("num_steps", "said"), [(3, False), (7, True)])
@pytest.mark.parametrize("command", ["bench", "chat", "trace", "serve"])
def test_a_chain_longer_than_trained_is_said_where_the_engine_takes_a_draft(
    command: str, num_steps: int, said: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = TargetSettings(name=str(tmp_path / "nowhere"))
    commands: dict[str, Callable[[], object]] = {
        "bench": lambda: bench(nowhere, folder, BenchSettings(num_steps=num_steps)),
        "chat": lambda: EngineChat(nowhere, ChatSettings(num_steps=num_steps), folder),
        "trace": lambda: trace(folder, tmp_path / "out", TraceSettings(num_steps=num_steps), nowhere),
        "serve": lambda: load(parse(["--target", nowhere.name, "--draft", str(folder), "--num-steps", str(num_steps)])),
    }
    with pytest.raises(InputError, match="nowhere"):
        commands[command]()
    line = f"warning: ttt_mismatch: num_steps {num_steps}, and the draft is trained for 3: --num-steps 3, or measure"
    assert capsys.readouterr().err.count(line) == int(said)


@pytest.mark.parametrize(("num_steps", "codes"), [("3", []), ("7", ["ttt_mismatch"])])
def test_preflight_of_the_embedded_engine_warns_of_a_chain_longer_than_trained(
    num_steps: str, codes: list[str], folder: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        words = ("--target", str(tiny_target), "--draft", str(folder), "--num-steps", num_steps, "--port", "18123")
        main(["serve", "own-cpu", *words, "--plan", "--json"])
    seen = json.loads(capsys.readouterr().out)["preflight"]
    assert ([one["code"] for one in seen["findings"]], seen["verdict"]) == (codes, "pass")


def test_a_draft_of_other_sizes_than_the_target_is_refused_before_the_start(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", layers=9)
    with pytest.raises(SystemExit) as done:
        main(["serve", "own-cpu", "--target", str(other), "--draft", str(folder), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert done.value.code == 1 and "num_hidden_layers 9" in error["wanted"] and "target_revision" in error["got"]


def test_tables_of_target_ids_are_found_before_any_engine_is_started(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    draft = make_draft(draft_config(target, (1, 2, 3), draft_vocab_size=64))
    draft.share_embedding(target.embedding)
    folder = write_draft(tmp_path / "draft", draft, target)
    tensors = load_file(folder / "model.safetensors")
    tensors["t2d"] = torch.zeros(259, dtype=torch.bool).index_fill(0, torch.arange(64) + 100, True)
    tensors["d2t"] = torch.arange(64) + 100
    save_file(tensors, folder / "model.safetensors")
    for engine in ("embedded", "vllm@0.33.0", "sglang@0.5.23"):
        assert "d2t_absolute" in [found["code"] for found in served(capsys, engine, folder)]
