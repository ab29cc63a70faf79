"""Hostile clients: `python -m tests.reliability.hostile PORT SEED SECONDS` sends one attack after another.

Prints, as JSON, how many of each were sent and which replies were no answer for a client's error: a
status of 500 or more other than 503, or none at all.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import httpx
from PIL import Image

from tests.api.server.process import CHAT, COMPLETIONS, HELLO

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
_REPLY_SECONDS = 60.0
_LARGE_BODY = 20 << 20  # bytes
# Mean pause between two attacks. Without one, the client's own work takes a core of a small machine.
_PAUSE_SECONDS = 0.2
# A mask that takes minutes; schemas whose compilation takes minutes; an expression too large to keep.
_GRAMMAR = "start: a\na: b b\nb: c c\nc: d d\nd: e e\ne: f f\nf: g g\ng: /x+/ /x+/"

# Few, so that the pictures that the server keeps are all there after some minutes: 256 MB of them, which
# it fills for an hour, would hide a leak.
_COLORS = ((0, 0, 0), (255, 255, 255), (200, 30, 30), (30, 200, 30), (30, 30, 200))
_TORN_BYTES = 100  # from the end of a file


class Attacker:
    """Sends attacks to one server. An attack returns the reply, or None where it reads none."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._draw = random.Random(seed)
        self._numbers = itertools.count(1_000 + 100_000 * seed)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_REPLY_SECONDS)
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []

    def attack(self) -> None:
        """One attack, drawn by weight."""
        names = list(ATTACKS)
        [name] = self._draw.choices(names, [ATTACKS[name][1] for name in names])
        self.counts[name] += 1
        try:
            reply = ATTACKS[name][0](self)
        except httpx.HTTPError as error:
            self.bad.append(f"{name}: {type(error).__name__}: {error}")
            return
        if reply is not None and reply.status_code >= 500 and reply.status_code != 503:
            self.bad.append(f"{name}: {reply.status_code} {reply.text[:300]}")

    def rest(self) -> None:
        time.sleep(self._draw.expovariate(1 / _PAUSE_SECONDS))

    def _chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": HELLO, "max_tokens": 8, **fields}
        return self._client.post(CHAT, json=body)

    def slow_mask(self) -> httpx.Response:
        return self._chat(structured_outputs={"grammar": _GRAMMAR}, max_tokens=64)

    def slow_schema(self) -> httpx.Response:
        number = self._draw.randrange(1, 9)
        patterns = [f"(a|b)*a(a|b){{{count}}}" for count in range(number, number + 19)]
        all_of = [{"type": "string", "pattern": pattern} for pattern in patterns]
        schema = {"name": "x", "schema": {"allOf": all_of}}
        return self._chat(response_format={"type": "json_schema", "json_schema": schema})

    def large_expression(self) -> httpx.Response:
        regex = f"(a{{1000}}){{{self._draw.randrange(900, 1000)}}}"
        return self._chat(structured_outputs={"regex": regex})

    def new_bomb(self) -> httpx.Response:
        """A source that was never refused before."""
        return self._chat(structured_outputs={"regex": f"(a{{1000}}){{{next(self._numbers)}}}"})

    def tiny_messages(self) -> httpx.Response:
        messages = [{"role": "user", "content": self._draw.choice(["hi", "<|im_end|>"])}]
        return self._chat(messages=messages * self._draw.randrange(2_000, 8_000))

    def unfinished_bodies(self) -> None:
        """Large bodies whose last byte does not come, for a while."""
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head = head % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % _LARGE_BODY
        with ExitStack() as stack:
            for _ in range(12):
                address = "127.0.0.1", self._port
                peer = stack.enter_context(socket.create_connection(address, _REPLY_SECONDS))
                with suppress(ConnectionError):  # refused while it was sent
                    peer.sendall(head + b" " * (_LARGE_BODY - 1))
            self.rest()

    def large_tools(self) -> httpx.Response:
        function = {"name": "f", "description": "word " * 6_000, "parameters": {}}
        return self._chat(tools=[{"type": "function", "function": function}] * 120)

    def large_text(self) -> httpx.Response:
        return self._client.post(COMPLETIONS, json={"prompt": "word " * 1_000_000})

    def large_values(self) -> httpx.Response:
        return self._client.post("/tokenize", json={"prompt": "x", "more": [[1, {}]] * 90_000})

    def bad_body(self) -> httpx.Response:
        bodies = (
            b"",
            b"{",
            b"[1]",
            b'{"messages": 1}',
            b'{"a": 1e999}',
            b"\xff" * 99,
            b"[" * 9_999,
        )
        body = self._draw.choice(bodies)
        return self._client.post(CHAT, content=body, headers={"content-type": "application/json"})

    def bad_fields(self) -> httpx.Response:
        fields: Mapping[str, Any] = self._draw.choice(
            [
                {"max_tokens": -1},
                {"temperature": 1e9},
                {"n": 10_000},
                {"logit_bias": {"99999999": 1}},
                {"stop": ["x"] * 10_000},
                {"messages": [{"role": "user", "content": "x"}] * 20_000},
                {"chat_template_kwargs": {"tokenize": False}},
                {"priority": 10**30},
            ]
        )
        return self._chat(**fields)

    def bad_resize(self) -> httpx.Response:
        pages = self._draw.choice([0, -1, 10**6, 10**12, 10**30])
        return self._client.post("/api/v1/cache/resize", json={"num_pages": pages})

    def many_answers(self) -> httpx.Response:
        return self._chat(n=8, max_tokens=16, temperature=1, logprobs=True, top_logprobs=20)

    def embeddings(self) -> httpx.Response:
        return self._client.post("/v1/embeddings", json={"input": ["some words"] * 20})

    def slow_lexer(self) -> httpx.Response:
        """Blocks of code in a language whose lexer takes quadratic time."""
        block = f"```html+ng2\n{'(' * self._draw.randrange(5_000, 9_500)}\n```"
        return self._client.post("/api/v1/render", json={"texts": [block] * 5})

    def long_duration(self) -> httpx.Response:
        body = {"model": "mini", "prompt": "x", "keep_alive": f"{'1' * 20_000}x"}
        return self._client.post("/api/generate", json={**body, "stream": False})

    def large_chat(self) -> httpx.Response:
        """A chat of some megabytes is written, read, exported and deleted."""
        chats = "/api/v1/chats"
        created = self._client.post(chats, json={"title": "large"})
        if created.status_code != 200:
            return created
        chat = f"{chats}/{created.json()['id']}"
        parent = None
        for _ in range(3):
            message = {"role": "user", "text": "word " * 200_000, "parent_id": parent}
            added = self._client.post(f"{chat}/messages", json=message)
            if added.status_code != 200:
                return added
            parent = added.json()["id"]
        for path in (chat, f"{chat}/export?format=json", f"{chats}?search=word"):
            reply = self._client.get(path)
            if reply.status_code != 200:
                return reply
        return self._client.delete(chat)

    def picture(self) -> httpx.Response:
        """Of bytes that are no picture, in a file of some megabytes, or on another machine."""
        data = base64.b64encode(self._draw.randbytes(3 << 20)).decode()
        urls = (f"data:image/png;base64,{data}", "http://127.0.0.1/x.png", "https://example.org/x")
        url = self._draw.choice(urls)
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return self._chat(messages=[{"role": "user", "content": content}])

    def large_picture(self) -> httpx.Response:
        """Sixteen million pixels in some kilobytes, for the model that sees."""
        return self._seen(_data_url(_large_file(self._draw.choice(_COLORS))))

    def torn_picture(self) -> httpx.Response:
        """A new picture of that size whose end is missing: all of it is decoded, and nothing is kept."""
        draw = self._draw
        color = draw.randrange(256), draw.randrange(256), draw.randrange(256)
        return self._seen(_data_url(_large_file(color)[:-_TORN_BYTES]))

    def remote_picture(self) -> httpx.Response:
        """From the allowed domain, whose address is not public, and from others."""
        urls = (
            f"http://127.0.0.1:{self._port}/health",
            "http://127.0.0.1/x",
            "https://a.example/x",
        )
        return self._seen(self._draw.choice(urls))

    def _seen(self, url: str) -> httpx.Response:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
        return self._chat(model="seeing", messages=[{"role": "user", "content": content}])

    def slow_markdown(self) -> httpx.Response:
        """Texts in which a parser looks for an end again and again."""
        piece = self._draw.choice(["[", "![", "> ", "`a", "*a ", "<!--", "- \n", "|a"])
        return self._client.post("/api/v1/render", json={"texts": [piece * 20_000] * 3})

    def leave(self) -> None:
        """Leave before, during or after the answer, politely or with a reset."""
        data = json.dumps({"messages": HELLO, "max_tokens": 200, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self._port), timeout=_REPLY_SECONDS) as peer:
            if self._draw.random() < 0.5:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            peer.sendall(head % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % len(data))
            if self._draw.random() < 0.3:
                peer.sendall(data[:10])
                return
            peer.sendall(data)
            for _ in range(self._draw.randrange(4)):
                if not peer.recv(1_000):
                    return

    def not_http(self) -> None:
        texts = (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"x" * 99_999 + b"\r\n\r\n")
        with socket.create_connection(("127.0.0.1", self._port), timeout=_REPLY_SECONDS) as peer:
            try:
                peer.sendall(self._draw.choice(texts))
                peer.recv(1_000)
            except ConnectionError:
                return  # refused while it was sent


# Each with its weight: heavy ones are rare, as they would be where clients pay for their requests.
ATTACKS: Mapping[str, tuple[Callable[[Attacker], httpx.Response | None], float]] = {
    "slow mask": (Attacker.slow_mask, 0.5),
    "slow schema": (Attacker.slow_schema, 0.5),
    "large expression": (Attacker.large_expression, 0.5),
    "new bomb": (Attacker.new_bomb, 0.5),
    "tiny messages": (Attacker.tiny_messages, 1),
    "unfinished bodies": (Attacker.unfinished_bodies, 0.3),
    "large tools": (Attacker.large_tools, 1),
    "large text": (Attacker.large_text, 1),
    "large values": (Attacker.large_values, 1),
    "bad body": (Attacker.bad_body, 6),
    "bad fields": (Attacker.bad_fields, 6),
    "bad resize": (Attacker.bad_resize, 2),
    "many answers": (Attacker.many_answers, 2),
    "embeddings": (Attacker.embeddings, 2),
    "slow lexer": (Attacker.slow_lexer, 0.5),
    "long duration": (Attacker.long_duration, 2),
    "large chat": (Attacker.large_chat, 0.5),
    "picture": (Attacker.picture, 1),
    "large picture": (Attacker.large_picture, 0.25),
    "torn picture": (Attacker.torn_picture, 0.25),
    "remote picture": (Attacker.remote_picture, 1),
    "slow Markdown": (Attacker.slow_markdown, 0.5),
    "leave": (Attacker.leave, 6),
    "not HTTP": (Attacker.not_http, 3),
}


def _large_file(color: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4_000, 4_000), color).save(file, "PNG")
    return file.getvalue()


def _data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def main(port: int, seed: int, seconds: float) -> None:
    attacker = Attacker(port, seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        attacker.attack()
        attacker.rest()
    print(json.dumps({"counts": attacker.counts, "bad": attacker.bad}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
