"""`eyas chat`: turns follow each other, marks say which text was drafted, a pipe gets the answers alone."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from eyas.cli.program import main
from eyas.clients.chat import Part, Stats, parts_of
from eyas.errors import InputError
from eyas.pipeline.chat import Chat, asked_of_server, converse
from eyas.pipeline.chat_engine import EngineChat
from eyas.recipe import ChatSettings, TargetSettings

GREEDY = {"temperature": 0.0, "precision": "float32"}


class Parrot:
    """Answers with what was said, every second word drafted."""

    name = "parrot"
    no_marks: str | None = None

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []

    def answer(self, messages: list[dict[str, str]]) -> Iterator[Part | Stats]:
        self.heard.append([dict(message) for message in messages])
        for index, word in enumerate(messages[-1]["content"].split()):
            yield Part(word + " ", bool(index % 2))
            if word == "stop":
                raise KeyboardInterrupt
        yield Stats(3, 0.5, 1.5, 2.0, 4, 7, "stop")


def talk(lines: list[str], **settings: object) -> tuple[Parrot, str, dict]:
    source, out = Parrot(), io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    result = converse(Chat(source, ChatSettings(**settings)), lines, console)
    return source, out.getvalue(), result


def test_a_turn_hears_all_before_it_and_commands_are_not_said() -> None:
    source, _, result = talk(["one", "", "/marks", "two", "/new", "three", "/system S", "four", "/quit", "five"])
    said = [[(message["role"][0], message["content"]) for message in heard] for heard in source.heard]
    assert said == [
        [("u", "one")],
        [("u", "one"), ("a", "one "), ("u", "two")],
        [("u", "three")],
        [("s", "S"), ("u", "four")],
    ]
    assert [turn["user"] for turn in result["turns"]] == ["one", "two", "three", "four"]
    assert result["turns"][0]["tokens_s"] == 2.0 and result["turns"][0]["accept_length"] == 2.0


def test_an_answer_cut_off_stays_as_far_as_it_came() -> None:
    source, _, result = talk(["go stop never", "on"])
    assert result["turns"][0]["assistant"] == "go stop "
    assert [message["content"] for message in source.heard[1]] == ["go stop never", "go stop ", "on"]


class Refusing(Parrot):
    """Takes conversations of two turns at most."""

    def answer(self, messages: list[dict[str, str]]) -> Iterator[Part | Stats]:
        if len(messages) > 3:
            raise InputError(wanted="a short conversation", got="a long one", where="here", next="/new")
        yield from super().answer(messages)


def test_a_refused_turn_is_not_said_and_the_conversation_goes_on() -> None:
    source, out = Refusing(), io.StringIO()
    result = converse(Chat(source, ChatSettings()), ["one", "two", "three", "/new", "four"], Console(file=out))
    assert [turn["user"] for turn in result["turns"]] == ["one", "two", "four"]
    assert out.getvalue().split() == ["one", "two", "four"] and "error" not in result


def test_a_pipe_goes_on_after_a_refusal_and_tells_the_first_as_its_error() -> None:
    chat = Chat(Refusing(), ChatSettings(), patient=False)
    result = converse(chat, ["one", "two", "three", "/new", "four"], Console(file=io.StringIO()))
    assert [turn["user"] for turn in result["turns"]] == ["one", "two", "four"]
    parts = {"wanted": "a short conversation", "got": "a long one", "where": "here", "next": "/new"}
    assert result["refused"] == [{"user": "three", **parts}] and result["error"] == parts


def test_what_is_no_command_is_not_passed_over_in_a_pipe_and_two_slashes_say_one() -> None:
    chat = Chat(Parrot(), ChatSettings(), patient=False)
    out = io.StringIO()
    result = converse(chat, ["/etc is", "//etc is", "/help", "/usr", " /new"], Console(file=out))
    assert out.getvalue() == "/etc is \n" and [one["got"] for one in result["refused"]] == ["/etc", "/usr"]
    assert [turn["user"] for turn in result["turns"]] == ["/etc is"]
    assert result["error"]["got"] == "/etc" and result["error"]["next"] == "//etc is, to say it to the target"


class Breaking(Parrot):
    """Ends in the middle of its first answer."""

    def answer(self, messages: list[dict[str, str]]) -> Iterator[Part | Stats]:
        for part in super().answer(messages):
            yield part
            if len(self.heard) == 1:
                raise InputError(wanted="a whole answer", got="a part", where="here", next="again")


def test_an_answer_that_breaks_off_ends_its_line_and_is_not_said() -> None:
    source, out = Breaking(), io.StringIO()
    converse(Chat(source, ChatSettings()), ["one two", "three"], Console(file=out))
    assert out.getvalue() == "one \nthree \n"
    assert [message["content"] for message in source.heard[1]] == ["three"]


def test_a_pipe_ends_at_an_interruption() -> None:
    with pytest.raises(KeyboardInterrupt):
        converse(Chat(Parrot(), ChatSettings(), patient=False), ["go stop", "on"], Console(file=io.StringIO()))


def test_accepted_text_is_underlined_on_request_and_markup_is_text() -> None:
    _, plain, _ = talk(["[bold]a[/bold] b"])
    _, marked, _ = talk(["[bold]a[/bold] b"], marks=True)
    assert plain == "[bold]a[/bold] b \n"
    assert marked == "[bold]a[/bold] \x1b[4;32mb \x1b[0m\n"


@pytest.mark.parametrize(
    ("terminal", "source", "told"),
    [
        (True, None, "accepted draft tokens are underlined"),
        (False, None, "accepted draft tokens are not marked: no terminal shows the answers"),
        (True, "nothing is drafted", "accepted draft tokens are not marked: nothing is drafted"),
    ],
)
def test_marks_that_nobody_will_see_say_why(
    terminal: bool, source: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    parrot.no_marks = source
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else "auto")
    converse(Chat(parrot, ChatSettings(marks=True)), ["a b", "/marks"], console)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("accepted")]
    assert said == [told, "accepted draft tokens are not marked"]


@pytest.mark.parametrize(("plain", "ngram", "drafts"), [(False, None, 4), (True, None, 0), (True, 3, 3), (False, 0, 0)])
def test_plain_is_the_target_alone_unless_ngrams_are_asked_for(plain: bool, ngram: int | None, drafts: int) -> None:
    assert ChatSettings(plain=plain, ngram=ngram).ngrams == drafts


def test_a_plain_chat_drafts_nothing(tiny_target: Path) -> None:
    settings = ChatSettings(plain=True, max_new_tokens=20, **GREEDY)
    chat = EngineChat(TargetSettings(name=str(tiny_target)), settings)
    stats = [one for one in chat.answer([{"role": "user", "content": "hello"}]) if isinstance(one, Stats)]
    assert stats[0].rounds is None and chat.engine.proposer is None and chat.no_marks == "nothing is drafted"


def test_a_server_is_asked_with_what_was_set_and_no_more() -> None:
    name = TargetSettings().name
    basic = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.95}
    assert asked_of_server(ChatSettings(), name) == basic
    assert asked_of_server(ChatSettings(top_k=5, seed=1, top_p=1.0), name) == basic | {
        "top_k": 5,
        "seed": 1,
        "top_p": 1.0,
    }


def test_a_status_line_leaves_out_what_nobody_told() -> None:
    assert Stats(3, 0.5, 1.5, 2.0, 4, 7, "stop").words == (
        "3 tokens, 2.0 tokens/s, accept length 2.00 over 4 rounds, first token 0.50 s, 7 prompt tokens known"
    )
    assert Stats(None, None, 1.0).words == "" and Stats(1, 0.5, 0.5).tokens_s is None


def test_other_servers_events_have_no_marks() -> None:
    assert parts_of({"delta": {"content": "x"}}) == [Part("x")]
    assert parts_of({"delta": {"role": "assistant"}}) == parts_of({"delta": {"content": None}}) == []
    assert parts_of({"accepted": [["a", True], ["", False], ["b", False]]}) == [Part("a", True), Part("b")]


def test_an_engine_in_this_process_answers_as_it_would_anew_and_keeps_earlier_rows(tiny_target: Path) -> None:
    settings = ChatSettings(max_new_tokens=20, **GREEDY)
    chat = EngineChat(TargetSettings(name=str(tiny_target)), settings)
    turns = Chat(chat, settings)
    for text in ("hello there", "and again"):
        turns.say(text, lambda part: None)
    fresh = list(EngineChat(TargetSettings(name=str(tiny_target)), settings).answer(turns.messages[:-1]))
    assert "".join(part.text for part in fresh if isinstance(part, Part)) == turns.messages[-1]["content"]
    assert turns.turns[1]["cached_tokens"] > 40 or chat.engine.forward.grain > 1
    assert turns.turns[0]["tokens"] == 20 and chat.scheduler.idle and chat.scheduler.pool.used == []


def test_the_command_prints_answers_or_one_object(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--target", str(tiny_target), "--prompt", "hi", "--max-new-tokens", "5", "--temperature", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--precision", "float32", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["turns"][0]["user"] == "hi" and found["turns"][0]["tokens"] == 5


def test_a_line_beyond_the_context_is_dropped_and_those_after_it_are_answered(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n" + "long " * 600 + "\nbye\n"))
    words = ["chat", "--target", str(tiny_target), "--max-new-tokens", "5", "--temperature", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--precision", "float32", "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert ended.value.code == 2
    assert [turn["user"] for turn in found["turns"]] == ["hello", "bye"]
    assert found["error"] == {
        "wanted": "a conversation of at most 1023 tokens (the target's context is 1024)",
        "got": "3078 tokens with this line",
        "where": f"the line that begins {('long ' * 8)!r}",
        "next": "a shorter line, or /new, which forgets what was said",
    }
    assert printed.err.count("wanted:") == 1


def test_a_prompt_without_words_is_refused_before_anything_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--target", "/nowhere", "--prompt", "hi", "--prompt", " ", "--json"])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["got"] == "an empty one"
