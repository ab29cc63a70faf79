"""The HTTP API: OpenAI's shapes over `mlxserve.chat`, and nothing that knows pages or arrays."""
