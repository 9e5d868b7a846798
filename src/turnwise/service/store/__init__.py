"""What the service remembers, in one SQLite file."""
