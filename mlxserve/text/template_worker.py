"""TemplateWorker: the helper process that renders chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxserve.system.deferred_packages import defer, defer_packages
from mlxserve.text.template_syntax import literals_of


class TemplateWorker:
    """Compiles and renders templates. Nothing else is in its process that it could block."""

    def __init__(self) -> None:
        # What renders needs neither all of transformers nor its utilities: 0.35 s of CPU instead of
        # 0.85, and 13 MB less.
        defer_packages()
        defer("transformers.utils", {"import_utils": None, "logging": None})
        from transformers.utils import chat_template_utils

        self._transformers: Any = chat_template_utils
        self._given: set[int] = set()  # ids of the lists that a template was given
        # By these transformers copies what a template sees, down to the innermost list.
        for name in ("_plain_template_data", "_alias_reasoning_fields"):
            setattr(
                chat_template_utils, name, self._remembering(getattr(chat_template_utils, name))
            )

    def render(self, arguments: Mapping[str, Any]) -> str:
        """`arguments`: those of transformers' `render_jinja_template`.

        Raises the template's errors.
        """
        compiled = self._transformers._compile_jinja_template(arguments["chat_template"])
        self._let_own_lists_grow(compiled.environment)
        self._given.clear()
        texts, _ = self._transformers.render_jinja_template(**arguments)
        return str(texts[0])

    def literal_text(self, template: str) -> str:
        """Return a template's literal text: control tokens in it are the template's own."""
        return str(self._transformers._get_template_literal_text(template))

    def render_each(self, arguments: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Render each; None for one at which the template raises."""
        return [self._rendered(each) for each in arguments]

    def variables(self, template: str) -> dict[str, list[str]]:
        """Map the names that a template reads, except jinja's, to the words compared with them."""
        environment = self._transformers._compile_jinja_template(template).environment
        names = self._transformers._get_template_variables(template) - environment.globals.keys()
        tree = environment.parse(template)
        return {name: literals_of(tree, name) for name in sorted(names)}

    def _remembering(self, copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def remembered(value: Any) -> Any:
            copied = copy(value)
            if isinstance(copied, list):
                self._given.add(id(copied))
            return copied

        return remembered

    def _let_own_lists_grow(self, environment: Any) -> None:
        """Allow changes of a template's own lists (Kimi), which the sandbox would refuse."""
        if "is_safe_attribute" in vars(environment):
            return
        is_safe = environment.is_safe_attribute

        def is_safe_attribute(owner: Any, name: str, value: Any) -> bool:
            is_own = type(owner) is list and id(owner) not in self._given
            return (name in ("append", "pop") and is_own) or bool(is_safe(owner, name, value))

        environment.is_safe_attribute = is_safe_attribute

    def _rendered(self, arguments: Mapping[str, Any]) -> str | None:
        try:
            return self.render(arguments)
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return None
