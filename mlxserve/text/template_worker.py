"""TemplateWorker: what a helper process does with chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import chat_template_utils


class TemplateWorker:
    """Compiles and renders templates. Nothing else is in its process that it could block."""

    def render(self, arguments: Mapping[str, Any]) -> str:
        """`arguments`: those of transformers' `render_jinja_template`. Raises what the template does."""
        texts, _ = chat_template_utils.render_jinja_template(**arguments)
        return str(texts[0])

    def literal_text(self, template: str) -> str:
        """The text that a template itself contains: control tokens in it are the template's own."""
        return str(chat_template_utils._get_template_literal_text(template))
