"""Developers' measurements: what the scheduler, the API, the screen and long runs cost.

`python -m tests.perf` in a checkout lists them. `mlxserve bench` has the measurements that users run.
"""
