"""A chat template is foreign code: it may neither hang the engine nor take its memory."""

from __future__ import annotations

import sys
import time
import tracemalloc

import pytest

from engine.chat import sandbox
from engine.chat.template import TemplateRefused, compile_template
from tests.engine import small_tokenizers as small


def often(step: str, start: str = "'ab'") -> str:
    """A template that does the same to a variable 99 times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{step}{{% endfor %}}"


HUGE = {
    "product of a text": '{{ "a" * 10**10 }}',
    "product, unused": '{% set x = "a" * 10**10 %}',
    "product of a list": "{{ ([0] * 10**9) | length }}",
    "product of a product": '{{ ("a" * 10**6) * 10**6 }}',
    "power": "{{ 10 ** (10 ** 10) }}",
    "powers": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x ** 3 %}{% endfor %}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list doubled": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list in itself": often("{% set ns.x = [ns.x, ns.x] %}", "['a']") + "{{ ns.x }}",
    "one list often": "{{ ['a' * 1000000] * 10000 }}",
    "as JSON": "{{ (['a' * 1000000] * 10000) | tojson }}",
    "JSON's indent": "{{ messages | tojson(indent=10**9) }}",
    "centre": "{{ 'a' | center(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "width of a method": "{{ 'a'.ljust(10**10) }}",
    "zeros": "{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(60000) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format's star": "{{ '%*d' % (10**10, 1) }}",
    "filter format": "{{ '%010000000000d' | format(1) }}",
    "method format": "{{ '{:>10000000000}'.format(1) }}",
    "nested format": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "filter replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "filter join": "{{ (['a'] * 100000) | join('b' * 1000000) }}",
    "filter join of texts": "{{ (['b' * 1000000] * 100000) | join }}",
    "named often by %": "{{ ('%(a)s' * 100000) % {'a': 'b' * 1000000} }}",
    "named often by {}": "{{ ('{a}' * 100000).format(a='b' * 1000000) }}",
    "named often, deep": "{{ ('{a[0]}' * 100000).format(a=['b' * 1000000]) }}",
    "filter format, often": "{{ ('%(a)s' * 100000) | format(a='b' * 1000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "indent by a text": "{{ ('a\n' * 1000000) | indent('b' * 1000000) }}",
    "wrap with a text": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "links": "{{ ('http://a.de ' * 100000) | urlize(rel='b' * 1000000) }}",
    "map": "{{ (['b' * 1000000] * 100000) | map('upper') | join }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 9999999 }}{% endfor %}",
    "range": "{{ range(10**10) | list }}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + often("{% set ns.x = m(ns.x) %}"),
    "lists compared": often("{% set ns.x = [ns.x, ns.x] %}", "['a']") + "{% if ns.x == ns.x %}{% endif %}",
    "two lists compared": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "two lists in order": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ 'b' if ns.a < ns.b }}",
    "a list in a list": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a in [ns.b] }}",
    "a test of two lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a is eq ns.b }}",
    "block set": often("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
}
SLOW = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "loops over lists": "{% set x = range(99999) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "loops in filters": "{% set x = range(9999) | list %}"
    "{% for a in x %}{% if x | select('odd') | list %}{% endif %}{% endfor %}",
    "sums": "{% set x = range(99999) | list %}{% for a in x %}{% if x | sum == 1 %}{% endif %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_no_template_takes_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRefused) as error:
            compile_template(source)([{"role": "user", "content": "hi"}], True, {})
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) <= 200 and "\n" not in str(error.value)


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_no_template_takes_long(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.limited_time.__wrapped__, "__defaults__", (0.2,))
    start = time.thread_time()
    with pytest.raises(TemplateRefused) as error:
        compile_template(source)([{"role": "user", "content": "hi"}], True, {})
    assert time.thread_time() - start < 1.5
    assert len(str(error.value)) <= 200


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 200 + "{% endif %}" * 200,
        "{{",
        "a" * (2 << 20),
    ],
)
def test_a_source_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused) as error:
        compile_template(source)
    assert len(str(error.value)) <= 200


@pytest.mark.parametrize("template", [small.CHATML, small.THINKING, small.TRIMMING])
def test_an_ordinary_template_notices_nothing(template: str) -> None:
    """A long chat with a page of a million characters, the same text as in jinja's own sandbox."""
    from datetime import datetime

    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from engine.chat import template as module

    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[module._Generation, jinja2.ext.loopcontrols]
    )
    plain.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    messages = [{"role": "system", "content": "page " * 200_000}]
    for i in range(200):
        messages += [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}]
    messages.append({"role": "user", "content": "last"})
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    want = plain.from_string(template).render(
        messages=messages, tools=None, add_generation_prompt=True, **special
    )
    assert compile_template(template)(messages, True, special) == want


def test_the_trace_of_a_debugger_comes_back() -> None:
    def trace(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        compile_template("{{ messages[0].content }}")([{"role": "user", "content": "hi"}], True, {})
        now = sys.gettrace()
    finally:
        sys.settrace(before)
    assert now is trace
