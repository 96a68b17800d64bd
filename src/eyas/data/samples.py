"""A conversation to token ids: rendered once by the target's chat template, encoded without special tokens added."""

import datetime
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.errors import InputError

Message = dict[str, str]
PINNED_DATE = datetime.datetime(2026, 1, 1)
"""What a template that asks for today's date is told: answers must not depend on the day they were made."""

CLOCK_CODES = ("%d", "%-d", "%e", "%m", "%-m", "%b", "%B", "%y", "%Y", "%A", "%a", "%j", "%H", "%I", "%M", "%S", "%p")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt up to and including the header of the assistant's turn."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template adds of its own, found by rendering."""

    default_system_prompt: str | None
    """The system prompt it inserts where a conversation has none."""
    date: str | None
    """The pinned date, where the template renders today's; else None."""
    preamble: str
    """Everything it puts before the first user message's text."""


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> RenderedPrompt:
    """Messages, the last one the user's, to the ids the target continues.

    Raises InputError without a chat template, where the template refuses, or for a doubled BOS.
    """
    text = _render_text(tokenizer, messages)
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            wanted="a prompt that begins with at most one BOS",
            got=f"two ({tokenizer.bos_token!r}) in {text[:60]!r}",
            where="the target's chat template and tokenizer",
            next="take the BOS out of the template or set add_bos_token=false in tokenizer_config.json",
        )
    return RenderedPrompt(ids, text)


def answerable_turns(messages: list[Message]) -> list[list[Message]]:
    """For each user turn, the messages that lead up to its end, assistant turns left out (the target writes its own).

    `[system, u1, a1, u2]` gives `[[system, u1], [u2]]`: what is appended to the conversation before each answer.
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        pending.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    return turns


def template_facts(tokenizer: PreTrainedTokenizerBase) -> TemplateFacts:
    """What the template inserts: see TemplateFacts."""
    user, system = "EYAS-USER-TEXT", "EYAS-SYSTEM-TEXT"
    plain = _render_text(tokenizer, [{"role": "user", "content": user}])
    preamble = plain.partition(user)[0]
    other_day = _render_text(
        tokenizer, [{"role": "user", "content": user}], now=PINNED_DATE + datetime.timedelta(days=400)
    )
    return TemplateFacts(
        default_system_prompt=_default_system_prompt(tokenizer, preamble, user, system),
        date=PINNED_DATE.date().isoformat() if other_day != plain else None,
        preamble=preamble,
    )


def _default_system_prompt(tokenizer: PreTrainedTokenizerBase, preamble: str, user: str, system: str) -> str | None:
    """The part of `preamble` that stands where an explicit system prompt would stand."""
    try:
        explicit = _render_text(
            tokenizer, [{"role": "system", "content": system}, {"role": "user", "content": user}]
        ).partition(user)[0]
    except InputError:  # a template without a system role inserts none
        return None
    before, found, after = explicit.partition(system)
    if not found or not preamble.startswith(before) or not preamble.endswith(after):
        return None
    return preamble[len(before) : len(preamble) - len(after)] or None


def _render_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], now: datetime.datetime = PINNED_DATE
) -> str:
    if tokenizer.chat_template is None:
        raise InputError(
            wanted="a target with a chat template",
            got="none in its tokenizer",
            where="target: tokenizer_config.json or chat_template.jinja",
            next="add the template the model was trained with as chat_template.jinja to the target's folder",
        )
    template = _pin_clock(tokenizer.get_chat_template(), now)
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise InputError(
            wanted="messages that the target's chat template takes",
            got=str(error) or type(error).__name__,
            where=f"roles {[message['role'] for message in messages]}",
            next="drop that prompt, or its system message",
        ) from error
    assert isinstance(text, str), "one conversation renders to one string"
    return text


def _pin_clock(template: str, now: datetime.datetime) -> str:
    """The template with its clock, `strftime_now`, stopped at `now`.

    A macro in front of it, for transformers passes no functions to a template. Only the clock is pinned: a literal
    date that a template falls back on stays as servers render it.
    """
    if "strftime_now" not in template:
        return template
    codes = "".join(f"|replace('{code}', '{now.strftime(code)}')" for code in CLOCK_CODES)
    # The empty expression keeps jinja's trim_blocks from eating a newline the template may begin with.
    return "{% macro strftime_now(format) %}{{ format" + codes + " }}{% endmacro %}{{ '' }}" + template
