"""What layers keep of a sequence: one file for each kind, all behind one protocol (`kind.py`)."""
