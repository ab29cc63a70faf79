"""Instructions of a kernel, counted while it runs: a weight for each block of its LLVM IR.

The text is compiled with its loops unrolled, as Apple's compiler does, and with the functions of Metal's
library kept as calls. Each block then tells the runtime, whenever a thread enters it, what a GPU of Apple's
would issue for it, in instructions of one lane:

    arithmetic, conversion, comparison, choice    1 for each number, fused multiply-adds where written so
    load or store, by pages or threadgroup memory 1, and 1 for an address that is not a constant apart
    exp2, division                                4, as they run at a quarter of the rate
    tanh                                          20
    simd_sum, simd_max                            10: five shuffles and what puts two together
    shuffle, vote                                 1
    8x8 matrices multiplied                       16: 512 multiply-adds of 32 lanes
    a matrix loaded or stored                     1; 2 transposed, whose neighbours are apart
    branch on a condition                         1

Private variables are registers and moves between them free. The weights are public estimates of Apple's GPUs
(README.md of github.com/philipturner/metal-benchmarks); so a count compares two texts, and bounds a
kernel's speed by the ALUs, but is nobody's measurement.
"""

from __future__ import annotations

import re

MATRIX_PRODUCT = 16  # instructions
_DIVISION = 4

_DEFINED = re.compile(r"define .*?@(\S+?)\(")
_LABEL = re.compile(r"[\w.$-]+:(?:\s|$)")
_ASSIGNED = re.compile(r"(%[\w.]+) = ")
_OPERATION = re.compile(r"\s+(?:%[\w.]+ = )?(?:(?:tail|musttail|notail) )?([a-z]\w*)")
_VECTOR = re.compile(r"<(\d+) x ")
_CALLED = re.compile(r"@([\w.$]+)\(")
_POINTER = re.compile(r"(?:ptr(?: addrspace\(\d+\))?|addrspacecast|bitcast) (%[\w.]+)")
_INDEX = re.compile(r", i\d+ (%[\w.]+)")
_TERMINATORS = ("br", "ret", "switch", "unreachable")
_ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "udiv",
        "sdiv",
        "urem",
        "srem",
        "shl",
        "lshr",
        "ashr",
        "and",
        "or",
        "xor",
        "icmp",
        "fcmp",
        "select",
        "fneg",
        "fadd",
        "fsub",
        "fmul",
        "fptrunc",
        "fpext",
        "fptosi",
        "fptoui",
        "sitofp",
        "uitofp",
    ]
)
# By a part of the name of what is called, in this order.
_CALLS = (
    ("simdgroup_multiply", MATRIX_PRODUCT),
    ("simdgroup_load", 1),
    ("simdgroup_store", 1),
    ("simd_sum", 10),
    ("simd_max", 10),
    ("simd_min", 10),
    ("simd_", 1),
    ("barrier", 1),
    ("exp2", 4),
    ("tanh", 20),
    ("llvm.fmuladd", 1),
    ("llvm.fma", 1),
    ("llvm.max", 1),
    ("llvm.min", 1),
    ("llvm.smax", 1),
    ("llvm.smin", 1),
    ("llvm.umin", 1),
    ("llvm.rint", 1),
    ("llvm.cttz", 1),
)
_TRANSPOSED = re.compile(r"i1 (?:noundef )?(?:zeroext )?true\)")
_OF_THE_LIBRARY = ("_ZN5metal", "_ZNK5metal")


def counted(ir: str) -> str:
    """The same program, which tells `__msl_count` what it does."""
    out: list[str] = []
    block: list[str] = []
    private: set[str] | None = None  # pointers to registers; None: in no function that counts
    for line in ir.splitlines():
        if line.startswith("define "):
            name = _DEFINED.match(line)
            is_counted = name is not None and not name[1].strip('"').startswith(_OF_THE_LIBRARY)
            private = set() if is_counted else None
            block = []
        elif line == "}":
            private = None
        elif private is not None and line.strip():
            if _LABEL.match(line):
                block = []
            else:
                operation = _OPERATION.match(line)
                if operation is not None and operation[1] in _TERMINATORS:
                    cost = sum(_cost(each, private) for each in block)
                    cost += operation[1] == "br" and "br i1" in line
                    if cost:
                        out.append(f"  call void @__msl_count(i64 {cost})")
                    block = []
                elif operation is not None:
                    _note_private(line, operation[1], private)
                    block.append(line)
        out.append(line)
    return "\n".join([*out, "declare void @__msl_count(i64)", ""])


def _note_private(line: str, operation: str, private: set[str]) -> None:
    assigned = _ASSIGNED.search(line)
    if assigned is None:
        return
    pointer = _POINTER.search(line)
    derived = operation in ("getelementptr", "addrspacecast", "bitcast")
    if operation == "alloca" or (derived and pointer is not None and pointer[1] in private):
        private.add(assigned[1])


def _cost(line: str, private: set[str]) -> int:
    operation = _OPERATION.match(line)
    if operation is None:
        return 0
    name = operation[1]
    if name in ("load", "store", "getelementptr"):
        pointer = _POINTER.search(line)
        if pointer is None or pointer[1] in private:
            return 0
        return int(name != "getelementptr" or _INDEX.search(line) is not None)
    vector = _VECTOR.search(line)
    width = int(vector[1]) if vector else 1
    if name == "fdiv":
        return _DIVISION * width
    if name in _ARITHMETIC:
        return width
    return _cost_of_call(line, width) if name == "call" else 0


def _cost_of_call(line: str, width: int) -> int:
    called = _CALLED.search(line)
    if called is None:
        return 0
    for part, cost in _CALLS:
        if part in called[1]:
            is_transposed = part == "simdgroup_load" and _TRANSPOSED.search(line) is not None
            return 2 * cost if is_transposed else cost * (width if part.startswith("llvm") else 1)
    return 0
