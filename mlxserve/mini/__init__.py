"""The embedded model: its files in `model/`, and how they were made in `training/`."""
