"""The tests, importable from the root of the checkout."""
