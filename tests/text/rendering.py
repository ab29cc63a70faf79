"""Renders probes in the process of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from mlxserve.text.probes import Probe, RenderEach
from mlxserve.text.template_worker import TemplateWorker


@cache
def worker() -> TemplateWorker:
    return TemplateWorker()


def renderer(template: str) -> RenderEach:

    def render_each(probes: Sequence[Probe]) -> list[str | None]:
        return worker().render_each(
            [
                {
                    "chat_template": template,
                    "conversations": [probe.messages],
                    "tools": probe.tools,
                    "documents": None,
                    "add_generation_prompt": True,
                    **(probe.variables or {}),
                }
                for probe in probes
            ]
        )

    return render_each
