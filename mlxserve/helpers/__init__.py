"""Helper processes: work on untrusted input that may never end, where it can be killed."""
