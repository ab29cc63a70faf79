"""Every definition that is served, in eight conditions, through the library that users call.

`coverage.py` asks whether a definition is served. Here its small model is served as users have it: with the
product's own layout of memory, its kinds of cache, its disk and its restarts. The greedy tokens must be those of
the library that defines it.

    uv run pytest -m conditions                    all
    uv run python -m tests.model.conditions        each in a process that may end; goes on where it stopped
    uv run python -m tests.model.conditions again  from the beginning

What was found is kept in `conditions.json`, and `python -m tests.model.coverage docs` counts it in docs/models.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mlxserve.system import machine
from mlxserve.system.files import replace_file
from tests.model import coverage
from tests.model.coverage import Row

CONDITIONS = (
    "alone, in chunks of a page",
    "from the cache",
    "after a branch inside a prompt and inside an answer",
    "in a batch, in chunks across pages",
    "after a smaller and a larger cache",
    "preempted and computed again",
    "preempted and read from disk",
    "after a restart, from disk",
)
COMMAND = (sys.executable, "-m", "tests.model.conditions", "child")
_FEW_PAGES, _SOME_PAGES, _MANY_PAGES = 11, 40, 200
_ANOTHER = [11, 4, 23]  # tokens after which a prompt branches


@dataclass(frozen=True)
class Subject:
    """A definition with random weights, and what its library answers.

    folder: has its configuration, a tokenizer, and no weights
    build: makes the model, with the same weights each time
    oracle: the library's own greedy tokens after a prompt
    """

    folder: Path
    config: Mapping[str, Any]
    build: Callable[[], Any]
    oracle: Callable[[list[int]], list[int]]
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def expected(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self.oracle(prompt)
        return self._known[key]

    @contextmanager
    def served(self, **options: Any) -> Iterator[Any]:
        """An `LLM` of the folder, whose weights are those in memory."""
        from mlxserve import LLM, engine_part
        from mlxserve.model import load
        from tests.conftest import be_patient_with_the_disk
        from tests.model.small_models import PAGE_SIZE

        given = {"page_size": PAGE_SIZE, "max_num_seqs": 4, "disable_log_stats": True, **options}
        with pytest.MonkeyPatch.context() as changed:
            be_patient_with_the_disk(changed)
            # On the engine's thread: what mlx has not computed belongs to the thread that built it.
            changed.setattr(load, "read_model", lambda *_, **__: (self.build(), self.config))
            changed.setattr(engine_part, "try_first", lambda *_: None)
            with LLM(str(self.folder), **given) as llm:
                yield llm

    def check(self, llm: Any, condition: str, *prompts: list[int]) -> int:
        """Compare the answers to prompts that begin together; return how many of their tokens were cached."""
        from tests.model.small_models import GREEDY
        from tests.together import begun_together

        with begun_together(len(prompts)):
            outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
        llm.check()
        found = [list(output.token_ids) for output in outputs]
        expected = [self.expected(prompt) for prompt in prompts]
        assert found == expected, f"{condition}: {found} instead of {expected}"
        return sum(output.usage.cached_tokens for output in outputs)


def check_all(subject: Subject) -> None:
    """Raise AssertionError, which names the condition, unless `CONDITIONS` hold."""
    from tests.model.small_models import PAGE_SIZE, PROMPTS

    alone, cached, branched, together, resized, computed, swapped, restarted = CONDITIONS
    with subject.served(num_pages=_MANY_PAGES, max_num_batched_tokens=PAGE_SIZE) as llm:
        for prompt in PROMPTS:
            subject.check(llm, alone, prompt)
        assert subject.check(llm, cached, *PROMPTS) >= 3 * PAGE_SIZE, (
            f"{cached}: nothing was cached"
        )
        subject.check(llm, branched, *(branch for p in PROMPTS for branch in _branches(subject, p)))
    with subject.served(
        num_pages=_MANY_PAGES, max_num_batched_tokens=37, page_aligned_scheduling=False
    ) as llm:
        subject.check(llm, together, *PROMPTS)
        for num_pages in (_SOME_PAGES, _MANY_PAGES):
            llm.resize_cache(num_pages)
            subject.check(llm, resized, *PROMPTS)
    disk = {"disk_cache_dir": str(subject.folder / "pages"), "disk_cache_size": 0.1}
    for condition, options in (
        (computed, {"preemption_mode": "recompute"}),
        (swapped, {"preemption_mode": "swap", **disk}),
    ):
        with subject.served(num_pages=_FEW_PAGES, **options) as llm:
            subject.check(llm, condition, *([number, *PROMPTS[0][:43]] for number in range(4)))
            stats = llm.stats().scheduler
        assert stats.num_preemptions > 0, f"{condition}: nothing was preempted"
        assert (stats.swapped_tokens > 0) == (condition == swapped), f"{condition}: {stats}"
    with subject.served(num_pages=_MANY_PAGES, **disk) as llm:
        num_found = subject.check(llm, restarted, *([n, *PROMPTS[0][:43]] for n in range(4)))
    assert num_found >= PAGE_SIZE, f"{restarted}: nothing was found"


def _branches(subject: Subject, prompt: list[int]) -> Iterator[list[int]]:
    """Prompts that leave the cached one: before its end, just after it, and inside its answer."""
    yield prompt[:-2] + _ANOTHER
    yield prompt + _ANOTHER
    yield prompt + subject.expected(prompt)[:9] + _ANOTHER


# ---- a definition


@contextmanager
def subject_of(library: str, name: str) -> Iterator[Subject]:
    """The definition as a subject. Raises NotBuilt."""
    from mlxserve.hub.embedded import model_path
    from tests.model import small_models

    config = coverage.rows(library)[name]["config"]
    config = {"model_type": name.split(".")[0], "max_position_embeddings": 512, **config}

    def build() -> Any:
        if library == "mlx-lm":
            return small_models.build(name, config)[0]
        return small_models.build_of_mlx_vlm(config)[0]

    if library == "mlx-lm":
        model = build()

        def oracle(prompt: list[int]) -> list[int]:
            return small_models.dense_answer(model, prompt)
    else:
        _, oracle = small_models.build_of_mlx_vlm(config)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path() / file, folder / file)
        yield Subject(folder, config, build, oracle)


def outcome(library: str, name: str) -> Row:
    """{"right": how many conditions}, {"refused": why}, {"uncompared": why}, or {"wrong": what}."""
    from mlxserve.core.errors import UnsupportedModel
    from tests.model.small_models import CONTRADICTS_ITSELF, NotBuilt

    if name in CONTRADICTS_ITSELF:
        return {"uncompared": f"the answers of {library} itself depend on how a prompt is cut"}
    try:
        with subject_of(library, name) as subject:
            check_all(subject)
    except (UnsupportedModel, NotBuilt) as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a definition raises is what is wanted
        return {"wrong": f"{type(error).__name__}: {error}"}
    return {"right": len(CONDITIONS)}


# ---- what was found


def versions() -> str:
    """What a finding depends on besides the product."""
    return f"mlx-lm {version('mlx-lm')}, mlx-vlm {version('mlx-vlm')}"


def found() -> dict[str, dict[str, Row]]:
    """What was found by library and definition."""
    content: dict[str, dict[str, Row]] = json.loads(coverage.CONDITIONS.read_text(encoding="utf-8"))
    return content


def main(arguments: list[str]) -> None:
    if arguments == ["child"]:
        machine.import_mlx_lm()
        import mlx.core as mx

        mx.disable_compile()
        coverage.answer_lines(outcome)
        return
    children = coverage.Children(COMMAND)
    kept = {} if arguments == ["again"] or not coverage.CONDITIONS.exists() else found()
    for library in coverage.FILES:
        rows = kept.setdefault(library, {})
        for name in coverage.rows(library):
            if rows.get(name, {}).get("with") == versions() and "wrong" not in rows[name]:
                continue
            rows[name] = {**children.outcome(library, name), "with": versions()}
            print(library, name, rows[name], flush=True)
            _write(kept)
    children.end()


def _write(kept: Mapping[str, Mapping[str, Row]]) -> None:
    """Write one row a line, in the order of the definitions, so that a change is seen where it is."""
    libraries = (
        f"{json.dumps(library)}: {{\n"
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(rows[name])}"
            for name in coverage.rows(library)
            if name in rows
        )
        + "\n}"
        for library, rows in kept.items()
    )
    replace_file(coverage.CONDITIONS, ("{\n" + ",\n".join(libraries) + "\n}\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
