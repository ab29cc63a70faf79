"""Requests as Open WebUI, Continue and Zed send them: the shapes of their sources, in small."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA},
}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """A call as programs without ids send it back."""
    return {"function": {"name": name, "arguments": arguments}}


# From an earlier chat with tools: `index` and `id` are those of the stream, results have no name.
OPEN_WEBUI: dict[str, Any] = {
    "model": "fake:latest",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a.py"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "I read it.",
            "tool_calls": [{"index": 0, "id": "call_abc", **called("read", path="a.py")}],
        },
        {"role": "tool", "content": "x = 1", "tool_call_id": "call_abc"},
        {"role": "user", "images": [PIXEL]},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And b.py"},
    ],
    "stream": True,
    "tools": [TOOL],
    "options": {"temperature": 0.5, "num_ctx": 8192, "num_predict": 100, "num_gpu": 99, "stop": []},
    "keep_alive": "5m",
    "metadata": {"chat_id": "c"},
}
# A context length is always sent; tools only where the user's message is the last one.
CONTINUE_CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "You are an editor."},
        {"role": "user", "content": "Read a.py"},
        {"role": "assistant", "content": "", "tool_calls": [called("read", path="a.py")]},
        {"role": "tool", "content": "x = 1"},
    ],
    "options": {"num_predict": 64, "num_ctx": 800, "stop": ["\n\n\n"], "use_mmap": True},
    "keep_alive": 1800,
    "stream": True,
}
CONTINUE_COMPLETION: dict[str, Any] = {
    "model": "fake",
    "prompt": "<|fim_prefix|>x = <|fim_suffix|>\n<|fim_middle|>",
    "raw": True,
    "options": {"temperature": 0.01, "num_predict": 64, "num_ctx": 800, "stop": ["<|fim_prefix|>"]},
    "keep_alive": 1800,
    "stream": True,
}
CONTINUE_SHOW = {"name": "fake"}
CONTINUE_EMBED = {"model": "fake", "input": ["a", "b"]}
# Nulls for everything that is not set; results name their tool.
ZED: dict[str, Any] = {
    "model": "fake:latest",
    "messages": [
        {"role": "system", "content": "You are an editor."},
        {"role": "user", "content": "Read both"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called("read", path="a.py"), called("list", path=".")],
            "thinking": None,
        },
        {"role": "tool", "tool_name": "list", "content": "a.py"},
        {"role": "tool", "tool_name": "read", "content": "x = 1"},
    ],
    "stream": True,
    "keep_alive": -1,
    "options": {
        "num_ctx": 800,
        "num_predict": None,
        "stop": None,
        "temperature": 1.0,
        "top_p": None,
    },
    "tools": [TOOL, {"type": "function", "function": {**TOOL["function"], "description": None}}],
    "think": False,
}
