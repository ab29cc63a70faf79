"""`python -m tests.hub.gguf.page`: writes the table of architectures of docs/models.md from rows and judgements."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlxserve.hub.gguf import actions
from mlxserve.hub.gguf.families import FAMILIES
from mlxserve.hub.gguf.family import COMMON_ACTIONS
from tests.hub.gguf.judge import JUDGED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- computed: python -m tests.hub.gguf.page -->", "<!-- end of the architectures -->"
WORDS = {
    actions.SwapPairs: "pairs swapped",
    actions.Plus: "norms less a number",
    actions.NegativeLog: "negative logarithm",
    actions.TensorPart: "split",
    actions.Interleave: "joined and interleaved",
    actions.GroupHeads: "heads reordered",
}


def table() -> str:
    """A line for each row of data: definition, actions, and how far llama.cpp's answers are."""
    judged = json.loads(JUDGED.read_text(encoding="utf-8"))
    lines = ["| Architecture | Definition | Actions on tensors | Off |", "|---|---|---|---|"]
    for name, rules in sorted(FAMILIES.items()):
        kinds = {type(each) for chain in rules.actions.values() for each in chain}
        is_recurrent = any(key.startswith("ssm.") for key in rules.keys)
        kinds |= {type(each) for chain in COMMON_ACTIONS.values() for each in chain if is_recurrent}
        words = [word for kind, word in WORDS.items() if kind in kinds]
        if any(not isinstance(stems, str) for stems in rules.modules.values()):
            words.append("joined")
        cases = [case for case in judged if case.partition("/")[0] == name]
        off = max(judged[case]["off"] for case in cases)
        lines.append(
            f"| `{name}` | `{rules.model_type}` | {', '.join(words) or 'none'} | {off:.0e} |"
        )
    return "\n".join(lines)


def on_page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


if __name__ == "__main__":
    content = PAGE.read_text(encoding="utf-8")
    block = f"{BEGIN}\n\n{table()}\n\n{END}"
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    PAGE.write_text(re.sub(pattern, lambda _: block, content, flags=re.DOTALL), encoding="utf-8")
