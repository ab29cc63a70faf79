"""`mlxserve bench`: what this machine does, always beside a baseline in the same run."""
