"""Images among the texts of a conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxserve.images.image import Image
from mlxserve.text.conversation import Call, Conversation, Message, images_in, read_messages
from mlxserve.text.template_caps import TemplateCaps, find_abilities
from mlxserve.text.template_compat import Fitting
from tests.text.rendering import renderer

A, B = (Image.from_pixels(np.full((2, 2, 3), value, np.uint8)) for value in (1, 2))


def shown(*texts_and_images: str | Image) -> list[dict[str, Any]]:
    return [
        {"type": "image", "image": part}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in texts_and_images
    ]


def content(message: Message, **abilities: bool) -> Any:
    fitted = Fitting(TemplateCaps(**abilities)).fit(Conversation.from_messages([message]))
    return fitted.messages[-1]["content"]


def test_parts_keep_their_order() -> None:
    said = ("What is ", A, B, " beside", " them?")
    assert content(Message.from_parts("user", said)) == shown("What is ", A, B, " beside them?")
    assert content(Message.from_parts("user", (A, "What?"))) == shown(A, "What?")
    assert content(Message.from_parts("user", (A,))) == shown(A)


def test_a_text_without_images_stays_a_text() -> None:
    assert content(Message.from_parts("user", ("one", "two"), "\n")) == "one\ntwo"


def test_a_separator_is_between_texts_only() -> None:
    assert content(Message.from_parts("user", ("one", "two", A, "three"), "\n")) == shown(
        "one\ntwo", A, "three"
    )


def test_images_move_with_their_text_where_messages_become_one() -> None:
    system, user = (
        Message(role="system", text="Be brief."),
        Message.from_parts("user", ("See ", A, ".")),
    )
    both = (
        Fitting(TemplateCaps(system=False)).fit(Conversation.from_messages([system, user])).messages
    )
    assert [message["content"] for message in both] == [shown("Be brief.\n\nSee ", A, ".")]
    alone = Message.from_parts("user", (B,))
    pair = (
        Fitting(TemplateCaps(repeated_users=False))
        .fit(Conversation.from_messages([user, alone]))
        .messages
    )
    assert [message["content"] for message in pair] == [shown("See ", A, ".", B)]


def test_the_library_s_messages_hold_images() -> None:
    said = {"role": "user", "content": shown("Look: ", A)}
    [message] = Fitting(TemplateCaps()).fit(read_messages([said])).messages
    assert message["content"] == shown("Look: ", A)
    assert images_in(message) == [A]


_TURN = "{% for m in messages %}<{{ m.role }}>"
_USER = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "images", "result_images"),
    [
        (_USER, True, True),
        ("{{ m.content }}", False, True),  # it shows no images, but a part as Python writes it
        ("{{ '' + m.content }}", False, True),
        ("{% if m.role == 'tool' %}{{ m.content }}{% else %}" + _USER + "{% endif %}", True, False),
        (
            "{% if m.role == 'tool' %}{{ '' + m.content }}{% else %}" + _USER + "{% endif %}",
            True,
            False,
        ),
    ],
)
def test_whether_a_template_shows_images_of_users_and_results_is_found(
    content: str, *, images: bool, result_images: bool
) -> None:
    abilities = find_abilities(renderer(f"{_TURN}{content}{_CALLS}{{% endfor %}}"), {})
    assert (abilities.images, abilities.result_images) == (images, result_images)


def test_images_of_results_follow_them_where_the_template_has_no_place_in_results() -> None:
    call, other = Call("a", "look", "{}"), Call("b", "look", "{}")
    asked = Message(role="assistant", calls=(call, other))
    results = [
        Message.from_parts("tool", ("seen ", A, "here"), call_id="a"),
        Message.from_parts("tool", (B,), call_id="b"),
    ]
    told = Message(role="user", text="And?")
    fitting = Fitting(TemplateCaps(result_images=False))
    fitted = fitting.fit(Conversation.from_messages([asked, *results]))
    assert fitted.changes == ("images of results are in a user message after them",)
    contents = [message["content"] for message in fitted.messages]
    assert contents == ["", "seen here", "", shown(A, B)]
    before = fitting.fit(Conversation.from_messages([asked, *results, told])).messages
    assert before[-1]["content"] == shown(A, B, "And?")
    later = Message(role="assistant", text="A dot.")
    after = fitting.fit(Conversation.from_messages([asked, *results, later, told])).messages
    assert [message["content"] for message in after[2:]] == ["", shown(A, B), "A dot.", "And?"]
