"""The HTTP API over `mlxserve.chat`: OpenAI's and Anthropic's dialects and our own routes."""
