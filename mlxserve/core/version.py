"""The package's version, where importing it costs nothing."""

__version__ = "0.1.0"
