"""Files in data: URLs."""

from __future__ import annotations

import base64
import binascii

from mlxserve.core.errors import InvalidRequest

_URL_SAFE = str.maketrans("-_", "+/")


def data_url(content: str, media_type: str = "") -> str:
    """Make a data URL of bare base64."""
    return f"data:{media_type};base64,{content}"


def file_of_data_url(url: str) -> bytes:
    """Decode a data URL. Raises InvalidRequest, whose message ends a sentence about the file."""
    parameters, comma, text = url.partition(",")
    if not comma or not parameters.rstrip().lower().endswith(";base64"):
        raise InvalidRequest('is in a data: URL without ";base64," before its content')
    text = "".join(text.split()).translate(_URL_SAFE).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("is not valid base64") from error
