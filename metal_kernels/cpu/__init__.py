"""The ops in plain mlx, arranged for the speed of a CPU.

backend      CpuBackend: reads runs of consecutive pages without a copy
cascade      decodes with a shared prefix read it once
pool_rows    rows of a pool as views of runs of slots, or as copies of any slots
attention    attention over plain arrays: mlx's fused one, or written out where that is faster
written_out  attention in tiles that stay in a core's cache
latent       attention over latents
exponential  2^x, tanh and the sigmoid from operations that a compiler vectorises
reductions   the largest number and the sum of each row
"""
