"""What a Linux CPU needs, because mlx's wheel for it vectorises little. A Mac imports none of it.

backend      X86Backend: plain mlx's, with attention in float32 written out
decodes      one row of each sequence, in the cheaper of two ways
written_out  attention of chunks in tiles that stay in a core's cache
exponential  2^x, tanh and the sigmoid from operations that a compiler vectorises
reductions   the largest number and the sum of each row
"""
