"""A run's folder: its files, checkpoints and callbacks, and how it continues."""
