"""The library's messages are read with their documents, whose pages may be images."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from mlxserve.chat.document_prompts import DocumentPrompts
from mlxserve.chat.given_messages import read_given
from mlxserve.core.errors import InvalidParameter
from mlxserve.helpers.work import Work
from mlxserve.images.image import Image
from mlxserve.text.conversation import Conversation
from tests.text.documents.files import jpeg, scan

T = TypeVar("T")
CODEC: Any = SimpleNamespace(encode=list, max_characters=9_999, max_model_len=9_999)


async def at_once(work: Work[T]) -> T:
    result: T = work.run()
    return result


def read(num_pages: int, *, sees: bool, notes: list[str] | None = None) -> Conversation:
    data = base64.b64encode(scan([jpeg()] * num_pages)).decode()
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
    content = [part, {"type": "text", "text": "When?"}]
    return asyncio.run(
        read_given(
            [{"role": "user", "content": content}],
            at_once,
            documents=DocumentPrompts(CODEC),
            sees=sees,
            on_cut=[].append if notes is None else notes.append,
        )
    )


def test_scanned_pages_are_images_for_a_model_that_sees() -> None:
    notes: list[str] = []
    [message] = read(17, sees=True, notes=notes).messages
    assert [type(placed.image) for placed in message.images] == [Image] * 16
    assert notes == ["16 of 17 pages of a.pdf were read: the rest does not fit the context"]


def test_a_model_that_does_not_see_refuses_scanned_pages() -> None:
    with pytest.raises(InvalidParameter, match="which this model does not see") as refused:
        read(1, sees=False)
    assert refused.value.name == "messages[0].content[0]"
