"""StreamDecoder: decodes token ids to text as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_HELD = 16  # ids without text, before they are settled
_MAX_BYTES = 4  # bytes of a character
# Decoders emit this for bytes that do not (yet) form a character.
_REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Decodes a growing list of token ids piece by piece, never splitting a character.

        ids    [ ......... | prefix .... | read ......... ]
                            ^ _prefix     ^ _read          ids after _read are decoded together
                                                           with the few ids before them

    The pieces concatenate to the decoding of all ids. vLLM and text-generation-inference use the
    same window; it makes the work per token constant. Ids that complete no character (special ones,
    bytes that are no text) would make it grow: those are settled once there are _MAX_HELD of them.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], texts: dict[int, str] | None = None
    ) -> None:
        """`texts` caches single tokens' texts across streams, which halves the decoding work."""
        self._decode = decode
        self._texts = {} if texts is None else texts
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        # Text of ids[_prefix:_read].
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is incomplete."""
        self._ids.extend(token_ids)
        text, end = self._decode(self._ids[self._prefix :]), len(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown):
            if end - self._read <= _MAX_HELD:
                return ""
            text, end = self._settled()
        piece = text[len(self._shown) :]
        if not piece:
            del self._ids[self._read : end]  # they have no text
            return ""
        self._prefix = self._read
        self._read = end
        self._shown = self._text_of(self._ids[self._prefix : self._read])
        return piece

    def _settled(self) -> tuple[str, int]:
        """Return the text that later ids cannot change, and its number of ids.

        A character has four bytes at most. If no character is complete after any of the last four
        ids, all before them are bytes that belong to none.
        """
        for num_open in range(_MAX_BYTES + 1):
            end = len(self._ids) - num_open
            text = self._decode(self._ids[self._prefix : end])
            if not text.endswith(_REPLACEMENT):
                break
        return text, end

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) != 1:
            return self._decode(token_ids)
        [token] = token_ids
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode(token_ids)
        return text

    def finish(self) -> str:
        """Return the remaining text. Bytes that never formed a character become U+FFFD."""
        text = self._decode(self._ids[self._prefix :])[len(self._shown) :]
        self._prefix = self._read = len(self._ids)
        self._shown = ""
        return text
