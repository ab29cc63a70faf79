"""Limits for chat templates, so that a model's template can neither hang the server nor exhaust
its memory.

Templates come from a model's folder and run in transformers' sandbox, which blocks access to the
outside but not endless loops. This module adds a deadline to that sandbox, and a maximum size for
the rendered text and for every intermediate value.

The deadline is an exception that another thread sets. Python delivers it between two bytecode
instructions, so single operations that could take long are bounded by size before they start.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinMethodType, TracebackType
from typing import Any

from jinja2 import Environment, Template, TemplateRuntimeError, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_format, do_indent, make_attrgetter
from jinja2.nodes import Concat
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 1.0  # ten thousand messages take a quarter of it
MAX_SIZE = 8_000_000  # characters of a text, or items of a list
_MAX_NUMBER = 10**18
# A width of six digits, or one passed as an argument: "%*d", "{:{}}".
_WIDE_FORMAT = re.compile(r"[0-9]{6}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")


class TemplateLimitExceeded(TemplateRuntimeError):
    """The template took too long, or tried to create a value that is too large."""

    def __init__(self, message: str = f"it took longer than {MAX_SECONDS:g} seconds") -> None:
        super().__init__(message)


class Deadline:
    """Raises TemplateLimitExceeded in the thread that entered it, after `seconds` inside."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_over = self._has_fired = False

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            with self._lock:
                self._is_over = True
            self._timer.cancel()
            if self._has_fired:  # may be pending still: it must not reach later code
                _set_exception(self._thread, None)
        except TemplateLimitExceeded:
            return  # delivered just now; the rendering itself finished in time

    def _fire(self) -> None:
        with self._lock:
            if not self._is_over:
                self._has_fired = True
                _set_exception(self._thread, TemplateLimitExceeded)


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None
    )


class BoundedTemplate(Template):
    """Renders within the limits."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with Deadline(MAX_SECONDS):
            return super().render(*args, **kwargs)


class _Generator(CodeGenerator):
    """Routes `a ~ b` and the output of macros and blocks through the environment's checks."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.output()")

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Output(list[str]):
    """The output of a macro or a block so far."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def append(self, text: str) -> None:
        self._size += len(text)
        _require(self._size)
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' sandbox with limits."""

    template_class = BoundedTemplate
    code_generator_class = _Generator
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    output = _Output

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        if isinstance(parts, _Output):
            return "".join(parts)
        whole = _Output()
        whole.extend(parts)
        return "".join(whole)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("center", "wordwrap", "truncate", "batch", "slice", "round"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters |= {
            "replace": _replaced,
            "join": _joined,
            "indent": _indented,
            "format": _formatted,
        }

    def concatenated(self, parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        _require(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "*":
                _require(_product_size(left, right))
            case "**":
                _require(abs(right) * max(1, len(str(left))) if isinstance(right, int) else 0)
            case "%" if isinstance(left, str):
                _check_format(left)
        return check_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Bound the size of what string methods create before they run."""
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            _check_method(obj.__self__, obj.__name__, args)
        return check_size(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format`, which the sandbox replaces with its own."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


def bound_chat_templates() -> None:
    """From now on, transformers compiles every chat template with these limits."""
    from transformers.utils import chat_template_utils

    if chat_template_utils.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()


def check_size(value: Any) -> Any:
    """Returns the value. Raises TemplateLimitExceeded if it is too large."""
    if isinstance(value, (str, list, tuple)):
        _require(len(value))
    elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise TemplateLimitExceeded("it computes a number that is too large")
    return value


def _require(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitExceeded(f"it creates more than {MAX_SIZE:,} characters or items")


def _product_size(left: Any, right: Any) -> int:
    """Length of a repeated text or list; 0 for numbers, whose product is checked afterwards."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return len(sequence) * max(0, count)
    return 0


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    _check_numbers(args)
    match name:
        case "replace" if len(args) > 1:
            _require(_replaced_size(text, str(args[0]), str(args[1])))
        case "join" if args and isinstance(args[0], (list, tuple, str, dict)):
            _require(_joined_size(text, [str(part) for part in args[0]]))
        case "expandtabs":
            _require(text.count("\t") * (args[0] if args else 8))


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _require(value)


def _check_format(text: str) -> None:
    """Only literal widths of a few digits are allowed in a format."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitExceeded("it formats text to a width that is too large or computed")


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Like jinja's filter, with its size checked first."""
    _require(_replaced_size(str(text), str(old), str(new)))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _joined(
    environment: Environment, values: Any, separator: Any = "", attribute: Any = None
) -> str:
    """Like jinja's filter, with its size checked first."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts = [str(value) for value in values]
    _require(_joined_size(str(separator), texts))
    return str(separator).join(texts)


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Like jinja's filter, with its size checked first."""
    size = len(width) if isinstance(width, str) else width
    _require(len(text) + size * (text.count("\n") + 1))
    return do_indent(text, width, first, blank)


def _formatted(text: Any, *args: Any, **kwargs: Any) -> str:
    """Like jinja's filter, with its widths checked first."""
    _check_format(str(text))
    return do_format(text, *args, **kwargs)


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


def _joined_size(separator: str, texts: Sequence[str]) -> int:
    return len(separator) * len(texts) + sum(map(len, texts))
