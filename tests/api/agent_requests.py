"""Requests as coding agents send them, in small: the shapes of their recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGE = "data:image/png;base64,AA"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def _function(name: str, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **members}}


def _call(call_id: str, name: str = "read") -> dict[str, Any]:
    function = {"name": name, "arguments": '{"path":"a.py"}'}
    return {"id": call_id, "type": "function", "function": function}


def _text(text: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **members}


_MARK = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 32_000,
    "system": [
        _text("x-anthropic-billing-header: cc_version=2.1.332; cch=a1b2;"),
        _text("You are Claude Code.", **_MARK),
        _text("Be brief.", **_MARK),
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "defer_loading": True},
        {"name": "mcp__x__y", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "u"},
    "stream": True,
}
_USER = {
    "role": "user",
    "content": [_text("<system-reminder>r</system-reminder>"), _text("Fix it")],
}
LATE = {"role": "system", "content": "# Environment\nOn Linux."}


def _thought(signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "", "signature": signature}


def use(use_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": use_id, "name": "Read", "input": {"path": "a.py"}}


def result(use_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use_id, "content": content, **_MARK}


_PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
_CODEX: dict[str, Any] = {
    "model": "gpt-5-codex",
    "instructions": "You are Codex.",
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "service_tier": "priority",
}


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


_BEGUN = [
    _item("developer", "<permissions>all</permissions>"),
    _item("user", "<environment_context>e</environment_context>"),
    _item("user", "Fix it"),
]


def _called(call_id: str) -> dict[str, Any]:
    arguments = '{"path":"a.py"}'
    return {
        "type": "function_call",
        "name": "exec_command",
        "arguments": arguments,
        "call_id": call_id,
    }


def _output(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Claude Code: the first request": (MESSAGES, {**CLAUDE, "messages": [_USER, LATE]}),
    "Claude Code: two calls, an image, steering and a reminder": (
        MESSAGES,
        {
            **CLAUDE,
            "messages": [
                _USER,
                LATE,
                {
                    "role": "assistant",
                    "content": [
                        _thought("EqQBCg"),
                        _text("I read."),
                        use("toolu_1"),
                        use("toolu_2"),
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        result("toolu_1", [_PICTURE]),
                        result("toolu_2", "text"),
                        _text("Stop, do this instead"),
                    ],
                },
                {"role": "system", "content": "A reminder."},
            ],
        },
    ),
    "Claude Code: what other servers' tools did": (
        MESSAGES,
        {
            **CLAUDE,
            "messages": [
                _USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {
                            "type": "web_search_tool_result",
                            "tool_use_id": "s",
                            "content": [{"a": 1}],
                        },
                        _text("Found."),
                    ],
                },
                {"role": "user", "content": [result("gone", [{"type": "tool_reference"}])]},
            ],
        },
    ),
    "Codex: the first request": (RESPONSES, {**_CODEX, "input": _BEGUN}),
    "Codex: a loop with reasoning that it does not read": (
        RESPONSES,
        {
            **_CODEX,
            "input": [
                *_BEGUN,
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
                _item("assistant", "I read."),
                _called("call_a"),
                _called("call_b"),
                _output("call_a", "text"),
                _output("call_b", [{"type": "input_image", "image_url": IMAGE}]),
                {
                    "type": "custom_tool_call",
                    "call_id": "c",
                    "name": "apply_patch",
                    "input": "*** Begin",
                },
                {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
                _item("user", "Go on"),
            ],
        },
    ),
    "Codex: items of a session with another model": (
        RESPONSES,
        {
            **_CODEX,
            "input": [
                *_BEGUN,
                {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec"}},
                {"type": "web_search_call", "id": "w", "status": "completed", "action": {}},
                {"type": "compaction", "encrypted_content": "x"},
                {"type": "item_reference", "id": "msg_gone"},
                _item("user", "Go on"),
            ],
        },
    ),
    "opencode: a loop, reasoning under its short name": (
        CHAT,
        {
            "model": "local",
            "max_tokens": 32_000,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [_function("read", description="Reads."), _function("bash")],
            "messages": [
                {"role": "system", "content": "You are opencode."},
                {"role": "user", "content": "Fix it"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning": "First read.",
                    "tool_calls": [_call("call_1"), _call("call_2")],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "text"},
                {"role": "tool", "tool_call_id": "call_2", "content": "text"},
                {"role": "user", "content": [_text("No."), _text("Stop.")]},
            ],
        },
    ),
    "opencode: a title": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You generate titles."},
                {"role": "user", "content": "Generate a title:"},
                {"role": "user", "content": '"Fix it"'},
            ]
        },
    ),
    "Cline: texts as parts and an image of an earlier turn": (
        CHAT,
        {
            "model": "gpt-4o",
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": "You are Cline."},
                {
                    "role": "user",
                    "content": [
                        _text("<task>Look</task>"),
                        {"type": "image_url", "image_url": {"url": IMAGE}},
                    ],
                },
                {"role": "assistant", "content": "<read_file><path>a</path></read_file>"},
                {"role": "user", "content": [_text("[read_file] Result:"), _text("text")]},
            ],
        },
    ),
    "Zed: an aborted answer and cut-off arguments": (
        CHAT,
        {
            "model": "LOCAL:latest",
            "parallel_tool_calls": False,
            "tools": [_function("edit", description=None)],
            "messages": [
                {"role": "system", "content": "You are in Zed."},
                {"role": "user", "content": "Fix it"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "edit", "arguments": '{"path": "a'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "Canceled"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "Again"},
            ],
        },
    ),
    "aider: examples before the question and a reminder after it": (
        CHAT,
        {
            "model": "openai/local",
            "temperature": 0,
            "messages": [
                {"role": "system", "content": "Act as an expert."},
                {"role": "user", "content": "Example"},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "a.py"},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "Fix it"},
                {"role": "system", "content": "Use SEARCH/REPLACE blocks."},
            ],
        },
    ),
}
