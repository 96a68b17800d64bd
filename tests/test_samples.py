"""Rendering: one template pass, no doubled BOS, inserted system prompts and dates known and pinned."""

import pytest
from transformers import PreTrainedTokenizerFast

from eyas.data.samples import answerable_turns, render, template_facts
from eyas.errors import InputError
from tiny import tiny_tokenizer

TURN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_prompt_is_the_templates_text_encoded_with_nothing_added() -> None:
    prompt = render(tiny_tokenizer(), HELLO)
    assert prompt.text == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.ids[0] == 1 and prompt.ids.count(1) == 3 and prompt.ids.count(2) == 2
    assert tiny_tokenizer().decode(prompt.ids) == prompt.text


def test_the_inserted_system_prompt_is_found() -> None:
    facts = template_facts(tiny_tokenizer())
    assert facts.default_system_prompt == "Be helpful."
    assert facts.preamble == "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n"
    assert facts.date is None


def test_a_template_that_inserts_nothing_has_no_default_system_prompt() -> None:
    assert template_facts(with_template(TURN)).default_system_prompt is None


def test_a_template_without_a_system_role_has_no_default_system_prompt() -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURN
    tokenizer = with_template(refusing)
    assert template_facts(tokenizer).default_system_prompt is None
    with pytest.raises(InputError, match="no system role"):
        render(tokenizer, [{"role": "system", "content": "x"}, *HELLO])


def test_a_rendered_date_is_pinned_and_recorded() -> None:
    tokenizer = with_template("Today: {{ strftime_now('%d %b %Y') }}\n" + TURN)
    assert render(tokenizer, HELLO).text.startswith("Today: 01 Jan 2026\n")
    assert template_facts(tokenizer).date == "2026-01-01"


def test_a_templates_own_literal_date_stays() -> None:
    literal = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}\n"
    assert render(with_template(literal + TURN), HELLO).text.startswith("26 Jul 2024\n")


def test_a_doubled_bos_is_an_error() -> None:
    with pytest.raises(InputError, match="at most one BOS"):
        render(with_template("{{ bos_token }}" + TURN), HELLO)


def test_a_target_without_a_template_is_a_clear_error() -> None:
    with pytest.raises(InputError) as caught:
        render(with_template(None), HELLO)
    assert caught.value.wanted == "a target with a chat template"
    assert "chat_template.jinja" in caught.value.next


def test_every_user_turn_is_answered_and_given_assistant_turns_are_not_used() -> None:
    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    messages = [say("system", "s"), say("user", "1"), say("assistant", "a"), say("user", "2"), say("assistant", "b")]
    assert answerable_turns(messages) == [[say("system", "s"), say("user", "1")], [say("user", "2")]]
