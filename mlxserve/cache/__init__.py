"""The KV cache: page hashes, the pool of pages, and the arrays behind them."""
