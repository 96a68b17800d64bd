"""A manifest is written last and atomically; a stage made under other values is refused with the field's name."""

import json
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.run import (
    cache_folder,
    hash_bytes,
    is_complete,
    manifest_hash,
    read_manifest,
    verify_files,
    write_atomic,
    write_manifest,
)
from eyas.stage import completed, result_stage


def make(folder: Path, stage: str = "prompts", **inputs: Path) -> None:
    write_atomic(folder / "data.txt", "four")
    files = {"data.txt": hash_bytes(b"four")}
    write_manifest(folder, stage, settings={"seed": 1}, inputs=inputs, files=files, facts={"count": 4}, seconds=0.5)


def test_a_folder_is_complete_exactly_when_its_manifest_exists(tmp_path: Path) -> None:
    write_atomic(tmp_path / "data.txt", "four")
    assert not is_complete(tmp_path)
    with pytest.raises(InputError, match="an unfinished folder"):
        read_manifest(tmp_path)
    make(tmp_path)
    assert is_complete(tmp_path)
    assert read_manifest(tmp_path, "prompts").facts == {"count": 4}


def test_nothing_temporary_is_left_behind(tmp_path: Path) -> None:
    make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "manifest.json"]


def test_an_input_is_remembered_by_the_hash_of_its_manifest(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", "responses", prompts=tmp_path / "a")
    assert read_manifest(tmp_path / "b").inputs == {"prompts": manifest_hash(tmp_path / "a")}


def test_a_stage_under_the_same_values_is_finished_and_under_others_is_refused_by_field(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", "responses", prompts=tmp_path / "a")
    same = completed(tmp_path / "b", "responses", {"seed": 1}, {"prompts": tmp_path / "a"})
    assert same is not None
    assert completed(tmp_path / "none", "responses", {}, {}) is None
    with pytest.raises(InputError, match=r"responses\.seed = 2"):
        completed(tmp_path / "b", "responses", {"seed": 2}, {"prompts": tmp_path / "a"})
    make(tmp_path / "a", "prompts")  # made again: another creation time, so another hash
    text = (tmp_path / "a" / "manifest.json").read_text().replace('"seconds": 0.5', '"seconds": 0.7')
    (tmp_path / "a" / "manifest.json").write_text(text)
    with pytest.raises(InputError, match="the prompts it is made from"):
        completed(tmp_path / "b", "responses", {"seed": 1}, {"prompts": tmp_path / "a"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"format": "one"}, "format 1"),
        ({"stage": "captures"}, "a captures folder"),
        ({"surprise": 1}, "surprise"),
        (None, "format 1"),
    ],
)
def test_a_newer_foreign_or_broken_manifest_is_refused(tmp_path: Path, change: dict | None, message: str) -> None:
    make(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        read_manifest(tmp_path, "prompts")


def test_changed_and_missing_data_is_found_by_checksum(tmp_path: Path) -> None:
    make(tmp_path)
    assert verify_files(tmp_path) == []
    (tmp_path / "data.txt").write_text("five")
    assert verify_files(tmp_path) == ["data.txt"]
    (tmp_path / "data.txt").unlink()
    assert verify_files(tmp_path) == ["data.txt"]


def test_a_result_is_computed_once_and_then_read_back(tmp_path: Path) -> None:
    calls = []

    def compute() -> dict[str, int]:
        calls.append(1)
        return {"value": 42}

    for skipped in (False, True):
        assert result_stage(tmp_path, "evaluate", settings={}, inputs={}, compute=compute) == ({"value": 42}, skipped)
    assert len(calls) == 1


def test_a_full_disk_is_a_clear_error_and_keeps_what_was_there(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "kept.txt"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left on device") as caught:
        write_atomic(path, "new")
    assert "it resumes" in caught.value.next
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["kept.txt"]


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "c"))
    assert cache_folder() == tmp_path / "c"
