"""Models that turn texts into vectors or scores: encoders, and decoders trained as such."""
