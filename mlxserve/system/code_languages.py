"""Languages whose code is highlighted, in the terminal and on the page.

Not all 600 that Pygments knows: many lexers take more than linear time, that of html+ng2 16 s for
20,000 brackets. Those of common languages have such rules too, so callers limit their time.
"""

from __future__ import annotations

# What answers call a language, by the name of its lexer.
_NAMES_OF = {
    "bash": "bash sh shell zsh ksh",
    "bat": "bat batch cmd",
    "c": "c h",
    "cmake": "cmake",
    "console": "console shell-session sh-session",
    "cpp": "cpp c++ cc cxx hpp",
    "csharp": "csharp c# cs",
    "css": "css",
    "dart": "dart",
    "diff": "diff patch udiff",
    "docker": "docker dockerfile",
    "elixir": "elixir ex exs",
    "go": "go golang",
    "graphql": "graphql",
    "haskell": "haskell hs",
    "hcl": "hcl terraform tf",
    "html": "html htm",
    "ini": "ini cfg conf",
    "java": "java",
    "javascript": "javascript js node mjs",
    "jsx": "jsx",
    "json": "json jsonc json5 jsonl",
    "julia": "julia jl",
    "kotlin": "kotlin kt",
    "lua": "lua",
    "make": "make makefile",
    "markdown": "markdown md",
    "matlab": "matlab",
    "nginx": "nginx",
    "objective-c": "objective-c objectivec objc",
    "perl": "perl pl",
    "php": "php",
    "powershell": "powershell ps1 pwsh",
    "protobuf": "protobuf proto",
    "pycon": "pycon",
    "python": "python py python3 py3 ipython",
    "r": "r",
    "ruby": "ruby rb",
    "rust": "rust rs",
    "scala": "scala",
    "scss": "scss",
    "sql": "sql",
    "swift": "swift",
    "tex": "tex latex",
    "toml": "toml",
    "tsx": "tsx",
    "typescript": "typescript ts",
    "xml": "xml svg xsd",
    "yaml": "yaml yml",
    "zig": "zig",
}
LEXERS = tuple(_NAMES_OF)
_LEXER_OF = {name: lexer for lexer, names in _NAMES_OF.items() for name in names.split()}
NAMES = tuple(_LEXER_OF)


def lexer_name(language: str) -> str | None:
    """Return Pygments' lexer for a fence's language; None for one that is not highlighted."""
    return _LEXER_OF.get(language.lower())
