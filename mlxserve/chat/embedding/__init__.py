"""Models that turn texts into vectors or scores instead of writing: encoders, and decoders trained for that."""
