"""Warnings about a request that is answered all the same: a header on the reply, a log line once.

ignored unknown fields: top_kk; left out: image; the model 'gpt-4o' is not served here; NAME is
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice

from starlette.requests import Request

logger = logging.getLogger(__name__)

WARNING_HEADER = "x-mlxserve-warning"
FITTED = "fitted to the chat template"
_MAX_NAMES_SHOWN = 8
_MAX_REMEMBERED = 1_000
_MAX_LENGTH = 1_000  # characters of the header
_KEY = "mlxserve.warnings"  # in a request's scope


def warn(request: Request, *sentences: str | None) -> None:
    """Put these sentences into the header of the reply to this request."""
    texts = request.scope.setdefault(_KEY, [])
    texts += [_ascii(text) for text in sentences if text and _ascii(text) not in texts]


def reply_header(request: Request, unknown_fields: Iterable[str] = ()) -> Mapping[str, str]:
    """The warning header of the reply to this request."""
    return warnings_of(request).header(request, unknown_fields)


def warnings_of(request: Request) -> Warnings:
    """The app's warnings."""
    warnings: Warnings = request.app.state.warnings
    return warnings


class Warnings:
    """Logs each warning once. One per app, in its `state.warnings`."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, request: Request, unknown_fields: Iterable[str] = ()) -> Mapping[str, str]:
        """Build the reply's header from these fields and from the sentences of `warn`."""
        shown = [_shown(name) for name in unknown_fields][:_MAX_NAMES_SHOWN]
        self.log("Request fields without effect", shown)
        sentences = request.scope.get(_KEY, [])
        # The tokenizer logs those about its template.
        others = [text for text in sentences if not text.startswith(FITTED)]
        self.log("Requests are answered, but", others)
        ignored = f"ignored unknown fields: {', '.join(shown)}" if shown else ""
        text = "; ".join(filter(None, (ignored, *sentences)))
        return {WARNING_HEADER: text[:_MAX_LENGTH].strip()} if text else {}

    def log(self, title: str, texts: Iterable[str]) -> None:
        """Log texts that were not logged before, a few at a time: a header can hold 30,000 names."""
        new = list(islice((text for text in texts if text not in self._logged), _MAX_NAMES_SHOWN))
        if new and len(self._logged) < _MAX_REMEMBERED:
            self._logged.update(new)
            logger.warning("%s: %s", title, ", ".join(new))


def _shown(name: str) -> str:
    """A name as a header can hold it: quoted if a space is at either end."""
    text = _ascii(name)[:64]
    return text if text and text == text.strip() else f"'{text}'"


def _ascii(text: str) -> str:
    return text.encode("unicode_escape").decode()
