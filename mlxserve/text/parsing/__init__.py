"""Separates thinking and tool calls from an answer's text while it streams."""
