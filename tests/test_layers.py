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
    "mlxserve/system/loopback": "",
    "tui/home": "",
    "tui/languages": "",
    "tui/commands": "",
    "tui/background": "",
    "tui/opening": "tui/background",
    "tui/talk": "mlxserve/system/loopback tui/sanitise tui/home",
    "mlxserve/mcp": "mlxserve/system/loopback tui/sanitise",
    "tui/chat": "tui/sanitise tui/talk mlxserve/mcp",
    "tui/paint": "tui/languages tui/sanitise",
    "tui/widgets": (
        "tui/sanitise tui/commands tui/opening tui/talk mlxserve/mcp tui/chat tui/paint"
    ),
    "tui/engine": "tui/sanitise tui/talk tui/chat",
    "tui/actions": "tui/sanitise tui/talk mlxserve/mcp tui/chat tui/paint tui/widgets",
    "tui": (
        "tui/home tui/commands tui/background tui/opening tui/talk mlxserve/mcp tui/chat tui/paint "
        "tui/widgets tui/engine tui/actions"
    ),
    "mlxserve/core/version": "",
    "mlxserve/core/errors": "",
    "mlxserve/system/files": "",
    "mlxserve/system/terminal_text": "",
    "mlxserve/core/sampling_params": "mlxserve/core/errors",
    "mlxserve/core/stats": "",
    "mlxserve/core/option": "mlxserve/core/errors",
    "mlxserve/core/config": "metal_kernels mlxserve/core/errors mlxserve/core/option",
    "mlxserve/system/deferred_packages": "",
    "mlxserve/system/blas": "mlxserve/core/errors",
    "mlxserve/system/memory_groups": "",
    "mlxserve/system/machine": "mlxserve/core/errors mlxserve/system/memory_groups mlxserve/system/deferred_packages mlxserve/system/blas",
    "mlxserve/system/metal_memory": "mlxserve/core/errors mlxserve/system/machine",
    "mlxserve/core/forward_work": "",
    "mlxserve/system/suspend_clock": "",
    "mlxserve/hub/gguf": "metal_kernels mlxserve/core/errors mlxserve/system/files",
    "mlxserve/cache/groups": "",
    "mlxserve/hub": (
        "mlxserve/core/errors mlxserve/system/files mlxserve/core/sampling_params mlxserve/core/config mlxserve/hub/gguf "
        "mlxserve/cache/groups"
    ),
    "mlxserve/mini/__init__": "",
    "mlxserve/helpers": "mlxserve/core/errors mlxserve/system/suspend_clock",
    "mlxserve/helpers/fair_executor": "mlxserve/core/errors mlxserve/helpers",
    "mlxserve/images": "mlxserve/core/errors mlxserve/helpers mlxserve/helpers/fair_executor",
    "mlxserve/request": "mlxserve/core/sampling_params mlxserve/core/config mlxserve/images",
    "mlxserve/system/well_formed": "",
    "mlxserve/text/parsing": "mlxserve/system/well_formed",
    "mlxserve/text/costs": "",
    "mlxserve/text/signature": "",
    "mlxserve/text/conversation": "mlxserve/core/errors mlxserve/images",
    "mlxserve/text/probes": "",
    "mlxserve/text/controls": "mlxserve/text/probes",
    "mlxserve/text/abilities": "mlxserve/text/probes mlxserve/text/controls",
    "mlxserve/text/fitting": (
        "mlxserve/text/parsing mlxserve/text/abilities mlxserve/text/conversation mlxserve/images"
    ),
    "mlxserve/text/templates": "mlxserve/helpers",
    "mlxserve/text/template_syntax": "",
    "mlxserve/text/template_worker": "mlxserve/system/deferred_packages mlxserve/text/template_syntax",
    "mlxserve/text/probing": (
        "mlxserve/text/probes mlxserve/text/controls mlxserve/text/abilities mlxserve/text/templates"
    ),
    "mlxserve/text/large_texts": "mlxserve/core/errors mlxserve/helpers mlxserve/text/templates",
    "mlxserve/text/stream_decoder": "",
    "mlxserve/text/tokenizer_files": "mlxserve/core/errors mlxserve/system/files",
    "mlxserve/text/tokenizer": (
        "mlxserve/core/errors mlxserve/text/parsing mlxserve/text/costs mlxserve/text/conversation "
        "mlxserve/text/controls mlxserve/text/abilities mlxserve/text/probing mlxserve/text/fitting "
        "mlxserve/text/templates mlxserve/text/large_texts mlxserve/text/stream_decoder mlxserve/text/tokenizer_files "
        "mlxserve/helpers/fair_executor"
    ),
    "mlxserve/text/large_text_worker": (
        "mlxserve/text/templates mlxserve/text/template_worker mlxserve/text/tokenizer"
    ),
    "mlxserve/text/deltas": (
        "mlxserve/core/sampling_params mlxserve/request mlxserve/text/parsing mlxserve/text/tokenizer"
    ),
    "mlxserve/text/guidance": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/system/suspend_clock mlxserve/helpers mlxserve/text/parsing "
        "mlxserve/text/tokenizer mlxserve/helpers/fair_executor mlxserve/text/costs"
    ),
    "mlxserve/text/__init__": "",
    "mlxserve/cache/__init__": "",
    "mlxserve/cache/hashing": "",
    "mlxserve/cache/runs": "",
    "mlxserve/cache/children": "",
    "mlxserve/cache/pages": "mlxserve/cache/hashing mlxserve/cache/runs mlxserve/cache/children",
    "mlxserve/cache/layout": "metal_kernels",
    "mlxserve/cache/key_owners": "",
    "mlxserve/cache/kv": "metal_kernels mlxserve/core/errors mlxserve/cache/layout",
    "mlxserve/cache/layer_kv": (
        "metal_kernels mlxserve/cache/layout mlxserve/cache/key_owners mlxserve/cache/kv"
    ),
    "mlxserve/cache/window_kv": "mlxserve/cache/kv",
    "mlxserve/disk": "mlxserve/core/errors mlxserve/system/files mlxserve/system/suspend_clock",
    "mlxserve/scheduler": (
        "mlxserve/core/errors mlxserve/core/stats mlxserve/core/config mlxserve/request mlxserve/core/forward_work "
        "mlxserve/cache/hashing mlxserve/cache/pages mlxserve/cache/groups mlxserve/images"
    ),
    "mlxserve/model": (
        "metal_kernels mlxserve/core/errors mlxserve/core/sampling_params mlxserve/core/stats mlxserve/core/config "
        "mlxserve/system/machine mlxserve/system/deferred_packages "
        "mlxserve/request mlxserve/core/forward_work mlxserve/hub/gguf mlxserve/hub mlxserve/cache/layout "
        "mlxserve/cache/key_owners mlxserve/cache/kv mlxserve/cache/layer_kv "
        "mlxserve/cache/window_kv mlxserve/cache/groups mlxserve/images"
    ),
    "mlxserve/model/load_check": (
        "mlxserve/core/version mlxserve/core/errors mlxserve/core/config mlxserve/system/files mlxserve/system/machine mlxserve/hub "
        "mlxserve/helpers mlxserve/model"
    ),
    "mlxserve/engine": (
        "mlxserve/core/errors mlxserve/system/machine mlxserve/core/stats mlxserve/request mlxserve/core/forward_work "
        "mlxserve/system/suspend_clock mlxserve/helpers/fair_executor mlxserve/images mlxserve/system/metal_memory "
        "mlxserve/cache/pages mlxserve/disk mlxserve/disk mlxserve/scheduler mlxserve/model"
    ),
    "mlxserve/chat": (
        "mlxserve/core/errors mlxserve/system/files mlxserve/core/sampling_params mlxserve/request mlxserve/hub "
        "mlxserve/text/parsing mlxserve/text/costs mlxserve/text/conversation "
        "mlxserve/text/abilities mlxserve/text/fitting mlxserve/text/templates "
        "mlxserve/text/tokenizer mlxserve/text/deltas mlxserve/text/guidance "
        "mlxserve/engine mlxserve/helpers/fair_executor mlxserve/images"
    ),
    "mlxserve/chat/embedding": (
        "metal_kernels mlxserve/core/errors mlxserve/core/config mlxserve/core/stats mlxserve/hub mlxserve/request "
        "mlxserve/text/tokenizer mlxserve/cache/pages mlxserve/cache/kv mlxserve/scheduler mlxserve/model "
        "mlxserve/engine mlxserve/chat mlxserve/system/metal_memory"
    ),
    "mlxserve/build": (
        "mlxserve/core/errors mlxserve/core/config mlxserve/system/machine mlxserve/hub mlxserve/text/abilities "
        "mlxserve/text/tokenizer "
        "mlxserve/cache/window_kv mlxserve/cache/pages mlxserve/cache/kv mlxserve/disk mlxserve/disk "
        "mlxserve/scheduler mlxserve/model mlxserve/model/load_check mlxserve/engine mlxserve/chat "
        "mlxserve/helpers/fair_executor mlxserve/core/stats mlxserve/chat/embedding mlxserve/core/sampling_params mlxserve/system/metal_memory"
    ),
    "mlxserve/ranks": (
        "metal_kernels mlxserve/core/version mlxserve/core/errors mlxserve/system/terminal_text mlxserve/core/stats mlxserve/core/option "
        "mlxserve/core/config mlxserve/request mlxserve/system/machine mlxserve/hub mlxserve/cache/kv mlxserve/cache/window_kv "
        "mlxserve/model mlxserve/chat mlxserve/build mlxserve/helpers/fair_executor"
    ),
    "mlxserve/llm": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/core/stats mlxserve/core/config mlxserve/request "
        "mlxserve/system/machine mlxserve/text/parsing mlxserve/text/costs "
        "mlxserve/text/deltas mlxserve/engine mlxserve/chat mlxserve/ranks"
    ),
    "mlxserve/__init__": (
        "mlxserve/core/version mlxserve/core/errors mlxserve/core/sampling_params mlxserve/core/stats "
        "mlxserve/core/config mlxserve/request mlxserve/text/parsing mlxserve/text/deltas "
        "mlxserve/chat mlxserve/llm"
    ),
    "mlxserve/chat/registry": "mlxserve/core/errors mlxserve/core/stats mlxserve/hub mlxserve/chat",
    "mlxserve/api/errors": "mlxserve/core/errors mlxserve/system/well_formed",
    "mlxserve/api/config": "mlxserve/core/option mlxserve/chat/registry",
    "mlxserve/api/usage": "mlxserve/request mlxserve/text/deltas",
    "mlxserve/api/access": (
        "mlxserve/core/errors mlxserve/system/files mlxserve/core/config mlxserve/request mlxserve/api/errors mlxserve/api/config"
    ),
    "mlxserve/api/warnings": "",
    "mlxserve/api/model_names": "mlxserve/api/errors",
    "mlxserve/api/server": (
        "mlxserve/core/errors mlxserve/system/terminal_text mlxserve/api/errors mlxserve/api/config mlxserve/api/access"
    ),
    "mlxserve/api/turns": (
        "mlxserve/core/errors mlxserve/helpers/fair_executor mlxserve/api/errors mlxserve/api/access mlxserve/api/server"
    ),
    "mlxserve/api/bodies": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/costs mlxserve/text/controls mlxserve/text/conversation mlxserve/chat/registry mlxserve/api/errors mlxserve/helpers/fair_executor "
        "mlxserve/api/turns"
    ),
    "mlxserve/api/metrics": "mlxserve/core/stats mlxserve/text/deltas mlxserve/api/server",
    "mlxserve/api/answers": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request mlxserve/text/deltas "
        "mlxserve/chat mlxserve/api/usage mlxserve/api/metrics"
    ),
    "mlxserve/api/prefix_names": "mlxserve/core/errors mlxserve/chat mlxserve/api/access",
    "mlxserve/api/prompts": (
        "mlxserve/text/costs mlxserve/text/conversation mlxserve/text/tokenizer mlxserve/chat "
        "mlxserve/api/errors mlxserve/api/bodies mlxserve/api/warnings mlxserve/api/turns mlxserve/images mlxserve/core/errors"
    ),
    "mlxserve/api/vectors": (
        "mlxserve/core/errors mlxserve/request mlxserve/text/costs mlxserve/chat mlxserve/api/errors mlxserve/api/warnings "
        "mlxserve/api/access mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies mlxserve/api/prompts"
    ),
    "mlxserve/api/service": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/text/guidance mlxserve/text/parsing "
        "mlxserve/text/deltas mlxserve/chat mlxserve/api/errors mlxserve/api/usage "
        "mlxserve/api/access mlxserve/api/warnings mlxserve/api/model_names mlxserve/api/server "
        "mlxserve/api/metrics mlxserve/api/answers mlxserve/api/prefix_names mlxserve/api/prompts "
        "mlxserve/api/turns mlxserve/api/vectors mlxserve/images"
    ),
    "mlxserve/chats": "tui/chat",
    "mlxserve/api/openapi": "mlxserve/core/version mlxserve/api/errors mlxserve/api/bodies",
    "mlxserve/api/openai": (
        "mlxserve/core/version mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request "
        "mlxserve/text/parsing mlxserve/text/deltas mlxserve/chat mlxserve/api/errors "
        "mlxserve/api/usage mlxserve/api/access mlxserve/api/bodies mlxserve/api/server "
        "mlxserve/api/answers mlxserve/api/service"
    ),
    "mlxserve/api/responses": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/conversation mlxserve/text/signature mlxserve/text/deltas mlxserve/api/errors mlxserve/api/usage mlxserve/api/access "
        "mlxserve/api/bodies mlxserve/api/server mlxserve/api/answers mlxserve/api/service"
    ),
    "mlxserve/api/anthropic": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request mlxserve/text/parsing "
        "mlxserve/text/controls mlxserve/text/conversation mlxserve/text/signature mlxserve/text/deltas "
        "mlxserve/api/errors mlxserve/api/usage mlxserve/api/access "
        "mlxserve/api/bodies mlxserve/api/server mlxserve/api/answers mlxserve/api/service mlxserve/images"
    ),
    "mlxserve/api/ollama": (
        "mlxserve/core/errors mlxserve/core/sampling_params mlxserve/request "
        "mlxserve/text/parsing mlxserve/text/controls mlxserve/text/conversation mlxserve/text/deltas "
        "mlxserve/api/errors mlxserve/api/usage mlxserve/api/warnings mlxserve/api/server "
        "mlxserve/api/bodies mlxserve/api/answers mlxserve/api/service mlxserve/api/turns mlxserve/images"
    ),
    "mlxserve/api/page": (
        "tui/languages mlxserve/helpers/fair_executor mlxserve/helpers mlxserve/api/errors mlxserve/api/bodies "
        "mlxserve/api/turns mlxserve/api/warnings"
    ),
    "mlxserve/api/native": (
        "mlxserve/mcp tui/chat mlxserve/chats mlxserve/core/version mlxserve/core/errors mlxserve/core/config mlxserve/request mlxserve/text/costs "
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
        "mlxserve/core/errors mlxserve/chat mlxserve/chat/registry mlxserve/api/errors mlxserve/api/access "
        "mlxserve/api/model_names mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies "
        "mlxserve/api/model_routes"
    ),
    "mlxserve/api/models": ("mlxserve/chat mlxserve/api/errors mlxserve/api/dispatch"),
    "mlxserve/api/ollama_models": (
        "mlxserve/core/version mlxserve/hub mlxserve/chat mlxserve/api/errors mlxserve/api/warnings mlxserve/api/bodies "
        "mlxserve/api/ollama mlxserve/api/dispatch mlxserve/api/models"
    ),
    "mlxserve/api": (
        "tui/talk mlxserve/core/errors mlxserve/core/config mlxserve/helpers/fair_executor mlxserve/chat mlxserve/chats mlxserve/chat/registry mlxserve/api/errors mlxserve/api/config "
        "mlxserve/api/access mlxserve/api/warnings mlxserve/api/server mlxserve/api/turns mlxserve/api/bodies "
        "mlxserve/api/openapi "
        "mlxserve/api/responses mlxserve/api/native mlxserve/api/page mlxserve/api/model_routes "
        "mlxserve/api/dispatch mlxserve/api/models mlxserve/api/ollama_models mlxserve/images"
    ),
    "mlxserve/doctor": (
        "metal_kernels mlxserve/core/errors mlxserve/core/sampling_params mlxserve/core/config mlxserve/request "
        "mlxserve/system/blas mlxserve/system/machine mlxserve/hub mlxserve/cache/kv mlxserve/model mlxserve/engine "
        "mlxserve/chat mlxserve/build mlxserve/system/metal_memory"
    ),
    "mlxserve/bench": (
        "mlxserve/core/errors mlxserve/system/terminal_text mlxserve/core/config mlxserve/request mlxserve/system/machine mlxserve/hub "
        "mlxserve/model mlxserve/engine mlxserve/build mlxserve/__init__"
    ),
    "mlxserve/service": "mlxserve/core/errors",
    "mlxserve/cli": (
        "tui/opening tui/chat tui mlxserve/core/version mlxserve/core/errors mlxserve/system/files mlxserve/system/terminal_text mlxserve/core/option mlxserve/core/config "
        "mlxserve/core/sampling_params "
        "mlxserve/system/machine mlxserve/hub/gguf mlxserve/hub mlxserve/system/well_formed mlxserve/text/tokenizer "
        "mlxserve/disk mlxserve/helpers/fair_executor "
        "mlxserve/chat mlxserve/build mlxserve/ranks mlxserve/chat/registry mlxserve/api/config mlxserve/api/access mlxserve/api/server "
        "mlxserve/api mlxserve/doctor mlxserve/bench mlxserve/service mlxserve/images"
    ),
    "mlxserve/__main__": "mlxserve/cli",
}
# What decides without computing needs the standard library alone.
PLAIN = (
    "mlxserve/core/option",
    "mlxserve/core/config",
    "mlxserve/core/stats",
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
