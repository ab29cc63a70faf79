"""A model's template renders as usual, but can neither run forever nor exhaust memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2 import ext

from mlxserve.errors import InvalidRequest
from mlxserve.hub.embedded import model_path
from mlxserve.text import template_limits
from mlxserve.text.template_limits import (
    BoundedEnvironment,
    Deadline,
    TemplateLimitExceeded,
    bound_chat_templates,
)
from mlxserve.text.tokenizer import Tokenizer


def render(source: str, **variables: Any) -> str:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
    )
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ 9**9**9 }}",
        "{{ 2**100000000 }}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ ('\t' * 10000).expandtabs(100000) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000).replace('', 'b' * 10000) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000).join('b' * 10000) }}",
        "{{ range(10000) | join('b' * 10000) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ ('a\n' * 10000) | indent(10000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ [1, 2] | batch(10**9, 0) | list }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}",
    ],
)
def test_a_template_that_would_exhaust_memory_is_stopped_before_it_does(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 60.0)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitExceeded, match=r"more than|too large"):
            render(source)
        peak = tracemalloc.get_traced_memory()[1]
        # A list of MAX_SIZE items alone takes 8 bytes for each.
        assert peak < 13 * template_limits.MAX_SIZE
    finally:
        tracemalloc.stop()


def test_an_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    loop = "{% for i in range(99999) %}"
    with pytest.raises(TemplateLimitExceeded, match="took longer"):
        render(f"{loop}{loop}{{% set x = i %}}{{% endfor %}}{{% endfor %}}")


def test_the_sandbox_still_blocks_unsafe_access() -> None:
    assert render("{{ ''.__class__ }}") == ""
    with pytest.raises(Exception, match="unsafe"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'a' * 3 + 'b' }}", "aaab"),
        ("{{ 7 % 4 }} {{ '%02d' % 5 }} {{ '%s!'|format('x') }}", "3 05 x!"),
        ("{{ '{} {:>3}'.format('a', 1) }}", "a   1"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b-c' | replace('-', '', 1) }}", "a+bab-c"),
        ("{{ [1, 2] | join(', ') }} {{ rows | join('', attribute='x') }}", "1, 2 34"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 2 ** 10 }} {{ 'x' | center(3) }}", "1024  x "),
        ("{% macro m(x) %}{{ x ~ '!' }}{% endmacro %}{{ m('a') }}", "a!"),
    ],
)
def test_ordinary_templates_render_unchanged(source: str, text: str) -> None:
    assert render(source, rows=[{"x": 3}, {"x": 4}]) == text


def test_a_deadline_that_was_met_never_raises_later() -> None:
    for _ in range(30):
        with contextlib.suppress(TemplateLimitExceeded), Deadline(0.005):
            end = time.perf_counter() + 0.0049
            while time.perf_counter() < end:
                pass
    for _ in range(10_000):
        assert threading.get_ident()


def test_a_models_own_template_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in model_path().iterdir():
        if "tokenizer" in file.name:
            shutil.copy(file, tmp_path / file.name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0].content * 10**9 }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="creates more than"):
        tokenizer.render([{"role": "user", "content": "Hi"}])
    bound_chat_templates()  # idempotent
    assert Tokenizer(model_path()).render([{"role": "user", "content": "Hi"}])
