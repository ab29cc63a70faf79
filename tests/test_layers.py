"""The house as a graph: which room may import which. Computed from the source, held against a table.

A room is a folder, or a file that lies beside folders. The rows run from the ground up: a room may
import only rooms above it in the table, so no arrow runs backward. A new arrow fails, and so does
an entry that the source no longer needs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("metal_kernels", "mlxserve", "tui")

ARROWS: dict[str, str] = {
    "metal_kernels": "",
    "tui/sanitise": "",
    "tui/loopback": "",
    "tui/home": "",
    "tui/languages": "",
    "tui/commands": "",
    "tui/background": "",
    "tui/opening": "tui/background",
    "tui/talk": "tui/loopback tui/sanitise tui/home",
    "tui/tools": "tui/loopback tui/sanitise",
    "tui/chat": "tui/sanitise tui/talk tui/tools",
    "tui/paint": "tui/languages tui/sanitise",
    "tui/widgets": ("tui/sanitise tui/commands tui/opening tui/talk tui/tools tui/chat tui/paint"),
    "tui/engine": "tui/sanitise tui/talk tui/chat",
    "tui/actions": "tui/sanitise tui/talk tui/tools tui/chat tui/paint tui/widgets",
    "tui": (
        "tui/home tui/commands tui/background tui/opening tui/talk tui/tools tui/chat tui/paint "
        "tui/widgets tui/engine tui/actions"
    ),
    "mlxserve/version": "",
    "mlxserve/errors": "",
    "mlxserve/files": "",
    "mlxserve/terminal_text": "",
    "mlxserve/sampling_params": "mlxserve/errors",
    "mlxserve/stats": "",
    "mlxserve/option": "mlxserve/errors",
    "mlxserve/config": "metal_kernels mlxserve/errors mlxserve/option",
    "mlxserve/deferred_packages": "",
    "mlxserve/blas": "mlxserve/errors",
    "mlxserve/memory_groups": "",
    "mlxserve/machine": "mlxserve/errors mlxserve/memory_groups mlxserve/deferred_packages mlxserve/blas",
    "mlxserve/metal_memory": "mlxserve/errors mlxserve/machine",
    "mlxserve/forward_work": "",
    "mlxserve/pauses": "",
    "mlxserve/gguf": "metal_kernels mlxserve/errors mlxserve/files",
    "mlxserve/cache/groups": "",
    "mlxserve/hub": (
        "mlxserve/errors mlxserve/files mlxserve/sampling_params mlxserve/config mlxserve/gguf "
        "mlxserve/cache/groups"
    ),
    "mlxserve/mini/__init__": "",
    "mlxserve/helpers": "mlxserve/errors mlxserve/pauses",
    "mlxserve/door": "mlxserve/errors mlxserve/helpers",
    "mlxserve/images": "mlxserve/errors mlxserve/helpers mlxserve/door",
    "mlxserve/request": "mlxserve/sampling_params mlxserve/config mlxserve/images",
    "mlxserve/text/well_formed": "",
    "mlxserve/text/parsing": "mlxserve/text/well_formed",
    "mlxserve/text/costs": "",
    "mlxserve/text/signature": "",
    "mlxserve/text/conversation": "mlxserve/errors mlxserve/images",
    "mlxserve/text/probes": "",
    "mlxserve/text/controls": "mlxserve/text/probes",
    "mlxserve/text/abilities": "mlxserve/text/probes mlxserve/text/controls",
    "mlxserve/text/fitting": (
        "mlxserve/text/parsing mlxserve/text/abilities mlxserve/text/conversation mlxserve/images"
    ),
    "mlxserve/text/templates": "mlxserve/helpers",
    "mlxserve/text/template_syntax": "",
    "mlxserve/text/template_worker": "mlxserve/deferred_packages mlxserve/text/template_syntax",
    "mlxserve/text/probing": (
        "mlxserve/text/probes mlxserve/text/controls mlxserve/text/abilities mlxserve/text/templates"
    ),
    "mlxserve/text/large_texts": "mlxserve/errors mlxserve/helpers mlxserve/text/templates",
    "mlxserve/text/stream_decoder": "",
    "mlxserve/text/tokenizer_files": "mlxserve/errors mlxserve/files",
    "mlxserve/text/tokenizer": (
        "mlxserve/errors mlxserve/text/parsing mlxserve/text/costs mlxserve/text/conversation "
        "mlxserve/text/controls mlxserve/text/abilities mlxserve/text/probing mlxserve/text/fitting "
        "mlxserve/text/templates mlxserve/text/large_texts mlxserve/text/stream_decoder mlxserve/text/tokenizer_files "
        "mlxserve/door"
    ),
    "mlxserve/text/large_text_worker": (
        "mlxserve/text/templates mlxserve/text/template_worker mlxserve/text/tokenizer"
    ),
    "mlxserve/text/deltas": (
        "mlxserve/sampling_params mlxserve/request mlxserve/text/parsing mlxserve/text/tokenizer"
    ),
    "mlxserve/text/guidance": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/pauses mlxserve/helpers mlxserve/text/parsing "
        "mlxserve/text/tokenizer mlxserve/door mlxserve/text/costs"
    ),
    "mlxserve/text/__init__": "",
    "mlxserve/cache/__init__": "",
    "mlxserve/cache/hashing": "",
    "mlxserve/cache/runs": "",
    "mlxserve/cache/children": "",
    "mlxserve/cache/pages": "mlxserve/cache/hashing mlxserve/cache/runs mlxserve/cache/children",
    "mlxserve/cache/layout": "metal_kernels",
    "mlxserve/cache/key_owners": "",
    "mlxserve/cache/kv": "metal_kernels mlxserve/errors mlxserve/cache/layout",
    "mlxserve/cache/layer_kv": (
        "metal_kernels mlxserve/cache/layout mlxserve/cache/key_owners mlxserve/cache/kv"
    ),
    "mlxserve/cache/window_kv": "mlxserve/cache/kv",
    "mlxserve/disk": "mlxserve/errors mlxserve/files mlxserve/pauses",
    "mlxserve/scheduler": (
        "mlxserve/errors mlxserve/stats mlxserve/config mlxserve/request mlxserve/forward_work "
        "mlxserve/cache/hashing mlxserve/cache/pages mlxserve/cache/groups mlxserve/images"
    ),
    "mlxserve/model": (
        "metal_kernels mlxserve/errors mlxserve/sampling_params mlxserve/stats mlxserve/config "
        "mlxserve/machine mlxserve/deferred_packages "
        "mlxserve/request mlxserve/forward_work mlxserve/gguf mlxserve/hub mlxserve/cache/layout "
        "mlxserve/cache/key_owners mlxserve/cache/kv mlxserve/cache/layer_kv "
        "mlxserve/cache/window_kv mlxserve/cache/groups mlxserve/images"
    ),
    "mlxserve/trial": (
        "mlxserve/version mlxserve/errors mlxserve/config mlxserve/files mlxserve/machine mlxserve/hub "
        "mlxserve/helpers mlxserve/model"
    ),
    "mlxserve/engine": (
        "mlxserve/errors mlxserve/machine mlxserve/stats mlxserve/request mlxserve/forward_work "
        "mlxserve/pauses mlxserve/door mlxserve/images mlxserve/metal_memory "
        "mlxserve/cache/pages mlxserve/disk mlxserve/disk mlxserve/scheduler mlxserve/model"
    ),
    "mlxserve/chat": (
        "mlxserve/errors mlxserve/files mlxserve/sampling_params mlxserve/request mlxserve/hub "
        "mlxserve/text/parsing mlxserve/text/costs mlxserve/text/conversation "
        "mlxserve/text/abilities mlxserve/text/fitting mlxserve/text/templates "
        "mlxserve/text/tokenizer mlxserve/text/deltas mlxserve/text/guidance "
        "mlxserve/engine mlxserve/door mlxserve/images"
    ),
    "mlxserve/embedders": (
        "metal_kernels mlxserve/errors mlxserve/config mlxserve/stats mlxserve/hub mlxserve/request "
        "mlxserve/text/tokenizer mlxserve/cache/pages mlxserve/cache/kv mlxserve/scheduler mlxserve/model "
        "mlxserve/engine mlxserve/chat mlxserve/metal_memory"
    ),
    "mlxserve/build": (
        "mlxserve/errors mlxserve/config mlxserve/machine mlxserve/hub mlxserve/text/abilities "
        "mlxserve/text/tokenizer "
        "mlxserve/cache/window_kv mlxserve/cache/pages mlxserve/cache/kv mlxserve/disk mlxserve/disk "
        "mlxserve/scheduler mlxserve/model mlxserve/trial mlxserve/engine mlxserve/chat "
        "mlxserve/door mlxserve/stats mlxserve/embedders mlxserve/sampling_params mlxserve/metal_memory"
    ),
    "mlxserve/ranks": (
        "metal_kernels mlxserve/version mlxserve/errors mlxserve/terminal_text mlxserve/stats mlxserve/option "
        "mlxserve/config mlxserve/request mlxserve/machine mlxserve/hub mlxserve/cache/kv mlxserve/cache/window_kv "
        "mlxserve/model mlxserve/chat mlxserve/build mlxserve/door"
    ),
    "mlxserve/llm": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/stats mlxserve/config mlxserve/request "
        "mlxserve/machine mlxserve/text/parsing mlxserve/text/costs "
        "mlxserve/text/deltas mlxserve/engine mlxserve/chat mlxserve/ranks"
    ),
    "mlxserve/__init__": (
        "mlxserve/version mlxserve/errors mlxserve/sampling_params mlxserve/stats "
        "mlxserve/config mlxserve/request mlxserve/text/parsing mlxserve/text/deltas "
        "mlxserve/chat mlxserve/llm"
    ),
    "mlxserve/shelf": "mlxserve/errors mlxserve/stats mlxserve/hub mlxserve/chat",
    "mlxserve/api/errors": "mlxserve/errors mlxserve/text/well_formed",
    "mlxserve/api/config": "mlxserve/option mlxserve/shelf",
    "mlxserve/api/usage": "mlxserve/request mlxserve/text/deltas",
    "mlxserve/api/access": (
        "mlxserve/errors mlxserve/files mlxserve/config mlxserve/request mlxserve/api/errors mlxserve/api/config"
    ),
    "mlxserve/api/warnings": "",
    "mlxserve/api/model_names": "mlxserve/api/errors",
    "mlxserve/api/server": (
        "mlxserve/errors mlxserve/terminal_text mlxserve/api/errors mlxserve/api/config mlxserve/api/access"
    ),
    "mlxserve/api/turns": (
        "mlxserve/errors mlxserve/door mlxserve/api/errors mlxserve/api/access mlxserve/api/server"
    ),
    "mlxserve/api/bodies": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/costs mlxserve/text/controls mlxserve/text/conversation mlxserve/shelf mlxserve/api/errors mlxserve/door "
        "mlxserve/api/turns"
    ),
    "mlxserve/api/metrics": "mlxserve/stats mlxserve/text/deltas mlxserve/api/server",
    "mlxserve/api/answers": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/request mlxserve/text/deltas "
        "mlxserve/chat mlxserve/api/usage mlxserve/api/metrics"
    ),
    "mlxserve/api/prefix_names": "mlxserve/errors mlxserve/chat mlxserve/api/access",
    "mlxserve/api/prompts": (
        "mlxserve/text/costs mlxserve/text/conversation mlxserve/text/tokenizer mlxserve/chat "
        "mlxserve/api/errors mlxserve/api/bodies mlxserve/api/warnings mlxserve/api/turns mlxserve/images mlxserve/errors"
    ),
    "mlxserve/api/vectors": (
        "mlxserve/errors mlxserve/request mlxserve/text/costs mlxserve/chat mlxserve/api/errors mlxserve/api/warnings "
        "mlxserve/api/access mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies mlxserve/api/prompts"
    ),
    "mlxserve/api/service": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/text/guidance mlxserve/text/parsing "
        "mlxserve/text/deltas mlxserve/chat mlxserve/api/errors mlxserve/api/usage "
        "mlxserve/api/access mlxserve/api/warnings mlxserve/api/model_names mlxserve/api/server "
        "mlxserve/api/metrics mlxserve/api/answers mlxserve/api/prefix_names mlxserve/api/prompts "
        "mlxserve/api/turns mlxserve/api/vectors mlxserve/images"
    ),
    "mlxserve/chats": "tui/chat",
    "mlxserve/api/openapi": "mlxserve/version mlxserve/api/errors mlxserve/api/bodies",
    "mlxserve/api/openai": (
        "mlxserve/version mlxserve/errors mlxserve/sampling_params mlxserve/request "
        "mlxserve/text/parsing mlxserve/text/deltas mlxserve/chat mlxserve/api/errors "
        "mlxserve/api/usage mlxserve/api/access mlxserve/api/bodies mlxserve/api/server "
        "mlxserve/api/answers mlxserve/api/service"
    ),
    "mlxserve/api/responses": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/conversation mlxserve/text/signature mlxserve/text/deltas mlxserve/api/errors mlxserve/api/usage mlxserve/api/access "
        "mlxserve/api/bodies mlxserve/api/server mlxserve/api/answers mlxserve/api/service"
    ),
    "mlxserve/api/anthropic": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/controls mlxserve/text/conversation mlxserve/text/signature mlxserve/text/deltas "
        "mlxserve/api/errors mlxserve/api/usage mlxserve/api/access "
        "mlxserve/api/bodies mlxserve/api/server mlxserve/api/answers mlxserve/api/service mlxserve/images"
    ),
    "mlxserve/api/ollama": (
        "mlxserve/errors mlxserve/sampling_params mlxserve/request "
        "mlxserve/text/parsing mlxserve/text/controls mlxserve/text/conversation mlxserve/text/deltas "
        "mlxserve/api/errors mlxserve/api/usage mlxserve/api/warnings mlxserve/api/server "
        "mlxserve/api/bodies mlxserve/api/answers mlxserve/api/service mlxserve/api/turns mlxserve/images"
    ),
    "mlxserve/api/page": (
        "tui/languages mlxserve/door mlxserve/helpers mlxserve/api/errors mlxserve/api/bodies "
        "mlxserve/api/turns mlxserve/api/warnings"
    ),
    "mlxserve/api/native": (
        "tui/tools tui/chat mlxserve/chats mlxserve/version mlxserve/errors mlxserve/config mlxserve/request mlxserve/text/costs "
        "mlxserve/engine mlxserve/chat mlxserve/api/errors mlxserve/api/access "
        "mlxserve/api/bodies mlxserve/api/server mlxserve/api/metrics mlxserve/api/prefix_names "
        "mlxserve/api/prompts mlxserve/api/service mlxserve/api/turns mlxserve/api/warnings mlxserve/text/conversation"
    ),
    "mlxserve/api/model_routes": (
        "mlxserve/chat mlxserve/api/access mlxserve/api/model_names mlxserve/api/server "
        "mlxserve/api/metrics mlxserve/api/prefix_names mlxserve/api/service mlxserve/api/openai "
        "mlxserve/api/responses mlxserve/api/anthropic mlxserve/api/ollama mlxserve/api/native mlxserve/images"
    ),
    "mlxserve/api/dispatch": (
        "mlxserve/errors mlxserve/chat mlxserve/shelf mlxserve/api/errors mlxserve/api/access "
        "mlxserve/api/model_names mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies "
        "mlxserve/api/model_routes"
    ),
    "mlxserve/api/models": ("mlxserve/chat mlxserve/api/errors mlxserve/api/dispatch"),
    "mlxserve/api/ollama_models": (
        "mlxserve/version mlxserve/hub mlxserve/chat mlxserve/api/errors mlxserve/api/warnings mlxserve/api/bodies "
        "mlxserve/api/ollama mlxserve/api/dispatch mlxserve/api/models"
    ),
    "mlxserve/api": (
        "tui/talk mlxserve/errors mlxserve/config mlxserve/door mlxserve/chat mlxserve/chats mlxserve/shelf mlxserve/api/errors mlxserve/api/config "
        "mlxserve/api/access mlxserve/api/warnings mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies "
        "mlxserve/api/openapi "
        "mlxserve/api/responses mlxserve/api/native mlxserve/api/page mlxserve/api/model_routes "
        "mlxserve/api/dispatch mlxserve/api/models mlxserve/api/ollama_models mlxserve/images"
    ),
    "mlxserve/doctor": (
        "metal_kernels mlxserve/errors mlxserve/sampling_params mlxserve/config mlxserve/request "
        "mlxserve/blas mlxserve/machine mlxserve/hub mlxserve/cache/kv mlxserve/model mlxserve/engine "
        "mlxserve/chat mlxserve/build mlxserve/metal_memory"
    ),
    "mlxserve/bench": (
        "mlxserve/errors mlxserve/terminal_text mlxserve/config mlxserve/request mlxserve/machine mlxserve/hub "
        "mlxserve/model mlxserve/engine mlxserve/build mlxserve/__init__"
    ),
    "mlxserve/service": "mlxserve/errors",
    "mlxserve/cli": (
        "tui/opening tui/chat tui mlxserve/version mlxserve/errors mlxserve/files mlxserve/terminal_text mlxserve/option mlxserve/config "
        "mlxserve/sampling_params "
        "mlxserve/machine mlxserve/gguf mlxserve/hub mlxserve/text/well_formed mlxserve/text/tokenizer "
        "mlxserve/disk mlxserve/door "
        "mlxserve/chat mlxserve/build mlxserve/ranks mlxserve/shelf mlxserve/api/config mlxserve/api/access mlxserve/api/server "
        "mlxserve/api mlxserve/doctor mlxserve/bench mlxserve/service mlxserve/images"
    ),
    "mlxserve/__main__": "mlxserve/cli",
}
# What decides without computing needs the standard library alone.
PLAIN = (
    "mlxserve/option",
    "mlxserve/config",
    "mlxserve/stats",
    "mlxserve/cache/pages",
    "mlxserve/cache/hashing",
    "mlxserve/scheduler",
)


def room_of(file: str) -> str:
    """The longest row that holds a file, whose path comes without its suffix."""
    rooms = [room for room in ARROWS if f"{file}/".startswith(f"{room}/")]
    assert rooms, f"{file} is in no room: give it a row"
    return max(rooms, key=len)


@cache
def imports() -> dict[str, frozenset[str]]:
    """Each file of ours and the files of ours that it imports, wherever in its text."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return {_name(path): frozenset(_imported(path)) for path in paths}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def _imported(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.split(".")[0] in PACKAGES and (file := _file_of(module)):
                yield file


def _file_of(module: str) -> str | None:
    """The file of a module, or of the module that a name is taken from."""
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return _name(candidate)
    parent = module.rpartition(".")[0]
    return _file_of(parent) if parent else None


@cache
def arrows() -> dict[str, set[str]]:
    """Each room and the rooms that its files import."""
    found: dict[str, set[str]] = {room: set() for room in ARROWS}
    for file, targets in imports().items():
        found[room_of(file)] |= {room_of(target) for target in targets}
    return {room: targets - {room} for room, targets in found.items()}


def test_a_room_imports_what_its_row_says_and_nothing_else() -> None:
    assert arrows() == {room: set(row.split()) for room, row in ARROWS.items()}


def test_every_arrow_runs_down() -> None:
    floor = {room: number for number, room in enumerate(ARROWS)}
    backward = [
        f"{room} -> {target}"
        for room, targets in arrows().items()
        for target in targets
        if floor[target] > floor[room]
    ]
    assert backward == []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path[path.index(file) :], file))
        if file not in done:
            for target in sorted(graph[file] - {file}):
                visit(target, (*path, file))
            done.add(file)

    for file in graph:
        visit(file, ())
    assert done == set(graph)


def test_the_scheduler_and_the_pool_need_nothing_but_the_standard_library() -> None:
    for room in PLAIN:
        heavy = {"mlx", "mlx_lm", "numpy", "transformers", "time", "random"}
        files = [file for file in imports() if f"{file}/".startswith(f"{room}/")]
        assert files, room
        for file in files:
            for node in ast.walk(ast.parse((ROOT / f"{file}.py").read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not heavy & {name.split(".")[0] for name in names}, file
