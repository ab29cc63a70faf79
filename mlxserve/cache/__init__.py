"""The KV cache: page hashes, the pool of pages, and their arrays."""
