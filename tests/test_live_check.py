"""`eyas check --url`: what a running server has and does, held against what was meant, without a restart."""

import json
from pathlib import Path

import pytest

from eyas.clients.acceptance import Acceptance
from eyas.errors import InputError
from eyas.launch.arguments import embedded_launch, parse_launch
from eyas.wiring.live import Promise, check_acceptance, check_arguments, promise_beside, read_promise

PROMISE = Promise((0.5, 0.25, 0.1), "walk_survival of e")


def served(length: float, rounds: int | None = 1000, survival: tuple[float, ...] | None = None) -> Acceptance:
    return Acceptance(length, "/metrics", rounds, survival)


def test_acceptance_as_promised_passes_and_other_prompts_may_accept_more() -> None:
    for length in (1.85, 1.75, 2.4):
        check = check_acceptance(served(length), PROMISE, 3)
        assert (check.status, check.findings) == ("pass", [])
    assert "1.85 promised (walk_survival of e)" in check_acceptance(served(1.85), PROMISE, 3).evidence


def test_the_promise_is_for_the_chain_that_is_served() -> None:
    assert PROMISE.accept_length(1) == 1.5 and PROMISE.accept_length(None) == 1.85
    assert check_acceptance(served(1.5), PROMISE, 1).status == "pass"
    assert check_acceptance(served(1.5, survival=(0.5,)), PROMISE, None).status == "pass"


def test_a_server_that_drafts_less_than_it_may_is_held_to_what_it_drafted() -> None:
    assert PROMISE.accept_length(1.5) == 1.625
    shallow = Acceptance(1.5, "/metrics", 1000, (0.5, 0.0, 0.0), drafted=1.0)
    assert check_acceptance(shallow, PROMISE, 3).findings == []
    tree = Acceptance(1.3, "/metrics", 1000, (0.2, 0.1, 0.0), drafted=7.0)
    assert check_acceptance(tree, PROMISE, 3).findings[0].expected.startswith("accept length 1.85")


def test_the_embedded_servers_arguments_are_read_and_another_draft_is_named(tmp_path: Path) -> None:
    words = ["-m", "eyas.engine.server", "--target", "t", "--draft", str(tmp_path), "--num-steps", "2"]
    launch = embedded_launch(words)
    assert (launch.target, launch.draft, launch.num_steps) == ("t", str(tmp_path), 2)
    assert check_arguments(launch, tmp_path, None).findings == []
    other = tmp_path / "other"
    other.mkdir()
    assert [one.code for one in check_arguments(launch, other, None).findings] == ["config_key_wrong"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "algorithm none, draft none"),
        (["--ngram", "3"], "algorithm n-grams of 3, draft none"),
        (["--ngram=0"], "algorithm none, draft none"),
        (["--draft", "D", "--ngram=3"], "algorithm draft and n-grams of 3, draft D"),
    ],
)
def test_what_drafts_in_the_embedded_server_is_told(flags: list[str], told: str) -> None:
    launch = embedded_launch(["-m", "eyas.engine.server", *flags])
    assert told in check_arguments(launch, None, None).evidence


def test_far_below_the_promise_is_an_error_and_somewhat_below_a_warning() -> None:
    far = check_acceptance(served(1.03, survival=(0.02, 0.01, 0.0)), PROMISE, 3)
    assert far.status == "fail" and far.findings[0].code == "parity_mismatch" and far.findings[0].severity == "error"
    assert "0.02 of 0.50, 0.01 of 0.25, 0.00 of 0.10" in far.evidence
    some = check_acceptance(served(1.6), PROMISE, 3)
    assert some.status == "pass" and some.findings[0].severity == "warning"


def test_few_rounds_no_rounds_and_no_promise_say_nothing() -> None:
    for check in (
        check_acceptance(served(1.0, rounds=50), PROMISE, 3),
        check_acceptance(None, PROMISE, 3),
        check_acceptance(served(1.0), None, 3),
    ):
        assert (check.status, check.findings) == ("unknown", [])


def test_a_static_error_in_the_drafts_folder_is_named_as_the_cause(tmp_path: Path) -> None:
    suspect = (
        check_acceptance(served(1.0), PROMISE, 3)
        .findings[0]
        .model_copy(update={"code": "d2t_missing", "severity": "error", "fix": "export again", "message": "No d2t."})
    )
    found = check_acceptance(served(1.0), PROMISE, 3, [suspect]).findings[0]
    assert (found.fix, found.message) == ("export again", "No d2t.")


def test_a_promise_is_the_walks_survival_where_there_is_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("evaluate", "export"):
        (run / name).mkdir(parents=True)
    result = run / "evaluate" / "result.json"
    result.write_text(json.dumps({"survival": [0.6], "walk_survival": [0.5, 0.2]}))
    assert read_promise(run / "evaluate").survival == (0.5, 0.2)
    assert promise_beside(run / "export") == result
    result.write_text(json.dumps({"survival": [0.6], "walk_survival": None}))
    assert read_promise(result).survival == (0.6,)
    result.write_text("{}")
    with pytest.raises(InputError, match="what eyas evaluate wrote"):
        read_promise(result)


def test_another_algorithm_and_another_draft_than_meant_are_named(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, "hidden_size": 8}
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    words = f"--model-path t --speculative-algorithm EAGLE --speculative-draft-model-path {tmp_path / 'other'}"
    check = check_arguments(parse_launch("sglang@0.5.23", words), tmp_path / "mine", None)
    codes = [one.code for one in check.findings]
    assert check.status == "fail" and "algorithm_mismatch" in codes and "config_key_wrong" in codes
    assert not {"port_busy", "gpu_busy", "memory_short"} & set(codes)
    assert check_arguments(None, None, None).status == "unknown"
