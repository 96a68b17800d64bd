"""Dumps of other programs, built here as they build them, come out as the states that went in, or are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.data.foreign import read_dumps, runs
from eyas.errors import InputError

T, H = 9, 4
IDS = list(range(20, 20 + T))
STATES = torch.arange(4.0 * T * H).reshape(4, T, H) / 8


def sample_folder(folder: Path, batched: bool = False, ids: bool = True) -> Path:
    folder.mkdir(parents=True)
    for index in range(3):
        torch.save(STATES[index, None] if batched else STATES[index], folder / f"aux_{index}.pt")
    torch.save(STATES[3], folder / "final.pt")
    if ids:
        torch.save(torch.tensor([IDS]), folder / "input_ids.pt")
    return folder


@pytest.mark.parametrize("batched", [False, True])
def test_per_sample_files_are_the_taps_and_the_last_hidden_apart(batched: bool, tmp_path: Path) -> None:
    (dump,) = read_dumps(sample_folder(tmp_path / "s0", batched))
    assert dump.ids == tuple(IDS) and dump.count == 3 and dump.last_hidden_norm is None
    assert torch.equal(dump.taps_TA, torch.cat([*STATES[:3]], dim=-1))
    assert dump.last_hidden_TH is not None and torch.equal(dump.last_hidden_TH, STATES[3])
    assert all(torch.equal(a, b) for a, b in zip(dump.blocks(H), STATES, strict=False))
    assert dump.cut(5).taps_TA.shape == (5, 12) and len(dump.cut(5).ids) == 5


def test_a_folder_of_samples_is_read_sample_by_sample(tmp_path: Path) -> None:
    for name in ("s1", "s0"):
        sample_folder(tmp_path / name)
    assert [dump.id for dump in read_dumps(tmp_path)] == ["s0", "s1"]


def test_per_sample_files_without_ids_take_given_ones(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path / "s0", ids=False)
    assert read_dumps(folder, IDS)[0].ids == tuple(IDS)
    with pytest.raises(InputError, match=r"input_ids\.pt"):
        read_dumps(folder)
    with pytest.raises(InputError, match="8 ids for 9 rows"):
        read_dumps(folder, IDS[:-1])


class Loaded:
    """What a pickle that runs code would make."""


def test_damaged_per_sample_files_are_named(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path / "s0")
    good = (folder / "aux_1.pt").read_bytes()
    (folder / "aux_1.pt").write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match=r"aux_1\.pt"):
        read_dumps(folder)
    torch.save(STATES[1, :-1], folder / "aux_1.pt")
    with pytest.raises(InputError, match=r"\(8, 4\)"):
        read_dumps(folder)
    torch.save(Loaded(), folder / "aux_1.pt")
    with pytest.raises(InputError, match=r"aux_1\.pt"):
        read_dumps(folder)
    torch.save({"x": STATES[1]}, folder / "aux_1.pt")
    with pytest.raises(InputError, match="a dict"):
        read_dumps(folder)
    (folder / "aux_1.pt").unlink()
    with pytest.raises(InputError, match=r"no aux_1\.pt"):
        read_dumps(folder)


def test_vllms_connector_files_hold_taps_side_by_side(tmp_path: Path) -> None:
    for name in ("req-1", "req-0"):
        tensors = {"hidden_states": STATES[:3].transpose(0, 1).contiguous(), "token_ids": torch.tensor(IDS)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    dumps = read_dumps(tmp_path)
    assert [dump.id for dump in dumps] == ["req-0", "req-1"]
    assert torch.equal(dumps[0].taps_TA, torch.cat([*STATES[:3]], dim=-1))
    assert (dumps[0].count, dumps[0].last_hidden_TH) == (3, None)


def test_damaged_connector_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"hidden_states": STATES, "token_ids": torch.tensor(IDS)}, path)
    with pytest.raises(InputError, match=r"\(4, 9, 4\)"):
        read_dumps(path)
    save_file({"hidden_states": STATES}, path)
    with pytest.raises(InputError, match="token_ids"):
        read_dumps(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"r\.safetensors"):
        read_dumps(path)


def response(prompt: int = 6) -> dict[str, object]:
    """A chunked prefill of `prompt` rows, then a row a decoded token; the newest token has none."""
    rows = torch.cat([*STATES[:3]], dim=-1).tolist()
    parts = [rows[:4], rows[4:prompt], *rows[prompt:]]
    return {
        "input_ids": IDS[:prompt],
        "output_ids": [*IDS[prompt:], 99],
        "meta_info": {"id": "r7", "hidden_states": parts, "cached_tokens": 0},
    }


def test_sglangs_answer_is_prefill_chunks_then_rows(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps([response(), response()]))
    first, _ = read_dumps(path)
    assert first.id == "r7" and first.ids == tuple(IDS) and first.count is None and first.last_hidden_TH is None
    assert torch.equal(first.taps_TA, torch.cat([*STATES[:3]], dim=-1))
    assert len(first.blocks(H)) == 3
    with pytest.raises(InputError, match="width 12"):
        first.blocks(5)


def test_an_answer_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"

    def refused(words: str, answer: object) -> None:
        path.write_text(answer if isinstance(answer, str) else json.dumps(answer))
        with pytest.raises(InputError, match=words):
            read_dumps(path)

    whole = response()
    assert isinstance(whole["meta_info"], dict)
    meta = whole["meta_info"]
    refused("input_ids", {**whole, "input_ids": None})
    refused("no list of integers", {**whole, "input_ids": "abc"})
    refused("no list of integers", {**whole, "output_ids": 3})
    refused("prefix cache", {**whole, "meta_info": {**meta, "cached_tokens": 3}})
    refused("return_hidden_states", {**whole, "meta_info": {}})
    refused("one width", {**whole, "meta_info": {**meta, "hidden_states": [[[1.0, 2.0], [1.0]]]}})
    refused("one width", {**whole, "meta_info": {**meta, "hidden_states": [["a"]]}})
    refused("ids for 9 rows", {**whole, "output_ids": []})
    refused("return_hidden_states", "[3]")
    refused("answered", '{"meta_info": ')


def tensor_dump(folder: Path, chunks: tuple[int, ...] = (6, 3), gap: bool = False) -> Path:
    """Files as TensorDumper writes them: a list [normed, residual] where a norm took the residual."""
    rank = folder / "target" / "TP0_PP0_Rank0_pid7"
    rank.mkdir(parents=True)
    (folder / "draft" / "TP0_PP0_Rank0_pid7").mkdir(parents=True)
    torch.save({"model.fc": STATES[0]}, folder / "draft" / "TP0_PP0_Rank0_pid7" / "Pass00000.pt")
    start, late = 0, {}
    for number, rows in enumerate(chunks):
        part = slice(start, start + rows)
        normed = STATES[:, part] * 0.1
        one = {
            "model.embed_tokens": STATES[0, part],
            "model.layers.0.input_layernorm": normed[0],
            "model.layers.0.mlp.down_proj": normed[1],
            "model.layers.1.input_layernorm": normed[1] if gap else [normed[1], STATES[1, part]],
            "model.layers.2.input_layernorm": [normed[2], STATES[2, part]],
            "model.norm": [normed[3], STATES[3, part]],
            "model.forward_batch_info.input_ids": torch.tensor(IDS[part]),
            "model.forward_batch_info.positions": torch.arange(start, start + rows),
            "model.forward_batch_info.seq_lens": torch.tensor([start + rows]),
        }
        torch.save({**late, **one}, rank / f"Pass{number:05d}.pt")
        late = {"model": normed[3], "lm_head": normed[3]}
        start += rows
    return folder


def test_sglangs_tensor_dump_gives_the_residuals_as_boundaries_over_all_passes(tmp_path: Path) -> None:
    (dump,) = read_dumps(tensor_dump(tmp_path / "d"))
    assert dump.ids == tuple(IDS) and dump.declared == (0, 1, 2, 3) and dump.count == 4
    assert torch.equal(dump.taps_TA, torch.cat([*STATES], dim=-1))
    assert dump.last_hidden_norm == "after" and dump.last_hidden_TH is not None
    assert torch.equal(dump.last_hidden_TH, STATES[3] * 0.1)


def test_a_fused_norm_leaves_a_gap_and_the_rest_is_read(tmp_path: Path) -> None:
    (dump,) = read_dumps(tensor_dump(tmp_path / "d", gap=True))
    assert dump.declared == (0, 2, 3)


def test_a_tensor_dump_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    folder = tensor_dump(tmp_path / "d")
    first = folder / "target" / "TP0_PP0_Rank0_pid7" / "Pass00000.pt"
    whole = torch.load(first, weights_only=True)
    torch.save({name: value for name, value in whole.items() if "positions" not in name}, first)
    with pytest.raises(InputError, match="forward_batch_info"):
        read_dumps(folder)
    torch.save({**whole, "model.forward_batch_info.positions": torch.arange(3, 9)}, first)
    with pytest.raises(InputError, match="begins at position 0"):
        read_dumps(folder)
    torch.save({**whole, "model.norm": [STATES[3, :2], STATES[3, :2]]}, first)
    with pytest.raises(InputError, match="for 9 ids"):
        read_dumps(folder)
    first.write_bytes(first.read_bytes()[:200])
    with pytest.raises(InputError, match="Pass00000"):
        read_dumps(folder)
    for path in folder.glob("target/*/*"):
        path.unlink()
    with pytest.raises(InputError, match=r"TP0_PP0"):
        read_dumps(folder)


def test_what_is_no_dump_is_refused_with_what_is_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="trace folder"):
            read_dumps(path)


def engine_trace(folder: Path, calls: list[tuple[list[int], list[int]]]) -> Path:
    """A trace as an engine's plug-in writes it: for each call, ids and positions; a row's one tap is its id, twice."""
    (folder / "tensors").mkdir(parents=True)
    lines = [json.dumps({"format": 1, "source": "vllm", "version": "0.32.0", "boundaries": [3]})]
    for call, (ids, positions) in enumerate(calls):
        name = f"tensors/{call}.safetensors"
        save_file({"x": torch.tensor(ids, dtype=torch.float32)[:, None].repeat(1, 2)}, folder / name)
        record = {"stage": "tap", "call": call, "index": 0, "ids": ids, "positions": positions, "tensor": name}
        lines.append(json.dumps(record))
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_an_engines_calls_become_texts_and_refused_tokens_are_replaced(tmp_path: Path) -> None:
    calls = [([5, 6, 7], [0, 1, 2]), ([8, 90, 91], [3, 4, 5]), ([9, 92], [4, 5]), ([1, 2, 3], [0, 1, 2])]
    first, second = read_dumps(engine_trace(tmp_path / "t", calls))
    assert first.ids == (5, 6, 7, 8, 9, 92) and second.ids == (1, 2, 3)
    assert first.taps_TA[:, 0].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 92.0]
    assert first.declared == (3,) and first.count == 1


def test_a_trees_branches_and_a_cached_prefix_are_left_out(tmp_path: Path) -> None:
    calls = [([5, 6, 7], [0, 1, 2]), ([8, 9, 91], [3, 4, 4]), ([3], [5]), ([4, 4], [9, 10])]
    (only,) = read_dumps(engine_trace(tmp_path / "t", calls))
    assert only.ids == (5, 6, 7)
    with pytest.raises(InputError, match="prefix caching off"):
        read_dumps(engine_trace(tmp_path / "u", calls[2:]))


def test_rows_of_a_batch_are_told_apart_by_their_positions() -> None:
    assert runs([0, 1, 2, 0, 1, 7, 8]) == [(0, 3), (3, 5), (5, 7)]
    assert runs([]) == []
