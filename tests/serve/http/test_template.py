"""Chat templates against transformers, which they are written for."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import UnsupportedError
from quantkit_serve.http.schemas.messages import Message
from quantkit_serve.http.template import ChatTemplate
from quantkit_serve.refusal import Refused

CONSTANTS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & \"clear\"."},
    {"role": "user", "content": "Grüße\n"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"ü": [1, None, True]}}}]},
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "blocks": """
        {%- for m in messages %}
            {%- if loop.first and m['role'] != 'system' %}{% continue %}{% endif %}
<|{{ m.role }}|>{{ m['content'] | trim }}
        {%- endfor %}
""",
    "tools": "{{ bos_token }}{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson(ensure_ascii=True) }}{% endfor %}"
    "{% endfor %}{{ m.content }}{% endfor %}{{ eos_token }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% if ns.n > 20 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ strftime_now('%Y') }}"
    "{{ enable_thinking is defined and enable_thinking }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_same_text_as_transformers(name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    tools = TOOLS if name == "tools" else None
    more = {"enable_thinking": True} if name == "state" else {}
    (expected,), _ = render_jinja_template(
        conversations=[MESSAGES], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt,
        **CONSTANTS, **more,
    )  # fmt: skip
    found = ChatTemplate(source, CONSTANTS).render(
        MESSAGES, tools=tools or (), add_generation_prompt=add_generation_prompt, more=more
    )
    assert found == expected and found


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}", "{{ messages[99].content }}", "{{ 1 / 0 }}",
        "{{ messages.x.y }}", "{{ messages + 5 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append(1) %}", "{{ messages[0].content % 5 }}", "{{ none_such() }}",
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_the_requests_error(source: str) -> None:
    with pytest.raises(Refused, match="chat template refuses these messages"):
        ChatTemplate(source, CONSTANTS).render(MESSAGES)


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages | no_such_filter }}", "{% nothing %}"])
def test_a_template_that_is_none(source: str) -> None:
    with pytest.raises(UnsupportedError, match="not valid"):
        ChatTemplate(source, CONSTANTS)


def test_what_has_no_effect_is_refused() -> None:
    plain = ChatTemplate("{{ messages[0].content }}", CONSTANTS)
    with pytest.raises(Refused, match="tools"):
        plain.render(MESSAGES, tools=TOOLS)
    for name in ("enable_thinking", "messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(Refused, match=name):
            plain.render(MESSAGES, more={name: 1})


def test_developers_are_the_system_unless_a_template_knows_them() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(messages) == "system"
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert ChatTemplate(knowing, {}).render(messages) == "yes"


def test_arguments_reach_a_template_as_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == {"a": "ü"}
    for wrong in ("[]", "x", '{"a": NaN}'):
        with pytest.raises(ValueError, match="JSON object"):
            Message.model_validate(
                {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": wrong}}]}
            )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 9 ** 99999999 }}",
        "{{ 10**1000 * 10**1000 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a'.center(10**9) }}{{ 1 }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a' | indent(width=10**9) }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set a = 'a' * 10**6 %}{{ a.replace('a', a) }}",
        "{% set a = 'a' * 10**6 %}{{ a | replace('a', a) }}",
        "{% set a = 'a' * 10**6 %}{{ a.join(a) }}",
        "{% set a = 'a' * 10**6 %}{{ a | join(a) }}",
        "{% set a = 'a' * 10**6 %}{% for i in range(100) %}{{ a }}{% endfor %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_no_template_makes_text_without_end(source: str) -> None:
    with pytest.raises(Refused, match=r"more than|above|Range too big"):
        ChatTemplate(source, {}).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) if n < 40 }}{% endfor %}{% endmacro %}{{ m(0) }}",
    ],
)
def test_no_template_runs_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_serve.http.bounded.MAX_S", 0.05)
    with pytest.raises(Refused, match=r"takes more than 0\.05 s"):
        ChatTemplate(source, {}).render([])


def test_what_templates_do_is_within_the_bounds() -> None:
    source = (
        "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ '%05.1f|%s' % (2, 'x') }}{{ '{:>4}'.format(7) }}{{ 1 ~ 'b' ~ [2] }}"
        "{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['c', 'd']) }}{{ 'aXa' | replace('X', '--') }}"
        "{{ 'x'.replace('x', 'y') }}{{ 'q' | indent(2, true) }}{{ 'w'.center(3) }}{{ [1] + [2] }}{{ 1.5 + 2 }}"
    )
    expected = "ababab1024002.0|x   71b[2]a, bc, da--ay  q w [1, 2]3.5"
    assert ChatTemplate(source, {}).render([]) == expected
