"""How the embedded model was made: its data generator, tokenizer, network, training and evaluation.

Run by `python -m tests.training` in a checkout. Importing this package needs the standard library
alone.
"""
