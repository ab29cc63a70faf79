"""What is served of every definition of mlx-lm and mlx-vlm, found out by running a small model of each.

    uv run python -m tests.model.coverage          all, in processes of their own: ten minutes
    uv run python -m tests.model.coverage docs     only docs/models.md, from what was found

`architectures.json` (mlx-lm) and `architectures_of_mlx_vlm.json` have a small configuration of each definition,
whose shapes follow the libraries' own tests, and what came of it: `served` as "rows" or "by sequence", with
greedy tokens equal to the library's own, or `refused` with the sentence that users read.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxserve.system import machine

ROOT = Path(__file__).parents[2]
FILES = {
    "mlx-lm": Path(__file__).with_name("architectures.json"),
    "mlx-vlm": Path(__file__).with_name("architectures_of_mlx_vlm.json"),
}
CONDITIONS = Path(__file__).with_name("conditions.json")
PAGE = ROOT / "docs" / "models.md"
_TITLES = {"mlx-lm": "mlx-lm", "mlx-vlm": "mlx-vlm, of kinds that mlx-lm does not have"}
BEGIN, END = "<!-- computed: python -m tests.model.coverage -->", "<!-- end -->"
# Definitions without a small configuration here, and why.
_OWN_KERNELS = "calls Metal kernels of its own: not compared on a CPU, and probed when it is loaded"
_ANOTHER = "embeds, marks or classifies: no small configuration of it is known here, and it is probed when loaded"
LEFT_OUT = {
    "mlx-lm": {
        "bitnet": _OWN_KERNELS,
        "muse_spark": _OWN_KERNELS,
        "phi3small": "its answers in mlx-lm depend on how a prompt is cut",
        "deepseek_v41": "keeps what it has read in a form of its own (LayerCache)",
        "olmo": "needs the package `hf_olmo`; probed when it is loaded",
    },
    "mlx-vlm": {
        **dict.fromkeys(
            [
                *("clef", "colidefics3", "colqwen2_5", "d1_omni", "embedding_gemma2", "laya"),
                *("lfm2_colbert", "lfm2_encoder", "llama_nemotron_vl_embedding"),
                "qwen3_vl_embedding",
            ],
            _ANOTHER,
        ),
        **dict.fromkeys(["florence2", "nemotron_parse"], "an encoder with a decoder"),
        **dict.fromkeys(
            ["got", "limite", "molmo_point", "paddleocr_vl", "phi3_v"],
            "no small configuration of it is known here; probed when it is loaded",
        ),
    },
}
_CHILD = (sys.executable, "-m", "tests.model.coverage", "child")
_SECONDS = 600

Row = dict[str, Any]


def rows(library: str) -> dict[str, Row]:
    found: dict[str, Row] = json.loads(FILES[library].read_text(encoding="utf-8"))
    return found


def definitions_of(library: str) -> set[str]:
    """Names of the definitions that are installed; of mlx-vlm those of kinds that mlx-lm does not have."""
    from mlx_lm.utils import MODEL_REMAPPING

    modules = list(_folder("mlx_lm").glob("*.py"))
    if library == "mlx-lm":
        return {m.stem for m in modules if "class ModelArgs" in m.read_text(encoding="utf-8")}
    kinds = {init.parent.name for init in _folder("mlx_vlm").glob("*/__init__.py")}
    return kinds - {module.stem for module in modules} - MODEL_REMAPPING.keys()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("models")


# ---- a definition


def outcome(library: str, name: str, row: Row) -> Row:
    """{"served": ...} or {"refused": ...}. Raises AssertionError for answers that are wrong."""
    from mlxserve.core.errors import UnsupportedModel
    from tests.model import small_models

    try:
        return {"served": small_models.served(library, name, row["config"])}
    except (UnsupportedModel, small_models.NotBuilt) as error:
        return {"refused": str(error)}


def answer_lines(outcome_of: Callable[[str, str], Row]) -> None:
    """Write the outcomes of the definitions that stdin names, one on each line of stdout."""
    for line in sys.stdin:
        library, name = json.loads(line)
        sys.stdout.write(json.dumps(outcome_of(library, name)) + "\n")
        sys.stdout.flush()


def _outcome_of(library: str, name: str) -> Row:
    try:
        return outcome(library, name, rows(library)[name])
    except Exception as error:  # noqa: BLE001 - whatever a definition raises is what is wanted
        return {"wrong": f"{type(error).__name__}: {error}"}


class Children:
    """Runs definitions in a process, and in a new one after one that ended it.

    command: of a process that calls `answer_lines`
    """

    def __init__(self, command: Sequence[str] = _CHILD) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, library: str, name: str) -> Row:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([library, name]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                found: Row = json.loads(line)
                return found
        code = self._process.wait(_SECONDS)
        self.end()
        return {"refused": f"computing it ends the process ({code})"}

    def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(_SECONDS)
            self._process.stdout.close()
            self._process = None


# ---- the page


def section() -> str:
    """The part of docs/models.md that lists what was found."""
    parts = [_in_conditions()]
    parts += [text for library, title in _TITLES.items() for text in _of(library, title)]
    return "\n\n".join(parts)


def _in_conditions() -> str:
    """Count what came of the definitions in every condition."""
    lines = [
        "| In all eight conditions | Configurations | Right | Refused, with a reason | Not compared | Wrong |",
        "|---|---|---|---|---|---|",
    ]
    for library, found in json.loads(CONDITIONS.read_text(encoding="utf-8")).items():
        counts = [
            sum(kind in row for row in found.values())
            for kind in ("right", "refused", "uncompared", "wrong")
        ]
        lines.append(
            f"| {_TITLES[library]} | {len(found)} | " + " | ".join(map(str, counts)) + " |"
        )
    return "\n".join(lines)


def _of(library: str, title: str) -> Iterator[str]:
    found = rows(library)
    yield f"### {title}"
    yield f"**All rows of a step at once**: {_names(found, 'rows')}."
    yield f"**One sequence at a time**: {_names(found, 'by sequence')}."
    yield _refused(library)


def _names(found: Mapping[str, Row], served: str) -> str:
    return _listed(name for name, row in found.items() if row.get("served") == served)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name.split('.')[0]}`" for name in sorted(names, key=str.lower))


def _refused(library: str) -> str:
    found = rows(library)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in LEFT_OUT[library].items():
        by_reason[why].append(name)
    for name, row in found.items():
        if "refused" in row:
            by_reason[reason(name, row["refused"])].append(name)
    lines = ["| Refused, or not compared | Why |", "|---|---|"]
    lines += [f"| {_listed(names)} | {why} |" for why, names in sorted(by_reason.items())]
    return "\n".join(lines)


def reason(name: str, sentence: str) -> str:
    """A sentence without the model's name and figures, which differ from model to model."""
    text = re.sub(rf"\b{re.escape(name)}\b ?", "", sentence).removeprefix(": ")
    text = re.sub(
        r" \(by [^)]*\)|, so it cannot be served| Models that work: docs/models\.md\.", "", text
    )
    return text.strip()


def page() -> str:
    """docs/models.md with the section as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{after}"


def _write(library: str, found: Mapping[str, Row]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    FILES[library].write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments == ["child"]:
        machine.import_mlx_lm()
        answer_lines(_outcome_of)
        return
    children = Children()
    for library in FILES if arguments != ["docs"] else ():
        found = rows(library)
        for name, row in found.items():
            new = children.outcome(library, name)
            print(library, name, new)
            kept = {key: value for key, value in row.items() if key not in ("served", "refused")}
            found[name] = {**new, **kept}
        _write(library, found)
    children.end()
    PAGE.write_text(page(), encoding="utf-8")
    print("mlx-lm", version("mlx-lm"), "mlx-vlm", version("mlx-vlm"))


if __name__ == "__main__":
    main(sys.argv[1:])
