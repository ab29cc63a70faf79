"""From a folder of files to token ids: loading, the paged forward, sampling.

Everything that computes comes through this package, so here is where the machine is made ready
before the first import of mlx.
"""

from mlxserve.machine import prepare

prepare()
