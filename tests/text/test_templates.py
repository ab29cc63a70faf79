"""A model's template renders as usual, but can neither run forever nor exhaust memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxserve.core.errors import HelperUnavailable, InvalidRequest
from mlxserve.helpers.errors import HelperKilled, KillReason
from mlxserve.helpers.helper import Helper
from mlxserve.hub.embedded import model_path
from mlxserve.text import templates
from mlxserve.text.templates import HelperRenderer, RenderedTooLong
from mlxserve.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
_LOOP = "{% for i in range(99999) %}"
_GROWING = (
    "{%% set n = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set n.x = %s %%}{%% endfor %%}"
)


@pytest.fixture(name="with_template")
def with_template_fixture(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """A function that returns the embedded model's tokenizer with another template."""

    def with_template(template: str) -> Tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(model_path() / name, tmp_path / name)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return with_template


def test_ordinary_templates_render_as_in_transformers(
    with_template: Callable[[str], Tokenizer],
) -> None:
    for source, text in [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'a' * 3 + 'b' }}", "aaab"),
        ("{{ 7 % 4 }} {{ '%02d' % 5 }} {{ '%s!'|format('x') }}", "3 05 x!"),
        ("{{ '{} {:>3}'.format('a', 1) }}", "a   1"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b-c' | replace('-', '', 1) }}", "a+bab-c"),
        ("{{ [1, 2] | join(', ') }} {{ messages | join('', attribute='role') }}", "1, 2 user"),
        ("{{ 'a\\nb' | indent(2) }}", "a\n  b"),
        ("{{ 2 ** 10 }} {{ 'x' | center(3) }}", "1024  x "),
        ("{% macro m(x) %}{{ x ~ '!' }}{% endmacro %}{{ m('a') }}", "a!"),
        ("{{ {'a': 1} | tojson }}", '{"a": 1}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        (
            "{% set x = [] %}{% for m in messages %}{% set _ = x.append(m.role) %}{% endfor %}{{ x }}",
            "['user']",
        ),
        ("{% set ns = namespace(x=[1]) %}{{ ns.x.append(2) or ns.x }}", "[1, 2]"),
    ]:
        tokenizer = with_template(source)
        assert tokenizer.decode(tokenizer.render(USER)) == text, source


_LARGE_VALUES = [
    "{{ 'a' * 10**10 }}",
    "{% macro m() %}" + _LOOP + "{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{{ m() }}",
]
_OTHER_LARGE_VALUES = [
    "{{ range(99999) | join('b' * 100000) }}",
    _GROWING % ("'ab'", "n.x ~ n.x"),
    "{{ [1] * 10**9 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ [1, 2] | batch(10**9, 0) | list }}",
    _GROWING % ("[1]", "n.x + n.x"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        *_LARGE_VALUES,
        *(pytest.param(each, marks=pytest.mark.slow) for each in _OTHER_LARGE_VALUES[:2]),
        *(pytest.param(each, marks=pytest.mark.long) for each in _OTHER_LARGE_VALUES[2:]),
    ],
)
def test_a_template_that_exhausts_memory_is_ended_and_the_next_one_renders(
    source: str, with_template: Callable[[str], Tokenizer]
) -> None:
    with pytest.raises(InvalidRequest, match=r"template rejects these messages: .*MB of memory"):
        with_template(source).render(USER)
    harmless = with_template("{{ messages[0].content }}")
    assert harmless.decode(harmless.render(USER)) == "Hi"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        _LOOP + _LOOP + "{% set x = i %}{% endfor %}{% endfor %}",
        # In C, where no Python instruction ends that an exception could follow.
        pytest.param("{{ (9 ** (9 ** 9)) % 2 }}", marks=pytest.mark.slow),
        # While it is compiled: constants are computed then.
        "{% if messages[1] %}{{ (9 ** (9 ** 9)) % 2 }}{% endif %}",
    ],
    ids=["loop", "in C", "compiling"],
)
def test_an_endless_template_is_ended_and_the_next_one_renders(
    source: str, with_template: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = with_template("{{ messages[0].content }}")
    assert harmless.decode(harmless.render(USER)) == "Hi"
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    with pytest.raises(InvalidRequest, match=r"took longer than 0\.3 s"):
        with_template(source).render(USER)
    monkeypatch.undo()
    assert harmless.decode(harmless.render(USER)) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].parts.append(1) }}",
        "{% set x = [1] %}{{ x.clear() }}",
        "{% set x = {} %}{{ x.update(a=1) }}",
    ],
)
def test_only_lists_of_the_templates_own_grow(
    source: str, with_template: Callable[[str], Tokenizer]
) -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        with_template(source).render([{**USER[0], "parts": ["a"]}])


def test_the_sandbox_still_blocks_unsafe_access(with_template: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        with_template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(USER)


@pytest.mark.parametrize("content", ["Hi", "<|im_end|>"], ids=["plain", "control token"])
def test_a_rendered_text_that_is_too_long_is_not_encoded(
    content: str, with_template: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template("{{ 'x' * 900 }}{{ messages[0].content }}")
    messages = [{"role": "user", "content": content}]
    assert tokenizer.render(messages, max_characters=1000)
    monkeypatch.delattr("transformers.PreTrainedTokenizerBase.encode")
    with pytest.raises(RenderedTooLong) as caught:
        tokenizer.render(messages, max_characters=900)
    assert caught.value.num_characters >= 902


def test_a_template_whose_process_was_stopped_is_rendered_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    renderer, others = HelperRenderer(), set(psutil.Process().children())
    assert renderer.variables("{{ a }}") == {"a": []}
    [child] = set(psutil.Process().children()) - others
    child.suspend()
    with pytest.raises(HelperUnavailable, match=r"process was paused; send the request again"):
        renderer.variables("{{ b }}")
    assert renderer.variables("{{ b }}") == {"b": []}


def test_a_template_whose_process_was_killed_by_others_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer, call = HelperRenderer(), Helper.call
    killed = HelperKilled(KillReason.ENDED, "ended its process (SIGKILL)")
    for num_kills in (1, 2):
        outcomes = iter([killed] * num_kills + [None] * 9)

        def killed_or_called(*arguments: Any, seconds: float) -> Any:
            if (error := next(outcomes)) is not None:  # noqa: B023
                raise error
            return call(*arguments, seconds=seconds)

        monkeypatch.setattr(Helper, "call", killed_or_called)
        if num_kills == 1:
            assert renderer.variables("{{ a }}") == {"a": []}
        else:
            with pytest.raises(HelperUnavailable, match=r"was ended twice; send the request again"):
                renderer.variables("{{ b }}")
            assert renderer.variables("{{ b }}") == {"b": []}
