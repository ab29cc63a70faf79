"""Constrained decoding: grammars, and the guide that applies them token by token."""
