"""The included model: its files are in `model/`, and `tests/training` made them."""
