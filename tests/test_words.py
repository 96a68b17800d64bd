"""The text of `eyas check`: what is wrong, the two numbers, the line to change, what to expect, what was left open."""

from eyas.wiring.words import check_words

FOUND = {
    "code": "tap_embedding",
    "severity": "error",
    "where": "draft: config.json",
    "expected": "taps [2, 15, 27]: loss 1.90 nats, accuracy 0.41, accept length 1.61",
    "found": "as declared: loss 4.60 nats, accuracy 0.19, accept length 1.22",
    "fix": "boundaries: [2, 15, 27], capture again, export again",
    "message": "Over 1200 rows of 20 documents the draft was made for taps [2, 15, 27].",
}
TRIED = [
    {"wiring": "as declared", "effect": 0.0, "accuracy": [0.19], "accept_length": 1.22, "told": "no"},
    {"wiring": "taps [2, 15, 27]", "effect": 2.7, "accuracy": [0.41], "accept_length": 1.61, "told": "better"},
    {"wiring": "rope base 10000", "effect": 0.01, "accuracy": [0.19], "accept_length": 1.22, "told": "no"},
]
FACTS = {"code": "tap_embedding", "steps": 3, "accept_length": 1.22, "accept_length_after": 1.61, "wirings": TRIED}
RESULT = {
    "verdict": "fail",
    "findings": [FOUND],
    "checks": [
        {"name": "teacher", "status": "pass", "evidence": "declared before the final norm; before: 0.995"},
        {"name": "hypotheses", "status": "fail", "evidence": "1200 rows of 20 documents", "facts": FACTS},
        {"name": "export", "status": "skipped", "evidence": "needs a draft, its export and the target"},
    ],
}
WORDS = """\
Something is wired wrong: 1 error.

1. tap_embedding (error), draft: config.json
   Over 1200 rows of 20 documents the draft was made for taps [2, 15, 27].
   wanted   taps [2, 15, 27]: loss 1.90 nats, accuracy 0.41, accept length 1.61
   got      as declared: loss 4.60 nats, accuracy 0.19, accept length 1.22
   change   boundaries: [2, 15, 27], capture again, export again
   expect   accept length 1.61 instead of 1.22 at chains of 3, on these texts, trained ones too

Looked at:
   pass     teacher: declared before the final norm; before: 0.995
   fail     hypotheses: 1200 rows of 20 documents
            wiring                                            nats  accuracy  accept length
            as declared                                                 0.19           1.22
            taps [2, 15, 27]                                 +2.70      0.41           1.61
            (1 more in --json; nats: better + or worse - a row than as declared)

Could not be settled:
   skipped  export: needs a draft, its export and the target"""


def test_a_failed_check_says_what_proves_it_what_to_change_and_what_to_expect() -> None:
    assert check_words(RESULT) == WORDS


def test_errors_come_first_and_milder_findings_are_counted_apart() -> None:
    remark = {**FOUND, "code": "vocab_mismatch", "severity": "warning"}
    text = check_words({**RESULT, "findings": [remark, FOUND, remark]})
    assert text.startswith("Something is wired wrong: 1 error and 2 remarks.")
    assert text.index("1. tap_embedding (error)") < text.index("2. vocab_mismatch (warning)")


def test_nothing_found_is_not_called_right_when_too_little_was_looked_at() -> None:
    looked = {"verdict": "unknown", "findings": [], "checks": RESULT["checks"][2:]}
    assert check_words(looked) == (
        "Nothing was found wrong, and not enough could be looked at to say that all is right.\n\n"
        "Could not be settled:\n   skipped  export: needs a draft, its export and the target"
    )
    assert check_words({"verdict": "pass", "findings": [], "checks": []}) == (
        "Nothing is wired wrong, as far as could be looked."
    )
