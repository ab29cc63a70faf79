"""Rules of the Metal language that a C++ compiler does not know.

Words that Metal lacks are refused at once; the rest is collected, and refused in check mode only,
because it rests on reading tokens and not on types.
"""

from tests.emulator.tokens import Token, TokenList, code

_INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
_SCALARS = (*_INTEGERS, "half", "float", "bfloat")
VECTORS = frozenset(f"{scalar}{n}" for scalar in (*_SCALARS, "bool") for n in (2, 3, 4))

_ABSENT = {
    "double": "Metal has no double",
    "virtual": "Metal has no virtual functions",
    "new": "Metal has no new",
    "goto": "Metal has no goto",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "dynamic_cast": "Metal has no run-time type information",
    "typeid": "Metal has no run-time type information",
    "thread_local": "Metal has no thread_local",
    "asm": "Metal has no inline assembly",
    "printf": "Metal has no printf",
    "register": "Metal has no register storage class",
}

_SPACES = {"device", "threadgroup", "constant", "thread", "auto", "ray_data", "object_data"}
_SIZED_INTEGERS = {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_PLAIN_TYPES = set(_SCALARS) | _SIZED_INTEGERS | {"bool", "size_t"}
_STATEMENTS = {"if", "while", "for", "switch", "return", "else"}
_NOT_FUNCTIONS = _STATEMENTS | {"sizeof", "decltype", "static_assert", "alignas"}
_NOT_PARAMETERS = _SPACES | {"+", "-", "/", "."}  # an expression, so not a definition


def refuse_absent_words(tokens: TokenList) -> None:
    """Raise for a word that is not in the Metal language."""
    for i, token in enumerate(tokens):
        if not token.is_word:
            continue
        if token.text in _ABSENT:
            raise token.error(_ABSENT[token.text])
        if token.text == "std" and tokens.text_at(tokens.after(i)) == "::":
            raise token.error("Metal has no C++ standard library")


def unqualified_pointers(tokens: TokenList, type_names: frozenset[str]) -> list[str]:
    """Pointers, references and arrays without an address space."""
    found: list[str] = []
    types = type_names | _PLAIN_TYPES
    depth = 0
    for i, token in enumerate(tokens):
        depth += {"{": 1, "}": -1}.get(token.text, 0)
        if token.is_word and token.text not in _NOT_FUNCTIONS:
            found += _unqualified_parameters(tokens, i)
        if depth > 0 and token.text in types:
            found += _unqualified_local(tokens, i)
    return found


def _definition(tokens: TokenList, i: int) -> tuple[int, int, int] | None:
    """`(`, `)` and `{` of the function whose name may be at `i`."""
    opening = tokens.after(i)
    if tokens.text_at(opening) != "(":
        return None
    closing = tokens.closing(opening)
    body = tokens.after(closing)
    return (opening, closing, body) if tokens.text_at(body) == "{" else None


def _unqualified_parameters(tokens: TokenList, i: int) -> list[str]:
    definition = _definition(tokens, i)
    if not definition or tokens.text_at(tokens.before(i)) in (".", "->", "=", "return", "("):
        return []
    parts = [code(part) for part in tokens.split(definition[0] + 1, definition[1])]
    return [
        f"{part[0].file}:{part[0].number}: '{' '.join(t.text for t in part)}' of "
        f"'{tokens[i].text}' needs an address space (thread, threadgroup, device or constant)"
        for part in parts
        if _is_unqualified(part)
    ]


def _is_unqualified(parameter: list[Token]) -> bool:
    texts = {t.text for t in parameter}
    return (
        not texts.isdisjoint({"*", "&", "["})
        and parameter[0].text != "[["
        and texts.isdisjoint(_NOT_PARAMETERS)
        and sum(t.is_word for t in parameter) >= 2
    )


def _unqualified_local(tokens: TokenList, i: int) -> list[str]:
    """`int* p = ...;` at the start of a statement."""
    star = tokens.after(i)
    if tokens.text_at(star) not in ("*", "&"):
        return []
    previous = tokens.before(i)
    if tokens.text_at(previous) == "const":
        previous = tokens.before(previous)
    name = tokens.after(star)
    starts = tokens.text_at(previous) in (";", "{", "}")
    declares = tokens.is_word_at(name) and tokens.text_at(tokens.after(name)) in ("=", ";", ",")
    if not (starts and declares):
        return []
    token = tokens[i]
    declared = f"{token.text} {tokens[star].text} {tokens[name].text}"
    return [f"{token.file}:{token.number}: '{declared}' needs an address space"]


def recursive_functions(tokens: TokenList) -> list[str]:
    """Functions that call themselves; overloads may call one another, so those are let pass."""
    definitions: dict[str, int] = {}
    calls: dict[str, Token] = {}
    for i, token in enumerate(tokens):
        if not token.is_word or token.text in _NOT_FUNCTIONS:
            continue
        previous = tokens.before(i)
        if not (tokens.is_word_at(previous) or tokens.text_at(previous) in ("*", "&", ">")):
            continue
        definition = _definition(tokens, i)
        if not definition:
            continue
        definitions[token.text] = definitions.get(token.text, 0) + 1
        for k in range(definition[2], tokens.closing(definition[2])):
            if tokens[k].text == token.text and _is_plain_call(tokens, k):
                calls[token.text] = tokens[k]
    return [
        f"{call.file}:{call.number}: '{name}' calls itself; Metal kernels cannot recurse"
        for name, call in calls.items()
        if definitions[name] == 1
    ]


def _is_plain_call(tokens: TokenList, i: int) -> bool:
    return (
        tokens.is_word_at(i)
        and tokens.text_at(tokens.after(i)) == "("
        and tokens.text_at(tokens.before(i)) not in (".", "->", "::")
    )
