"""Small exports of chats, as ChatGPT and Open WebUI write them."""

from __future__ import annotations

from typing import Any

PNG = "data:image/png;base64,iVBORw0KGgo="


def chatgpt_node(key: str, parent: str | None, role: str, *parts: Any, **message: Any) -> Any:
    content = message.pop("content", {"content_type": "text", "parts": list(parts)})
    said = {"author": {"role": role}, "content": content, "create_time": 1.7e9, **message}
    return key, {"id": key, "parent": parent, "message": said}


def chatgpt(*nodes: Any, current: str = "a2") -> dict[str, Any]:
    """A chat of conversations.json; without nodes one question with two answers."""
    some = nodes or (
        ("root", {"id": "root", "parent": None, "message": None}),
        chatgpt_node("s", "root", "system", ""),
        chatgpt_node("q", "s", "user", "Why is the sky blue?"),
        chatgpt_node(
            "t",
            "q",
            "assistant",
            content={"content_type": "thoughts", "thoughts": [{"content": "Air."}]},
        ),
        chatgpt_node("a1", "t", "assistant", "Because of air.", metadata={"model_slug": "gpt-5"}),
        chatgpt_node("a2", "q", "assistant", "Rayleigh.", metadata={"model_slug": "gpt-5"}),
    )
    return {
        "title": "Blue sky",
        "create_time": 1_700_000_000.5,
        "update_time": 1_700_000_100.0,
        "mapping": dict(some),
        "current_node": current,
    }


def open_webui(**messages: Any) -> dict[str, Any]:
    """A chat of Open WebUI's export; without messages one question and its answer."""
    some = messages or {
        "q": {
            "role": "user",
            "parentId": None,
            "content": "What is this?",
            "files": [{"type": "image", "url": PNG, "name": "a.png"}],
            "timestamp": 1_700_000_000,
        },
        "a": {
            "role": "assistant",
            "parentId": "q",
            "content": '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> Hm.\n'
            "</details>\nA picture.",
            "model": "llama3.2",
            "timestamp": 1_700_000_001,
        },
    }
    history = {"messages": some, "currentId": list(some)[-1]}
    chat = {"title": "A picture", "history": history, "params": {"system": "Be brief."}}
    times = {"created_at": 1_700_000_000, "updated_at": 1_700_000_002}
    return {"id": "x", "title": "A picture", "chat": chat, **times}
