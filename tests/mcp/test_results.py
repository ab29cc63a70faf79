from types import SimpleNamespace
from typing import Any

from mlxserve.mcp import results
from mlxserve.mcp.results import MAX_IMAGE, MAX_IMAGES, MAX_RESULT, CallResult, shortened


def result(parts: list[SimpleNamespace], structured: Any = None) -> CallResult:
    return results.result_of(parts, structured, is_error=False)


def test_texts_are_joined_and_other_parts_are_named() -> None:
    parts = [
        SimpleNamespace(type="text", text="one"),
        SimpleNamespace(type="image", mime_type="image/png", data="aGk="),
        SimpleNamespace(type="image", mime_type="image/tiff", data="aGk="),
        SimpleNamespace(type="image", mime_type="image/png", data="no base 64"),
        SimpleNamespace(
            type="resource", resource=SimpleNamespace(blob="aGk=", mime_type="image/jpeg")
        ),
        SimpleNamespace(type="resource", resource=SimpleNamespace(text="two")),
        SimpleNamespace(type="resource", resource=SimpleNamespace(blob="aGk=")),
        SimpleNamespace(type="resource_link", uri="file:///x"),
    ]
    assert result(parts).text.splitlines() == [
        "one",
        "(image of type image/png)",
        "(image of type image/tiff, which is not shown to the model)",
        "(image of type image/png, which is not shown to the model)",
        "(image of type image/jpeg)",
        "two",
        "(resource, which is not shown to the model)",
        "(a link to file:///x)",
    ]


def test_images_are_data_urls_bounded_in_number_and_in_size() -> None:
    def image(data: str, kind: str = "image/png") -> SimpleNamespace:
        return SimpleNamespace(type="image", mime_type=kind, data=data)

    few = [image("aGk="), image("aGk=", "image/webp"), image("aGk=", "text/html")]
    assert result(few).images == (
        "data:image/png;base64,aGk=",
        "data:image/webp;base64,aGk=",
    )
    many = [image("A" * 4 * number) for number in range(1, 9)]
    assert len(result(many).images) == MAX_IMAGES
    assert result(many).text.count("is not shown to the model") == 8 - MAX_IMAGES
    assert result([image("A" * MAX_IMAGE)]).images == ()


def test_a_result_without_parts_is_its_structured_content() -> None:
    assert result([], {"sum": 3}).text == '{"sum": 3}'
    assert result([]).text == "(no output)"


def test_half_a_character_of_a_tool_is_replaced() -> None:
    """JSON can carry it and UTF-8 cannot: neither the prompt nor the chat's file could be written."""
    part = SimpleNamespace(type="text", text="cut \ud83d")
    assert result([part]).text == "cut \ufffd"


def test_a_long_text_keeps_its_start_and_its_end() -> None:
    text = shortened("start" + "x" * 1_000_000 + "end")
    assert text.startswith("start")
    assert text.endswith("end")
    assert "980,008 characters are left out" in text
    assert len(text) < MAX_RESULT + 100
    assert shortened("x" * MAX_RESULT) == "x" * MAX_RESULT
