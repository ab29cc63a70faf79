"""The model: loading, the paged forward, sampling."""
