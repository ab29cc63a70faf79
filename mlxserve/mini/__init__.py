"""The embedded model: its files in `model/`. `tests/training` made them."""
