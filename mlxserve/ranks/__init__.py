"""One engine over several processes (ranks), on one machine or on several.

Rank 0 is the whole server: API, scheduler, page tables, sampler, and its own part of the model. Every
other rank is a worker, which knows pages and rows but no requests. It is told each step over a TCP
connection, builds the same graph over its part of the weights and of the cache, and meets the other
ranks in that graph's collectives only (mx.distributed).

    wire      frames on the TCP connections; a step as the difference to the one before
    handshake rank 0 waits for the others; they connect to it
    lead      rank 0's connections: what it tells, and how it learns that a worker is lost
    follower  a worker's connection
    local     ranks that rank 0 starts on its own machine
    worker    the loop of a worker
    run       the ranks of an engine, from its options

A model's part, and the ranks as a group of mx.distributed, are in `mlxserve/model/` (rank_group,
split_by_heads, split_by_layers); `workers` there is what rank 0's engine needs of the others.
"""
