"""An independent front end for every kernel text the project can hand to MLX.

    texts.py     the texts: the project's own backend says which, MLX writes them
    rules.py     rules of Metal that rest on reading text
    compiler.py  clang, twice: C++14 with distinct address spaces, and C++ for OpenCL
    check.py     one text's report: errors, threadgroup memory, arrays left in memory
    include/     declarations of Metal's library, with no bodies to run

The emulator in tests/emulator runs kernels and accepts what it needs for that. This only reads
them, more strictly, with headers of its own, and reads all of them: every dtype, head dimension
and number of heads. Only the compiler, its cache and the reading of MLX's preamble are shared.

What it cannot show: whether Apple's compiler agrees with these declarations.
"""
