"""How the embedded model was made: its data generator, tokenizer, network, training and evaluation.

Run by `python -m mlxserve.mini.training`. The server imports none of it, and the wheel leaves it
out. Importing this package needs the standard library alone.
"""
