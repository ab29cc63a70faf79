"""Declarations that C++, or C++ for OpenCL, spells otherwise than Metal."""

from tests.emulator.tokens import TokenList, depth_of

SPACES = ("device", "threadgroup", "constant")


def point_array_parameters(tokens: TokenList) -> None:
    """`constant int64_t s[2]` as a parameter becomes `constant int64_t *s`."""
    brackets: list[str] = []
    for i, token in enumerate(tokens):
        if token.kind == "word":
            if token.text in SPACES and brackets and brackets[-1] == "(":
                _point_array_parameter(tokens, i)
        elif (depth := depth_of(token)) > 0:
            brackets += [token.text[0]] * depth
        elif depth < 0 and brackets:
            brackets.pop()


def _point_array_parameter(tokens: TokenList, i: int) -> None:
    end, angles, name = i + 1, 0, -1
    while end < len(tokens) and (
        angles or tokens[end].text not in (",", ")", "*", "&", "[", "(", ";")
    ):
        angles += {"<": 1, ">": -1}.get(tokens[end].text, 0)
        if tokens[end].is_word:
            name = end
        end += 1
    if tokens.text_at(end) != "[" or name < 0 or tokens[name - 1].kind != "space":
        return
    closing = tokens.closing(end)
    if tokens.text_at(tokens.after(closing)) not in (",", ")"):
        return
    tokens[name - 1] = tokens[name - 1].with_text("op", "*")
    for k in range(end, closing + 1):
        tokens[k] = tokens[k].blank()


def drop_qualified_members(tokens: TokenList) -> None:
    """Remove member functions qualified with an address space, keep their `thread` overloads.

    For C++, which has no such members.
    """
    spans = [
        _member_span(tokens, i, close)
        for i, token in enumerate(tokens)
        if token.is_word and token.text in SPACES and (close := _qualifies(tokens, i)) is not None
    ]
    for start, stop in reversed(spans):
        text = "".join(t.text for t in tokens[start:stop])
        tokens[start:stop] = [tokens[start].blank("\n" * text.count("\n") or " ")]


def drop_thread_members(tokens: TokenList) -> None:
    """`f() thread` -> `f()`: for C++ for OpenCL, where `this` is then generic."""
    for i, token in enumerate(tokens):
        if token.text != "thread":
            continue
        if tokens.text_at(tokens.after(i)) not in ("{", ":", ";", "noexcept"):
            continue
        previous = tokens.before(i)
        if tokens.text_at(previous) == "const":
            previous = tokens.before(previous)
        if tokens.text_at(previous) == ")":
            tokens[i] = token.blank(" ")


def construct_constants(tokens: TokenList) -> None:
    """`constant T name(a, b);` -> `static const T name(a, b);`

    For C++, which constructs no objects in address spaces.
    """
    for i, token in enumerate(tokens):
        if token.text != "constant" or tokens.text_at(tokens.before(i)) not in ("", ";", "}"):
            continue
        words = tokens.after(i)
        while tokens.is_word_at(words) or tokens.text_at(words) == "::":
            words = tokens.after(words)
        if tokens.text_at(words) != "(" or tokens.before(words) == tokens.after(i):
            continue
        if tokens.text_at(tokens.after(tokens.closing(words))) == ";":
            tokens[i] = token.with_text("word", "static const")


def qualify_constants(tokens: TokenList) -> None:
    """`constant T&` -> `const constant T&`, and pointers: what is constant is const.

    For C++ for OpenCL; for C++ include/msl/language.h says so.
    """
    for i, token in enumerate(tokens):
        if token.text == "constant" and tokens.is_word_at(end := tokens.after(i)):
            while tokens.is_word_at(end) or tokens.text_at(end) == "::":
                end = tokens.after(end)
            if tokens.text_at(end) in ("*", "&"):
                tokens[i] = token.with_text("word", "const constant")


def _qualifies(tokens: TokenList, i: int) -> int | None:
    """The `)` of `f() const device {` when the address space is at `i`."""
    if tokens.text_at(tokens.after(i)) not in ("{", ":", ";"):
        return None
    previous = tokens.before(i)
    if tokens.text_at(previous) == "const":
        previous = tokens.before(previous)
    return previous if tokens.text_at(previous) == ")" else None


def _member_span(tokens: TokenList, i: int, close: int) -> tuple[int, int]:
    start, depth = close, 0
    while start >= 0:
        token = tokens[start]
        if depth == 0 and token.text in (";", "{", "}"):
            break
        depth -= depth_of(token)
        start -= 1
    end = tokens.after(i)
    if tokens[end].text == ":":  # a constructor's initialisers
        while tokens[end].text != "{":
            end = tokens.closing(end) + 1 if tokens[end].text == "(" else end + 1
    if tokens[end].text == "{":
        end = tokens.closing(end)
        if tokens.text_at(tokens.after(end)) == ";":
            end = tokens.after(end)
    return start + 1, end + 1
