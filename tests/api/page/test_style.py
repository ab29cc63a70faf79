"""Rules of the frame do not reach into messages: each names a class or an id of its own."""

from __future__ import annotations

import re

import pytest

from tests.api.page.page_files import FILES, containers, message_tags, selectors


def leaks(css: str) -> list[str]:
    """Selectors that match an element of a message by its tag alone, wherever it stands in the frame."""
    return [one for one in selectors(css) if _leaks(one)]


def _leaks(selector: str) -> bool:
    *above, subject = re.split(
        r"\s*[>+~]\s*|\s+", re.sub(r":(?!root)[\w-]+(\([^)]*\))?", "", selector)
    )
    tag = re.match(r"[\w-]*", subject)
    assert tag is not None
    if tag[0] not in message_tags() or _names(subject):
        return False
    return all(set(_parts(one)) <= containers() for one in above)


def _names(compound: str) -> list[str]:
    return re.findall(r"[.#\[][\w-]+", compound)


def _parts(compound: str) -> list[str]:
    return re.findall(r"[.#]?[\w-]+", compound)


def test_no_rule_of_the_frame_matches_an_element_of_a_message() -> None:
    assert leaks(FILES["page.css"]) == []


@pytest.mark.parametrize("tag", sorted(message_tags()))
def test_a_rule_that_would_is_found(tag: str) -> None:
    for selector in (
        tag,
        f"main {tag}",
        f"#log {tag}",
        f".message {tag}",
        f"body #chat > .user {tag}:hover",
    ):
        assert leaks(f"{selector} {{ margin: 0; }}") == [selector]
        assert leaks(f"@media (max-width: 36rem) {{ .x, {selector} {{ margin: 0; }} }}") == [
            selector
        ]
    for selector in (
        f".body {tag}",
        f"#chat-list {tag}",
        f".actions {tag}",
        f"{tag}.own",
        f"{tag}#own",
    ):
        assert leaks(f"{selector} {{ margin: 0; }}") == [], selector


def test_what_is_compared_is_not_empty() -> None:
    assert {"h1", "td", "pre", "button", "msqrt", "summary", "img"} <= message_tags()
    assert {"body", "main", "#chat", "#log", ".message", ".user", ".failed"} <= containers()
    assert len(selectors(FILES["page.css"])) > 120
