"""Pages of the prefix cache on disk."""
