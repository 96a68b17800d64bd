"""The course of a training run: held-out accept length measured on the way, the best step handed on, an early stop."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import InputError
from eyas.formats.events import masked_crc, record, scalars_record
from eyas.models.checkpoint import draft_tensors, load_draft, read_info
from eyas.models.target import load_target
from eyas.recipe import DraftSettings, EvaluateSettings, TargetSettings, TrainSettings
from eyas.run import verify_files
from eyas.stage import chosen_step
from eyas.training import loop
from eyas.training.evaluate import ByLength, Chains, evaluate
from eyas.training.heldout import HeldOut
from eyas.training.loop import train
from eyas.training.metrics import EVENTS, HELD_OUT, METRICS, Metrics
from eyas.training.trainer_state import step_folders
from made_captures import made, make_samples, poisoned, with_two_answers, write_captures

SHAPE = DraftSettings(vocab_size=128)
SETTINGS = TrainSettings(
    epochs=6,
    batch_tokens=64,
    ttt_length=2,
    save_every=3,
    precision="float32",
    evaluate_every=4,
    learning_rate=3e-3,
    initialise="target",  # whose loss falls on so few samples
)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return made(tmp_path_factory.mktemp("captures") / "captures", tiny_target)[0]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Held-out measurements that come out as `values`, one after another."""
    left = iter(values)
    monkeypatch.setattr(HeldOut, "measure", lambda self, draft: {HELD_OUT: next(left), "heldout_survival": [0.0]})


def test_what_is_measured_while_training_is_what_evaluate_finds(
    captures: Path, tmp_path: Path, tiny_target: Path
) -> None:
    named = TargetSettings(name=str(tiny_target))
    manifest = train(captures, tmp_path / "draft", SETTINGS, SHAPE, named)
    lines = lines_of(tmp_path / "draft")
    at = [line["step"] for line in lines if HELD_OUT in line]
    assert at == sorted({*range(4, len(lines) + 1, 4), len(lines)})
    found = evaluate(tmp_path / "draft", captures, EvaluateSettings(steps=2), named)
    best = max((line for line in lines if HELD_OUT in line), key=lambda line: (line[HELD_OUT], line["step"]))
    assert found["accept_length_walk"] == pytest.approx(best[HELD_OUT], abs=1e-6) == manifest.facts[HELD_OUT]
    assert best["heldout_by_context"] == {str(one["from"]): one["accept_length"] for one in found["by_length"]}


def test_the_best_step_is_never_pruned_and_is_the_draft_handed_on(
    captures: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.1, 1.5, *[1.2] * 50])
    manifest = train(captures, tmp_path / "d", SETTINGS.model_copy(update={"patience": 0}), SHAPE, name(tiny_target))
    steps = manifest.facts["steps"]
    assert steps > 12 and manifest.facts["draft"] == "step-8" and manifest.facts["stopped_early"] is False
    assert {folder.name for folder in step_folders(tmp_path / "d")} >= {"step-8", f"step-{steps}"}
    assert chosen_step(tmp_path / "d").name == "step-8" and read_info(tmp_path / "d").ttt_length == 2
    assert all(file.startswith(("step-8/", "metrics", "events")) for file in manifest.files)


def test_the_draft_of_an_unfinished_run_is_the_step_measured_best_that_is_there(tmp_path: Path) -> None:
    for step in (4, 8, 10):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "config.json").write_text("{}")
    assert chosen_step(tmp_path).name == "step-10"
    measured = {2: 1.9, 4: 1.5, 8: 1.4}
    lines = [{"step": step, **({HELD_OUT: measured[step]} if step in measured else {})} for step in range(1, 11)]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / METRICS).write_text(whole + '{"step": 10, "heldout_acc')
    assert chosen_step(tmp_path).name == "step-4"
    (tmp_path / METRICS).write_text(whole.replace("1.4", "1.5"))
    assert chosen_step(tmp_path).name == "step-8"


def name(folder: Path) -> TargetSettings:
    return TargetSettings(name=str(folder))


def test_training_stops_when_acceptance_falls_and_the_loss_still_does(
    captures: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.6, 1.5, 1.4, 1.7])
    settings = SETTINGS.model_copy(update={"patience": 2})
    manifest = train(captures, tmp_path / "d", settings, SHAPE, name(tiny_target))
    assert (manifest.facts["steps"], manifest.facts["draft"], manifest.facts["stopped_early"]) == (12, "step-4", True)


def test_a_run_killed_after_it_stopped_early_does_not_go_on(
    captures: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"patience": 2})

    def killed(*args: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        scripted(patch, [1.6, 1.5, 1.4])
        patch.setattr(loop, "chosen", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(captures, tmp_path / "d", settings, SHAPE, name(tiny_target))
    assert train(captures, tmp_path / "d", settings, SHAPE, name(tiny_target)).facts["steps"] == 12


def test_a_run_killed_between_measurements_resumes_to_the_same_choice(
    captures: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(captures, tmp_path / "whole", SETTINGS, SHAPE, name(tiny_target))
    advance = loop.Trainer.advance

    def dying(trainer: loop.Trainer) -> dict:
        if trainer.step == 10:
            raise RuntimeError("killed")
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "advance", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(captures, tmp_path / "cut", SETTINGS, SHAPE, name(tiny_target))
    cut = train(captures, tmp_path / "cut", SETTINGS, SHAPE, name(tiny_target))
    assert cut.facts == whole.facts
    one, other = (draft_tensors(load_draft(tmp_path / folder)[0]) for folder in ("whole", "cut"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    keys = ("step", "loss", HELD_OUT)
    assert [[line.get(key) for key in keys] for line in lines_of(tmp_path / "cut")] == [
        [line.get(key) for key in keys] for line in lines_of(tmp_path / "whole")
    ]


def test_measuring_does_not_change_what_is_trained(captures: Path, tmp_path: Path, tiny_target: Path) -> None:
    off = SETTINGS.model_copy(update={"evaluate_every": 0})
    train(captures, tmp_path / "off", off, SHAPE, name(tiny_target))
    train(captures, tmp_path / "on", SETTINGS, SHAPE, name(tiny_target))
    losses = [[line["loss"] for line in lines_of(tmp_path / folder)] for folder in ("off", "on")]
    assert losses[0] == losses[1] and not any(HELD_OUT in line for line in lines_of(tmp_path / "off"))


def test_without_held_out_samples_the_last_step_is_the_draft(tmp_path: Path, tiny_target: Path) -> None:
    folder = write_captures(tmp_path / "c", target := load_target(str(tiny_target)), make_samples(target, 3, 0))
    manifest = train(folder, tmp_path / "d", SETTINGS, SHAPE, name(tiny_target))
    assert manifest.facts["draft"] == f"step-{manifest.facts['steps']}" and HELD_OUT not in manifest.facts


def test_held_out_samples_that_no_round_can_walk_are_said(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(str(tiny_target))
    samples = make_samples(target, 6, 3)
    folder = write_captures(tmp_path / "c", target, [*samples[:6], *map(with_two_answers, samples[6:])])
    train(folder, tmp_path / "d", SETTINGS.model_copy(update={"epochs": 1}), SHAPE, name(tiny_target))
    said = capsys.readouterr().err
    assert "train: 3 of 3 held-out samples are not measured: theirs is not one answer of two tokens or more" in said
    assert "train: no held-out sample to measure, so accept length is not measured" in said


@pytest.mark.parametrize("part", ["taps_TA", "last_hidden_TH"])
def test_a_held_out_state_that_is_not_finite_steers_nothing(tmp_path: Path, tiny_target: Path, part: str) -> None:
    target = load_target(str(tiny_target))
    samples = make_samples(target, 6, 3)
    folder = write_captures(tmp_path / "c", target, [*samples[:7], poisoned(samples[7], part), samples[8]])
    with pytest.raises(InputError) as caught:
        train(folder, tmp_path / "d", SETTINGS, SHAPE, name(tiny_target))
    assert caught.value.got == "states that are not finite in: sample-7"


@pytest.mark.parametrize(
    ("accepts", "losses", "stops"),
    [
        ([2.0, 1.9, 1.8], [3, 2, 1], True),
        ([2.0, 1.9, 2.0], [3, 2, 1], False),
        ([2.0, 1.9], [3, 2], False),
        ([2.0, 1.9, 1.8], [1, 2, 3], False),
        ([1.0, 2.0, 1.9, 1.8], [9, 3, 2, 1], True),
    ],
)
def test_when_a_run_is_overtrained(tmp_path: Path, accepts: list[float], losses: list[float], stops: bool) -> None:
    metrics = Metrics(tmp_path, 0)
    for number, (accept, loss) in enumerate(zip(accepts, losses, strict=True)):
        metrics.append({"step": 2 * number + 1, "loss": loss + 1})
        metrics.append({"step": 2 * number + 2, "loss": loss, HELD_OUT: accept})
    assert metrics.overtrained(2) is stops and metrics.overtrained(0) is False
    assert Metrics(tmp_path, len(metrics.lines)).lines == metrics.lines


def test_a_draft_folder_names_a_step_that_is_gone(captures: Path, tmp_path: Path, tiny_target: Path) -> None:
    manifest = train(captures, tmp_path / "d", SETTINGS, SHAPE, name(tiny_target))
    (tmp_path / "d" / manifest.facts["draft"]).rename(tmp_path / "gone")
    with pytest.raises(InputError, match=manifest.facts["draft"]):
        load_draft(tmp_path / "d")


def test_acceptance_by_context_length_by_hand() -> None:
    """Rows 253..256: the server holds two tokens more than the row's number, so 255, 256, 257, 258 tokens."""
    accepts = [1, 2, 0, 1]
    hits = torch.tensor([[step < accept for step in range(2)] for accept in accepts])
    true = torch.ones_like(hits)
    lengths = ByLength(2)
    lengths.add(Chains(253, hits, true, true, true), [1, 0, 1])
    assert lengths.result() == [
        {"from": 0, "to": 256, "rows": 1, "accept_length": 2.0, "rounds": 1, "accept_length_walk": 2.0},
        {"from": 256, "to": 512, "rows": 3, "accept_length": 2.0, "rounds": 2, "accept_length_walk": 1.5},
    ]


def test_a_resume_keeps_the_lines_up_to_its_step_and_each_step_once(tmp_path: Path) -> None:
    """The file was lost at step 6: its lines begin at 7, and the steps computed again are told by their numbers."""
    lines = [{"step": step, "loss": step + 0.5, HELD_OUT: 1.0} for step in (7, 8, 9, 9, 10, 11)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "lo')
    assert [line["step"] for line in Metrics(tmp_path, 9).lines] == [7, 8, 9] == [x["step"] for x in lines_of(tmp_path)]


@pytest.mark.parametrize("bad", [b'{"step": 3, "lo', b"7", b'{"loss": 1}', b'{"step": null}', b"\0\xff", b""])
def test_a_line_that_cannot_be_read_is_named_unless_it_is_the_last(tmp_path: Path, bad: bytes) -> None:
    good = [json.dumps({"step": step}).encode() for step in (1, 2, 4)]
    (tmp_path / METRICS).write_bytes(b"\n".join([*good, bad, b""]))
    assert [line["step"] for line in Metrics(tmp_path, 9, writes=False).lines] == [1, 2, 4]
    (tmp_path / METRICS).write_bytes(b"\n".join([*good[:2], bad, good[2], b""]))
    with pytest.raises(InputError) as caught:
        Metrics(tmp_path, 9)
    assert caught.value.where == f"{tmp_path / METRICS}, line 3"


def test_a_best_step_that_somebody_removed_is_not_handed_on(
    captures: Path,
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 8 is the best and is removed; of the steps after it 16 is, no multiple of `save_every`, and is kept."""
    settings = SETTINGS.model_copy(update={"patience": 0})
    scripted(monkeypatch, [1.1, 1.5, 1.2, 1.4, *[1.3] * 50])
    advance = loop.Trainer.advance

    def dying(trainer: loop.Trainer) -> dict:
        if trainer.step == 11:
            raise RuntimeError("killed")
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "advance", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(captures, tmp_path / "d", settings, SHAPE, name(tiny_target))
    shutil.rmtree(tmp_path / "d" / "step-8")
    manifest = train(captures, tmp_path / "d", settings, SHAPE, name(tiny_target))
    assert "the checkpoint of step 8, the best so far, is gone" in capsys.readouterr().err
    assert manifest.facts["draft"] == "step-16" and manifest.facts[HELD_OUT] == 1.4
    assert load_draft(tmp_path / "d")[1].ttt_length == 2 and verify_files(tmp_path / "d") == []


def read_events(data: bytes) -> list[bytes]:
    """The payloads of a record file, every checksum compared."""
    found, place = [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert struct.unpack_from("<I", data, place + 8)[0] == masked_crc(data[place : place + 8])
        payload = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked_crc(payload)
        found.append(payload)
        place += 16 + length
    return found


def test_the_event_file_has_one_record_a_line_and_goes_with_a_resume(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 4):
        metrics.append({"step": step, "loss": 2.5, "time": 7.0})
    payloads = read_events((tmp_path / EVENTS).read_bytes())
    assert len(payloads) == 4 and payloads[0].endswith(b"brain.Event:2")
    assert len(read_events((tmp_path / EVENTS).read_bytes())) == 4
    Metrics(tmp_path, 2)
    assert len(read_events((tmp_path / EVENTS).read_bytes())) == 3


def test_an_event_by_hand() -> None:
    """wall_time 1.0, step 300, summary { value { tag "loss" simple_value 0.5 } }, and the checksum of "123456789"."""
    event = scalars_record({"step": 300, "time": 1.0, "loss": 0.5})
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert read_events(event) == [
        b"\x09" + struct.pack("<d", 1.0) + b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary
    ]
    assert scalars_record({"step": 300, "time": 1.0, "a": {"256": 0.5}}) == scalars_record(
        {"step": 300, "time": 1.0, "a/256": 0.5}
    )
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@given(payload=st.binary(max_size=300))
def test_a_record_reads_back(payload: bytes) -> None:
    assert read_events(record(payload)) == [payload]
