"""Chat templates: what they get, what they may do, what happens when they refuse."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from attnc.driver.chat import render
from attnc.ir import InputError, UsageError

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <b>?"}]

# As SmolLM2's file has it.
SMOL = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def test_a_template_of_a_model() -> None:
    said = "<|im_start|>user\nGrüße <b>?<|im_end|>\n"
    begun = "<|im_start|>assistant\n"
    assert render(SMOL, ASKED, {}) == f"<|im_start|>system\nBe brief.<|im_end|>\n{said}{begun}"
    assert render(SMOL, ASKED[1:], {}, answer=False) == f"<|im_start|>system\nYou are SmolLM<|im_end|>\n{said}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ pad_token }}", ""),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Grüße <b>?"}'),
        ("{{ messages | length }}{% if tools %}tools{% endif %}", "2"),
        (
            "{%- for m in messages %}\n    {% if m.role == 'user' %}\n{% break %}\n    {% endif %}\nx\n{%- endfor %}",
            "x",
        ),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template, ASKED, {"bos": "<s>", "eos": "</s>"}).strip() == text


def test_the_day() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}", ASKED, {}))
    assert render("{{ strftime_now('%Y') }}", ASKED, {}) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_refuses() -> None:
    with pytest.raises(InputError, match="refuses these messages: no system, please"):
        render("{{ raise_exception('no system, please') }}", ASKED, {})


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.upper() }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{% include 'secret' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_they_may_not_do(template: str) -> None:
    with pytest.raises(UsageError, match="the chat template does not work"):
        render(template, ASKED, {})
