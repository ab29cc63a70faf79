"""Where another prompt will probably continue a request's prompt."""

from __future__ import annotations

from mlxserve.request import LiveRequest

TURN_END = 16  # tokens: "<|im_start|>assistant\\n<think>\\n" and the like


def ends_of(request: LiveRequest, page_size: int) -> set[int]:
    """Return numbers of pages of its prompt: before the last token, where the same prompt goes on, and at
    least `TURN_END` tokens before its end, where the next turn of a conversation goes on: templates end
    a prompt with a marker that the next turn leaves out."""
    end = request.prefill_end
    return {max(0, end - 1) // page_size, max(0, end - TURN_END) // page_size}
