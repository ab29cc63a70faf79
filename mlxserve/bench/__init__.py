"""`mlxserve bench`: measurements of this machine, always next to a baseline in the same run."""
