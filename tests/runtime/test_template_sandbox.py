"""Chat templates are programs of strangers: what a hostile one tries must end at once, and reach nothing."""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest
from jinja2.exceptions import SecurityError

from octavo.runtime import template_sandbox
from octavo.runtime.template_limits import MAX_CHARACTERS, TemplateLimitError
from octavo.runtime.template_sandbox import TemplateSandbox

SANDBOX = TemplateSandbox()
LONG = "x" * 1_000_000

ENDLESS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over a text": "{% for a in long %}{% for b in long %}{% endfor %}{% endfor %}",
    "macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "recursive loop": (
        "{% set n = namespace(x=0) %}{% for i in range(2) recursive %}{% if loop.depth < 60 %}"
        "{{ loop(range(2)) }}{% endif %}{% endfor %}"
    ),
    "filters in a loop": (
        "{% for i in range(99999) %}{% for j in range(99999) if j | string | upper %}{% endfor %}{% endfor %}"
    ),
    "a huge range": "{{ range(10 ** 9) | list }}",
    "copies in a loop": (
        "{% for i in range(99999) %}{% for j in range(9999) %}{{ (long ~ 'z') in long }}{% endfor %}{% endfor %}"
    ),
}
NEST = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
HUGE = {
    "times": "{{ 'x' * 1000000000 }}",
    "times from the left": "{{ 1000000000 * 'x' }}",
    "list times": "{{ ([1] * 1000000000) | length }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested lists": NEST + "{{ n.x }}",
    "nested lists as json": NEST + "{{ n.x | tojson }}",
    "nested lists as text": NEST + "{{ n.x | string }}",
    "nested lists joined": NEST + "{{ n.x | join }}",
    "nested lists and ~": NEST + "{{ n.x ~ '' }}",
    "nested lists in a format": NEST + "{{ '%s' % (n.x,) }}",
    "nested namespaces": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
        "{{ n.x }}"
    ),
    "power": "{{ 10 ** 1000000000 }}",
    "squaring": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\\t\\t'.expandtabs(1000000000) }}",
    "wide format": "{{ '{:1000000000}'.format('x') }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide percent filter": "{{ '%1000000000d' | format(1) }}",
    "starred percent": "{{ '%*d' % (1000000000, 1) }}",
    "wide percent behind two": "{{ '%%%1000000000d' % 1 }}",
    "precise percent": "{{ '%-3.1000000000f' % 1 }}",
    "width by value": "{{ '{:{}}'.format('x', 1000000000) }}",
    "many fields": "{{ ('{0}' * 1000).format(long) }}",
    "many percent fields": "{{ ('%(a)s' * 1000) % {'a': long} }}",
    "join": "{{ long.join(['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k']) }}",
    "join filter": "{{ ['a'] | batch(20, 'b') | first | join(long) }}",
    "join of the same": "{{ ([long] * 1000) | join }}",
    "replace": "{{ ('a' * 1000).replace('a', long) }}",
    "replace filter": "{{ ('a' * 1000) | replace('a', long) }}",
    "indent": "{{ ('\\n' * 100000) | indent(100000) }}",
    "json indent": "{{ [[1], [2]] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "translate": "{{ long.translate({120: long}) }}",
    "output": "{% for i in range(1000) %}{{ long }}{% endfor %}",
}
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ raise_exception.__globals__ }}",
    "{{ dict.__base__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% for k in [].append.__self__.__class__.__base__.__subclasses__() %}{{ k }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(x=1) }}",
    "{% set messages[0].x = 1 %}",
]


def render(text: str) -> str:
    variables = {"messages": [{"role": "user", "content": "hi"}], "long": LONG}
    return SANDBOX.render_bounded(SANDBOX.from_string(text), variables)


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_is_stopped(text, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)

    with pytest.raises((TemplateLimitError, OverflowError)):
        render(text)


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_template_that_would_fill_memory_is_stopped_before(text):
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitError):
            render(text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 10 * MAX_CHARACTERS


def test_a_template_that_takes_long_steps_is_stopped_by_the_clock(monkeypatch):
    seconds = iter(range(0, 10**9, 5))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))

    with pytest.raises(TemplateLimitError, match="more than 10 seconds"):
        render("{% for i in range(1000) %}{% endfor %}")


@pytest.mark.parametrize("text", ESCAPES)
def test_nothing_of_python_can_be_reached_or_changed(text):
    """Jinja answers some attempts with an error, others with something undefined, which prints as nothing."""
    try:
        shown = render(text)
    except Exception as error:  # noqa: BLE001 - which one is Jinja's choice
        assert isinstance(error, SecurityError | TypeError) or type(error).__module__.startswith("jinja2")
    else:
        assert shown == ""


def test_limits_start_anew_with_each_rendering(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 60)
    text = "{% for i in range(50) %}{% endfor %}"

    assert [render(text) for _ in range(5)] == [""] * 5
    with pytest.raises(TemplateLimitError):
        render(text + text)


def test_loops_keep_what_jinja_gives_them():
    shown = render(
        "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}"
        "{{ '!' if loop.last }}{{ loop.previtem }} {% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}"
        "{% for x in [] %}{% else %} none{% endfor %}"
        "{% for x in [[1, [2]], 3] recursive %}<{{ loop(x) if x is iterable else x }}>{% endfor %}"
        "{% for x in 'ab' | reverse %}{{ loop.length }}{{ x }}{% endfor %}"
        "{% for x in missing %}x{% endfor %}"
    )

    assert shown == "1/3 2/31 3/3!2 a=1 none<<1><<2>>><3>2b2a"


def test_plain_formatting_is_no_attack():
    shown = render(
        "{{ '1000000 %s, %-5d|' % ('a', 7) }}{{ '1000000 {0:>3}{{}}'.format('b') }}{{ 'x'.ljust(3) }}|"
        "{{ '{{a: {{}}}}'.format() }}"
    )

    assert shown == "1000000 a, 7    |1000000   b{}x  |{a: {}}"


def test_a_long_honest_chat_is_no_attack():
    """Two thousand messages and a megabyte of text, formatted as templates do."""
    messages = [{"role": "user", "content": "word " * 100} for _ in range(2000)]
    template = SANDBOX.from_string(
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}S{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] | trim + '\\n' }}{% endfor %}{{ messages | tojson | length }}"
    )

    assert len(SANDBOX.render_bounded(template, {"messages": messages})) > 1_000_000
