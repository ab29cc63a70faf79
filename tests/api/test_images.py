"""Images as each API sends them, up to what the chat template gets of them."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api import prompts
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.helpers.fair_executor import UNCOUNTED_BODY, FairExecutor
from mlxserve.helpers.helper import Helper
from mlxserve.images.decode import ImageDecoder
from mlxserve.images.domains import AllowedDomains
from mlxserve.images.image import Image
from mlxserve.images.remote import RemoteFiles
from tests.api.clients import anthropic, ollama, openai
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer
from tests.images.files import file_of, picture
from tests.waiting import wait_until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "What is it?"
TOKENS = {"max_tokens": 5}
FILE = file_of(picture())
PNG = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{PNG}"
IMAGE_URL = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}


@pytest.fixture
def chat() -> FakeChat:
    return FakeChat(supports_images=True)


def seen(chat: FakeChat) -> list[list[str]]:
    """Of each message with an image: its texts, and the shapes of its images."""
    contents = [message["content"] for message in chat.rendered[-1].messages]
    return [[_in_words(part) for part in one] for one in contents if isinstance(one, list)]


def _in_words(part: dict[str, Any]) -> str:
    image = part.get("image")
    if isinstance(image, Image):
        return f"{image.width} x {image.height}"
    return str(part["text"])


# The examples of the official clients.


def test_openais_client_shows_an_image_to_a_chat(start_server: StartServer, chat: FakeChat) -> None:
    with openai.OpenAI(base_url=f"{start_server().url}/v1", api_key="none") as client:
        client.chat.completions.create(
            model="fake",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": TEXT},
                        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
                    ],
                }
            ],
        )
    assert seen(chat) == [[TEXT, "24 x 16"]]


def test_openais_client_shows_an_image_to_a_response_that_is_continued(
    start_server: StartServer, chat: FakeChat
) -> None:
    with openai.OpenAI(base_url=f"{start_server().url}/v1", api_key="none") as client:
        first = client.responses.create(
            model="fake",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": TEXT},
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                    ],
                }
            ],
        )
        assert seen(chat) == [[TEXT, "24 x 16"]]
        client.responses.create(
            model="fake", input="And its colour?", previous_response_id=first.id
        )
        assert seen(chat) == [[TEXT, "24 x 16"]]
        [item] = client.responses.input_items.list(first.id).data
    assert item.model_dump(exclude_none=True)["content"] == [
        {"type": "input_text", "text": TEXT},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]


def test_anthropics_client_shows_an_image_and_counts_it(
    start_server: StartServer, chat: FakeChat
) -> None:
    messages: Any = [{"role": "user", "content": [BLOCK, {"type": "text", "text": TEXT}]}]
    with anthropic.Anthropic(base_url=start_server().url, api_key="none") as client:
        client.messages.create(model="claude-local", max_tokens=5, messages=messages)
        assert seen(chat) == [["24 x 16", TEXT]]
        client.messages.count_tokens(model="claude-local", messages=messages)
    assert len(chat.rendered) == 2
    assert seen(chat) == [["24 x 16", TEXT]]


def test_ollamas_client_shows_an_image(start_server: StartServer, chat: FakeChat) -> None:
    with ollama.Client(host=start_server().url) as client:
        client.chat("fake", messages=[{"role": "user", "content": TEXT, "images": [FILE]}])
        assert seen(chat) == [["24 x 16", TEXT]]
        client.generate("fake", TEXT, images=[FILE])
        assert seen(chat) == [["24 x 16", TEXT]]


# Earlier turns and results of tools.


def test_images_of_earlier_turns_and_of_tools_stay_images(
    client: TestClient, chat: FakeChat
) -> None:
    call = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [IMAGE_URL, {"type": "text", "text": "first"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_a", "content": [IMAGE_URL]},
        {"role": "user", "content": TEXT},
    ]
    reply = client.post(CHAT, json={"messages": messages})
    assert reply.status_code == 200
    assert "x-mlxserve-warning" not in reply.headers
    assert seen(chat) == [["24 x 16", "first"], ["24 x 16"]]


def test_images_of_anthropics_tool_results_stay_images(client: TestClient, chat: FakeChat) -> None:
    use = {"type": "tool_use", "id": "toolu_a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_a", "content": [BLOCK]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_b", "content": [BLOCK], "is_error": True}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use, {**use, "id": "toolu_b"}]},
        {"role": "user", "content": [result, failed]},
    ]
    assert client.post(MESSAGES, json={"max_tokens": 5, "messages": messages}).status_code == 200
    assert seen(chat) == [["24 x 16"], ["Error: ", "24 x 16"]]


def test_images_of_outputs_of_responses_stay_images(client: TestClient, chat: FakeChat) -> None:
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_a", "output": [INPUT_IMAGE]},
    ]
    stored = client.post(RESPONSES, json={"input": items}).json()["id"]
    assert seen(chat) == [["24 x 16"]]
    listed = client.get(f"{RESPONSES}/{stored}/input_items?order=asc").json()["data"]
    assert listed[-1]["output"] == [{**INPUT_IMAGE, "detail": "auto"}]


def test_the_images_of_ollamas_tools_and_earlier_turns_stay_images(
    client: TestClient, chat: FakeChat
) -> None:
    messages = [
        {"role": "user", "content": "first", "images": [PNG, PNG]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "", "tool_name": "look", "images": [PNG]},
    ]
    body = {"model": "fake", "messages": messages, "stream": False}
    assert client.post("/api/chat", json=body).status_code == 200
    assert seen(chat) == [["24 x 16", "24 x 16", "first"], ["24 x 16"]]


# What cannot be read.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,AAAA", "is not a PNG, JPEG, WebP or GIF file"),
        ("data:image/png;base64,!", "is not valid base64"),
        (URL[:-400], "is damaged or incomplete"),
        ("https://example.com/a.png", "--allow-remote-images allows it"),
        ("file:///etc/passwd", 'needs a URL that begins with "data:"'),
        ("", 'needs a URL that begins with "data:"'),
        (None, 'needs a URL that begins with "data:"'),
    ],
)
def test_an_image_that_cannot_be_read_is_refused_by_its_place(
    client: TestClient, chat: FakeChat, url: str | None, said: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"type": "input_image", "image_url": url}
    for path, field, content in (
        (CHAT, "messages", part),
        (MESSAGES, "messages", block),
        (f"{MESSAGES}/count_tokens", "messages", block),
        (RESPONSES, "input", item),
    ):
        texts = {"type": "input_text" if field == "input" else "text", "text": TEXT}
        fields = {field: [{"role": "user", "content": [texts, content]}], "max_tokens": 5}
        if field == "input":
            del fields["max_tokens"]
        reply = client.post(path, json=fields)
        assert reply.status_code == 400, path
        assert f"{field}[0].content[1]: the image " in reply.json()["error"]["message"]
        assert said in reply.json()["error"]["message"]
    assert chat.submitted == []


@pytest.mark.parametrize(
    "source",
    [{}, {"type": "file", "file_id": "file_1"}, {"type": "base64"}, {"type": "url", "url": 5}],
)
def test_a_source_of_no_known_kind_is_refused(client: TestClient, source: dict[str, Any]) -> None:
    content = [{"type": "image", "source": source}]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    reply = client.post(MESSAGES, json=body)
    assert reply.status_code == 400
    assert "messages[0].content[0]: the image needs a URL" in reply.json()["error"]["message"]


def test_ollamas_image_is_refused_by_its_place(client: TestClient) -> None:
    body = {"model": "fake", "prompt": TEXT, "images": [PNG, "AAAA"]}
    reply = client.post("/api/generate", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"] == "images[1]: the image is not a PNG, JPEG, WebP or GIF file"
    raw = client.post("/api/generate", json={**body, "images": [PNG], "raw": True})
    assert raw.json()["error"] == "images: a raw prompt holds none; send it without `raw`"


def test_a_prefix_holds_no_images(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": [IMAGE_URL]}]}
    reply = client.put("/v1/prefixes/a", json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message == "messages[0].content[0]: a named prefix holds no images"


def test_other_media_of_a_model_that_sees_are_refused_as_before(client: TestClient) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    reply = client.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    assert "input_audio parts are not supported" in reply.json()["error"]["message"]


# Limits.


def content_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_a_request_has_no_more_images_and_pixels_than_fit(
    client: TestClient, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_IMAGES", 2)
    assert client.post(CHAT, json=content_of(IMAGE_URL, IMAGE_URL)).status_code == 200
    reply = client.post(CHAT, json=content_of(IMAGE_URL, IMAGE_URL, IMAGE_URL))
    assert reply.status_code == 400
    assert "content[2]: at most 2 images are allowed, got 3" in reply.json()["error"]["message"]
    monkeypatch.setattr(prompts, "MAX_PIXELS", 500)
    other = base64.b64encode(file_of(picture(seed=1))).decode()
    second = {"type": "image_url", "image_url": f"data:;base64,{other}"}
    assert client.post(CHAT, json=content_of(IMAGE_URL, IMAGE_URL)).status_code == 200
    reply = client.post(CHAT, json=content_of(IMAGE_URL, second))
    assert reply.status_code == 400
    assert "pixels together; send fewer, or smaller ones" in reply.json()["error"]["message"]


def test_the_memory_of_pixels_is_given_back(client: TestClient, chat: FakeChat) -> None:
    large = base64.b64encode(file_of(picture(400, 300))).decode()
    part = {"type": "image_url", "image_url": f"data:;base64,{large}"}
    chat.executor.pixels.take("another", 6 * (256 << 20) - (64 << 10), 1)
    reply = client.post(CHAT, json=content_of(part))
    assert reply.status_code == 503
    assert "retry-after" in reply.headers
    chat.executor.pixels.give_back("another", 6 * (256 << 20) - (64 << 10))
    assert client.post(CHAT, json=content_of(part)).status_code == 200
    assert chat.executor.pixels.num_taken == 0


# Models that do not see.


@pytest.fixture
def blind(chat: FakeChat) -> Iterator[TestClient]:
    chat.supports_images = False
    with TestClient(create_app(chat), base_url="http://127.0.0.1:8000") as client:  # type: ignore[arg-type]
        yield client


def test_a_model_that_was_trained_to_see_says_why_it_does_not(
    blind: TestClient, chat: FakeChat
) -> None:
    chat.no_vision_reason = "install mlxserve[vision]"
    for parts, why in (
        ([IMAGE_URL], "image_url parts are not supported: install mlxserve[vision]"),
        (
            [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            "input_audio parts are not supported: this server reads no sound",
        ),
    ):
        body = {"messages": [{"role": "user", "content": parts}]}
        reply = blind.post("/v1/chat/completions", json=body)
        assert (reply.status_code, why in reply.json()["error"]["message"]) == (400, True)


def test_a_model_that_does_not_see_gets_a_text_in_the_place_of_earlier_images(
    blind: TestClient, chat: FakeChat
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE_URL, IMAGE_URL]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    reply = blind.post(CHAT, json={"messages": messages})
    assert reply.headers["x-mlxserve-warning"] == "left out: image_url"
    left_out = "[image left out: this model reads text only]"
    assert chat.rendered[-1].messages[0]["content"] == f"a{left_out}{left_out}"
    blocks = [{"type": "text", "text": "a"}, BLOCK, BLOCK, {"type": "text", "text": "z"}]
    messages[0] = {"role": "user", "content": blocks}
    reply = blind.post(MESSAGES, json={"max_tokens": 5, "messages": messages})
    assert reply.headers["x-mlxserve-warning"] == "left out: image"
    said = "\n\n".join(["a", left_out, left_out, "z"])
    assert chat.rendered[-1].messages[0]["content"] == said


def test_a_model_that_does_not_see_refuses_a_new_image_without_decoding_it(
    blind: TestClient, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.images.sources.ImageSources.image", None)
    for url in (URL, "https://example.com/a.png", None):
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = blind.post(CHAT, json=content_of(part))
        assert reply.status_code == 400
        said = "content[0]: image_url parts are not supported: this model reads text only"
        assert said in reply.json()["error"]["message"]
    assert chat.rendered == []


# What a model says of itself.


def test_a_model_that_sees_says_so(client: TestClient, chat: FakeChat) -> None:
    def told() -> list[bool]:
        cards = client.get("/v1/models").json()["data"]
        listed = client.get("/api/tags").json()["models"]
        shown = client.post("/api/show", json={"model": "fake"}).json()
        return [
            *("vision" in card["capabilities"] for card in (*cards, *listed, shown)),
            client.get("/api/v1/model").json()["vision"],
        ]

    assert set(told()) == {True}
    chat.supports_images = False
    assert set(told()) == {False}


def test_one_request_does_not_tell_whether_another_key_has_sent_a_picture(
    chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another key has sent is decoded again, in all dialects (N5)."""
    decoder = ImageDecoder()
    decoded: list[str] = []
    call = Helper.call_twice

    def counted(helper: Helper, job: str, *arguments: Any, **options: Any) -> Any:
        decoded.append(job)
        return call(helper, job, *arguments, **options)

    monkeypatch.setattr(Helper, "call_twice", counted)
    monkeypatch.setattr("mlxserve.images.sources.image_decoder", lambda: decoder)
    app = create_app(chat, access=AccessPolicy(api_keys=["good-key", "evil-key"]))
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": [IMAGE_URL]}]},
        RESPONSES: {"input": [{"role": "user", "content": [INPUT_IMAGE]}]},
        MESSAGES: {"max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK]}]},
        "/api/chat": {
            "model": "fake",
            "messages": [{"role": "user", "content": "", "images": [PNG]}],
        },
    }
    counts = []
    for key in ("good-key", "evil-key"):
        for path, body in bodies.items():
            headers = {"authorization": f"Bearer {key}"}
            assert client.post(path, json=body, headers=headers).status_code == 200, path
            counts.append(len(decoded))
    decoder.close()
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2]


def test_slow_fetches_of_one_key_leave_places_for_others_and_end_with_their_client(
    chat: FakeChat, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight fetches were made for all clients, first come first served: another waited 30 s."""
    begun: list[str] = []
    ended: list[str] = []

    async def fetch(_files: RemoteFiles, url: str, _take: object) -> bytes:
        if "slow" in url:
            begun.append(url)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(url)
        return file_of(picture())

    monkeypatch.setattr(RemoteFiles, "fetch", fetch)
    keys = ("evil-evil-evil-evil", "good-good-good-good")
    server = start_server(
        access=AccessPolicy(api_keys=keys, remote_images=AllowedDomains.from_texts(["*"]))
    )

    def request_of(key: str, name: str) -> tuple[dict[str, str], dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": f"http://web.example/{name}.png"}}
        return {"authorization": f"Bearer {key}"}, content_of(part)

    peers = []
    for number in range(20):
        headers, body = request_of(keys[0], f"slow{number}")
        content = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: {headers['authorization']}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        peers.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        peers[-1].sendall(head.encode() + content)
    wait_until(lambda: len(begun) == 8 and chat.executor.num_waiting == 12)
    headers, body = request_of(keys[1], "quick")
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    for peer in peers:
        peer.close()
    wait_until(lambda: sorted(ended) == sorted(begun) and chat.executor.num_waiting == 0)
    assert len(begun) < 20, "those that waited were not begun"


def test_a_fetched_file_takes_memory_until_it_is_decoded(
    chat: FakeChat, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.executor = FairExecutor(body_memory=8 * UNCOUNTED_BODY)
    held: list[int] = []

    async def fetch(_files: RemoteFiles, url: str, take: Callable[[int], None]) -> bytes:
        take(20 * UNCOUNTED_BODY if "large" in url else 2 * UNCOUNTED_BODY)
        held.append(chat.executor.bodies.num_taken)
        return file_of(picture())

    monkeypatch.setattr(RemoteFiles, "fetch", fetch)
    url = start_server(access=AccessPolicy(remote_images=AllowedDomains.from_texts(["*"]))).url
    for name, status in (("large", 503), ("small", 200)):
        part = {"type": "image_url", "image_url": {"url": f"http://web.example/{name}.png"}}
        reply = httpx.post(f"{url}/v1/chat/completions", json=content_of(part, part), timeout=60)
        assert reply.status_code == status, reply.text
    assert held == [UNCOUNTED_BODY]
    wait_until(lambda: chat.executor.bodies.num_taken == 0)


@pytest.mark.parametrize("is_blind", [False, True])
def test_videos_are_refused_by_a_sentence_whether_the_model_sees_or_not(
    client: TestClient, chat: FakeChat, is_blind: bool
) -> None:
    chat.supports_images = not is_blind
    url = "data:video/mp4;base64,AAAA"
    for path, field, part, more in (
        (CHAT, "messages", {"type": "video_url", "video_url": {"url": url}}, {}),
        (RESPONSES, "input", {"type": "input_video", "video_url": url}, {}),
        (MESSAGES, "messages", {"type": "video", "source": {"type": "url", "url": url}}, TOKENS),
    ):
        newest = {"role": "user", "content": [part]}
        reply = client.post(path, json={field: [newest], **more})
        said = f"{part['type']} parts are not supported: this server reads no videos; send some of"
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (400, True)
        # An earlier one does not end the session.
        turns = [newest, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        assert client.post(path, json={field: turns, **more}).status_code == 200
        content = str(chat.rendered[-1].messages[0]["content"])
        assert "[video left out: this server reads no videos; " in content


def test_a_video_sent_as_an_image_is_refused_as_a_video(client: TestClient) -> None:
    film = base64.b64encode(b"\0\0\0\x20ftypmp42" + bytes(40)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:video/mp4;base64,{film}"}}
    reply = client.post(CHAT, json=content_of(part))
    assert reply.status_code == 400
    assert (
        "the image is a video, which this server does not read" in reply.json()["error"]["message"]
    )
