"""The run directory: one SQLite file that the trainer writes and every other tool reads."""
