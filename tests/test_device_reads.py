"""Device arrays reach Python by `metal_kernels/reading.py` only, because other ways hide errors.

A reader is a call of `.item()` or `.tolist()`, of numpy's functions that copy or view what they are
given, or of `memoryview`. It is allowed where its argument is plainly made of Python values, or is
listed here: reviewed, and never a device array.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.reading import DeviceError, evaluate, read, view
from tests.device_errors import broken, in_a_thread

ROOT = Path(__file__).parent.parent
HELPER = "metal_kernels/reading.py"
ROOMS = ("metal_kernels", "mlxserve/model", "mlxserve/cache", "mlxserve/engine", "mlxserve/doctor")
METHODS = ("item", "tolist", "__array__", "__buffer__")
NUMPY = ("array", "asarray", "asanyarray", "ascontiguousarray", "copy", "frombuffer", "from_dlpack")
# file: expressions that are numpy arrays, bytes or `array.array`
REVIEWED: dict[str, set[str]] = {
    "metal_kernels/plain.py": {"sources", "targets"},
    "metal_kernels/x86/decodes.py": {"firsts", "tables.page_tables[:, 0]"},
    "metal_kernels/pool_rows.py": {"np.flatnonzero(np.diff(slots) != 1) + 1"},
    "metal_kernels/metal.py": {"pool"},  # just evaluated, and only its layout is looked at
    "metal_kernels/numpy_attention.py": {"rows[..., -4:]"},
    "metal_kernels/draft_units.py": {
        *("cut.starts", "np.flatnonzero(follows) + 1"),
        *("-(-lengths // size)", "follows"),
    },
    "metal_kernels/replay.py": {"self.table"},
    "metal_kernels/plans.py": {
        "numbers",  # of Python or numpy, on their way to the device
        *("sequences", "tables.query_starts", "tables.context_lens"),
    },
    "metal_kernels/tables.py": {
        *("breaks", "self.query_starts", "self.context_lens"),
        "self.query_starts[sequence:sequence + 2]",
    },
    "mlxserve/cache/kv.py": {"payload"},
    "mlxserve/model/batch.py": {"chunk.page_table"},
    "mlxserve/model/drafting/draft_pages.py": {
        "chunk.page_table",
        "b''.join((payload[end:] for payload in payloads))",
    },
    "mlxserve/model/drafting/drafter.py": {"batch.sample_rows"},
    "mlxserve/model/image_processor.py": {"value"},  # not mlx's
    "mlxserve/model/packed_states.py": {"payload[begin:end]"},
    "mlxserve/model/runner.py": {"batch.sample_rows"},
    "mlxserve/model/picture_batch.py": {"each.ids"},
    "mlxserve/model/sampler.py": {
        "outputs",
        "request.token_ids[:request.num_prompt]",
        "b''.join(masks.values())",
    },
}


def product() -> Iterator[tuple[str, str]]:
    """(path, text) of every file that may hold a device array."""
    for folder in ("metal_kernels", "mlxserve"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            if name == HELPER:
                continue
            if name.startswith(ROOMS) or ("mlx" in text and _imports_mlx(ast.parse(text))):
                yield name, text


def _imports_mlx(tree: ast.Module) -> bool:
    modules = {
        module
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    return any(module.split(".")[0] in ("mlx", "mlx_lm") for module in modules)


def _is_made_here(value: ast.expr) -> bool:
    """Whether it is a display of Python values, or what `read` or `view` returned."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("read", "view", "list", "tuple")
    return isinstance(value, ast.List | ast.Tuple | ast.ListComp | ast.Constant)


def readers(text: str) -> Iterator[tuple[int, str]]:
    """(line, what is read) of each reader whose argument is not plainly of Python values."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        value: ast.expr | None = None
        if isinstance(node.func, ast.Attribute):
            is_numpy = isinstance(node.func.value, ast.Name) and node.func.value.id == "np"
            if is_numpy and node.func.attr in NUMPY:
                value = node.args[0]
            elif not is_numpy and node.func.attr in METHODS:
                value = node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id == "memoryview":
            value = node.args[0]
        if value is not None and not _is_made_here(value):
            yield node.lineno, ast.unparse(value)


def test_arrays_are_read_by_one_function_only_and_no_reviewed_expression_is_stale() -> None:
    found = {name: list(readers(text)) for name, text in product()}
    assert len(found) > 100
    unknown = {
        name: [one for one in readings if one[1] not in REVIEWED.get(name, set())]
        for name, readings in found.items()
    }
    assert {name: readings for name, readings in unknown.items() if readings} == {}
    stale = {n: values - {value for _, value in found[n]} for n, values in REVIEWED.items()}
    assert not any(stale.values()), stale


def test_a_planted_read_is_found() -> None:
    for planted in [
        "ids = np.array(self.ids)",
        "ids = self.ids.tolist()",
        "best = mx.argmax(logits).item()",
        "rows = np.asarray(logits.astype(mx.float32), copy=False)",
        "look = memoryview(pool)",
        "rows = np.array(rows[0])",
        "[np.array(output) for output in outputs]",
    ]:
        assert len(list(readers(planted))) == 1, planted


@pytest.mark.parametrize(
    "harmless", ["np.array([1, 2])", "read(ids).tolist()", "np.array([e.end for e in chunks])"]
)
def test_values_of_python_are_no_read(harmless: str) -> None:
    assert list(readers(harmless)) == []


def read_broken(reader: Callable[[mx.array], object]) -> None:
    reader(broken() + 1)


def test_an_error_of_the_device_is_raised_and_not_read_as_numbers() -> None:
    for reader in (read, view, evaluate):
        with pytest.raises(DeviceError, match=r"the device failed to compute an array: .*Inverse"):
            in_a_thread(partial(read_broken, reader))


def test_a_read_is_a_copy_and_a_view_is_not() -> None:
    array = mx.arange(4)
    copy, own = read(array), view(array)
    assert copy.tolist() == own.tolist() == [0, 1, 2, 3]
    assert not np.shares_memory(copy, own)
