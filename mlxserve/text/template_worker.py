"""TemplateWorker: what a helper process does with chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.deferred_packages import defer_packages


class TemplateWorker:
    """Compiles and renders templates. Nothing else is in its process that it could block."""

    def __init__(self) -> None:
        defer_packages()
        from transformers.utils import chat_template_utils

        self._transformers: Any = chat_template_utils

    def render(self, arguments: Mapping[str, Any]) -> str:
        """`arguments`: those of transformers' `render_jinja_template`. Raises what the template does."""
        texts, _ = self._transformers.render_jinja_template(**arguments)
        return str(texts[0])

    def literal_text(self, template: str) -> str:
        """The text that a template itself contains: control tokens in it are the template's own."""
        return str(self._transformers._get_template_literal_text(template))

    def render_each(self, arguments: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """As `render` for each of them; None for one at which the template raises."""
        return [self._rendered(each) for each in arguments]

    def variables(self, template: str) -> list[str]:
        """The names that a template reads, without jinja's own."""
        compiled = self._transformers._compile_jinja_template(template)
        names = self._transformers._get_template_variables(template)
        return sorted(names - compiled.environment.globals.keys())

    def _rendered(self, arguments: Mapping[str, Any]) -> str | None:
        try:
            return self.render(arguments)
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return None
