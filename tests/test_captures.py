"""Captures: the states stored are the target's own, packed without loss, and a damaged folder never opens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyas.data.captures import capture, capture_batch
from eyas.data.responses import RESPONSES
from eyas.data.shards import CaptureReader, Entry, Sample, pack, plan_shards, write_index, write_shard
from eyas.errors import InputError
from eyas.models.target import Target, load_target
from eyas.recipe import CaptureSettings, TargetSettings
from eyas.run import hash_bytes, hash_file, verify_files, write_manifest
from tiny import save_tiny_target, tiny_model

LENGTHS = [30, 12, 47, 12, 25, 60, 8, 33, 19, 41]


def write_responses(folder: Path, target: Target, lengths: list[int] = LENGTHS, prompt: int = 5) -> Path:
    """A complete responses folder of made-up answers, lines in an order that is not the ids'."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    lines = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        lines.append({
            "id": f"p{number:03d}/0", "prompt_id": f"p{number:03d}", "turn": 0,
            "split": "heldout" if number % 4 == 3 else "train",
            "input_ids": ids, "prompt_tokens": prompt, "finish": "length",
        })  # fmt: skip
    (folder / RESPONSES).write_text("".join(json.dumps(line) + "\n" for line in lines[::-1]))
    facts = {
        "target": target.identity.model_dump(),
        "tokenizer_hash": target.tokenizer_hash,
        "template_hash": target.template_hash,
        "greedy": True,
    }
    files = {RESPONSES: hash_file(folder / RESPONSES)}
    write_manifest(folder, "responses", settings={}, inputs={}, files=files, facts=facts, seconds=0.0)
    return folder


def quick(**changes: Any) -> CaptureSettings:
    return CaptureSettings(
        **{"precision": "float32", "store": "float32", "batch_tokens": 64, "shard_tokens": 100, **changes}
    )


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def where(tiny_target: Path) -> TargetSettings:
    return TargetSettings(name=str(tiny_target))


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return write_responses(tmp_path_factory.mktemp("responses"), target)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, responses: Path, where: TargetSettings) -> Path:
    folder = tmp_path_factory.mktemp("captures") / "c"
    capture(responses, folder, quick(), where)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_states_are_hidden_states_bit_for_bit_in_the_same_dtype(tiny_target: Path, dtype: torch.dtype) -> None:
    target = load_target(str(tiny_target), dtype=dtype)
    ids = [1, 40, 77, 130, 9, 200, 3, 58, 12, 90]
    ((taps, last, stored),) = capture_batch(target, [ids], range(8), dtype)
    with torch.inference_mode():
        output = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    assert torch.equal(taps, torch.cat(output.hidden_states[:8], dim=-1)[0])
    assert torch.equal(target.final_norm(last), output.hidden_states[8][0])
    assert not torch.equal(last, output.hidden_states[8][0])
    assert stored.tolist() == ids


def test_padding_and_company_leave_a_samples_states_alone(target: Target) -> None:
    batch = [list(range(10, 50)), list(range(60, 73)), list(range(100, 127))]
    together = capture_batch(target, batch, (2, 4, 5), torch.float32)
    for ids, (taps, last, stored) in zip(batch, together, strict=True):
        ((alone_taps, alone_last, _),) = capture_batch(target, [ids], (2, 4, 5), torch.float32)
        assert stored.tolist() == ids and taps.shape == (len(ids), 192) and last.shape == (len(ids), 64)
        torch.testing.assert_close(taps, alone_taps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last, alone_last, rtol=1e-5, atol=1e-5)


def test_boundary_n_may_be_a_tap_too(target: Target) -> None:
    ((taps, last, _),) = capture_batch(target, [[1, 40, 77, 130]], (2, 8), torch.float32)
    assert torch.equal(taps[:, 64:], last)


def test_only_the_named_boundaries_are_ever_held(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    head = target.head.forward
    monkeypatch.setattr(target.head, "forward", lambda *args: seen.append("head") or head(*args))
    from eyas.models import target as module

    original = module.Recorder
    monkeypatch.setattr(module, "Recorder", lambda: seen.append(original()) or seen[-1])
    capture_batch(target, [[1, 40, 77, 130]], (2, 4, 5), torch.float32)
    assert len(seen) == 1, "the head never runs"
    assert sorted(seen[0].states) == [2, 4, 5, 8]


def test_a_folder_reads_back_as_the_states_of_each_sample(
    captures: Path, responses: Path, target: Target, where: TargetSettings
) -> None:
    reader = CaptureReader(captures, expect=target.identity)
    lines = {line["id"]: line for line in map(json.loads, (responses / RESPONSES).read_text().splitlines())}
    assert [entry.id for entry in reader.samples] == sorted(lines)
    assert (reader.boundaries, reader.taps_width, reader.greedy) == ((2, 4, 5), 192, True)
    assert reader.manifest.facts["last_hidden_norm"] == "before"
    assert reader.manifest.facts["counts"] == {
        "samples": 10, "train": 8, "heldout": 2, "tokens": 287, "supervised_tokens": 237,
    }  # fmt: skip
    assert verify_files(captures) == []
    for number, entry in enumerate(reader.samples):
        sample, line = reader.read(number), lines[entry.id]
        assert sample.ids_T.tolist() == line["input_ids"] and sample.split == line["split"]
        assert sample.loss_mask_T.tolist() == [False] * 5 + [True] * (len(line["input_ids"]) - 5)
        ((taps, last, _),) = capture_batch(target, [line["input_ids"]], (2, 4, 5), torch.float32)
        torch.testing.assert_close(sample.taps_TA, taps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sample.last_hidden_TH, last, rtol=1e-5, atol=1e-5)
    assert reader.of_split("heldout") == [3, 7]


def test_the_order_of_answers_does_not_change_a_byte(
    tmp_path: Path, captures: Path, responses: Path, where: TargetSettings
) -> None:
    again = Path(shutil.copytree(responses, tmp_path / "r"))
    lines = (again / RESPONSES).read_text().splitlines(keepends=True)
    (again / RESPONSES).write_text("".join(lines[3:] + lines[:3]))
    manifest = json.loads((again / "manifest.json").read_text())
    manifest["files"][RESPONSES] = hash_file(again / RESPONSES)
    (again / "manifest.json").write_text(json.dumps(manifest))
    assert capture(again, tmp_path / "c", quick(), where).files == CaptureReader(captures).manifest.files


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 500), st.integers(1, 900))
@hypothesis_settings(deadline=None)
def test_a_plan_holds_every_sample_once_within_its_limits(
    lengths: list[int], batch_tokens: int, shard_tokens: int
) -> None:
    shards = plan_shards(lengths, batch_tokens, shard_tokens)
    flat = [number for batches in shards for batch in batches for number in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[number] for number in flat] == sorted(lengths)
    for batches in shards:
        assert (
            sum(lengths[n] for batch in batches for n in batch) <= shard_tokens or len(batches) == len(batches[0]) == 1
        )
        for batch in batches:
            assert len(batch) * max(lengths[n] for n in batch) <= batch_tokens or len(batch) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 100))
@hypothesis_settings(deadline=None, max_examples=25)
def test_packing_any_lengths_round_trips(lengths: list[int], shard_tokens: int) -> None:
    import tempfile

    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [
        Sample(
            f"s{number:03d}", "train", torch.randn(length, 6, generator=generator),
            torch.randn(length, 2, generator=generator), torch.arange(length), torch.arange(length) % 2 == 0,
        )
        for number, length in enumerate(lengths)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        reader = CaptureReader(packed(Path(name), samples, shard_tokens))
        for number, sample in enumerate(samples):
            back = reader.read(number)
            assert back.id == sample.id
            assert torch.equal(back.taps_TA, sample.taps_TA) and torch.equal(back.last_hidden_TH, sample.last_hidden_TH)
            assert torch.equal(back.ids_T, sample.ids_T) and torch.equal(back.loss_mask_T, sample.loss_mask_T)


def packed(folder: Path, samples: list[Sample], shard_tokens: int) -> Path:
    """A capture folder of made-up states: three taps of width 2."""
    files, entries = {}, []
    for shard, batches in enumerate(plan_shards([len(s.ids_T) for s in samples], 64, shard_tokens)):
        name, start = f"shard-{shard:05d}.safetensors", 0
        inside = [samples[number] for batch in batches for number in batch]
        for sample in inside:
            entries.append(Entry(sample.id, sample.split, name, start, len(sample.ids_T), 0))
            start += len(sample.ids_T)
        files[name] = write_shard(folder / name, pack(inside))
    index = write_index(sorted(entries, key=lambda entry: entry.id))
    (folder / "index.json").write_text(index)
    identity = {
        "name": "t", "weights_hash": "0", "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 2,
        "vocab_size": 9,
    }  # fmt: skip
    facts = {"target": identity, "boundaries": [2, 4, 5], "greedy": True, "last_hidden_norm": "before"}
    files["index.json"] = hash_bytes(index.encode())
    write_manifest(folder, "captures", settings={}, inputs={}, files=files, facts=facts, seconds=0.0)
    return folder


def test_long_samples_are_cut_and_those_without_supervision_counted(
    tmp_path: Path, target: Target, where: TargetSettings
) -> None:
    responses = write_responses(tmp_path / "r", target, [30, 12, 47], prompt=10)
    lines = [json.loads(line) for line in (responses / RESPONSES).read_text().splitlines()]
    lines[0]["prompt_tokens"] = 20
    (responses / RESPONSES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = json.loads((responses / "manifest.json").read_text())
    manifest["files"][RESPONSES] = hash_file(responses / RESPONSES)
    (responses / "manifest.json").write_text(json.dumps(manifest))
    made = capture(responses, tmp_path / "c", quick(max_length=20), where)
    assert made.facts["skipped"] == {"assistant truncated": 1}
    reader = CaptureReader(tmp_path / "c")
    assert [(entry.id, entry.length) for entry in reader.samples] == [("p000/0", 20), ("p001/0", 12)]
    assert reader.read(0).loss_mask_T.tolist() == [False] * 10 + [True] * 10
    with pytest.raises(InputError, match="at least one sample with a supervised token"):
        capture(responses, tmp_path / "d", quick(max_length=8), where)


KILLED = """
import sys
from pathlib import Path
from eyas.data import captures
from eyas.recipe import CaptureSettings, TargetSettings
import time
inner = captures.capture_batch
def slowly(*args):
    time.sleep(0.1)
    return inner(*args)
captures.capture_batch = slowly
settings = CaptureSettings(precision="float32", store="float32", batch_tokens=64, shard_tokens=100)
captures.capture(Path(sys.argv[2]), Path(sys.argv[3]), settings, TargetSettings(name=sys.argv[4]))
"""


def test_a_kill_loses_at_most_the_shard_in_work(
    tmp_path: Path, captures: Path, responses: Path, tiny_target: Path, where: TargetSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "c"
    command = [sys.executable, "-c", KILLED, "run", str(responses), str(out), str(tiny_target)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while len(journal(out)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = journal(out)
    before = {name: (out / name).stat().st_mtime_ns for name in finished}
    assert not (out / "manifest.json").exists()
    capture(responses, out, quick(), where)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == before, "finished shards are kept"
    assert CaptureReader(out).manifest.files == CaptureReader(captures).manifest.files
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == sorted(
        path.name for path in captures.iterdir()
    )


def journal(out: Path) -> dict[str, str]:
    path = out / "shards.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def test_a_complete_folder_is_returned_without_loading_the_target(
    captures: Path, responses: Path, where: TargetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.data.captures.load_target", None)
    assert capture(responses, captures, quick(), where) == CaptureReader(captures).manifest


def test_other_settings_stop_with_the_fields_name(captures: Path, responses: Path, where: TargetSettings) -> None:
    with pytest.raises(InputError, match=r"captures\.store = 'bfloat16'"):
        capture(responses, captures, quick(store="bfloat16"), where)


def test_another_target_than_the_responses_is_refused(tmp_path: Path, responses: Path) -> None:
    other = TargetSettings(name=str(save_tiny_target(tmp_path / "t", seed=1)))
    with pytest.raises(InputError, match="target weights_hash"):
        capture(responses, tmp_path / "c", quick(), other)


@pytest.mark.parametrize(("boundaries", "got"), [((3, 2), "sorted"), ((2, 9), "from 0"), ((), "at least one tap")])
def test_taps_that_do_not_fit_are_refused(
    tmp_path: Path, responses: Path, where: TargetSettings, boundaries: tuple[int, ...], got: str
) -> None:
    with pytest.raises(InputError, match=got):
        capture(responses, tmp_path / "c", quick(boundaries=boundaries), where)


def test_default_taps_need_seven_layers(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "t", layers=6)
    target = load_target(str(folder))
    responses = write_responses(tmp_path / "r", target)
    where = TargetSettings(name=str(folder))
    with pytest.raises(InputError, match="at least 7 layers"):
        capture(responses, tmp_path / "c", quick(), where)
    assert capture(responses, tmp_path / "c", quick(boundaries=(1, 3, 5)), where).facts["boundaries"] == [1, 3, 5]


def test_a_state_that_is_not_finite_names_its_sample(
    tmp_path: Path, responses: Path, where: TargetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(target: Target, batch: list[list[int]], *args: Any) -> Any:
        rows = [torch.full((len(ids), 2), torch.nan) for ids in batch]
        return [(row, row, torch.tensor(ids)) for row, ids in zip(rows, batch, strict=True)]

    monkeypatch.setattr("eyas.data.captures.capture_batch", broken)
    with pytest.raises(InputError, match="sample p006/0"):
        capture(responses, tmp_path / "c", quick(), where)


def damage(folder: Path, how: str) -> None:
    shard = folder / "shard-00001.safetensors"
    if how == "shard missing":
        shard.unlink()
    elif how == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "index missing":
        (folder / "index.json").unlink()
    elif how == "index changed":
        (folder / "index.json").write_text((folder / "index.json").read_text().replace("train", "brain"))
    elif how == "narrow taps":
        tensors = load_file(shard)
        save_file({**tensors, "taps": tensors["taps"][:, :128].contiguous()}, shard)
    elif how == "rows missing":
        save_file({name: tensor[:-1].contiguous() for name, tensor in load_file(shard).items()}, shard)
    elif how == "a tensor missing":
        tensors = load_file(shard)
        del tensors["loss_mask"]
        save_file(tensors, shard)


@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("shard missing", "no such file"),
        ("shard cut", ""),
        ("index missing", "no such file"),
        ("index changed", "other bytes"),
        ("narrow taps", r"taps of shape \(\d+, 128\)"),
        ("rows missing", "rows, of which the index knows"),
        ("a tensor missing", "loss_mask"),
    ],
)
def test_a_damaged_folder_never_opens(tmp_path: Path, captures: Path, how: str, got: str) -> None:
    folder = Path(shutil.copytree(captures, tmp_path / "c"))
    damage(folder, how)
    with pytest.raises(InputError, match=f"got .*{got}"):
        CaptureReader(folder)


def test_captures_of_another_target_are_refused(captures: Path, tmp_path: Path) -> None:
    other = load_target(str(save_tiny_target(tmp_path / "t", seed=1)))
    with pytest.raises(InputError, match="target weights_hash"):
        CaptureReader(captures, expect=other.identity)


def test_no_answer_to_read_is_more_than_a_line_in_memory(tmp_path: Path, target: Target) -> None:
    """Surveying keeps numbers, not tokens: its size a sample does not grow with the sample."""
    from eyas.data.captures import Source, survey

    responses = write_responses(tmp_path / "r", target, [600] * 20)
    sources, _ = survey(responses / RESPONSES, CaptureSettings(max_length=500))
    assert {type(value) for source in sources for value in vars(source).values()} == {str, int}
    assert [source.length for source in sources] == [500] * 20
    assert sources[0] == Source("p000/0", "train", sources[0].offset, 500, 5)


def test_the_tiny_target_is_the_one_saved(target: Target) -> None:
    assert torch.equal(target.embedding, tiny_model().model.embed_tokens.weight)
