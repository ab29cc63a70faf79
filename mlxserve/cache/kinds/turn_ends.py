"""Where another prompt will probably continue a request's prompt."""

from __future__ import annotations

from mlxserve.request import LiveRequest

TURN_END = 16  # tokens: "<|im_start|>assistant\\n<think>\\n" and the like


def likely_ends(request: LiveRequest, page_size: int) -> set[int]:
    """Return the two numbers of pages after which other prompts will probably continue.

    The same prompt again continues before its last token. The next turn of a conversation continues at
    least `TURN_END` tokens before the end: templates end a prompt with a marker that the next turn omits.
    """
    end = request.prefill_end
    return {max(0, end - 1) // page_size, max(0, end - TURN_END) // page_size}
