"""Attention over paged keys and values: pages, slots and tables. No requests, models or files.

    from metal_kernels.choice import select_backend
    backend = select_backend("auto")
    pool = backend.new_pool(num_pages=256, kv_heads=8, page_size=32, head_dim=128, dtype=mx.float16)

A *slot* is `page * page_size + offset`; a sequence's *page table* lists its pages in the order of
its positions. The ops are `write_kv`, `paged_decode`, `paged_prefill`, `paged_latent` and
`copy_pages`; `ops.py` states their shapes, `reference.py` is their specification in plain mlx,
`plain.py` the same by mlx's own attention over views, `x86/` what a Linux CPU needs in its place,
`msl/` holds the ops as Metal kernels. On a Mac "auto" is Metal if a self-test of its in-place
writes passes; elsewhere, and for shapes the kernels are not written for, it is `cpu`.
"""
