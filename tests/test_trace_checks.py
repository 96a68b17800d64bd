"""`eyas check --trace`: the right trace raises nothing; each planted fault is named, with its numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cli import main
from eyas.data.foreign import read_dumps
from eyas.data.shards import CaptureReader
from eyas.engine.generate import Engine
from eyas.errors import InputError
from eyas.formats.trace import TRACE, TraceRequest, read_trace
from eyas.models.checkpoint import DraftInfo, config_json
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target, record_boundaries
from eyas.pipeline.trace import trace
from eyas.recipe import TargetSettings, TraceSettings
from eyas.wiring.static_checks import Check
from eyas.wiring.trace_draft import trace_checks
from made_captures import BOUNDARIES, captured, write_captures
from test_engine import random_draft
from test_trace import generate
from tiny import LAYERS

PROMPT = [1, *range(40, 120, 2), *range(119, 60, -3)]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture
def draft(target: Target) -> Draft:
    draft = random_draft(target).requires_grad_(False)
    draft.share_embedding(target.embedding)
    return draft


@pytest.fixture(scope="module")
def made(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "t"
    engine = Engine(
        target, random_draft(target), num_steps=2, kernels="torch", announce=False, trace=TraceRequest(folder, True)
    )
    engine.generate(PROMPT, 6, num_steps=2, ignore_eos=True)
    engine.close()
    return folder


def planted(made: Path, folder: Path, change: Callable[[dict, torch.Tensor | None], torch.Tensor | None]) -> Path:
    """A copy of a trace in which `change` has touched each record, and replaced its tensor where it returns one."""
    (folder / "tensors").mkdir(parents=True)
    header, *lines = (made / TRACE).read_text().splitlines()
    written = [header]
    for line in lines:
        record = json.loads(line)
        stored = record.get("tensor")
        tensor = load_file(made / stored)["x"] if stored else None
        changed = change(record, tensor)
        tensor = tensor if changed is None else changed
        if stored and tensor is not None:
            save_file({"x": tensor.contiguous()}, folder / stored)
        written.append(json.dumps(record))
    (folder / TRACE).write_text("\n".join(written) + "\n")
    return folder


def of(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name.startswith(name))


def codes(checks: list[Check]) -> list[str]:
    return [finding.code for check in checks for finding in check.findings]


def states(target: Target, ids: list[int], boundaries: list[int]) -> dict[int, torch.Tensor]:
    with torch.inference_mode(), record_boundaries(target, boundaries) as recorder:
        target.backbone(input_ids=torch.tensor([ids]))
        return {boundary: state[0].clone() for boundary, state in recorder.states.items()}


def test_a_right_trace_passes_every_check(made: Path, target: Target, draft: Draft, tmp_path: Path) -> None:
    text = list(read_dumps(made)[0].ids)
    sample = captured(target, "s", "train", text, len(PROMPT))
    captures = CaptureReader(write_captures(tmp_path / "c", target, [sample]))
    checks = trace_checks([made], target, captures, draft)
    assert [check.status for check in checks] == ["pass"] * 6, [check.evidence for check in checks]
    assert codes(checks) == []
    assert "fc differs by 0.00%" in of(checks, "trace draft").evidence


def test_a_finished_trace_that_lost_lines_since_is_damaged(made: Path, target: Target, tmp_path: Path) -> None:
    folder = Path(copytree(made, tmp_path / "cut"))
    lines = (folder / TRACE).read_text().splitlines(keepends=True)
    (folder / TRACE).write_text("".join(lines[: len(lines) // 2]))
    assert codes(trace_checks([folder], target, None, None)) == ["data_corrupt"]
    (folder / "manifest.json").unlink()  # as an engine leaves one: nothing tells that it ended
    assert codes(trace_checks([folder], target, None, None)) == []


def test_the_text_is_put_together_from_its_rounds(made: Path, target: Target) -> None:
    (dump,) = read_dumps(made)
    assert dump.declared == BOUNDARIES and len(dump.ids) > len(PROMPT) + 4
    wanted = states(target, list(dump.ids), list(BOUNDARIES))
    torch.testing.assert_close(dump.taps_TA, torch.cat([wanted[b] for b in BOUNDARIES], -1), rtol=1e-4, atol=1e-4)


def swapped(made: Path, folder: Path, target: Target, boundaries: tuple[int, ...]) -> Path:
    """A trace whose taps are other boundaries of the same text."""
    text = list(read_dumps(made)[0].ids)
    wanted = states(target, text, sorted(set(boundaries)))

    def change(record: dict, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if record["stage"] != "tap":
            return None
        known = [place for place in record["positions"] if place < len(text)]
        record["ids"], record["positions"] = record["ids"][: len(known)], known
        return wanted[boundaries[record["index"]]][known][None]

    return planted(made, folder, change)


@pytest.mark.parametrize(
    ("boundaries", "code", "found"),
    [
        ((2, 4, 6), "tap_offset", "boundary 6"),
        ((0, 4, 5), "tap_embedding", "boundary 0"),
        ((4, 2, 5), "tap_order", "[4, 2, 5]"),
        ((3, 5, 6), "tap_offset", "boundary 3"),
    ],
)
def test_other_taps_than_the_drafts_are_named(
    boundaries: tuple[int, ...], code: str, found: str, made: Path, target: Target, draft: Draft, tmp_path: Path
) -> None:
    path = swapped(made, tmp_path / "t", target, boundaries)
    check = of(trace_checks([path], target, None, draft), "trace taps")
    assert check.status == "fail"
    assert check.findings[0].code == code and check.findings[0].found == found
    assert "[2, 4, 5]" in check.findings[0].fix


def test_a_streamed_target_is_held_against_the_drafts_own_boundaries(
    made: Path, target: Target, tiny_target: Path, tmp_path: Path
) -> None:
    """What the engine says it captured is no evidence: it captured it because it says so."""
    info = DraftInfo(
        draft=random_draft(target).config.model_copy(update={"boundaries": (2, 4, 6)}),
        target=target.identity,
        tokenizer_hash="",
        template_hash=None,
        ttt_length=None,
        versions={},
    )
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(info, "float32")))
    check = of(trace_checks([made], tiny_target, None, None, folder), "trace taps")
    assert [(one.code, one.expected) for one in check.findings] == [("tap_offset", f"boundary 6 of {LAYERS}")]


def test_fewer_taps_than_the_drafts_are_missing(made: Path, target: Target, draft: Draft, tmp_path: Path) -> None:
    def change(record: dict, tensor: torch.Tensor | None) -> None:
        if record["stage"] == "tap" and record["index"] == 1:
            record["stage"], record["tensor"] = "embedding", None

    check = of(trace_checks([planted(made, tmp_path / "t", change)], target, None, draft), "trace taps")
    assert [one.code for one in check.findings] == ["tap_missing"]
    assert "boundary 2" in check.findings[0].found and "boundary 5" in check.findings[0].found


def test_captures_of_other_taps_or_another_order_are_named(made: Path, target: Target, tmp_path: Path) -> None:
    text = list(read_dumps(made)[0].ids)
    sample = captured(target, "s", "train", text, len(PROMPT))
    captures = CaptureReader(write_captures(tmp_path / "c", target, [sample]))
    for boundaries, code in (((4, 2, 5), "tap_order"), ((2, 4, 6), "tap_offset")):
        path = swapped(made, tmp_path / code, target, boundaries)
        check = of(trace_checks([path], None, captures, None), "trace and captures")
        assert [one.code for one in check.findings] == [code]


def test_captures_of_another_text_are_left_aside_with_the_reason(made: Path, target: Target, tmp_path: Path) -> None:
    sample = captured(target, "s", "train", [5, *PROMPT], 4)
    captures = CaptureReader(write_captures(tmp_path / "c", target, [sample]))
    check = of(trace_checks([made], None, captures, None), "trace and captures")
    assert check.status == "skipped" and "trace one of its prompts" in check.evidence


@pytest.mark.parametrize(("shift", "found"), [(0, "token t+0"), (2, "token t+2")])
def test_embedded_tokens_beside_other_states_are_shifted(
    shift: int, found: str, made: Path, target: Target, tmp_path: Path
) -> None:
    text = list(read_dumps(made)[0].ids)

    def change(record: dict, tensor: torch.Tensor | None) -> None:
        if record["stage"] == "layer" and not record["step"]:
            record["ids"] = [text[min(place + shift, len(text) - 1)] for place in record["positions"]]

    check = of(trace_checks([planted(made, tmp_path / "t", change)], target, None, None), "trace rows")
    assert [(one.code, one.found) for one in check.findings] == [("token_shift", found)]


def test_weights_that_are_not_the_folders_are_named_by_stage(made: Path, target: Target, draft: Draft) -> None:
    with torch.no_grad():
        draft.layers[0].self_attn.q_proj.weight.normal_()
        draft.layers[0].self_attn.v_proj.weight.normal_()
    check = of(trace_checks([made], target, None, draft), "trace draft")
    assert [one.code for one in check.findings] == ["parity_mismatch"]
    assert check.findings[0].where.endswith(": layer")
    assert "fc differs by 0.00%" in check.evidence and "logits differs by 0.0" in check.evidence


def test_norms_before_fc_are_recomputed_from_the_engines_own_taps(target: Target, tmp_path: Path) -> None:
    """An engine's hook on fc sees normed taps (the embedded one records them raw): one that skips the norms shows."""
    draft = random_draft(target, fc_norm=True).requires_grad_(False)
    draft.share_embedding(target.embedding)
    draft.fc_norm[1].weight.fill_(3.0)
    request = TraceRequest(tmp_path / "e", True)
    engine = Engine(target, draft, num_steps=2, kernels="torch", announce=False, trace=request)
    engine.generate(PROMPT, 3, num_steps=2, ignore_eos=True)
    engine.close()

    def normed(record: dict, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return draft.before_fc(tensor) if record["stage"] == "taps" and tensor is not None else None

    for name, change, codes_found in (("right", normed, []), ("skipped", lambda *_: None, ["taps", "fc"])):
        path = planted(tmp_path / "e", tmp_path / name, change)
        file = path / TRACE
        file.write_text(file.read_text().replace('"source": "eyas"', '"source": "vllm"', 1))
        check = of(trace_checks([path], target, None, draft), "trace draft")
        assert [one.where.rpartition(": ")[2] for one in check.findings] == codes_found, check.evidence
        assert "taps differs by" in check.evidence


@pytest.mark.parametrize(
    ("reading", "status", "named"),
    [
        (lambda draft, best: draft.target_ids(best), "pass", []),
        (lambda draft, best: best, "fail", ["d2t_missing"]),
        (lambda draft, best: draft.d2t[best], "fail", ["d2t_absolute"]),
        (lambda draft, best: best * 0 + 7, "unknown", []),
    ],
)
def test_drafted_ids_are_read_by_the_folders_table_or_named(
    reading: Callable[[Draft, torch.Tensor], torch.Tensor],
    status: str,
    named: list[str],
    made: Path,
    target: Target,
    draft: Draft,
    tmp_path: Path,
) -> None:
    draft.d2t.copy_(torch.arange(200) % 3 + 20)
    best: list[torch.Tensor] = []

    def change(record: dict, tensor: torch.Tensor | None) -> None:
        if record["stage"] == "logits" and tensor is not None:
            best[:] = [tensor.flatten()[-200:].argmax()]
        if record["stage"] == "layer" and record["step"]:
            record["ids"] = [int(reading(draft, best[0]))]

    check = of(trace_checks([planted(made, tmp_path / "t", change)], target, None, draft), "trace tokens")
    assert (check.status, codes([check])) == (status, named), check.evidence


def test_a_trace_of_statistics_says_what_it_lacks(target: Target, draft: Draft, tmp_path: Path) -> None:
    generate(target, draft, TraceRequest(tmp_path / "t"))
    checks = trace_checks([tmp_path / "t"], target, None, draft)
    assert of(checks, "trace taps").status == "skipped"
    assert "--tensors" in of(checks, "trace taps").evidence
    assert of(checks, "trace rows").status == "pass"


def test_two_traces_part_at_the_first_stage_that_differs(made: Path, tmp_path: Path) -> None:
    def change(record: dict, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor * 1.2 if record["stage"] == "fc" and tensor is not None else None

    other = planted(made, tmp_path / "t", change)
    same = trace_checks([made, made], None, None, None)[-1]
    assert same.status == "pass" and "fc at most 0.00%" in same.evidence
    parted = trace_checks([made, other], None, None, None)[-1]
    assert parted.findings[0].where == "call 0, fc" and parted.findings[0].found == "16.7% away"


def test_two_traces_without_tensors_part_by_their_statistics(made: Path, tmp_path: Path) -> None:
    def statistics_only(record: dict, tensor: torch.Tensor | None) -> None:
        record.pop("tensor", None)

    def other(record: dict, tensor: torch.Tensor | None) -> None:
        record.pop("tensor", None)
        if record["stage"] == "logits":
            record["mean"] += 10 * record["deviation"]

    one, two = planted(made, tmp_path / "a", statistics_only), planted(made, tmp_path / "b", other)
    assert trace_checks([one, one], None, None, None)[-1].status == "pass"
    parted = trace_checks([one, two], None, None, None)[-1]
    assert parted.findings[0].where == "call 0, logits"


def test_traces_of_different_texts_are_not_compared(made: Path, tmp_path: Path) -> None:
    def change(record: dict, tensor: torch.Tensor | None) -> None:
        if record["call"] == 0 and "ids" in record:
            record["ids"] = [3] * len(record["ids"])

    check = trace_checks([made, planted(made, tmp_path / "t", change)], None, None, None)[-1]
    assert check.status == "unknown" and "other tokens" in check.evidence


def test_a_foreign_dumps_last_hidden_is_known_before_and_after_the_norm(target: Target, tmp_path: Path) -> None:
    found = states(target, PROMPT, [*BOUNDARIES, LAYERS])
    with torch.inference_mode():
        normed = target.final_norm(found[LAYERS])
    for name, final, expected in (("before", found[LAYERS], []), ("after", normed, []), ("tap", found[5], ["x"])):
        folder = tmp_path / name
        folder.mkdir()
        for index, boundary in enumerate(BOUNDARIES):
            torch.save(found[boundary].bfloat16(), folder / f"aux_{index}.pt")
        torch.save(final.clone(), folder / "final.pt")
        torch.save(torch.tensor(PROMPT), folder / "input_ids.pt")
        check = of(trace_checks([folder], target, None, random_draft(target)), "trace taps")
        assert len(check.findings) == len(expected), check.evidence
        assert check.status == ("fail" if expected else "pass")


def test_a_dump_whose_rows_lost_their_first_token_is_shifted(target: Target, draft: Draft, tmp_path: Path) -> None:
    found = states(target, PROMPT, list(BOUNDARIES))
    taps = torch.stack([found[boundary][1:] for boundary in BOUNDARIES], dim=1)
    save_file({"hidden_states": taps, "token_ids": torch.tensor(PROMPT[:-1])}, tmp_path / "r.safetensors")
    check = of(trace_checks([tmp_path / "r.safetensors"], target, None, draft), "trace taps")
    assert [one.code for one in check.findings] == ["token_shift"]


def test_the_command_traces_and_its_folder_is_not_written_twice(tiny_target: Path, tmp_path: Path) -> None:
    settings = TraceSettings(prompt="Which bird flies?", max_new_tokens=4, tensors=True)
    out, target = tmp_path / "t", TargetSettings(name=str(tiny_target))
    manifest = trace(None, out, settings, target)
    assert manifest.stage == "trace" and manifest.facts["texts"] == 1
    assert {record.stage for record in read_trace(out).records} == {"embedding", "accepted"}
    with pytest.raises(InputError, match="empty folder"):
        trace(None, out, settings, target)


def test_check_takes_traces_from_the_command_line(
    made: Path, target: Target, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = swapped(made, tmp_path / "t", target, (2, 4, 6))
    for path, status, verdict in ((made, 0, "unknown"), (wrong, 1, "fail")):
        with pytest.raises(SystemExit) as caught:
            main(["check", "--trace", str(path), "--target", str(tiny_target), "--json"])
        assert caught.value.code == status
        found = json.loads(capsys.readouterr().out)
        assert found["verdict"] == verdict
        named = {check["name"]: check["status"] for check in found["checks"]}
        assert named["trace rows (t)"] == "pass" and named["trace draft (t)"] == "skipped"
