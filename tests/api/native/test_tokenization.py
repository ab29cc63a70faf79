from __future__ import annotations

from starlette.testclient import TestClient

from tests.api.fake_chat import FakeChat

HELLO = [{"role": "user", "content": "Hi"}]


def test_text_becomes_tokens_and_back(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"model": "fake", "prompt": "Hé"})
    assert reply.json() == {"count": 3, "max_model_len": 1_000, "tokens": [72, 195, 169]}
    back = client.post("/detokenize", json={"tokens": reply.json()["tokens"]})
    assert back.json() == {"prompt": "Hé"}


def test_a_conversation_is_rendered_as_a_completion_would_render_it(
    client: TestClient, chat: FakeChat
) -> None:
    asked = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    client.post("/v1/chat/completions", json=asked)
    assert tokens == chat.submitted[0].prompt
    assert chat.rendered[0].kwargs == {"add_generation_prompt": True, "enable_thinking": False}


def test_an_empty_text_has_no_tokens(client: TestClient) -> None:
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_bad_value_is_refused_with_its_fields_name(client: TestClient) -> None:
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
    ]:
        reply = client.post(path, json=body)
        assert reply.status_code == 400, path
        assert reply.json()["error"]["param"] == param, path


def test_another_model_is_a_404_if_names_are_strict(
    client: TestClient, strict_client: TestClient
) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert strict_client.post(path, json={**body, "model": "gpt-4"}).status_code == 404
        reply = client.post(path, json={**body, "model": "gpt-4"})
        assert "'gpt-4' is not served here" in reply.headers["x-mlxserve-warning"]


def test_unknown_fields_are_named(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"prompt": "x", "add_special_tokenz": True})
    assert "add_special_tokenz" in reply.headers["x-mlxserve-warning"]
