"""Backend of a Linux CPU, for which mlx's wheel vectorises little. A Mac imports none of it.

backend      X86Backend: plain mlx's, with attention in float32 written out
decodes      one row of each sequence, in the cheaper of two ways
written_out  attention of chunks in tiles that stay in a core's cache
exponential  2^x, tanh and the sigmoid from operations that a compiler vectorises
reductions   the largest number and the sum of each row

Tried, and not kept (`synthetic:llama-100m`, two cores):
- products with pages where they are (`gather_mm`): 0.33 instead of 0.37 ms of a layer of 4 decodes
- one softmax over each decode's own pages: 0.86 of the tokens/s beside other work
- keys and values gathered by two streams: 4 decodes slower, and a pool that another stream reads
  may be copied
- weights times rows instead of rows times weights: 1.07 of the tokens/s of 12 answers, 0.95 of 8
- logits of 16 rows for 7 to 15: 2.5 times as fast on one processor, slower on another
- norms of all layers in one compiled operation: 0.6 of their time up to 4 rows, slower from 8 on
- rotary angles once for all layers: up to 5 % of a step, within the noise
"""
